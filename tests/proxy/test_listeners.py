"""Connections are attributed, limited and ended; and whatever fails inside the proxy is a denial."""

from __future__ import annotations

import contextlib
import http.client
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import h2.connection
import pytest

from proxy.network import Mode
from tests import world
from tests.proxy.rig import (
    PATIENCE,
    Attempt,
    Http2Client,
    Peers,
    Rig,
    ask,
    dns_query,
    get,
    grant,
    h2_headers,
    is_cut,
    read_answer,
    read_dns,
    read_exactly,
    read_to_end,
    rule,
    tcp_rule,
)
from tests.servers import BannerTcp, Http, RecordingTcp

HOOKS = (
    "next_layer",
    "http_connect",
    "tls_clienthello",
    "tls_start_client",
    "tls_start_server",
    "requestheaders",
    "request",
    "responseheaders",
    "response",
    "server_connect",
    "server_connected",
)


class TestLimits:
    def test_connections_beyond_the_limit_are_reset_and_told_once(self, rig: Rig, peers: Peers) -> None:
        with rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts, max_connections=20)) as attempt:
            held = [attempt.explicit() for _ in range(20)]
            for sock in held:
                sock.sendall(get("allowed.test", target="http://allowed.test/"))
                assert read_answer(sock).status == 200
            for _ in range(300):
                assert refused(attempt)
            assert attempt.denials() == ["limit_exceeded"]
            assert ask(held[0], get("allowed.test", target="http://allowed.test/")).status == 200

    def test_after_a_crowd_has_gone_there_is_room_and_a_new_crowd_is_told_again(self, rig: Rig, peers: Peers) -> None:
        with rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts, max_connections=4)) as attempt:
            for crowds in (1, 2):
                held = [attempt.explicit() for _ in range(4)]
                for sock in held:
                    assert ask(sock, get("allowed.test", target="http://allowed.test/")).status == 200
                assert refused(attempt)
                assert attempt.denials() == ["limit_exceeded"] * crowds
                for sock in held:
                    sock.sendall(get("allowed.test", "/", "Connection: close", target="http://allowed.test/"))
                    assert read_answer(sock).status == 200
                    assert read_to_end(sock) == b""

    @pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
    def test_thousands_of_connections_cost_the_proxy_little(self, rig: Rig, peers: Peers, count: int) -> None:
        """And another attempt is served meanwhile."""
        with (
            rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as flood,
            rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as other,
        ):
            before, descriptors = rig.resident_bytes(), rig.descriptors()
            opened = []
            with many_descriptors():
                for number in range(count):
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        opened.append(flood.explicit())
                    if number % 500 == 0:
                        assert ask(other.https("allowed.test"), get("allowed.test")).status == 200
                assert rig.descriptors() - descriptors < 2000  # the served ones, and those being turned away
                assert rig.resident_bytes() - before < 64 * 1024 * 1024
                flood.close_clients()
            assert 1 <= len(flood.denials()) < 20

    def test_connections_to_servers_are_limited_too(self, rig: Rig, peers: Peers) -> None:
        """One client connection can lead to many servers."""
        ports = range(3000, 3006)
        with contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(Http(peers.loop, peers.other.address, port))
            many = grant(rule("many.test", *ports), hosts={"many.test": peers.other.address}, max_connections=2)
            with rig.explicit(many) as attempt:
                sock = attempt.explicit()
                answers = [
                    ask(sock, get(f"many.test:{port}", target=f"http://many.test:{port}/")) for port in ports[:5]
                ]
        assert [answer.status for answer in answers] == [200, 200, 200, 200, 403]
        assert answers[4].code == "limit_exceeded"

    def test_a_log_that_an_attempt_has_filled_is_a_denial(self, tight: Rig, peers: Peers) -> None:
        """A program must not be able to roll over what it did. Other attempts go on."""
        with tight.captured(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            before = attempt.https("allowed.test")
            assert ask(before, get("allowed.test")).status == 200
            sock = attempt.explicit()
            served = 0
            while (answer := ask(sock, get("allowed.test", target="http://allowed.test/"))).status == 200:
                served += 1
            assert answer.code == "limit_exceeded"
            assert 125 < served < 150
            with peers.silence():
                for cut in (before, sock):
                    with contextlib.suppress(ConnectionError):
                        cut.sendall(get("allowed.test", target="http://allowed.test/"))
                    assert is_cut(cut)
                assert refused(attempt)
                assert attempt.is_reset("192.0.2.1", 80)
                assert resolve(attempt, "allowed.test") == 3
            assert 300 <= len(attempt.events()) <= 303
            assert attempt.denials().count("limit_exceeded") == 1
        with tight.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as other:
            assert ask(other.https("allowed.test"), get("allowed.test")).status == 200


TIGHT = """
from proxy import attempts, listeners, server
attempts._MAX_AUDIT_LINES = 300
attempts._BURST, attempts._PER_SECOND = 20, 20
attempts._ANSWERS_BURST, attempts._ANSWERS_PER_SECOND = 20, 20
listeners._UNFINISHED_SECONDS, listeners._WATCH_SECONDS = 1.0, 0.1
server.main()
"""


@pytest.fixture(scope="module")
def tight(directory: Path, peers: Peers) -> Iterator[Rig]:
    """A proxy whose limits of time and number are small."""
    rig = Rig(directory / "tight", peers.ca_file, TIGHT)
    yield rig
    rig.close()
    assert rig.complaints() == []


class TestShares:
    """What one attempt asks of the proxy waits when it is too much, is told once, and keeps nobody else waiting."""

    def test_connections(self, tight: Rig, peers: Peers) -> None:
        with (
            tight.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt,
            tight.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as other,
        ):
            started = time.monotonic()
            held = [attempt.explicit() for _ in range(50)]
            for sock in held:
                sock.sendall(get("allowed.test", target="http://allowed.test/"))
            assert ask(other.https("allowed.test"), get("allowed.test")).status == 200
            assert time.monotonic() - started < 1
            assert [read_answer(sock).status for sock in held] == [200] * 50
            assert time.monotonic() - started > 1
            assert attempt.denials() == ["limit_exceeded"]
            assert other.denials() == []

    def test_queries_in_datagrams(self, tight: Rig, peers: Peers) -> None:
        with tight.captured(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            assert attempt.sandbox is not None
            with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as sock:
                sock.connect(("192.0.2.1", 53))
                started = time.monotonic()
                for number in range(50):
                    sock.send(dns_query("allowed.test", ident=number))
                answered = {read_dns(sock.recv(4096)).ident for _ in range(50)}
            assert answered == set(range(50))
            assert time.monotonic() - started > 1
            assert attempt.denials() == ["limit_exceeded"]

    def test_queries_over_connections(self, tight: Rig, peers: Peers) -> None:
        with tight.captured(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            query = dns_query("allowed.test")
            message = len(query).to_bytes(2) + query
            started = time.monotonic()
            socks = [attempt.dial("192.0.2.1", 53) for _ in range(5)]
            for sock in socks:
                sock.sendall(message * 10)
            for sock in socks:
                assert len(read_exactly(sock, 10 * (len(message) + 16))) == 10 * (len(message) + 16)
            assert time.monotonic() - started > 1
            assert attempt.denials() == ["limit_exceeded"]

    def test_requests_that_are_refused(self, tight: Rig, peers: Peers) -> None:
        with (
            tight.explicit(grant(rule("h2.test"), hosts=peers.hosts)) as attempt,
            tight.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as other,
        ):
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            started = time.monotonic()
            for number in range(50):
                assert client.get("other.test").status == 403
                if number == 30:
                    assert ask(other.https("allowed.test"), get("allowed.test")).status == 200
            assert time.monotonic() - started > 1
            assert attempt.denials().count("limit_exceeded") == 1
            assert other.denials() == []


# A program of its own, so that it keeps nobody here from measuring. Argument: the port; input: what is sent, and first
# whether inside HTTP/2's TLS. It connects again and again, and never reads.
FLOOD = """
import socket, ssl, sys, threading
h2 = sys.stdin.buffer.readline() == b"h2\\n"
payload = sys.stdin.buffer.read()
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
def flood():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30) as sock:
                if h2:
                    sock.sendall(b"CONNECT other.test:443 HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n")
                    sock.recv(4096)
                    sock = context.wrap_socket(sock, server_hostname="other.test")
                sock.settimeout(2)
                while True:
                    sock.sendall(payload)
        except OSError:
            pass
for _ in range(50 if h2 else 200):
    threading.Thread(target=flood, daemon=True).start()
threading.Event().wait()
"""


def h2_frames(kind: int, flags: int, bodies: Iterable[tuple[int, bytes]]) -> bytes:
    return b"".join(len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body for stream, body in bodies)


_H2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frames(4, 0, [(0, b"")])
_H2_HEAD = h2.connection.H2Connection().encoder.encode(h2_headers("other.test"), huffman=False)
FLOODS = {
    "requests that are denied": get("other.test", target="http://other.test/") * 2000,
    "requests that are allowed": get("allowed.test", target="http://allowed.test/") * 2000,
    "many header lines": (get("other.test", "/", *["a:b"] * 990, target="http://other.test/")) * 20,
    "crumbs of a body": get("other.test", "/", "Transfer-Encoding: chunked", method="POST", target="http://other.test/")
    + b"1\r\na\r\n" * 20_000,
    "HTTP/2 requests that are taken back": _H2_START
    + b"".join(
        h2_frames(1, 5, [(stream, _H2_HEAD)]) + h2_frames(3, 0, [(stream, bytes(4))]) for stream in range(1, 6000, 2)
    ),
    "HTTP/2 pings": _H2_START + h2_frames(6, 0, [(0, bytes(8))]) * 5000,
}


class TestFloods:
    @pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
    def test_nobody_else_waits(self, rig: Rig, peers: Peers, flood: bytes) -> None:
        """What is sent at once is not dealt with at once: others, and the executor, have their turn in between."""
        allowed = grant(rule("allowed.test"), hosts=peers.hosts)
        with rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            process = subprocess.Popen([sys.executable, "-c", FLOOD, str(attempt.port)], stdin=subprocess.PIPE)
            assert process.stdin is not None
            try:
                process.stdin.write((b"h2\n" if flood.startswith(_H2_START) else b"\n") + flood)
                process.stdin.close()
                waited = []
                until = time.monotonic() + PATIENCE
                while len(attempt.events()) < 20 and time.monotonic() < until:
                    time.sleep(0.05)
                assert len(attempt.events()) >= 20, "the control: it does flood"
                until = time.monotonic() + 4
                while time.monotonic() < until:
                    started = time.monotonic()
                    with rig.explicit(allowed.model_copy(update={"attempt_id": secrets.token_hex(4)})) as other:
                        waited.append(time.monotonic() - started)
                        started = time.monotonic()
                        assert ask(other.https("allowed.test"), get("allowed.test")).status == 200
                        waited.append(time.monotonic() - started)
                        started = time.monotonic()
                    waited.append(time.monotonic() - started)
                assert max(waited) < 2
            finally:
                process.kill()
                process.wait()
            attempt.end()


class TestUnfinished:
    """What a client has begun and does not end is ended, and told; what it never begins is ended."""

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"\x05",
            b"GET http://allowed.test/ HTTP/1.1\r\nHost: allo",
            b"CONNECT allowed.test:443 HTTP/1.1\r\n\r\n",
        ],
    )
    def test_at_the_proxy_port(self, tight: Rig, peers: Peers, sent: bytes) -> None:
        with tight.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            sock = attempt.explicit()
            sock.sendall(sent)
            assert b" 403 " not in read_to_end(sock)
            assert attempt.denials() == ["limit_exceeded"] * bool(sent)

    @pytest.mark.parametrize(
        "sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GE", b"GET / HTTP/1.1\r\n"]
    )
    def test_captured(self, tight: Rig, peers: Peers, sent: bytes) -> None:
        with tight.captured(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            assert attempt.sandbox is not None
            with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as resolver:
                resolver.connect(("192.0.2.1", 53))
                resolver.send(dns_query("allowed.test"))
                (address,) = read_dns(resolver.recv(4096)).addresses
            sock = attempt.dial(address, 443)
            sock.sendall(sent)
            assert is_cut(sock)
            assert attempt.denials() == ["limit_exceeded"] * bool(sent)

    def test_a_second_head_inside_tls(self, tight: Rig, peers: Peers) -> None:
        with tight.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            sock = attempt.https("allowed.test")
            assert ask(sock, get("allowed.test") + b"GET / HT").status == 200
            assert is_cut(sock)
            assert attempt.denials() == ["limit_exceeded"]

    def test_who_waits_between_requests_or_for_the_server_is_left_alone(self, tight: Rig, peers: Peers) -> None:
        with BannerTcp(peers.loop, peers.other.address, 2526) as mail:
            hosts = {**peers.hosts, "mail.test": mail.address}
            with tight.explicit(grant(rule("allowed.test"), tcp_rule("mail.test", 2526), hosts=hosts)) as attempt:
                idle, inside = attempt.explicit(), attempt.https("allowed.test")
                assert ask(idle, get("allowed.test", target="http://allowed.test/")).status == 200
                raw = attempt.tunnel("mail.test", 2526)
                assert raw.recv(3) == b"220"
                for _ in range(2):
                    assert is_cut(attempt.explicit())  # it takes as long as it takes
                assert ask(idle, get("allowed.test", target="http://allowed.test/")).status == 200
                assert ask(inside, get("allowed.test")).status == 200
                raw.sendall(b"QUIT\r\n")
                assert attempt.denials() == []


def refused(attempt: Attempt) -> bool:
    try:
        sock = attempt.explicit()
        sock.sendall(get("allowed.test", target="http://allowed.test/"))
        return is_cut(sock)
    except ConnectionError:
        return True


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestAttribution:
    def test_attempts_do_not_mix(self, rig: Rig, peers: Peers) -> None:
        """Ten at once, each with a name of its own, and each name denied to all others."""
        attempts = [rig.explicit(grant(rule(f"n{number}.test"), hosts={f"n{number}.test": peers.allowed.address}))
                    for number in range(10)]  # fmt: skip
        failures: list[str] = []

        def work(number: int) -> None:
            sock = attempts[number].explicit()
            for turn in range(20):
                name = f"n{number}.test" if turn % 2 else f"n{(number + turn) % 10}.test"
                expected = 200 if name == f"n{number}.test" else 403
                status = ask(sock, get(name, target=f"http://{name}/")).status
                if status != expected:
                    failures.append(f"{number}: {name}: {status}")
                if status == 403:  # which ends the connection
                    sock = attempts[number].explicit()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        for number, attempt in enumerate(attempts):
            attempt.end()
            allowed = attempt.events(event="decision", decision="allow")
            assert {event["host"] for event in allowed} == {f"n{number}.test"}
            assert {event["call_id"] for event in attempt.events()} == {attempt.grant.call_id}


class TestTheEnd:
    """Detaching ends everything at once, and the attempt's last line is its end."""

    def test_every_kind_of_connection_is_cut(self, rig: Rig, peers: Peers) -> None:
        with contextlib.ExitStack() as stack:
            mail = stack.enter_context(BannerTcp(peers.loop, peers.other.address, 2525))
            server = stack.enter_context(Http(peers.loop, peers.other.address, 3100))
            hosts = {**peers.hosts, "mail.test": mail.address, "own.test": mail.address}
            rules = (rule("allowed.test"), rule("h2.test"), tcp_rule("mail.test", 2525), rule("own.test", 3100))
            attempt = rig.captured(grant(*rules, hosts=hosts))
            raw = attempt.tunnel("mail.test", 2525)
            assert raw.recv(3) == b"220"
            download = attempt.https("allowed.test")
            download.sendall(get("allowed.test", "/bytes/1000000000"))
            waiting = attempt.tunnel("own.test", 3100)
            waiting.sendall(get("own.test:3100", "/hold"))
            server.wait(lambda journal: bool(journal.requests))
            idle, silent = attempt.https("allowed.test"), attempt.explicit()
            two = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            resolver = attempt.dial("192.0.2.1", 53)
            clients = [raw, waiting, idle, silent, two.sock, resolver, download]
            opened, attempt._opened = attempt._opened, []
            attempt.end()
            for sock in clients:
                read_to_end(sock)
            for sock in opened:
                sock.close()
        events = attempt.events()
        assert (events[-1]["event"], events[-1]["phase"]) == ("attempt", "end")
        ends = {event["host"]: event["outcome"] for event in events if event["event"] == "connection"}
        assert ends == {"mail.test": "aborted", "allowed.test": "aborted", "own.test": "aborted"}
        assert attempt.events(reason="internal_error") == []

    def test_nothing_is_accepted_any_more(self, rig: Rig, peers: Peers) -> None:
        attempt = rig.captured(grant(rule("allowed.test"), hosts=peers.hosts))
        attempt.end()
        assert attempt.sandbox is not None
        for _, listener in attempt.sandbox.listeners:
            listener.close()
        for address, port in (("127.0.0.1", 3128), (peers.allowed.address, 80), ("192.0.2.1", 53)):
            with pytest.raises(ConnectionRefusedError):
                attempt.dial(address, port)

    def test_nothing_is_left_open(self, rig: Rig, peers: Peers) -> None:
        def use() -> None:
            with rig.captured(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
                for _ in range(5):
                    assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200

        use()
        before = rig.descriptors()
        for _ in range(5):
            use()
        assert rig.descriptors() <= before


FAULTY = """
import sys
from pathlib import Path
from proxy import addon, dns, listeners, http_layers, server

class Planted(Exception):
    pass

def faulty(name, function):
    def hook(self, data):
        if FLAG.read_text() == name:
            raise Planted(name)
        return function(self, data)
    return hook

FLAG = Path({flag!r})
for name in {hooks!r}:
    setattr(addon.PolicyAddon, name, faulty(name, getattr(addon.PolicyAddon, name)))

answer = dns.answer
def broken_answer(attempt, connection, query):
    if FLAG.read_text() == "dns":
        raise Planted("dns")
    return answer(attempt, connection, query)
listeners.answer = broken_answer

handle = http_layers.GuardedHttp._handle_event
def broken_layer(self, event):
    if FLAG.read_text() == "layer":
        raise Planted("layer")
    yield from handle(self, event)
http_layers.GuardedHttp._handle_event = broken_layer

top = addon.PolicyAddon.top_layer
def broken_top(self, *arguments):
    if FLAG.read_text() == "top":
        raise Planted("top")
    return top(self, *arguments)
addon.PolicyAddon.top_layer = broken_top
server.main()
"""


@pytest.fixture(scope="module")
def flag(directory: Path) -> Path:
    path = directory / "fault"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def faulty(directory: Path, peers: Peers, flag: Path) -> Iterator[Rig]:
    """A proxy in which the fault that the flag's file names happens."""
    code = FAULTY.format(flag=str(flag), hooks=HOOKS)
    rig = Rig(directory / "faulty", peers.ca_file, code)
    yield rig
    rig.close()


class TestFaults:
    """An exception anywhere ends the connection that met it, in a denial, and no other."""

    @pytest.mark.parametrize("fault", [*HOOKS, "layer", "top"])
    def test_a_fault_ends_the_connection(self, faulty: Rig, peers: Peers, flag: Path, fault: str) -> None:
        with faulty.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            peers.forget()
            flag.write_text(fault)
            try:
                if fault == "response":  # all of it has passed by then
                    sock = attempt.https("allowed.test")
                    assert ask(sock, get("allowed.test")).status == 200
                    assert is_cut(sock)
                else:
                    with pytest.raises((OSError, http.client.HTTPException, AssertionError)):
                        read_whole(attempt)
            finally:
                flag.write_text("")
            assert attempt.denials() == ["internal_error"]
            if fault not in ("responseheaders", "response"):
                assert peers.allowed_tls.journal.requests == []
            assert read_whole(attempt) == 200

    def test_a_fault_at_dns_is_no_answer(self, faulty: Rig, peers: Peers, flag: Path) -> None:
        with faulty.captured(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            assert attempt.sandbox is not None
            with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as sock:
                sock.connect(("192.0.2.1", 53))
                flag.write_text("dns")
                try:
                    sock.send(dns_query("allowed.test"))
                    assert read_dns(sock.recv(4096)).code == 2
                    assert is_cut_tcp(attempt)
                finally:
                    flag.write_text("")
                sock.send(dns_query("allowed.test"))
                assert read_dns(sock.recv(4096)).code == 0


def read_whole(attempt: Attempt) -> int:
    sock = attempt.https("allowed.test")
    return ask(sock, get("allowed.test")).status


def is_cut_tcp(attempt: Attempt) -> bool:
    sock = attempt.dial("192.0.2.1", 53)
    query = dns_query("allowed.test")
    sock.sendall(len(query).to_bytes(2) + query)
    return is_cut(sock)


class TestWithoutLog:
    """What cannot be written is denied: at every layer, and from the moment on in which the log is gone."""

    @pytest.fixture
    def attempt(self, rig: Rig, peers: Peers) -> Iterator[Attempt]:
        hosts = {**peers.hosts, "mail.test": peers.other.address, "own.test": peers.other.address}
        rules = (rule("allowed.test"), tcp_rule("mail.test", 2525), rule("own.test", 3200))
        with rig.captured(grant(*rules, hosts=hosts)) as attempt:
            yield attempt

    def test_everything_is_denied_and_then_everything_works_again(
        self, attempt: Attempt, rig: Rig, peers: Peers
    ) -> None:
        plain = get("allowed.test", target="http://allowed.test/")
        connect = b"CONNECT mail.test:2525 HTTP/1.1\r\nHost: x\r\n\r\n"
        with RecordingTcp(peers.loop, peers.other.address, 2525) as mail:
            before = attempt.https("allowed.test")
            assert ask(before, get("allowed.test")).status == 200
            with without_log(rig), peers.silence():
                assert ask(attempt.explicit(), plain).code == "audit_unavailable"
                assert ask(attempt.https("allowed.test"), get("allowed.test")).code == "audit_unavailable"
                with contextlib.suppress(ConnectionError):  # the end of its first exchange may have come too late
                    assert ask(before, get("allowed.test")).code == "audit_unavailable"
                assert ask(attempt.explicit(), connect, "CONNECT").code == "audit_unavailable"
                assert attempt.is_reset(mail.address, 2525)
                assert resolve(attempt, "allowed.test") == 3
            assert mail.untouched
        assert ask(attempt.explicit(), plain).json["nonce"] == peers.allowed.nonce
        assert resolve(attempt, "allowed.test") == 0

    def test_an_exchange_whose_end_cannot_be_written_is_cut(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        with Http(peers.loop, peers.other.address, 3200) as server:
            sock = attempt.tunnel("own.test", 3200)
            sock.sendall(get("own.test:3200", "/hold"))
            server.wait(lambda journal: bool(journal.requests))
            with without_log(rig):
                server.release()
                read_to_end(sock)  # it does end
        assert attempt.events(event="connection", host="own.test") == []

    def test_a_full_disk_is_no_log(self, directory: Path, peers: Peers) -> None:
        place = directory / "small"
        place.mkdir()
        with world.small_filesystem(place, 64 * 1024):
            full = Rig(place, peers.ca_file)
            try:
                with full.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
                    assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200
                    filler = place / "filler"
                    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(512))
                    with peers.silence():
                        for _ in range(20):  # what is left of the log's last page is soon full
                            answer = ask(attempt.https("allowed.test", name="other.test"), get("other.test"))
                        assert answer.code == "audit_unavailable"
                        answer = ask(attempt.https("allowed.test"), get("allowed.test"))
                        assert answer.code == "audit_unavailable"
                    filler.unlink()
                    assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200
            finally:
                full.close()


@contextlib.contextmanager
def without_log(rig: Rig) -> Iterator[None]:
    """The log's place is taken by a directory meanwhile."""
    aside = rig.audit_path.with_name("aside")
    rig.audit_path.rename(aside)
    rig.audit_path.mkdir()
    try:
        yield
    finally:
        rig.audit_path.rmdir()
        aside.rename(rig.audit_path)


def resolve(attempt: Attempt, name: str) -> int:
    """The response code for a name."""
    assert attempt.sandbox is not None
    with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 53))
        sock.send(dns_query(name))
        return read_dns(sock.recv(4096)).code


def test_an_open_grant_is_attributed_like_any_other(rig: Rig, peers: Peers) -> None:
    with rig.captured(grant(mode=Mode.UNRESTRICTED)) as attempt:
        assert ask(attempt.dial(peers.allowed.address, 80), get(peers.allowed.address)).status == 200
    assert {event["rule"] for event in attempt.events(event="decision")} == {"mode:unrestricted"}
