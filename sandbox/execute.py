"""The story of one call, top to bottom.

A call comes in, decoded and checked (`contract`). The policy narrows it to limits and a grant, or refuses it before
any attempt (`permits`). The ledger writes it down, or has its answer already (`ledger`). It waits for its turn
(`admission`). The backend has the launcher and the proxy up; the launch plan is made; the attempt runs (`attempt`).
What our own side failed at is tried again, within the call's deadline. What was observed becomes the one answer.

Processes: the executor (this one) starts the proxy and the launcher; the launcher alone starts sandboxes. When the
executor dies, the closed sockets end both, and the launcher takes its sandboxes with it. When the launcher dies, its
sandboxes die with it. When the proxy dies, no sandbox has network, and the attempts that run are ended and reported.

The deadline lies beyond the code's own timeout, and covers waiting, preparing and trying again. When it passes, the
caller has the answer at once, and what is left is cleaned up behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.control import ProxyUnavailable
from proxy.network import Grant
from sandbox import results
from sandbox.admission import Admission, QueueFull
from sandbox.attempt import Attempt, AttemptSpec
from sandbox.backend import Backend
from sandbox.call_log import report_refusal
from sandbox.calls import RunningCall
from sandbox.contract import Cause, CodeCall, ToolResult
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import MIB
from sandbox.languages import Languages
from sandbox.ledger import Ledger, LedgerUnavailable, State, request_digest
from sandbox.narrowing import Limits, Refused
from sandbox.permits import Permits, mode_asked
from sandbox.policy_file import LoadedPolicy

_log = logging.getLogger("sluicegate")


@dataclass(frozen=True, slots=True)
class Story:
    """All that answering calls takes. `running` are the calls that this executor has not answered."""

    policy: LoadedPolicy
    audit_path: Path
    permits: Permits
    ledger: Ledger
    admission: Admission
    backend: Backend
    languages: Languages
    running: Mapping[str, RunningCall]

    async def tell(self, call: CodeCall, running: RunningCall) -> None:
        """From a call to its one answer. Raises what is neither an attempt's fault nor the policy's answer."""
        arrived = asyncio.get_running_loop().time()
        try:
            limits, grant = await self.permits.narrow(call, running.call_id)
            answer = await self._earlier_answer(call, running)
        except Refused as refused:
            message = await report_refusal(self.audit_path, self.policy, running.call_id, call, refused)
            answer = results.refused(running.call_id, mode_asked(call), refused, message)
        except LedgerUnavailable as error:
            answer = results.failed(running.call_id, mode_asked(call), "ledger_unavailable", error)
        if answer is not None:
            running.answer(answer)
            return
        deadline = arrived + limits.timeout_seconds + self.policy.policy.attempts.margin_seconds
        work = asyncio.create_task(self._work(call, running, limits, grant, deadline))
        try:
            await asyncio.wait({work}, timeout=deadline - asyncio.get_running_loop().time())
            answer = work.result() if work.done() else results.so_far(running, grant.mode)
            running.answer(await self._written_down(answer))
        finally:
            running.cancel()
            await asyncio.wait({work})

    async def _earlier_answer(self, call: CodeCall, running: RunningCall) -> ToolResult | None:
        """The answer that the call's idempotency key has; None when this call is the first, and is now written down."""
        while (earlier := await self.ledger.begin(running.call_id, call)) is not None:
            if earlier.request != request_digest(call):
                return results.key_conflict(running.call_id, mode_asked(call), earlier.call_id)
            if earlier.state is not State.RUNNING:
                return earlier.result or results.lost(earlier.call_id, mode_asked(call))
            if earlier.executor != self.ledger.executor:
                return results.runs_elsewhere(running.call_id, mode_asked(call), earlier.call_id)
            if (first := self.running.get(earlier.call_id)) is not None:
                answer = await running.unless_cancelled(first.result())
                return answer or results.cancelled(running.call_id, mode_asked(call))
            # It was answered between the two looks: the ledger knows.
        return None

    async def _work(
        self, call: CodeCall, running: RunningCall, limits: Limits, grant: Grant, deadline: float
    ) -> ToolResult:
        """Wait for the call's turn, and see it through."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                its_turn = await running.unless_cancelled(stack.enter_async_context(self.admission.turn()))
            except QueueFull as full:
                return results.queue_full(running.call_id, grant.mode, full)
            if its_turn:
                return await self._attempts(call, running, limits, grant, deadline)
        return results.cancelled(running.call_id, grant.mode)

    async def _attempts(
        self, call: CodeCall, running: RunningCall, limits: Limits, grant: Grant, deadline: float
    ) -> ToolResult:
        """Try, and try again where this side failed: each time from nothing, and only what can end in time."""
        loop, unavailable = asyncio.get_running_loop(), None
        for number in range(1, self.policy.policy.attempts.max + 1):
            if running.cancelled.is_set() or loop.time() + limits.timeout_seconds > deadline:
                break
            try:
                pool, proxy = await self.backend.ready()
                plan = self.languages.plan(
                    call.language, call_id=running.call_id, attempt=number, memory_bytes=limits.memory_bytes,
                    call_environment=call.env,
                )  # fmt: skip
            except (IsolationUnavailable, ProxyUnavailable) as error:
                unavailable = error
                continue
            spec = AttemptSpec(
                plan=plan,
                grant=grant.model_copy(update={"attempt_id": f"{running.call_id}.{number}"}),
                code=call.code.encode(),
                language=call.language,
                domains=None if call.domains is None else tuple(call.domains),
                wall_seconds=limits.timeout_seconds,
                max_output_bytes=limits.output_mib * MIB,
            )
            attempt = running.follow(Attempt(spec, running.stdout_sink, running.stderr_sink))
            outcome = await attempt.run(pool, proxy)
            running.add(outcome)
            if outcome.verdict.cause is not Cause.INFRASTRUCTURE:
                break
        return results.conclude(running, grant.mode, unavailable)

    async def _written_down(self, answer: ToolResult) -> ToolResult:
        """The answer, once the ledger has it. One that came to no attempt is not kept: the key may be used again."""
        try:
            await self.ledger.end(answer.call_id, answer if answer.attempts else None)
        except LedgerUnavailable as error:
            _log.warning("the answer of %s is not kept for its idempotency key: %s", answer.call_id, error)
        return answer
