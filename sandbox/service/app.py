"""The application over HTTP: routes, the frame around them, and their published description.

Theory of operation: `Edge` (one answer, whatever happens) around `Gate` (who asks) around the routes, which decode,
ask the `Service` and encode. MCP is one more route, behind the same gate.

Owns: how they are put together. Must not: listen.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox.call_parsing import path_step
from sandbox.service.auth import OPEN_PATH, Door, Gate
from sandbox.service.desk import Desk
from sandbox.service.edge import Edge
from sandbox.service.errors import HttpError
from sandbox.service.metrics import Metrics
from sandbox.service.model import Draining
from sandbox.service.readiness import Readiness
from sandbox.service.routes_calls import body_schemas, calls_router
from sandbox.service.routes_operating import operating_router
from sandbox.service.routes_tasks import tasks_router
from sandbox.service.service import Service
from sandbox.service.visits import Visits

_DESCRIPTION = (
    "Runs code that an AI agent wrote in fresh sandboxes, with the network that a policy allows and no other."
)
_MAX_PROBLEMS = 100


def build_app(
    service: Service, *, ready: Callable[[], Awaitable[Readiness]], metrics: Metrics, door: Door,
    guests: Sequence[Guest] = (), visits: Visits | None = None,
) -> FastAPI:  # fmt: skip
    """All routes, and those of `guests`, such as MCP's, whose start and end are the caller's business.

    `visits` is for who reloads policies: its `recheck` ends what tokens that are withdrawn had begun.
    """
    app = FastAPI(
        title="Sluicegate", version=version("sluicegate"), description=_DESCRIPTION, docs_url=None, redoc_url=None,
        openapi_url=None, redirect_slashes=False,
        exception_handlers={RequestValidationError: _invalid_request},
    )  # fmt: skip
    desk = Desk(service, metrics, ready)
    for router in (calls_router(desk), tasks_router(desk), operating_router(desk)):
        app.include_router(router)
    document = describe(app)
    described = json.dumps(document, separators=(",", ":")).encode()
    app.add_exception_handler(HTTPException, _Unrouted(document["paths"]).answer)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(described, media_type="application/json")

    app.router.routes.extend(Route(guest.path, guest) for guest in guests)
    app.add_middleware(Gate, service=service, door=door, visits=visits or visits_of(service))
    app.add_middleware(Edge, metrics=metrics)
    return app


def visits_of(service: Service) -> Visits:
    """As many as the policy in force has connections."""
    return Visits(lambda: service.loaded.policy.service.max_connections)


class Guest:
    """An application at a path of ours, for as long as it is open."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self.path = path
        self.open = True
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # as FastAPI's own routes do
        if not self.open:
            raise Draining("the service is about to end", retry_after_seconds=1.0)
        await self._app(scope, receive, send)


class _Unrouted:
    """Answers what the router itself refuses. Of a method that is not allowed it names one route's, not the path's."""

    def __init__(self, paths: Mapping[str, Mapping[str, Any]]) -> None:
        self._methods = [
            (compile_path(path)[0], ", ".join(sorted(method.upper() for method in operations)))
            for path, operations in paths.items()
        ]

    async def answer(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return HttpError(404, "not_found", "there is nothing here").response()
        if error.status_code == 405:
            path = request.scope["path"]
            allowed = next((methods for pattern, methods in self._methods if pattern.match(path)), "GET")
            return HttpError(405, "method_not_allowed", f"only {allowed} here", headers={"allow": allowed}).response()
        return HttpError(error.status_code, "bad_request", str(error.detail).lower()).response()


async def _invalid_request(_: Request, error: Exception) -> Response:
    """A query, a header or a path with faults, each with its place."""
    assert isinstance(error, RequestValidationError)
    problems = [_problem(one) for one in error.errors()][:_MAX_PROBLEMS]
    return HttpError(422, "invalid_request", "; ".join(problems), problems).response()


def _problem(fault: Mapping[str, Any]) -> str:
    where = ".".join(path_step(step) for step in fault["loc"])
    return f"{where}: {str(fault['msg']).lower()}"


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(body_schemas())
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "where the policy has tenants"}
    }
    components["parameters"] = _HEADERS
    document["security"] = [{"token": []}, {}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                _leave_out_null(parameter)
            if path == OPEN_PATH:
                operation["security"] = []
            elif path.startswith("/v1/"):
                names = _HEADERS if path == "/v1/code_exec" else ("user",)
                operation.setdefault("parameters", []).extend({"$ref": f"#/components/parameters/{n}"} for n in names)
    return document


def _leave_out_null(parameter: dict[str, Any]) -> None:
    """A parameter that may be left out has no way to be null."""
    schema = parameter["schema"]
    if "anyOf" in schema:
        (kind,) = (choice for choice in schema.pop("anyOf") if choice != {"type": "null"})
        parameter["schema"] = schema | kind


_HEADERS: dict[str, Any] = {
    "user": {
        "name": "Sluicegate-User", "in": "header", "required": False,
        "description": "the user within the tenant, or on this host; without it `default`",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$"},
    },
    "directory": {
        "name": "Sluicegate-Working-Directory", "in": "header", "required": False,
        "description": "the client's own working directory, for code_exec calls of admins",
        "schema": {"type": "string", "pattern": "^/"},
    },
}  # fmt: skip
