"""HTTP as mitmproxy reads it, with what hostile code makes necessary. Sans-io, like its parents.

- A head that two readers could take for different requests, or that does not end, is refused before it is parsed.
- A refused request is answered at its headers; what of its body still comes is dropped unread.
- Whatever ends an exchange before its response has begun ends it with a response that people can read.
- A WebSocket is relayed as bytes, so that no message has to fit into memory.
- HTTP/2 is not turned into HTTP/1.1: a body without a length would be taken for the next request there.
- What a peer makes us keep is bounded, and so is what is done for it at one turn of the loop: one head, some chunks, or
  some frames. The rest of what was read goes on at `NextTurn`.

Owns: the above. Must not: decide, or know attempts; `Advice` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h2.errors
import h11
from mitmproxy import http
from mitmproxy.connection import Connection
from mitmproxy.net.http import http1
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator, Layer
from mitmproxy.proxy.layers import tcp
from mitmproxy.proxy.layers.http import HttpLayer, HTTPMode, HttpStream, SendHttp
from mitmproxy.proxy.layers.http._events import (
    ErrorCode,
    RequestData,
    RequestEndOfMessage,
    RequestHeaders,
    RequestProtocolError,
    RequestTrailers,
    ResponseData,
    ResponseEndOfMessage,
    ResponseHeaders,
    ResponseProtocolError,
)
from mitmproxy.proxy.layers.http._http1 import Http1Client, Http1Connection, Http1Server
from mitmproxy.proxy.layers.http._http2 import Http2Client, Http2Connection, Http2Server

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; common servers stop at 8 to 64 KiB
_MAX_HEAD_LINES = 1000  # what a line costs is more than what its bytes do; common servers stop at 100
_MAX_UNREAD_BYTES = 256 * 1024  # a head or chunk line that does not end
# At one turn of the loop, for one connection.
_PIECES_AT_ONCE = 32  # chunks of a body, interim responses, HTTP/2 frames
_HEADS_AT_ONCE = 1

_FRAME_HEADER_BYTES = 9  # RFC 9113 section 4.1
_MAX_FRAME_BYTES = 16_384  # section 4.2: the most that we say we take
_HEADERS_FRAME = 1
_PREFACE_BYTES = 24  # section 3.4

# RFC 9112 sections 2.2 and 5, RFC 9110 section 5.5: a line ends in CRLF, is not continued, and has no other controls.
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_OVERLAP_BYTES = 3  # of an end, `\r\n\r\n`, all but the last byte
_EMPTY_LINES = re.compile(rb"(?:\r\n)*")
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d ")


@dataclass(frozen=True, slots=True)
class Advice:
    """What the layers ask: which layer runs in a tunnel, what a refusal or failure is answered with; and tell.

    `unfinished` is told when a head has begun, and when it has ended.
    """

    tunnel: Callable[[Context], Layer]
    malformed: Callable[[Context, str], http.Response]
    failed: Callable[[http.HTTPFlow, str], http.Response]
    relayed: Callable[[http.HTTPFlow, bool, int], None]
    unfinished: Callable[[Context, bool], None]


class NextTurn(commands.RequestWakeup):
    """What was read of a connection goes on when it is the attempt's turn again; until then no more of it is read."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(0)
        self.connection = connection


class _InPieces:
    """A body's reader that stops after some pieces.

    It drops the trailers, as RFC 9110 section 6.5.1 permits. mitmproxy cannot pass them on.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.left = _PIECES_AT_ONCE

    def __call__(self, buffer: Any) -> Any:
        if not self.left:
            return None  # as if there were no more
        self.left -= 1
        event = self._reader(buffer)
        return h11.EndOfMessage() if isinstance(event, h11.EndOfMessage) else event

    def read_eof(self) -> Any:
        return self._reader.read_eof()


class _Http1InTurns(Http1Connection):
    """What both sides of HTTP/1 share."""

    _reader: _InPieces
    _waits = False

    @property
    def body_reader(self) -> Any:
        return self._reader

    @body_reader.setter
    def body_reader(self, reader: Any) -> None:
        self._reader = _InPieces(reader)

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.Wakeup):
            self._waits = False
            if self.state in (self.read_headers, self.read_body):
                yield from self.state(events.DataReceived(self.conn, b""))
        elif self._waits and isinstance(event, events.DataReceived) and self.state != self.passthrough:
            self.buf += event.data
        else:
            yield from super()._handle_event(event)

    def read_body(self, event: events.Event) -> CommandGenerator[None]:
        self._reader.left = _PIECES_AT_ONCE
        yield from super().read_body(event)
        if self.state == self.read_body and not self._reader.left and self.buf:
            yield from self._wait_for_turn()

    def _wait_for_turn(self) -> CommandGenerator[None]:
        if not self._waits:
            self._waits = True
            yield NextTurn(self.conn)


class _ServersHttp1(_Http1InTurns, Http1Client):
    """The server's side of HTTP/1. Interim responses are dropped: mitmproxy takes the first one for the last."""

    def read_headers(self, event: events.ConnectionEvent) -> CommandGenerator[None]:
        left = _PIECES_AT_ONCE
        while _INTERIM.match(received := bytes(self.buf)[:MAX_HEAD_BYTES]):
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            self.buf.maybe_extract_at_most(end + 4)
            left -= 1
            if not left and isinstance(event, events.DataReceived):
                yield from self._wait_for_turn()
                return
        if self.buf or not isinstance(event, events.DataReceived):
            yield from super().read_headers(event)


class GuardedHttp1(_Http1InTurns, Http1Server):
    """The code's side of HTTP/1."""

    def __init__(self, context: Context, advice: Advice) -> None:
        super().__init__(context)
        self._advice = advice
        self._scanned = 0  # of the head that the buffer begins with
        self._overlap = b""  # the last of these bytes
        self._ending = False

    def mark_done(self, *, request: bool = False, response: bool = False) -> CommandGenerator[None]:
        self._ending = True
        yield from super().mark_done(request=request, response=response)
        self._ending = False

    def read_headers(self, event: events.ConnectionEvent) -> CommandGenerator[None]:
        if self._ending:  # stock goes on with the next request, one inside the other
            yield from self._wait_for_turn()
            return
        if not isinstance(event, events.DataReceived):
            yield from super().read_headers(event)
            return
        fault, ended = self._scan(event.data)
        self._advice.unfinished(self.context, bool(self.buf) and not ended)
        if fault is not None:
            yield from self._refuse(fault)
        elif ended:
            self._scanned = 0
            for command in super().read_headers(event):
                if self.state == self.read_headers and isinstance(command, commands.SendData):
                    # The parent's own answer.
                    yield from self._refuse("the head of the request cannot be read")
                    return
                yield command

    def _scan(self, data: bytes) -> tuple[str | None, bool]:
        """What is wrong with the head so far, and whether it has ended. Only what is new is looked at."""
        overlap = self._overlap
        if self._scanned <= _OVERLAP_BYTES or self._scanned + len(data) != len(self.buf):
            data, overlap = bytes(self.buf), b""
            # RFC 9112 section 2.2: empty lines before a request are ignored
            if (empty := _EMPTY_LINES.match(data)) and empty.end():
                self.buf.maybe_extract_at_most(empty.end())
                data = data[empty.end() :]
            self._scanned = 0
        before = self._scanned - len(overlap)
        piece = overlap + data
        end = piece.find(b"\r\n\r\n")
        # From the last byte that was looked at on: it may be the first half of what is searched for.
        # With the end of the last line, or what stands before it would be taken for what a later read goes on from.
        if _AMBIGUOUS.search(piece, max(len(overlap) - 1, 0), len(piece) if end < 0 else end + 2):
            return "the head of the request has a line or a character that no request has", False
        self._scanned = before + len(piece)
        self._overlap = piece[-_OVERLAP_BYTES:]
        if (self._scanned if end < 0 else before + end) > MAX_HEAD_BYTES:
            return f"the head of the request is larger than {MAX_HEAD_BYTES} bytes", False
        if end >= 0 and bytes(self.buf)[: before + end].count(b"\r\n") > _MAX_HEAD_LINES:
            return f"the head of the request has more than {_MAX_HEAD_LINES} lines", False
        return None, end >= 0

    def _refuse(self, why: str) -> CommandGenerator[None]:
        """Answer, and read on without keeping anything: a close at once could lose the answer on its way."""
        self.state = self.done
        self._advice.unfinished(self.context, False)
        self.buf.maybe_extract_at_most(len(self.buf))
        yield commands.SendData(self.conn, http1.assemble_response(self._advice.malformed(self.context, why)))
        yield commands.CloseTcpConnection(self.conn, half_close=True)

    def done(self, event: events.ConnectionEvent) -> CommandGenerator[None]:
        self.buf.maybe_extract_at_most(len(self.buf))
        if isinstance(event, events.ConnectionClosed):
            yield commands.CloseConnection(self.conn)


class _Http2InTurns(Http2Connection):
    """What both sides of HTTP/2 share."""

    _ahead = b""  # whole frames for later, and one that has not come whole
    _waits = False
    _preface = 0  # bytes of it that are still to come; no server sends one

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.DataReceived):
            self._ahead += event.data
            if not self._waits:
                yield from self._go_on()
        elif isinstance(event, events.Wakeup) and isinstance(event.command, NextTurn):
            self._waits = False
            yield from self._go_on()
        else:
            yield from super()._handle_event(event)

    def _go_on(self) -> CommandGenerator[None]:
        size = self._take()
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        if piece:
            yield from super()._handle_event(events.DataReceived(self.conn, piece))
        if self._take(dry=True) and not self._waits:
            self._waits = True
            yield NextTurn(self.conn)

    def _take(self, *, dry: bool = False) -> int:
        """The bytes of what is done at this turn."""
        place = min(self._preface, len(self._ahead))
        if not dry:
            self._preface -= place
        if place < len(self._ahead):
            place = _end_of_frames(self._ahead, place)
        return place


def _end_of_frames(data: bytes, place: int) -> int:
    """Where the frames end, from `place` on, that one turn is for. What is too large for a frame is left to `h2`."""
    heads = 0
    for _ in range(_PIECES_AT_ONCE):
        header = data[place : place + _FRAME_HEADER_BYTES]
        if len(header) < _FRAME_HEADER_BYTES:
            break
        size = int.from_bytes(header[:3])
        if size > _MAX_FRAME_BYTES:
            return len(data)
        if place + _FRAME_HEADER_BYTES + size > len(data):
            break
        heads += header[3] == _HEADERS_FRAME
        if heads > _HEADS_AT_ONCE:
            break
        place += _FRAME_HEADER_BYTES + size
    return place


class _ServersHttp2(_Http2InTurns, Http2Client):
    """The server's side of HTTP/2."""


class GuardedHttp2(_Http2InTurns, Http2Server):
    """The code's side of HTTP/2. What the protocol forbids ends the connection; here it is also told."""

    def __init__(self, context: Context, advice: Advice) -> None:
        super().__init__(context)
        self._advice = advice
        self._preface = _PREFACE_BYTES

    def protocol_error(
        self, message: str, error_code: int = h2.errors.ErrorCodes.PROTOCOL_ERROR
    ) -> CommandGenerator[None]:
        self._advice.malformed(self.context, message)
        yield from super().protocol_error(message, error_code)


class GuardedStream(HttpStream):
    """One request and its response."""

    def __init__(self, context: Context, stream_id: int, advice: Advice) -> None:
        super().__init__(context, stream_id)
        self._advice = advice
        self._answered = False

    def handle_event(self, event: events.Event) -> CommandGenerator[None]:
        for command in super().handle_event(event):
            if isinstance(command, SendHttp):
                if isinstance(command.event, ResponseHeaders):
                    self._drop_connection_field(command.event.response)
                    self._answered = self._answered or command.event.response.status_code != 100
                elif isinstance(command.event, ResponseProtocolError) and not self._answered:
                    status = command.event.code.http_status_code()
                    if status is not None:
                        yield from self._answer_failure(command.event.message, malformed=status < 500)
                        continue
            yield command

    def _answer_failure(self, message: str, *, malformed: bool) -> CommandGenerator[None]:
        self._answered = True
        client = self.context.client
        response = self._advice.failed(self.flow, message)
        self._drop_connection_field(response)
        yield SendHttp(ResponseHeaders(self.stream_id, response, end_stream=False), client)
        yield SendHttp(ResponseData(self.stream_id, response.raw_content or b""), client)
        yield SendHttp(ResponseEndOfMessage(self.stream_id), client)
        if malformed and not self.flow.request.is_http2:
            yield commands.CloseConnection(client)  # where the next request would begin is not certain

    def _drop_connection_field(self, response: http.Response) -> None:
        """RFC 9113 section 8.2.2: in HTTP/2 it would make the response malformed."""
        if self.flow.request.is_http2:
            response.headers.pop("connection", None)

    def state_wait_for_request_headers(self, event: RequestHeaders) -> CommandGenerator[None]:
        event.request.stream = not event.end_stream  # until it is decided: whether a body follows
        yield from super().state_wait_for_request_headers(event)
        refused = self.client_state == self.state_consume_request_body and self.flow.response is not None
        if refused and not event.end_stream:
            yield from super().state_consume_request_body(RequestEndOfMessage(self.stream_id))
            self.client_state = self._drop_request_body

    def _drop_request_body(self, event: events.Event) -> CommandGenerator[None]:
        assert isinstance(event, (RequestData, RequestTrailers, RequestEndOfMessage))
        yield from ()

    def handle_protocol_error(self, event: RequestProtocolError | ResponseProtocolError) -> CommandGenerator[None]:
        if isinstance(event, RequestProtocolError):
            self.flow.metadata[CLIENT_GAVE_UP] = True
        yield from super().handle_protocol_error(event)

    def make_server_connection(self) -> CommandGenerator[bool]:
        if not (yield from super().make_server_connection()):
            return False
        if not self.flow.request.is_http2 or self.context.server.alpn == b"h2":
            return True
        yield commands.CloseConnection(self.context.server)
        message = "the server does not speak HTTP/2, and the client nothing else"
        yield from self.handle_protocol_error(ResponseProtocolError(self.stream_id, message, ErrorCode.CONNECT_FAILED))
        return False

    def handle_connect_regular(self) -> CommandGenerator[None]:
        if self.flow.response is None:
            self.child_layer = self._advice.tunnel(self.context)
        yield from self.handle_connect_finish()

    def flow_done(self) -> CommandGenerator[None]:
        if self.flow.websocket is None:
            yield from super().flow_done()
            return
        self.child_layer = _Relay(self.context, lambda sent, size: self._advice.relayed(self.flow, sent, size))
        self._handle_event = self.passthrough
        yield from self.child_layer.handle_event(events.Start())
        yield SendHttp(ResponseEndOfMessage(self.stream_id), self.context.client)


CLIENT_GAVE_UP = "sluicegate-client-gave-up"


class _Relay(tcp.TCPLayer):
    """Bytes in both directions, counted and not kept."""

    def __init__(self, context: Context, count: Callable[[bool, int], None]) -> None:
        super().__init__(context, ignore=True)
        self._count = count

    def handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.DataReceived):
            self._count(event.connection is self.context.client, len(event.data))
        yield from super().handle_event(event)


class GuardedHttp(HttpLayer):
    """HTTP whose streams, and whose client's side, are guarded."""

    def __init__(self, context: Context, mode: HTTPMode, advice: Advice) -> None:
        super().__init__(context, mode)
        self._advice = advice

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.Start):
            kind = GuardedHttp2 if self.context.client.alpn == b"h2" else GuardedHttp1
            self.connections[self.context.client] = kind(self.context.fork(), self._advice)
        yield from super()._handle_event(event)
        if isinstance(event, events.DataReceived) and self._unread(event.connection) > _MAX_UNREAD_BYTES:
            self._advice.malformed(self.context, f"more than {_MAX_UNREAD_BYTES} bytes without an end")
            yield commands.CloseConnection(event.connection)
            if event.connection is not self.context.client:
                yield commands.CloseConnection(self.context.client)

    def make_stream(self, stream_id: int) -> CommandGenerator[None]:
        self.streams[stream_id] = GuardedStream(self.context.fork(), stream_id, self._advice)
        yield from self.event_to_child(self.streams[stream_id], events.Start())

    def register_connection(self, command: Any) -> CommandGenerator[None]:
        top = self.connections[command.connection]
        if isinstance(reader := top.context.layers[-1], Http1Client):
            reader.__class__ = _ServersHttp1  # the parent makes it, deep inside, and asks nobody which
            reader.state = reader.read_headers
        elif isinstance(reader, Http2Client):
            reader.__class__ = _ServersHttp2
        yield from super().register_connection(command)
        if command.err and not command.connection.connected:
            command.connection.address = None  # else every later request to it would be told of this failure

    def unsent(self, *, to_client: bool) -> int:
        """Bytes that are kept: for want of an HTTP/2 peer's window, or of a server that is still being connected to."""
        size = 0
        for connection, top in self.connections.items():
            writer = top.context.layers[-1]
            if isinstance(writer, Http2Connection) and (connection is self.context.client) is to_client:
                size += sum(len(chunk.data) for chunks in writer.h2_conn.stream_buffers.values() for chunk in chunks)
        if not to_client:
            for stream in self.streams.values():
                size += sum(len(event.data) for event in stream._paused_event_queue if isinstance(event, RequestData))
        return size

    def ahead(self) -> int:
        """Bytes of the client's requests that wait for the response to the one before."""
        reader = self.connections[self.context.client]
        return len(reader.buf) if isinstance(reader, GuardedHttp1) and reader.state == reader.wait else 0

    def _unread(self, connection: Connection) -> int:
        top = self.connections.get(connection)
        reader = top.context.layers[-1] if top is not None else None
        if not isinstance(reader, Http1Connection) or reader.state == reader.passthrough:
            return 0
        return len(reader.buf)


__all__ = ["CLIENT_GAVE_UP", "MAX_HEAD_BYTES", "Advice", "GuardedHttp"]
