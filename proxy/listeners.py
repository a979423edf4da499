"""Serves mitmproxy from sockets that live inside an attempt's network namespace.

Which attempt a connection belongs to follows from the socket it was accepted on, never from what it carries.
Owns: accepting, the dispatch of hooks, turns, byte counts, how much is kept, and ending connections. Must not: decide.

Hook dispatch fails closed. Stock dispatch logs an exception in a hook and goes on, which forwards; here the connection
is aborted and its layers see no further event, so nothing can follow. A crash inside a layer ends it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, cast

from mitmproxy import connection, ctx
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.master import Master
from mitmproxy.proxy import commands, events, layer, mode_servers, mode_specs
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator, Layer
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from proxy.attempts import Attempt, Connection, Traffic
from proxy.audit import AuditUnavailable
from proxy.destinations import Unparsed
from proxy.dns import answer, fail
from proxy.http_layers import NextTurn
from proxy.network import Reason, Request, RequestLayer, deny

logger = logging.getLogger(__name__)

type Hook = Callable[[Any], Any]

_BACKLOG = 512
# At one turn of the loop; then all others have theirs.
_ACCEPTED_AT_ONCE = 4
_DATAGRAMS_AT_ONCE = 8
_ACCEPT_PAUSE_SECONDS = 1.0  # after an error that more of the same follows, such as too many open files
_IP_PKTINFO = 8  # ip(7); the socket module names it from Python 3.14 on
_IPV6_PKTINFO_BYTES = 20
_READ_BYTES = 65_535  # at once, which is what mitmproxy takes; asyncio would read four times as much
_MAX_AHEAD_BYTES = 64 * 1024  # of requests that are not their turn; then no more of them are read
_MAX_UNSENT_BYTES = 1024 * 1024  # per connection and direction; then its other end is not read from
_MAX_UNSENT_BYTES_EVER = 32 * 1024 * 1024
_HOOK_FAILED = "hook `%s` failed: the connection is closed"
_PATIENCE_SECONDS = 1.0
_STOP_SECONDS = 5.0
_DNS_IDLE_SECONDS = 30.0
_UNFINISHED_SECONDS = 30.0  # for first bytes, a TLS handshake, a request's head: a round trip on loopback, in truth
_WATCH_SECONDS = 2.0
_LINGER_ZERO = struct.pack("ii", 1, 0)
DNS_PORT = 53


class AttemptMode(mode_specs.ProxyMode):
    """The mitmproxy mode of every connection here. `attempt` and `kind` are set by `make_mode`, not parsed."""

    description = "sandbox attempt"
    transport_protocol = "tcp"
    default_port = None
    attempt: Attempt
    kind: str

    def __post_init__(self) -> None:
        """Any data is valid: nothing but `make_mode` makes one."""


def make_mode(attempt: Attempt, kind: str) -> AttemptMode:
    data = f"{attempt.id}/{kind}"
    mode = AttemptMode(full_spec=f"attempt:{data}", data=data, custom_listen_host=None, custom_listen_port=None)
    object.__setattr__(mode, "attempt", attempt)
    object.__setattr__(mode, "kind", kind)
    return mode


def attempt_of(client: connection.Client) -> Attempt:
    return cast(AttemptMode, client.proxy_mode).attempt


def connection_of(client: connection.Client) -> Connection:
    return attempt_of(client).connections[client.id]


class Handler(mode_servers.ProxyConnectionHandler):
    """One client connection. Hooks are the given functions. An exception in one, or in a layer, ends it."""

    def __init__(
        self,
        master: Master,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        mode: AttemptMode,
        hooks: Mapping[str, Sequence[Hook]],
    ) -> None:
        super().__init__(master, reader, writer, ctx.options, mode)
        self.ended = False
        self._hooks = hooks
        self._progress = asyncio.Event()
        self._pending: set[asyncio.Task[None]] = set()
        self._received_early = 0
        self._heard = False
        self._going_on: set[connection.Connection] = set()
        self._watch: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """End the connection when something that the client has begun does not end. Idle between requests it may be."""
        if self.ended:
            return
        state = connection_of(self.client)
        since = state.unfinished_since
        if since is not None and time.monotonic() - since > _UNFINISHED_SECONDS:
            host = state.destination if state.destination is not None else Unparsed("", "no destination is known")
            detail = f"nothing that could be judged has come within {_UNFINISHED_SECONDS:g} seconds"
            self.abort()
            if self._heard:
                attempt_of(self.client).refuse(
                    Request(RequestLayer.CONNECT, host, state.port), deny(Reason.LIMIT_EXCEEDED, detail), state
                )
            return
        self._watch = asyncio.get_running_loop().call_later(_WATCH_SECONDS, self.watch)

    async def handle_hook(self, hook: commands.StartHook) -> None:
        """Run a hook of mitmproxy's own handler: about the client connection's ends, and about server connections."""
        functions = self._hooks.get(hook.name)
        if functions:
            with self.timeout_watchdog.disarm():
                for waiting in self._called(hook, functions):
                    await self._finish(hook, waiting)

    def start_hook(self, hook: commands.StartHook) -> bool:
        """Run a layer's hook. False: it has to wait, and its completion will come as an event of its own.

        Stock dispatch makes a task of every hook; nearly all of ours have nothing to wait for.
        """
        for waiting in self._called(hook, self._hooks.get(hook.name, ())):
            task = asyncio.get_running_loop().create_task(self._complete(hook, waiting))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
            return False
        return True

    def _called(self, hook: commands.StartHook, functions: Sequence[Hook]) -> Iterator[Coroutine[Any, Any, None]]:
        """Call the functions in order; what one returns to be awaited is yielded."""
        try:
            (data,) = hook.args()
            for function in functions:
                result = function(data)
                if result is not None:
                    yield result
        except AuditUnavailable as error:
            self._fail_unwritten(error)
        except Exception:  # whatever it is, it is a denial
            logger.exception(_HOOK_FAILED, hook.name)
            self._fail(hook)

    async def _complete(self, hook: commands.StartHook, waiting: Coroutine[Any, Any, None]) -> None:
        with self.timeout_watchdog.disarm():
            await self._finish(hook, waiting)
        if hook.blocking:
            await self.server_event(events.HookCompleted(hook))

    async def _finish(self, hook: commands.StartHook, waiting: Coroutine[Any, Any, None]) -> None:
        try:
            await waiting
        except AuditUnavailable as error:
            self._fail_unwritten(error)
        except Exception:  # whatever it is, it is a denial
            logger.exception(_HOOK_FAILED, hook.name)
            self._fail(hook)

    def _fail_unwritten(self, error: AuditUnavailable) -> None:
        """What has happened on this connection cannot be written any more, so nothing more may happen on it."""
        logger.error("%s: a connection is closed", error)
        self.abort()

    def _fail(self, hook: commands.StartHook) -> None:
        (data,) = hook.args()
        if isinstance(data, ServerConnectionHookData):
            data.server.error = "an internal error is a denial"
        self.crash()

    async def server_event(self, event: events.Event) -> None:
        """Hand an event to the layers, unless the connection has been ended: then nothing more may follow from it."""
        if not self.ended:
            await super().server_event(event)
        self._progress.set()

    async def handle_connection(self, connection: connection.Connection) -> None:
        io = self.transports[connection]
        io.reader = cast(asyncio.StreamReader, _InTurns(cast(asyncio.StreamReader, io.reader), self, connection))
        await super().handle_connection(connection)

    async def wakeup(self, request: commands.RequestWakeup) -> None:
        if isinstance(request, NextTurn):
            await self.take_turn()
        await super().wakeup(request)

    async def take_turn(self) -> None:
        """Wait until the connection has rested and it is the attempt's turn."""
        if (wait := connection_of(self.client).rests_until - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        await attempt_of(self.client).turns.take()

    async def until_read(self, connection: connection.Connection) -> None:
        """Wait until all that was read of a connection has been looked at."""
        while not self.ended and (connection in self._going_on or self._is_ahead(connection)):
            await self._wait_for_progress()

    def _is_ahead(self, of: connection.Connection) -> bool:
        ahead = connection_of(self.client).ahead
        return ahead is not None and of is self.client and ahead() > _MAX_AHEAD_BYTES

    def note_turn(self, of: connection.Connection, *, waits: bool) -> None:
        (self._going_on.add if waits else self._going_on.discard)(of)

    async def open_connection(self, command: commands.OpenConnection) -> None:
        if not self.ended:
            await super().open_connection(command)

    async def drain_writers(self) -> None:
        """Read on only when what was read has gone on: also where it waits for an HTTP/2 window or for a connection.

        What waits for a server is bounded in time rather than strictly: the client's bytes may have to be read for the
        server to go on, so one piece a second still is.
        """
        await super().drain_writers()
        io = self.transports.get(self.client)
        from_client = io is not None and io.handler is asyncio.current_task()
        while from_client and self._received_early > _MAX_UNSENT_BYTES and self._opening() and not self.ended:
            await self._wait_for_progress()
        unsent = connection_of(self.client).unsent
        if unsent is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS if from_client else None):
                while not self.ended and (size := unsent(to_client=not from_client)) > _MAX_UNSENT_BYTES:
                    if size > _MAX_UNSENT_BYTES_EVER:
                        self.abort()
                    else:
                        await self._wait_for_progress()
        except TimeoutError:
            pass

    def buffered_for_client(self) -> int:
        """Bytes that wait in the client's transport."""
        io = self.transports.get(self.client)
        if io is None or io.writer is None:
            return 0
        return cast(asyncio.StreamWriter, io.writer).transport.get_write_buffer_size()

    async def _wait_for_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def received_from_client(self, size: int) -> None:
        self._heard = True
        self._received_early = self._received_early + size if self._opening() else 0

    def _opening(self) -> bool:
        return any(io.writer is None for io in self.transports.values())

    def log(self, message: str, level: int = logging.INFO, exc_info: Any = None) -> None:
        """A layer that crashed may be in any state: its connection does not go on."""
        if level >= logging.ERROR:
            logger.log(level, message, exc_info=exc_info)
            self.crash()

    def crash(self) -> None:
        """End the connection because of a fault of ours, which is a denial and is written as one."""
        if self.ended:
            return
        self.abort()
        attempt, state = attempt_of(self.client), connection_of(self.client)
        host = state.destination if state.destination is not None else Unparsed("", "no destination is known")
        request = Request(RequestLayer.CONNECT, host, state.port)
        attempt.refuse(request, deny(Reason.INTERNAL_ERROR, "the connection met a fault of the proxy"), state)

    def abort(self) -> None:
        """Reset the client connection and end every upstream one, whatever state they are in."""
        self.finish()
        connection_of(self.client).aborted = True
        for io in list(self.transports.values()):
            if io.writer is not None:
                reset(cast(asyncio.StreamWriter, io.writer))
            if io.handler is not None:
                io.handler.cancel("aborted")

    def hang_up(self, server_id: str) -> None:
        """Reset one upstream connection. The client's stays: what it asks next is judged, and leads to another."""
        for of, io in list(self.transports.items()):
            if of.id != server_id:
                continue
            if io.writer is not None:
                reset(cast(asyncio.StreamWriter, io.writer))
            elif io.handler is not None:
                io.handler.cancel("hung up")

    def finish(self) -> None:
        """Let nothing follow: a hook that still waits will not go on, and no event reaches the layers."""
        self.ended = True
        if self._watch is not None:
            self._watch.cancel()
        for task in self._pending:
            task.cancel()
        self._progress.set()


class _InTurns:
    """A connection's reader whose pieces come in the attempt's turn, and each when the last has been dealt with."""

    def __init__(self, reader: asyncio.StreamReader, handler: Handler, connection: connection.Connection) -> None:
        self._reader = reader
        self._handler = handler
        self._connection = connection

    async def read(self, size: int) -> bytes:
        await self._handler.until_read(self._connection)
        data = await self._reader.read(size)
        await self._handler.take_turn()
        return data


class Guard:
    """Stands before a connection's top layer: counts what crosses the upstream sockets, and runs the layers' hooks."""

    def __init__(self, top: Layer, handler: Handler, traffic: Traffic) -> None:
        self._top = top
        self._handler = handler
        self._client = handler.client
        self._traffic = traffic

    @property
    def context(self) -> Context:
        return self._top.context

    def handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if attempt_of(self._client).exhausted:
            self._handler.abort()
            return
        waiting = deque([event])
        while waiting:
            event = waiting.popleft()
            if isinstance(event, events.DataReceived):
                if event.connection is self._client:
                    self._handler.received_from_client(len(event.data))
                else:
                    self._traffic.received += len(event.data)
            elif isinstance(event, events.Wakeup) and isinstance(event.command, NextTurn):
                self._handler.note_turn(event.command.connection, waits=False)
            for command in self._top.handle_event(event):
                if isinstance(command, commands.StartHook):
                    if self._handler.start_hook(command) and command.blocking:
                        waiting.append(events.HookCompleted(command))
                    if self._handler.ended:
                        return
                    continue
                if isinstance(command, commands.SendData) and command.connection is not self._client:
                    self._traffic.sent += len(command.data)
                elif isinstance(command, NextTurn):
                    self._handler.note_turn(command.connection, waits=True)
                yield command


class AttemptServer(mode_servers.ServerInstance[AttemptMode]):
    """Accepts on one passed TCP listener and serves each connection: DNS here, everything else by a `Handler`."""

    listen_addrs = ()

    def __init__(
        self,
        master: Master,
        sock: socket.socket,
        mode: AttemptMode,
        hooks: Mapping[str, Sequence[Hook]],
        top: Callable[[Context, str, tuple[str, int] | None], Layer | None],
    ) -> None:
        self._proxyserver = cast(Proxyserver, master.addons.get("proxyserver"))
        super().__init__(mode, self._proxyserver)
        self._master = master
        self._sock = sock
        self._hooks = hooks
        self._top = top
        self._running = False
        self._resume: asyncio.TimerHandle | None = None
        self._arriving: set[asyncio.Task[None]] = set()
        self._aborts: dict[asyncio.Task[Any], Callable[[], None]] = {}

    @property
    def is_running(self) -> bool:
        return self._running

    async def _start(self) -> None:
        """Accept by ourselves: asyncio's server accepts as many at once, and as often, as there are."""
        self._sock.setblocking(False)
        self._sock.listen(_BACKLOG)
        self._running = True
        self._accept_again()

    def _accept_again(self) -> None:
        self._resume = None
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._acceptable)

    def _pause(self, seconds: float) -> None:
        """Let who connects wait in the backlog, which costs nobody anything."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock.fileno())
        self._resume = loop.call_later(seconds, self._accept_again)

    def _acceptable(self) -> None:
        attempt = self.mode.attempt
        for _ in range(_ACCEPTED_AT_ONCE):
            if wait := attempt.connects.wait():
                attempt.note_wait(attempt.connects, "connections", Connection(self.mode.kind))
                self._pause(wait)
                return
            try:
                sock, _peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                self._pause(_ACCEPT_PAUSE_SECONDS)
                return
            attempt.connects.take()
            if attempt.over or attempt.exhausted or not attempt.admit(Connection(self.mode.kind)):
                _reset_socket(sock)
                continue
            task = asyncio.get_running_loop().create_task(self._arrive(sock))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _arrive(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        reader = asyncio.StreamReader(_READ_BYTES // 2, loop=loop)  # half of what it keeps before it stops reading
        protocol = asyncio.StreamReaderProtocol(reader, self.handle_stream, loop=loop)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock)
            cast(Any, transport).max_size = _READ_BYTES
        except OSError:
            sock.close()

    async def _stop(self) -> None:
        """Accept no more, end what is open, and return when it has ended."""
        if self._running:
            self._running = False
            if self._resume is not None:
                self._resume.cancel()
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
        if self._arriving:
            await asyncio.wait(set(self._arriving), timeout=_STOP_SECONDS)
        serving = dict(self._aborts)
        for abort in serving.values():
            abort()
        if serving:
            await asyncio.wait(serving, timeout=_STOP_SECONDS)

    def make_top_layer(self, context: Context) -> Layer:
        raise NotImplementedError("the top layer depends on the connection; see `handle_stream`")

    async def handle_stream(self, reader: Any, writer: Any = None) -> None:
        attempt, kind = self.mode.attempt, self.mode.kind
        try:
            address, port = writer.get_extra_info("socket").getsockname()[:2]
        except OSError:  # the client has gone already
            writer.transport.abort()
            return
        captured = None if kind == "explicit" else (address, port)
        if kind.startswith("dns") or (captured is not None and port == DNS_PORT):
            protocol = "dns-tcp"
        else:
            protocol = "proxy" if captured is None else "transparent"
        handler = Handler(self._master, reader, writer, self.mode, self._hooks)
        state = Connection(protocol, handler.client.id.partition("-")[0])
        task = asyncio.current_task()
        assert task is not None
        if attempt.over or not attempt.admit(state):
            reset(writer)
            return
        attempt.connections[handler.client.id] = state
        state.buffered, state.abort, state.hang_up = handler.buffered_for_client, handler.abort, handler.hang_up
        self._aborts[task] = handler.abort
        try:
            if protocol == "dns-tcp":
                await _serve_dns(attempt, state, reader, writer)
                writer.transport.abort()
                return
            top = self._top(handler.layer.context, protocol, captured)
            if top is None:
                reset(writer)
                return
            handler.watch()
            handler.layer = cast(Layer, Guard(top, handler, state.upstream))
            with self._proxyserver.register_connection(handler.client.id, handler):
                await handler.handle_client()
        except Exception:  # whatever it is, this connection ends and no other
            logger.exception("a connection could not be served: it is closed")
            handler.crash()
        finally:
            handler.finish()
            del self._aborts[task], attempt.connections[handler.client.id]


async def _serve_dns(
    attempt: Attempt, state: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """DNS over TCP: each message behind its length, RFC 1035 section 4.2.2."""
    try:
        while True:
            async with asyncio.timeout(_DNS_IDLE_SECONDS):
                size = int.from_bytes(await reader.readexactly(2))
                query = await reader.readexactly(size)
                if wait := attempt.queries.take():
                    attempt.note_wait(attempt.queries, "DNS queries", state)
                    await asyncio.sleep(wait)
                await attempt.turns.take()  # what has been read already is not waited for
                response = answer(attempt, state, query)
                if response is None:
                    return
                writer.write(len(response).to_bytes(2) + response)
                await writer.drain()
    except (EOFError, OSError, TimeoutError):
        pass  # the client is done, or takes too long


def reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the client sees a reset at once, rather than a connection that says nothing."""
    _do_not_linger(cast(socket.socket, writer.get_extra_info("socket")))
    writer.transport.abort()


def _reset_socket(sock: socket.socket) -> None:
    _do_not_linger(sock)
    sock.close()


def _do_not_linger(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)


class DnsDatagrams:
    """DNS over UDP on a passed socket; answers come from the address that was asked."""

    def __init__(self, sock: socket.socket, attempt: Attempt) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._attempt = attempt
        self._resume: asyncio.TimerHandle | None = None
        self._read_again()

    def _read_again(self) -> None:
        self._resume = None
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._readable)

    def _pause(self, seconds: float) -> None:
        """Let what is sent wait in the socket's buffer; what does not fit is dropped there."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock.fileno())
        self._resume = loop.call_later(seconds, self._read_again)

    def close(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()

    def _readable(self) -> None:
        attempt = self._attempt
        for _ in range(_DATAGRAMS_AT_ONCE):
            if wait := attempt.queries.wait():
                attempt.note_wait(attempt.queries, "DNS queries", Connection("dns-udp"))
                self._pause(wait)
                return
            try:
                query, ancillary, _flags, peer = self._sock.recvmsg(4096, socket.CMSG_SPACE(_IPV6_PKTINFO_BYTES))
            except OSError:
                return
            attempt.queries.take()
            try:
                response = answer(attempt, Connection("dns-udp"), query)
            except Exception:  # whatever it is, it is a denial
                logger.exception("a DNS query could not be judged: it is refused")
                response = fail(query)
            if response is not None:
                with contextlib.suppress(OSError):
                    self._sock.sendmsg([response], [_reply_from(ancillary)], 0, peer)


def _reply_from(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, int, bytes]:
    """The packet information that sends an answer from the address its query was sent to (ip(7), ipv6(7))."""
    for level, kind, info in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            return level, kind, struct.pack("=I4s4s", 0, info[8:12], bytes(4))
        if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            return level, kind, info[:16] + struct.pack("=I", 0)
    raise OSError("a datagram came without its destination")


def is_silent(pending: layer.NextLayer) -> bool:
    return bool(getattr(pending, "silent", False))
