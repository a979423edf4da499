"""What the service says of calls and tasks, in any transport. Pure.

A call is one request to run code. A task is a call that was detached; its id is its call's.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox.code_exec import CodeExecResult, Note
from sandbox.contract import ToolResult

type Kind = Literal["code_execution", "code_exec"]
type CallState = Literal["waiting", "running", "finished", "cancelled", "lost"]
type StreamName = Literal["stdout", "stderr"]


class ServiceError(Exception):
    """What a caller is told instead of an answer. `code` is one of those in `docs/service.md`."""

    code = "error"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Busy(ServiceError):
    """A tenant has as many calls open as it may, or sends them too fast: nothing was begun. `rate_limited`, `busy`."""

    def __init__(self, code: Literal["rate_limited", "busy"], message: str, retry_after_seconds: float) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.code = code


class QueueIsFull(ServiceError):
    """The service as a whole has as many calls open as it may: nothing was begun."""

    code = "queue_full"


class Draining(ServiceError):
    """The service is about to end, and begins nothing more."""

    code = "draining"


class NotFound(ServiceError):
    """There is no such call, as far as this caller can see."""

    code = "not_found"


class PlaceRefused(ServiceError):
    """The client's directory is one that no code may have: nothing was begun."""

    code = "working_directory_refused"


class Unavailable(ServiceError):
    """This side failed: the records cannot be read or written (`ledger_unavailable`), or a user's directory can't be
    had (`directory_unavailable`).
    """

    def __init__(
        self, message: str, code: Literal["ledger_unavailable", "directory_unavailable"] = "ledger_unavailable"
    ) -> None:
        super().__init__(message)
        self.code = code


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Accepted(_View):
    """A call that was detached. `queue_position` is the number of calls before it, None once it runs."""

    call_id: str
    task_id: str
    state: CallState
    queue_position: int | None = None


class CallRecord(_View):
    """What is known of a call. Times are seconds since the epoch.

    `result` is there once it is `finished` or `cancelled`. `code_exec` is the same answer in that contract's form, for
    a call of that kind. A call that is `lost` ended with its service: whether its code ran, and how far, is not known.
    """

    call_id: str
    kind: Kind
    state: CallState
    background: bool
    submitted_at: float
    ended_at: float | None = None
    expires_at: float | None = None
    queue_position: int | None = None
    stage: str | None = Field(default=None, description="what its preparation is at, in a few words")
    result: ToolResult | None = None
    code_exec: CodeExecResult | None = None


class CallSummary(_View):
    """A call in a list: no result."""

    call_id: str
    kind: Kind
    state: CallState
    background: bool
    submitted_at: float
    ended_at: float | None = None
    success: bool | None = None


class CallList(_View):
    """Newest first. `next_before` is what to give as `before` for those that follow; None at the end."""

    calls: list[CallSummary]
    next_before: float | None = None


class OutputSlice(_View):
    """A part of what a program wrote, in characters. `kept_chars` is how many can be read, `total_chars` how many it
    wrote. `next_offset` is None at the end of what is there now.
    """

    call_id: str
    stream: StreamName
    offset: int
    text: str
    next_offset: int | None
    kept_chars: int
    total_chars: int
    state: CallState


class Notes(_View):
    """Tasks that have ended, each told once."""

    notes: list[Note]


class Step(_View):
    """What one layer would say."""

    layer: str
    verdict: Literal["allow", "deny"]
    reason: str
    rule: str | None = None
    detail: str = ""


class NetworkExplanation(_View):
    """What would become of a request. `verdict` is `refused` where the call itself would be, before any code ran.

    `hint` says what a caller can do about it.
    """

    target: str
    policy: str
    mode: str
    verdict: Literal["allow", "deny", "refused"]
    reason: str
    rule: str | None = None
    message: str
    hint: str | None = None
    steps: list[Step] = Field(default_factory=list)


class FeedEvent(_View):
    """One event of a call's life, numbered from 1. `gap` stands for output that this reader was too slow for."""

    id: int
    kind: Literal["state", "progress", "stdout", "stderr", "gap", "result"]
    data: dict[str, Any]
