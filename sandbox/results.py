"""What was observed, as the one result of a call. Pure."""

from __future__ import annotations

from proxy.control import NetworkCounts
from proxy.network import Mode
from sandbox.attempt import AttemptOutcome, Verdict
from sandbox.contract import (
    AttemptRecord,
    CallError,
    DestinationCount,
    NetworkReport,
    OutputChars,
    Status,
    ToolResult,
    Truncated,
    Usage,
)

# What is in force in every attempt that runs at all: there is no weaker mode.
ISOLATION = (
    "user namespace", "mount namespace", "pid namespace", "network namespace", "ipc namespace", "uts namespace",
    "cgroup namespace", "seccomp", "no new privileges", "no capabilities", "read-only root",
)  # fmt: skip


def without_attempt(call_id: str, mode: str, code: str, message: str) -> ToolResult:
    """The result of a call that came to no attempt."""
    return ToolResult(
        call_id=call_id,
        status=Status.ERROR,
        error=CallError(code=code, message=message),
        network=NetworkReport(mode=mode),
    )


def _error(verdict: Verdict) -> CallError | None:
    if verdict.status is Status.SUCCESS:
        return None
    return CallError(code=verdict.cause, message=verdict.message or verdict.cause)


def _network(mode: Mode, counts: NetworkCounts) -> NetworkReport:
    return NetworkReport(
        mode=mode.value, allowed=counts.allowed, denied=counts.denied,
        destinations=[DestinationCount.model_validate(row) for row in counts.destinations],
    )  # fmt: skip


def from_outcome(call_id: str, mode: Mode, outcome: AttemptOutcome, *, memory_method: str) -> ToolResult:
    """The result of a call's one attempt."""
    verdict, output = outcome.verdict, outcome.output
    record = AttemptRecord(
        attempt_id=outcome.attempt_id, started_at=outcome.started_at, ended_at=outcome.ended_at, status=verdict.status,
        cause=verdict.cause, exit_code=verdict.exit_code, signal=verdict.signal, memory_method=memory_method,
        isolation=list(ISOLATION),
    )  # fmt: skip
    return ToolResult(
        call_id=call_id,
        status=verdict.status,
        exit_code=verdict.exit_code,
        stdout=output.stdout.text,
        stderr=output.stderr.text,
        truncated=Truncated(stdout=output.stdout.truncated, stderr=output.stderr.truncated),
        output_chars=OutputChars(stdout=output.stdout.chars, stderr=output.stderr.chars),
        error=_error(verdict),
        attempts=[record],
        usage=Usage(
            wall_seconds=round(outcome.ended_at - outcome.started_at, 6),
            cpu_seconds=outcome.cpu_seconds,
            peak_memory_bytes=outcome.peak_memory_bytes,
        ),
        network=_network(mode, outcome.network),
    )
