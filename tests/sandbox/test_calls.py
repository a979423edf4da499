"""The handle of a call: one answer, a cancellation that always comes through, and what it is told of its stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxy.network import Grant, Mode
from sandbox.calls import RunningCall, Terms
from sandbox.contract import Cause, CodeCall, NetworkReport, Status, ToolResult
from sandbox.ledger import Recording
from sandbox.narrowing import Limits, Refused
from sandbox.owners import Owner
from sandbox.permits import Permit

CALL = CodeCall(language="python", code="print(1)")


def answer(number: int) -> ToolResult:
    return ToolResult(
        call_id=f"call-{number}", status=Status.SUCCESS, cause=Cause.EXIT, network=NetworkReport(mode="block-all")
    )


def grant() -> Grant:
    return Grant(
        call_id="call-1", attempt_id="", policy_name="p", policy_digest="d", mode=Mode.BLOCK_ALL, layers=(), deny=(),
        ports=(80,), hosts=(), private_addresses=(), passthrough=(), max_connections=1,
    )  # fmt: skip


def scenario(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    def run() -> None:
        asyncio.run(bounded())

    run.__doc__ = test.__doc__
    return run


@scenario
async def test_the_first_answer_counts() -> None:
    """Whoever waits, then or later, has that one; neither another nor a failure replaces it."""
    running = RunningCall("call-1", CALL)
    waiting = [asyncio.ensure_future(running.result()) for _ in range(3)]
    await asyncio.sleep(0)
    assert running.given is None
    running.answer(answer(1))
    running.answer(answer(2))
    running.fail(RuntimeError("late"))
    assert await asyncio.gather(*waiting) == [answer(1)] * 3
    assert [await running.result(), running.given] == [answer(1)] * 2


@scenario
async def test_a_call_that_failed_tells_everyone_who_waits() -> None:
    running = RunningCall("call-1", CALL)
    running.fail(MemoryError("a fault of this side's"))
    running.answer(answer(1))
    for _ in range(2):
        with pytest.raises(MemoryError):
            await running.result()
    assert running.given is None


@scenario
async def test_who_does_not_wait_any_more_takes_the_answer_from_nobody() -> None:
    running = RunningCall("call-1", CALL)
    gone, stays = (asyncio.ensure_future(running.result()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    running.answer(answer(1))
    assert await stays == answer(1)


@scenario
async def test_work_ends_when_its_call_is_cancelled() -> None:
    """At once, when it was before; and it is not left behind. What was done already counts."""
    running = RunningCall("call-1", CALL)
    ended: list[str] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append("ended")
        return "done"

    assert await running.unless_cancelled(work(0)) == "done"
    working = asyncio.ensure_future(running.unless_cancelled(work(1000)))
    await asyncio.sleep(0)
    running.cancel()
    running.cancel()
    assert await working is None
    assert await running.unless_cancelled(work(1000)) is None
    assert len(ended) >= 2
    assert asyncio.all_tasks() == {asyncio.current_task()}


@scenario
async def test_work_that_fails_says_so() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await RunningCall("call-1", CALL).unless_cancelled(fail())


@scenario
async def test_its_stages_are_told_as_they_come() -> None:
    running = RunningCall("call-1", CALL)
    assert running.stage == "accepted"
    told: list[tuple[str, str]] = []
    running.on_stage = lambda stage: told.append((stage, running.stage))
    for stage in ("waiting", "preparing", "running"):
        running.enter(stage)
    assert told == [("waiting", "waiting"), ("preparing", "preparing"), ("running", "running")]


@scenario
async def test_where_it_is_noted_is_known_once_it_has_a_place_or_an_answer() -> None:
    """Its own id, an earlier call's, or none: who waits for it waits for no more than that."""
    own, others, none = (RunningCall(f"call-{number}", CALL) for number in (1, 2, 3))
    own.note("call-1")
    noting = asyncio.ensure_future(own.noted())
    await asyncio.sleep(0)
    assert not noting.done()
    own.enter("preparing")
    assert await noting == "call-1"
    others.note("call-1")
    assert await others.noted() == "call-1"
    none.settled.set()
    assert await none.noted() is None


def permit() -> Permit:
    return Permit(Limits(timeout_seconds=1, memory_mib=128, output_mib=1), grant(), None, {})


@scenario
async def test_before_its_first_attempt_the_last_policy_counts_alone() -> None:
    """Refused, then allowed: allowed. What an attempt that ran before is told is what all of them leave it."""
    why = Refused("mode_not_allowed", "no", layer="operator", rule="network.modes")
    running = RunningCall("call-1", CALL)
    await running.withdraw(why, None)
    assert (running.revised, running.withdrawn, running.amendments) == (None, why, [])
    await running.revise(permit())
    assert (running.revised, running.withdrawn, running.amendments) == (permit(), None, [])


@scenario
async def test_a_call_is_the_operators_own_and_leaves_nothing_unless_its_terms_say_else() -> None:
    running = RunningCall("call-1", CALL)
    assert (running.terms, running.workdir, running.may_have_begun) == (Terms(Owner(), None, None), None, False)
    terms = Terms(Owner("acme", "alice"), Recording())
    assert RunningCall("call-1", CALL, terms=terms).terms is terms


@pytest.mark.parametrize("place", range(3))
def test_a_sink_or_listener_that_would_have_to_be_awaited_is_refused(place: int) -> None:
    async def never(_: Any) -> None:
        pytest.fail("it was called")

    async def make() -> None:
        given: list[Any] = [None, None, None]
        given[place] = never
        with pytest.raises(TypeError, match="plain function"):
            RunningCall("call-1", CALL, *given)

    asyncio.run(make())
