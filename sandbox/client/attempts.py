"""When a request is sent again, and when its answer is the answer. Pure: stories that are told what happened.

Owns: what is safe to send twice, and what takes several requests. Must not: send, sleep, or read a clock; the clients
do, each in its way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from sandbox.client.errors import lost, refusal, unreadable
from sandbox.client.operations import MAX_WAIT_SECONDS, Failure, Operation, Reply, events, output, wait
from sandbox.service.model import CallRecord, FeedEvent, OutputSlice, StreamName

ENDED_EARLY = Failure(True, "the stream of events ended before the call did")
_FIRST_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is sent again: after a connection that was refused or lost, and after an answer that says
    when to come again (429, 503), if that is within `max_pause_seconds`.
    """

    lost: int = 2
    busy: int = 0
    max_pause_seconds: float = 60.0

    def pause(self, number: int) -> float:
        """Seconds before the `number`th attempt at a connection that was lost."""
        return min(_FIRST_PAUSE_SECONDS * 2.0 ** (number - 1), _MAX_PAUSE_SECONDS)


def attempts[T](operation: Operation[T], retries: Retries) -> Generator[float, Reply | Failure, T]:
    """Yields how many seconds to wait before the request is sent, is told what came, and returns the answer.

    Sent again is what was certainly not begun (the connection was refused, or the service said so) and what does no
    harm twice (it reads, or has an idempotency key). Raises `ServiceError`.
    """
    times_lost = times_busy = 0
    pause = 0.0
    while True:
        came = yield pause
        if isinstance(came, Failure):
            times_lost += 1
            if times_lost > retries.lost or came.timed_out or (came.sent and not operation.repeatable):
                raise lost(came)
            pause = retries.pause(times_lost)
        elif came.status < 400 or came.status in operation.answers:
            try:
                return operation.read(came)
            except ValueError as error:  # pydantic's is one
                raise unreadable(came, str(error)) from error
        else:
            error_told = refusal(came)
            times_busy += 1
            seconds = error_told.retry_after_seconds
            told = came.status in (429, 503) and seconds is not None and seconds <= retries.max_pause_seconds
            if not told or times_busy > retries.busy:
                raise error_told
            assert seconds is not None
            pause = seconds


def all_output(call_id: str, stream: StreamName, limit: int) -> Generator[Operation[OutputSlice], OutputSlice, str]:
    """Yields what to ask, is told the answer, and returns the whole text."""
    parts, offset = [], 0
    while True:
        part = yield output(call_id, stream, offset, limit)
        parts.append(part.text)
        if part.next_offset is None or part.next_offset <= offset:
            return "".join(parts)
        offset = part.next_offset


def until_ended(
    task_id: str, timeout: float | None, clock: Callable[[], float]
) -> Generator[Operation[CallRecord], CallRecord, CallRecord]:
    """Likewise, with a task's record when it has ended, or `timeout` seconds have passed."""
    deadline = None if timeout is None else clock() + timeout
    while True:
        record = yield wait(task_id, MAX_WAIT_SECONDS if deadline is None else deadline - clock())
        if record.state not in ("waiting", "running") or (deadline is not None and clock() >= deadline):
            return record


class Following:
    """One reader of a call's events, over as many connections as that takes."""

    def __init__(self, call_id: str, retries: Retries, after: int = 0) -> None:
        self._call_id, self._retries, self._after = call_id, retries, after
        self._times_lost = 0
        self.over = False

    def request(self) -> Operation[None]:
        """What to send now: everything after what was seen."""
        return events(self._call_id, self._after)

    def is_new(self, event: FeedEvent) -> bool:
        """Note an event that came; false for one that was seen before."""
        if event.id <= self._after:
            return False
        self._after, self._times_lost = event.id, 0
        self.over = event.kind == "result"
        return True

    def broken(self, failure: Failure) -> float:
        """The stream ended before the call did: seconds to wait before the next. Raises `ServiceError` at last."""
        self._times_lost += 1
        if self._times_lost > self._retries.lost:
            raise lost(failure)
        return self._retries.pause(self._times_lost)
