"""The launcher's event loop: descriptors and times, each with what to do.

Not asyncio: handlers here are plain calls, and a fork in one of them copies no running loop. One time is served a turn,
the one that has waited longest, and descriptors before it: no number of slow handlers of times delays a request.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable


class Poller:
    """Calls the handler of each descriptor that is readable (or at its end), and of each time that has come."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._timers: dict[object, tuple[float, Callable[[], None]]] = {}

    def add(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_after(self, seconds: float, key: object, handler: Callable[[], None]) -> None:
        self._timers[key] = (time.monotonic() + seconds, handler)

    def cancel(self, key: object) -> None:
        self._timers.pop(key, None)

    def run_once(self) -> None:
        timeout = -1.0
        if self._timers:
            timeout = max(0.0, min(due for due, _ in self._timers.values()) - time.monotonic())
        for fd, _ in self._epoll.poll(timeout):
            handler = self._handlers.get(fd)
            if handler is not None:  # else removed by a handler before it
                handler()
        if self._timers:
            key, (due, handler) = min(self._timers.items(), key=lambda timer: timer[1][0])
            if due <= time.monotonic():
                del self._timers[key]
                handler()
