"""One real proxy process, attempts attached to it, and raw clients inside and outside of sandboxes' networks.

Owns: starting and ending them. Must not: look into the proxy; what it did is in its answers, its log and the peers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import secrets
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import trustme

from proxy.control import AttemptEnd, AttemptStart, NetworkCounts, Proxy, ProxyConfig
from proxy.destinations import parse_host
from proxy.network import Grant, Mode, Protocol, Rule, RuleLayer, StaticHost
from sandbox.isolation import netns
from tests import world
from tests.servers import Http, Http2, Https, Loop, write_authority

PATIENCE = 30.0


class Sandbox:
    """A network namespace like an attempt's, with its listeners. Sockets made here belong to it, whoever uses them."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sandbox network", daemon=True)
        self._thread.start()
        self.listeners: list[tuple[str, socket.socket]] = self.call(self._set_up)

    def _run(self) -> None:
        os.unshare(os.CLONE_NEWNET)  # of this thread only
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

    @staticmethod
    def _set_up() -> list[tuple[str, socket.socket]]:
        world._lo_up()
        return netns.capture_everything()

    def call[T](self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._work.put((work, future))
        return future.result(PATIENCE)

    def open(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        sock = self.call(lambda: socket.socket(family, kind))
        sock.settimeout(PATIENCE)
        return sock

    def dial(self, address: str, port: int) -> socket.socket:
        sock = self.open(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            sock.connect((address, port))
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        for _, listener in self.listeners:
            listener.close()
        self._work.put(None)
        self._thread.join(PATIENCE)


@dataclass(frozen=True)
class Answer:
    """One HTTP response as it came."""

    status: int
    phrase: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        document = json.loads(self.body)
        assert isinstance(document, dict)
        return document

    @property
    def code(self) -> str:
        return str(self.json["code"])


def read_answer(sock: socket.socket, method: str = "GET") -> Answer:
    """Read one response. Raises `OSError` or `http.client.HTTPException` when there is none."""
    response = http.client.HTTPResponse(sock, method=method)
    response.begin()
    headers = {key.lower(): value for key, value in response.getheaders()}
    return Answer(response.status, response.reason, headers, response.read())


def ask(sock: socket.socket, request: bytes, method: str = "GET") -> Answer:
    sock.sendall(request)
    return read_answer(sock, method)


def get(host: str, path: str = "/", *more: str, method: str = "GET", target: str | None = None) -> bytes:
    """A request without a body; `target` is `path` unless it says otherwise."""
    lines = [f"{method} {path if target is None else target} HTTP/1.1", f"Host: {host}", *more, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, f"the connection ended after {data!r}"
        data += part
    return data


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the other side closes; a reset counts as the end."""
    data = bytearray()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := sock.recv(65536):
            data += part
    return bytes(data)


def is_cut(sock: socket.socket) -> bool:
    """Whether the connection is closed or reset without a byte."""
    return read_to_end(sock) == b""


@dataclass
class Attempt:
    """An attached attempt and its clients."""

    rig: Rig
    grant: Grant
    port: int | None = None
    sandbox: Sandbox | None = None
    _counts: NetworkCounts | None = None
    _opened: list[socket.socket] = field(default_factory=list)

    def explicit(self) -> socket.socket:
        """A connection to the attempt's proxy port."""
        if self.sandbox is not None:
            sock = self.sandbox.dial("127.0.0.1", netns.EXPLICIT_PORT)
        else:
            assert self.port is not None
            sock = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        self._opened.append(sock)
        return sock

    def dial(self, address: str, port: int) -> socket.socket:
        """A connection that is captured."""
        assert self.sandbox is not None
        sock = self.sandbox.dial(address, port)
        self._opened.append(sock)
        return sock

    def is_reset(self, address: str, port: int) -> bool:
        """Whether a captured connection is ended without a byte. That may be before `connect` has returned."""
        try:
            return is_cut(self.dial(address, port))
        except ConnectionResetError:
            return True

    def tunnel(self, host: str, port: int) -> socket.socket:
        """A connection through CONNECT, which must succeed."""
        sock = self.explicit()
        sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            part = sock.recv(1)
            assert part, head
            head += part
        assert head.startswith(b"HTTP/1.1 200 "), head
        return sock

    def tls(
        self, sock: socket.socket, name: str | None, alpn: Sequence[str] = ("http/1.1",), *, ca: Path | None = None
    ) -> ssl.SSLSocket:
        """TLS with the proxy's authority trusted, or another."""
        context = ssl.create_default_context(cafile=str(ca or self.rig.certificate))
        context.check_hostname = name is not None
        if alpn:
            context.set_alpn_protocols(list(alpn))
        wrapped = context.wrap_socket(sock, server_hostname=name)
        self._opened.append(wrapped)
        return wrapped

    def https(self, host: str, port: int = 443, name: str | None = None, alpn: Sequence[str] = ()) -> ssl.SSLSocket:
        return self.tls(self.tunnel(host, port), host if name is None else name, alpn or ("http/1.1",))

    def amend(self, grant: Grant | None) -> None:
        """Put a grant beside the attempt's own. What it takes away is over when this returns."""
        assert self.rig.call(self.rig.proxy.amend(self.grant.attempt_id, grant)) is True

    def end(self) -> NetworkCounts:
        """Detach. All that the attempt has caused is in the log then."""
        if self._counts is None:
            end = AttemptEnd("success", "exit", 0, 1.0)
            self._counts = self.rig.call(self.rig.proxy.detach(self.grant.attempt_id, end))
            self.close_clients()
        return self._counts

    def close_clients(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        """The attempt's lines so far that have these values."""
        return [
            event
            for event in self.rig.events()
            if event.get("attempt_id") == self.grant.attempt_id
            and all(event.get(key) == value for key, value in fields.items())
        ]

    def denials(self) -> list[str]:
        return [event["reason"] for event in self.events(decision="deny")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.rig.proxy.lost.is_set():
            self.close_clients()
        else:
            self.end()


class Rig:
    """The proxy process and what starts attempts on it."""

    def __init__(
        self, directory: Path, ca_file: Path | None, code: str = "from proxy import server; server.main()"
    ) -> None:
        self._loop = Loop()
        self._stderr = directory / "stderr"
        self._stderr.parent.mkdir(parents=True, exist_ok=True)
        # Not by a shell: its child's standard error goes to a file from the first byte on.
        redirect = f"import os; os.dup2(os.open({str(self._stderr)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)"
        command = [sys.executable, "-P", "-c", f"{redirect}\n{code}"]
        self.audit_path = directory / "state" / "audit.jsonl"
        self.config = ProxyConfig(directory / "authority", self.audit_path, ca_file)
        self.proxy = self.call(Proxy.start(self.config, command=command))
        self.certificate = self.call(self.proxy.certificate())
        self.call(self.proxy.ready())
        self._sandboxes: list[Sandbox] = []
        self._attempts: list[Attempt] = []
        self._events: list[dict[str, Any]] = []
        self._read = 0

    def call[T](self, work: Any) -> Any:
        return self._loop.call(work)

    def attach(self, grant: Grant, listeners: Sequence[tuple[str, socket.socket]]) -> None:
        self.call(self.proxy.attach(grant, listeners, AttemptStart("python", None)))

    def explicit(self, grant: Grant) -> Attempt:
        """An attempt that has only its proxy port, on this host's loopback."""
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self.attach(grant, [("explicit", listener)])
        return self._keep(Attempt(self, grant, port))

    def captured(self, grant: Grant) -> Attempt:
        """An attempt in a network namespace of its own, with all listeners."""
        sandbox = Sandbox()
        self._sandboxes.append(sandbox)
        self.attach(grant, sandbox.listeners)
        return self._keep(Attempt(self, grant, sandbox=sandbox))

    def _keep(self, attempt: Attempt) -> Attempt:
        self._attempts.append(attempt)
        return attempt

    def events(self) -> list[dict[str, Any]]:
        with self.audit_path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._events.append(json.loads(line))
        return self._events

    def resident_bytes(self) -> int:
        return _status(self.proxy.pid, "VmRSS")

    def peak_bytes(self) -> int:
        return _status(self.proxy.pid, "VmHWM")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.proxy.pid}/fd"))

    def close_clients(self) -> None:
        for attempt in self._attempts:
            attempt.close_clients()

    def close(self) -> None:
        self.close_clients()
        self.call(self.proxy.close())
        for sandbox in self._sandboxes:
            sandbox.close()
        self._loop.close()

    def complaints(self) -> list[str]:
        """What has gone wrong in the process, by its standard error: nothing that code does may be among it.

        The executor's mistakes are, and so is a log that cannot be written; they are not counted here.
        """
        lines = [line for line in self._stderr.read_text().splitlines() if line.startswith("sluicegate proxy: ")]
        return [line for line in lines if "proxy.server:" not in line and "the audit log" not in line]


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"`{key}` is not in the process's status")


def rule(host: str, *ports: int, **more: Any) -> Rule:
    return Rule(id=f"rule:{host}", host=parse_host(host), ports=ports or None, **more)


def tcp_rule(host: str, *ports: int) -> Rule:
    return rule(host, *ports, protocol=Protocol.TCP)


def grant(*rules: Rule, hosts: dict[str, str] | None = None, mode: Mode = Mode.NAMED, **more: Any) -> Grant:
    """A grant whose allow list is `rules`. `hosts` are static answers."""
    return Grant(
        call_id="call-" + secrets.token_hex(4),
        attempt_id="attempt-" + secrets.token_hex(4),
        policy_name="tests",
        policy_digest="digest",
        mode=mode,
        layers=(RuleLayer(name="call", rules=rules),) if rules else (),
        hosts=tuple(
            StaticHost(host=parse_host(host), addresses=(ip_address(address),))
            for host, address in (hosts or {}).items()
        ),
        **more,
    )


class Peers:
    """The peers of most tests, and the static answers that lead to them."""

    def __init__(self, loop: Loop, directory: Path) -> None:
        self.loop = loop
        self.authority = trustme.CA()
        self.ca_file = write_authority(self.authority, directory / "upstream-ca.pem")
        good, bad, two = (world.public_address() for _ in range(3))
        self.allowed = Http(loop, good, 80)
        self.allowed_tls = Https(loop, good, 443, self.authority, ["allowed.test"])
        self.other = Http(loop, bad, 80)
        self.other_tls = Https(loop, bad, 443, self.authority, ["other.test"])
        self.h2 = Http2(loop, two, 443, self.authority, ["h2.test"])
        self.hosts = {"allowed.test": good, "other.test": bad, "h2.test": two}

    @property
    def all(self) -> list[Any]:
        return [self.allowed, self.allowed_tls, self.other, self.other_tls, self.h2]

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """No peer sees a connection meanwhile, and none is opened to anywhere."""
        for peer in self.all:
            peer.forget()
        yield
        assert [f"{peer.address}:{peer.port}" for peer in self.all if not peer.untouched] == []

    def forget(self) -> None:
        for peer in self.all:
            peer.forget()

    def close(self) -> None:
        for peer in self.all:
            peer.close()


class Http2Client:
    """An HTTP/2 client over a socket that has negotiated it. Nothing that the protocol forbids is kept from it."""

    def __init__(self, sock: socket.socket, *, window: int | None = None) -> None:
        configuration = h2.config.H2Configuration(
            client_side=True, header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.sock = sock
        self.connection = h2.connection.H2Connection(configuration)
        if window is not None:
            self.connection.local_settings.initial_window_size = window
            self.connection.local_settings.acknowledge()  # else the default is sent
        self.connection.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.sock.sendall(self.connection.data_to_send())

    def start(self, headers: Sequence[tuple[str, str]], *, end_stream: bool) -> int:
        stream = self.connection.get_next_available_stream_id()
        self.connection.send_headers(stream, list(headers), end_stream=end_stream)
        self.flush()
        return stream

    def receive(self) -> list[Any]:
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        received = self.connection.receive_data(data)
        self.flush()
        return received

    def answer(self, stream: int) -> Answer:
        """Wait for the stream's response."""
        headers: dict[str, str] = {}
        body = bytearray()
        while True:
            for event in self.receive():
                if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream:
                    headers = {str(key): str(value) for key, value in event.headers or ()}
                elif isinstance(event, h2.events.DataReceived) and event.stream_id == stream:
                    body += event.data or b""
                    self.connection.acknowledge_received_data(event.flow_controlled_length or 0, stream)
                    self.flush()
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    return Answer(int(headers[":status"]), "", headers, bytes(body))
                elif isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)):
                    raise ConnectionResetError(f"the stream ended: {event}")

    def get(self, authority: str, path: str = "/", *more: tuple[str, str]) -> Answer:
        return self.answer(self.start(h2_headers(authority, path, *more), end_stream=True))


def h2_headers(
    authority: str, path: str = "/", *more: tuple[str, str], method: str = "GET", scheme: str = "https"
) -> list[tuple[str, str]]:
    return [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path), *more]


def dns_query(
    name: bytes | str, kind: int = 1, *, ident: int = 0x1234, tail: bytes = b"", flags: int = 0x0100
) -> bytes:
    """A query for a name in text, or in the message's own form when it is bytes."""
    if isinstance(name, str):
        name = b"".join(bytes([len(label)]) + label.encode("latin-1") for label in name.split(".") if label) + b"\0"
    return struct.pack("!HHHHHH", ident, flags, 1, 0, 0, 1 if tail else 0) + name + struct.pack("!HH", kind, 1) + tail


@dataclass(frozen=True)
class DnsAnswer:
    """A response, as far as the tests look."""

    ident: int
    code: int
    addresses: tuple[str, ...]
    question: bytes


def read_dns(data: bytes) -> DnsAnswer:
    ident, flags, questions, answers, _, _ = struct.unpack_from("!HHHHHH", data)
    assert flags & 0x8000
    place = 12
    for _ in range(questions):
        while data[place]:
            place += 1 + data[place]
        place += 5
    addresses = []
    for number in range(answers):
        start = place + number * 16
        assert struct.unpack_from("!HHHIH", data, start)[:3] == (0xC00C, 1, 1)
        addresses.append(socket.inet_ntoa(data[start + 12 : start + 16]))
    return DnsAnswer(ident, flags & 0xF, tuple(addresses), data[12:place])
