"""A call that runs: its one answer, what is known of it so far, and the way to end it early.

Owns: that a call is answered once. Must not: know what is done to answer it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from sandbox.attempt import Attempt, AttemptOutcome, Sink
from sandbox.contract import ToolResult


class RunningCall:
    """The caller's handle. The sinks see the bytes of each attempt's output as they come.

    `progress` is told what the preparation of packages is at.
    """

    def __init__(
        self, call_id: str, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """Raises `TypeError` for a sink that is a coroutine function: nobody would await it."""
        for sink in (stdout_sink, stderr_sink, progress):
            if inspect.iscoroutinefunction(sink):
                raise TypeError("a sink is a plain function of bytes: it is called as output comes, and must not block")
        self.call_id = call_id
        self.stdout_sink, self.stderr_sink, self.progress = stdout_sink, stderr_sink, progress
        self.outcomes: list[AttemptOutcome] = []
        self.attempt: Attempt | None = None
        self.cancelled = asyncio.Event()
        self.settled = asyncio.Event()
        self.given: ToolResult | None = None
        self._answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()

    async def result(self) -> ToolResult:
        """Wait for the answer. Raises what `Executor.run` raises. Not to wait any more doesn't end the call."""
        return await asyncio.shield(self._answer)

    def cancel(self) -> None:
        """End the call, at whatever stage it is: the answer says so. Does nothing to a call that has its answer."""
        self.cancelled.set()
        if self.attempt is not None:
            self.attempt.cancel()

    # --- for the story

    def follow(self, attempt: Attempt) -> Attempt:
        """From now on, this is the attempt that a cancellation ends."""
        self.attempt = attempt
        if self.cancelled.is_set():
            attempt.cancel()
        return attempt

    @property
    def may_have_begun(self) -> bool:
        """Whether the call's code may have run, however little of it: what must not run again under its key."""
        return any(outcome.begun for outcome in self.outcomes) or (self.attempt is not None and self.attempt.begun)

    def add(self, outcome: AttemptOutcome) -> None:
        """The attempt that was followed has ended so."""
        self.attempt = None
        self.outcomes.append(outcome)

    async def unless_cancelled[T](self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` gives; None when the call is cancelled before that, and `work` then is, too."""
        task, cancelled = asyncio.ensure_future(work), asyncio.ensure_future(self.cancelled.wait())
        try:
            await asyncio.wait({task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            cancelled.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def answer(self, result: ToolResult) -> None:
        """Give the answer. The first one counts."""
        if not self._answer.done():
            self.given = result
            self._answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End without an answer, by what is this side's fault and no attempt's."""
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # seen, though perhaps nobody waits
