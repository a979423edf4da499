"""Nobody holds a connection by saying little, or by hearing nothing; and who leaves is known to have left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from sandbox.service import connections
from tests.service.listening import Peer, listening

SHORT = 0.3
LONG = 30.0
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class App:
    """Answers with the length of the body; or, at `/flood`, without end; or, at `/wait`, when the client has left."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.left = asyncio.Event()
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.set()
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        length, more = 0, scope["method"] == "POST"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            length += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/flood" and not self.left.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.sent += 65536
            receiving = asyncio.ensure_future(receive())
            done, _ = await asyncio.wait({receiving}, timeout=0)
            if done and receiving.result()["type"] == "http.disconnect":
                self.left.set()
            receiving.cancel()
        await send({"type": "http.response.body", "body": b"%d" % length, "more_body": False})


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the limits of time, which are long where a test says nothing."""

    def set_clocks(**seconds: float) -> None:
        for name in ("HEAD", "BODY", "STALL"):
            monkeypatch.setattr(connections, f"{name}_SECONDS", seconds.get(name.lower(), LONG))

    set_clocks()
    return set_clocks


async def drip(peer: Peer, data: bytes) -> None:
    """A byte now and then, as long as somebody listens."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            await peer.say(bytes([byte]))
            await asyncio.sleep(SHORT / 10)


def test_a_head_that_comes_byte_by_byte_has_its_time(root: Path, clocks: Any) -> None:
    clocks(head=SHORT)

    async def scenario() -> bytes:
        async with listening(App(), root / "s"):
            with Peer(root / "s") as peer:
                dripping = asyncio.create_task(drip(peer, b"GET / HTTP/1.1\r\nHost: " + b"a" * 10_000))
                said = await peer.rest()
                dripping.cancel()
                return said

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_a_connection_that_says_nothing_is_closed_without_a_word(root: Path, clocks: Any) -> None:
    clocks(head=SHORT)

    async def scenario() -> bytes:
        async with listening(App(), root / "s"):
            with Peer(root / "s") as peer:
                return await peer.rest()

    assert asyncio.run(scenario()) == b""


def test_a_second_head_on_a_kept_connection_has_its_time_too(root: Path, clocks: Any) -> None:
    clocks(head=SHORT)

    async def scenario() -> list[bytes]:
        async with listening(App(), root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(REQUEST)
                first = await peer.until(b"0\r\n\r\n")
                await asyncio.sleep(2 * SHORT)  # between requests a client may rest for longer
                await peer.say(REQUEST)
                second = await peer.until(b"0\r\n\r\n")
                dripping = asyncio.create_task(drip(peer, REQUEST * 100))
                await peer.say(b"GET / HTTP/1.1\r\nX: ")
                rest = await peer.rest()
                dripping.cancel()
                return [first, second, rest]

    first, second, rest = asyncio.run(scenario())
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 Request Timeout\r\n" in rest


@pytest.mark.parametrize("framing", [b"Content-Length: 100000", b"Transfer-Encoding: chunked"])
def test_a_body_that_comes_byte_by_byte_has_its_time(root: Path, clocks: Any, framing: bytes) -> None:
    """However much of it comes; and the application is told that the client has gone."""
    clocks(body=SHORT)

    async def scenario() -> bytes:
        app = App()
        async with listening(app, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"POST / HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n")
                dripping = asyncio.create_task(drip(peer, b"1\r\nx\r\n" * 10_000))
                said = await peer.rest()
                dripping.cancel()
                await app.left.wait()
                return said

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_an_answer_may_take_longer_than_a_body(root: Path, clocks: Any) -> None:
    """The clock of reading stops with the body: who waits for a long call is not too slow."""
    clocks(head=SHORT, body=SHORT)

    async def scenario() -> None:
        app = App()
        async with listening(app, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"POST /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
                await app.begun.wait()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(app.left.wait(), 4 * SHORT)

    asyncio.run(scenario())


def test_who_does_not_read_is_dropped_and_what_waits_for_it_is_bounded(root: Path, clocks: Any) -> None:
    clocks(stall=SHORT)

    async def scenario() -> int:
        app = App()
        async with listening(app, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
                await app.left.wait()
                return app.sent

    assert asyncio.run(scenario()) < 2_000_000


def test_who_reads_slowly_and_steadily_is_not_dropped(root: Path, clocks: Any) -> None:
    clocks(stall=SHORT)

    async def scenario() -> None:
        app = App()
        async with listening(app, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
                until = time.monotonic() + 5 * SHORT
                while time.monotonic() < until:
                    await peer.until(b"x" * 50_000)
                    await asyncio.sleep(SHORT / 6)
                assert not app.left.is_set()

    asyncio.run(scenario())


def test_who_asks_and_never_reads_the_answers_is_dropped_too(root: Path, clocks: Any) -> None:
    """Small answers, many of them: none is large enough to wait for, and all together are."""
    clocks(stall=SHORT)

    async def scenario() -> None:
        app = App()
        async with listening(app, root / "s"):
            with Peer(root / "s") as peer:
                with pytest.raises(ConnectionError):
                    await peer.say(REQUEST * 100_000)

    asyncio.run(scenario())


@pytest.mark.parametrize("half", [True, False], ids=["half", "whole"])
def test_who_closes_its_side_or_half_of_it_has_left(root: Path, clocks: Any, half: bool) -> None:
    async def scenario() -> None:
        app = App()
        async with listening(app, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"POST /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
                await app.begun.wait()
                if half:
                    peer.end()
                else:
                    peer.close()
                await app.left.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000, b"431"),
        (b"GET /" + b"x" * 70_000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", b"400"),  # a folded header
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n\tY: b\r\n\r\n", b"400"),
    ],
    ids=range(15),
)
def test_what_is_no_request_is_refused_in_the_form_of_every_error_and_ends_the_connection(
    root: Path, clocks: Any, said: bytes, status: bytes
) -> None:
    async def scenario() -> bytes:
        async with listening(App(), root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(said)
                return await peer.rest()

    head, _, body = asyncio.run(scenario()).partition(b"\r\n\r\n")
    status_line, *headers = head.split(b"\r\n")
    assert status_line.split(b" ")[1] == status
    assert b"connection: close" in headers
    assert body.startswith(b'{"error":{"code":')


def test_a_body_behind_an_answer_is_not_the_next_request(root: Path, clocks: Any) -> None:
    """An application that answers before it has read all gets nothing smuggled in."""

    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"0", "more_body": False})

    async def scenario() -> bytes:
        async with listening(early, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(REQUEST))
                await peer.until(b"\r\n\r\n0")
                await peer.say(REQUEST)  # it is the body
                await peer.say(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                return await peer.rest()

    assert asyncio.run(scenario()).count(b"HTTP/1.1 200") == 1


def test_an_upgrade_to_something_else_is_not_offered(root: Path, clocks: Any) -> None:
    async def scenario() -> bytes:
        async with listening(App(), root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(
                    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close, upgrade\r\nUpgrade: websocket\r\n"
                    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
                )
                return await peer.rest()

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200 ")
