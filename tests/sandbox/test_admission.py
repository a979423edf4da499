"""Places are given in order of arrival, the queue has an end, and a place always comes back."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.admission import Admission, QueueFull


def test_places_are_given_in_order_of_arrival() -> None:
    """With one place, calls come to their turn first in, first out."""
    turns: list[int] = []

    async def call(admission: Admission, number: int) -> None:
        async with admission.turn():
            turns.append(number)
            await asyncio.sleep(0)

    async def scenario() -> None:
        admission = Admission(1, 100)
        await asyncio.gather(*(call(admission, number) for number in range(50)))

    asyncio.run(scenario())
    assert turns == list(range(50))


def test_no_more_run_at_once_than_there_are_places() -> None:
    """Never more, and as many when that many are there."""
    seen: list[int] = []

    async def scenario() -> None:
        admission, running = Admission(3, 100), 0

        async def call() -> None:
            nonlocal running
            async with admission.turn():
                running += 1
                seen.append(running)
                await asyncio.sleep(0.001)
                running -= 1

        await asyncio.gather(*(call() for _ in range(20)))

    asyncio.run(scenario())
    assert max(seen) == 3


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again() -> None:
    """The refused one does not wait; a cancelled one gives its place in the queue back; and turns go on."""

    async def scenario() -> None:
        admission, over = Admission(1, 2), asyncio.Event()

        async def call() -> None:
            async with admission.turn():
                await over.wait()

        first = [asyncio.create_task(call()) for _ in range(3)]
        await asyncio.sleep(0)
        assert admission.waiting == 2
        with pytest.raises(QueueFull, match="2 calls wait") as refused:
            async with admission.turn():
                pytest.fail("it had its turn")
        assert 1 <= refused.value.retry_after_seconds <= 300
        first[2].cancel()
        await asyncio.wait([first[2]])
        assert admission.waiting == 1
        over.set()
        await asyncio.gather(*first[:2])
        async with admission.turn() as mine:
            assert mine

    asyncio.run(scenario())


def test_a_place_comes_back_when_its_call_fails() -> None:
    """Whatever is raised during a turn."""

    async def scenario() -> None:
        admission = Admission(1, 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with admission.turn():
                    1 / 0  # noqa: B018

    asyncio.run(scenario())
