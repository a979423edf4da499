"""What `explain` says of a request is what the proxy does with it.

Policies are drawn as text and go through the same reading and narrowing as a real call's. Requests are made by a client
of this module's own, from the URL as a person writes it and in three ways: through the proxy's port, through SOCKS5, and
captured. What the proxy did is read from its answer, from its log, and from whether anything arrived anywhere.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import secrets
import socket
import ssl
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

from proxy.destinations import Host, observe_host
from proxy.explain import explain, parse_target, verdict
from proxy.network import Grant, Mode, RequestLayer
from sandbox.narrowing import Refused, narrow
from sandbox.policy_cases import Asked
from sandbox.policy_file import InvalidPolicy, LoadedPolicy, parse_policy, to_yaml
from sandbox.registries import RegistryRules, rules_from_policy
from tests import world
from tests.proxy.rig import Answer, Attempt, Rig, Sandbox, dns_query, read_answer, read_dns
from tests.servers import Loop, Peer, TlsPeer, write_authority

WAYS = ("proxy", "socks5", "captured")
HTTP_PORTS, TLS_PORTS, RAW_PORT = (80, 8080), (443, 8443), 5432
PORTS = (*HTTP_PORTS, *TLS_PORTS, RAW_PORT)
PUBLIC, PRIVATE = world.public_address(), "127.0.0.1"
NAMES = ("a.test", "x.a.test", "b.test", "pin.test", "xn--bcher-kva.test")
HOSTS = {
    "a.test": PUBLIC, "x.a.test": [PRIVATE], "b.test": ["10.0.0.1", PUBLIC], "pin.test": PUBLIC,
    "xn--bcher-kva.test": [PRIVATE, "10.0.0.1"], "y.a.test": PUBLIC,
}  # fmt: skip


# Policies and calls


def _with(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


_ports = st.lists(st.sampled_from(PORTS), min_size=1, max_size=4, unique=True)
_methods = st.sampled_from([["GET", "HEAD"], ["GET"], ["POST"], ["GET", "POST", "DELETE"]])
_paths = st.sampled_from([["/public/**"], ["/*"], ["/", "/public/*"], ["/caf\u00e9"]])
_rule_hosts = st.sampled_from(["a.test", "x.a.test", "b.test", "pin.test", "b\u00fccher.test"])


@st.composite
def allow_rules(draw: st.DrawFn) -> dict[str, Any]:
    rule: dict[str, Any] = {"host": draw(_rule_hosts)}
    if draw(st.integers(0, 3)) == 0:
        return rule | {"protocol": "tcp", "ports": draw(_ports)}
    return rule | draw(_with(ports=_ports, methods=_methods, paths=_paths, subdomains=st.booleans()))


@st.composite
def deny_rules(draw: st.DrawFn) -> dict[str, Any]:
    subject = draw(
        st.builds(lambda host: {"host": host}, _rule_hosts)
        | st.sampled_from([{"cidr": f"{PUBLIC}/32"}, {"cidr": "10.0.0.0/8"}, {"cidr": "127.0.0.0/8"}])
    )
    return {**subject, **draw(_with(ports=_ports, methods=_methods, paths=_paths))}


_private = st.sampled_from(
    [
        {"host": "x.a.test", "cidr": "127.0.0.0/8"}, {"host": "x.a.test", "cidr": "127.0.0.1/32", "ports": [80, 443]},
        {"host": "b.test", "cidr": "10.0.0.0/8", "ports": [443]}, {"host": "127.0.0.1", "cidr": "127.0.0.1/32"},
        {"registries": True, "cidr": "127.0.0.1/32"}, {"host": "xn--bcher-kva.test", "cidr": "127.0.0.1/32"},
    ]
)  # fmt: skip


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    open_ = draw(st.integers(0, 3)) == 0
    network: dict[str, Any] = {
        "hosts": HOSTS,
        "deny": draw(st.just([]) | st.lists(deny_rules(), max_size=2)),
        "private_addresses": draw(st.lists(_private, max_size=4, unique_by=str)),
        "registries": {"python": [draw(st.sampled_from(["https://x.a.test/simple/", "http://a.test:8080/simple/"]))]},
        "modes": ["block-all", "registry-default", "named", *(["unrestricted"] if open_ else [])],
        **draw(_with(ports=_ports)),
    }
    if not open_:
        network["allow"] = draw(st.lists(allow_rules(), min_size=1, max_size=4))
    if draw(st.booleans()):
        network["inspect"] = {"passthrough": ["pin.test"]}
    return {"version": 1, "name": "drawn", "network": network}


@dataclass(frozen=True)
class Drawn:
    policy: LoadedPolicy
    asked: Asked
    grant: Grant


@st.composite
def granted(draw: st.DrawFn) -> Drawn:
    """A policy, a call under it that it does not refuse, and the grant that comes of the two."""
    document = draw(policies())
    try:
        loaded = parse_policy(json.dumps(document))
    except InvalidPolicy:
        assume(False)
        raise AssertionError from None
    registries = rules_from_policy("python", loaded.policy.network.registries.python or ())
    may_name = [name for name in ("test.test", *NAMES, "y.a.test") if _may_be_asked(loaded, registries, (name,))]
    calls = [Asked(False, None), Asked(True, None)]
    calls += [Asked(True, ())] * 3 if Mode.UNRESTRICTED in loaded.policy.network.modes else []
    call = st.sampled_from(calls)
    if may_name:
        some = st.lists(st.sampled_from(may_name), min_size=1, max_size=3, unique=True)
        named = some.map(lambda names: Asked(True, tuple(names)))
        call = st.one_of(named, named, named, call)
    asked = draw(call)
    grant = _narrowed(loaded, registries, asked)
    return Drawn(loaded, asked, grant)


def _narrowed(loaded: LoadedPolicy, registries: RegistryRules, asked: Asked) -> Grant:
    return narrow(
        loaded, registries, call_id="call", attempt_id=f"attempt-{secrets.token_hex(8)}", language="python",
        allow_network=asked.allow_network, domains=asked.domains,
    )  # fmt: skip


def _may_be_asked(loaded: LoadedPolicy, registries: RegistryRules, domains: tuple[str, ...]) -> bool:
    try:
        _narrowed(loaded, registries, Asked(True, domains))
    except Refused:
        return False
    return True


# Requests


@dataclass(frozen=True)
class Asking:
    """One request: as it is written for `explain`, and its parts as a client sends them."""

    way: str
    scheme: str
    host: str
    port: int | None
    path: str
    method: str

    @property
    def url(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}"

    @property
    def tls(self) -> bool:
        return self.scheme.lower() in ("https", "wss")

    @property
    def raw(self) -> bool:
        return self.scheme == "tcp"

    @property
    def number(self) -> int:
        return self.port if self.port is not None else 443 if self.tls else 80

    @property
    def sent_host(self) -> str:
        """As clients send it: international names encoded."""
        return self.host if self.host.isascii() else self.host.encode("idna").decode()

    @property
    def authority(self) -> str:
        return self.sent_host if self.port is None else f"{self.sent_host}:{self.port}"

    @property
    def bare_host(self) -> str:
        return self.sent_host.strip("[]")

    @property
    def literal(self) -> str | None:
        """The address that the host is, whatever its spelling."""
        try:
            return str(ipaddress.ip_address(self.bare_host))
        except ValueError:
            pass
        try:
            return socket.inet_ntoa(socket.inet_aton(self.bare_host))
        except OSError:
            return None

    @property
    def leads_somewhere(self) -> bool:
        """Whether somebody stands there who understands it."""
        known = self.literal is not None or self.bare_host.lower().rstrip(".") in (*HOSTS, "b\u00fccher.test")
        return known and (self.tls or self.number not in TLS_PORTS)

    @property
    def sent_path(self) -> str:
        """Without the fragment, which clients keep to themselves."""
        path = self.path.partition("#")[0]
        return "".join(c if c.isascii() else "".join(f"%{byte:02X}" for byte in c.encode()) for c in path) or "/"

    def head(self, target: str | None = None) -> bytes:
        lines = [f"{self.method} {target or self.sent_path} HTTP/1.1", f"Host: {self.authority}"]
        if self.method not in ("GET", "HEAD"):
            lines.append("Content-Length: 0")
        if self.scheme in ("ws", "wss"):
            lines += ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
            lines += ["Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg=="]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


_SPELLINGS = (
    *NAMES, *NAMES, *NAMES, "A.Test", "x.a.test.", "Pin.TEST", "b\u00fccher.test", "y.a.test", "other.test", "testa.test",
    PUBLIC, PRIVATE, "127.1", "0x7f000001", "2130706433", "10.0.0.1", "169.254.169.254", "[::1]", f"[::ffff:{PUBLIC}]",
    "[fd00::1]",
)  # fmt: skip


def _is_reached(drawn: Drawn, name: str) -> bool:
    host = observe_host(name)
    if not isinstance(host, Host) or drawn.asked.mode is Mode.BLOCK_ALL:
        return False
    return all(any(rule.covers(host) for rule in layer.rules) for layer in drawn.grant.layers)


_ODD_METHODS = ("post", "PRI")
_SENT_METHODS = ("GET", "GET", "GET", "POST", "POST", "HEAD", "DELETE", "M-SEARCH", *_ODD_METHODS)
_LOOPBACK = (PRIVATE, "127.1", "0x7f000001", "2130706433", "[::1]")
_PATHS = ("", "/", "/public/a", "/public/a?q=/../x", "/public/../x", "/public//x", "/public/%2e%2e/x", "/caf\u00e9",
          "/caf%C3%A9", "/PUBLIC/a", "/public/a;v=1", "/x%2fy", "/a#/public/b", "/public/%zz", "/public", "/a\u2025b")  # fmt: skip


@st.composite
def requests(draw: st.DrawFn, drawn: Drawn) -> Asking:
    """Half of them to what the call may reach by name, or a spelling of it."""
    reached = tuple(name for name in _SPELLINGS if _is_reached(drawn, name))
    scheme = draw(st.sampled_from(["http", "http", "https", "https", "HTTPS", "ws", "wss", "tcp"]))
    favoured = draw(st.booleans())
    host = draw(st.sampled_from(reached if reached and favoured else _SPELLINGS))
    # Loopback is the sandbox's own unless the proxy is asked for it, so what is dialled there is not captured.
    ways = [way for way in WAYS if way != "captured" or host not in _LOOPBACK]
    port = draw(st.sampled_from(PORTS) if scheme == "tcp" else st.none() | st.none() | st.sampled_from(PORTS))
    return Asking(
        way=draw(st.sampled_from(ways)),
        scheme=scheme,
        host=host,
        port=port,
        path="" if scheme == "tcp" else draw(st.sampled_from(_PATHS)),
        method="GET" if scheme == "tcp" else draw(st.sampled_from(_SENT_METHODS)),
    )


# What the proxy does


@dataclass(frozen=True)
class Done:
    """What came of a request, whether it arrived, and the reason and rule that the answer, if any, and the log give."""

    allowed: bool
    arrived: bool
    said: tuple[str, str | None] | None
    logged: tuple[str, str | None] | None


class Answering(Peer):
    """Answers whatever comes, in HTTP where that is spoken, and ends: nobody has to wait for it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if b" HTTP/1." in self.note(await reader.read(65536)):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            writer.write(b"recorded\n")
        await writer.drain()


class AnsweringTls(TlsPeer, Answering):
    """The same behind TLS."""


class Bench:
    """One proxy, one sandbox's network whose listeners serve each attempt in turn, and the peers outside."""

    def __init__(self, directory: Path, loop: Loop) -> None:
        authority = trustme.CA()
        ca_file = write_authority(authority, directory / "upstream-ca.pem")
        names = [*HOSTS, PUBLIC, PRIVATE]
        self.peers: list[Peer] = []
        for address in (PUBLIC, PRIVATE):
            self.peers += [Answering(loop, address, port) for port in (*HTTP_PORTS, RAW_PORT)]
            self.peers += [AnsweringTls(loop, address, port, authority, names) for port in TLS_PORTS]
        self.rig = Rig(directory, ca_file)
        self.sandbox = Sandbox()
        self._read = 0

    def attach(self, grant: Grant) -> Attempt:
        self.rig.attach(grant, self.sandbox.listeners)
        return Attempt(self.rig, grant, sandbox=self.sandbox)

    def denials(self) -> list[dict[str, Any]]:
        """The denials logged since the last time."""
        with self.rig.audit_path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines()
            self._read = file.tell()
        return [event for event in map(json.loads, lines) if event.get("decision") == "deny"]

    def touched(self) -> bool:
        return any(not peer.untouched for peer in self.peers)

    def forget(self) -> None:
        for peer in self.peers:
            peer.forget()

    def close(self) -> None:
        self.rig.close()
        self.sandbox.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="sg-") as directory, Loop() as loop:
        bench = Bench(Path(directory), loop)
        yield bench
        bench.close()


class NoAnswer(Exception):
    """There is no connection to speak over."""


def _open(attempt: Attempt, asking: Asking) -> tuple[socket.socket, Answer | None]:
    """A connection that leads to the destination, or the answer that there is none."""
    sandbox = attempt.sandbox
    assert sandbox is not None
    if asking.way == "captured":
        address = asking.literal
        if address is None:
            with sandbox.open(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
                resolver.connect(("127.0.0.1", 53))
                resolver.send(dns_query(asking.bare_host.rstrip(".")))
                found = read_dns(resolver.recv(4096)).addresses
            if not found:
                raise NoAnswer
            (address,) = found
        return attempt.dial(address, asking.number), None
    sock = attempt.explicit()
    if asking.way == "socks5":
        name = asking.bare_host.encode()
        port = struct.pack("!H", asking.number)
        sock.sendall(b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(name)]) + name + port)
        reply = sock.recv(2) + sock.recv(10)
        if len(reply) < 4 or reply[3]:
            raise NoAnswer
        return sock, None
    if asking.tls or asking.raw:
        target = f"{asking.sent_host}:{asking.number}"
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        answer = _head_of(sock)
        if answer.status != 200:
            return sock, answer
    return sock, None


def _head_of(sock: socket.socket) -> Answer:
    """The answer to a CONNECT: nothing behind a 200 is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = sock.recv(1)
        if not part:
            raise NoAnswer
        head += part
    status = int(head.split(b" ", 2)[1])
    if status == 200:
        return Answer(status, "", {}, b"")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    body = b""
    while len(body) < length:
        body += sock.recv(length - len(body))
    return Answer(status, "", {}, body)


def _encrypted(sock: socket.socket, asking: Asking) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context.wrap_socket(sock, server_hostname=None if asking.literal else asking.bare_host.rstrip("."))


def _send(attempt: Attempt, asking: Asking) -> Answer | bytes:
    """The answer, or the bytes that came. Raises `NoAnswer` or `OSError` when there was neither."""
    sock, answer = _open(attempt, asking)
    if answer is not None:
        return answer
    if asking.raw:
        sock.sendall(b"\x00CANARY\r\n\r\n")
        data = sock.recv(65536)
        if not data:
            raise NoAnswer
        return data
    if asking.tls:
        sock = _encrypted(sock, asking)
        attempt._opened.append(sock)
    absolute = asking.way == "proxy" and not asking.tls
    sock.sendall(asking.head(f"http://{asking.authority}{asking.sent_path}" if absolute else None))
    return read_answer(sock, asking.method)


def do(bench: Bench, attempt: Attempt, asking: Asking) -> Done:
    bench.forget()
    answer: Answer | bytes | None
    try:
        answer = _send(attempt, asking)
    except (OSError, http.client.HTTPException, NoAnswer) as error:
        note(f"no answer: {error!r}")
        answer = None
    attempt.close_clients()
    attempt._opened.clear()
    denials = bench.denials()
    logged = (denials[0]["reason"], denials[0]["rule"]) if denials else None
    said: tuple[str, str | None] | None = None
    if isinstance(answer, Answer) and answer.status in (400, 403):
        to_head = not answer.body
        said = (
            (answer.headers["x-sluicegate-reason"], logged[1] if logged else None)
            if to_head
            else (answer.code, answer.json.get("rule"))
        )
    return Done(not denials, bench.touched(), said, logged)


def explained_as(grant: Grant, asking: Asking) -> str:
    """The target whose explanation is that of the request.

    Plain HTTP that the proxy is not itself asked for is only bytes where raw TCP passes unread, or its method is odd.
    """
    steps = explain(grant, parse_target(asking.url))
    only_bytes = asking.method in _ODD_METHODS or any(step.request.layer is RequestLayer.TCP for step in steps)
    plain = asking.way != "proxy" and not asking.tls
    return f"tcp://{asking.host}:{asking.number}" if plain and only_bytes else asking.url


def test_an_explanation_is_what_the_proxy_does(bench: Bench) -> None:
    """Verdict, reason and rule, by every way; a denial touches nobody, an allow somebody."""
    seen: Counter[tuple[str, bool]] = Counter()

    @settings(
        max_examples=250, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(granted(), st.data())
    def check(drawn: Drawn, data: st.DataObject) -> None:
        note(f"{drawn.asked} under {to_yaml(drawn.policy.policy)}")
        grant = drawn.grant.model_copy(update={"attempt_id": f"attempt-{secrets.token_hex(8)}"})
        with bench.attach(grant) as attempt:
            for asking in data.draw(st.lists(requests(drawn), min_size=2, max_size=6)):
                steps = explain(grant, parse_target(explained_as(grant, asking)), asking.method)
                said, done = verdict(steps), do(bench, attempt, asking)
                note(f"{asking}\n  explained: {said}\n  done: {done}")
                seen[asking.way, done.allowed] += 1
                assert said.allowed is done.allowed
                assert done.arrived is (done.allowed and asking.leads_somewhere)
                assert done.said in (None, done.logged)
                if not said.allowed:
                    assert done.logged == (said.reason.value, said.rule)

    check()
    assert min(seen[way, allowed] for way in WAYS for allowed in (True, False)) > 5, seen
