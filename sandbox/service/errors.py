"""What is answered instead of what was asked for: every error as a status, a code and words.

Owns: which error is which status. Must not: log, or tell a caller what is inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from proxy.control import ProxyUnavailable
from sandbox.contract import InvalidCall
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.policy_file import InvalidPolicy
from sandbox.service.model import Busy, NotFound, PlaceRefused, ServiceError
from sandbox.tenants import UnknownTenant

_DEFAULT_RETRY_SECONDS = 1.0


class ErrorDetail(BaseModel):
    """`code` is for programs, `message` for people and models. `problems` has every fault of what was sent, each with
    its path. `retry_after_seconds`: when to come again, also in `Retry-After`. `reference` is in the service's log.
    """

    model_config = ConfigDict(extra="forbid")

    code: str
    message: str
    problems: list[str] | None = None
    retry_after_seconds: float | None = None
    reference: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer from 400 on."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


@dataclass
class HttpError(Exception):
    """An error that is answered as it is."""

    status: int
    code: str
    message: str
    problems: list[str] | None = None
    retry_after_seconds: float | None = None
    reference: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def response(self) -> Response:
        """The answer. `Retry-After` has whole seconds, rounded up."""
        headers = dict(self.headers)
        if self.retry_after_seconds is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_seconds)))
        return Response(self.body(), self.status, headers, "application/json")

    def body(self) -> bytes:
        given = {
            "code": self.code, "message": self.message, "problems": self.problems,
            "retry_after_seconds": self.retry_after_seconds, "reference": self.reference,
        }  # fmt: skip
        told = {name: value for name, value in given.items() if value is not None}
        return json.dumps({"error": told}, separators=(",", ":")).encode()


def http_error(error: Exception) -> HttpError | None:
    """How an error of the layers below is answered; None for what is this side's fault alone."""
    match error:
        case HttpError():
            return error
        case InvalidCall():
            return HttpError(422, error.code, str(error), problems=error.problems)
        case NotFound():
            return HttpError(404, error.code, str(error))
        case PlaceRefused():
            return HttpError(403, error.code, str(error))
        case Busy():
            return HttpError(429, error.code, str(error), retry_after_seconds=_retry(error))
        case ServiceError():
            return HttpError(503, error.code, str(error), retry_after_seconds=_retry(error))
        case IsolationUnavailable():
            return _unavailable("isolation_unavailable", error)
        case ProxyUnavailable():
            return _unavailable("proxy_unavailable", error)
        case LedgerUnavailable():
            return _unavailable("ledger_unavailable", error)
        case UnknownTenant():  # a reload took it away after its token was looked at
            return unauthorized()
        case InvalidPolicy():
            return _unavailable("invalid_policy", error)
    return None


def unauthorized() -> HttpError:
    """What is wrong with a token is nobody's to know who has none."""
    return HttpError(
        401, "unauthorized", "a token is needed: send it as `Authorization: Bearer …`",
        headers={"www-authenticate": 'Bearer realm="sluicegate"'},
    )  # fmt: skip


def head_too_large(max_bytes: int) -> HttpError:
    return HttpError(431, "head_too_large", f"the head of the request has more than {max_bytes} bytes")


def internal_error(reference: str) -> HttpError:
    """What is this side's fault: what it was is in the log, under the reference."""
    return HttpError(500, "internal_error", "the service failed; its log has this reference", reference=reference)


def _unavailable(code: str, error: Exception) -> HttpError:
    return HttpError(503, code, str(error), retry_after_seconds=_DEFAULT_RETRY_SECONDS)


def _retry(error: ServiceError) -> float:
    seconds = error.retry_after_seconds
    return _DEFAULT_RETRY_SECONDS if seconds is None else seconds
