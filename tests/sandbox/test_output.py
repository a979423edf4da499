"""Output is counted exactly, kept to the cap, passed on as it is, and never holds the program up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.output import Collected, Collector, Stream


def collect(*writes: bytes, cap: int = 100, sink: Callable[[bytes], None] | None = None) -> Collected:
    """Write these to standard output, one after the other, and collect."""
    out, out_w = os.pipe()
    err, err_w = os.pipe()
    os.close(err_w)
    for fd in (out, err):
        os.set_blocking(fd, False)

    def write() -> None:
        try:
            for data in writes:
                while data:
                    data = data[os.write(out_w, data) :]
        finally:
            os.close(out_w)

    async def scenario() -> Collected:
        collector = Collector(cap, cap, stdout_sink=sink)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            await collector.collect(out, err)
        finally:
            os.close(out)
            os.close(err)
            writer.join()
        return collector.finish()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("written", "stream"),
    [
        ("x" * 99, Stream("x" * 99, 99, 99)),
        ("x" * 100, Stream("x" * 100, 100, 100)),
        ("x" * 101, Stream("x" * 100, 101, 101, truncated=True)),
        ("é" * 101, Stream("é" * 100, 101, 202, truncated=True)),
        ("𝔘" * 1000, Stream("𝔘" * 100, 1000, 4000, truncated=True)),
        ("", Stream()),
    ],
)
def test_the_cap_is_exact_and_in_characters(written: str, stream: Stream) -> None:
    """One below, at, and one above; of one to four bytes each."""
    assert collect(written.encode()).stdout == stream


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xc3", "\ufffd"),  # cut off by the end
        (b"ok \xf0\x9f\x90", "ok \ufffd"),
        (b"\xed\xa0\x80", "\ufffd" * 3),  # a surrogate is not UTF-8
    ],
)
def test_what_is_not_utf8_is_replaced_and_said(written: bytes, text: str) -> None:
    """As `errors="replace"` does."""
    assert collect(written).stdout == Stream(text, len(text), len(written), replaced=True)


def test_a_replacement_character_that_was_written_is_not_a_replacement() -> None:
    """It is text like any other."""
    assert collect("\ufffd".encode()).stdout == Stream("\ufffd", 1, 3)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 60))
def test_pieces_make_no_difference(pieces: list[bytes], cap: int) -> None:
    """However the bytes are cut, the result is that of the whole."""
    whole = b"".join(pieces).decode(errors="replace")
    stream = collect(*pieces, cap=cap).stdout
    assert (stream.text, stream.chars, stream.truncated) == (whole[:cap], len(whole), len(whole) > cap)


def test_a_sink_gets_every_byte() -> None:
    """Also those beyond the cap, and unchanged."""
    seen: list[bytes] = []
    collect(b"\xff" * 300, b"abc", sink=seen.append)
    assert b"".join(seen) == b"\xff" * 300 + b"abc"


def test_a_stream_without_text_is_passed_on_and_counted_in_bytes() -> None:
    written = bytes(range(256)) * 500
    got: list[bytes] = []
    assert collect(written, cap=0, sink=got.append).stdout == Stream(bytes=len(written))
    assert b"".join(got) == written


def test_a_sink_that_fails_is_given_no_more_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once; the text is whole."""
    given: list[bytes] = []

    def sink(data: bytes) -> None:
        given.append(data)
        raise BrokenPipeError("nobody reads")

    assert collect(b"x" * 200_000, b"y", cap=300_000, sink=sink).stdout.text == "x" * 200_000 + "y"
    assert len(given) == 1
    assert caplog.text.count("a sink of output failed") == 1


def test_more_than_a_pipe_holds_is_drained_on_both_streams_at_once() -> None:
    """10 MB on each: neither writer waits for the other stream to be read."""

    async def scenario() -> tuple[int, int]:
        pipes = [os.pipe() for _ in range(2)]

        def write(fd: int) -> None:
            for _ in range(160):
                data = b"y" * 65536
                while data:
                    data = data[os.write(fd, data) :]
            os.close(fd)

        writers = [threading.Thread(target=write, args=(w,)) for _, w in pipes]
        for r, _ in pipes:
            os.set_blocking(r, False)
        for writer in writers:
            writer.start()
        collector = Collector(1000, 1000)
        await collector.collect(pipes[0][0], pipes[1][0])
        for writer in writers:
            writer.join()
        for r, _ in pipes:
            os.close(r)
        output = collector.finish()
        return output.stdout.chars, output.stderr.chars

    assert asyncio.run(scenario()) == (160 * 65536, 160 * 65536)


def test_what_came_before_a_cancellation_is_there() -> None:
    """A timeout keeps the partial output."""

    async def scenario() -> Collected:
        out, out_w = os.pipe()
        err, err_w = os.pipe()
        for fd in (out, err):
            os.set_blocking(fd, False)
        seen = asyncio.Event()
        collector = Collector(100, 100, stdout_sink=lambda _: seen.set())
        task = asyncio.create_task(collector.collect(out, err))
        os.write(out_w, b"partial")
        await seen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for fd in (out, out_w, err, err_w):
            os.close(fd)
        return collector.finish()

    assert asyncio.run(scenario()).stdout == Stream("partial", 7, 7)
