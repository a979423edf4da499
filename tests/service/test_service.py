"""The service, asked in this process: what each question is answered, how much is taken, and that all is given back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.calls import RunningCall
from sandbox.code_exec import CodeExecCall, CodeExecResult
from sandbox.contract import Cause, InvalidCall, Status, ToolResult
from sandbox.isolation.pool import WarmPool
from sandbox.ledger import LedgerUnavailable
from sandbox.owners import Caller
from sandbox.service.live import LiveCall
from sandbox.service.model import (
    Busy,
    CallRecord,
    CallState,
    Draining,
    FeedEvent,
    NotFound,
    QueueIsFull,
    ServiceError,
    Unavailable,
)
from sandbox.service.service import MAX_LISTED, MAX_OUTPUT_CHARS, Service
from sandbox.tenants import UnknownTenant
from sandbox.workdir import WorkingDirectories
from tests.service.in_process import (
    ALICE,
    BOB,
    HOLD,
    OTHER,
    Site,
    cancelled,
    counts,
    ended,
    enters,
    nothing_open,
    plain,
    policy,
    says,
    serving,
    site,
    until,
)

ME = Caller(admin=True)
ACME = {"name": "acme", "concurrency": 2, "queue": 3}
WIDE = {"name": "other", "concurrency": 8, "queue": 1000}
SLOW = {"name": "slow", "rate": {"per_minute": 1, "burst": 4}, "concurrency": 100, "queue": 100}


_numbers = itertools.count()


def somebody() -> Caller:
    """One who has no calls yet, and no news."""
    return Caller("other", f"user-{next(_numbers)}")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service that most tests share."""
    loaded = policy(ACME, WIDE, SLOW, code_exec={"user_data": {"max_mib": 1}})
    with site(tmp_path_factory.mktemp("site"), loaded, max_concurrency=8, max_waiting=2000) as here:
        yield here


async def fails_to_begin(service: Service, caller: Caller, count: int, kind: str = "code_execution") -> Counter[str]:
    """What so many that come at once are told; those that were begun are ended."""
    begun: list[LiveCall] = []

    async def one() -> str:
        try:
            if kind == "code_exec":
                begun.append(await service.submit_code_exec(caller, CodeExecCall(HOLD)))
            else:
                begun.append(await service.submit_call(caller, plain(HOLD), background=kind == "background"))
        except ServiceError as error:
            return error.code if (error.retry_after_seconds or 0) > 0 else "no time to come again"
        return "begun"

    told = Counter(await asyncio.gather(*(one() for _ in range(count))))
    await cancelled(*begun)
    return told


# --- answers


def test_a_call_is_answered_and_then_known(here: Site) -> None:
    """Its result, its record, its place in the list, its output and its events are one story."""

    async def scenario() -> None:
        service = here.service
        live = await service.submit_call(ALICE, plain("import sys\nprint('é😀', end='')\nprint(2, file=sys.stderr)"))
        result = await live.result()
        await ended(live)
        assert (result.status, result.stdout, result.stderr, result.call_id) == (
            Status.SUCCESS, "é😀", "2\n", live.call_id,
        )  # fmt: skip
        record = await service.record(ALICE, live.call_id)
        assert (record.state, record.kind, record.background, record.result) == (
            "finished", "code_execution", False, result,
        )  # fmt: skip
        assert record.ended_at is not None
        assert record.expires_at == record.ended_at + 24 * 3600
        first = (await service.calls(ALICE, limit=1)).calls[0]
        assert (first.call_id, first.state, first.success) == (live.call_id, "finished", True)
        assert await service.wait(ALICE, live.call_id, 0) == record
        assert await service.cancel(ALICE, live.call_id) == record, "what has ended stays as it is"
        (event,) = [event async for event in service.events(ALICE, live.call_id)]
        assert (event.kind, event.data["state"]) == ("result", "finished")
        assert ToolResult.model_validate(event.data["result"]) == result
        assert await service.take_notes(ALICE) == [], "it was waited for"

    here.run(scenario())


def test_a_code_exec_call_runs_in_its_users_directory(here: Site) -> None:
    """Which is there for the next one of that user's, and for nobody else's; its script is gone."""

    async def scenario() -> None:
        async def run(caller: Caller, code: str, working_dir: str | None = None) -> CodeExecResult:
            live = await here.service.submit_code_exec(caller, CodeExecCall(code, working_dir))
            found = await live.code_exec_result()
            await ended(live)
            return found

        listing = "import os\nprint(sorted(n for n in os.listdir() if not n.startswith('code_exec_')))"
        assert (await run(ALICE, "open('mine', 'w').write('1')")).success
        assert (await run(ALICE, listing)).output == "['mine']\n"
        for caller in (BOB, OTHER):
            assert (await run(caller, listing)).output == "[]\n"
        replaced = await run(ALICE, listing, "/etc")
        assert replaced.output == "['mine']\n"
        assert (replaced.working_dir.requested, replaced.working_dir.used, replaced.working_dir.replaced) == (
            "/etc", ".", True,
        )  # fmt: skip
        record = await here.service.record(ALICE, replaced.call_id)
        assert record.code_exec == replaced
        files = [path.name for path in (here.state / "tenants/acme/user_data/alice").iterdir()]
        assert files == ["mine"]

    here.run(scenario())


def test_the_policys_longest_timeout_is_a_code_exec_calls_too(tmp_path: Path) -> None:
    """It is clamped, where a Code Execution call is refused; with a tenant's own, that."""

    async def scenario() -> None:
        brief = {"name": "acme", "limits": {"timeout_seconds": {"max": 1}}}
        loaded = policy(brief, limits={"timeout_seconds": {"default": 2, "max": 2}})
        async with serving(tmp_path, loaded) as service:
            for caller, seconds in ((ME, 2), (ALICE, 1)):
                live = await service.submit_code_exec(caller, CodeExecCall("print(1)", timeout=300))
                assert (await live.code_exec_result()).timeout_seconds == seconds
                refused = await (await service.submit_call(caller, plain("print(1)", timeout=300))).result()
                assert refused.error is not None
                assert refused.error.reason == "timeout_not_allowed"
            await nothing_open(service)

    asyncio.run(scenario())


# --- how much is taken


@pytest.mark.parametrize("kind", ["code_execution", "code_exec", "background"])
def test_a_tenant_has_open_what_it_may_and_not_one_more(here: Site, kind: str) -> None:
    """Of hundreds at once: as many as may run and wait are begun, all others told at once; then again as many."""

    async def scenario() -> None:
        for _ in range(3):
            assert await fails_to_begin(here.service, ALICE, 200, kind) == {"begun": 5, "busy": 195}

    here.run(scenario())


def test_users_of_a_tenant_share_its_bounds_and_tenants_do_not(here: Site) -> None:
    async def scenario() -> None:
        mine = [await here.service.submit_call(caller, plain(HOLD)) for caller in (ALICE, BOB, ALICE, BOB, ALICE)]
        for caller in (ALICE, BOB):
            with pytest.raises(Busy, match="tenant `acme` has 5 calls open"):
                await here.service.submit_call(caller, plain(HOLD))
        others = await here.service.submit_call(OTHER, plain("print(1)"))
        assert (await others.result()).stdout == "1\n"
        await cancelled(*mine)

    here.run(scenario())


def test_no_more_of_a_tenants_calls_are_worked_on_at_once_than_may_be(here: Site) -> None:
    async def scenario() -> None:
        lives = [await here.service.submit_call(ALICE, plain(HOLD)) for _ in range(5)]
        await says(lives[0], "running")
        await says(lives[1], "running")
        assert [live.state for live in lives] == ["running", "running", "waiting", "waiting", "waiting"]
        assert [live.queue_position for live in lives] == [None, None, 0, 1, 2]
        assert here.service.open_calls == (3, 2)
        told = [[(one.data["stage"], one.data["queue_position"]) async for one in _first(live, 1)] for live in lives]
        assert told == [[("preparing", None)]] * 2 + [[("waiting", 0)], [("waiting", 1)], [("waiting", 2)]]
        await cancelled(lives[2], lives[0])
        await says(lives[3], "running")
        assert [live.queue_position for live in lives] == [None, None, None, None, 0]
        await cancelled(*lives)

    here.run(scenario())


async def _first(live: LiveCall, count: int) -> AsyncIterator[FeedEvent]:
    async for event in live.feed.follow():
        yield event
        if event.id == count:
            return


def test_a_detached_call_that_waits_is_told_its_position(here: Site) -> None:
    """As it is accepted; it is 0 for the next one. One that has its turn has none."""

    async def scenario() -> None:
        lives = []
        for state, position in (("running", None), ("running", None), ("waiting", 0), ("waiting", 1), ("waiting", 2)):
            lives.append(await here.service.submit_call(ALICE, plain(HOLD), background=True))
            accepted = lives[-1].accepted()
            assert (accepted.state, accepted.queue_position) == (state, position)
            record = await here.service.record(ALICE, lives[-1].call_id)
            assert (record.state, record.queue_position) == (state, position)
        await cancelled(*lives)

    here.run(scenario())


def test_a_tenant_that_asks_too_fast_is_told_when_to_come_again(here: Site) -> None:
    """A burst is begun, and not one more; other tenants are not held up."""

    async def scenario() -> None:
        slow = Caller("slow", "alice")
        assert await fails_to_begin(here.service, slow, 100) == {"begun": 4, "rate_limited": 96}
        with pytest.raises(Busy) as refused:
            await here.service.submit_call(slow, plain("1"))
        assert refused.value.retry_after_seconds is not None
        assert 30 < refused.value.retry_after_seconds <= 60
        assert await fails_to_begin(here.service, ALICE, 6) == {"begun": 5, "busy": 1}

    here.run(scenario())


@pytest.mark.parametrize("kind", ["code_execution", "code_exec"])
def test_the_service_as_a_whole_has_open_what_it_may_and_not_one_more(tmp_path: Path, kind: str) -> None:
    """Whoever they are of. A call that is still being placed counts."""

    async def scenario() -> None:
        users = [Caller("", name) for name in ("u1", "u2", "u3")]
        async with serving(tmp_path, policy(), max_concurrency=2, max_waiting=5) as service:
            for _ in range(3):
                told = await asyncio.gather(*(fails_to_begin(service, who, 60, kind) for who in users))
                assert sum(told, Counter()) == {"begun": 7, "queue_full": 173}
                await nothing_open(service)

    asyncio.run(scenario())


def test_one_tenant_leaves_places_for_the_others(tmp_path: Path) -> None:
    """However many calls it sends: of what is left it may not have more open than are still left for all."""

    async def scenario() -> None:
        wide = [{"name": name, "concurrency": 100, "queue": 100} for name in ("acme", "other")]
        async with serving(tmp_path, policy(*wide), max_concurrency=2, max_waiting=5) as service:
            greedy = [await service.submit_call(ALICE, plain("import time; time.sleep(60)")) for _ in range(4)]
            for who in (ALICE, BOB):
                with pytest.raises(Busy):
                    await service.submit_call(who, plain("1"))
            live = await service.submit_call(OTHER, plain("1"))
            for one in (*greedy, live):
                one.cancel()
            await nothing_open(service)

    asyncio.run(scenario())


def test_what_is_begun_in_hundreds_is_answered_once_each(here: Site) -> None:
    """All that were admitted have their own answer, and one that never waits in vain."""

    async def scenario() -> None:
        async def one(number: int) -> str:
            live = await here.service.submit_call(OTHER, plain(f"print({number})"))
            return (await live.result()).stdout

        answers = await asyncio.gather(*(one(number) for number in range(200)))
        assert answers == [f"{number}\n" for number in range(200)]

    here.run(scenario())


# --- given back, whatever happens


async def _raises(service: Service, error: type[Exception], caller: Caller, call: CodeExecCall) -> None:
    with pytest.raises(error):
        await service.submit_code_exec(caller, call)
    await nothing_open(service)


def test_a_call_that_cannot_be_placed_is_given_back(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is none, one that cannot be had, and a tenant that is not there."""

    async def scenario() -> None:
        service = here.service
        await _raises(service, InvalidCall, ALICE, CodeExecCall("1", working_dir="missing"))
        await _raises(service, InvalidCall, ALICE, CodeExecCall("1", working_dir="a\0b"))
        await _raises(service, UnknownTenant, Caller("nobody", "x"), CodeExecCall("1"))
        with pytest.raises(UnknownTenant):
            await service.submit_call(Caller("nobody", "x"), plain("1"))
        for error in (OSError(5, "a fault of the disk's"), PermissionError(13, "not yours")):
            with monkeypatch.context() as patch:
                patch.setattr(WorkingDirectories, "user_root", _raise(error))
                with pytest.raises(Unavailable) as unavailable:
                    await service.submit_code_exec(ALICE, CodeExecCall("1"))
            assert unavailable.value.code == "directory_unavailable"
            await nothing_open(service)
        with monkeypatch.context() as patch:
            patch.setattr(WorkingDirectories, "user_root", _raise(MemoryError()))
            with pytest.raises(MemoryError):
                await service.submit_code_exec(ALICE, CodeExecCall("1"))
        await nothing_open(service)

    here.run(scenario())


def _raise(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_call_that_cannot_be_begun_is_given_back(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of this side's at its beginning: told, and its directory's descriptors are closed."""

    async def scenario() -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        with monkeypatch.context() as patch:
            patch.setattr(RunningCall, "__init__", _raise(MemoryError()))
            for _ in range(20):
                with pytest.raises(MemoryError):
                    await here.service.submit_code_exec(ALICE, CodeExecCall("1"))
                with pytest.raises(MemoryError):
                    await here.service.submit_call(ALICE, plain("1"))
        assert counts(here.service) == {}
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 10

    here.run(scenario())


@pytest.mark.parametrize("background", [False, True])
def test_a_fault_of_this_sides_while_a_call_runs_is_raised_and_all_is_given_back(
    here: Site, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:  # fmt: skip
    """Who waits is told; who follows has an end; its record says that it was lost; its owner can begin others."""

    async def scenario() -> None:
        service, carol = here.service, Caller("acme", "carol")
        with monkeypatch.context() as patch:
            patch.setattr(WarmPool, "launch", _raise(MemoryError("a fault of this side's")))
            live = await service.submit_code_exec(carol, CodeExecCall("print(1)", background=background))
            events = [event async for event in live.feed.follow()]
            with pytest.raises(MemoryError):
                await live.result()
        await ended(live)
        assert (events[-1].kind, events[-1].data) == ("result", {"state": "lost"})
        record = await service.record(carol, live.call_id)
        assert record.state == "lost"
        assert [note.state for note in await service.take_notes(carol)] == ["lost"] * background
        assert await fails_to_begin(service, carol, 10) == {"begun": 5, "busy": 5}

    here.run(scenario())


def test_calls_whose_beginning_is_cancelled_at_any_moment_leave_nothing(here: Site) -> None:
    """The client has gone while its directory is looked up, while it is written down, or just before or after."""

    async def scenario() -> None:
        service = here.service
        for turns in [*range(12), 20, 50, 100, 200]:
            begin = [
                asyncio.ensure_future(service.submit_code_exec(ALICE, CodeExecCall("1"))),
                asyncio.ensure_future(service.submit_code_exec(BOB, CodeExecCall("1", background=True))),
                asyncio.ensure_future(service.submit_call(OTHER, plain("1"), background=True)),
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for one in begin:
                one.cancel()
            await asyncio.wait(begin)
            await nothing_open(service)
        assert await fails_to_begin(service, ALICE, 10) == {"begun": 5, "busy": 5}
        scripts = list((here.state / "tenants").rglob("code_exec_*.py"))
        assert scripts == []

    here.run(scenario())


def test_answers_that_cannot_be_written_down_are_no_riddle(tmp_path: Path) -> None:
    """The caller has its answer; the record says that it was lost as soon as it can, and not that it runs."""

    async def scenario() -> None:
        async with serving(tmp_path, policy()) as service:
            live = await service.submit_call(ME, plain("print(1, flush=True)\nimport time\ntime.sleep(0.5)"))
            await says(live, "1")
            file = tmp_path / "state" / "calls" / "calls.sqlite"
            with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")  # held for longer than the ledger waits for it
                assert (await live.result()).stdout == "1\n"
                await ended(live)
                other.execute("ROLLBACK")
            assert (await service.record(ME, live.call_id)).state == "lost"
            assert [one.state for one in (await service.calls(ME)).calls] == ["lost"]
            await nothing_open(service)

    asyncio.run(scenario())


@pytest.mark.parametrize("background", [False, True])
def test_a_call_that_cannot_be_written_down_is_not_run(tmp_path: Path, background: bool) -> None:
    """It is answered so, at once where it was to be detached; then the next one runs."""

    async def scenario() -> None:
        async with serving(tmp_path, policy()) as service:
            call = CodeExecCall("open('ran', 'w').close()", background=background)
            file = tmp_path / "state" / "calls" / "calls.sqlite"
            with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                live = await service.submit_code_exec(ME, call)
                if background:
                    assert live.answer is not None
                answer = await live.code_exec_result()
                assert (answer.success, answer.error) == (False, "ledger_unavailable")
                await ended(live)
                other.execute("ROLLBACK")
            directory = tmp_path / "state" / "user_data" / "default"
            assert list(directory.iterdir()) == []
            with pytest.raises(NotFound):
                await service.record(ME, live.call_id)
            again = await service.submit_code_exec(ME, call)
            await ended(again)
            assert [path.name for path in directory.iterdir()] == ["ran"]
            await nothing_open(service)

    asyncio.run(scenario())


def test_records_that_cannot_be_read_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question about them says so; notes are put off, and are there when they can be read again."""

    async def scenario() -> None:
        async with serving(tmp_path, policy()) as service:
            live = await service.submit_call(ME, plain("print(1)"), background=True)
            await ended(live)
            with monkeypatch.context() as patch:
                for name in ("record", "records", "take_ended"):
                    patch.setattr(type(service.executor.ledger), name, _raise(LedgerUnavailable("the disk is full")))
                asked = [
                    service.record(ME, live.call_id), service.wait(ME, live.call_id, 0), service.cancel(ME, live.call_id),
                    service.output(ME, live.call_id, "stdout"), service.calls(ME),
                    anext(service.events(ME, live.call_id)),
                ]  # fmt: skip
                for question in asked:
                    with pytest.raises(Unavailable, match="the disk is full") as unavailable:
                        await question
                    assert unavailable.value.code == "ledger_unavailable"
                assert await service.take_notes(ME) == []
            assert [note.task_id for note in await service.take_notes(ME)] == [live.call_id]

    asyncio.run(scenario())


# --- cancelling


def test_a_call_can_be_cancelled_at_every_stage(here: Site) -> None:
    """Before it is written down, in the queue, at its start, while it runs; what has ended stays; its record says so."""

    async def scenario() -> None:
        service = here.service
        holders = [await service.submit_call(ALICE, plain(HOLD)) for _ in range(2)]
        await says(holders[1], "running")
        waiting = await service.submit_code_exec(BOB, CodeExecCall(HOLD))
        await enters(waiting, "waiting")
        record = await service.cancel(BOB, waiting.call_id)
        assert (record.state, record.kind) == ("cancelled", "code_exec")
        assert record.result is not None
        assert record.result.attempts == []
        running = await service.cancel(ALICE, holders[0].call_id)
        assert running.state == "cancelled"
        assert running.result is not None
        assert running.result.stdout == "running\n"
        at_once = await service.submit_call(ALICE, plain(HOLD))
        at_once.cancel()
        assert (await at_once.result()).cause is Cause.CANCELLED
        for stage in ("preparing", "running"):
            starting = await service.submit_call(OTHER, plain(HOLD))
            await enters(starting, stage)
            assert (await service.cancel(OTHER, starting.call_id)).state == "cancelled"
        done = await service.submit_call(OTHER, plain("print(1)"))
        await ended(done)
        assert (await service.cancel(OTHER, done.call_id)).state == "finished"
        await cancelled(*holders)

    here.run(scenario())


def test_a_cancelled_code_exec_call_leaves_no_script(here: Site) -> None:
    async def scenario() -> None:
        live = await here.service.submit_code_exec(OTHER, CodeExecCall("open('seen', 'w').close()\n" + HOLD))
        await says(live, "running")
        directory = here.state / "tenants/other/user_data/alice"
        assert len([path for path in directory.iterdir() if path.suffix == ".py"]) == 1
        await cancelled(live)
        assert [path.name for path in directory.iterdir()] == ["seen"]

    here.run(scenario())


# --- detached calls


def test_a_detached_call_is_known_before_it_is_accepted(here: Site) -> None:
    """Its record is there, its task id is its call's id, and its end is told once, to its owner."""

    async def scenario() -> None:
        service, caller = here.service, somebody()
        live = await service.submit_call(caller, plain(HOLD), background=True)
        accepted = live.accepted()
        assert accepted.task_id == accepted.call_id == live.call_id
        assert (await service.record(caller, live.call_id)).background
        assert (await service.calls(caller, background=True)).calls[0].call_id == live.call_id
        await says(live, "running")
        assert (await service.wait(caller, live.call_id, 0.01)).state == "running"
        waiting = asyncio.ensure_future(service.wait(caller, live.call_id, 60))
        await service.cancel(caller, live.call_id)
        assert (await waiting).state == "cancelled"
        notes = await asyncio.gather(*(service.take_notes(caller) for _ in range(10)))
        assert [(note.task_id, note.state, note.success) for taken in notes for note in taken] == [
            (live.call_id, "cancelled", False)
        ]
        assert (await service.record(caller, live.call_id)).state == "cancelled", "it stays readable"

    here.run(scenario())


def test_the_news_of_detached_calls_comes_with_the_next_answer(here: Site) -> None:
    """Of code_exec, whether that is waited for or detached itself; each piece of news once."""

    async def scenario() -> None:
        service, caller = here.service, somebody()

        async def detach(code: str) -> LiveCall:
            live = await service.submit_code_exec(caller, CodeExecCall(code, background=True))
            await ended(live)
            return live

        first = await detach("print('é' * 3)")
        live = await service.submit_code_exec(caller, CodeExecCall("print(2)"))
        answer = await live.code_exec_result()
        assert [(note.task_id, note.state, note.success, note.text) for note in answer.notes] == [
            (first.call_id, "finished", True, "ééé\n")
        ]
        second = await detach("1/0")
        third = await service.submit_code_exec(caller, CodeExecCall("print(3)", background=True))
        accepted = await third.code_exec_accepted()
        assert (accepted.success, accepted.task_id) == (None, third.call_id)
        assert [(note.task_id, note.success) for note in accepted.notes] == [(second.call_id, False)]
        assert "ZeroDivisionError" in accepted.notes[0].text
        await ended(live, third)
        assert [note.task_id for note in await service.take_notes(caller)] == [third.call_id]
        assert await service.take_notes(caller) == []

    here.run(scenario())


def test_a_detached_call_that_is_refused_is_answered_at_once_and_kept(here: Site) -> None:
    """There is nothing to wait for; the refusal stays readable under its id, and its key is free."""

    async def scenario() -> None:
        service, caller = here.service, somebody()
        for _ in range(2):
            call = plain("print(1)", allow_network=True, domains=[], idempotency_key="refused")
            live = await service.submit_call(caller, call, background=True)
            assert live.answer is not None
            assert live.answer.cause is Cause.POLICY_REFUSED
            await ended(live)
            record = await service.record(caller, live.call_id)
            assert (record.state, record.result) == ("finished", live.answer)
        assert len(await service.take_notes(caller)) == 2

    here.run(scenario())


def test_a_refusal_under_a_key_that_has_an_answer_is_kept_beside_it(tmp_path: Path) -> None:
    """The policy has changed since: the second call is refused and known by its own id, the first stays as it was."""

    async def scenario() -> None:
        call = plain("print(1)", timeout=20, idempotency_key="key")
        async with serving(tmp_path, policy()) as service:
            first = await service.submit_call(ME, call, background=True)
            await ended(first)
            await service.reload(policy(limits={"timeout_seconds": {"default": 5, "max": 10}}))
            second = await service.submit_call(ME, call, background=True)
            assert second.call_id != first.call_id
            await ended(second)
            records = [await service.record(ME, live.call_id) for live in (first, second)]
            causes = [record.result.cause for record in records if record.result is not None]
            assert causes == [Cause.EXIT, Cause.POLICY_REFUSED]

    asyncio.run(scenario())


def test_the_same_key_gives_the_first_task(here: Site) -> None:
    """While it runs and after: the id of the first, with which it is found and cancelled; nothing is run again."""

    async def scenario() -> None:
        service, caller = here.service, somebody()
        call = plain("import uuid\nprint(uuid.uuid4(), flush=True)\nimport time\ntime.sleep(100)", idempotency_key="k")
        first = await service.submit_call(caller, call, background=True)
        await says(first, "\n")
        again = [await service.submit_call(caller, call, background=True) for _ in range(5)]
        assert {live.accepted().task_id for live in again} == {first.call_id}
        another = await service.submit_call(caller, call.model_copy(update={"code": "print(2)"}), background=True)
        assert another.answer is not None
        assert another.answer.error is not None
        assert another.answer.error.code == "idempotency_conflict"
        record = await service.cancel(caller, again[0].call_id)
        assert (record.call_id, record.state) == (first.call_id, "cancelled")
        await ended(first, *again)
        later = await service.submit_call(caller, call, background=True)
        assert later.call_id == first.call_id
        assert later.answer == await first.result(), "there is nothing to wait for"
        assert (await later.result()).stdout == (await first.result()).stdout
        await ended(later)
        assert len([one for one in (await service.calls(caller)).calls if one.call_id == first.call_id]) == 1
        assert [note.task_id for note in await service.take_notes(caller)] == [first.call_id], "one note for one call"

    here.run(scenario())


# --- events and output


async def _events(service: Service, caller: Caller, call_id: str, after: int = 0) -> list[FeedEvent]:
    return [event async for event in service.events(caller, call_id, after)]


def test_the_events_of_a_call_tell_its_life(here: Site) -> None:
    """From the queue to the answer, with what it wrote in between as it came; from any number on."""

    async def scenario() -> None:
        service = here.service
        code = "import sys, time\nprint('é', flush=True)\ntime.sleep(0.2)\nprint('b', file=sys.stderr)"
        live = await service.submit_call(OTHER, plain(code))
        events = await _events(service, OTHER, live.call_id)
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        stages = [(one.data["state"], one.data["stage"]) for one in events if one.kind == "state"]
        assert stages == [("running", "preparing"), ("running", "running")]
        written = {
            name: "".join(one.data["text"] for one in events if one.kind == name) for name in ("stdout", "stderr")
        }
        assert written == {"stdout": "é\n", "stderr": "b\n"}
        assert events[-1].kind == "result"
        assert ToolResult.model_validate(events[-1].data["result"]) == await live.result()
        assert [event async for event in live.feed.follow(after=3)] == events[3:]
        (last,) = await _events(service, OTHER, live.call_id, after=7)
        assert (last.id, last.kind, last.data) == (8, "result", events[-1].data)

    here.run(scenario())


def test_the_events_of_a_cancelled_call_end_so(here: Site) -> None:
    async def scenario() -> None:
        live = await here.service.submit_call(OTHER, plain(HOLD))
        following = asyncio.ensure_future(_events(here.service, OTHER, live.call_id))
        await says(live, "running")
        live.cancel()
        assert (await following)[-1].data["state"] == "cancelled"

    here.run(scenario())


def test_output_is_read_in_slices_while_a_call_runs_and_after(here: Site) -> None:
    """In characters, not bytes; together they are what was written; what is not there yet is no end."""

    async def scenario() -> None:
        service = here.service
        text = "é😀x" * 1000
        code = f"print({text!r}, end='', flush=True)\nimport time\nprint('ready', end='', flush=True)\ntime.sleep(100)"
        live = await service.submit_call(OTHER, plain(code))
        await says(live, "ready")

        async def read(limit: int) -> tuple[str, set[CallState]]:
            found, offset, states = "", 0, set[CallState]()
            while True:
                part = await service.output(OTHER, live.call_id, "stdout", offset, limit)
                states.add(part.state)
                assert (part.offset, part.kept_chars, part.total_chars) == (offset, 3005, 3005)
                assert len(part.text) <= limit
                found += part.text
                if part.next_offset is None:
                    return found, states
                assert part.next_offset == offset + len(part.text)
                offset = part.next_offset

        assert await read(997) == (text + "ready", {"running"})
        empty = await service.output(OTHER, live.call_id, "stderr")
        assert (empty.text, empty.next_offset, empty.total_chars) == ("", None, 0)
        await cancelled(live)
        assert await read(1001) == (text + "ready", {"cancelled"})
        for offset, limit, expected in ((-5, 2, "é😀"), (3004, 10, "y"), (3005, 10, ""), (10**12, 10, ""), (0, 0, "é"),
                                        (0, -1, "é"), (0, 10**9, text + "ready")):  # fmt: skip
            part = await service.output(OTHER, live.call_id, "stdout", offset, limit)
            assert part.text == expected

    here.run(scenario())


def test_output_beyond_what_is_kept_is_counted(here: Site) -> None:
    """While it runs as afterwards; no slice is longer than a message should be."""

    async def scenario() -> None:
        service = here.service
        code = "print('x' * 1_500_000, end='', flush=True)\nprint('end', flush=True)\nimport time\ntime.sleep(100)"
        live = await service.submit_call(OTHER, plain(code))
        await says(live, "end")
        for _ in range(2):
            part = await service.output(OTHER, live.call_id, "stdout", 0, 10**9)
            assert (len(part.text), part.kept_chars, part.total_chars) == (MAX_OUTPUT_CHARS, 1_000_000, 1_500_004)
            assert part.next_offset == MAX_OUTPUT_CHARS
            await cancelled(live)

    here.run(scenario())


def test_what_a_call_has_written_is_there_at_every_moment_after_it(here: Site) -> None:
    """Also between its end and that of its cleaning up: a reader that looks all the time never sees less."""

    async def scenario() -> None:
        live = await here.service.submit_code_exec(OTHER, CodeExecCall("print('all', flush=True)"))
        await says(live, "all")
        while not live.ended.is_set():
            part = await here.service.output(OTHER, live.call_id, "stdout")
            assert part.text.startswith("all")
            await asyncio.sleep(0)

    here.run(scenario())


# --- lists


def test_lists_go_back_page_by_page(here: Site) -> None:
    """Newest first, each call once; bounded whatever is asked."""

    async def scenario() -> None:
        service = here.service
        caller = Caller("other", "lister")
        lives = [await service.submit_call(caller, plain("1"), background=number % 2 == 0) for number in range(5)]
        await ended(*lives)
        pages, before = [], None
        while True:
            page = await service.calls(caller, limit=2, before=before)
            pages.append([one.call_id for one in page.calls])
            if (before := page.next_before) is None:
                break
        ids = [live.call_id for live in reversed(lives)]
        assert pages == [ids[:2], ids[2:4], ids[4:]]
        assert [one.call_id for one in (await service.calls(caller, background=True)).calls] == ids[::2]
        for limit, count in ((0, 1), (-3, 1), (10**9, 5), (MAX_LISTED, 5)):
            assert len((await service.calls(caller, limit=limit)).calls) == count

    here.run(scenario())


@pytest.mark.parametrize(
    "call_id", ["", "call-0000000000000000", "x" * 10_000, "call-\0", "\ud800", "' OR 1=1 --", "%"]
)
def test_an_id_of_no_call_is_not_found(here: Site, call_id: str) -> None:
    """By any question, whatever characters it has; what is said of it is plain and short."""

    async def scenario() -> None:
        service = here.service
        for question in (
            service.record(ALICE, call_id), service.wait(ALICE, call_id, 0), service.cancel(ALICE, call_id),
            service.output(ALICE, call_id, "stdout"), _events(service, ALICE, call_id),
        ):  # fmt: skip
            with pytest.raises(NotFound) as refused:
                await question
            assert str(refused.value).isascii()
            assert len(str(refused.value)) < 500

    here.run(scenario())


# --- the end


def test_draining_begins_nothing_and_gives_what_runs_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends in time has its answer; what does not is ended; a call that is still being placed is not begun."""

    async def scenario() -> None:
        go = asyncio.Event()
        async with serving(tmp_path, policy()) as service:
            short = await service.submit_call(ME, plain("print(1)\nimport time\ntime.sleep(0.3)\nprint(2)"))
            long = await service.submit_call(ME, plain(HOLD), background=True)
            await says(long, "running")
            placed = service._placed

            async def slowly(*args: Any) -> Any:
                found = await placed(*args)
                await go.wait()
                return found

            monkeypatch.setattr(service, "_placed", slowly)
            placing = asyncio.ensure_future(service.submit_code_exec(ME, CodeExecCall("print(1)")))
            await until(lambda: counts(service) == {"": 3})
            draining = asyncio.ensure_future(service.drain(1.5))
            await asyncio.sleep(0)
            assert service.draining
            with pytest.raises(Draining) as refused:
                await service.submit_call(ME, plain("print(1)"))
            assert refused.value.retry_after_seconds is not None
            assert (await service.calls(ME)).calls, "what is known can still be asked"
            go.set()
            with pytest.raises(Draining):
                await placing
            await draining
            assert (await short.result()).stdout == "1\n2\n"
            assert (await long.result()).cause is Cause.CANCELLED
            await nothing_open(service)

    asyncio.run(scenario())


def test_leaving_the_service_ends_what_runs(tmp_path: Path) -> None:
    """Its answer says so, and is kept: the next start tells its owner, and knows every call of before."""

    async def scenario() -> list[CallRecord]:
        async with serving(tmp_path, policy(), max_concurrency=1) as service:
            done = await service.submit_call(ME, plain("print('é')"), background=True)
            await ended(done)
            running = await service.submit_code_exec(ME, CodeExecCall(HOLD, background=True))
            await says(running, "running")
            waiting = await service.submit_call(ME, plain(HOLD), background=True)
        assert (await running.result()).cause is Cause.CANCELLED
        async with serving(tmp_path, policy()) as service:
            records = [await service.record(ME, live.call_id) for live in (done, running, waiting)]
            notes = await service.take_notes(ME)
            assert {note.task_id: note.state for note in notes} == {
                done.call_id: "finished", running.call_id: "cancelled", waiting.call_id: "cancelled",
            }  # fmt: skip
            assert await service.take_notes(ME) == []
            (event,) = await _events(service, ME, done.call_id)
            assert event.data["state"] == "finished"
            assert (await service.output(ME, done.call_id, "stdout")).text == "é\n"
            assert [one.call_id for one in (await service.calls(ME)).calls] == [
                live.call_id for live in (waiting, running, done)
            ]
            return records

    records = asyncio.run(scenario())
    assert [record.state for record in records] == ["finished", "cancelled", "cancelled"]
    assert list((tmp_path / "state" / "user_data").rglob("code_exec_*.py")) == []


def test_queue_is_full_says_how_many_are_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, policy(), max_concurrency=1, max_waiting=0) as service:
            live = await service.submit_call(ME, plain(HOLD))
            with pytest.raises(QueueIsFull, match="1 calls are open"):
                await service.submit_call(ME, plain("1"))
            await cancelled(live)

    asyncio.run(scenario())
