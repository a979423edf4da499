"""Whatever bytes code sends, the proxy answers or closes, nothing goes out that is not allowed, and no layer crashes."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.proxy.rig import Attempt, Http2Client, Peers, Rig, get, grant, h2_headers, rule

EXAMPLES = settings(max_examples=300000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PIECES = [
    b"GET ", b"POST ", b"CONNECT ", b"/", b"http://", b"https://", b"allowed.test", b"other.test", b":443", b":80", b" HTTP/1.1",
    b" HTTP/1.0", b"\r\n", b"\n", b"\r", b"Host: ", b"Content-Length: ", b"Transfer-Encoding: chunked", b"5", b"0", b"-1",
    b"Upgrade: websocket", b"Connection: upgrade", b"Sec-WebSocket-Version: 13", b"Expect: 100-continue", b"\0", b"\xff\xfe",
    b"\x16\x03\x01", b"\x05\x01\x00", b"\x05\x01\x00\x03", b"\x0callowed.test\x00\x50", b"@", b"%00", b"..", b";", b"?", b"#", b"\t",
    b"Proxy-Authorization: x", b"\xc3\xa4", b"[::1]", b"127.0.0.1", b"xn--", b"*", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n\r\n",
]  # fmt: skip


def mutated(original: bytes) -> st.SearchStrategy[bytes]:
    """The original with pieces put in, over it, or taken away."""

    def change(parts: list[tuple[int, int, bytes]]) -> bytes:
        data = original
        for place, length, piece in parts:
            start = place % (len(data) + 1)
            data = data[:start] + piece + data[start + length :]
        return data

    part = st.tuples(st.integers(0, 400), st.integers(0, 6), st.sampled_from(PIECES) | st.binary(max_size=6))
    return st.lists(part, min_size=1, max_size=6).map(change)


REQUESTS = st.one_of(
    mutated(get("allowed.test", "/echo?q=1", "Accept: */*", target="http://allowed.test/echo")),
    mutated(get("allowed.test", "/up", "Content-Length: 5", method="POST") + b"hello"),
    mutated(get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST") + b"5\r\nhello\r\n0\r\n\r\n"),
    mutated(b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\n\r\n"),
    mutated(b"\x05\x01\x00\x05\x01\x00\x03\x0callowed.test\x00\x50" + get("allowed.test")),
    st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join),
    st.binary(max_size=200),
)


@pytest.fixture(scope="module")
def attempt(rig: Rig, peers: Peers) -> Attempt:
    return rig.explicit(grant(rule("allowed.test"), rule("h2.test"), hosts=peers.hosts))


def send(sock: socket.socket, data: bytes) -> None:
    """Send everything, and read until the other side has closed."""
    with contextlib.suppress(OSError, ssl.SSLError, http.client.HTTPException):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    sock.close()


def look(attempt: Attempt, peers: Peers) -> None:
    """Nothing has crashed, nothing went to where it may not, and no name in the log is anything but the allowed ones."""
    assert attempt.rig.complaints() == []
    assert "internal_error" not in attempt.denials()
    assert peers.other.untouched
    assert peers.other_tls.untouched
    for peer in (peers.allowed, peers.allowed_tls, peers.h2):
        for seen in peer.journal.requests:
            host = seen.header("host") or seen.header(":authority") or ""
            assert host.partition(":")[0].rstrip(".").lower() in ("allowed.test", "h2.test")
    attempt.rig.close_clients()
    peers.forget()


@EXAMPLES
@given(REQUESTS)
def test_the_proxy_port(attempt: Attempt, peers: Peers, data: bytes) -> None:
    send(attempt.explicit(), data)
    look(attempt, peers)


@EXAMPLES
@given(REQUESTS)
def test_inside_a_tunnel(attempt: Attempt, peers: Peers, data: bytes) -> None:
    send(attempt.tunnel("allowed.test", 80), data)
    look(attempt, peers)


@settings(EXAMPLES, max_examples=3000)
@given(REQUESTS)
def test_inside_tls(attempt: Attempt, peers: Peers, data: bytes) -> None:
    send(attempt.https("allowed.test"), data)
    look(attempt, peers)


@settings(EXAMPLES, max_examples=3000)
@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40)), max_size=8)
)
def test_frames_of_http2(attempt: Attempt, peers: Peers, frames: list[tuple[int, int, int, bytes]]) -> None:
    client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
    data = b"".join(
        len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload
        for kind, flags, stream, payload in frames
    )
    send(client.sock, data)
    look(attempt, peers)


TEXT = st.text(st.characters(max_codepoint=255), max_size=20) | st.sampled_from(
    ["h2.test", "other.test", "/", "GET", "https", "chunked"]
)
NAMES = (
    st.sampled_from(
        [":method", ":scheme", ":authority", ":path", ":protocol", "host", "content-length", "te", "upgrade", "cookie"]
    )
    | TEXT
)


@settings(EXAMPLES, max_examples=3000)
@given(st.lists(st.tuples(NAMES, TEXT), max_size=4), st.booleans(), st.permutations(h2_headers("h2.test")))
def test_headers_of_http2(
    attempt: Attempt, peers: Peers, more: list[tuple[str, str]], end_stream: bool, first: list[tuple[str, str]]
) -> None:
    client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
    stream = client.connection.get_next_available_stream_id()
    block = client.connection.encoder.encode(
        [(name.encode("latin-1"), value.encode("latin-1")) for name, value in [*first, *more]]
    )
    flags = 0x05 if end_stream else 0x04
    frame = len(block).to_bytes(3) + bytes([1, flags]) + stream.to_bytes(4) + block
    body = b"" if end_stream else b"\0\0\5\0\1" + stream.to_bytes(4) + b"hello"
    send(client.sock, frame + body)
    look(attempt, peers)
