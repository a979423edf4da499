"""An attempt's share of what all attempts have in common: the proxy's one thread.

Owns: how often, and whose turn it is. Must not: know what is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Share:
    """A token bucket: `burst` at once, then `per_second`. Nothing is refused by it; what comes too often waits.

    Who can leave the work where it is asks `wait` first. Who has it already takes a token that is not there yet, and
    waits until it is: each of many then wakes up once.
    """

    def __init__(self, burst: int, per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self.per_second = per_second
        self._clock = clock
        self._tokens = float(burst)
        self._filled = clock()
        self._used_up = False

    def wait(self) -> float:
        """The seconds until there is a token; 0 when there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self.per_second)
        self._filled = now
        if self._tokens >= self._burst / 2:
            self._used_up = False
        return max(0.0, (1 - self._tokens) / self.per_second)

    def take(self) -> float:
        """Take one, and return the seconds until it is there; 0 when it is."""
        wait = self.wait()
        self._tokens -= 1
        return wait

    def is_first_wait(self) -> bool:
        """Whether the share is used up for the first time since it was last half full: what is told of it, once."""
        first, self._used_up = not self._used_up, True
        return first


class Turns:
    """One piece of an attempt's work at each turn of the loop, however many of its connections have one.

    So all attempts, and what the executor asks, come before any attempt's next piece. First come, first served.
    """

    def __init__(self) -> None:
        self._busy = asyncio.Lock()

    async def take(self) -> None:
        """Return when it is one's turn, which is until one waits for anything. At once when nobody else has it."""
        await self._busy.acquire()
        asyncio.get_running_loop().call_soon(self._busy.release)


__all__ = ["Share", "Turns"]
