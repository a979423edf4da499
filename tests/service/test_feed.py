"""The life of a call, for whoever follows it: in order, bounded, and never held up by a reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.service.feed import MAX_KEPT_CHARS, Feed
from sandbox.service.model import FeedEvent

PATIENCE = 30.0


def scenario(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await test()

    def run() -> None:
        asyncio.run(bounded())

    run.__doc__ = test.__doc__
    return run


async def all_of(feed: Feed, after: int = 0) -> list[FeedEvent]:
    return [event async for event in feed.follow(after)]


def text_of(events: list[FeedEvent], stream: str = "stdout") -> str:
    return "".join(event.data["text"] for event in events if event.kind == stream)


@scenario
async def test_events_come_in_order_numbered_from_1_and_the_answer_last() -> None:
    """Also for who comes when it is over, as often as one likes."""
    feed = Feed()
    feed.tell("state", state="waiting", queue_position=3)
    feed.write("stdout", b"out")
    feed.write("stderr", b"err")
    feed.tell("progress", text="resolving")
    feed.end({"state": "finished"})
    for _ in range(2):
        events = await all_of(feed)
        assert [(event.id, event.kind, event.data) for event in events] == [
            (1, "state", {"state": "waiting", "queue_position": 3}),
            (2, "stdout", {"text": "out"}),
            (3, "stderr", {"text": "err"}),
            (4, "progress", {"text": "resolving"}),
            (5, "result", {"state": "finished"}),
        ]


@scenario
async def test_who_comes_back_goes_on_where_it_was() -> None:
    """`after` is the last number that was seen; after the last one of all there is nothing, and it ends."""
    feed = Feed()
    for number in range(10):
        feed.write("stdout", b"%d" % number)
    feed.end({})
    for after in range(12):
        assert [event.id for event in await all_of(feed, after)] == list(range(after + 1, 12))


@scenario
async def test_a_reader_sees_each_event_as_it_comes() -> None:
    """Not at the end: what is written is there before anything more is."""
    feed = Feed()
    seen = feed.follow()
    feed.write("stdout", b"a")
    assert (await anext(seen)).data == {"text": "a"}
    waiting = asyncio.ensure_future(anext(seen))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.write("stdout", b"b")
    assert (await waiting).data == {"text": "b"}
    feed.end({})
    assert (await anext(seen)).kind == "result"
    with pytest.raises(StopAsyncIteration):
        await anext(seen)


@scenario
async def test_readers_do_not_wait_for_one_another() -> None:
    """Several, from different places, one of which has gone: each that stays sees all from its place on."""
    feed = Feed()
    readers = [asyncio.create_task(all_of(feed, after)) for after in (0, 0, 5, 50)]
    left = asyncio.create_task(all_of(feed))
    for number in range(100):
        feed.write("stdout", b"%d," % number)
        if number == 50:
            left.cancel()
        await asyncio.sleep(0)
    feed.end({})
    seen = await asyncio.gather(*readers)
    assert [[event.id for event in events] for events in seen] == [
        list(range(after + 1, 102)) for after in (0, 0, 5, 50)
    ]
    assert left.cancelled()


@scenario
async def test_what_happens_while_a_reader_is_busy_is_not_lost() -> None:
    """Between two events that it takes, more come, and the end comes: it has all of them, then the answer."""
    feed = Feed()
    feed.write("stdout", b"0")
    seen: list[FeedEvent] = []
    async for event in feed.follow():
        seen.append(event)
        if len(seen) < 5:
            feed.write("stdout", b"%d" % len(seen))
        elif len(seen) == 5:
            feed.end({})
    assert [event.id for event in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].kind == "result"


@scenario
async def test_output_beyond_the_bound_lets_the_oldest_go_and_says_so() -> None:
    """A reader that was too slow is told how many events it has missed, and has the newest whole."""
    feed = Feed(max_kept_chars=100)
    seen = feed.follow()
    feed.write("stdout", b"first")
    assert (await anext(seen)).data == {"text": "first"}
    for number in range(100):
        feed.write("stdout", b"%010d" % number)
    feed.end({"state": "finished"})
    rest = [event async for event in seen]
    gap, *kept = rest
    assert (gap.kind, gap.id, gap.data) == ("gap", 91, {"missed_events": 90})
    assert text_of(kept) == "".join(f"{number:010d}" for number in range(90, 100))
    assert [event.id for event in kept] == list(range(92, 103))
    assert await all_of(feed, gap.id) == kept, "who comes back after a gap misses nothing twice"
    assert (await all_of(feed))[0].data == {"missed_events": 91}


@scenario
async def test_a_reader_that_never_reads_costs_no_more_than_the_bound() -> None:
    """A hundred megabytes pass by one that stands still."""
    feed = Feed()
    stuck = feed.follow()
    feed.write("stdout", b"x")
    await anext(stuck)
    for _ in range(100):
        feed.write("stdout", b"y" * 1_000_000)
    events = await asyncio.wait_for(_all_and_end(feed), PATIENCE)
    assert len(text_of(events)) <= MAX_KEPT_CHARS
    assert (await anext(stuck)).kind == "gap"


async def _all_and_end(feed: Feed) -> list[FeedEvent]:
    feed.end({})
    return await all_of(feed)


@scenario
async def test_many_small_events_are_bounded_too() -> None:
    """A byte at a time is as much trouble as a megabyte."""
    feed = Feed()
    for number in range(20_000):
        feed.write("stdout", b"%d" % (number % 10))
    feed.tell("state", state="running")
    feed.end({})
    gap, *kept = await all_of(feed)
    assert gap.kind == "gap"
    assert gap.data["missed_events"] + len(kept) == 20_002
    assert len(kept) < 5_000
    assert [event.kind for event in kept[-2:]] == ["state", "result"]


@scenario
async def test_a_huge_line_comes_in_parts() -> None:
    """No event is larger than one message should be, and together they are the line."""
    feed = Feed(max_kept_chars=10_000_000)
    line = "é😀" * 100_000
    feed.write("stderr", line.encode())
    feed.end({})
    events = await all_of(feed)
    assert text_of(events, "stderr") == line
    assert max(len(event.data.get("text", "")) for event in events) <= 16 * 1024


@scenario
async def test_after_the_answer_nothing_comes() -> None:
    feed = Feed()
    feed.end({"first": True})
    feed.write("stdout", b"late")
    feed.tell("state", state="running")
    feed.end({"second": True})
    assert [(event.kind, event.data) for event in await all_of(feed)] == [("result", {"first": True})]


@scenario
async def test_characters_that_come_in_halves_are_whole() -> None:
    """Each stream for itself; what never became whole is shown as lost."""
    feed = Feed()
    euro, smile = "€".encode(), "😀".encode()
    feed.write("stdout", euro[:1])
    feed.write("stderr", smile[:2])
    feed.write("stdout", euro[1:])
    feed.write("stderr", smile[2:])
    feed.write("stdout", b"\xff" + euro[:2])
    feed.end({})
    events = await all_of(feed)
    assert text_of(events) == "€\ufffd\ufffd"
    assert text_of(events, "stderr") == "😀"
    assert all(event.data["text"] for event in events if event.kind != "result"), "no event is empty"


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=12)), max_size=30))
def test_the_text_of_a_feed_is_that_of_the_bytes(pieces: list[tuple[Any, bytes]]) -> None:
    """However they are cut."""

    async def read() -> list[FeedEvent]:
        feed = Feed()
        for stream, data in pieces:
            feed.write(stream, data)
        feed.end({})
        return await all_of(feed)

    events = asyncio.run(read())
    for stream in ("stdout", "stderr"):
        whole = b"".join(data for name, data in pieces if name == stream)
        assert text_of(events, stream) == whole.decode(errors="replace")
