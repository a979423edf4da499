"""What arrives on a connection, on its way to the parser: in pieces, and no more of it than is worth its parsing.

h11 turns whatever it has into events before anybody else has a turn, and a chunk of one byte costs as much as one of
thousands. So it gets a piece at a time, with a turn of the event loop between, and a body whose chunks are too many for
their bytes is no request of ours. Nor is one that two readers may take for different ones, such as a proxy that stands
before this server, and it.

Owns: how fast a connection is parsed, and what is refused that h11 takes. Must not: answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import h11
from uvicorn.protocols.http.flow_control import FlowControl

from sandbox.service.errors import HttpError

PIECE_BYTES = 16 * 1024
FREE_CHUNKS = 256
BYTES_A_CHUNK = 64  # on the average, beyond the free ones
_FOLD = re.compile(rb"\n[ \t]")


class Intake(FlowControl):
    """uvicorn's say in whether a connection is read, and what was read of it and has not been parsed."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, parse: Callable[[bytes], None]
    ) -> None:  # fmt: skip
        super().__init__(transport)
        self._loop = loop
        self._parse = parse
        self._unread = bytearray()
        self._turn: asyncio.Handle | None = None

    def __bool__(self) -> bool:
        """Whether there is something that has not been parsed."""
        return bool(self._unread)

    def take(self, data: bytes) -> None:
        """What has arrived. Its first piece is parsed at once, if nothing is before it."""
        self._unread += data
        if self._turn is None and not self.read_paused:
            self._pass_on()
        else:
            self._transport.pause_reading()

    def drop(self) -> None:
        """Forget what has not been parsed: the connection is no more."""
        self._unread.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def resume_reading(self) -> None:
        self.read_paused = False
        self._go_on()

    def _pass_on(self) -> None:
        self._turn = None
        if self.read_paused or not self._unread:
            return
        piece = bytes(self._unread[:PIECE_BYTES])
        del self._unread[:PIECE_BYTES]
        self._parse(piece)
        self._go_on()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            self.drop()
        elif self.read_paused:
            pass
        elif not self._unread:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
            if self._turn is None:
                self._turn = self._loop.call_soon(self._pass_on)


class Unacceptable(h11.RemoteProtocolError):
    """h11 takes it, and we do not. `answer` says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.answer = HttpError(400, "bad_request", message)


class Wire(h11.Connection):
    """h11, stricter. `next_event` raises `Unacceptable`, too."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._chunks = self._bytes = 0
        self._last_chunk: int | None = None  # once the request has been answered

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks, self._bytes, self._last_chunk = 0, 0, None
            _check_head(event, before[: len(before) - len(self.trailing_data[0])])
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def _count(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._bytes += len(data.data)
        if self._last_chunk is None and self.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._last_chunk = self._chunks + FREE_CHUNKS
        if self._chunks > FREE_CHUNKS + self._bytes // BYTES_A_CHUNK or self._is_past_the_last():
            raise Unacceptable(
                f"the body comes in too many chunks: after the first {FREE_CHUNKS} they have {BYTES_A_CHUNK} bytes or "
                "more, on the average"
            )

    def _is_past_the_last(self) -> bool:
        return self._last_chunk is not None and self._chunks > self._last_chunk


def _check_head(request: h11.Request, text: bytes) -> None:
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Unacceptable("`Transfer-Encoding` and `Content-Length` do not go together")  # RFC 9112, section 6.1
    if _FOLD.search(text):
        raise Unacceptable("a header goes on in a second line")  # RFC 9112, section 5.2
