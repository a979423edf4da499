"""Sandboxes that wait for their call, so that a call need not wait for its sandbox.

Each is used once and never again: what waits is as fresh as what is made on demand, only earlier.
Owns: which ones wait. Must not: refill from a used one, or keep any when the launcher is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

from sandbox.isolation.client import IsolationUnavailable, Launcher, Sandbox
from sandbox.isolation.plan import LaunchPlan, without_call


class WarmPool:
    """Up to `size` waiting sandboxes of the plan that was last asked for; with 0 every sandbox is made on demand."""

    def __init__(self, launcher: Launcher, size: int) -> None:
        self.launcher = launcher
        self._size = size
        self._plan: LaunchPlan | None = None
        self._waiting: deque[Sandbox] = deque()
        self._preparing = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def launch(self, plan: LaunchPlan, *, code: bytes) -> Sandbox:
        """A sandbox loaded with `code`: one that waits, else a new one. Raises `IsolationUnavailable`."""
        wanted = without_call(plan)
        if wanted != self._plan:
            self._plan = wanted
            self._discard()
        while self._waiting:
            sandbox = self._waiting.popleft()
            if sandbox.alive:
                self._refill()
                sandbox.load(plan, code)
                return sandbox
            self._start(sandbox.close())
        self._refill()
        return await self.launcher.launch(plan, code=code)

    async def close(self) -> None:
        """End what waits, and what is being prepared."""
        self._size = 0
        self._discard()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _refill(self) -> None:
        while self._plan is not None and len(self._waiting) + self._preparing < self._size:
            self._preparing += 1
            self._start(self._prepare(self._plan))

    def _discard(self) -> None:
        while self._waiting:
            self._start(self._waiting.popleft().close())

    async def _prepare(self, plan: LaunchPlan) -> None:
        with contextlib.suppress(IsolationUnavailable):  # whoever needs one next is told
            try:
                sandbox = await self.launcher.prepare(plan)
            finally:
                self._preparing -= 1
            if plan == self._plan and len(self._waiting) < self._size:
                self._waiting.append(sandbox)
            else:
                await sandbox.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
