"""Nobody gets more of a share than it has, and nobody who waits is forgotten."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from proxy.shares import Share, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_free_and_the_rest_is_spaced() -> None:
    clock = Clock()
    share = Share(3, 10, clock)
    assert [share.take() for _ in range(3)] == [0, 0, 0]
    assert [round(share.take(), 6) for _ in range(3)] == [0.1, 0.2, 0.3]
    clock.now = 10
    assert share.take() == 0


def test_asking_takes_nothing() -> None:
    share = Share(1, 10, Clock())
    assert [share.wait() for _ in range(5)] == [0] * 5
    share.take()
    assert round(share.wait(), 6) == 0.1


@given(st.lists(st.floats(0, 0.5), max_size=200), st.integers(1, 20), st.integers(1, 50))
def test_what_is_there_at_once_is_never_more_than_the_share(gaps: list[float], burst: int, rate: int) -> None:
    clock = Clock()
    share = Share(burst, rate, clock)
    served = 0
    for gap in gaps:
        clock.now += gap
        if share.wait() == 0:
            share.take()
            served += 1
    assert served <= burst + rate * clock.now + 1e-6


def test_it_is_told_once_for_each_burst() -> None:
    clock = Clock()
    share = Share(4, 10, clock)
    told = []
    for _ in range(3):
        for _ in range(8):
            if share.wait():
                told.append(share.is_first_wait())
            else:
                share.take()
        clock.now += 1
    assert told == [True, False, False, False] * 3


def test_each_turn_of_the_loop_is_for_one_and_they_come_in_order() -> None:
    """And another, that is not of the attempt, has its own in between."""
    seen: list[int | str] = []

    async def work(turns: Turns, number: int) -> None:
        for _ in range(3):
            await turns.take()
            seen.append(number)
            await asyncio.sleep(0)  # who has had a turn comes after those who wait already

    async def main() -> None:
        turns = Turns()
        at_work = asyncio.gather(*(work(turns, number) for number in range(4)))
        while not at_work.done():
            seen.append("another")
            await asyncio.sleep(0)

    asyncio.run(main())
    numbers = [one for one in seen if one != "another"]
    assert sorted(numbers[:4], key=str) == [0, 1, 2, 3]
    assert len(numbers) == 12
    assert all("another" in (before, after) for before, after in itertools.pairwise(seen))


def test_nobody_waits_for_a_turn_that_is_free() -> None:
    async def main() -> bool:
        turn = asyncio.ensure_future(Turns().take())
        await asyncio.sleep(0)
        return turn.done()

    assert asyncio.run(main())


def test_who_gives_up_waiting_holds_up_nobody() -> None:
    async def main() -> None:
        turns = Turns()
        await turns.take()
        waiting = [asyncio.ensure_future(turns.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        async with asyncio.timeout(5):
            await asyncio.wait(waiting)
            await turns.take()

    asyncio.run(main())
