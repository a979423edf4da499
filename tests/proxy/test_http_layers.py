"""HTTP from hostile clients and servers: what is ambiguous goes nowhere, and nothing makes the proxy keep much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import h2.connection
import h2.events
import pytest
import websockets.sync.client
from hypothesis import example, given
from hypothesis import strategies as st
from mitmproxy import connection, http, options
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context

from proxy.http_layers import MAX_HEAD_BYTES, Advice, GuardedHttp1
from tests.proxy.rig import (
    PATIENCE,
    Attempt,
    Http2Client,
    Peers,
    Rig,
    ask,
    get,
    grant,
    h2_headers,
    read_answer,
    read_to_end,
    rule,
)
from tests.servers import Http, Peer, TlsPeer

MIB = 1024 * 1024
FLAT_BYTES = 40 * MIB  # far below what is moved in these tests, far above what one connection's buffers take


@pytest.fixture(scope="module")
def attempt(rig: Rig, peers: Peers) -> Attempt:
    hosts = {**peers.hosts, "own.test": peers.other.address}
    return rig.explicit(grant(rule("allowed.test"), rule("h2.test"), rule("own.test", *range(2700, 2720)), hosts=hosts))


@contextlib.contextmanager
def flat_memory(rig: Rig) -> Iterator[None]:
    """The proxy's memory does not grow meanwhile, not even for a moment."""
    ask_for_peak(rig)
    before = rig.resident_bytes()
    yield
    assert rig.peak_bytes() - before < FLAT_BYTES


def ask_for_peak(rig: Rig) -> None:
    """Make the peak that the kernel remembers the present size (proc(5), clear_refs)."""
    with open(f"/proc/{rig.proxy.pid}/clear_refs", "w") as file:
        file.write("5")


GOOD = "GET / HTTP/1.1\r\nHost: allowed.test\r\n"
AMBIGUOUS = {
    "a bare line feed": GOOD.encode() + b"X: a\nY: b\r\n\r\n",
    "a bare line feed as the end": GOOD.encode() + b"\n",
    "a bare carriage return": GOOD.encode() + b"X: a\rHost: other.test\r\n\r\n",
    "a NUL": GOOD.encode() + b"X: a\0b\r\n\r\n",
    "a continued line": GOOD.encode() + b"X: a\r\n b\r\n\r\n",
    "a continued first header": b"GET / HTTP/1.1\r\n Host: other.test\r\nHost: allowed.test\r\n\r\n",
    "a space before the colon": GOOD.encode() + b"Content-Length : 5\r\n\r\nhello",
    "a header without a colon": GOOD.encode() + b"CANARY\r\n\r\n",
    "a header without a name": GOOD.encode() + b": x\r\n\r\n",
    "two lengths": GOOD.encode() + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "two equal lengths": GOOD.encode() + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": GOOD.encode() + b"Content-Length: 5, 5\r\n\r\nhello",
    "a signed length": GOOD.encode() + b"Content-Length: +5\r\n\r\nhello",
    "a length in underscores": GOOD.encode() + b"Content-Length: 1_0\r\n\r\nhellohello",
    "a length beside chunks": GOOD.encode() + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks beside a length": GOOD.encode() + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two transfer encodings": GOOD.encode()
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "an unknown transfer encoding": GOOD.encode() + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks that are not last": GOOD.encode() + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"GET / HTTP/1.0\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown version": b"GET / HTTP/9\r\nHost: allowed.test\r\n\r\n",
    "no version": b"GET /\r\nHost: allowed.test\r\n\r\n",
    "white space in the target": b"GET /a b HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a target that is no path": b"GET other.test:80 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a target of another scheme": b"GET ftp://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a control character in the target": b"GET /\x7f HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a head that is too large": GOOD.encode() + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
}


class TestAmbiguousRequests:
    @pytest.mark.parametrize("request_", AMBIGUOUS.values(), ids=AMBIGUOUS)
    def test_it_is_answered_with_400_and_goes_nowhere(self, attempt: Attempt, peers: Peers, request_: bytes) -> None:
        """Over TLS and without, and nothing that follows on the connection is read as a request."""
        before = len(attempt.denials())
        with peers.silence():
            for sock in (attempt.https("allowed.test"), attempt.tunnel("allowed.test", 80)):
                sock.sendall(request_ + get("allowed.test", "/after"))
                answer = read_answer(sock)
                assert (answer.status, answer.code) == (400, "malformed_request")
                assert read_to_end(sock) == b""
        assert attempt.denials()[before:] == ["malformed_request"] * 2

    @pytest.mark.parametrize(
        "target", ["/a#/../b", "/a?b#c", "/#", "http://allowed.test/a#b", "http://allowed.test#/b"]
    )
    def test_a_fragment_in_the_target(self, attempt: Attempt, peers: Peers, target: str) -> None:
        """Some servers cut it off, for others it is of the path: so what is judged would not be what is read."""
        with peers.silence():
            for sock in (attempt.https("allowed.test"), attempt.tunnel("allowed.test", 80)):
                assert ask(sock, get("allowed.test", target=target)).code == "malformed_request"

    def test_a_head_of_very_many_lines(self, attempt: Attempt, peers: Peers) -> None:
        """What a line costs is more than what its bytes do."""
        assert ask(attempt.https("allowed.test"), get("allowed.test", "/", *["a: b"] * 900)).status == 200
        with peers.silence():
            assert ask(attempt.https("allowed.test"), get("allowed.test", "/", *["a: b"] * 1001)).status == 400

    def test_a_head_that_does_not_end_is_refused_while_it_comes(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig):
            sock = attempt.https("allowed.test")
            sock.sendall(GOOD.encode())
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                for _ in range(200):
                    sock.sendall(b"X: " + b"a" * MIB)

    def test_a_chunk_line_that_does_not_end_is_cut(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig):
            sock = attempt.https("allowed.test")
            sock.sendall(get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST") + b"5;")
            with pytest.raises((ConnectionError, ssl.SSLError)):
                send_again_and_again(sock, b"a" * MIB)

    def test_requests_sent_far_ahead_are_not_read(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        """They wait where they cost nothing, and the one before them is answered."""
        with flat_memory(rig), Http(peers.loop, peers.other.address, 2701) as server:
            sock = attempt.tunnel("own.test", 2701)
            sock.sendall(get("own.test:2701", "/hold"))
            sock.settimeout(1)
            with pytest.raises(TimeoutError):
                send_again_and_again(sock, get("own.test:2701", "/" + "a" * 60_000) * 16)
            assert len(server.journal.requests) <= 1
            server.release()
            sock.settimeout(PATIENCE)
            assert read_answer(sock).status == 200

    def test_a_broken_chunk_ends_the_request_upstream_too(self, attempt: Attempt, peers: Peers) -> None:
        peers.forget()
        sock = attempt.https("allowed.test")
        sock.sendall(get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST") + b"5\r\nhelloXX")
        assert b"200" not in read_to_end(sock)
        assert peers.allowed_tls.journal.requests == []

    @pytest.mark.parametrize("path", ["/a b", "/a\x7f", "/\t", "/a#/../b", "allowed.test", "http://other.test/", ""])
    def test_a_path_over_http2_that_is_none(self, attempt: Attempt, peers: Peers, path: str) -> None:
        with peers.silence():
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            assert_refused(client, h2_headers("h2.test", path))

    @pytest.mark.parametrize("method", ["GET / HTTP/1.1", "G\tET", "", "G:T"])
    def test_a_method_over_http2_that_is_none(self, attempt: Attempt, peers: Peers, method: str) -> None:
        with peers.silence():
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            assert_refused(client, h2_headers("h2.test", method=method))

    @pytest.mark.parametrize("scheme", ["http://other.test/x?", "ftp", "h2"])
    def test_a_scheme_over_http2_that_is_none(self, attempt: Attempt, peers: Peers, scheme: str) -> None:
        with peers.silence():
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            assert_refused(client, h2_headers("h2.test", scheme=scheme))

    @pytest.mark.parametrize(
        "header",
        [("x", "a\r\nhost: other.test"), ("x", "a\0b"), ("x\r\ny", "a"), ("X-Upper", "a"), ("connection", "close"),
         ("transfer-encoding", "chunked"), ("content-length", "x"), (":path", "/second"), ("", "x"), ("a b", "x")],
    )  # fmt: skip
    def test_a_header_over_http2_that_is_none(self, attempt: Attempt, peers: Peers, header: tuple[str, str]) -> None:
        with peers.silence():
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            assert_refused(client, h2_headers("h2.test", "/", header))

    def test_a_body_over_http2_that_is_longer_than_announced(self, attempt: Attempt, peers: Peers) -> None:
        peers.forget()
        client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
        stream = client.start(h2_headers("h2.test", "/", ("content-length", "1"), method="POST"), end_stream=False)
        client.connection.streams[stream]._expected_content_length = None
        client.connection.send_data(stream, b"more than that", end_stream=True)
        client.flush()
        with pytest.raises(ConnectionResetError):
            client.answer(stream)
        assert peers.h2.journal.requests == []


def assert_refused(client: Http2Client, headers: list[tuple[str, str]]) -> None:
    """A 4xx, or the end of the stream or connection; and the log says so."""
    try:
        status = client.answer(client.start(headers, end_stream=True)).status
    except (ConnectionError, ssl.SSLError):
        return
    assert 400 <= status < 500


class TestStreams:
    def test_events_pass_as_they_come(self, attempt: Attempt) -> None:
        """The server sends the next event only when the code has acknowledged the one before."""
        stream, side = attempt.https("allowed.test"), attempt.https("allowed.test")
        stream.sendall(get("allowed.test", "/sse/5"))
        received = b""
        for place in range(5):
            while f"id: {place}\n".encode() not in received:
                received += stream.recv(65536)
            assert ask(side, get("allowed.test", f"/ack/{place}")).status == 200

    def test_a_body_is_read_no_faster_than_it_is_taken(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig):
            sock = attempt.https("allowed.test")
            sock.sendall(get("allowed.test", f"/bytes/{400 * MIB}"))
            for _ in range(100):
                assert sock.recv(65536)
            # Nothing more is read, and the proxy is asked something else meanwhile.
            assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200

    def test_a_large_download_takes_no_memory(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig):
            assert download(attempt, 200 * MIB) == 200 * MIB

    def test_a_large_upload_takes_no_memory(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        size = 200 * MIB
        with flat_memory(rig):
            sock = attempt.https("allowed.test")
            sock.sendall(get("allowed.test", "/up", f"Content-Length: {size}", method="POST"))
            for _ in range(size // MIB):
                sock.sendall(bytes(MIB))
            assert read_answer(sock).json["body_bytes"] == size

    def test_a_large_download_over_http2_takes_no_memory(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig):
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]), window=MIB)
            answer = client.get("h2.test", f"/bytes/{30 * MIB}")
        assert len(answer.body) == 30 * MIB

    def test_a_denied_upload_is_answered_at_once_and_takes_no_memory(
        self, attempt: Attempt, rig: Rig, peers: Peers
    ) -> None:
        """The answer is there before any of the body; a client that sends all the same is not kept waiting."""
        with peers.silence(), flat_memory(rig):
            sock = attempt.explicit()
            more = ("Transfer-Encoding: chunked", "Connection: close")
            answer = ask(sock, get("other.test", "/", *more, target="http://other.test/", method="POST"))
            assert (answer.status, answer.code) == (403, "host_not_allowed")
            for _ in range(100):
                sock.sendall(b"%x\r\n%s\r\n" % (MIB, bytes(MIB)))
            sock.sendall(b"0\r\n\r\n")
            assert read_to_end(sock) == b""

    def test_an_upload_to_a_server_that_is_not_there_yet_takes_no_memory(
        self, attempt: Attempt, rig: Rig, peers: Peers
    ) -> None:
        """While the handshake with the server goes on, the code's bytes wait on its own side."""

        class Slow(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                self.note(await reader.read(65536))  # the ClientHello, and no answer
                await reader.read(65536)

        with flat_memory(rig), Slow(peers.loop, peers.other.address, 2702) as slow:
            sock = attempt.https("own.test", 2702)
            sock.sendall(get("own.test:2702", "/up", f"Content-Length: {200 * MIB}", method="POST"))
            slow.wait(lambda journal: bool(journal.received))
            sock.settimeout(2)
            with pytest.raises(TimeoutError):
                send_again_and_again(sock, bytes(MIB))

    def test_a_response_head_that_does_not_end_is_cut(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        class Endless(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\n")
                while True:
                    writer.write(b"X: " + b"a" * MIB)
                    await writer.drain()

        with flat_memory(rig), Endless(peers.loop, peers.other.address, 2703):
            sock = attempt.tunnel("own.test", 2703)
            sock.sendall(get("own.test:2703"))
            assert b"aaaa" not in read_to_end(sock)

    @pytest.mark.slow
    def test_a_gigabyte_in_both_directions_takes_no_memory(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig):
            assert download(attempt, 1024 * MIB) == 1024 * MIB
            sock = attempt.https("allowed.test")
            sock.sendall(get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST"))
            for _ in range(1024):
                sock.sendall(b"%x\r\n%s\r\n" % (MIB, bytes(MIB)))
            sock.sendall(b"0\r\n\r\n")
            assert read_answer(sock).json["body_bytes"] == 1024 * MIB


def send_again_and_again(sock: socket.socket, data: bytes) -> None:
    for _ in range(200):
        sock.sendall(data)


def send_data_again_and_again(client: Http2Client, stream: int) -> None:
    for _ in range(20_000):
        client.connection.send_data(stream, bytes(16_000))
        client.flush()


def receive_for_ever(client: Http2Client) -> None:
    while True:
        client.receive()


def download(attempt: Attempt, size: int) -> int:
    sock = attempt.https("allowed.test")
    sock.sendall(get("allowed.test", f"/bytes/{size}"))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1)
    buffer, received = bytearray(MIB), 0
    while received < size and (count := sock.recv_into(buffer)):
        received += count
    return received


class TestHttp2Windows:
    """A peer that does not open its window makes the other side wait, not the proxy keep."""

    def test_a_client_that_takes_nothing(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        served = 0

        class Generous(TlsPeer):
            protocols = ("h2",)

            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                nonlocal served
                connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
                connection.initiate_connection()
                while True:
                    writer.write(connection.data_to_send())
                    await writer.drain()
                    for event in connection.receive_data(await reader.read(65536)):
                        if isinstance(event, h2.events.RequestReceived):
                            assert event.stream_id is not None
                            connection.send_headers(event.stream_id, [(":status", "200")])
                            for _ in range(20_000):
                                connection.send_data(event.stream_id, bytes(16_000))
                                served += 16_000
                                writer.write(connection.data_to_send())
                                await writer.drain()

        with flat_memory(rig), Generous(peers.loop, peers.other.address, 2704, peers.authority, ["own.test"]):
            client = Http2Client(attempt.https("own.test", 2704, alpn=["h2"]), window=0)
            client.start(h2_headers("own.test:2704"), end_stream=True)
            while not any(isinstance(event, h2.events.ResponseReceived) for event in client.receive()):
                pass
            client.sock.settimeout(1)
            with pytest.raises(TimeoutError):
                receive_for_ever(client)
        assert served < 100 * MIB

    def test_a_server_that_takes_nothing(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        class Stingy(TlsPeer):
            protocols = ("h2",)

            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
                connection.local_settings.initial_window_size = 0
                connection.initiate_connection()
                while True:
                    writer.write(connection.data_to_send())
                    await writer.drain()
                    data = await reader.read(65536)
                    if not data:
                        return
                    connection.receive_data(data)

        with flat_memory(rig), Stingy(peers.loop, peers.other.address, 2705, peers.authority, ["own.test"]):
            client = Http2Client(attempt.https("own.test", 2705, alpn=["h2"]))
            stream = client.start(h2_headers("own.test:2705", method="POST"), end_stream=False)
            client.receive()
            client.sock.settimeout(2)
            with pytest.raises(TimeoutError):
                send_data_again_and_again(client, stream)


def reset_streams(client: Http2Client) -> None:
    for _ in range(3000):
        stream = client.start(h2_headers("h2.test"), end_stream=True)
        client.connection.reset_stream(stream)
        client.flush()


def ping(client: Http2Client) -> None:
    for _ in range(300):
        client.sock.sendall((b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678") * 200)


def settings(client: Http2Client) -> None:
    client.sock.settimeout(5)
    for _ in range(300):
        client.sock.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64" * 200)


def continuations(client: Http2Client) -> None:
    client.sock.sendall(b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82")  # HEADERS without END_HEADERS
    for _ in range(3000):
        client.sock.sendall(b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + b"\x00" * 0x4000)


def header_bomb(client: Http2Client) -> None:
    """One large header in the table, then many one-byte references to it."""
    head = h2_headers("h2.test", "/", ("x-bomb", "a" * 4000))
    client.connection.encoder.header_table_size = 4096
    client.answer(client.start(head, end_stream=True))
    stream = client.connection.get_next_available_stream_id()
    block = client.connection.encoder.encode(head[:4]) + b"\xbe" * 16_000
    size = len(block).to_bytes(3)
    client.sock.sendall(size + b"\x01\x05" + stream.to_bytes(4) + block)
    read_to_end(client.sock)


def empty_frames(client: Http2Client) -> None:
    stream = client.start(h2_headers("h2.test", method="POST"), end_stream=False)
    client.sock.settimeout(5)
    for _ in range(20):
        client.sock.sendall((b"\x00\x00\x00\x00\x00" + stream.to_bytes(4)) * 1000)


class TestHttp2Floods:
    """One client's flood costs itself: the proxy's memory stays, and others are served."""

    @pytest.mark.parametrize(
        "flood",
        [
            pytest.param(reset_streams, id="streams reset at once"),
            pytest.param(ping, id="pings"),
            pytest.param(settings, id="settings"),
            pytest.param(continuations, id="continuations"),
            pytest.param(header_bomb, id="a header bomb"),
            pytest.param(empty_frames, id="empty data frames"),
        ],
    )
    def test_a_flood(self, rig: Rig, peers: Peers, flood: Callable[[Http2Client], None]) -> None:
        with rig.explicit(grant(rule("h2.test"), rule("allowed.test"), hosts=peers.hosts)) as attempt:
            with flat_memory(rig):
                client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
                with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
                    flood(client)
                assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200


class TestTurns:
    """What is sent at once is dealt with bit by bit, and nothing of it is lost or mixed up."""

    def test_requests_sent_at_once_are_answered_in_order(self, attempt: Attempt) -> None:
        sock = attempt.https("allowed.test")
        file = sock.makefile("rb")
        sock.sendall(b"".join(get("allowed.test", f"/echo/{number}") for number in range(200)))
        for number in range(200):
            head = b"".join(iter(file.readline, b"\r\n"))
            size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            assert json.loads(file.read(size))["target"] == f"/echo/{number}"

    @pytest.mark.parametrize("size", [1, 7, 40_000])
    def test_a_body_of_many_chunks_arrives_whole(self, attempt: Attempt, size: int) -> None:
        sock = attempt.https("allowed.test")
        count = 3000 if size < 100 else 20
        sock.sendall(
            get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST")
            + b"%x\r\n%s\r\n" % (size, bytes(size)) * count
            + b"0\r\n\r\n"
            + get("allowed.test", "/after")
        )
        assert read_answer(sock).json["body_bytes"] == size * count
        assert read_answer(sock).status == 200

    def test_streams_opened_at_once_are_all_answered(self, attempt: Attempt) -> None:
        client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
        streams = []
        for _ in range(50):
            stream = client.connection.get_next_available_stream_id()
            client.connection.send_headers(stream, h2_headers("other.test"), end_stream=True)
            streams.append(stream)
        client.flush()
        ended: set[int] = set()
        while len(ended) < len(streams):
            ended |= {event.stream_id for event in client.receive() if isinstance(event, h2.events.StreamEnded)}
        assert ended == set(streams)


class TestWebSockets:
    def test_messages_pass_in_both_directions(self, attempt: Attempt, peers: Peers) -> None:
        with websocket(attempt) as connection:
            for text in ("hello", "é" * 1000, ""):
                connection.send(text)
                assert connection.recv() == f"{peers.allowed_tls.nonce} {text}"

    def test_thousands_of_messages_take_no_memory(self, attempt: Attempt, rig: Rig) -> None:
        with flat_memory(rig), websocket(attempt) as connection:
            received = threading.Thread(target=lambda: [connection.recv() for _ in range(5000)])
            received.start()
            for number in range(5000):
                connection.send(f"{number} " + "x" * 500)
            received.join(60)
            assert not received.is_alive()

    def test_a_message_that_does_not_end_takes_no_memory(self, attempt: Attempt, rig: Rig, peers: Peers) -> None:
        class Sink(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
                    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
                )
                await reader.readexactly(14)
                for _ in range(101):
                    await reader.readexactly(MIB)
                writer.write(b"\x81\x04done")
                await reader.read()

        with flat_memory(rig), Sink(peers.loop, peers.other.address, 2706):
            sock = attempt.tunnel("own.test", 2706)
            sock.sendall(upgrade("own.test:2706"))
            while b"\r\n\r\n" not in sock.recv(65536):
                pass
            sock.sendall(b"\x02\xff" + (1 << 40).to_bytes(8) + b"\0\0\0\0")
            for _ in range(101):
                sock.sendall(bytes(MIB))
            assert sock.recv(100) == b"\x81\x04done"

    def test_its_end_is_in_the_log_with_its_bytes(self, rig: Rig, peers: Peers) -> None:
        with rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            with websocket(attempt) as connection:
                connection.send("x" * 1000)
                connection.recv()
        (end,) = attempt.events(event="connection")
        assert (end["status"], end["path"], end["method"]) == (101, "/ws", "GET")
        assert 1000 < end["bytes_out"] < 1200
        assert 1000 < end["bytes_in"] < 1300

    def test_another_protocol_to_upgrade_to_is_no_tunnel(self, attempt: Attempt, peers: Peers) -> None:
        class Willing(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: CANARY\r\nConnection: upgrade\r\n\r\n")
                self.note(await reader.read(65536))

        with Willing(peers.loop, peers.other.address, 2707) as willing:
            sock = attempt.tunnel("own.test", 2707)
            sock.sendall(get("own.test:2707", "/", "Connection: upgrade", "Upgrade: CANARY") + b"CANARY")
            read_to_end(sock)
            assert bytes(willing.journal.received) == b""

    def test_http2_without_tls_is_not_upgraded_to(self, attempt: Attempt, peers: Peers) -> None:
        more = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
        answer = ask(attempt.tunnel("allowed.test", 80), get("allowed.test", "/", *more))
        names = {name.lower() for name, _ in answer.json["headers"]}
        assert answer.status == 200
        assert not names & {"upgrade", "http2-settings"}


def upgrade(host: str) -> bytes:
    more = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==",
    )
    return get(host, "/ws", *more)


def websocket(attempt: Attempt) -> websockets.sync.client.ClientConnection:
    sock = attempt.https("allowed.test")
    return websockets.sync.client.connect("ws://allowed.test/ws", sock=sock, proxy=None, max_size=None, close_timeout=1)


class TestSlowClients:
    def test_clients_that_send_their_heads_slowly_do_not_keep_others_waiting(self, attempt: Attempt) -> None:
        slow = [attempt.explicit() for _ in range(100)]
        for sock in slow:
            sock.sendall(b"GET http://allowed.test/ HT")
        assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200
        for sock in slow:
            sock.sendall(b"TP/1.1\r\nHost: allowed.test\r\n\r\n")
        assert {read_answer(sock).status for sock in slow} == {200}

    def test_a_client_that_goes_away_ends_the_request_upstream(self, rig: Rig, peers: Peers) -> None:
        with Http(peers.loop, peers.other.address, 2708) as server:
            hosts = {"own.test": server.address}
            with rig.explicit(grant(rule("own.test", 2708), hosts=hosts)) as attempt:
                sock = attempt.tunnel("own.test", 2708)
                sock.sendall(get("own.test:2708", "/hold"))
                server.wait(lambda journal: bool(journal.requests))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.close()
        (end,) = attempt.events(event="connection")
        assert end["outcome"] == "aborted"


class Scripted(Peer):
    """Answers every request with the same bytes."""

    said = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            self.note(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.said)
            await writer.drain()


class TestServers:
    """What servers may say besides plain responses."""

    def test_trailers_of_a_response_are_dropped(self, attempt: Attempt, peers: Peers) -> None:
        with Scripted(peers.loop, peers.other.address, 2710) as server:
            server.said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"
            sock = attempt.tunnel("own.test", 2710)
            for _ in range(2):
                assert ask(sock, get("own.test:2710")).body == b"hello"

    def test_trailers_of_a_request_are_dropped(self, attempt: Attempt) -> None:
        request = get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST")
        sock = attempt.https("allowed.test")
        for _ in range(2):
            assert ask(sock, request + b"5\r\nhello\r\n0\r\nHost: other.test\r\n\r\n").json["body_bytes"] == 5

    def test_interim_responses_are_dropped(self, attempt: Attempt, peers: Peers) -> None:
        with Scripted(peers.loop, peers.other.address, 2711) as server:
            interim = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
            server.said = interim + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
            sock = attempt.tunnel("own.test", 2711)
            for _ in range(2):
                answer = ask(sock, get("own.test:2711"))
                assert (answer.status, answer.body) == (200, b"hello")

    def test_a_body_that_ends_with_the_connection(self, attempt: Attempt, peers: Peers) -> None:
        class Old(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
                writer.close()
                await writer.wait_closed()

        with Old(peers.loop, peers.other.address, 2712):
            assert ask(attempt.tunnel("own.test", 2712), get("own.test:2712")).body == b"until the end"

    def test_a_server_that_closes_between_requests_is_connected_to_again(self, attempt: Attempt, peers: Peers) -> None:
        class Once(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                writer.close()
                await writer.wait_closed()
                with self.journal.change():
                    self.journal.names.append("closed")

            def wait_closed(self, times: int) -> None:
                self.wait(lambda journal: len(journal.names) == times)

        with Once(peers.loop, peers.other.address, 2713) as once:
            sock = attempt.tunnel("own.test", 2713)
            for number in range(1, 4):
                assert ask(sock, get("own.test:2713")).body == b"ok"
                once.wait_closed(number)
            assert once.journal.connections == 3

    def test_two_responses_to_one_request_are_not_taken_for_the_next_one(self, attempt: Attempt, peers: Peers) -> None:
        with Scripted(peers.loop, peers.other.address, 2714) as server:
            server.said = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello" * 2
            sock = attempt.tunnel("own.test", 2714)
            for _ in range(3):
                assert ask(sock, get("own.test:2714")).body == b"hello"
            assert server.journal.connections == 3

    @pytest.mark.parametrize(
        "more", [b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Content-Length: 5\r\nContent-Length: 6"]
    )
    def test_an_ambiguous_response_is_not_passed_on(self, attempt: Attempt, peers: Peers, more: bytes) -> None:
        with Scripted(peers.loop, peers.other.address, 2715) as server:
            server.said = b"HTTP/1.1 200 OK\r\n" + more + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
            answer = ask(attempt.tunnel("own.test", 2715), get("own.test:2715"))
        assert (answer.status, answer.code) == (502, "upstream_failed")


class Reading:
    """The reader of heads by itself: what it has refused, and whether it waits for more."""

    def __init__(self) -> None:
        client = connection.Client(peername=("192.0.2.1", 1), sockname=("192.0.2.2", 1), timestamp_start=0.0)
        self.refused: list[str] = []
        self.unfinished = False
        self.heads = 0
        self.reader = GuardedHttp1(
            Context(client, options.Options()),
            Advice(_never, self._refuse, _never, _never, self._note),
        )
        list(self.reader.handle_event(events.Start()))

    def _refuse(self, _context: Context, why: str) -> http.Response:
        self.refused.append(why)
        return http.Response.make(400)

    def _note(self, _context: Context, unfinished: bool) -> None:
        self.unfinished = unfinished

    def feed(self, data: bytes) -> None:
        for command in self.reader.handle_event(events.DataReceived(self.reader.conn, data)):
            self.heads += not isinstance(command, (commands.SendData, commands.CloseConnection, commands.Log))


def _never(*_: object) -> Any:
    raise AssertionError("nothing but heads is read here")


PIECES = [b"GET / HTTP/1.1", b"Host: a", b"X: b", b"\r\n", b"\r\n", b"\r\n", b"\r", b"\n", b" ", b"\0", b"x"]


class TestReadingHeads:
    @given(st.lists(st.sampled_from(PIECES), max_size=12), st.integers(1, 5))
    @example([b"GET / HTTP/1.1", b"\r", b"\r\n", b"\r\n"], 1)  # a carriage return of its own before the head's end
    def test_how_a_head_is_cut_into_reads_changes_nothing(self, pieces: list[bytes], step: int) -> None:
        data = b"".join(pieces)
        at_once, in_steps = Reading(), Reading()
        at_once.feed(data)
        for start in range(0, len(data), step):
            if not in_steps.heads:
                in_steps.feed(data[start : start + step])
        assert (in_steps.refused != [], in_steps.heads > 0) == (at_once.refused != [], at_once.heads > 0)
        assert in_steps.refused or in_steps.heads or in_steps.unfinished == bool(in_steps.reader.buf)

    def test_a_large_head_byte_by_byte_is_cheap(self) -> None:
        """Looking at all of it at each read took half a minute."""
        reading, started = Reading(), time.monotonic()
        reading.feed(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        for _ in range(60_000):
            reading.feed(b"a")
        assert reading.unfinished
        reading.feed(b"\r\n\r\n")
        assert (reading.heads > 0, reading.refused, reading.unfinished) == (True, [], False)
        assert time.monotonic() - started < 8

    def test_empty_lines_without_end_are_cheap(self) -> None:
        reading, started = Reading(), time.monotonic()
        for _ in range(20):
            reading.feed(b"\r\n" * 32_000)
        assert time.monotonic() - started < 2
        assert (len(reading.reader.buf), reading.refused) == (0, [])
