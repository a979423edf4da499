"""One request, one answer: which id a call has in the ledger, and what those with the same key are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.answers import Answers
from sandbox.calls import RunningCall, Terms
from sandbox.contract import CallError, Cause, CodeCall, NetworkReport, Status, ToolResult
from sandbox.ledger import Ledger, LedgerUnavailable, Recording, State
from sandbox.owners import Owner

ALICE, BOB = Owner("acme", "alice"), Owner("acme", "bob")
KEYED = CodeCall(language="python", code="print(1)", idempotency_key="key")
OTHERS = KEYED.model_copy(update={"code": "print(2)"})
PLAIN = CodeCall(language="python", code="print(1)")
RECORDED = Recording(background=True)


def answer(call_id: str, *, cause: Cause = Cause.EXIT) -> ToolResult:
    error = None if cause is Cause.EXIT else CallError(code=cause.value, message="no")
    status = Status.SUCCESS if cause is Cause.EXIT else Status.ERROR
    return ToolResult(call_id=call_id, status=status, cause=cause, error=error, network=NetworkReport(mode="block-all"))


class Desk:
    """An executor's answers, and the calls that it works on."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.running: dict[str, RunningCall] = {}
        self.answers = Answers(ledger, self.running)

    def call(
        self, call_id: str, call: CodeCall = KEYED, owner: Owner = ALICE, recording: Recording | None = RECORDED
    ) -> RunningCall:
        running = self.running[call_id] = RunningCall(call_id, call, terms=Terms(owner, recording))
        return running

    async def look(self, running: RunningCall) -> ToolResult | None:
        async with asyncio.timeout(30):
            return await self.answers.earlier(running.call, running)

    async def end(self, running: RunningCall) -> ToolResult:
        """It has run, and has its answer."""
        given = answer(running.call_id)
        await self.ledger.end(running.call_id, given, begun=True)
        running.answer(given)
        self.settle(running)
        return given

    def settle(self, running: RunningCall) -> None:
        del self.running[running.call_id]
        running.settled.set()


@asynccontextmanager
async def desk(directory: Path) -> AsyncIterator[Desk]:
    ledger = await Ledger.open(directory, keep_seconds=3600)
    try:
        yield Desk(ledger)
    finally:
        await ledger.close()


def scenario(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path / "calls"))

    run.__doc__ = test.__doc__
    return run


async def code_of(given: ToolResult | None) -> str:
    assert given is not None
    assert given.error is not None
    return given.error.code


@scenario
async def test_the_first_is_told_nothing_and_written_down_under_its_own_id(directory: Path) -> None:
    """It is noted once it is known where it stands."""
    async with desk(directory) as here:
        first = here.call("call-1")
        assert await here.look(first) is None
        assert await here.ledger.record("call-1", ALICE) is not None
        assert first.noted_as == "call-1"
        noting = asyncio.ensure_future(first.noted())
        await asyncio.sleep(0)
        assert not noting.done()
        first.enter("waiting")
        assert await noting == "call-1"


@scenario
async def test_another_with_the_key_has_the_firsts_id_and_waits_for_its_answer(directory: Path) -> None:
    """It knows the id at once, and the answer when the first has it; after that both at once."""
    async with desk(directory) as here:
        first, second = here.call("call-1"), here.call("call-2")
        assert await here.look(first) is None
        looking = asyncio.ensure_future(here.look(second))
        assert await second.noted() == "call-1"
        assert not looking.done()
        given = await here.end(first)
        assert await looking == given
        here.settle(second)
        third = here.call("call-3")
        assert await here.look(third) == given
        assert await third.noted() == "call-1"
        assert [entry.call_id for entry in await here.ledger.entries()] == ["call-1"]


@scenario
async def test_another_request_with_the_key_is_a_conflict_and_has_no_id(directory: Path) -> None:
    """While the first runs, and after. Another owner's request has nothing to do with it."""
    async with desk(directory) as here:
        first = here.call("call-1")
        assert await here.look(first) is None
        for ended in (False, True):
            other = here.call(f"call-2{ended}", OTHERS)
            assert await code_of(await here.look(other)) == "idempotency_conflict"
            here.settle(other)
            assert await other.noted() is None
            if not ended:
                await here.end(first)
        assert await here.look(here.call("call-3", OTHERS, BOB)) is None


@scenario
async def test_a_call_that_another_executor_works_on_is_to_be_asked_again(directory: Path) -> None:
    async with desk(directory) as here, desk(directory) as there:
        assert await there.look(there.call("call-1")) is None
        second = here.call("call-2")
        found = await here.look(second)
        assert await code_of(found) == "call_running"
        assert found is not None
        assert found.error is not None
        assert found.error.retry_after_seconds is not None
        here.settle(second)
        assert await second.noted() is None


@scenario
async def test_a_call_whose_end_could_not_be_written_down_is_lost_for_the_next_one(directory: Path) -> None:
    """The ledger has it as running, and nobody works on it: told, and not waited for for ever."""
    async with desk(directory) as here:
        first = here.call("call-1")
        assert await here.look(first) is None
        here.settle(first)
        second = here.call("call-2")
        assert await code_of(await here.look(second)) == "executor_lost"
        assert second.noted_as == "call-1"


@scenario
async def test_without_a_key_every_call_is_the_first(directory: Path) -> None:
    async with desk(directory) as here:
        for number in range(3):
            assert await here.look(here.call(f"call-{number}", PLAIN)) is None


@scenario
async def test_an_answer_given_at_once_is_kept_of_what_is_recorded(directory: Path) -> None:
    """Under its own id, and under no key: that stays free, or another call's. Of the rest nothing is kept."""
    refusal = answer("call-1", cause=Cause.POLICY_REFUSED)
    async with desk(directory) as here:
        for number, (call, recording) in enumerate(((KEYED, RECORDED), (PLAIN, RECORDED), (KEYED, None))):
            running = here.call(f"call-{number}", call, recording=recording)
            await here.answers.give_at_once(running, refusal)
            here.settle(running)
            assert running.given == refusal
            assert await running.noted() == (None if recording is None else f"call-{number}")
            entry = await here.ledger.record(f"call-{number}", ALICE)
            if recording is None:
                assert entry is None
            else:
                assert entry is not None
                assert (entry.state, entry.result, entry.idempotency_key) == (State.ANSWERED, refusal, None)
        first = here.call("first")
        assert await here.look(first) is None, "the key is free"
        await here.end(first)
        later = here.call("later")
        await here.answers.give_at_once(later, refusal)
        assert await here.ledger.record("later", ALICE) is not None
        again = here.call("again")
        assert await here.look(again) == answer("first")


@scenario
async def test_a_ledger_that_cannot_be_used_takes_no_answer_away(directory: Path) -> None:
    """What is answered at once is; a call that is to run is not begun."""
    async with desk(directory) as here:
        pass
    running = here.call("call-1")
    with pytest.raises(LedgerUnavailable):
        await here.look(running)
    refusal = answer("call-1", cause=Cause.POLICY_REFUSED)
    await here.answers.give_at_once(running, refusal)
    assert (running.given, running.noted_as) == (refusal, None)
    await here.answers.give_up(running)
    with pytest.raises(LedgerUnavailable):
        await here.answers.keep(running, refusal)


@scenario
async def test_a_cancelled_caller_does_not_take_the_firsts_answer_with_it(directory: Path) -> None:
    """Who waits for the first is cancelled alone."""
    async with desk(directory) as here:
        first, second = here.call("call-1"), here.call("call-2")
        assert await here.look(first) is None
        looking = asyncio.ensure_future(here.look(second))
        await second.noted()
        looking.cancel()
        await asyncio.wait([looking])
        assert await here.end(first) == await first.result()
