"""The story of one call, top to bottom.

A call comes in, decoded and checked (`contract`). The policy narrows it to limits and a grant, or refuses it before
any attempt (`permits`). The ledger writes it down, or has its answer already (`ledger`). It waits for its turn
(`admission`), and for its packages (`packages.supply`). The backend has the launcher and the proxy up; the launch plan
is made; the attempt runs (`attempt`).
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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.control import ProxyUnavailable
from sandbox import results
from sandbox.admission import Admission, QueueFull
from sandbox.answers import Answers
from sandbox.attempt import Attempt, AttemptSpec
from sandbox.backend import Backend
from sandbox.call_log import report_refusal
from sandbox.calls import RunningCall
from sandbox.contract import Cause, CodeCall, ToolResult
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import MIB
from sandbox.languages import Languages
from sandbox.ledger import LedgerUnavailable
from sandbox.narrowing import Refused
from sandbox.packages.preparation import NotPrepared, SnapshotFailed
from sandbox.packages.supply import Snapshot, Supply
from sandbox.permits import Permit, Permits, mode_asked
from sandbox.policy_file import LoadedPolicy

_log = logging.getLogger("sluicegate")


@dataclass(frozen=True, slots=True)
class Story:
    """All that answering calls takes, under the policy of one tenant or of none.

    A call waits for its turn at each of the `admissions`: that of its tenant, and that of all.
    """

    policy: LoadedPolicy
    audit_path: Path
    permits: Permits
    answers: Answers
    admissions: Sequence[Admission]
    supply: Supply
    backend: Backend
    languages: Languages

    async def tell(self, call: CodeCall, running: RunningCall) -> None:
        """From a call to its one answer. Raises what is neither an attempt's fault nor the policy's answer."""
        arrived = asyncio.get_running_loop().time()
        try:
            permit = await self.permits.narrow(call, running.call_id)
        except Refused as refused:
            message = await report_refusal(self.audit_path, self.policy, running.call_id, call, refused)
            await self.answers.give_at_once(
                running, results.refused(running.call_id, mode_asked(call), refused, message)
            )
            return
        except SnapshotFailed as error:
            failed = results.failed(running.call_id, mode_asked(call), "snapshot_failed", error)
            await self.answers.give_at_once(running, failed)
            return
        deadline = arrived + permit.limits.timeout_seconds + self.policy.policy.attempts.margin_seconds
        work = asyncio.create_task(self._see_through(call, running, permit, deadline))
        try:
            await asyncio.wait({work}, timeout=deadline - asyncio.get_running_loop().time())
            running.answer(work.result() if work.done() else results.so_far(running, permit.grant.mode))
        finally:
            running.cancel()
            await asyncio.wait({work})

    async def _see_through(self, call: CodeCall, running: RunningCall, permit: Permit, deadline: float) -> ToolResult:
        """The answer of a call: an earlier one, or that of its own attempts, once it is written down."""
        mode = permit.grant.mode
        try:
            earlier = await running.unless_cancelled(self.answers.earlier(call, running))
            if earlier is not None:
                return earlier
            answer = await self._work(call, running, permit, deadline)
            answer = running.given or answer  # the deadline's, if that has passed
            if not running.may_have_begun and running.terms.recording is None:
                running.answer(answer)  # nothing is kept of it, so that it need not wait for the ledger
            await self.answers.keep(running, answer)
        except LedgerUnavailable as error:
            await self.answers.give_up(running)
            if not running.outcomes:
                return results.failed(running.call_id, mode, "ledger_unavailable", error)
            _log.warning("the answer of %s is not kept for its idempotency key: %s", running.call_id, error)
            return results.conclude(running, mode, None)
        except BaseException:
            await self.answers.give_up(running)
            raise
        return answer

    async def _refusal(self, running: RunningCall, why: Refused) -> ToolResult:
        """The answer to what the policy refuses, once it is in the audit log."""
        message = await report_refusal(self.audit_path, self.policy, running.call_id, running.call, why)
        return results.refused(running.call_id, mode_asked(running.call), why, message)

    @contextlib.asynccontextmanager
    async def _turn(self, running: RunningCall) -> AsyncIterator[bool]:
        """Hold a place of the tenant's and one of all, once there are. Raises `QueueFull`."""
        async with contextlib.AsyncExitStack() as stack:
            for admission in self.admissions:
                turn = admission.turn(running.call_id, lambda: running.enter("waiting"))
                await stack.enter_async_context(turn)
            running.enter("preparing")
            yield True

    async def _work(self, call: CodeCall, running: RunningCall, permit: Permit, deadline: float) -> ToolResult:
        """Wait for the call's turn, have its packages prepared, and see it through."""
        mode = permit.grant.mode
        async with contextlib.AsyncExitStack() as stack:
            try:
                if await running.unless_cancelled(stack.enter_async_context(self._turn(running))):
                    snapshot = await self._packages(running, permit, stack)
                    if snapshot is not None:
                        return await self._attempts(call, running, permit, snapshot.tree, deadline)
            except QueueFull as full:
                return results.queue_full(running.call_id, mode, full)
            except NotPrepared as error:
                return results.not_prepared(running.call_id, mode, error)
            except (SnapshotFailed, IsolationUnavailable, ProxyUnavailable) as error:
                return results.failed(running.call_id, mode, "snapshot_failed", error)
        return results.cancelled(running.call_id, mode, running.why)

    async def _packages(
        self, running: RunningCall, permit: Permit, stack: contextlib.AsyncExitStack
    ) -> Snapshot | None:  # fmt: skip
        """The call's packages, as the policy has them that is in force when they are there; None when it is over."""
        while True:
            running.changed.clear()
            if running.withdrawn is not None:
                return Snapshot(None)  # it comes to no attempt
            permit = running.revised or permit
            supplied = stack.enter_async_context(self.supply.snapshot(permit.wanted, running.progress))
            snapshot = await running.unless_cancelled(supplied, running.changed)
            if not running.changed.is_set():
                return snapshot

    async def _attempts(
        self, call: CodeCall, running: RunningCall, permit: Permit, packages: Path | None, deadline: float
    ) -> ToolResult:
        """Try, and try again where this side failed: each time from nothing, and only what can end in time."""
        loop, unavailable, mode = asyncio.get_running_loop(), None, permit.grant.mode
        accepted = permit.limits.timeout_seconds  # by which its deadline was reckoned
        for number in range(1, self.policy.policy.attempts.max + 1):
            try:
                backend = await running.unless_cancelled(self.backend.ready())
                if running.withdrawn is not None and not running.outcomes:
                    return await self._refusal(running, running.withdrawn)
                permit = running.revised or permit  # whatever comes after this is told to the attempt
                limits, seconds = permit.limits, min(accepted, permit.limits.timeout_seconds)
                late = loop.time() + seconds > deadline
                if backend is None or running.withdrawn is not None or running.cancelled.is_set() or late:
                    break
                plan = self.languages.plan(
                    call.language, call_id=running.call_id, attempt=number, memory_bytes=limits.memory_bytes,
                    call_environment=permit.environment | call.env, packages=packages, workdir=running.workdir,
                )  # fmt: skip
            except (IsolationUnavailable, ProxyUnavailable) as error:
                unavailable = error
                continue
            spec = AttemptSpec(
                plan=plan,
                grant=permit.grant.model_copy(update={"attempt_id": f"{running.call_id}.{number}"}),
                code=call.code.encode(),
                language=call.language,
                domains=None if call.domains is None else tuple(call.domains),
                wall_seconds=seconds,
                max_output_bytes=limits.output_mib * MIB,
                workdir=running.workdir,
            )
            running.enter("running")
            attempt = running.follow(Attempt(spec, running.stdout_sink, running.stderr_sink))
            outcome = await attempt.run(*backend)
            running.add(outcome)
            if outcome.verdict.cause is not Cause.INFRASTRUCTURE:
                break
        return results.conclude(running, mode, unavailable)
