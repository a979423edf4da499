"""Nobody keeps the event loop by sending much that is dear to parse, and nothing is lost on the way to the parser."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme
from starlette.types import Receive, Scope, Send

from sandbox.service.intake import BYTES_A_CHUNK, FREE_CHUNKS, PIECE_BYTES
from tests.service.listening import Peer, listening
from tests.service.test_connections import App

CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(size: int, many: int) -> bytes:
    return (b"%x\r\n%s\r\n" % (size, b" " * size)) * many + b"0\r\n\r\n"


async def ask(path: Path, said: bytes) -> bytes:
    with Peer(path) as peer:
        sending = asyncio.create_task(peer.say(said))
        heard = await peer.rest()
        await asyncio.wait({sending})
        sending.exception()  # once it is answered nobody listens
        return heard


@pytest.mark.parametrize(
    ("size", "many", "status"),
    [
        (1, FREE_CHUNKS, b"200"),
        (1, 100_000, b"400"),
        (BYTES_A_CHUNK // 2, 2 * FREE_CHUNKS, b"200"),
        (BYTES_A_CHUNK // 2, 4 * FREE_CHUNKS, b"400"),
        (BYTES_A_CHUNK, 10_000, b"200"),
    ],
)
def test_chunks_may_not_be_too_many_for_their_bytes(root: Path, size: int, many: int, status: bytes) -> None:
    async def scenario() -> bytes:
        async with listening(App(), root / "s"):
            return await ask(root / "s", CHUNKED + chunks(size, many))

    said = asyncio.run(scenario())
    assert said.startswith(b"HTTP/1.1 " + status)
    assert (b"too many chunks" in said) == (status == b"400")


def test_large_and_small_chunks_are_taken_together(root: Path) -> None:
    """Large ones pay for small ones that follow."""

    async def scenario() -> bytes:
        body = chunks(PIECE_BYTES, 1).removesuffix(b"0\r\n\r\n") + chunks(1, FREE_CHUNKS)
        async with listening(App(), root / "s"):
            return await ask(root / "s", CHUNKED + body)

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200 ")


def test_each_request_of_a_connection_has_its_own_count(root: Path) -> None:
    async def scenario() -> bytes:
        kept = CHUNKED.replace(b"Connection: close\r\n", b"") + chunks(1, FREE_CHUNKS)
        async with listening(App(), root / "s"):
            return await ask(root / "s", kept * 3 + CHUNKED + chunks(1, 1))

    assert asyncio.run(scenario()).count(b"HTTP/1.1 200 ") == 4


def test_others_have_their_turn_while_a_body_is_parsed(root: Path) -> None:
    body = chunks(BYTES_A_CHUNK, 16_000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def scenario() -> bytes:
        async with listening(App(), root / "s"):
            counting = asyncio.create_task(count())
            said = await ask(root / "s", CHUNKED + body)
            counting.cancel()
            return said

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200 ")
    assert turns > len(body) / PIECE_BYTES


def test_little_is_parsed_of_a_body_that_has_been_answered(root: Path) -> None:
    """Who is told so while it sends may go on for a moment, but not with chunk after chunk."""

    async def answers_first(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    left = asyncio.Event()

    async def scenario() -> None:
        async with listening(answers_first, root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(CHUNKED)
                await peer.until(b"no")
                await peer.say(chunks(BYTES_A_CHUNK, FREE_CHUNKS // 2).removesuffix(b"0\r\n\r\n"))
                await asyncio.sleep(0)
                assert not left.is_set()
                sending = asyncio.create_task(peer.say(chunks(BYTES_A_CHUNK, 100_000)))
                await left.wait()
                await asyncio.wait({sending})
                assert isinstance(sending.exception(), ConnectionError)

    asyncio.run(scenario())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_requests_that_are_sent_ahead_are_answered_whole_and_in_order(root: Path, tls: bool) -> None:
    """Of any length, in both framings, and across all pieces."""
    lengths = [number * 37 % 50_000 for number in range(300)]
    said = b""
    for number, length in enumerate(lengths):
        if number % 2:
            said += b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length + b"x" * length
        else:
            head = CHUNKED.replace(b"Connection: close\r\n", b"")
            said += head + chunks(max(length, 1), 1)
    said += b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("a.test").configure_cert(context)
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode()) if tls else None

    async def scenario() -> bytes:
        async with listening(App(), root / "s", tls=context if tls else None):
            reader, writer = await asyncio.open_unix_connection(
                str(root / "s"), ssl=trusting, server_hostname="a.test" if tls else None
            )
            writer.write(said)
            heard = await reader.read()
            writer.close()
            return heard

    answers = asyncio.run(scenario()).split(b"HTTP/1.1 200 OK\r\n")[1:]
    told = [int(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1]) for answer in answers]
    assert told == [length if number % 2 else max(length, 1) for number, length in enumerate(lengths)] + [0]
