"""Places are given in order of arrival, the queue has an end, and a place always comes back."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from sandbox.admission import Admission, QueueFull

NAMES = (f"call-{number}" for number in itertools.count())


def test_places_are_given_in_order_of_arrival() -> None:
    """With one place, calls come to their turn first in, first out."""
    turns: list[int] = []

    async def call(admission: Admission, number: int) -> None:
        async with admission.turn(next(NAMES)):
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
            async with admission.turn(next(NAMES)):
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
            async with admission.turn(next(NAMES)):
                await over.wait()

        first = [asyncio.create_task(call()) for _ in range(3)]
        await asyncio.sleep(0)
        assert admission.waiting == 2
        with pytest.raises(QueueFull, match="2 calls wait") as refused:
            async with admission.turn(next(NAMES)):
                pytest.fail("it had its turn")
        assert 1 <= refused.value.retry_after_seconds <= 300
        first[2].cancel()
        await asyncio.wait([first[2]])
        assert admission.waiting == 1
        over.set()
        await asyncio.gather(*first[:2])
        async with admission.turn(next(NAMES)) as mine:
            assert mine

    asyncio.run(scenario())


def test_a_place_comes_back_when_its_call_fails() -> None:
    """Whatever is raised during a turn."""

    async def scenario() -> None:
        admission = Admission(1, 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with admission.turn(next(NAMES)):
                    1 / 0  # noqa: B018

    asyncio.run(scenario())


class Queue:
    """Calls that hold their place until they are told to go, by name."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.inside: set[str] = set()
        self.calls: dict[str, asyncio.Task[None]] = {}
        self.go: dict[str, asyncio.Event] = {}

    async def start(self, name: str) -> None:
        self.go[name] = asyncio.Event()
        self.calls[name] = asyncio.create_task(self._call(name))
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self.go[name].set()
        await self.calls[name]
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self.calls[name].cancel()
        await asyncio.wait([self.calls[name]])
        await asyncio.sleep(0)

    async def _call(self, name: str) -> None:
        async with self.admission.turn(name):
            self.inside.add(name)
            try:
                await self.go[name].wait()
            finally:
                self.inside.discard(name)


def test_each_that_waits_knows_how_many_are_before_it() -> None:
    """From 0; who has its turn, has left or never came is in no place."""

    async def scenario() -> None:
        queue = Queue(Admission(1, 10))
        for name in "abcd":
            await queue.start(name)
        assert [queue.admission.position(name) for name in "abcdx"] == [None, 0, 1, 2, None]
        await queue.cancel("b")
        assert [queue.admission.position(name) for name in "abcd"] == [None, None, 0, 1]
        await queue.end("a")
        assert [queue.admission.position(name) for name in "acd"] == [None, None, 0]
        assert queue.inside == {"c"}
        await queue.end("c")
        await queue.end("d")
        assert queue.admission.waiting == 0

    asyncio.run(scenario())


def test_more_places_let_in_those_who_wait_and_fewer_let_nobody_in() -> None:
    """Who holds a place keeps it; there are as many as the new number once enough have gone."""

    async def scenario() -> None:
        queue = Queue(Admission(1, 10))
        for name in "abcdef":
            await queue.start(name)
        queue.admission.resize(3)
        await asyncio.sleep(0)
        assert queue.inside == set("abc")
        queue.admission.resize(1)
        for name in "ab":
            await queue.end(name)
            assert queue.inside == set("abc") - set("ab"[: "ab".index(name) + 1])
        await queue.end("c")
        assert queue.inside == {"d"}
        for name in "def":
            await queue.end(name)
        assert queue.inside == set()

    asyncio.run(scenario())


def test_a_place_given_to_one_who_has_just_left_goes_to_the_next() -> None:
    """In the same moment: the place is given, and who it was given to is cancelled; and the other way round."""

    async def scenario() -> None:
        queue = Queue(Admission(1, 10))
        for name in "abc":
            await queue.start(name)
        queue.go["a"].set()
        await asyncio.sleep(0)  # `a` gives its place back, and `b` has it without having run
        queue.calls["b"].cancel()
        await asyncio.wait([queue.calls["b"]])
        await asyncio.sleep(0)
        assert queue.inside == {"c"}
        await queue.start("d")
        await queue.start("e")
        queue.calls["d"].cancel()  # it has not heard of that when the place comes
        queue.go["c"].set()
        await asyncio.wait([queue.calls["c"], queue.calls["d"]])
        await asyncio.sleep(0)
        assert queue.inside == {"e"}
        await queue.end("e")
        async with asyncio.timeout(10), queue.admission.turn("f"):
            assert queue.admission.waiting == 0

    asyncio.run(scenario())
