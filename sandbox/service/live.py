"""A call that was begun through the service and has not ended: what its owner sees of it meanwhile.

Owns: its feed, and what is to be given back at its end. Must not: know other calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from sandbox.calls import BY_CALLER, RunningCall
from sandbox.code_exec import CodeExecResult, Note
from sandbox.contract import Cause, ToolResult
from sandbox.output import Collected
from sandbox.owners import Caller
from sandbox.service.feed import Feed
from sandbox.service.model import Accepted, CallRecord, CallState, Kind
from sandbox.service.records import Details, code_exec_answer


class LiveCall:
    """The handle of a call. Leaving it alone does not end the call.

    `call_id` is the id under which the call is found, which is that of an earlier one with the same idempotency key.
    """

    def __init__(
        self, running: RunningCall, caller: Caller, kind: Kind, *, background: bool, details: Details, feed: Feed,
        position: Callable[[str], int | None], notes: Callable[[Caller], Awaitable[list[Note]]],
    ) -> None:  # fmt: skip
        self.call_id = running.call_id
        self.caller = caller
        self.kind = kind
        self.background = background
        self.feed = feed
        self.submitted_at = time.time()
        self.begun_at: float | None = None
        self.progress = ""
        self.ended = asyncio.Event()
        self._running = running
        self._details = details
        self._position = position
        self._notes = notes
        running.on_stage = self._enter

    @property
    def state(self) -> CallState:
        return "waiting" if self.begun_at is None else "running"

    @property
    def queue_position(self) -> int | None:
        """How many calls are before it; None once it is its turn."""
        return self._position(self._running.call_id)

    @property
    def answer(self) -> ToolResult | None:
        """The answer, if it has been given already: of a call that was detached there is nothing to wait for then."""
        return self._running.given

    def accepted(self) -> Accepted:
        """What is answered to a detached call; it may have ended already, such as one that the policy refuses."""
        state: CallState = self.state
        if self.answer is not None:
            state = "cancelled" if self.answer.cause is Cause.CANCELLED else "finished"
        return Accepted(call_id=self.call_id, task_id=self.call_id, state=state, queue_position=self.queue_position)

    async def noted(self) -> None:
        """Wait until it is written down, so that it is never lost without a word; or answered."""
        self.call_id = await self._running.noted() or self.call_id

    async def result(self) -> ToolResult:
        """Wait for the answer. Raises what `Executor.run` raises."""
        return await self._running.result()

    async def code_exec_result(self) -> CodeExecResult:
        """Wait for the answer in the form of the code_exec contract, with the news of its caller's detached calls."""
        answer = await self.result()
        begun = answer.error is None or answer.error.code != "queue_full"  # else it is told as an error, without notes
        notes = await self._notes(self.caller) if begun else []
        found = code_exec_answer(self._details, answer, background=self.background)
        return found.model_copy(update={"notes": notes})

    async def code_exec_accepted(self) -> CodeExecResult:
        """The answer to a call that was detached, which has not ended."""
        text = f"runs in the background as task `{self.call_id}`; its result comes as a note, or through `tasks`"
        return CodeExecResult(
            success=None,
            output=text,
            call_id=self.call_id,
            task_id=self.call_id,
            timeout_seconds=self._details.timeout_seconds,
            working_dir=self._details.working_dir,
            notes=await self._notes(self.caller),
        )

    def abandon(self) -> None:
        """Nobody waits for its answer any more: ends it, unless it is detached."""
        if not self.background:
            self.cancel("the caller left, and the call was ended")

    def cancel(self, why: str = BY_CALLER) -> None:
        """End it, at whatever stage it is; the answer says so, and why."""
        self._running.cancel(why)

    async def settle(self, seconds: float) -> None:
        """Wait until nothing of it is left, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)

    def record(self) -> CallRecord:
        return CallRecord(
            call_id=self.call_id,
            kind=self.kind,
            state=self.state,
            background=self.background,
            submitted_at=self.submitted_at,
            queue_position=self.queue_position,
            stage=self.progress or self._running.stage,
        )

    def tell_progress(self, text: str) -> None:
        """What the preparation of its packages is at; empty when that is over."""
        self.progress = text
        if text:
            self.feed.tell("progress", text=text)

    def output_so_far(self) -> Collected:
        """What the attempt that runs has written, or the last one."""
        if self._running.attempt is not None:
            return self._running.attempt.output()
        return self._running.outcomes[-1].output if self._running.outcomes else Collected()

    def _enter(self, stage: str) -> None:
        if stage == "preparing":
            self.begun_at = time.time()
        self.feed.tell("state", state=self.state, stage=stage, queue_position=self.queue_position)
