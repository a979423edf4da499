"""The life of one call as it happens: what it writes, where it stands, its answer. For whoever follows it.

Owns: the last events of a call, up to a bound. Must not: wait for a reader, or keep more for one that is slow.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

from sandbox.service.model import FeedEvent, StreamName

MAX_KEPT_CHARS = 256 * 1024
_MAX_KEPT_EVENTS = 4096
_MAX_EVENT_CHARS = 16 * 1024


class Feed:
    """Written by one call, followed by any number of readers, each from where it likes."""

    def __init__(self, max_kept_chars: int = MAX_KEPT_CHARS) -> None:
        self._max_kept_chars = max_kept_chars
        self._events: deque[tuple[FeedEvent, int]] = deque()
        self._kept_chars = 0
        self._last_id = 0
        self._news = asyncio.Event()
        self._over = False
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }  # fmt: skip

    def write(self, stream: StreamName, data: bytes) -> None:
        """Bytes that the program wrote, as they come."""
        text = self._decoders[stream].decode(data)
        for start in range(0, len(text), _MAX_EVENT_CHARS):
            self._add(stream, {"text": text[start : start + _MAX_EVENT_CHARS]})

    def tell(self, kind: Literal["state", "progress"], **data: Any) -> None:
        self._add(kind, data)

    def end(self, result: dict[str, Any]) -> None:
        """The last event: the answer, or why there is none. Later ones are dropped."""
        for stream in ("stdout", "stderr"):
            if rest := self._decoders[stream].decode(b"", final=True):
                self._add(stream, {"text": rest})
        self._add("result", result)
        self._over = True
        self._wake()

    async def follow(self, after: int = 0) -> AsyncIterator[FeedEvent]:
        """Every event with a number above `after`, the last of which is `result`.

        Where some are not kept any more, a `gap` says how many.
        """
        while True:
            news = self._news
            for event in self._after(after):
                after = event.id
                yield event
            if self._over and after >= self._last_id:
                return
            if news is self._news:
                await news.wait()

    def _after(self, number: int) -> list[FeedEvent]:
        kept = [event for event, _ in self._events if event.id > number]
        first = kept[0].id if kept else self._last_id + 1
        if first > number + 1:
            gap = FeedEvent(id=first - 1, kind="gap", data={"missed_events": first - 1 - number})
            return [gap, *kept]
        return kept

    def _add(self, kind: Any, data: dict[str, Any]) -> None:
        if self._over:
            return
        self._last_id += 1
        size = len(data.get("text", ""))
        self._events.append((FeedEvent(id=self._last_id, kind=kind, data=data), size))
        self._kept_chars += size
        while self._kept_chars > self._max_kept_chars or len(self._events) > _MAX_KEPT_EVENTS:
            _, gone = self._events.popleft()
            self._kept_chars -= gone
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
