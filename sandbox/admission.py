"""Whose turn it is: how many calls are worked on at once, and how many wait for their turn, in order.

Owns: the places and the queue. Must not: know calls. What finds the queue full is refused before any work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

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
        self._places = asyncio.Semaphore(running)
        self._running = running
        self._max_waiting = waiting
        self._seconds = _FIRST_GUESS_SECONDS
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """Hold a place, once it is one's turn: gives True. Raises `QueueFull`, at once."""
        if self._places.locked():
            if self.waiting >= self._max_waiting:
                # With each call that ends, one that waits has its turn.
                expected = max(self._seconds / self._running, _MIN_RETRY_SECONDS)
                raise QueueFull(self.waiting, round(min(expected, _MAX_RETRY_SECONDS), 1))
            self.waiting += 1
            try:
                await self._places.acquire()
            finally:
                self.waiting -= 1
        else:
            await self._places.acquire()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            yield True
        finally:
            self._seconds += _WEIGHT_OF_NEWEST * (loop.time() - begun - self._seconds)
            self._places.release()
