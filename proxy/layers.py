"""The few mitmproxy layers that must behave otherwise than stock, below HTTP. Sans-io, like their parents.

- `GuardedTunnel` and `GuardedSocks5` choose what runs inside a tunnel, where servers may speak first, and refuse it.
- `FirstBytes` asks what a connection speaks also when its client is silent.
- `Refuse` ends a connection without a word.

What is special about HTTP is in `proxy.http_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator, Layer
from mitmproxy.proxy.layers import modes

type Tunnel = Callable[[Context], Layer]

_FIRST_BYTES_SECONDS = 0.25  # a client that speaks first does so within one round trip, here on loopback
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,19}")
_SOCKS_NOT_ALLOWED = b"\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00"  # RFC 1928 section 6: not allowed by ruleset


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


__all__ = ["FirstBytes", "GuardedSocks5", "GuardedTunnel", "Refuse", "Tunnel", "starts_like_http"]
