"""One connection to the service, and for how long it may say, or hear, nothing.

uvicorn's HTTP/1.1, with what it leaves open closed: it waits for the head and the body of a request for ever, and for
a client that does not read for ever. A head has 10 seconds, and the body behind it 30; who reads less than
`STALL_BYTES` in 30 seconds is dropped.

A client that closes its side, or half of it, has left: nothing else tells that nobody waits any more.

What arrives is parsed in pieces, and more strictly than uvicorn does (`sandbox.service.intake`).

Owns: the clocks of a connection. Must not: know what is asked.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sandbox.service.errors import HttpError, head_too_large
from sandbox.service.intake import Intake, Unacceptable, Wire
from sandbox.service.places import Place

HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
STALL_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 75
MAX_HEAD_BYTES = 32 * 1024
STALL_BYTES = 32 * 1024
_PROBE_AFTER_SECONDS, _PROBE_EVERY_SECONDS, _PROBES = 60, 15, 4  # a host that is gone closes nothing


class Connection(H11Protocol):
    """One connection, at its place, which every request's state has as `place`."""

    _intake: Intake

    def __init__(self, config: Config, server_state: ServerState, place: Place) -> None:
        super().__init__(config, server_state, {"place": place})
        self.conn = Wire(MAX_HEAD_BYTES)
        self._place = place
        self._reading: asyncio.TimerHandle | None = None  # for the head or the body that is being read
        self._reads_body = False
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = self._intake = Intake(transport, self.loop, self._parse)
        self._place.open(transport.abort, self._is_idle)
        _probe(transport.get_extra_info("socket"))
        self._read_within(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.give_back()
        self._intake.drop()
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._reading = self._writing = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self._intake.take(data)

    def _parse(self, piece: bytes) -> None:
        super().data_received(piece)
        self._set_clock(begun=True)

    def _is_idle(self) -> bool:
        return bool(getattr(self.cycle, "response_complete", True))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        else:
            self._set_clock(begun=bool(self._intake) or bool(self.conn.trailing_data[0]))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None and not self.transport.is_closing():
            self._writing.cancel()
            self._writing = None

    def send_400_response(self, msg: str) -> None:
        """A request that cannot be read: what was wrong, as far as h11 says."""
        error = sys.exception()
        if isinstance(error, Unacceptable):
            self._refuse(error.answer)
        elif getattr(error, "error_status_hint", 400) == 431:
            self._refuse(head_too_large(MAX_HEAD_BYTES))
        else:
            self._refuse(HttpError(400, "bad_request", "this is not a request of HTTP/1.1"))

    # --- clocks

    def _set_clock(self, *, begun: bool) -> None:
        """The clock of what is being read now. One that runs is left to run, so that a byte now and then gains nothing.

        `begun`: where a head is to come, its beginning is there. Before that, between requests, uvicorn's clock runs.
        """
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if not self._reads_body:
                self._reads_body = True
                self._read_within(BODY_SECONDS)
        elif state is h11.IDLE and begun:
            if self._reads_body or self._reading is None:
                self._reads_body = False
                self._read_within(HEAD_SECONDS)
        else:
            self._reads_body = False
            self._read_within(None)

    def _read_within(self, seconds: float | None) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._close()  # nothing was asked, so that nothing is answered
        else:
            self._refuse(HttpError(408, "too_slow", "the request did not arrive in time"))

    def _refuse(self, error: HttpError) -> None:
        """The last words on this connection, where none of an answer has been said."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(raw_answer(error))
        if self.cycle is not None:
            self.cycle.disconnected = True  # so that nothing else is written
            self.cycle.message_event.set()
        self._close()

    def _close(self) -> None:
        """Close once all is sent, or when nobody reads it."""
        if not self.transport.is_closing():  # asyncio's TLS forgets its other half when it is closed twice
            self.transport.close()
        if self._writing is None:
            self._watch_writing(self.transport.get_write_buffer_size())

    def _watch_writing(self, unsent_bytes: int) -> None:
        self._writing = self.loop.call_later(STALL_SECONDS, self._check_writing, unsent_bytes)

    def _check_writing(self, unsent_bytes: int) -> None:
        now = self.transport.get_write_buffer_size()
        if unsent_bytes - now < min(STALL_BYTES, unsent_bytes) or not unsent_bytes:
            self.transport.abort()
        else:
            self._watch_writing(now)


def raw_answer(error: HttpError) -> bytes:
    """An answer, for where there is no request to answer."""
    response = error.response()
    head = [(name, value) for name, value in response.raw_headers] + [(b"connection", b"close")]
    lines = [b"HTTP/1.1 %d %s" % (error.status, _PHRASES.get(error.status, b"Error"))]
    lines += [name + b": " + value for name, value in head]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


_PHRASES = {
    400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable",
}  # fmt: skip


def _probe(connection: socket.socket | None) -> None:
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_AFTER_SECONDS),
        (socket.TCP_KEEPINTVL, _PROBE_EVERY_SECONDS),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
