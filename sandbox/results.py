"""What was observed, as the one result of a call. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.control import NetworkCounts, ProxyUnavailable
from proxy.network import Mode
from sandbox.admission import QueueFull
from sandbox.attempt import AttemptOutcome, Verdict
from sandbox.calls import BY_CALLER, RunningCall
from sandbox.contract import (
    AttemptRecord,
    CallError,
    Cause,
    DestinationCount,
    NetworkReport,
    OutputChars,
    PackageFault,
    PerStream,
    Status,
    ToolResult,
    Usage,
)
from sandbox.narrowing import Refused
from sandbox.packages.preparation import NotPrepared
from sandbox.packages.supply import PackagesRefused

_RETRY_SECONDS = 1.0
_TOO_LATE = "the call took longer than its timeout and the margin beyond it, and was given up"
MAX_DESTINATIONS = 100

# What is in force in every attempt that runs at all: there is no weaker mode.
ISOLATION = (
    "user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace", "uts namespace",
    "cgroup namespace", "seccomp", "no new privileges", "no capabilities", "read-only root",
)  # fmt: skip


def without_attempt(
    call_id: str, mode: str, cause: Cause, error: CallError, status: Status = Status.ERROR
) -> ToolResult:
    """The result of a call that came to no attempt."""
    return ToolResult(call_id=call_id, status=status, cause=cause, error=error, network=NetworkReport(mode=mode))


def invalid(code: str, problems: Sequence[str]) -> ToolResult:
    """For who wants a result where there is no call: what was given is none, or the policy is none."""
    cause = Cause.INVALID_CALL if code == "invalid_call" else Cause.INFRASTRUCTURE
    return without_attempt("", "", cause, CallError(code=code, message="; ".join(problems)))


def refused(call_id: str, mode: Mode, why: Refused, message: str) -> ToolResult:
    """The policy refuses the call."""
    packages = []
    if isinstance(why, PackagesRefused):
        packages = [
            PackageFault(
                package=one.specifier, reason=str(one.reason), rule=one.rule, message=one.message, hint=one.hint,
                retry_after=None if one.retry_after is None else one.retry_after.timestamp(),
            )
            for one in why.refusals
        ]  # fmt: skip
    error = CallError(code="policy_refused", message=message, reason=why.code, rule=why.rule, packages=packages)
    return without_attempt(call_id, mode, Cause.POLICY_REFUSED, error)


def failed(call_id: str, mode: Mode, code: str, error: Exception) -> ToolResult:
    """This side failed before any attempt."""
    return without_attempt(call_id, mode, Cause.INFRASTRUCTURE, CallError(code=code, message=str(error)))


def not_prepared(call_id: str, mode: Mode, why: NotPrepared) -> ToolResult:
    """Packages of the call are refused by the policy, or cannot be had: never both at once."""
    packages = [
        PackageFault(
            package=one.package, version=one.version, reason=str(one.reason), rule=one.rule, message=one.detail,
            hint=one.hint, retry_after=None if one.retry_after is None else one.retry_after.timestamp(),
        )
        for one in why.faults
    ]  # fmt: skip
    message = "; ".join(f"{one.reason}: `{one.package}`: {one.message}" for one in packages)
    if not why.refused:
        error = CallError(code="package_unavailable", message=message, reason=packages[0].reason, packages=packages)
        return without_attempt(call_id, mode, Cause.PACKAGE_UNAVAILABLE, error)
    error = CallError(
        code="policy_refused", message=message, reason=packages[0].reason, rule=packages[0].rule, packages=packages
    )
    return without_attempt(call_id, mode, Cause.POLICY_REFUSED, error)


def queue_full(call_id: str, mode: Mode, full: QueueFull) -> ToolResult:
    error = CallError(code="queue_full", message=str(full), retry_after_seconds=full.retry_after_seconds)
    return without_attempt(call_id, mode, Cause.INFRASTRUCTURE, error)


def cancelled(call_id: str, mode: Mode | str, why: str = BY_CALLER) -> ToolResult:
    """The call was ended before its code ran."""
    error = CallError(code="cancelled", message=f"{why} before its code ran")
    return without_attempt(call_id, mode, Cause.CANCELLED, error, Status.KILLED)


def key_conflict(call_id: str, mode: Mode, first: str) -> ToolResult:
    """The call's idempotency key belongs to another request."""
    message = (
        f"the idempotency key was given with another request before, `{first}`: give each request a key of its own"
    )
    return without_attempt(call_id, mode, Cause.INVALID_CALL, CallError(code="idempotency_conflict", message=message))


def runs_elsewhere(call_id: str, mode: Mode, first: str) -> ToolResult:
    """Another executor works on the request that has the call's idempotency key."""
    message = f"another executor runs the request with this idempotency key, as `{first}`"
    error = CallError(code="call_running", message=message, retry_after_seconds=_RETRY_SECONDS)
    return without_attempt(call_id, mode, Cause.INFRASTRUCTURE, error)


def lost(call_id: str, mode: Mode | str) -> ToolResult:
    """The call was lost with its executor."""
    message = (
        "the executor ended while this call ran: whether its code ran, and how far, is not known. It is not run again, "
        "and no other is under its idempotency key, if it has one"
    )
    return without_attempt(call_id, mode, Cause.INFRASTRUCTURE, CallError(code="executor_lost", message=message))


def conclude(running: RunningCall, mode: Mode, unavailable: Exception | None) -> ToolResult:
    """The result of a call on which no more work is done; `unavailable` is what kept the last try from starting."""
    if running.outcomes:
        return from_outcomes(running.call_id, mode, running.outcomes)
    if running.cancelled.is_set():
        return cancelled(running.call_id, mode, running.why)
    if unavailable is not None:
        code = "proxy_unavailable" if isinstance(unavailable, ProxyUnavailable) else "isolation_unavailable"
        return failed(running.call_id, mode, code, unavailable)
    error = CallError(code="deadline", message=_TOO_LATE)
    return without_attempt(running.call_id, mode, Cause.WALL_CLOCK, error, Status.TIMEOUT)


def so_far(running: RunningCall, mode: Mode) -> ToolResult:
    """The result of a call whose deadline has passed while it is still worked on."""
    outcomes = list(running.outcomes)
    if outcomes and outcomes[-1].verdict.cause is not Cause.INFRASTRUCTURE:
        return from_outcomes(running.call_id, mode, outcomes)  # it had come to its end, and was being written down
    error = CallError(code="deadline", message=_TOO_LATE)
    if running.attempt is not None:
        outcomes.append(running.attempt.outcome(Verdict(Status.TIMEOUT, Cause.WALL_CLOCK, _TOO_LATE, code="deadline")))
    if not outcomes:
        return without_attempt(running.call_id, mode, Cause.WALL_CLOCK, error, Status.TIMEOUT)
    last = {"status": Status.TIMEOUT, "cause": Cause.WALL_CLOCK, "error": error}
    return from_outcomes(running.call_id, mode, outcomes).model_copy(update=last)


def from_outcomes(call_id: str, mode: Mode, outcomes: Sequence[AttemptOutcome]) -> ToolResult:
    """The result of a call that came to attempts: the last one's ending and output, and the account of all."""
    last = outcomes[-1]
    verdict, output = last.verdict, last.output
    return ToolResult(
        call_id=call_id,
        status=verdict.status,
        cause=verdict.cause,
        exit_code=verdict.exit_code,
        stdout=output.stdout.text,
        stderr=output.stderr.text,
        truncated=PerStream(stdout=output.stdout.truncated, stderr=output.stderr.truncated),
        replaced=PerStream(stdout=output.stdout.replaced, stderr=output.stderr.replaced),
        output_chars=OutputChars(stdout=output.stdout.chars, stderr=output.stderr.chars),
        error=_error(verdict),
        attempts=[_record(outcome) for outcome in outcomes],
        usage=Usage(
            wall_seconds=round(sum(outcome.ended_at - outcome.started_at for outcome in outcomes), 6),
            cpu_seconds=_total([outcome.evidence.cpu_seconds for outcome in outcomes]),
            peak_memory_bytes=max(
                (o.evidence.peak_memory_bytes for o in outcomes if o.evidence.peak_memory_bytes is not None),
                default=None,
            ),
        ),
        network=_network(mode, [outcome.network for outcome in outcomes]),
    )


def _error(verdict: Verdict) -> CallError | None:
    if verdict.status is Status.SUCCESS:
        return None
    return CallError(code=verdict.error_code, message=verdict.message or verdict.error_code)


def _record(outcome: AttemptOutcome) -> AttemptRecord:
    verdict = outcome.verdict
    return AttemptRecord(
        attempt_id=outcome.attempt_id,
        started_at=outcome.started_at,
        ended_at=outcome.ended_at,
        status=verdict.status,
        cause=verdict.cause,
        code=verdict.error_code,
        exit_code=verdict.exit_code,
        signal=verdict.signal,
        memory_method=outcome.memory_method,
        isolation=list(ISOLATION),
        evidence=outcome.evidence,
    )


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 6) if known else None


def _network(mode: str, counts: Sequence[NetworkCounts]) -> NetworkReport:
    rows: dict[tuple[str, int | None, str, str], DestinationCount] = {}
    for count in counts:
        for data in count.destinations:
            row = DestinationCount.model_validate(data)
            key = row.host, row.port, row.decision, row.reason
            if key in rows:
                row = row.model_copy(update={"count": row.count + rows[key].count})
            rows[key] = row
    return NetworkReport(
        mode=mode,
        allowed=sum(count.allowed for count in counts),
        denied=sum(count.denied for count in counts),
        destinations=list(rows.values())[:MAX_DESTINATIONS],
    )
