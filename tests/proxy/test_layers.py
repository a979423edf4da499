"""SOCKS5, how the proxy tells what a connection speaks, and TLS handshakes made to cost it much."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.layers import MAX_HELLO_RECORDS, Hello, InvalidHello, starts_like_http
from proxy.network import Mode
from tests.proxy.rig import Attempt, Peers, Rig, ask, get, grant, is_cut, read_exactly, read_to_end, rule

NO_AUTHENTICATION = b"\x05\x01\x00"
ALLOWED, NOT_ALLOWED, NO_SUCH_COMMAND, NO_SUCH_ADDRESS_TYPE, NO_METHOD = 0, 2, 7, 8, 0xFF


@pytest.fixture(scope="module")
def attempt(rig: Rig, peers: Peers) -> Attempt:
    return rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts))


def by_name(name: bytes, port: int) -> bytes:
    return b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2)


def by_address(address: str, port: int) -> bytes:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = b"\x04" if family == socket.AF_INET6 else b"\x01"
    return b"\x05\x01\x00" + kind + socket.inet_pton(family, address) + port.to_bytes(2)


def greet(attempt: Attempt) -> socket.socket:
    sock = attempt.explicit()
    sock.sendall(NO_AUTHENTICATION)
    assert sock.recv(2) == b"\x05\x00"
    return sock


def connect(attempt: Attempt, request: bytes) -> tuple[int, socket.socket]:
    sock = greet(attempt)
    sock.sendall(request)
    reply = read_exactly(sock, 10)
    assert reply[0] == 5
    return reply[1], sock


class TestSocks5:
    def test_an_allowed_name(self, attempt: Attempt, peers: Peers) -> None:
        reply, sock = connect(attempt, by_name(b"allowed.test", 80))
        assert (reply, ask(sock, get("allowed.test")).json["nonce"]) == (ALLOWED, peers.allowed.nonce)

    def test_an_allowed_name_over_tls(self, attempt: Attempt, peers: Peers) -> None:
        _, sock = connect(attempt, by_name(b"allowed.test", 443))
        assert ask(attempt.tls(sock, "allowed.test"), get("allowed.test")).json["nonce"] == peers.allowed_tls.nonce

    def test_everything_in_one_segment(self, attempt: Attempt, peers: Peers) -> None:
        sock = attempt.explicit()
        sock.sendall(NO_AUTHENTICATION + by_name(b"allowed.test", 80) + get("allowed.test"))
        assert read_exactly(sock, 12)[3] == ALLOWED
        assert ask(sock, b"").json["nonce"] == peers.allowed.nonce

    def test_every_byte_in_a_segment_of_its_own(self, attempt: Attempt, peers: Peers) -> None:
        sock = attempt.explicit()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in NO_AUTHENTICATION + by_name(b"allowed.test", 80):
            sock.sendall(bytes([byte]))
        assert read_exactly(sock, 12)[3] == ALLOWED
        assert ask(sock, get("allowed.test")).json["nonce"] == peers.allowed.nonce

    def test_a_denied_name_on_a_port_of_http_is_told_in_http(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            reply, sock = connect(attempt, by_name(b"other.test", 80))
            assert (reply, ask(sock, get("other.test")).code) == (ALLOWED, "host_not_allowed")

    def test_a_denied_name_on_another_port_is_told_in_socks(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            reply, sock = connect(attempt, by_name(b"other.test", 22))
            assert reply == NOT_ALLOWED
            assert is_cut(sock)

    def test_another_host_inside(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            _, sock = connect(attempt, by_name(b"allowed.test", 80))
            assert ask(sock, get("other.test")).code == "host_mismatch"

    def test_raw_bytes_inside(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            _, sock = connect(attempt, by_name(b"allowed.test", 80))
            sock.sendall(b"CANARY\r\n")
            assert is_cut(sock)

    @pytest.mark.parametrize(
        "address", ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1", "fd00:ec2::254", "0.0.0.0"]
    )
    def test_an_address_that_is_not_public(self, rig: Rig, address: str) -> None:
        with rig.explicit(grant(mode=Mode.UNRESTRICTED)) as open_attempt:
            assert connect(open_attempt, by_address(address, 22))[0] == NOT_ALLOWED
            assert connect(open_attempt, by_name(address.encode(), 22))[0] == NOT_ALLOWED
        assert set(open_attempt.denials()) == {"address_not_public"}

    @pytest.mark.parametrize(
        "name",
        [
            b"allowed.test\0",
            b"\0",
            b"",
            b"allowed.test\r\n",
            b"\xff\xfe",
            "ällowed.test".encode(),
            b"allowed.test:80",
            b"a" * 255,
        ],
    )
    def test_a_name_that_is_none(self, attempt: Attempt, peers: Peers, name: bytes) -> None:
        with peers.silence():
            for port in (22, 80, 443):
                assert connect(attempt, by_name(name, port))[0] == NOT_ALLOWED

    @pytest.mark.parametrize(("command", "reply"), [(2, NO_SUCH_COMMAND), (3, NO_SUCH_COMMAND), (9, NO_SUCH_COMMAND)])
    def test_bind_and_udp_are_refused_and_told(self, attempt: Attempt, command: int, reply: int) -> None:
        before = len(attempt.denials())
        assert connect(attempt, bytes([5, command, 0]) + by_name(b"allowed.test", 80)[3:])[0] == reply
        assert attempt.denials()[before:] == ["malformed_request"]

    def test_an_unknown_kind_of_address(self, attempt: Attempt) -> None:
        assert connect(attempt, b"\x05\x01\x00\x09" + bytes(20))[0] == NO_SUCH_ADDRESS_TYPE

    @pytest.mark.parametrize("methods", [b"\x02", b"\x01\x02", b"\x80"])
    def test_only_no_authentication_is_spoken(self, attempt: Attempt, methods: bytes) -> None:
        sock = attempt.explicit()
        sock.sendall(b"\x05" + bytes([len(methods)]) + methods)
        assert sock.recv(2) == bytes([5, NO_METHOD])

    def test_a_client_that_offers_more_may_leave_the_password_out(self, attempt: Attempt) -> None:
        sock = attempt.explicit()
        sock.sendall(b"\x05\x02\x00\x02")
        assert sock.recv(2) == b"\x05\x00"

    def test_socks4_is_not_spoken(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            sock = attempt.explicit()
            sock.sendall(b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00\r\n\r\n")
            assert b"malformed_request" in read_to_end(sock)


class TestFirstBytes:
    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"M-SEARCH * HTTP/1.1", b"PROPFIND /", b"POST "])
    def test_a_request_line_is_http(self, data: bytes) -> None:
        assert starts_like_http(data) is True

    @pytest.mark.parametrize("data", [b"", b"G", b"GET", b"OPTIONS"])
    def test_what_could_become_one_needs_more(self, data: bytes) -> None:
        assert starts_like_http(data) is None

    @pytest.mark.parametrize(
        "data", [b"PRI * HTTP/2.0", b"get /", b"\x16\x03", b"SSH-2.0-", b" GET /", b"A" * 21, b"\r\n"]
    )
    def test_everything_else_is_not(self, data: bytes) -> None:
        assert starts_like_http(data) is False

    @given(st.binary(max_size=40), st.binary(max_size=40))
    def test_an_answer_does_not_change_with_more_bytes(self, first: bytes, more: bytes) -> None:
        early = starts_like_http(first)
        assert early is None or starts_like_http(first + more) is early


def record(content: bytes) -> bytes:
    return b"\x16\x03\x01" + len(content).to_bytes(2) + content


def handshake(size: int, content: bytes = b"") -> bytes:
    return b"\x01" + size.to_bytes(3) + content


def hello_of(name: str) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO, bytes]:
    """A client that has written its ClientHello, and the handshake message in it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    data = outgoing.read()
    assert data[5:][:1] == b"\x01"
    return client, incoming, outgoing, data[5:]


class TestHello:
    @given(st.binary(max_size=300), st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 50))
    def test_it_is_whole_with_its_last_byte_and_not_before(self, content: bytes, sizes: list[int], step: int) -> None:
        """However it is cut into records, and these into reads."""
        message = handshake(len(content), content)
        cuts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        parts = [message[start:end] for start, end in zip(cuts, [*cuts[1:], None], strict=True)]
        data = b"".join(record(part) for part in parts if part)
        hello = Hello()
        for start in range(0, len(data), step):
            answer = hello.feed(data[start : start + step])
            assert answer == (data if start + step >= len(data) else None)

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (record(handshake(0xFFFFFF)), "larger than"),
            (b"".join(record(bytes([byte])) for byte in handshake(0xFFFFFF)), "larger than"),
            (b"".join(record(b"\x01" if not place else b"\0") for place in range(17)), "whole"),
            (b"".join(record(byte) for byte in [b"\x01", b"\0", b"\1", b"\0", *[b"x"] * 17]), "more than 16 records"),
            (record(b"\x02\0\0\0"), "does not begin with a ClientHello"),
            (record(b""), "cannot be read"),
            (record(handshake(5)) + b"\x17\x03\x03\x00\x05hello", "cannot be read"),
            (b"\x16\x03\x01\xff\xff", "cannot be read"),
        ],
    )
    def test_what_is_none_or_too_much_is_refused_at_once(self, data: bytes, why: str) -> None:
        hello = Hello()
        if why == "whole":
            assert hello.feed(data) is not None
        else:
            with pytest.raises(InvalidHello, match=why):
                hello.feed(data)

    def test_a_large_one_byte_by_byte_is_cheap(self) -> None:
        message = handshake(60_000, bytes(60_000))
        data = b"".join(record(message[start : start + 16_000]) for start in range(0, len(message), 16_000))
        hello, started = Hello(), time.monotonic()
        answers = [hello.feed(data[place : place + 1]) for place in range(len(data))]
        assert answers[-1] == data
        assert time.monotonic() - started < 2

    @given(st.binary(max_size=200))
    def test_any_bytes_are_one_or_none_or_refused(self, data: bytes) -> None:
        with contextlib.suppress(InvalidHello):
            assert Hello().feed(b"\x16\x03\x01" + data) in (None, b"\x16\x03\x01" + data)


class TestTlsFromHostileCode:
    @pytest.mark.parametrize("mode", [Mode.NAMED, Mode.BLOCK_ALL, Mode.UNRESTRICTED])
    def test_a_hello_that_does_not_end_is_cut_and_told_once(self, rig: Rig, peers: Peers, mode: Mode) -> None:
        """16 MiB, in records of one byte: reading them again at each read would take the proxy hours."""
        rules = (rule("allowed.test"),) if mode is Mode.NAMED else ()
        endless = b"".join(record(bytes([byte])) for byte in handshake(0xFFFFFF)) + record(b"\0") * 100_000
        with rig.captured(grant(*rules, hosts=peers.hosts, mode=mode)) as attempt:
            sock = attempt.dial("192.0.2.1", 443) if mode is not Mode.NAMED else attempt.tunnel("allowed.test", 443)
            with contextlib.suppress(ConnectionError):
                sock.sendall(endless)
            assert is_cut(sock)
            assert attempt.denials().count("malformed_request") == 1
        with rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as other:
            assert ask(other.https("allowed.test"), get("allowed.test")).status == 200

    def test_a_hello_in_many_records_is_one(self, attempt: Attempt, peers: Peers) -> None:
        client, incoming, outgoing, message = hello_of("allowed.test")
        size = -(-len(message) // MAX_HELLO_RECORDS)
        sock = attempt.tunnel("allowed.test", 443)
        sock.sendall(b"".join(record(message[place : place + size]) for place in range(0, len(message), size)))
        done = False
        while not done:
            incoming.write(sock.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                done = True
            sock.sendall(outgoing.read())
        client.write(get("allowed.test"))
        sock.sendall(outgoing.read())
        answer = b""
        while peers.allowed_tls.nonce.encode() not in answer:
            incoming.write(sock.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                while part := client.read(65536):
                    answer += part

    def test_a_hello_that_cannot_be_read_is_told(self, attempt: Attempt, peers: Peers) -> None:
        before = len(attempt.denials())
        with peers.silence():
            sock = attempt.tunnel("allowed.test", 443)
            sock.sendall(record(handshake(3, b"abc")))
            assert is_cut(sock)
        assert attempt.denials()[before:] == ["malformed_request"]
