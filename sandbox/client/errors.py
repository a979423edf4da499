"""What a caller is told instead of an answer, each kind by what can be done about it. Pure.

Owns: which answer of the service, or lack of one, is which error. Must not: try anything again (`attempts.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from sandbox import contract
from sandbox.client.operations import Failure, Reply


@dataclass(frozen=True, slots=True)
class _Said:
    """An error, as the service's body has it."""

    code: str
    message: str
    problems: list[str]
    retry_after_seconds: float | None
    reference: str | None


class ServiceError(Exception):
    """The service gave no answer, but this. `code` is one of those in `docs/service.md`.

    `status` is that of HTTP, None where there was none. `problems` are the faults of a call, each with its path.
    `retry_after_seconds` is set where trying again may help. `reference` names a fault of the service in its log.
    """

    def __init__(
        self, code: str, message: str, *, status: int | None = None, problems: list[str] | None = None,
        retry_after_seconds: float | None = None, reference: str | None = None,
    ) -> None:  # fmt: skip
        Exception.__init__(self, message)  # the contract's has a form of its own
        self.code, self.message, self.status = code, message, status
        self.problems = problems or []
        self.retry_after_seconds = retry_after_seconds
        self.reference = reference


class InvalidCall(ServiceError, contract.InvalidCall):
    """What was asked is no request, and stays none. It is also the library's exception of that name."""


class Unauthorised(ServiceError):
    """The token is missing or none of the policy's, or does not permit what was asked."""


class NotFound(ServiceError):
    """There is no such call, as far as this caller can see."""


class Busy(ServiceError):
    """Nothing was begun, since too much is open or was asked: come again after `retry_after_seconds`."""


class Unavailable(ServiceError):
    """Nothing was begun: the service cannot be reached, is about to end, or cannot work now."""


class ConnectionLost(ServiceError):
    """The request was sent, and no answer came. Whether it was done is not known; `sluicegate calls` may know."""


_BY_STATUS: dict[int, type[ServiceError]] = {
    400: InvalidCall,
    401: Unauthorised,
    403: Unauthorised,
    404: NotFound,
    413: InvalidCall,
    415: InvalidCall,
    422: InvalidCall,
    429: Busy,
    503: Unavailable,
}
_MAX_SHOWN_CHARS = 200


def refusal(reply: Reply) -> ServiceError:
    """The error that an answer with an error's status is."""
    said = _said(reply)
    kind = Busy if said.code == "queue_full" else _BY_STATUS.get(reply.status, ServiceError)
    return kind(
        said.code, said.message, status=reply.status, problems=said.problems,
        retry_after_seconds=said.retry_after_seconds, reference=said.reference,
    )  # fmt: skip


def lost(failure: Failure) -> ServiceError:
    """The error that no answer is."""
    if failure.sent:
        return ConnectionLost("no_answer" if failure.timed_out else "connection_lost", failure.message)
    return Unavailable("unreachable", failure.message)


def unreadable(reply: Reply, why: str) -> ServiceError:
    """An answer that is none of the service's: something else answers there, or another version."""
    return ServiceError("unreadable_answer", f"the answer cannot be read: {why}", status=reply.status)


def _said(reply: Reply) -> _Said:
    """What the body says; where it is not of the service's form (a gateway answered), what the status does."""
    fallback = _seconds(reply.headers.get("retry-after"))
    try:
        body = json.loads(reply.body)
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        text = reply.body[:_MAX_SHOWN_CHARS].decode("utf-8", "replace").strip()
        shown = f": {text!a}" if text else ""
        return _Said(f"http_{reply.status}", f"the answer has the status {reply.status}{shown}", [], fallback, None)
    fields = cast("dict[str, Any]", error)
    problems = fields.get("problems")
    reference = fields.get("reference")
    retry_after = _seconds(fields.get("retry_after_seconds"))
    return _Said(
        code=str(fields.get("code") or f"http_{reply.status}"),
        message=str(fields.get("message") or f"the answer has the status {reply.status}"),
        problems=[str(problem) for problem in problems] if isinstance(problems, list) else [],
        retry_after_seconds=fallback if retry_after is None else retry_after,
        reference=None if reference is None else str(reference),
    )


def _seconds(value: object) -> float | None:
    """Seconds that can be waited. A date, which `Retry-After` may be too, is none: our service never sends one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
