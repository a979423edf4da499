"""`SyncExecutor`: the executor for programs without an event loop.

Owns: a thread with a loop of its own, in which the executor lives. Threads may share one; their calls run at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sandbox.attempt import Sink
from sandbox.calls import RunningCall
from sandbox.contract import CodeCall, ToolResult
from sandbox.executor import Executor
from sandbox.policy_file import LoadedPolicy
from sandbox.settings import Settings


class SyncRunningCall:
    """The handle of a call, for any thread."""

    def __init__(self, executor: SyncExecutor, running: RunningCall) -> None:
        self._executor, self._running = executor, running
        self.call_id = running.call_id

    def result(self, timeout: float | None = None) -> ToolResult:
        """Wait for the answer. Raises `TimeoutError` after `timeout` seconds, which doesn't end the call."""
        return self._executor._wait(self._running.result(), timeout)

    def cancel(self) -> None:
        """End the call, at whatever stage it is: the answer says so."""
        self._executor.cancel(self.call_id)


class SyncExecutor:
    """`Executor` for programs without an event loop."""

    def __init__(self, policy: Path | LoadedPolicy, *, settings: Settings | None = None) -> None:
        self._executor = Executor(policy, settings=settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start it. Raises what `Executor` raises when it is entered."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sluicegate executor", daemon=True)
        self._thread.start()
        try:
            self._wait(self._executor.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(self._executor.__aexit__(kind, error, trace))
        finally:
            self._stop()

    @property
    def executor(self) -> Executor:
        """The executor itself, for what may be read from any thread."""
        if self._loop is None:
            raise RuntimeError("a `SyncExecutor` is used inside its `with` statement")
        return self._executor

    def run(self, call: CodeCall, *, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None) -> ToolResult:
        """See `Executor.run`. The sinks are called in the executor's thread. An interrupt ends the call."""
        return self._wait(self.executor.run(call, stdout_sink, stderr_sink))

    def submit(
        self, call: CodeCall, *, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None
    ) -> SyncRunningCall:
        """Start a call and return its handle at once. See `Executor.submit`."""

        async def submit() -> RunningCall:
            return self.executor.submit(call, stdout_sink, stderr_sink)

        return SyncRunningCall(self, self._wait(submit()))

    def cancel(self, call_id: str) -> bool:
        """See `Executor.cancel`."""

        async def cancel() -> bool:
            return self.executor.cancel(call_id)

        if threading.current_thread() is self._thread:  # in a sink
            return self.executor.cancel(call_id)
        return self._wait(cancel())

    def _wait[T](self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("a `SyncExecutor` is used inside its `with` statement")
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a sink runs in the executor's own thread, which cannot wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()  # an interrupt of the waiting thread; else it has ended
            raise

    def _stop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._loop = self._thread = None
