"""What a tenant may have open and how fast it may ask: exactly, and no count is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.policy.tenants import Rate, Tenant
from sandbox.service.model import Busy
from sandbox.service.rates import Bounds


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tenant(concurrency: int = 100, queue: int = 100, per_minute: int | None = None, burst: int = 1) -> Tenant:
    rate = None if per_minute is None else Rate(per_minute=per_minute, burst=burst)
    return Tenant(name="acme", concurrency=concurrency, queue=queue, rate=rate)


def admitted(bounds: Bounds, tries: int) -> int:
    """How many of so many are taken."""
    taken = 0
    for _ in range(tries):
        try:
            bounds.admit()
        except Busy:
            continue
        taken += 1
    return taken


@pytest.mark.parametrize(("concurrency", "queue"), [(1, 0), (1, 1), (3, 2), (10, 100)])
def test_as_many_are_open_as_may_run_and_wait_and_not_one_more(concurrency: int, queue: int) -> None:
    """The refusal says both numbers; each that ends makes room for one."""
    bounds = Bounds(tenant(concurrency, queue))
    assert admitted(bounds, 500) == bounds.open == concurrency + queue
    with pytest.raises(Busy, match=f"of which {concurrency} are worked on at once and {queue} may wait") as refused:
        bounds.admit()
    assert refused.value.code == "busy"
    assert refused.value.retry_after_seconds == 1
    bounds.release()
    assert admitted(bounds, 500) == 1
    for _ in range(concurrency + queue):
        bounds.release()
    assert bounds.open == 0


def test_without_a_tenant_there_are_no_bounds_but_the_count() -> None:
    bounds = Bounds(None)
    assert admitted(bounds, 10_000) == bounds.open == 10_000


def test_a_burst_is_taken_at_once_and_then_so_many_a_minute() -> None:
    """To the moment: a little before the time that the refusal names it is refused, and at it taken."""
    clock = Clock()
    bounds = Bounds(tenant(per_minute=60, burst=5), clock)
    assert admitted(bounds, 50) == 5
    with pytest.raises(Busy, match="may begin 60 calls a minute, and 5 at once") as refused:
        bounds.admit()
    assert refused.value.code == "rate_limited"
    assert refused.value.retry_after_seconds == pytest.approx(1.0)
    clock.now += 0.99
    assert admitted(bounds, 50) == 0
    clock.now += 0.02
    assert admitted(bounds, 50) == 1
    clock.now += 10_000
    assert admitted(bounds, 50) == 5, "no more is saved up than a burst"


@given(st.integers(1, 600), st.integers(1, 20), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 30)), max_size=40))
def test_no_more_are_taken_than_the_burst_and_the_rate_give(
    per_minute: int, burst: int, asked: list[tuple[float, int]]
) -> None:
    """Over any time, whenever they come; and who asks for one after a pause that is long enough has it."""
    clock = Clock()
    bounds = Bounds(tenant(10_000, 0, per_minute, burst), clock)
    taken, start = 0, clock.now
    for pause, tries in asked:
        clock.now += pause
        found = admitted(bounds, tries)
        taken += found
        assert taken <= burst + (clock.now - start) * per_minute / 60 + 1e-6
        if tries and pause * per_minute / 60 >= 1.001:
            assert found >= 1


def test_a_refused_call_counts_for_nothing() -> None:
    """One that is refused for being open too many uses up no rate, and the other way round."""
    clock = Clock()
    bounds = Bounds(tenant(1, 0, per_minute=60, burst=2), clock)
    assert admitted(bounds, 10) == 1
    bounds.release()
    assert admitted(bounds, 10) == 1, "the nine that were refused used up nothing"
    bounds.release()
    assert admitted(bounds, 10) == 0
    assert bounds.open == 0


def test_a_reload_loses_no_count_and_gives_no_new_burst() -> None:
    """What is open stays open under the new numbers; what was used up is used up; what had come back has."""
    clock = Clock()
    before = Bounds(tenant(4, 0, per_minute=60, burst=4), clock)
    assert admitted(before, 10) == 4
    after = Bounds(tenant(6, 0, per_minute=60, burst=10), clock)
    after.take_over(before)
    assert after.open == 4
    assert admitted(after, 10) == 0
    for _ in range(20):  # reloads that come faster than the rate let it come back all the same
        clock.now += 0.1
        again = Bounds(tenant(6, 0, per_minute=60, burst=10), clock)
        again.take_over(after)
        after = again
    assert admitted(after, 10) == 2
    assert after.open == 6
    fewer = Bounds(tenant(1, 0), clock)
    fewer.take_over(after)
    for _ in range(6):
        assert admitted(fewer, 3) == 0
        fewer.release()
    assert admitted(fewer, 3) == 1
