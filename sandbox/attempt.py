"""One attempt: one run of the code in one fresh sandbox, from launch to a classified ending.

Whatever happens, when `run_attempt` returns or raises, the sandbox is gone and the proxy serves it no more.
Owns: the order of the steps and the evidence. Must not: know policies, or try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.control import AttemptEnd, AttemptStart, NetworkCounts, Proxy, ProxyUnavailable
from proxy.network import Grant
from sandbox.contract import MAX_STDERR_CHARS, MAX_STDOUT_CHARS, Status
from sandbox.isolation.client import Ending, IsolationUnavailable, KillReason, Launcher, Sandbox
from sandbox.isolation.plan import MIB, LaunchPlan
from sandbox.isolation.pool import WarmPool
from sandbox.output import Collected, Collector

type Sink = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended, proven. `cause` is one of the codes in `docs/results.md`."""

    status: Status
    cause: str
    message: str | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def infrastructure(self) -> bool:
        return self.cause in INFRASTRUCTURE


_KILL_SECONDS = 10.0  # a kill takes milliseconds
INFRASTRUCTURE = frozenset({"isolation_failed", "proxy_lost", "launcher_lost", "proxy_unavailable"})


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """All that was observed of one attempt. Times are seconds since the epoch."""

    attempt_id: str
    started_at: float
    ended_at: float
    verdict: Verdict
    output: Collected
    network: NetworkCounts = field(default_factory=NetworkCounts)
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """What to run, under what, for how long."""

    plan: LaunchPlan
    grant: Grant
    code: bytes
    language: str
    domains: tuple[str, ...] | None
    wall_seconds: float
    stdout_sink: Sink | None = None
    stderr_sink: Sink | None = None


async def run_attempt(spec: AttemptSpec, pool: WarmPool, proxy: Proxy) -> AttemptOutcome:
    """Run the code once. Failures of our own side are a verdict too; only cancellation is raised."""
    started = time.time()
    collector = Collector(
        MAX_STDOUT_CHARS, MAX_STDERR_CHARS, stdout_sink=spec.stdout_sink, stderr_sink=spec.stderr_sink
    )
    verdict = Verdict(Status.KILLED, "cancelled")
    network, ending = NetworkCounts(), None
    sandbox: Sandbox | None = None
    collecting: asyncio.Task[None] | None = None
    attaching = False
    try:
        sandbox = await pool.launch(spec.plan, code=spec.code)
        attaching = True  # from here on the proxy may have it, whether or not its answer is waited for
        await proxy.attach(spec.grant, sandbox.listeners, AttemptStart(spec.language, spec.domains))
        sandbox.close_listeners()
        collecting = asyncio.create_task(collector.collect(sandbox.stdout, sandbox.stderr))
        await sandbox.release()
        ending = await _watch(sandbox, pool.launcher, proxy, spec.wall_seconds)
        await collecting
        if pool.launcher.lost.is_set() and ending.failure is not None:
            raise IsolationUnavailable(ending.failure)
        verdict = classify(ending, wall_seconds=spec.wall_seconds, memory_bytes=spec.plan.memory_bytes)
    except IsolationUnavailable as error:
        verdict = Verdict(
            Status.ERROR, "launcher_lost" if pool.launcher.lost.is_set() else "isolation_failed", str(error)
        )
    except ProxyUnavailable as error:
        verdict = Verdict(Status.ERROR, "proxy_lost" if proxy.lost.is_set() else "proxy_unavailable", str(error))
    finally:
        if collecting is not None:  # before its descriptors are closed, and their numbers become another attempt's
            collecting.cancel()
            await asyncio.wait([collecting])
        if sandbox is not None:
            await asyncio.shield(sandbox.close())
        ended = time.time()
        if attaching:
            end = AttemptEnd(verdict.status.value, verdict.cause, verdict.exit_code, round(ended - started, 6))
            with contextlib.suppress(ProxyUnavailable):
                network = await asyncio.shield(proxy.detach(spec.grant.attempt_id, end))
    return AttemptOutcome(
        spec.grant.attempt_id, started, ended, verdict, collector.finish(), network,
        ending.cpu_seconds if ending else None, ending.peak_memory_bytes if ending else None,
    )  # fmt: skip


async def _watch(sandbox: Sandbox, launcher: Launcher, proxy: Proxy, wall_seconds: float) -> Ending:
    """Wait for the end, or bring it about: when the time is up, or the proxy is lost.

    A launcher that does not end a sandbox when told to is ended itself, which ends all of its sandboxes.
    """
    ended = asyncio.create_task(sandbox.ended())
    proxy_lost = asyncio.create_task(proxy.lost.wait())
    try:
        await asyncio.wait({ended, proxy_lost}, timeout=wall_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await sandbox.kill(KillReason.PROXY_LOST if proxy_lost.done() else KillReason.TIMEOUT)
            await asyncio.wait({ended}, timeout=_KILL_SECONDS)
            if not ended.done():
                os.kill(launcher.pid, signal.SIGKILL)
        return await ended
    finally:
        for task in (ended, proxy_lost):
            task.cancel()


def classify(ending: Ending, *, wall_seconds: float, memory_bytes: int) -> Verdict:
    """The verdict that the evidence proves: our own kill first, then the kernel's counters, then the wait status."""
    too_long = f"the program was still running after {wall_seconds:g} s, and was ended with all that it had started"
    too_large = (
        f"the program and all that it had started used more than {memory_bytes // MIB} MiB of memory, and was ended"
    )
    match ending.killed_by_us:
        case KillReason.TIMEOUT:
            return Verdict(Status.TIMEOUT, "wall_clock", too_long)
        case KillReason.MEMORY:
            return Verdict(Status.KILLED, "memory", too_large)
        case KillReason.PROXY_LOST:
            return Verdict(Status.ERROR, "proxy_lost", "the proxy was lost while the code ran")
        case KillReason.CANCELLED:
            return Verdict(Status.KILLED, "cancelled", "the caller ended the call")
    if ending.failure is not None:
        return Verdict(Status.ERROR, "isolation_failed", ending.failure)
    if ending.oom_kills:
        return Verdict(Status.KILLED, "memory", too_large, exit_code=ending.exit_code, signal=ending.signal)
    if ending.signal is not None:
        return Verdict(Status.ERROR, "signal", f"the program was ended by signal {ending.signal}", signal=ending.signal)
    if ending.exit_code is None:
        return Verdict(Status.KILLED, "no_report", "the program ended its own sandbox, so how it ended is not known")
    if ending.exit_code == 0:
        return Verdict(Status.SUCCESS, "exit", exit_code=0)
    return Verdict(Status.ERROR, "exit", f"the program exited with {ending.exit_code}", exit_code=ending.exit_code)
