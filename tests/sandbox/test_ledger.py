"""The ledger: what runs, what was answered under a key, what was lost; and what of it others see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.contract import Cause, CodeCall, NetworkReport, Status, ToolResult
from sandbox.ledger import Ledger, LedgerUnavailable, State, request_digest

CALL = CodeCall(language="python", code="print(1)", idempotency_key="key")
PLAIN = CodeCall(language="python", code="print(1)")
ANSWER = ToolResult(
    call_id="call-1", status=Status.SUCCESS, cause=Cause.EXIT, stdout="é😀\n", network=NetworkReport(mode="block-all")
)


@asynccontextmanager
async def opened(directory: Path, keep_seconds: float | None = 3600.0) -> AsyncIterator[Ledger]:
    ledger = await Ledger.open(directory, keep_seconds=keep_seconds)
    try:
        yield ledger
    finally:
        await ledger.close()


def scenario(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path / "calls"))

    run.__doc__ = test.__doc__
    return run


@scenario
async def test_a_key_has_one_answer(directory: Path) -> None:
    """The first with a key is none that was; the next ones get its entry, in other views too, and after a restart."""
    async with opened(directory) as first, opened(directory) as second:
        assert await first.begin("call-1", CALL) is None
        for view in (first, second):
            entry = await view.begin("call-2", CALL)
            assert entry is not None
            assert (entry.call_id, entry.state, entry.result) == ("call-1", State.RUNNING, None)
            assert entry.executor == first.executor
        await first.end("call-1", ANSWER, begun=True)
        entry = await second.begin("call-3", CALL)
        assert entry is not None
        assert (entry.state, entry.result, entry.request) == (State.ANSWERED, ANSWER, request_digest(CALL))
    async with opened(directory) as third:
        entry = await third.begin("call-4", CALL)
        assert entry is not None
        assert entry.result == ANSWER
        assert await third.take_lost() == []


@scenario
async def test_a_call_without_a_key_leaves_nothing(directory: Path) -> None:
    """Neither its end nor the ledger's leaves a line."""
    async with opened(directory) as ledger:
        assert await ledger.begin("call-1", PLAIN) is None
        assert [entry.call_id for entry in await ledger.entries()] == ["call-1"]
        await ledger.end("call-1", ANSWER, begun=True)
        assert await ledger.entries() == []
        assert await ledger.begin("call-2", PLAIN) is None
    async with opened(directory) as ledger:
        assert await ledger.entries() == []


@scenario
async def test_an_answer_that_is_not_kept_frees_its_key(directory: Path) -> None:
    """What came to no attempt may be tried again under the same key."""
    async with opened(directory) as ledger:
        assert await ledger.begin("call-1", CALL) is None
        await ledger.end("call-1", ANSWER, begun=False)
        assert await ledger.begin("call-2", CALL) is None


@scenario
async def test_answers_expire(directory: Path) -> None:
    """After the time that they are kept, the key is free again; a view that keeps all lets none go."""
    async with opened(directory, keep_seconds=0.0) as ledger:
        assert await ledger.begin("call-1", CALL) is None
        await ledger.end("call-1", ANSWER, begun=True)
        async with opened(directory, keep_seconds=None) as other:
            assert len(await other.entries()) == 1
        assert await ledger.begin("call-2", CALL) is None


@scenario
async def test_what_was_open_at_a_close_is_lost_if_it_has_a_key(directory: Path) -> None:
    """Nobody knows how far it came: it is not run again under that key."""
    async with opened(directory) as ledger:
        await ledger.begin("call-1", CALL)
    async with opened(directory) as ledger:
        entry = await ledger.begin("call-2", CALL)
        assert entry is not None
        assert (entry.state, entry.result) == (State.LOST, None)


@scenario
async def test_a_living_executor_has_lost_nothing(directory: Path) -> None:
    """Another view takes no call from one that holds its lock."""
    async with opened(directory) as living, opened(directory) as other:
        await living.begin("call-1", PLAIN)
        assert await other.take_lost() == []
        await living.end("call-1", ANSWER, begun=True)


_DIES = """
import asyncio, sys
from pathlib import Path
from sandbox.contract import CodeCall
from sandbox.ledger import Ledger

async def main():
    ledger = await Ledger.open(Path(sys.argv[1]), keep_seconds=3600)
    for key in (None, "key"):
        await ledger.begin(f"call-{key}", CodeCall(language="python", code="print(1)", idempotency_key=key))
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_calls_of_a_killed_executor_are_lost_once(tmp_path: Path) -> None:
    """The next view is told of both, the one after that of none, and the dead one's lock is gone."""
    directory = tmp_path / "calls"
    process = subprocess.Popen([sys.executable, "-c", _DIES, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "open\n"

        async def look() -> tuple[list[str], list[str]]:
            async with opened(directory) as ledger:
                lost = [entry.call_id for entry in await ledger.take_lost()]
                entry = await ledger.begin("call-2", CALL)
                return lost, [] if entry is None else [entry.call_id, entry.state.value]

        assert asyncio.run(look()) == ([], ["call-key", "running"])
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert asyncio.run(look()) == (["call-None", "call-key"], ["call-key", "lost"])
    assert asyncio.run(look()) == ([], ["call-key", "lost"])
    assert list((directory / "executors").iterdir()) == []


def test_requests_are_told_apart_by_what_they_ask_and_nothing_else() -> None:
    """The order of keys and what is left to its default don't count; the key itself doesn't; all else does."""
    first = CodeCall(language="python", code="1", env={"A": "1", "B": "2"}, idempotency_key="one")
    same = CodeCall(language="python", code="1", env={"B": "2", "A": "1"}, allow_network=False, idempotency_key="two")
    assert request_digest(first) == request_digest(same)
    others: list[dict[str, Any]] = [
        {"language": "javascript"}, {"code": "2"}, {"env": {}}, {"timeout": 5}, {"memory_mib": 256},
        {"allow_network": True}, {"allow_network": True, "domains": []}, {"packages": ["a==1"]},
    ]  # fmt: skip
    digests = {request_digest(CodeCall(**(first.model_dump() | other))) for other in others}
    assert len(digests | {request_digest(first)}) == len(others) + 1


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    """The answers hold what programs printed: files are 0600, directories 0700, whatever the umask."""
    before = os.umask(0)
    try:

        async def use() -> None:
            async with opened(tmp_path / "calls") as ledger:
                await ledger.begin("call-1", CALL)
                for path in (tmp_path / "calls").rglob("*"):
                    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path

        asyncio.run(use())
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_may_write_is_no_ledger(tmp_path: Path, mode: int) -> None:
    """Who can write there could plant answers."""
    directory = tmp_path / "calls"
    directory.mkdir()
    directory.chmod(mode)

    async def use() -> None:
        async with opened(directory):
            pytest.fail("it was opened")

    with pytest.raises(LedgerUnavailable, match="this user's alone"):
        asyncio.run(use())


def test_an_answer_that_cannot_be_read_any_more_is_none_and_hides_no_other(tmp_path: Path) -> None:
    """Its call is not run again, and the others are shown."""
    directory = tmp_path / "calls"
    other = CALL.model_copy(update={"idempotency_key": "other"})

    async def use() -> None:
        async with opened(directory) as ledger:
            for number, call in enumerate((CALL, other)):
                await ledger.begin(f"call-{number}", call)
                await ledger.end(f"call-{number}", ANSWER, begun=True)
        with sqlite3.connect(directory / "calls.sqlite") as database:
            database.execute("UPDATE calls SET result = x'00' WHERE call_id = 'call-0'")
        database.close()
        async with opened(directory) as ledger:
            assert [entry.result for entry in await ledger.entries()] == [None, ANSWER]
            entry = await ledger.begin("call-2", CALL)
            assert entry is not None
            assert (entry.state, entry.result) == (State.ANSWERED, None)
            assert await ledger.forget("key")
            assert not await ledger.forget("key")
            assert await ledger.begin("call-3", CALL) is None

    asyncio.run(use())


def test_a_file_that_is_no_ledger_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Damaged, of a later version, or in the way: said, and nothing of it is changed."""
    directory = tmp_path / "calls"
    (directory / "executors").mkdir(parents=True)

    async def use() -> None:
        async with opened(directory):
            pytest.fail("it was opened")

    file = directory / "calls.sqlite"
    file.write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerUnavailable, match=r"calls`? cannot be used"):
        asyncio.run(use())
    file.unlink()
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(LedgerUnavailable, match="version 99"):
        asyncio.run(use())
    assert list((directory / "executors").iterdir()) == []


def test_results_come_back_as_they_went_in(tmp_path: Path) -> None:
    """Every field, whatever characters a program printed."""
    answer = ANSWER.model_copy(update={"stdout": "\x00\x1b[31m\u202e\U0010ffff" * 1000})

    async def use() -> None:
        async with opened(tmp_path / "calls") as ledger:
            await ledger.begin("call-1", CALL)
            await ledger.end("call-1", answer, begun=True)
            entry = await ledger.begin("call-2", CALL)
            assert entry is not None
            assert entry.result is not None
            assert json.loads(entry.result.model_dump_json()) == json.loads(answer.model_dump_json())

    asyncio.run(use())


@scenario
async def test_a_ledger_that_is_closed_says_so(directory: Path) -> None:
    """To whoever asks then, and to who asked before and had not had an answer; to close it again does nothing."""
    async with opened(directory) as ledger:
        await ledger.begin("call-1", CALL)
        closing = asyncio.ensure_future(ledger.close())
        await asyncio.sleep(0)
        questions: list[Coroutine[Any, Any, object]] = [
            ledger.begin("call-2", PLAIN), ledger.end("call-1", ANSWER, begun=True), ledger.forget("key"),
        ]  # fmt: skip
        found = await asyncio.gather(*questions, return_exceptions=True)
        await closing
        questions = [ledger.begin("call-2", PLAIN), ledger.entries(), ledger.take_lost(), ledger.forget("key")]
        found += await asyncio.gather(*questions, return_exceptions=True)
        assert [type(one) for one in found] == [LedgerUnavailable] * 7
        assert {str(one) for one in found} == {"the ledger is closed"}
    async with opened(directory) as ledger:
        assert [(entry.call_id, entry.state) for entry in await ledger.entries()] == [("call-1", State.LOST)]
