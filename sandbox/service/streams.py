"""The life of a call as server-sent events.

Owns: their form on the wire, and the end of a stream whose reader has left. Must not: keep events; that is a `Feed`'s.

A reader that is slow is waited for by the transport, within its bounds; the feed meanwhile drops what is old, and the
reader is told how much it missed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox.service.attendance import gone
from sandbox.service.model import FeedEvent

KEEP_ALIVE_SECONDS = 15.0
_HEADERS = {"x-accel-buffering": "no"}  # or nginx would hold events back


def encode_event(event: FeedEvent) -> bytes:
    """One event. JSON has no line break of its own, so that one `data` line is enough."""
    data = json.dumps(event.data, ensure_ascii=False, separators=(",", ":"))
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """It ends with the events, or when the reader leaves."""

    def __init__(self, events: AsyncIterator[FeedEvent], keep_alive_seconds: float = KEEP_ALIVE_SECONDS) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]  # that of no body, which the framework sets
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(gone(receive))
        coming: asyncio.Future[FeedEvent | None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                coming = coming or asyncio.ensure_future(anext(self._events, None))
                both: set[asyncio.Future[Any]] = {coming, leaving}
                await asyncio.wait(both, timeout=self._keep_alive_seconds, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if not coming.done():
                    part = b": still here\n\n"
                elif (event := coming.result()) is not None:
                    part, coming = encode_event(event), None
                else:
                    break
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaving.cancel()
            if coming is not None:
                coming.cancel()
