"""Many calls at once: every one has its own answer, in order, in bounded memory; past the bound it is told when to come."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox.contract import Cause, Status
from tests.remote_executor import Remains, RemoteCall, RemoteExecutor, until, wait_for_nothing_left

MIB = 1024 * 1024
POLICY = """\
version: 1
name: tests-load
attempts: {max: 1, margin_seconds: 600}
"""
MIXED = {
    "python": "import os, sys\nn = {n}\nprint(n, os.environ['SLUICEGATE_CALL_ID'])\nprint('e', n, file=sys.stderr)\nsys.exit(n % 5)",
    "javascript": 'const n = {n}; console.log(n, process.env.SLUICEGATE_CALL_ID); console.error("e", n); process.exitCode = n % 5;',
}
HOLD = "import signal\nprint('running', flush=True)\nsignal.pause()"

type Start = Callable[..., RemoteExecutor]


@pytest.fixture
def start() -> Iterator[Start]:
    root = Path(tempfile.mkdtemp(prefix="sg-"))
    (root / "policy.yaml").write_text(POLICY)
    started: list[RemoteExecutor] = []

    def run(**settings: Any) -> RemoteExecutor:
        started.append(RemoteExecutor(root, **settings))
        return started[-1]

    yield run
    for one in started:
        one.close()
    shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_calls_at_once_each_have_their_answer_in_flat_memory(start: Start) -> None:
    """Python and JavaScript mixed: none lost, none mixed up, begun in order; a second round needs no more memory."""
    places = 8
    executor = start(max_concurrency=places)
    sizes: list[int] = []

    def round_of(count: int) -> None:
        languages = ["javascript" if n % 10 == 0 else "python" for n in range(count)]
        calls = [
            executor.start(MIXED[language].replace("{n}", str(n)), language=language, timeout=60)
            for n, language in enumerate(languages)
        ]
        results = [call.result() for call in calls]
        assert len({result.call_id for result in results}) == count
        for n, (call, result) in enumerate(zip(calls, results, strict=True)):
            assert result.call_id == call.call_id
            assert (result.stdout, result.stderr) == (f"{n} {call.call_id}\n", f"e {n}\n"), result
            assert (result.exit_code, len(result.attempts)) == (n % 5, 1)
            assert result.status is (Status.SUCCESS if n % 5 == 0 else Status.ERROR)
        assert out_of_order([result.attempts[0].started_at for result in results]) == []
        assert most_at_once([(r.attempts[0].started_at, r.attempts[0].ended_at) for r in results]) <= places
        sizes.append(psutil.Process(executor.pid).memory_info().rss)

    executor.run("pass")
    executor.run("0", language="javascript")
    until(lambda: len(executor.launcher.children()) == 2, "a sandbox of each language waits for the next call")
    before = Remains.of(executor)
    round_of(200)
    round_of(200)
    first, second = sizes
    assert second - first < 8 * MIB
    wait_for_nothing_left(executor, before)
    ends = [event for event in executor.events() if event["event"] == "attempt" and event["phase"] == "end"]
    assert len(ends) == 402


def out_of_order(times: list[float]) -> list[tuple[int, int]]:
    """Places of neighbours of which the later was begun first."""
    return [(n, n + 1) for n in range(len(times) - 1) if times[n] > times[n + 1]]


def most_at_once(spans: list[tuple[float, float]]) -> int:
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def test_who_waits_has_its_turn_in_order(start: Start) -> None:
    """First in, first out, one at a time; a call that is cancelled in the queue lets the next one up."""
    executor = start(max_concurrency=1)
    holder = executor.start(HOLD)
    holder.says("running")
    waiting = [executor.start(f"print({n})") for n in range(12)]
    ids = [call.call_id for call in waiting]
    assert len(set(ids)) == 12
    waiting[3].cancel()
    assert waiting[3].result().cause is Cause.CANCELLED
    assert not any(call.answered for n, call in enumerate(waiting) if n != 3)
    holder.cancel()
    results = [call.result() for n, call in enumerate(waiting) if n != 3]
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(12) if n != 3]
    spans = [(result.attempts[0].started_at, result.attempts[0].ended_at) for result in results]
    assert spans == sorted(spans)
    assert most_at_once(spans) == 1


def test_past_the_queue_a_call_is_refused_before_any_work(start: Start) -> None:
    """At once, with a hint when to come again, without an attempt, and nothing of it is in the ledger or the log."""
    executor = start(max_concurrency=2, max_waiting=3)
    holders = [executor.start(HOLD) for _ in range(2)]
    for holder in holders:
        holder.says("running")
    waiting = [executor.start(f"print({n})") for n in range(3)]
    assert all(call.call_id for call in waiting)
    events = len(executor.events())
    before = Remains.of(executor)
    for _ in range(20):
        refused = executor.run("print('never')")
        assert refused.error is not None
        assert (refused.status, refused.cause, refused.error.code) == (Status.ERROR, Cause.INFRASTRUCTURE, "queue_full")
        assert refused.error.retry_after_seconds is not None
        assert 1 <= refused.error.retry_after_seconds <= 300
        assert (refused.attempts, refused.stdout) == ([], "")
    assert Remains.of(executor) == before
    assert len(executor.events()) == events
    for holder in holders:
        holder.cancel()
    assert [call.result().stdout for call in waiting] == ["0\n", "1\n", "2\n"]
    assert executor.run("print('now')").stdout == "now\n"


def test_the_queue_has_room_again_when_a_waiting_call_goes(start: Start) -> None:
    """Cancelled in the queue, a call leaves its place to another."""
    executor = start(max_concurrency=1, max_waiting=1)
    holder = executor.start(HOLD)
    holder.says("running")
    first = executor.start("print(1)")
    assert first.call_id
    assert executor.run("print(2)").cause is Cause.INFRASTRUCTURE
    first.cancel()
    first.result()
    second: RemoteCall = executor.start("print(3)")
    assert second.call_id
    holder.cancel()
    assert second.result().stdout == "3\n"


def test_threads_of_many_attempts_at_once_are_each_within_their_own_limit(start: Start) -> None:
    """20 attempts with 60 threads each: the limit is an attempt's, not the user's, so none fails another."""
    executor = start(max_concurrency=20)
    code = (
        "import threading\nbarrier = threading.Barrier(61)\n"
        "for _ in range(60): threading.Thread(target=barrier.wait).start()\n"
        "print('up', flush=True)\nbarrier.wait()\nprint(threading.active_count() > 0)"
    )
    calls = [executor.start(code, timeout=100) for _ in range(20)]
    for call in calls:
        result = call.result()
        assert (result.status, result.stdout) == (Status.SUCCESS, "up\nTrue\n"), result
        assert result.attempts[0].evidence.process_limit_hits in (0, None)
