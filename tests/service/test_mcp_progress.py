"""What a client is told while it waits: in which words, how often, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox.service.feed import Feed
from sandbox.service.mcp_progress import Standing, tell
from sandbox.service.model import FeedEvent, NotFound


def event(kind: Any, **data: Any) -> FeedEvent:
    return FeedEvent(id=1, kind=kind, data=data)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "waiting for its turn"),
        ([event("state", stage="waiting", queue_position=3)], "waiting for its turn, 3 calls before it"),
        ([event("state", stage="waiting", queue_position=0)], "waiting for its turn"),
        ([event("state", stage="preparing")], "preparing"),
        ([event("state", stage="preparing"), event("progress", text="numpy 2.1")], "preparing: numpy 2.1"),
        ([event("progress", text="numpy"), event("state", stage="running")], "running"),
        (
            [event("state", stage="running"), event("stdout", text="a\nb\n"), event("stderr", text="c\n")],
            "running: 2 lines of stdout, 1 lines of stderr",
        ),
    ],
)
def test_where_a_call_stands_is_said_in_words(events: list[FeedEvent], said: str) -> None:
    standing = Standing()
    for one in events:
        standing.take(one)
    assert str(standing) == said


def test_a_stage_is_told_at_once_and_output_is_not() -> None:
    standing = Standing()
    assert standing.take(event("state", stage="running"))
    assert not standing.take(event("state", stage="running"))
    assert not standing.take(event("stdout", text="line\n"))


def test_progress_is_told_in_time_though_nothing_happens_and_ends_with_the_call() -> None:
    told: list[tuple[float, str]] = []

    async def check() -> None:
        feed, enough = Feed(), asyncio.Event()

        async def report(seconds: float, text: str) -> None:
            told.append((seconds, text))
            if len(told) == 3:
                enough.set()

        telling = asyncio.create_task(tell(feed.follow(), report, every_seconds=0.02))
        await asyncio.wait_for(enough.wait(), 30)
        feed.end({})
        await asyncio.wait_for(telling, 30)

    asyncio.run(check())
    assert [seconds for seconds, _ in told] == sorted(seconds for seconds, _ in told)
    assert {text for _, text in told} == {"waiting for its turn"}


def test_a_flood_of_changes_is_told_now_and_then() -> None:
    told: list[str] = []

    async def check() -> None:
        feed = Feed()

        async def report(_: float, text: str) -> None:
            told.append(text)

        telling = asyncio.create_task(tell(feed.follow(), report))
        for number in range(2000):
            feed.tell("progress", text=str(number))
            if number % 100 == 0:
                await asyncio.sleep(0)
        feed.end({})
        await asyncio.wait_for(telling, 30)

    asyncio.run(check())
    assert len(told) < 20


def test_a_client_that_does_not_read_keeps_nothing_waiting() -> None:
    async def check() -> None:
        feed, stuck = Feed(), asyncio.Event()

        async def report(_seconds: float, _text: str) -> None:
            stuck.set()
            await asyncio.Event().wait()

        telling = asyncio.create_task(tell(feed.follow(), report, every_seconds=0.01))
        await asyncio.wait_for(stuck.wait(), 30)
        telling.cancel()
        await asyncio.wait({telling}, timeout=30)
        assert telling.cancelled()

    asyncio.run(check())


def test_a_call_that_is_not_there_has_no_progress() -> None:
    async def nothing() -> AsyncIterator[FeedEvent]:
        for one in list[FeedEvent]():
            yield one
        raise NotFound("no such call")

    async def report(_seconds: float, _text: str) -> None:
        pytest.fail("there is nothing to tell")

    asyncio.run(tell(nothing(), report))
