"""Nobody gets more of a share than it has, and nobody who waits is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.shares import Share


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
