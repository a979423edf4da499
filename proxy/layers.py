"""The few mitmproxy layers that must behave otherwise than stock, below HTTP. Sans-io, like their parents.

- `GuardedTunnel` and `GuardedSocks5` choose what runs inside a tunnel, where servers may speak first, and refuse it.
- `FirstBytes` asks what a connection speaks also when its client is silent.
- `GuardedClientTls` reads a ClientHello of bounded size, once.
- `Refuse` ends a connection without a word.

What is special about HTTP is in `proxy.http_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mitmproxy.net.tls import starts_like_tls_record
from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator, Layer
from mitmproxy.proxy.layers import modes
from mitmproxy.proxy.layers.tls import ClientTLSLayer

type Tunnel = Callable[[Context], Layer]

_FIRST_BYTES_SECONDS = 0.25  # a client that speaks first does so within one round trip, here on loopback
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,19}")
_SOCKS_NOT_ALLOWED = b"\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00"  # RFC 1928 section 6: not allowed by ruleset


# A ClientHello has some 500 bytes, with post-quantum keys 2 KB, in one record or two.
MAX_HELLO_BYTES = 64 * 1024
MAX_HELLO_RECORDS = 16
_MAX_RECORD_BYTES = 16 * 1024  # RFC 8446 section 5.1
_RECORD_HEADER_BYTES = 5
_HANDSHAKE_HEADER_BYTES = 4  # RFC 8446 section 4: type, and the length in three bytes
_CLIENT_HELLO = 1


class InvalidHello(ValueError):
    """The bytes are no ClientHello, or none of a size that is read. The message says why."""


class Hello:
    """Collects the bytes of one ClientHello. What a byte costs does not grow with those that came before."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._message = bytearray()  # the records' contents
        self._next = 0  # where the first record that is not whole yet begins
        self._records = 0

    def feed(self, data: bytes) -> bytes | None:
        """All that was received, once the message is whole; None before. Raises `InvalidHello` as early as it can."""
        self._received += data
        while len(self._received) >= self._next + _RECORD_HEADER_BYTES:
            start = self._next + _RECORD_HEADER_BYTES
            header = bytes(self._received[self._next : start])
            size = int.from_bytes(header[3:])
            if not starts_like_tls_record(header) or not 0 < size <= _MAX_RECORD_BYTES:
                raise InvalidHello("a TLS record of the handshake cannot be read")
            if self._records >= MAX_HELLO_RECORDS:
                raise InvalidHello(f"the TLS handshake begins with more than {MAX_HELLO_RECORDS} records")
            if len(self._received) < start + size:
                return None
            self._records += 1
            self._message += self._received[start : start + size]
            self._next = start + size
            if self._is_whole():
                return bytes(self._received)
        return None

    def _is_whole(self) -> bool:
        if self._message[0] != _CLIENT_HELLO:
            raise InvalidHello("the TLS handshake does not begin with a ClientHello")
        if len(self._message) < _HANDSHAKE_HEADER_BYTES:
            return False
        size = _HANDSHAKE_HEADER_BYTES + int.from_bytes(self._message[1:_HANDSHAKE_HEADER_BYTES])
        if size > MAX_HELLO_BYTES:
            raise InvalidHello(f"the ClientHello is larger than {MAX_HELLO_BYTES} bytes")
        return len(self._message) >= size


class GuardedClientTls(ClientTLSLayer):
    """TLS with the code. Stock, it parses all records anew at each read, and waits for as many as the code declares.

    `malformed` is told of what is no ClientHello; `unfinished`, whether the handshake is one that has still to end.
    """

    def __init__(
        self, context: Context, malformed: Callable[[Context, str], None], unfinished: Callable[[Context, bool], None]
    ) -> None:
        super().__init__(context)
        self._malformed = malformed
        self._unfinished = unfinished
        self._hello = Hello()

    def receive_handshake_data(self, data: bytes) -> CommandGenerator[tuple[bool, str | None]]:
        self._unfinished(self.context, True)
        if not self.client_hello_parsed:
            try:
                whole = self._hello.feed(data)
            except InvalidHello as error:
                self._malformed(self.context, str(error))
                return False, str(error)
            if whole is None:
                return False, None
            data = whole
        done, error_text = yield from super().receive_handshake_data(data)
        if error_text is not None and not self.client_hello_parsed:
            self._malformed(self.context, "the ClientHello cannot be read")
        if done or error_text is not None:
            self._unfinished(self.context, False)
        return done, error_text

    def receive_data(self, data: bytes) -> CommandGenerator[None]:
        """What was read before a refused connection was closed still comes: stock, it would be decrypted by nothing."""
        if self.conn.error is None:
            yield from super().receive_data(data)


class Refuse(Layer):
    """Closes the client connection."""

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.Start):
            yield commands.CloseConnection(self.context.client)


class Asked(layer.NextLayer):
    """A `NextLayer` that can be asked without bytes. `silent` is then true."""

    silent = False

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.Wakeup):
            self.silent = not self.data_client()
            if self.silent:
                yield from self._ask()
        else:
            yield from super()._handle_event(event)


class FirstBytes(Layer):
    """Asks for the next layer when bytes have come, or when the client has been silent: then the server is to speak.

    The wake-up stays here. A layer that was chosen meanwhile has not asked for one and would not know it.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._next = Asked(context)

    def handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, events.Start):
            yield commands.RequestWakeup(_FIRST_BYTES_SECONDS)
        elif isinstance(event, events.Wakeup) and self._next.layer is not None:
            return
        yield from self._next.handle_event(event)

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        raise AssertionError("events go to the next layer")


class GuardedTunnel(modes.TransparentProxy):
    """A captured connection, whose destination is known from its socket."""

    def __init__(self, context: Context, tunnel: Tunnel) -> None:
        super().__init__(context)
        self._tunnel = tunnel

    def finish_start(self) -> CommandGenerator[str | None]:
        self.child_layer = self._tunnel(self.context)
        return (yield from super().finish_start())


class GuardedSocks5(modes.Socks5Proxy):
    """SOCKS5 whose CONNECT is judged before it is answered. `judge` returns False for a refusal to be told in SOCKS.

    `malformed` is told of what is not a CONNECT at all, such as BIND and UDP ASSOCIATE.
    """

    def __init__(
        self,
        context: Context,
        judge: Callable[[Context], bool],
        malformed: Callable[[Context, str], None],
        tunnel: Tunnel,
    ) -> None:
        super().__init__(context)
        self._judge = judge
        self._malformed = malformed
        self._tunnel = tunnel
        self._refused = False

    def finish_start(self) -> CommandGenerator[str | None]:
        if not self._judge(self.context):
            self._refused = True
            self._handle_event = self.done  # how the parent changes state
            return "refused"
        self.child_layer = self._tunnel(self.context)
        return (yield from super().finish_start())

    def state_connect(self) -> CommandGenerator[None]:
        for command in super().state_connect():
            if self._refused and isinstance(command, commands.SendData):
                command = commands.SendData(self.context.client, _SOCKS_NOT_ALLOWED)
            yield command

    def socks_err(self, message: str, reply_code: int | None = None) -> CommandGenerator[None]:
        self._malformed(self.context, message)
        yield from super().socks_err(message, reply_code)


def starts_like_http(data: bytes) -> bool | None:
    """Whether the first bytes are an HTTP/1 request line's; None while more are needed to tell.

    A method is capital letters and hyphens here, as every client sends it. `PRI ` opens HTTP/2 without TLS, which is
    refused.
    """
    method, space, _ = data[:32].partition(b" ")
    if not data:
        return None
    if not _METHOD.fullmatch(method) or (space and method == b"PRI"):
        return False
    return True if space else None


__all__ = ["FirstBytes", "GuardedClientTls", "GuardedSocks5", "GuardedTunnel", "Refuse", "Tunnel", "starts_like_http"]
