"""One request, one answer: what the ledger has of a call before it is worked on, and what it is told of the end.

Owns: following a request that has the same idempotency key. Must not: know how a call is answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox import results
from sandbox.calls import RunningCall
from sandbox.contract import CodeCall, ToolResult
from sandbox.ledger import Ledger, LedgerUnavailable, State, request_digest
from sandbox.permits import mode_asked


@dataclass(frozen=True, slots=True)
class Answers:
    """Those of one executor. `running` are the calls that it has not answered."""

    ledger: Ledger
    running: Mapping[str, RunningCall]

    async def earlier(self, call: CodeCall, running: RunningCall) -> ToolResult | None:
        """The answer that the call's idempotency key has; None when this call is the first, and is now written down.

        Raises `LedgerUnavailable`.
        """
        looked, terms = False, running.terms
        while (earlier := await self.ledger.begin(running.call_id, call, terms.owner, terms.recording)) is not None:
            if earlier.request != request_digest(call):
                return results.key_conflict(running.call_id, mode_asked(call), earlier.call_id)
            if earlier.state is State.RUNNING and earlier.executor != self.ledger.executor:
                return results.runs_elsewhere(running.call_id, mode_asked(call), earlier.call_id)
            running.note(earlier.call_id)
            if earlier.state is not State.RUNNING:
                return earlier.result or results.lost(earlier.call_id, mode_asked(call))
            if (first := self.running.get(earlier.call_id)) is not None:
                return await first.result()
            if looked:
                return results.lost(earlier.call_id, mode_asked(call))  # its end could not be written down
            looked = True  # else it was answered between the two looks, and the ledger now knows
        running.note(running.call_id)
        return None

    async def give_at_once(self, running: RunningCall, answer: ToolResult) -> None:
        """Answer a call on which no work is done. Of a recorded one, that is kept."""
        if running.terms.recording is not None:
            with contextlib.suppress(LedgerUnavailable):
                call = running.call.model_copy(update={"idempotency_key": None})  # which another may have, and keeps
                await self.ledger.begin(running.call_id, call, running.terms.owner, running.terms.recording)
                await self.ledger.end(running.call_id, answer, begun=False)
                running.note(running.call_id)
        running.answer(answer)

    async def keep(self, running: RunningCall, answer: ToolResult) -> None:
        """Write down the answer of a call. Raises `LedgerUnavailable`."""
        await self.ledger.end(running.call_id, answer, begun=running.may_have_begun)

    async def give_up(self, running: RunningCall) -> None:
        """What is still open in the ledger is lost, or forgotten where no code can have begun."""
        with contextlib.suppress(LedgerUnavailable):
            await self.ledger.lose(running.call_id, begun=running.may_have_begun)
