"""The process of a client that started the server itself: its service, brought up beside it so that the client need
not wait; what ends it; and its standard input and output.

Owns: when the service is brought up, and up to when; descriptors 0 and 1. Must not: know how it is spoken to, or load
the SDK, which takes as long as the service's start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

from proxy.control import ProxyUnavailable
from sandbox.isolation import syscalls
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.policy_file import InvalidPolicy
from sandbox.service.model import ServiceError
from sandbox.service.service import Service
from sandbox.state import InvalidSettings

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (IsolationUnavailable, "isolation_unavailable"),
    (ProxyUnavailable, "proxy_unavailable"),
    (LedgerUnavailable, "ledger_unavailable"),
    (InvalidPolicy, "invalid_policy"),
    (InvalidSettings, "invalid_settings"),
    (OSError, "isolation_unavailable"),  # such as too few descriptors
)


class NotStarted(ServiceError):
    """The service could not be brought up. `code` and the message say why; the next call tries again."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LocalService:
    """A service that starts when this is entered, and is waited for by those who need it.

    `tell` is given what went wrong with a start.
    """

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[Service]], tell: Callable[[str], None]) -> None:
        self._opened, self._tell = opened, tell
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LocalService:
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it, and whatever runs in it. One that is still starting is given up."""
        self._over.set()
        if self._task is not None:
            if not self._ready.done():
                self._task.cancel()
            await asyncio.shield(asyncio.wait({self._task}))

    async def get(self) -> Service:
        """The service, once it is up. Raises `NotStarted`; the call after that starts it anew."""
        if self._task is None or (self._task.done() and not self._over.is_set()):
            self._begin()
        return await asyncio.shield(self._ready)

    def _begin(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(self._ready))

    async def _live(self, ready: asyncio.Future[Service]) -> None:
        try:
            async with self._opened() as service:
                ready.set_result(service)
                await self._over.wait()
        except tuple(kind for kind, _ in _CODES) as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            self._tell(f"the service cannot start: {error}")
            self._fail(ready, NotStarted(code, f"the service cannot start: {error}"))
        except Exception as error:
            self._fail(ready, error)
            raise
        finally:
            self._fail(ready, NotStarted("draining", "the server is about to end"))

    def _fail(self, ready: asyncio.Future[Service], error: Exception) -> None:
        if not ready.done():
            ready.set_exception(error)
            with contextlib.suppress(Exception):
                ready.exception()  # seen, though perhaps nobody waits


@contextlib.contextmanager
def end_on_signals(ended: asyncio.Event) -> Iterator[None]:
    """Set `ended` when this process is told to end, or its parent has ended."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    parent = -1

    def orphaned() -> None:
        loop.remove_reader(parent)
        ended.set()

    with contextlib.suppress(OSError):  # it is gone, or outside of what this process can see
        parent = syscalls.pidfd_open(os.getppid())
        loop.add_reader(parent, orphaned)
    try:
        yield
    finally:
        if parent >= 0:
            loop.remove_reader(parent)
            os.close(parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def diverted() -> Iterator[tuple[int, int]]:
    """The standard input and output on descriptors of their own, which are the protocol's alone.

    Meanwhile 0 is empty and 1 is the error output, so that neither a child nor a stray print comes between.
    """
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield source, target
    finally:
        sys.stdout.flush()
        for fd in (nothing, source, target):
            os.close(fd)
