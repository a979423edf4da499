"""Sandboxes that wait for their call, so that a call need not wait for its sandbox.

Each is used once and never again: what waits is as fresh as what is made on demand, only earlier.
Owns: which ones wait. Must not: refill from a used one, or keep any when the launcher is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from sandbox.isolation.client import IsolationUnavailable, Launcher, Sandbox
from sandbox.isolation.plan import LaunchPlan, Workdir, without_call

MAX_PLANS = 6  # two languages, each with two memory limits; and Python in clients' directories, with as many


@dataclass(slots=True)
class _Shelf:
    """What waits under one plan, and how many more are being prepared for it."""

    plan: LaunchPlan
    waiting: deque[Sandbox] = field(default_factory=deque)
    preparing: int = 0


class WarmPool:
    """Up to `size` waiting sandboxes for each of the `MAX_PLANS` plans that were last asked for.

    A plan is a language with its limits. With a size of 0 every sandbox is made on demand.
    """

    def __init__(self, launcher: Launcher, size: int) -> None:
        self.launcher = launcher
        self._size = size
        self._shelves: list[_Shelf] = []  # the one last asked for is the last
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> tuple[Sandbox, ...]:
        """All that wait now."""
        return tuple(sandbox for shelf in self._shelves for sandbox in shelf.waiting)

    async def launch(self, plan: LaunchPlan, *, code: bytes, workdir: Workdir | None = None) -> Sandbox:
        """A sandbox loaded with `code`: one that waits, else a new one. Raises `IsolationUnavailable`.

        With a `workdir`, it is what the sandbox is to be given with `attach`.
        """
        shelf = self._shelf(without_call(plan))
        while shelf.waiting:
            sandbox = shelf.waiting.popleft()
            if sandbox.alive:
                self._refill(shelf)
                sandbox.load(plan, code, workdir)
                return sandbox
            self._start(sandbox.close())
        self._refill(shelf)
        return await self.launcher.launch(plan, code=code, workdir=workdir)

    async def close(self) -> None:
        """End what waits, and what is being prepared."""
        self._size = 0
        while self._shelves:
            self._discard(self._shelves.pop())
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _shelf(self, plan: LaunchPlan) -> _Shelf:
        """The shelf of a plan, now the one last asked for; a plan that has not been asked for lately loses its own."""
        found = next((shelf for shelf in self._shelves if shelf.plan == plan), None)
        if found is None:
            found = _Shelf(plan)
        else:
            self._shelves.remove(found)
        self._shelves.append(found)
        if len(self._shelves) > MAX_PLANS:
            self._discard(self._shelves.pop(0))
        return found

    def _refill(self, shelf: _Shelf) -> None:
        while len(shelf.waiting) + shelf.preparing < self._size:
            shelf.preparing += 1
            self._start(self._prepare(shelf))

    def _discard(self, shelf: _Shelf) -> None:
        while shelf.waiting:
            self._start(shelf.waiting.popleft().close())

    async def _prepare(self, shelf: _Shelf) -> None:
        with contextlib.suppress(IsolationUnavailable):  # whoever needs one next is told
            try:
                sandbox = await self.launcher.prepare(shelf.plan)
            finally:
                shelf.preparing -= 1
            if any(shelf is kept for kept in self._shelves) and len(shelf.waiting) < self._size:
                shelf.waiting.append(sandbox)
            else:
                await sandbox.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
