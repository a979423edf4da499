"""Peers that stand for the outside: real servers in threads of the test process, which record all that reaches them.

Each peer has a nonce of its own, so that a test knows whom it spoke to, and a journal: connections, bytes, requests.
A denial is proved by the journal having nothing. A peer listens when its constructor has returned.

Owns: the servers. Must not: know the product.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import h2.config
import h2.connection
import h2.events
import trustme
import wsproto
import wsproto.events

PATIENCE = 30.0  # seconds after which a peer that waits for something gives up; never part of what a test measures
_CHUNK = bytes(range(256)) * 256
_KEPT = 64 * 1024
_IP_PKTINFO = 8  # Linux; `socket` has the name from Python 3.14 on


class Loop:
    """An event loop in a thread of its own, on which all peers of a test session live."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="peers", daemon=True)
        self._thread.start()

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def close(self) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class SeenRequest:
    """One HTTP request as it reached a peer."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    connection: int
    body_bytes: int
    body_sha256: str
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class Journal:
    """What a peer has seen."""

    connections: int = 0
    open: int = 0  # of the connections, those that have not ended
    received: bytearray = field(default_factory=bytearray)
    requests: list[SeenRequest] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        with self.changed:
            yield
            self.changed.notify_all()


def bound_socket(kind: socket.SocketKind, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, kind)
    # Lets a peer at one address stand beside one at every address; the kernel takes the closer.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((address, port))
    return sock


class Peer:
    """A server at one address and port."""

    def __init__(self, loop: Loop, address: str, port: int = 0) -> None:
        self.loop = loop
        self.nonce = secrets.token_hex(8)
        self.journal = Journal()
        self.address = address
        self.port = port
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()
        loop.call(self._open())

    async def _open(self, context: ssl.SSLContext | None = None) -> None:
        sock = bound_socket(socket.SOCK_STREAM, self.address, self.port)
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._guarded, sock=sock, ssl=context, limit=1 << 20)

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is not None and not self._server.is_serving():
            return writer.transport.abort()  # accepted before `close`, and met by it too early
        with self.journal.change():
            self.journal.connections += 1
            self.journal.open += 1
            number = self.journal.connections
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self.serve(reader, writer, number)
        except (OSError, EOFError, asyncio.CancelledError, ssl.SSLError, ValueError):
            pass  # the other side went away, or what it sent was none of ours: the journal has what came
        finally:
            self._serving.discard(task)
            writer.transport.abort()
            with self.journal.change():
                self.journal.open -= 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        raise NotImplementedError

    def note(self, data: bytes) -> bytes:
        with self.journal.change():
            room = _KEPT - len(self.journal.received)
            self.journal.received += data[: max(room, 0)]
        return data

    @property
    def untouched(self) -> bool:
        """No connection and no byte has come since the start or the last `forget`."""
        return self.journal.connections == 0 and not self.journal.received

    def forget(self) -> None:
        with self.journal.change():
            self.journal.connections = 0
            self.journal.received.clear()
            self.journal.requests.clear()
            self.journal.names.clear()

    def wait(self, what: Callable[[Journal], bool]) -> None:
        """Return once the journal is so. Raises `AssertionError` after `PATIENCE`."""
        with self.journal.changed:
            assert self.journal.changed.wait_for(lambda: what(self.journal), PATIENCE), "the peer waited in vain"

    def close(self) -> None:
        async def stop() -> None:
            if self._server is not None:
                self._server.close()
            for task in self._serving:
                task.cancel()

        self.loop.call(stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RecordingTcp(Peer):
    """Takes any bytes and says its nonce: whoever reads that has reached it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while data := await reader.read(65536):
            self.note(data)
            writer.write(f"recorded {self.nonce}\n".encode())
            await writer.drain()


class BannerTcp(Peer):
    """A line protocol in which the server speaks first, as databases and mail servers do."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(f"220 {self.nonce} ready\r\n".encode())
        await writer.drain()
        while line := await reader.readline():
            self.note(line)
            writer.write(b"250 " + line)
            await writer.drain()


class TlsPeer(Peer):
    """A peer behind TLS, with a certificate of a test authority for `names`."""

    protocols: Sequence[str] = ("http/1.1",)

    def __init__(self, loop: Loop, address: str, port: int, authority: trustme.CA, names: Sequence[str]) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*names).configure_cert(self.context)
        self.context.set_alpn_protocols(list(self.protocols))
        self.context.sni_callback = self._sni
        super().__init__(loop, address, port)

    def _sni(self, _sock: ssl.SSLObject | ssl.SSLSocket, name: str | None, _context: ssl.SSLContext) -> None:
        with self.journal.change():
            self.journal.names.append(name)

    async def _open(self, context: ssl.SSLContext | None = None) -> None:
        await super()._open(self.context)


class TlsBannerTcp(TlsPeer, BannerTcp):
    """The line protocol inside TLS."""


def index_page(target: str, nonce: str) -> object:
    """The page of any project of a Python index (PEP 691), with one file, the nonce in its build tag."""
    name = target.rstrip("/").rpartition("/")[2]
    wheel = f"{name.replace('-', '_')}-1.0-1nonce{nonce}-py3-none-any.whl"
    file = {
        "filename": wheel,
        "url": f"https://index.test/files/{wheel}",
        "hashes": {"sha256": "0" * 64},
        "upload-time": "2020-01-01T00:00:00.000000Z",
        "size": 1,
    }
    return {"meta": {"api-version": "1.1"}, "name": name, "versions": ["1.0"], "files": [file]}


def packument(target: str, nonce: str) -> object:
    """The packument of any npm package, with one version, the nonce in a tag of it."""
    name = target.lstrip("/")
    dist = {
        "tarball": f"https://modules.test/{name}/-/{name}-1.0.0.tgz",
        "integrity": f"sha512-{'A' * 86}==",
        "shasum": "0" * 40,
    }
    return {
        "name": name,
        "dist-tags": {"latest": "1.0.0", f"nonce{nonce}": "1.0.0"},
        "versions": {"1.0.0": {"name": name, "version": "1.0.0", "dist": dist}},
        "time": {"created": "2020-01-01T00:00:00.000Z", "1.0.0": "2020-01-01T00:00:00.000Z"},
    }


class Http(Peer):
    """HTTP/1.1.

    `/echo` tells what came; `/bytes/N` sends N bytes; `/chunked/N` N chunks; `/sse/N` N events, each after the
    first only when somebody has asked for `/ack/I` of the one before; `/hold` answers when the test calls `release`;
    `/ws` echoes WebSocket messages; `/status/N` answers so; every other path is as `/echo`. With a `page`, that is
    what is answered instead of an echo, as JSON.
    """

    page: Callable[[str, str], object] | None = None

    def __init__(self, *args: Any) -> None:
        self._acknowledged: dict[int, asyncio.Event] = {}
        self._released = asyncio.Event()
        super().__init__(*args)

    def release(self) -> None:
        """Answer those who hold."""

        def let_go() -> None:
            self._released.set()
            self._released = asyncio.Event()

        self.loop.loop.call_soon_threadsafe(let_go)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            head = self.note(await reader.readuntil(b"\r\n\r\n"))
            lines = head.decode("latin-1").split("\r\n")
            method, target, _version = lines[0].split(" ", 2)
            headers = tuple((k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines[1:] if line))
            named = {key.lower(): value for key, value in headers}
            if named.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            count, digest, kept = 0, hashlib.sha256(), bytearray()
            async for part in _body(reader, named):
                count += len(part)
                digest.update(part)
                kept += part[: max(_KEPT - len(kept), 0)]
                self.note(part)
            seen = SeenRequest(method, target, headers, number, count, digest.hexdigest(), bytes(kept))
            with self.journal.change():
                self.journal.requests.append(seen)
            if target.startswith("/ws") and named.get("upgrade", "").lower() == "websocket":
                return await self._web_socket(reader, writer, head)
            await self._answer(seen, writer)
            await writer.drain()

    async def _answer(self, seen: SeenRequest, writer: asyncio.StreamWriter) -> None:
        _, kind, *rest = seen.target.partition("?")[0].split("/")
        argument = int(rest[0]) if rest and rest[0].isdigit() else 0
        match kind:
            case "bytes":
                writer.write(_head(200, "application/octet-stream", argument))
                if seen.method != "HEAD":
                    await _stream(argument, writer.write, writer.drain)
            case "chunked":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for place in range(argument):
                    text = f"{place} {self.nonce}\n".encode()
                    writer.write(b"%x\r\n%s\r\n" % (len(text), text))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
            case "sse":
                await self._events(argument, writer)
            case "ack":
                self._acknowledgement(argument).set()
                writer.write(_head(200, "text/plain", 0))
            case "hold":
                async with asyncio.timeout(PATIENCE):
                    await self._released.wait()
                self._send_echo(seen, writer)
            case "status":
                writer.write(_head(argument, "text/plain", 0))
            case _:
                self._send_echo(seen, writer)

    def _acknowledgement(self, place: int) -> asyncio.Event:
        return self._acknowledged.setdefault(place, asyncio.Event())

    async def _events(self, count: int, writer: asyncio.StreamWriter) -> None:
        self._acknowledged.clear()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            for place in range(count):
                writer.write(f"id: {place}\ndata: {self.nonce}\n\n".encode())
                await writer.drain()
                await self._acknowledgement(place).wait()
        writer.close()
        await writer.wait_closed()

    def _send_echo(self, seen: SeenRequest, writer: asyncio.StreamWriter) -> None:
        body = _echo(self.nonce, seen) if self.page is None else json.dumps(self.page(seen.target, self.nonce)).encode()
        writer.write(_head(200, "application/json", len(body)) + (b"" if seen.method == "HEAD" else body))

    async def _web_socket(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        connection = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
        connection.receive_data(head)
        pieces: list[str] = []
        while True:
            for event in connection.events():
                match event:
                    case wsproto.events.Request():
                        writer.write(connection.send(wsproto.events.AcceptConnection()))
                    case wsproto.events.TextMessage():
                        pieces.append(event.data)
                        if event.message_finished:
                            text = f"{self.nonce} {''.join(pieces)}"
                            writer.write(connection.send(wsproto.events.TextMessage(data=text)))
                            pieces.clear()
                    case wsproto.events.Ping():
                        writer.write(connection.send(event.response()))
                    case wsproto.events.CloseConnection():
                        writer.write(connection.send(event.response()))
                        await writer.drain()
                        return
            await writer.drain()
            data = await reader.read(65536)
            self.note(data)
            connection.receive_data(data or None)


class Https(TlsPeer, Http):
    """`Http` behind TLS."""


class Http2(TlsPeer):
    """HTTP/2 and nothing else, over TLS: `/bytes/N` sends N bytes, every other path is as `/echo`."""

    protocols = ("h2",)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        if tls.selected_alpn_protocol() != "h2":
            return
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        window = asyncio.Condition()
        heads: dict[int, tuple[tuple[str, str], ...]] = {}
        bodies: dict[int, bytearray] = {}
        answers: set[asyncio.Task[None]] = set()

        async def flush() -> None:
            writer.write(connection.data_to_send())
            await writer.drain()

        await flush()
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                match event:
                    case h2.events.RequestReceived():
                        assert event.stream_id is not None
                        heads[event.stream_id] = tuple((str(k), str(v)) for k, v in event.headers or ())
                        bodies[event.stream_id] = bytearray()
                    case h2.events.DataReceived():
                        assert event.stream_id is not None
                        bodies[event.stream_id] += self.note(event.data or b"")
                        connection.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                    case h2.events.StreamEnded():
                        assert event.stream_id is not None
                        stream = event.stream_id
                        headers, body = heads.pop(stream), bytes(bodies.pop(stream))
                        named = dict(headers)
                        seen = SeenRequest(
                            named[":method"], named[":path"], headers, number,
                            len(body), hashlib.sha256(body).hexdigest(), body,
                        )  # fmt: skip
                        with self.journal.change():
                            self.journal.requests.append(seen)
                        task = asyncio.ensure_future(self._answer(connection, stream, seen, flush, window))
                        answers.add(task)
                        task.add_done_callback(answers.discard)
            await flush()
            async with window:
                window.notify_all()

    async def _answer(
        self,
        connection: h2.connection.H2Connection,
        stream: int,
        seen: SeenRequest,
        flush: Callable[[], Awaitable[None]],
        window: asyncio.Condition,
    ) -> None:
        body = _echo(self.nonce, seen)
        if seen.target.startswith("/bytes/"):
            size = int(seen.target.split("/")[2])
            body = (_CHUNK * (size // len(_CHUNK) + 1))[:size]
        connection.send_headers(stream, [(":status", "200"), ("content-length", str(len(body)))])
        view = memoryview(body)
        while view:
            room = min(connection.local_flow_control_window(stream), connection.max_outbound_frame_size, len(view))
            if room == 0:
                async with window:
                    await window.wait_for(lambda: connection.local_flow_control_window(stream) > 0)
                continue
            connection.send_data(stream, bytes(view[:room]))
            view = view[room:]
            await flush()
        connection.end_stream(stream)
        await flush()


def _head(status: int, kind: str, length: int) -> bytes:
    return f"HTTP/1.1 {status} Peer\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


def _echo(nonce: str, seen: SeenRequest) -> bytes:
    return json.dumps(
        {
            "nonce": nonce,
            "method": seen.method,
            "target": seen.target,
            "headers": seen.headers,
            "connection": seen.connection,
            "body_bytes": seen.body_bytes,
            "body_sha256": seen.body_sha256,
        }
    ).encode()


async def _stream(size: int, write: Callable[[bytes], None], drain: Callable[[], Awaitable[None]]) -> None:
    while size > 0:
        part = _CHUNK[:size] if size < len(_CHUNK) else _CHUNK
        write(part)
        await drain()
        size -= len(part)


def content_sha256(size: int) -> str:
    """The digest of what `/bytes/N` sends."""
    digest = hashlib.sha256()
    for _ in range(size // len(_CHUNK)):
        digest.update(_CHUNK)
    digest.update(_CHUNK[: size % len(_CHUNK)])
    return digest.hexdigest()


async def _body(reader: asyncio.StreamReader, named: dict[str, str]) -> Any:
    if named.get("transfer-encoding", "").lower() == "chunked":
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return
    left = int(named.get("content-length", "0"))
    while left > 0:
        part = await reader.read(min(left, 1 << 18))
        if not part:
            raise EOFError("the body was cut short")
        left -= len(part)
        yield part


class UdpSocket:
    """A datagram socket whose answers come from the address that was asked, also where every address is its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: str, port: int, answer: Callable[[bytes], bytes]
    ) -> None:
        self.sock = bound_socket(socket.SOCK_DGRAM, address, port)
        self.sock.setblocking(False)
        if self.sock.family == socket.AF_INET6:
            self.sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            self.sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        self._loop, self._answer = loop, answer
        loop.add_reader(self.sock, self._readable)

    def _readable(self) -> None:
        with contextlib.suppress(OSError):
            data, ancillary, _, sender = self.sock.recvmsg(65536, 256)
            asked = [
                (level, kind, info) for level, kind, info in ancillary if kind in (_IP_PKTINFO, socket.IPV6_PKTINFO)
            ]
            if self.sock.family == socket.AF_INET:  # what was asked becomes what to answer from
                asked = [(level, kind, info[:4] + info[8:12] + info[8:12]) for level, kind, info in asked]
            self.sock.sendmsg([self._answer(data)], asked, 0, sender)

    def close(self) -> None:
        self._loop.remove_reader(self.sock)
        self.sock.close()


class RecordingUdp:
    """Takes any datagram and answers with its nonce."""

    def __init__(self, loop: Loop, address: str, port: int = 0) -> None:
        self.loop = loop
        self.nonce = secrets.token_hex(8)
        self.datagrams: list[bytes] = []

        def record(data: bytes) -> bytes:
            self.datagrams.append(data)
            return self.nonce.encode()

        async def bind() -> UdpSocket:
            return UdpSocket(loop.loop, address, port, record)

        self._socket = loop.call(bind())
        self.address, self.port = self._socket.sock.getsockname()[:2]

    @property
    def untouched(self) -> bool:
        return not self.datagrams

    def forget(self) -> None:
        self.datagrams.clear()

    def close(self) -> None:
        async def stop() -> None:
            self._socket.close()

        self.loop.call(stop())


@dataclass(frozen=True)
class Query:
    """One question that reached the DNS server."""

    name: str
    kind: int
    transport: str


type Answer = Sequence[str] | Callable[[int], Sequence[str]]
_A, _AAAA = 1, 28
_NXDOMAIN, _SERVFAIL = 3, 2


class Dns:
    """The world's only name server, over UDP and TCP.

    `zone` has the addresses of each name, or a function from the number of earlier address queries of one kind for the
    name to its addresses then. An unknown name is NXDOMAIN; a name in `broken` is SERVFAIL.

    Of several in one process the newest answers: which socket the kernel gives a query to is its own affair.
    """

    _open: ClassVar[list[Dns]] = []

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._open.append(self)
        self.zone: dict[str, Answer] = {}
        self.broken: set[str] = set()
        self.queries: list[Query] = []
        self._asked: dict[tuple[str, int], int] = {}

        async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    size = struct.unpack("!H", await reader.readexactly(2))[0]
                    reply = self._open[-1].answer(await reader.readexactly(size), "tcp")
                    writer.write(struct.pack("!H", len(reply)) + reply)
                    await writer.drain()
            writer.close()

        async def bind() -> None:
            for address in ("0.0.0.0", "::"):
                self._datagrams.append(
                    UdpSocket(loop.loop, address, 53, lambda data: self._open[-1].answer(data, "udp"))
                )
                listener = bound_socket(socket.SOCK_STREAM, address, 53)
                self._streams.append(await asyncio.start_server(stream, sock=listener))

        self._datagrams: list[UdpSocket] = []
        self._streams: list[asyncio.Server] = []
        loop.call(bind())

    def answer(self, query: bytes, transport: str) -> bytes:
        ident, flags, questions = struct.unpack_from("!HHH", query)
        labels, place = [], 12
        while size := query[place]:
            labels.append(query[place + 1 : place + 1 + size].decode("latin-1"))
            place += 1 + size
        kind = struct.unpack_from("!H", query, place + 1)[0]
        question = query[12 : place + 5]
        name = ".".join(labels).lower()
        self.queries.append(Query(name, kind, transport))
        code, records = 0, b""
        count = 0
        if name in self.broken:
            code = _SERVFAIL
        elif name not in self.zone:
            code = _NXDOMAIN
        elif kind in (_A, _AAAA):
            entry = self.zone[name]
            asked = self._asked.get((name, kind), 0)
            self._asked[name, kind] = asked + 1
            for address in entry(asked) if callable(entry) else entry:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                if (family == socket.AF_INET6) == (kind == _AAAA):
                    packed = socket.inet_pton(family, address)
                    records += struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(packed)) + packed
                    count += 1
        head = struct.pack("!HHHHHH", ident, 0x8180 | (flags & 0x0100) | code, questions, count, 0, 0)
        return head + question + records

    def names(self) -> set[str]:
        return {query.name for query in self.queries}

    def forget(self) -> None:
        self.queries.clear()
        self._asked.clear()

    def close(self) -> None:
        async def stop() -> None:
            for datagrams in self._datagrams:
                datagrams.close()
            for server in self._streams:
                server.close()

        self._open.remove(self)
        self.loop.call(stop())


def write_authority(authority: trustme.CA, path: Path) -> Path:
    """The authority's certificate as a file, for `upstream.ca_file`."""
    path.write_bytes(authority.cert_pem.bytes())
    return path
