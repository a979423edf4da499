"""`/v1/policy/explain`, and what an operator looks at: `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sandbox.owners import Caller
from sandbox.service.auth import OPEN_PATH
from sandbox.service.desk import Desk, answers, caller_of, refusals, said
from sandbox.service.errors import HttpError
from sandbox.service.metrics import CONTENT_TYPE
from sandbox.service.model import NetworkExplanation
from sandbox.service.readiness import Readiness

_MAX_TARGET_CHARS = 8192
_MAX_DOMAINS_CHARS = 8192


class Health(BaseModel):
    """The event loop turns. More is `/readyz`'s to say."""

    status: str = "ok"


_HEALTHY = Health().model_dump_json()


def operating_router(desk: Desk) -> APIRouter:
    """The routes that run no code."""
    router = APIRouter(tags=["operating"])
    service = desk.service

    @router.get(
        "/v1/policy/explain", responses=answers(NetworkExplanation),
        summary="What would become of a request of a call's",
    )  # fmt: skip
    async def explain(
        request: Request,
        url: Annotated[str, Query(max_length=_MAX_TARGET_CHARS, description="`https://host/path`, or `host:port`")],
        language: Annotated[str, Query(max_length=32)] = "python",
        method: Annotated[str, Query(max_length=32)] = "GET",
        allow_network: Annotated[bool, Query(description="as in a call")] = False,
        domains: Annotated[
            str | None, Query(max_length=_MAX_DOMAINS_CHARS, description="as in a call, commas between; empty: `[]`")
        ] = None,
    ) -> Response:
        """Nothing is looked up, and nothing sent."""
        names = None if domains is None else [name.strip() for name in domains.split(",")] if domains else []
        return said(
            await service.explain(
                caller_of(request), url, language=language, allow_network=allow_network, domains=names, method=method
            )
        )

    @router.get(OPEN_PATH, responses={200: {"model": Health}}, summary="Whether the service is alive")
    async def healthz() -> Response:
        return Response(_HEALTHY, media_type="application/json")

    @router.get(
        "/readyz", responses=answers(Readiness) | {503: {"model": Readiness, "description": "Not ready."}},
        summary="Whether the service can run calls",
    )  # fmt: skip
    async def readyz(request: Request) -> Response:
        readiness = await desk.ready()
        shown = readiness if _sees_all(caller_of(request), desk) else readiness.for_others()
        return said(shown, 200 if readiness.ready else 503)

    @router.get("/metrics", responses=_METRICS | refusals(), response_class=Response, summary="Counts, for Prometheus")
    async def metrics(request: Request) -> Response:
        if not _sees_all(caller_of(request), desk):
            raise HttpError(403, "admin_needed", "this is for tokens with `admin: true`")
        return Response(desk.metrics.text(), headers={"content-type": CONTENT_TYPE})

    return router


def _sees_all(caller: Caller, desk: Desk) -> bool:
    """What is so of all tenants together is not for each of them."""
    return caller.admin or not desk.service.loaded.policy.tenants


_METRICS: dict[int | str, Any] = {
    200: {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
