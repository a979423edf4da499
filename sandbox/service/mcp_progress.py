"""What a client is told while it waits: where its call stands, at each change and every few seconds.

Owns: the pace and the wording. Must not: keep a result waiting for a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from sandbox.service.model import FeedEvent, ServiceError

EVERY_SECONDS = 5.0  # clients give up after 60 s of silence, some proxies after 30
_LEAST_SECONDS = 0.25

type Report = Callable[[float, str], Awaitable[None]]


class Standing:
    """Where a call stands, from its events."""

    def __init__(self) -> None:
        self._stage = "waiting"
        self._preparing = ""
        self._position: int | None = None
        self._lines = {"stdout": 0, "stderr": 0}

    def take(self, event: FeedEvent) -> bool:
        """Note an event. Whether it is one that a client is told at once."""
        data = event.data
        if event.kind in self._lines:
            self._lines[event.kind] += str(data.get("text", "")).count("\n")
            return False
        before = str(self)
        if event.kind == "state":
            self._stage, self._preparing = str(data.get("stage") or data.get("state")), ""
            position = data.get("queue_position")
            self._position = position if isinstance(position, int) else None
        elif event.kind == "progress":
            self._preparing = str(data.get("text", ""))
        return str(self) != before

    def __str__(self) -> str:
        match self._stage:
            case "waiting":
                return "waiting for its turn" + (f", {self._position} calls before it" if self._position else "")
            case "preparing":
                return "preparing" + (f": {self._preparing}" if self._preparing else "")
        written = ", ".join(f"{count} lines of {name}" for name, count in self._lines.items() if count)
        return f"{self._stage}: {written}" if written else self._stage


async def tell(events: AsyncIterator[FeedEvent], report: Report, every_seconds: float = EVERY_SECONDS) -> None:
    """Follow a call's events and report until they end, or until this is cancelled.

    `report` takes the seconds since the beginning, which only grow, and a text.
    """
    loop = asyncio.get_running_loop()
    began, standing = loop.time(), Standing()
    told_at, changed = began, False
    coming = asyncio.ensure_future(_next(events))
    try:
        while True:
            due = told_at + (_LEAST_SECONDS if changed else every_seconds)
            await asyncio.wait({coming}, timeout=max(due - loop.time(), 0))
            if coming.done():
                event = coming.result()
                if event is None:
                    return
                changed = standing.take(event) or changed
                coming = asyncio.ensure_future(_next(events))
            now = loop.time()
            if now >= told_at + (_LEAST_SECONDS if changed else every_seconds):
                told_at, changed = now, False
                await report(now - began, str(standing))
    except ServiceError:
        return  # there is nothing to follow: its answer says why
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


async def _next(events: AsyncIterator[FeedEvent]) -> FeedEvent | None:
    return await anext(events, None)
