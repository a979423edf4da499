"""A launcher for the tests of isolation, and a way to run code under it without a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.interpreters import this_interpreter, this_node
from sandbox.isolation.client import Ending, Launcher, LauncherConfig, Sandbox
from sandbox.isolation.plan import MIB, LaunchPlan
from sandbox.output import Collector
from sandbox.runtimes import javascript, python

PATIENCE_SECONDS = 60


def make_plan(**changes: Any) -> LaunchPlan:
    plan = python.plan(this_interpreter(), call_id="call-test", attempt=1, memory_bytes=256 * MIB)
    return replace(plan, **changes)


def make_js_plan(**changes: Any) -> LaunchPlan:
    plan = javascript.plan(this_node(), this_interpreter(), call_id="call-test", attempt=1, memory_bytes=256 * MIB)
    return replace(plan, **changes)


@dataclass(frozen=True)
class Outcome:
    ending: Ending
    stdout: str
    stderr: str
    stdout_chars: int


async def finish(sandbox: Sandbox, *, max_chars: int = 1_000_000) -> Outcome:
    """Release a sandbox and collect what it writes until it has ended."""
    collector = Collector(max_chars, max_chars)
    sandbox.close_listeners()
    collecting = asyncio.create_task(collector.collect(sandbox.stdout, sandbox.stderr))
    await sandbox.release()
    ending = await sandbox.ended()
    await collecting
    output = collector.finish()
    return Outcome(ending, output.stdout.text, output.stderr.text, output.stdout.chars)


class Rig:
    """Launchers in an event loop of a thread's own; `do` runs a coroutine there."""

    def __init__(self, state_dir: Path, packages: Path) -> None:
        self.state_dir = state_dir
        self._packages = packages
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.launcher = self.do(self.start())

    def do[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    async def start(self, **changes: Any) -> Launcher:
        readable = (Path(this_node().directory),)
        return await Launcher.start(
            LauncherConfig(state_dir=self.state_dir, packages=self._packages, readable=readable, **changes)
        )

    @contextlib.asynccontextmanager
    async def another(self, **changes: Any) -> AsyncIterator[Launcher]:
        launcher = await self.start(**changes)
        try:
            yield launcher
        finally:
            await launcher.close()

    @contextlib.asynccontextmanager
    async def prepared(self, code: str, *, launcher: Launcher | None = None, **changes: Any) -> AsyncIterator[Sandbox]:
        sandbox = await (launcher or self.launcher).launch(make_plan(**changes), code=code.encode())
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def run_async(self, code: str, **changes: Any) -> Outcome:
        async with self.prepared(code, **changes) as sandbox:
            return await finish(sandbox)

    def run(self, code: str, **changes: Any) -> Outcome:
        """Run code in a sandbox to its end; no connection of it is ever accepted."""
        return self.do(self.run_async(code, **changes))

    def close(self) -> None:
        self.do(self.launcher.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def rig(packages: Path) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        rig = Rig(Path(directory), packages)
        yield rig
        rig.close()


@pytest.fixture
def run(rig: Rig) -> Callable[..., Outcome]:
    return rig.run


async def accept(listener: socket.socket) -> tuple[socket.socket, tuple[Any, ...]]:
    """The next connection, and the address that was dialled."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return connection, connection.getsockname()
