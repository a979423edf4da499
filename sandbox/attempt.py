"""One attempt: one run of the code in one fresh sandbox, from launch to a classified ending.

Whatever happens, when `Attempt.run` returns or raises, the sandbox is gone and the proxy serves it no more.
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
from typing import Any

from proxy.control import AttemptEnd, AttemptStart, NetworkCounts, Proxy, ProxyUnavailable
from proxy.network import Grant
from sandbox.contract import MAX_STDERR_CHARS, MAX_STDOUT_CHARS, Cause, Evidence, FullDisk, Status
from sandbox.isolation.client import Ending, FullFilesystem, IsolationUnavailable, KillReason, Launcher, Sandbox
from sandbox.isolation.plan import MIB, WORKSPACE, LaunchPlan, Workdir
from sandbox.isolation.pool import WarmPool
from sandbox.output import Collected, Collector
from sandbox.quota import Excess, find_last_excess, watch

type Sink = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended, proven. `code` is one of the codes in `docs/results.md`, and finer than `cause`."""

    status: Status
    cause: Cause
    message: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    code: str = ""

    @property
    def error_code(self) -> str:
        return self.code or self.cause.value


_KILL_SECONDS = 10.0  # a kill takes milliseconds
_DRAIN_SECONDS = 1.0  # what a pipe holds takes microseconds


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """What to run, under what, for how long. `max_output_bytes` is of both streams together.

    `workdir` is the directory that it is run in; without one it is an empty one of the attempt's own.
    """

    plan: LaunchPlan
    grant: Grant
    code: bytes
    language: str
    domains: tuple[str, ...] | None
    wall_seconds: float
    max_output_bytes: int
    workdir: Workdir | None = None


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """All that was observed of one attempt. Times are seconds since the epoch.

    `begun` is false where it is certain that nothing of the code ran.
    """

    attempt_id: str
    started_at: float
    ended_at: float
    verdict: Verdict
    output: Collected
    evidence: Evidence
    memory_method: str | None
    network: NetworkCounts = field(default_factory=NetworkCounts)
    begun: bool = True


class Attempt:
    """One attempt, from its start on: what it writes can be read at any time, and it can be cancelled at any time."""

    def __init__(
        self, spec: AttemptSpec, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None, *,
        max_stdout_chars: int = MAX_STDOUT_CHARS,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._started = time.time()
        self._cancelled = asyncio.Event()
        self._excess: Excess | None = None
        self._proxy: Proxy | None = None
        self._unguarded = asyncio.Event()
        self.amendments: list[Grant | None] = []
        self.begun = False
        self._collector = Collector(
            max_stdout_chars, MAX_STDERR_CHARS, max_bytes=spec.max_output_bytes, stdout_sink=stdout_sink,
            stderr_sink=stderr_sink,
        )  # fmt: skip

    def cancel(self) -> None:
        """End the code now, at whatever stage; the outcome says so, and has what was written until then."""
        self._cancelled.set()

    async def amend(self, grant: Grant | None) -> None:
        """From now on it may do no more than `grant` allows beside its own; None: nothing.

        Where the proxy can't be told, the attempt is ended as by a proxy that is lost.
        """
        self.amendments.append(grant)
        try:
            if self._proxy is not None:  # else it has no network yet, and the proxy is told before it has
                await self._tell_amendments(self._proxy)
        except ProxyUnavailable:
            self._unguarded.set()

    async def _tell_amendments(self, proxy: Proxy) -> None:
        for grant in self.amendments:
            await proxy.amend(self._spec.grant.attempt_id, grant)

    def output(self) -> Collected:
        """What it has written so far."""
        return self._collector.finish()

    def outcome(
        self, verdict: Verdict, memory_method: str | None = None, ending: Ending | None = None,
        network: NetworkCounts | None = None,
    ) -> AttemptOutcome:  # fmt: skip
        """What is known now, under a verdict."""
        output = self._collector.finish()
        evidence = _evidence(self._spec, ending or Ending(), output.bytes, self._excess)
        return AttemptOutcome(
            self._spec.grant.attempt_id, self._started, time.time(), verdict, output, evidence, memory_method,
            network or NetworkCounts(), self.begun,
        )  # fmt: skip

    async def run(self, pool: WarmPool, proxy: Proxy) -> AttemptOutcome:
        """Run the code once. Failures of our own side are a verdict too; only the task's own cancellation is raised."""
        spec, launcher = self._spec, pool.launcher
        verdict = Verdict(Status.KILLED, Cause.CANCELLED)
        network, ending = NetworkCounts(), None
        sandbox: Sandbox | None = None
        collecting: asyncio.Task[None] | None = None
        attaching = False
        try:
            sandbox = await pool.launch(spec.plan, code=spec.code, workdir=spec.workdir)
            if spec.workdir is not None:
                await sandbox.attach(spec.workdir)
            attaching = True  # from here on the proxy may have it, whether or not its answer is waited for
            await proxy.attach(spec.grant, sandbox.listeners, AttemptStart(spec.language, spec.domains))
            self._proxy = proxy
            await self._tell_amendments(proxy)
            sandbox.close_listeners()
            collecting = asyncio.create_task(self._collector.collect(sandbox.stdout, sandbox.stderr))
            self.begun = True  # as far as anyone can tell until its ending is known
            await sandbox.release()
            ending = await self._watch(sandbox, launcher, proxy)
            self.begun = ending.released or launcher.lost.is_set()
            # Whatever could write has ended. That its pipes have is up to the kernel's collector where the code had
            # sent their ends to itself.
            await asyncio.wait({collecting}, timeout=_DRAIN_SECONDS)
            if collecting.done():
                collecting.result()
            if launcher.lost.is_set() and ending.failure is not None:
                raise IsolationUnavailable(ending.failure)
            if spec.workdir is not None and self._excess is None and ending.released:
                self._excess = await find_last_excess(spec.workdir)
            verdict = classify(ending, spec, self._excess)
        except IsolationUnavailable as error:
            verdict = _failed("launcher_lost" if launcher.lost.is_set() else "isolation_failed", error)
        except ProxyUnavailable as error:
            verdict = _failed("proxy_lost" if proxy.lost.is_set() else "proxy_unavailable", error)
        finally:
            if collecting is not None:  # before its descriptors are closed, and their numbers become another attempt's
                collecting.cancel()
                await asyncio.wait([collecting])
            if sandbox is not None:
                await asyncio.shield(sandbox.close())
            if attaching:
                seconds = round(time.time() - self._started, 6)
                end = AttemptEnd(verdict.status.value, verdict.error_code, verdict.exit_code, seconds)
                with contextlib.suppress(ProxyUnavailable):
                    network = await asyncio.shield(proxy.detach(spec.grant.attempt_id, end))
        return self.outcome(verdict, launcher.memory_method, ending, network)

    async def _watch(self, sandbox: Sandbox, launcher: Launcher, proxy: Proxy) -> Ending:
        """Wait for the end, or bring it about, for the first of the reasons below.

        A launcher that does not end a sandbox when told to is ended itself, which ends all of its sandboxes.
        """
        ended = asyncio.create_task(sandbox.ended())
        reasons: dict[asyncio.Task[Any], KillReason] = {
            asyncio.create_task(proxy.lost.wait()): KillReason.PROXY_LOST,
            asyncio.create_task(self._unguarded.wait()): KillReason.PROXY_LOST,
            asyncio.create_task(self._cancelled.wait()): KillReason.CANCELLED,
            asyncio.create_task(self._collector.flooded.wait()): KillReason.OUTPUT,
        }
        watching = None if self._spec.workdir is None else asyncio.create_task(watch(self._spec.workdir))
        if watching is not None:
            reasons[watching] = KillReason.DISK
        try:
            await asyncio.wait({ended, *reasons}, timeout=self._spec.wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                if watching is not None and watching.done():
                    self._excess = _excess_of(watching)
                await sandbox.kill(next((why for task, why in reasons.items() if task.done()), KillReason.TIMEOUT))
                await asyncio.wait({ended}, timeout=_KILL_SECONDS)
                if not ended.done():
                    os.kill(launcher.pid, signal.SIGKILL)
            return await ended
        finally:
            for task in (ended, *reasons):
                task.cancel()


def _excess_of(watching: asyncio.Task[Excess]) -> Excess:
    try:
        return watching.result()
    except OSError as error:
        raise IsolationUnavailable(f"the working directory could not be watched: {error.strerror}") from error


def _failed(code: str, error: Exception) -> Verdict:
    return Verdict(Status.ERROR, Cause.INFRASTRUCTURE, str(error), code=code)


def _evidence(spec: AttemptSpec, ending: Ending, output_bytes: int, excess: Excess | None) -> Evidence:
    full = [_full_disk(full) for full in ending.full_filesystems]
    if excess is not None:
        full.append(FullDisk(path=WORKSPACE, exhausted=excess.exhausted, limit=excess.limit))
    return Evidence(
        wall_limit_seconds=spec.wall_seconds,
        memory_limit_bytes=spec.plan.memory_bytes,
        memory_kills=ending.oom_kills,
        peak_memory_bytes=ending.peak_memory_bytes,
        cpu_seconds=ending.cpu_seconds,
        process_limit=ending.pids_limit,
        process_limit_hits=ending.pids_limit_hits,
        full_disks=full,
        output_bytes=output_bytes,
        output_limit_bytes=spec.max_output_bytes,
    )


def _full_disk(full: FullFilesystem) -> FullDisk:
    limit = full.size_bytes if full.exhausted == "bytes" else full.inodes
    return FullDisk(path=full.target, exhausted=full.exhausted, limit=limit)


def classify(ending: Ending, spec: AttemptSpec, excess: Excess | None = None) -> Verdict:
    """The verdict that the evidence proves: our own kill first, then the kernel's counters, then the wait status."""
    memory = f"more than {spec.plan.memory_bytes // MIB} MiB of memory; a call may ask for more with `memory_mib`"
    match ending.killed_by_us:
        case KillReason.TIMEOUT:
            text = f"the program was still running after {spec.wall_seconds:g} s, and was ended with all that it had"
            return Verdict(Status.TIMEOUT, Cause.WALL_CLOCK, f"{text} started; a call may ask for more with `timeout`")
        case KillReason.MEMORY:
            return Verdict(Status.KILLED, Cause.MEMORY, f"the program and all that it had started used {memory}")
        case KillReason.OUTPUT:
            text = f"the program wrote more than {spec.max_output_bytes // MIB} MiB of output, and was ended"
            return Verdict(Status.KILLED, Cause.OUTPUT_FLOOD, text)
        case KillReason.DISK:
            text = excess.text if excess is not None else "the working directory is full"
            return Verdict(Status.KILLED, Cause.DISK, f"{text}, and the program was ended")
        case KillReason.PROXY_LOST:
            text = "the proxy was lost while the code ran"
            return Verdict(Status.ERROR, Cause.INFRASTRUCTURE, text, code="proxy_lost")
        case KillReason.CANCELLED:
            return Verdict(Status.KILLED, Cause.CANCELLED, "the caller ended the call")
    if ending.failure is not None:
        return Verdict(Status.ERROR, Cause.INFRASTRUCTURE, ending.failure, code="isolation_failed")
    if ending.oom_kills:
        text = f"the program and all that it had started used {memory}"
        return Verdict(Status.KILLED, Cause.MEMORY, text, ending.exit_code, ending.signal)
    if ending.exit_code is None and ending.signal is None:
        text = "the program ended its own sandbox, so how it ended is not known"
        return Verdict(Status.KILLED, Cause.NO_REPORT, text)
    if excess is not None:
        text = f"the program {_how(ending)}, and {excess.text} now: {excess.hint}"
        return Verdict(Status.ERROR, Cause.DISK, text, ending.exit_code, ending.signal)
    if ending.exit_code == 0:
        return Verdict(Status.SUCCESS, Cause.EXIT, exit_code=0)
    return _failed_by_itself(ending)


def _failed_by_itself(ending: Ending) -> Verdict:
    """A program that ended by itself, and not well: what it had run into, where that can be shown."""
    cause = Cause.EXIT if ending.signal is None else Cause.SIGNAL
    why = ""
    if ending.full_filesystems:
        cause = Cause.DISK
        full = [f"`{f.target}` was full ({_capacity(f)})" for f in ending.full_filesystems]
        why = f"; when it ended, {' and '.join(full)}"
    elif ending.pids_limit_hits:
        cause = Cause.PIDS
        why = f"; it was at its limit of {ending.pids_limit} processes and threads {ending.pids_limit_hits} times"
    return Verdict(Status.ERROR, cause, f"the program {_how(ending)}{why}", ending.exit_code, ending.signal)


def _how(ending: Ending) -> str:
    if ending.signal is None:
        return f"exited with {ending.exit_code}"
    return f"was ended by {_signal_name(ending.signal)}"


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time one
        return f"signal {number}"


def _capacity(full: FullFilesystem) -> str:
    return f"{full.size_bytes // MIB} MiB" if full.exhausted == "bytes" else f"{full.inodes} files"
