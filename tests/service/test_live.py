"""A call that runs, as its owner sees it: where it stands, what it wrote, and its answers in both contracts' forms."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.code_exec import CodeExecCall
from sandbox.contract import Status, ToolResult
from sandbox.owners import Caller
from sandbox.service.live import LiveCall
from sandbox.service.model import Busy, Draining
from sandbox.service.service import Nobody
from tests.service.in_process import ALICE, HOLD, Site, cancelled, ended, enters, plain, policy, says, serving, site

ME = Caller(admin=True)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), policy(), max_concurrency=1) as here:
        yield here


def test_its_record_follows_its_life(here: Site) -> None:
    """Waiting with its position, then running with its stage; how long it has been there; no answer before its end."""

    async def scenario() -> None:
        holder = await here.service.submit_call(ME, plain(HOLD))
        await says(holder, "running")
        live = await here.service.submit_code_exec(ME, CodeExecCall(HOLD))
        await enters(live, "waiting")
        waiting = live.record()
        assert (waiting.state, waiting.stage, waiting.queue_position) == ("waiting", "waiting", 0)
        assert (waiting.kind, waiting.background, waiting.result, waiting.ended_at) == ("code_exec", False, None, None)
        begun_at: list[float | None] = [live.begun_at]
        await cancelled(holder)
        await says(live, "running")
        running = live.record()
        assert (running.state, running.stage, running.queue_position) == ("running", "running", None)
        assert running.submitted_at == waiting.submitted_at
        begun_at.append(live.begun_at)
        assert begun_at[0] is None
        assert (begun_at[1] or 0) >= live.submitted_at
        assert live.answer is None
        await cancelled(live)
        assert live.answer is not None

    here.run(scenario())


def test_what_its_preparation_is_at_is_told_until_that_is_over(here: Site) -> None:
    """In its record in place of the stage, and as an event; the end of it is no event."""

    async def scenario() -> None:
        live = await here.service.submit_call(ME, plain(HOLD))
        await says(live, "running")
        live.tell_progress("resolving 3 packages")
        assert live.record().stage == "resolving 3 packages"
        live.tell_progress("")
        assert live.record().stage == "running"
        await cancelled(live)
        told = [event.data async for event in live.feed.follow() if event.kind == "progress"]
        assert told == [{"text": "resolving 3 packages"}]

    here.run(scenario())


def test_its_output_so_far_is_that_of_its_last_attempt(here: Site) -> None:
    """None before there is one; while it runs; and after its end."""

    async def scenario() -> None:
        holder = await here.service.submit_call(ME, plain(HOLD))
        await says(holder, "running")
        live = await here.service.submit_call(ME, plain("import sys\nprint('é', file=sys.stderr)\n" + HOLD))
        assert live.output_so_far().stdout.text == ""
        await cancelled(holder)
        await says(live, "running")
        for _ in range(2):
            written = live.output_so_far()
            assert (written.stdout.text, written.stderr.text) == ("running\n", "é\n")
            assert (written.stdout.chars, written.stderr.chars) == (8, 2)
            await cancelled(live)

    here.run(scenario())


def test_who_waits_for_its_end_waits_no_longer_than_they_say(here: Site) -> None:
    async def scenario() -> None:
        live = await here.service.submit_call(ME, plain(HOLD))
        for seconds in (0.0, 0.01, -1.0):
            await live.settle(seconds)
            assert not live.ended.is_set()
        settling = asyncio.ensure_future(live.settle(1000))
        await cancelled(live)
        await settling
        await live.settle(0)

    here.run(scenario())


def test_a_cancelled_waiter_does_not_end_it(here: Site) -> None:
    """Its answer is there for others."""

    async def scenario() -> None:
        live = await here.service.submit_code_exec(ME, CodeExecCall("print(1)"))
        waiting = asyncio.ensure_future(live.code_exec_result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (await live.code_exec_result()).output == "1\n"
        await ended(live)

    here.run(scenario())


class Counts(Nobody):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def ended(self, live: LiveCall, answer: ToolResult | None) -> None:
        self.heard.append((live.call_id, None if answer is None else answer.status))

    def refused(self, tenant: str, code: str) -> None:
        self.heard.append((tenant, code))


def test_an_observer_hears_of_every_end_and_refusal_once(tmp_path: Path) -> None:
    """With how it ended, or the code of the refusal and whose it was."""

    async def scenario() -> None:
        async with serving(tmp_path, policy({"name": "acme", "concurrency": 1, "queue": 0})) as service:
            service.observer = counts = Counts()
            failed = await service.submit_call(ALICE, plain("1/0"))
            await ended(failed)
            held = await service.submit_call(ALICE, plain(HOLD))
            with pytest.raises(Busy):
                await service.submit_code_exec(ALICE, CodeExecCall("1"))
            await cancelled(held)
            await service.drain(0)
            with pytest.raises(Draining):
                await service.submit_call(ALICE, plain("1"))
        assert counts.heard == [
            (failed.call_id, Status.ERROR), ("acme", "busy"), (held.call_id, Status.KILLED), ("acme", "draining"),
        ]  # fmt: skip

    asyncio.run(scenario())
