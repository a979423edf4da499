"""Both clients behind one face: each test says what holds of either."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from inspect import isasyncgen, iscoroutine
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import AsyncClient, Client


class Waiting:
    """An `AsyncClient`, or what it gives, whose methods are waited for: the face of a `Client`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: Any) -> None:
        self._loop, self._inner = loop, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*positional: Any, **named: Any) -> Any:
            given = found(*positional, **named)
            if isasyncgen(given):
                return self._items(given)
            given = self._wait(given) if iscoroutine(given) else given
            return Waiting(self._loop, given) if type(given).__name__.endswith("Handle") else given

        return call

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def _items(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(items)

        while True:
            try:
                item = self._wait(following())
            except StopAsyncIteration:
                return
            yield item


type Connect = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind, closed at the test's end."""
    if request.param == "sync":
        clients: list[Client] = []

        def make(*positional: Any, **named: Any) -> Any:
            clients.append(Client(*positional, **named))
            return clients[-1]

        yield make
        for client in clients:
            client.close()
        return
    with asyncio.Runner() as runner:
        loop, ours = runner.get_loop(), []

        def make_async(*positional: Any, **named: Any) -> Any:
            ours.append(AsyncClient(*positional, **named))
            return Waiting(loop, ours[-1])

        yield make_async
        for one in ours:
            loop.run_until_complete(one.close())


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        yield Path(directory)
