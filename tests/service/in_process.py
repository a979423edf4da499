"""A service in this process, over a real executor: what the tests of the service share.

Owns: starting it under a policy, and waiting for what a call does. Must not: know a transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from sandbox import Executor, Settings
from sandbox.contract import CodeCall
from sandbox.owners import Caller
from sandbox.policy_file import LoadedPolicy, parse_policy
from sandbox.service.live import LiveCall
from sandbox.service.model import FeedEvent
from sandbox.service.service import Service

PATIENCE = 100.0  # a machine under load may take long for what takes a moment
HOLD = "import time\nprint('running', flush=True)\ntime.sleep(100)"

ALICE, BOB = Caller("acme", "alice"), Caller("acme", "bob")
OTHER = Caller("other", "alice")


def policy(*tenants: dict[str, Any], **sections: Any) -> LoadedPolicy:
    document = {"version": 1, "name": "tests-service", **sections}
    if tenants:
        document["tenants"] = list(tenants)
    return parse_policy(json.dumps(document))


def plain(code: str, **fields: Any) -> CodeCall:
    return CodeCall(language="python", code=code, **fields)


class Site:
    """A service, and the loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, service: Service) -> None:
        self._runner = runner
        self.service = service

    @property
    def executor(self) -> Executor:
        return self.service.executor

    @property
    def state(self) -> Path:
        return self.executor.settings.state_dir

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Do it, and hold that it ends and leaves nothing open."""

        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE):
                found = await work
                await nothing_open(self.service)
                return found

        return self._runner.run(bounded())


@contextlib.contextmanager
def site(root: Path, loaded: LoadedPolicy, **settings: Any) -> Iterator[Site]:
    """One for several tests, which share its loop."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        service = runner.run(stack.enter_async_context(serving(root, loaded, **settings)))
        try:
            yield Site(runner, service)
        finally:
            runner.run(stack.aclose())


@contextlib.asynccontextmanager
async def serving(root: Path, loaded: LoadedPolicy, **settings: Any) -> AsyncIterator[Service]:
    chosen = Settings(**{"state_dir": root / "state", "audit_log": root / "audit.jsonl", **settings})
    async with Executor(loaded, settings=chosen) as executor, Service(executor) as service:
        yield service


def counts(service: Service) -> dict[str, int]:
    """How many calls of each tenant are counted as open."""
    return {name: bounds.open for name, bounds in service._bounds.items() if bounds.open}


async def nothing_open(service: Service) -> None:
    """Return once every call has been given back: at once, but for what is being cleaned up."""
    await until(lambda: service.open_calls == (0, 0) and not counts(service))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0.001)


async def ended(*lives: LiveCall) -> None:
    for live in lives:
        await live.ended.wait()


async def cancelled(*lives: LiveCall) -> None:
    for live in lives:
        live.cancel()
    await ended(*lives)


async def says(live: LiveCall, text: str, stream: str = "stdout") -> None:
    """Return once its program has written that."""
    written = ""
    async for event in live.feed.follow():
        if event.kind == stream:
            written += event.data["text"]
            if text in written:
                return
    raise AssertionError(f"it ended and had written {written!r}: {await live.result()}")


async def enters(live: LiveCall, stage: str) -> FeedEvent:
    """Return once it is at that stage."""
    async for event in live.feed.follow():
        if event.kind == "state" and event.data["stage"] == stage:
            return event
    raise AssertionError(f"it ended before: {await live.result()}")
