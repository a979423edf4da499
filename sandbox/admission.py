"""Whose turn it is: how many calls are worked on at once, and how many wait for their turn, in order.

Owns: the places and the queue. Must not: know calls. What finds the queue full is refused before any work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

_FIRST_GUESS_SECONDS = 1.0  # how long a call takes, before any has ended
_WEIGHT_OF_NEWEST = 0.2
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 300.0


class QueueFull(Exception):
    """As many calls wait as may. `retry_after_seconds`: when there may be a place in the queue again."""

    def __init__(self, waiting: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"{waiting} calls wait for their turn, and no more may: try again in {retry_after_seconds:g} s"
        )
        self.retry_after_seconds = retry_after_seconds


class Admission:
    """`running` places, and before them a first-in-first-out queue for `waiting`."""

    def __init__(self, running: int, waiting: int) -> None:
        self._running = running
        self._max_waiting = waiting
        self._held = 0
        self._seconds = _FIRST_GUESS_SECONDS
        self._queue: dict[str, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def retry_after_seconds(self) -> float:
        """When there may be a place in a full queue again: with each call that ends, one that waits has its turn."""
        expected = max(self._seconds / self._running, _MIN_RETRY_SECONDS)
        return round(min(expected, _MAX_RETRY_SECONDS), 1)

    def position(self, call_id: str) -> int | None:
        """How many are before this one in the queue; None for one that doesn't wait."""
        return next((place for place, waiting in enumerate(self._queue) if waiting == call_id), None)

    def resize(self, running: int) -> None:
        """Have so many places from now on. Who holds one keeps it, also where there are fewer now."""
        self._running = running
        self._give()

    @contextlib.asynccontextmanager
    async def turn(self, call_id: str, waits: Callable[[], None] | None = None) -> AsyncIterator[bool]:
        """Hold a place, once it is one's turn: gives True. `waits` is called if it is to wait, and has its position.

        Raises `QueueFull`, at once.
        """
        if self._held < self._running:
            self._held += 1
        else:
            await self._wait(call_id, waits)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            yield True
        finally:
            self._seconds += _WEIGHT_OF_NEWEST * (loop.time() - begun - self._seconds)
            self._release()

    async def _wait(self, call_id: str, waits: Callable[[], None] | None) -> None:
        if self.waiting >= self._max_waiting:
            raise QueueFull(self.waiting, self.retry_after_seconds)
        mine = self._queue[call_id] = asyncio.get_running_loop().create_future()
        try:
            if waits is not None:
                waits()
            await mine
        except BaseException:
            self._queue.pop(call_id, None)
            if mine.done() and not mine.cancelled():  # it had been given a place, and had not yet heard of it
                self._release()
            raise

    def _release(self) -> None:
        self._held -= 1
        self._give()

    def _give(self) -> None:
        while self._held < self._running and self._queue:
            first = self._queue.pop(next(iter(self._queue)))
            if not first.cancelled():
                self._held += 1
                first.set_result(None)
