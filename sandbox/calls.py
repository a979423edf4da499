"""A call that runs: its one answer, what is known of it so far, and the way to end it early.

Owns: that a call is answered once. Must not: know what is done to answer it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from proxy.network import Grant
from sandbox.attempt import Attempt, AttemptOutcome, Sink
from sandbox.contract import Cause, CodeCall, ToolResult
from sandbox.ledger import Recording
from sandbox.owners import Owner

if TYPE_CHECKING:
    from sandbox.isolation.plan import Workdir
    from sandbox.narrowing import Refused
    from sandbox.permits import Permit
    from sandbox.workdir import Placed


BY_CALLER = "the caller ended the call"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a call is beside its request: whose it is, what is kept of it, and where in the host's files it runs.

    `placed` remains the caller's to close, once the call has settled.
    """

    owner: Owner = field(default_factory=Owner)
    recording: Recording | None = None
    placed: Placed | None = None


class RunningCall:
    """The caller's handle. The sinks see the bytes of each attempt's output as they come.

    `progress` is told what the preparation of packages is at.
    """

    def __init__(
        self, call_id: str, call: CodeCall, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None,
        progress: Callable[[str], None] | None = None, terms: Terms | None = None,
    ) -> None:  # fmt: skip
        """Raises `TypeError` for a sink that is a coroutine function: nobody would await it."""
        self.call, self.terms = call, terms or Terms()
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
        self.amendments: list[Grant | None] = []
        self.why = BY_CALLER
        self.changed = asyncio.Event()  # another policy has come into force
        self.revised: Permit | None = None
        self.withdrawn: Refused | None = None
        self.stage = "accepted"
        self.on_stage: Callable[[str], None] | None = None
        self.noted_as: str | None = None
        self._noted = asyncio.Event()
        self._answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()

    async def result(self) -> ToolResult:
        """Wait for the answer. Raises what `Executor.run` raises. Not to wait any more doesn't end the call."""
        return await asyncio.shield(self._answer)

    async def noted(self) -> str | None:
        """Wait until the ledger has the call, and it waits for its turn or has it: its id in the ledger.

        That is an earlier call's where that has the same key. None if it has its answer without having been written
        down.
        """
        noted, answered = asyncio.ensure_future(self._noted.wait()), asyncio.ensure_future(self.settled.wait())
        try:
            await asyncio.wait({noted, answered}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            noted.cancel()
            answered.cancel()
        return self.noted_as

    def cancel(self, why: str = BY_CALLER) -> None:
        """End the call, at whatever stage it is: the answer says so. Does nothing to a call that has its answer."""
        if not self.cancelled.is_set():
            self.why = why
        self.cancelled.set()
        if self.attempt is not None:
            self.attempt.cancel()

    async def revise(self, permit: Permit) -> None:
        """Another policy is in force, under which it may do this: an attempt that runs from now on only what both say.

        A running attempt whose proxy can't be told is ended.
        """
        self.revised, self.withdrawn = permit, None
        await self._amend(permit.grant)

    async def withdraw(self, why: Refused, grant: Grant | None) -> None:
        """Another policy is in force, which refuses it: no attempt is begun. One that runs reaches what `grant` says.

        None: nothing more.
        """
        self.revised, self.withdrawn = None, why
        await self._amend(grant)

    async def _amend(self, grant: Grant | None) -> None:
        self.changed.set()
        if self.attempt is None and not self.outcomes:
            return  # its first attempt begins with what was last said, and with nothing of what was said before
        self.amendments.append(grant)
        if self.attempt is not None:
            await self.attempt.amend(grant)

    # --- for the story

    def enter(self, stage: str) -> None:
        """What is done to answer it now: `waiting`, `preparing`, `running`."""
        self.stage = stage
        self._noted.set()
        if self.on_stage is not None:
            self.on_stage(stage)

    def note(self, call_id: str) -> None:
        """The ledger has it, under this id."""
        self.noted_as = call_id
        if call_id != self.call_id:
            self._noted.set()

    def follow(self, attempt: Attempt) -> Attempt:
        """From now on, this is the attempt that a cancellation ends."""
        self.attempt = attempt
        attempt.amendments.extend(self.amendments)
        if self.cancelled.is_set():
            attempt.cancel()
        return attempt

    @property
    def may_have_begun(self) -> bool:
        """Whether the call's code may have run, however little of it: what must not run again under its key."""
        return any(outcome.begun for outcome in self.outcomes) or (self.attempt is not None and self.attempt.begun)

    @property
    def workdir(self) -> Workdir | None:
        """Where in the host's files it runs; None: nowhere."""
        return None if self.terms.placed is None else self.terms.placed.workdir

    def add(self, outcome: AttemptOutcome) -> None:
        """The attempt that was followed has ended so."""
        if self.terms.placed is not None:
            self.terms.placed.remove_script()  # else another attempt could not write its own
        self.attempt = None
        if outcome.verdict.cause is Cause.CANCELLED:
            outcome = replace(outcome, verdict=replace(outcome.verdict, message=self.why))
        self.outcomes.append(outcome)

    async def unless_cancelled[T](self, work: Coroutine[Any, Any, T], *others: asyncio.Event) -> T | None:
        """What `work` gives; None when the call is cancelled before that, or one of `others` is set: `work` is, too."""
        task = asyncio.ensure_future(work)
        reasons = [asyncio.ensure_future(event.wait()) for event in (self.cancelled, *others)]
        try:
            await asyncio.wait({task, *reasons}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for reason in reasons:
                reason.cancel()
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
