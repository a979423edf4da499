"""What the routes share: the service behind them, and how answers and errors are written and documented.

Owns: the form of answers. Must not: know single routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sandbox.owners import Caller
from sandbox.service.attendance import Attendance
from sandbox.service.errors import ErrorBody
from sandbox.service.metrics import Metrics
from sandbox.service.readiness import Readiness
from sandbox.service.service import Service

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Desk:
    """What answers requests."""

    service: Service
    metrics: Metrics
    ready: Callable[[], Awaitable[Readiness]]
    attendance: Attendance = field(default_factory=Attendance)

    @property
    def max_body_bytes(self) -> int:
        return self.service.loaded.policy.service.max_body_mib * _MIB


def caller_of(request: Request) -> Caller:
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def said(model: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A model as the answer. It is valid already, and is not looked at again."""
    return Response(model.model_dump_json(), status, headers, "application/json")


def answers(model: type[BaseModel], *errors: int, accepted: type[BaseModel] | None = None) -> dict[int | str, Any]:
    """What a route may answer, for the published description: `model`, and the errors that every route has."""
    told: dict[int | str, Any] = {200: {"model": model, "description": "The answer."}}
    if accepted is not None:
        told[202] = {"model": accepted, "description": "It runs in the background."}
    return told | refusals(*errors)


def refusals(*errors: int) -> dict[int | str, Any]:
    always = (400, 401, 403, 408, 421, 422, 431, 500, 503)
    return {
        status: {"model": ErrorBody, "description": f"{HTTPStatus(status).phrase}."}
        for status in sorted({*always, *errors})
    }
