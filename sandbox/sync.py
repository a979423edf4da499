"""`SyncExecutor`: the executor for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.attempt import Sink
from sandbox.contract import CodeCall, ToolResult
from sandbox.execute import Executor
from sandbox.policy_file import LoadedPolicy
from sandbox.settings import Settings


class SyncExecutor:
    """`Executor` for programs without an event loop. Not for use inside one."""

    def __init__(self, policy: Path | LoadedPolicy, *, settings: Settings | None = None) -> None:
        self._runner = asyncio.Runner()
        self._policy, self._settings = policy, settings
        self._executor: Executor | None = None
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self._executor = self._runner.run(self._open())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self.executor.__aexit__(kind, error, trace))
        finally:
            self._runner.close()

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            raise RuntimeError("a `SyncExecutor` is used inside its `with` statement")
        return self._executor

    def run(self, call: CodeCall, *, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None) -> ToolResult:
        """See `Executor.run`. Threads may share one; their calls then run one after the other."""
        with self._turn:
            return self._runner.run(self.executor.run(call, stdout_sink=stdout_sink, stderr_sink=stderr_sink))

    async def _open(self) -> Executor:
        return await Executor(self._policy, settings=self._settings).__aenter__()
