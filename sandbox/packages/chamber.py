"""A preparation sandbox: started like an attempt, with a program of ours, and nothing of a call.

The same launcher and proxy, and a grant of its own, so that the log shows each request that it makes. What the program
writes goes to a file, from which it can be read while it grows.
Owns: the launch plan of a preparation. Must not: read what came out.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

from proxy.control import Proxy
from proxy.network import Grant
from sandbox.attempt import Attempt, AttemptOutcome, AttemptSpec
from sandbox.contract import MAX_STDERR_CHARS
from sandbox.isolation.client import Launcher
from sandbox.isolation.plan import MIB, WORKSPACE, LaunchPlan, ReadOnly, Tmpfs
from sandbox.isolation.pool import WarmPool
from sandbox.packages.diagnosis import excerpt
from sandbox.packages.program import program
from sandbox.runtimes import python
from sandbox.runtimes.python import Interpreter

_MEMORY_BYTES = 2048 * MIB
_PIDS = 256
_WORKSPACE_INODES = 200_000
_READ_BYTES = 1 << 20


class ChamberFailed(Exception):
    """The sandbox did not do its job, for a reason of our own side, or because it was at its limits."""


@dataclass(frozen=True, slots=True)
class Chamber:
    """Where preparations run. `read_only` are the resolvers; `workspace_bytes` bounds archives on their way.

    Without `bytecode` nothing is compiled, to see what that costs; its store must be no other's.
    """

    launcher: Launcher
    proxy: Proxy
    interpreter: Interpreter
    read_only: tuple[ReadOnly, ...] = ()
    workspace_bytes: int = 1024 * MIB
    wall_seconds: float = 300.0
    bytecode: bool = True

    def plan(self, call_id: str) -> LaunchPlan:
        base = python.plan(
            self.interpreter, call_id=call_id, attempt="preparation", memory_bytes=_MEMORY_BYTES, pids=_PIDS
        )
        tmpfs = tuple(
            Tmpfs(WORKSPACE, self.workspace_bytes, _WORKSPACE_INODES) if one.target == WORKSPACE else one
            for one in base.tmpfs
        )
        return replace(base, read_only=(*base.read_only, *self.read_only), tmpfs=tmpfs)

    @contextmanager
    def spool(self, directory: Path) -> Iterator[Spool]:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            yield Spool(cast("IO[bytes]", file))

    async def run(self, job: Mapping[str, object], grant: Grant, spool: Spool, *, max_bytes: int) -> AttemptOutcome:
        """Do one job; what it hands out is in the spool. Raises `ChamberFailed`; on cancellation nothing is left."""
        spec = AttemptSpec(
            plan=self.plan(grant.call_id),
            grant=grant,
            code=program(job),
            language="python",
            domains=None,
            wall_seconds=self.wall_seconds,
            max_output_bytes=max_bytes + MAX_STDERR_CHARS,
        )
        try:
            attempt = Attempt(spec, spool.limited(max_bytes), max_stdout_chars=0)
            outcome = await attempt.run(WarmPool(self.launcher, 0), self.proxy)
        finally:
            spool.complete()
        if spool.overflowed:
            raise ChamberFailed("the preparation wrote more than it may")
        if outcome.verdict.exit_code != 0:
            said = excerpt(outcome.output.stderr.text.strip().rpartition("\n")[2])  # by whoever is inside
            why = outcome.verdict.message or outcome.verdict.error_code
            raise ChamberFailed(f"the preparation sandbox failed: {why}" + (f": {said}" if said else ""))
        return outcome


class Spool:
    """What a sandbox writes, in a file without a name. It can be read, in another thread, while it grows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._written = 0
        self._limit = 0
        self._complete = False
        self._changed = threading.Condition()
        self.overflowed = False

    def limited(self, max_bytes: int) -> Callable[[bytes], None]:
        """What takes its bytes: no more than so many."""
        self._limit = max_bytes
        return self._write

    def _write(self, data: bytes) -> None:
        if self._written + len(data) > self._limit:
            self.overflowed = True  # the rest is read, so that the program comes to its end, and dropped
            return
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        with self._changed:
            self._written += len(data)
            self._changed.notify_all()

    def complete(self) -> None:
        """Nothing more is written: whoever reads comes to the end."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def pieces(self) -> Iterator[bytes]:
        """From its start to its end, which is waited for."""
        offset = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._written > offset or self._complete)  # noqa: B023 - called here
                available = self._written
            if available == offset:
                break
            data = os.pread(self._file.fileno(), min(available - offset, _READ_BYTES), offset)
            offset += len(data)
            yield data
