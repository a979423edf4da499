"""What is kept of calls: whose it is, for how long, how much of it; and what earlier versions wrote."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from sandbox.contract import Cause, CodeCall, NetworkReport, Status, ToolResult
from sandbox.ledger import DEFAULT_KEEP_BYTES, Entry, Ledger, LedgerUnavailable, Recording, StaleScript, State
from sandbox.owners import Owner

ALICE, BOB, OTHERS_ALICE, NOBODYS_ALICE = (
    Owner("acme", "alice"), Owner("acme", "bob"), Owner("other", "alice"), Owner("", "alice"),
)  # fmt: skip
OWNERS = (ALICE, BOB, OTHERS_ALICE, NOBODYS_ALICE, Owner())
PLAIN = CodeCall(language="python", code="print(1)")
KEYED = CodeCall(language="python", code="print(1)", idempotency_key="key")
ENDED = Recording()
DETACHED = Recording(background=True)


def answer(
    call_id: str = "call", *, status: Status = Status.SUCCESS, cause: Cause = Cause.EXIT, stdout: str = "1\n"
) -> ToolResult:
    return ToolResult(
        call_id=call_id, status=status, cause=cause, stdout=stdout, network=NetworkReport(mode="block-all")
    )


@asynccontextmanager
async def opened(
    directory: Path, keep_seconds: float | None = 3600.0, keep_bytes: int = DEFAULT_KEEP_BYTES
) -> AsyncIterator[Ledger]:
    ledger = await Ledger.open(directory, keep_seconds=keep_seconds, keep_bytes=keep_bytes)
    try:
        yield ledger
    finally:
        await ledger.close()


def scenario(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path / "calls"))

    run.__doc__ = test.__doc__
    return run


async def ended(
    ledger: Ledger, call_id: str, owner: Owner, recording: Recording | None = ENDED, call: CodeCall = PLAIN,
    result: ToolResult | None = None,
) -> None:  # fmt: skip
    """A call that was begun and has come to its end."""
    assert await ledger.begin(call_id, call, owner, recording) is None
    await ledger.end(call_id, result or answer(call_id), begun=True)


def ids(entries: list[Entry]) -> list[str]:
    return [entry.call_id for entry in entries]


def rows(directory: Path, columns: str = "call_id") -> list[Any]:
    """What is in the file, whoever may see it."""
    with closing(sqlite3.connect(directory / "calls.sqlite")) as database:
        return [
            row[0] if "," not in columns else row
            for row in database.execute(f"SELECT {columns} FROM calls ORDER BY started_at")
        ]


def alter(directory: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(directory / "calls.sqlite")) as database, database:
        assert database.execute(statement, values).rowcount == 1


# --- whose it is


@scenario
async def test_owners_do_not_see_one_another(directory: Path) -> None:
    """By id, in lists, as news: each sees its own calls; another user, another tenant and the operator see none."""
    async with opened(directory) as ledger:
        for place, owner in enumerate(OWNERS):
            await ended(ledger, f"call-{place}", owner, DETACHED)
            await ledger.begin(f"open-{place}", PLAIN, owner, DETACHED)
        for place, owner in enumerate(OWNERS):
            own = {f"call-{place}", f"open-{place}"}
            assert set(ids(await ledger.records(owner))) == own
            assert set(ids(await ledger.records(owner, background=True))) == own
            for other in range(len(OWNERS)):
                for name in ("call", "open"):
                    found = await ledger.record(f"{name}-{other}", owner)
                    assert (found is not None) == (other == place)
            assert ids(await ledger.take_ended(owner)) == [f"call-{place}"]
            assert await ledger.take_ended(owner) == []


@scenario
async def test_a_key_is_its_owners(directory: Path) -> None:
    """The same key and request of another owner's is another call; forgetting it forgets nobody else's."""
    async with opened(directory) as ledger:
        for place, owner in enumerate(OWNERS):
            await ended(ledger, f"call-{place}", owner, ENDED if place % 2 else None, KEYED)
        for place, owner in enumerate(OWNERS):
            first = await ledger.begin("again", KEYED, owner)
            assert first is not None
            assert (first.call_id, first.owner) == (f"call-{place}", owner)
        assert await ledger.forget("key", ALICE)
        assert not await ledger.forget("key", ALICE)
        assert await ledger.begin("again", KEYED, ALICE) is None
        for owner in OWNERS[1:]:
            assert await ledger.begin("more", KEYED, owner) is not None


@pytest.mark.parametrize(("first", "second"), list(combinations(["tenant", "user", "key"], 2)))
def test_owners_and_keys_cannot_be_mistaken_for_one_another(tmp_path: Path, first: str, second: str) -> None:
    """What is moved from one name to the next is not the same name."""

    async def use() -> None:
        names = {"tenant": "a", "user": "a", "key": "a"}
        async with opened(tmp_path) as ledger:
            for number, changed in enumerate(({first: "ab", second: "c"}, {first: "a", second: "bc"})):
                each = names | changed
                call = KEYED.model_copy(update={"idempotency_key": each["key"]})
                assert await ledger.begin(f"call-{number}", call, Owner(each["tenant"], each["user"])) is None

    asyncio.run(use())


@scenario
async def test_what_is_not_recorded_is_in_no_list(directory: Path) -> None:
    """A call with a key keeps its answer for that alone."""
    async with opened(directory) as ledger:
        await ended(ledger, "call-1", ALICE, None, KEYED)
        await ended(ledger, "call-2", ALICE, None)
        assert await ledger.records(ALICE) == []
        assert await ledger.record("call-1", ALICE) is None
        assert await ledger.take_ended(ALICE) == []
        assert rows(directory) == ["call-1"]


# --- what is kept of a call


@scenario
async def test_a_record_keeps_all_that_it_was_given(directory: Path) -> None:
    """The answer, how it ended, the kind's own details; in a list all of it but the answer; after a restart too."""
    recording = Recording("code_exec", background=True, details='{"a": "é😀"}', script=StaleScript("/r", "d", "s.py"))
    result = answer("call-1", status=Status.KILLED, cause=Cause.MEMORY, stdout="\x00é😀\n")
    async with opened(directory) as ledger:
        await ledger.begin("call-1", PLAIN, ALICE, recording)
        running = await ledger.record("call-1", ALICE)
        assert running is not None
        assert (running.state, running.recording, running.result) == (State.RUNNING, recording, None)
        assert (running.status, running.cause, running.ended_at) == (None, None, None)
        await ledger.end("call-1", result, begun=True)
    async with opened(directory) as ledger:
        found = await ledger.record("call-1", ALICE)
        (listed,) = await ledger.records(ALICE)
    assert found is not None
    assert (found.state, found.result, found.owner) == (State.ANSWERED, result, ALICE)
    assert found.recording == Recording("code_exec", background=True, details=recording.details), "no script is left"
    assert found.ended_at is not None
    assert found.started_at <= found.ended_at
    for entry in (found, listed):
        assert (entry.status, entry.cause) == (Status.KILLED, Cause.MEMORY)
    assert listed.result is None


@scenario
async def test_records_come_newest_first_page_by_page(directory: Path) -> None:
    """`before` is where the last page ended: every call is on one page. `background` picks detached ones or others."""
    async with opened(directory) as ledger:
        for number in range(7):
            await ended(ledger, f"call-{number}", ALICE, DETACHED if number % 2 else ENDED)
        seen: list[str] = []
        before = None
        while page := await ledger.records(ALICE, limit=3, before=before):
            seen += ids(page)
            before = page[-1].started_at
        assert seen == [f"call-{number}" for number in reversed(range(7))]
        assert ids(await ledger.records(ALICE, background=True)) == ["call-5", "call-3", "call-1"]
        assert ids(await ledger.records(ALICE, background=False)) == ["call-6", "call-4", "call-2", "call-0"]


@scenario
async def test_a_recorded_call_that_came_to_nothing_is_kept_and_its_key_is_free(directory: Path) -> None:
    """A refusal is an answer, too, but nothing ran under the key. What is not recorded leaves nothing."""
    async with opened(directory) as ledger:
        for number, recording in enumerate((ENDED, None)):
            assert await ledger.begin(f"call-{number}", KEYED, ALICE, recording) is None
            await ledger.end(f"call-{number}", answer(status=Status.ERROR, cause=Cause.POLICY_REFUSED), begun=False)
        found = await ledger.record("call-0", ALICE)
        assert found is not None
        assert (found.state, found.idempotency_key) == (State.ANSWERED, None)
        assert rows(directory) == ["call-0"]


@scenario
async def test_what_is_given_up_is_lost_or_forgotten(directory: Path) -> None:
    """Recorded: lost, with its key only if it may have begun. Else lost only if begun with a key."""
    async with opened(directory) as ledger:
        number = 0
        kept = {}
        for recording in (ENDED, None):
            for call in (KEYED, PLAIN):
                for begun in (True, False):
                    owner = Owner("acme", f"user-{number}")
                    await ledger.begin(f"call-{number}", call, owner, recording)
                    await ledger.lose(f"call-{number}", begun=begun)
                    kept[number] = recording is not None or (begun and call is KEYED)
                    again = await ledger.begin("again", call, owner)
                    assert (again is not None) == (begun and call is KEYED)
                    if again is None:
                        await ledger.lose("again", begun=False)
                    number += 1
        assert set(rows(directory)) == {f"call-{number}" for number, is_kept in kept.items() if is_kept}
        assert set(rows(directory, "state")) == {"lost"}


# --- news


@scenario
async def test_the_end_of_a_detached_call_is_told_once(directory: Path) -> None:
    """Oldest first, as many as are asked for, lost ones too; never one that runs, and none that was waited for."""
    async with opened(directory) as ledger:
        for number in range(5):
            await ledger.begin(f"call-{number}", PLAIN, ALICE, DETACHED)
        await ended(ledger, "waited-for", ALICE)
        for number in (3, 0, 1):
            await ledger.end(f"call-{number}", answer(), begun=True)
        await ledger.lose("call-2", begun=True)
        assert ids(await ledger.take_ended(ALICE, limit=3)) == ["call-3", "call-0", "call-1"]
        (last,) = await ledger.take_ended(ALICE)
        assert (last.call_id, last.state, last.result) == ("call-2", State.LOST, None)
        assert await ledger.take_ended(ALICE) == []
        found = await ledger.record("call-3", ALICE)
        assert found is not None
        assert found.result == answer(), "it stays readable"
        await ledger.end("call-4", answer(), begun=True)
    async with opened(directory) as ledger:
        assert ids(await ledger.take_ended(ALICE)) == ["call-4"], "told after a restart, and only what was not"


@scenario
async def test_two_views_that_ask_at_once_tell_each_end_once(directory: Path) -> None:
    """Whoever takes it, nobody else does."""
    async with opened(directory) as first, opened(directory) as second:
        for number in range(60):
            await ended(first, f"call-{number}", ALICE, DETACHED)
        taken = await asyncio.gather(*((first, second)[turn % 2].take_ended(ALICE, limit=5) for turn in range(20)))
        assert sorted(ids([entry for entries in taken for entry in entries])) == sorted(
            f"call-{number}" for number in range(60)
        )


# --- how long, and how much


@scenario
async def test_records_expire_and_running_calls_do_not(directory: Path) -> None:
    """What has ended longer ago than is kept is not to be seen, and at the next start it is gone from the file."""
    async with opened(directory, keep_seconds=100.0) as ledger:
        for number in range(3):
            await ended(ledger, f"call-{number}", ALICE, DETACHED)
        await ledger.begin("open", PLAIN, ALICE, DETACHED)
        alter(directory, "UPDATE calls SET ended_at = ended_at - 101 WHERE call_id = 'call-0'")
        alter(directory, "UPDATE calls SET ended_at = ended_at - 90 WHERE call_id = 'call-1'")
        alter(directory, "UPDATE calls SET started_at = started_at - 1000 WHERE call_id = 'open'")
        assert await ledger.record("call-0", ALICE) is None
        assert set(ids(await ledger.records(ALICE))) == {"call-1", "call-2", "open"}
        async with opened(directory, keep_seconds=100.0):
            assert set(rows(directory)) == {"call-1", "call-2", "open"}
        await ledger.retain(keep_seconds=50.0, keep_bytes=DEFAULT_KEEP_BYTES, tenants=0)
        assert set(rows(directory)) == {"call-2", "open"}
        assert ids(await ledger.take_ended(ALICE)) == ["call-2"]


def noise() -> ToolResult:
    """An answer of about 10 kB, which cannot be packed much."""
    return answer(stdout=secrets.token_hex(10_000))


@scenario
async def test_the_oldest_answers_go_first_when_there_is_too_much(directory: Path) -> None:
    """As many as need be: by when they ended. What runs and what has a key stays, however old."""
    async with opened(directory) as ledger:
        await ledger.begin("open", PLAIN, ALICE, ENDED)
        await ended(ledger, "keyed", ALICE, ENDED, KEYED, noise())
        for number in range(6):
            await ledger.begin(f"call-{number}", PLAIN, ALICE, ENDED)
        for number in (5, 4, 3, 2, 1, 0):
            await ledger.end(f"call-{number}", noise(), begun=True)
        sizes = dict(rows(directory, "call_id, result_bytes"))
        assert sizes["call-0"] > 5_000
        room = sizes["keyed"] + sum(sizes[f"call-{number}"] for number in range(3))
        await ledger.retain(keep_seconds=3600, keep_bytes=room, tenants=1)
        assert rows(directory) == ["open", "keyed", "call-0", "call-1", "call-2"]
        await ledger.retain(keep_seconds=3600, keep_bytes=room - 1, tenants=1)
        assert rows(directory) == ["open", "keyed", "call-0", "call-1"]
        await ledger.retain(keep_seconds=3600, keep_bytes=1, tenants=1)
        assert rows(directory) == ["open", "keyed"]


@scenario
async def test_the_size_that_counts_is_the_one_on_the_disk(directory: Path) -> None:
    async with opened(directory) as ledger:
        await ended(ledger, "call-1", ALICE, result=answer(stdout="a" * 100_000))
        ((stored, said),) = rows(directory, "length(result), result_bytes")
        assert stored == said < 5_000


@scenario
async def test_too_many_answers_are_found_while_calls_end(directory: Path) -> None:
    """Nobody has to ask: there is never much more than may be."""
    async with opened(directory, keep_bytes=100_000) as ledger:
        most = 0
        for number in range(200):
            await ended(ledger, f"call-{number}", ALICE, result=noise())
            most = max(most, sum(rows(directory, "result_bytes")))
        assert most < 100_000 + 64 * 15_000
        assert "call-199" in rows(directory)
        assert len(rows(directory)) < 100


@scenario
async def test_a_tenants_answers_cannot_push_out_anothers(directory: Path) -> None:
    """Each has its share: who has much loses its own oldest."""
    async with opened(directory) as ledger:
        await ended(ledger, "small", OTHERS_ALICE, result=noise())
        for number in range(20):
            await ended(ledger, f"call-{number}", (ALICE, BOB)[number % 2], result=noise())
        await ledger.retain(keep_seconds=3600, keep_bytes=100_000, tenants=2)
        left = rows(directory)
        assert "small" in left
        assert "call-0" not in left
        assert "call-19" in left
        assert sum(rows(directory, "result_bytes")) <= 100_000


@scenario
async def test_with_nothing_but_keys_no_new_one_is_taken(directory: Path) -> None:
    """A key that were dropped would run its request again. Calls without one go on, and so do other tenants."""
    async with opened(directory) as ledger:
        for number in range(10):
            call = KEYED.model_copy(update={"idempotency_key": f"key-{number}"})
            await ended(ledger, f"call-{number}", ALICE, ENDED, call, noise())
        await ledger.retain(keep_seconds=3600, keep_bytes=100_000, tenants=2)
        assert len(rows(directory)) == 10
        new = KEYED.model_copy(update={"idempotency_key": "new"})
        for owner in (ALICE, BOB):
            with pytest.raises(LedgerUnavailable, match="keeps under idempotency keys"):
                await ledger.begin("new", new, owner)
        known = await ledger.begin("again", KEYED.model_copy(update={"idempotency_key": "key-3"}), ALICE)
        assert known is not None
        assert known.call_id == "call-3"
        assert await ledger.begin("new", new, OTHERS_ALICE) is None
        assert await ledger.begin("plain", PLAIN, ALICE, ENDED) is None


@scenario
async def test_bounds_that_cannot_be_applied_are_not_taken(directory: Path) -> None:
    """Another program holds the file for longer than is waited for it: said, and the bounds before stay."""
    async with opened(directory, keep_seconds=100.0) as ledger:
        await ended(ledger, "call-1", ALICE)
        alter(directory, "UPDATE calls SET ended_at = ended_at - 50")
        with closing(sqlite3.connect(directory / "calls.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailable, match="cannot be used"):
                await ledger.retain(keep_seconds=10.0, keep_bytes=1, tenants=1)
            other.execute("ROLLBACK")
        assert ids(await ledger.records(ALICE)) == ["call-1"]


# --- a killed process

_DIES = """
import asyncio, sys
from pathlib import Path
from sandbox.contract import CodeCall
from sandbox.ledger import Ledger, Recording, StaleScript
from sandbox.owners import Owner

async def main():
    ledger = await Ledger.open(Path(sys.argv[1]), keep_seconds=3600)
    call = CodeCall(language="python", code="print(1)")
    script = StaleScript("/root", "below", "code_exec_0123456789abcdef.py")
    await ledger.begin("detached", call, Owner("acme", "alice"), Recording("code_exec", True, "{}", script))
    await ledger.begin("waited-for", call, Owner("acme", "alice"), Recording())
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_recorded_calls_of_a_killed_process_are_lost_and_their_owner_is_told(tmp_path: Path) -> None:
    """At once for who looks, running while it lived; the next start has their scripts, once; the news comes once."""
    directory = tmp_path / "calls"
    with subprocess.Popen([sys.executable, "-c", _DIES, str(directory)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"

        async def states() -> dict[str, State]:
            async with opened(directory) as ledger:
                return {entry.call_id: entry.state for entry in await ledger.records(ALICE)}

        assert asyncio.run(states()) == {"detached": State.RUNNING, "waited-for": State.RUNNING}
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert asyncio.run(states()) == {"detached": State.LOST, "waited-for": State.LOST}

    async def restart() -> tuple[list[StaleScript | None], list[str]]:
        async with opened(directory) as ledger:
            lost = await ledger.take_lost()
            scripts = [entry.recording.script for entry in lost if entry.recording is not None]
            return scripts, ids(await ledger.take_ended(ALICE))

    script = StaleScript("/root", "below", "code_exec_0123456789abcdef.py")
    assert asyncio.run(restart()) == ([script, None], ["detached"])
    assert asyncio.run(restart()) == ([], [])
    assert asyncio.run(states()) == {"detached": State.LOST, "waited-for": State.LOST}


# --- earlier versions

_VERSION_1 = """
CREATE TABLE calls (
    call_id VARCHAR NOT NULL, executor VARCHAR NOT NULL, idempotency_key VARCHAR, request VARCHAR NOT NULL,
    state VARCHAR NOT NULL, started_at FLOAT NOT NULL, ended_at FLOAT, result BLOB,
    PRIMARY KEY (call_id), UNIQUE (idempotency_key)
);
CREATE INDEX ix_calls_executor ON calls (executor);
CREATE INDEX ix_calls_state ON calls (state);
PRAGMA user_version = 1;
"""


def test_a_ledger_of_version_1_is_taken_over(tmp_path: Path) -> None:
    """Answers stay under their keys, for calls without an owner; what ran then is lost; none of it is in any list."""
    from sandbox.ledger import request_digest

    directory = tmp_path / "calls"
    directory.mkdir(mode=0o700)
    packed = zlib.compress(answer("old").model_dump_json().encode(), 1)
    with closing(sqlite3.connect(directory / "calls.sqlite")) as database, database:
        database.executescript(_VERSION_1)
        database.executemany(
            "INSERT INTO calls VALUES (?, 'gone', ?, ?, ?, 1e18, ?, ?)",
            [
                ("old", "key", request_digest(KEYED), "answered", 1e18, packed),
                ("open", "open-key", "digest", "running", None, None),
            ],
        )

    async def use() -> None:
        for start in range(2):
            async with opened(directory) as ledger:
                assert ids(await ledger.take_lost()) == ([] if start else ["open"])
                first = await ledger.begin("again", KEYED)
                assert first is not None
                assert (first.call_id, first.result, first.owner) == ("old", answer("old"), Owner())
                assert await ledger.records(Owner()) == []
                assert await ledger.begin(f"new-{start}", KEYED, Owner("tenant", f"{start}"), DETACHED) is None
                assert len(await ledger.entries()) == 3 + start

    asyncio.run(use())
    with closing(sqlite3.connect(directory / "calls.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
        tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        indexes = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert tables == {"calls"}
    assert {"ix_calls_executor", "ix_calls_state", "owners"} <= indexes


def test_a_start_that_is_killed_while_it_takes_over_leaves_version_1_or_2(tmp_path: Path) -> None:
    """It is one transaction: a failure in it leaves the file as it was."""
    directory = tmp_path / "calls"
    directory.mkdir(mode=0o700)
    with closing(sqlite3.connect(directory / "calls.sqlite")) as database, database:
        database.executescript(_VERSION_1)
        database.execute("CREATE TABLE calls_1 (in_the_way)")

    async def use() -> None:
        with pytest.raises(LedgerUnavailable, match="calls_1"):
            async with opened(directory):
                pytest.fail("it was opened")

    asyncio.run(use())
    with closing(sqlite3.connect(directory / "calls.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert database.execute("SELECT count(*) FROM calls").fetchone() == (0,)
        database.execute("DROP TABLE calls_1")
    asyncio.run(_opens(directory))


async def _opens(directory: Path) -> None:
    async with opened(directory) as ledger:
        assert await ledger.entries() == []
