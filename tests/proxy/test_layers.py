"""SOCKS5, and how the proxy tells what a connection speaks."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.layers import starts_like_http
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
