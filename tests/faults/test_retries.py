"""What our own side fails at is tried again, and what the program did never is; whoever dies, each call has one answer.

Each stage of an attempt is brought about, not hit by chance: what must not go on meanwhile is stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox.contract import Cause, Status, ToolResult
from sandbox.ledger import Entry, Ledger, State
from tests import world
from tests.remote_executor import GONE_SECONDS, Remains, RemoteCall, RemoteExecutor, until, wait_for_nothing_left

ROOT = Path(__file__).parents[2]

# Says which attempt it is, of which call, and goes on when it gets a signal from outside; the second does at once.
STEPS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print(os.environ["SLUICEGATE_ATTEMPT"], os.environ["SLUICEGATE_CALL_ID"], flush=True)
open("/tmp/left", "x").close()
if os.environ["SLUICEGATE_ATTEMPT"] == "1":
    signal.sigwait({signal.SIGUSR1})
print("end")
"""
NEVER = "import signal\nprint('running', flush=True)\nsignal.pause()"


def write_policy(root: Path, *, attempts: int | None = None, margin: int | None = None) -> None:
    """None leaves a value to the policy's own default."""
    given = {"max": attempts, "margin_seconds": margin}
    chosen = {name: value for name, value in given.items() if value is not None}
    policy = {
        "version": 1,
        "name": "tests-retries",
        "attempts": chosen,
        "network": {"modes": ["block-all", "named"], "allow": [{"host": "allowed.test"}]},
        "limits": {"output_mib": 16},
    }
    (root / "policy.yaml").write_text(json.dumps(policy))


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sg-"))
    yield directory
    shutil.rmtree(directory)


type Start = Callable[..., RemoteExecutor]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Starts an executor without waiting sandboxes, so that those which are there are of calls."""
    started: list[RemoteExecutor] = []

    def run(*, attempts: int | None = None, margin: int | None = None, **settings: Any) -> RemoteExecutor:
        write_policy(root, attempts=attempts, margin=margin)
        started.append(RemoteExecutor(root, warm_sandboxes=0, **settings))
        return started[-1]

    yield run
    for one in started:
        one.close()


def codes(result: ToolResult) -> list[str]:
    """The account of a call: how each attempt ended."""
    return [attempt.code for attempt in result.attempts]


def bwrap(executor: RemoteExecutor) -> psutil.Process:
    """bubblewrap's outer process of the one sandbox that there is."""
    (process,) = (child for child in executor.launcher.children() if child.name() == "bwrap")
    return process


def program(executor: RemoteExecutor) -> psutil.Process:
    """The program of the one sandbox that there is."""
    *_, innermost = bwrap(executor).children(recursive=True)
    return innermost


def kill_and_wait(process: psutil.Process) -> None:
    process.kill()
    psutil.wait_procs([process], timeout=GONE_SECONDS)


def end(executor: RemoteExecutor) -> None:
    """Let the program come to its end, and wait for that."""
    process = program(executor)
    process.send_signal(signal.SIGUSR1)
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the program has ended")


def begun(executor: RemoteExecutor) -> bool:
    """Whether a sandbox has been started."""
    return any(child.name() == "bwrap" for child in executor.launcher.children())


# --- kill -9 of each process at each stage


def kill_launcher_starting(executor: RemoteExecutor) -> RemoteCall:
    launcher = executor.launcher
    launcher.suspend()
    call = executor.start(STEPS)
    wait_until_open(executor, call)
    kill_and_wait(launcher)
    return call


def kill_launcher_running(executor: RemoteExecutor) -> RemoteCall:
    call = executor.start(STEPS)
    call.says("\n")
    kill_and_wait(executor.launcher)
    return call


def kill_launcher_at_the_end(executor: RemoteExecutor) -> RemoteCall:
    call = executor.start(STEPS)
    call.says("\n")
    launcher, process = executor.launcher, program(executor)
    launcher.suspend()
    process.send_signal(signal.SIGUSR1)
    call.says("end")
    kill_and_wait(launcher)
    return call


def kill_proxy_starting(executor: RemoteExecutor) -> RemoteCall:
    proxy = executor.proxy
    proxy.suspend()
    call = executor.start(STEPS)
    until(lambda: begun(executor), "a sandbox is started")
    kill_and_wait(proxy)
    return call


def kill_proxy_running(executor: RemoteExecutor) -> RemoteCall:
    call = executor.start(STEPS)
    call.says("\n")
    kill_and_wait(executor.proxy)
    return call


def kill_bwrap_starting(executor: RemoteExecutor) -> RemoteCall:
    proxy = executor.proxy
    proxy.suspend()
    call = executor.start(STEPS)
    until(lambda: begun(executor), "a sandbox is started")
    killed = bwrap(executor)
    kill_and_wait(killed)
    # Not until there is none: the next attempt's may be there at once.
    until(lambda: killed.pid not in {child.pid for child in executor.launcher.children()}, "the sandbox has gone")
    proxy.resume()
    return call


def kill_bwrap_prepared(executor: RemoteExecutor) -> RemoteCall:
    proxy = executor.proxy
    proxy.suspend()
    call = executor.start(STEPS)
    until(lambda: [c.name() for c in executor.launcher.children()] == ["bwrap"], "the sandbox is prepared")
    until(lambda: bwrap(executor).children() and bwrap(executor).children()[0].name() != "bwrap", "pid 1 is up")
    kill_and_wait(bwrap(executor))
    proxy.resume()
    return call


def kill_bwrap_running(executor: RemoteExecutor) -> RemoteCall:
    call = executor.start(STEPS)
    call.says("\n")
    kill_and_wait(bwrap(executor))
    return call


def wait_until_open(executor: RemoteExecutor, call: RemoteCall) -> None:
    """Return once the ledger has the call: from then on it is worked on."""
    until(lambda: call.call_id in {entry.call_id for entry in entries(executor.root)}, "the call is in the ledger")


def entries(root: Path) -> list[Entry]:
    async def read() -> list[Entry]:
        ledger = await Ledger.open(root / "state" / "calls", keep_seconds=None)
        try:
            return await ledger.entries()
        finally:
            await ledger.close()

    return asyncio.run(read())


KILLS = {
    "launcher, starting": (kill_launcher_starting, {"launcher_lost"}),
    "launcher, running": (kill_launcher_running, {"launcher_lost"}),
    "launcher, at the end": (kill_launcher_at_the_end, {"launcher_lost"}),
    "proxy, starting": (kill_proxy_starting, {"proxy_lost"}),
    "proxy, running": (kill_proxy_running, {"proxy_lost"}),
    "bwrap, starting": (kill_bwrap_starting, {"isolation_failed"}),
    "bwrap, waiting for its start": (kill_bwrap_prepared, {"isolation_failed"}),
    "bwrap, running": (kill_bwrap_running, {"isolation_failed"}),
}


@pytest.mark.parametrize("kill", KILLS)
def test_what_our_side_fails_at_is_tried_again_in_a_fresh_attempt(start: Start, kill: str) -> None:
    """By default once. Each attempt is in the account; the code sees the same call id and its attempt's number."""
    executor = start()
    before = Remains.of(executor)
    act, code = KILLS[kill]
    call = act(executor)
    result = call.result()
    assert (result.status, result.cause, result.error) == (Status.SUCCESS, Cause.EXIT, None), result
    first, second = result.attempts
    assert {first.code} == code
    assert (first.status, first.cause) == (Status.ERROR, Cause.INFRASTRUCTURE)
    assert (second.status, second.code, second.exit_code) == (Status.SUCCESS, "exit", 0)
    assert first.attempt_id == f"{call.call_id}.1"
    assert second.attempt_id == f"{call.call_id}.2"
    assert first.ended_at <= second.started_at
    assert result.stdout == f"2 {call.call_id}\nend\n", "the answer's output is the last attempt's"
    if "start" not in kill:
        assert call.output.startswith(f"1 {call.call_id}\n")
    assert call.output.endswith(result.stdout)
    wait_for_nothing_left(executor, before)


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_with_one_attempt_nothing_is_tried_again(start: Start, kill: str) -> None:
    """`attempts.max: 1`: the failure is the answer, with its code, and the output until then."""
    executor = start(attempts=1)
    act, code = KILLS[kill]
    call = act(executor)
    result = call.result()
    assert (result.status, result.cause) == (Status.ERROR, Cause.INFRASTRUCTURE), result
    assert set(codes(result)) == code
    assert len(result.attempts) == 1
    assert result.error is not None
    assert {result.error.code} == code
    assert result.stdout == call.output
    assert executor.run("print(1)").stdout == "1\n", "the next call has all it needs"


def test_a_proxy_that_dies_after_the_program_takes_nothing_of_its_answer(start: Start) -> None:
    """The program has ended: its ending is known, and it is not run again."""
    executor = start()
    call = executor.start(STEPS)
    call.says("\n")
    proxy = executor.proxy
    proxy.suspend()
    end(executor)
    until(lambda: not begun(executor), "the sandbox has gone")
    kill_and_wait(proxy)
    result = call.result()
    assert (result.status, codes(result)) == (Status.SUCCESS, ["exit"]), result


def test_a_bwrap_that_dies_after_the_program_takes_nothing_of_its_answer(start: Start) -> None:
    """Pid 1 has reported by then: bubblewrap's own ending tells nothing more."""
    executor = start()
    call = executor.start(STEPS)
    call.says("\n")
    launcher, outer, process = executor.launcher, bwrap(executor), program(executor)
    first = process.parent()
    assert first is not None
    outer.suspend()
    process.send_signal(signal.SIGUSR1)
    call.says("end")
    until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE, "pid 1 has reported and ended")
    outer.kill()
    result = call.result()
    assert (result.status, codes(result)) == (Status.SUCCESS, ["exit"]), result
    assert launcher.is_running()


@pytest.mark.parametrize("victim", ["launcher", "proxy"])
def test_a_call_that_waits_for_its_turn_sees_nothing_of_a_loss(start: Start, victim: str) -> None:
    """The first call is tried again, and the one behind it has its only attempt afterwards, in order."""
    executor = start(max_concurrency=1)
    first = executor.start(STEPS)
    first.says("\n")
    second = executor.start("import os\nprint(os.environ['SLUICEGATE_ATTEMPT'])")
    wait_until_open(executor, second)
    kill_and_wait(getattr(executor, victim))
    earlier, later = first.result(), second.result()
    assert codes(earlier) == [f"{victim}_lost", "exit"]
    assert (later.status, later.stdout, codes(later)) == (Status.SUCCESS, "1\n", ["exit"])
    assert earlier.attempts[-1].ended_at <= later.attempts[0].started_at


@pytest.mark.parametrize("attempts", [2, 3])
def test_the_attempts_have_an_end(start: Start, attempts: int) -> None:
    """A launcher that is lost in each attempt: as many as the policy says, each in the account, and the last counts."""
    executor = start(attempts=attempts)
    call = executor.start("import os, signal\nprint(os.environ['SLUICEGATE_ATTEMPT'], flush=True)\nsignal.pause()")
    for number in range(1, attempts + 1):
        call.says(f"{number}\n")
        kill_and_wait(executor.launcher)
    result = call.result()
    assert codes(result) == ["launcher_lost"] * attempts
    assert result.error is not None
    assert (result.status, result.error.code, result.stdout) == (Status.ERROR, "launcher_lost", f"{attempts}\n")


@pytest.mark.parametrize(
    ("code", "more", "ending"),
    [
        ("raise SystemExit(1)", {}, "exit"),
        ("raise SystemExit(137)", {}, "exit"),
        ("import os\nos.abort()", {}, "signal"),
        ("x = []\nwhile True: x.append(b'x' * (1 << 20))", {"memory_mib": 128}, "memory"),
        ("while True: pass", {"timeout": 1}, "wall_clock"),
        ("import os\nwhile True: os.write(1, bytes(65536))", {}, "output_flood"),
        ("open('/tmp/x', 'wb').write(bytes(300 << 20))", {"memory_mib": 1024}, "disk"),
        ("process.exit(1)", {"language": "javascript"}, "exit"),
        ("const x = []; for (;;) x.push(Buffer.alloc(1 << 20, 1))", {"language": "javascript"}, "memory"),
        ("for (;;);", {"language": "javascript", "timeout": 1}, "wall_clock"),
    ],
)
def test_what_the_program_did_is_never_tried_again(start: Start, code: str, more: dict[str, Any], ending: str) -> None:
    """One attempt, though the policy permits three."""
    result = start(attempts=3).run(code, **more)
    assert codes(result) == [ending]
    assert result.status is not Status.SUCCESS


# --- the executor itself


def by_hand(executor: RemoteExecutor, stage: str) -> list[RemoteCall]:
    """Calls of which the last is at the stage."""
    if stage == "waiting for its turn":
        first = executor.start(NEVER)
        first.says("running")
        second = executor.start(NEVER)
        wait_until_open(executor, second)
        return [first, second]
    if stage == "starting":
        executor.launcher.suspend()
        call = executor.start(NEVER)
        call.enters("running")  # an attempt: it asks for a sandbox
        return [call]
    call = executor.start(STEPS)
    call.says("\n")
    if stage == "at the end":
        launcher, process = executor.launcher, program(executor)
        launcher.suspend()
        process.send_signal(signal.SIGUSR1)
        call.says("end")
    return [call]


STAGES = ["waiting for its turn", "starting", "running", "at the end"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_call_whose_executor_is_killed_is_reported_lost_once(start: Start, root: Path, stage: str) -> None:
    """Nothing of it is left, and the next start says so: to its program, in the audit log, and in the ledger; once."""
    world.adopt_orphans()
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    mounts = Path("/proc/self/mounts").read_text()
    executor = start(max_concurrency=1)
    calls = by_hand(executor, stage)
    launcher = executor.launcher
    ids = [call.call_id for call in calls]
    started = executor.kill()
    if launcher.is_running() and launcher.status() == psutil.STATUS_STOPPED:
        launcher.resume()  # a stopped process cannot see that its parent has gone
    assert started
    _, alive = psutil.wait_procs(started, timeout=GONE_SECONDS)
    assert alive == []
    left = [one for one in psutil.Process().children(recursive=True) if one.pid not in others | {executor.pid}]
    psutil.wait_procs(left, timeout=GONE_SECONDS)
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert {entry.state for entry in entries(root)} == {State.LOST}, "nobody holds the lock of their executor"

    again = start()
    assert sorted(again.lost) == sorted(ids)
    assert again.run("print('again')").stdout == "again\n"
    reported = [event["call_id"] for event in again.events() if event["event"] == "call" and event["what"] == "lost"]
    assert sorted(reported) == sorted(ids)
    assert {entry.call_id: entry.state for entry in entries(root)} == dict.fromkeys(ids, State.LOST)
    again.close()
    once_more = start()
    assert once_more.lost == []
    assert len([event for event in once_more.events() if event["event"] == "call"]) == len(ids)
    assert Path("/proc/self/mounts").read_text() == mounts
    once_more.close()
    assert list((root / "tmp").iterdir()) == []
    assert list((root / "state").rglob("*launcher*")) == []


def test_the_command_shows_what_was_lost(command: list[str], root: Path) -> None:
    """`sluicegate call` killed: `sluicegate calls` shows the call as running no more once another has looked."""
    write_policy(root)
    environment = {**os.environ, "SLUICEGATE_STATE_DIR": str(root / "state"), "HOME": str(root)}
    call = root / "call.json"
    call.write_text(json.dumps({"language": "python", "code": NEVER, "idempotency_key": "the key"}))
    words = [*command, "call", "--policy", str(root / "policy.yaml"), str(call)]

    def shown() -> list[dict[str, Any]]:
        done = subprocess.run(
            [*command, "calls", "--json"], env=environment, capture_output=True, text=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: [one["state"] for one in shown()] == ["running"], "the call is in the ledger")
        finally:
            started = psutil.Process(process.pid).children(recursive=True)
            process.kill()
    _, alive = psutil.wait_procs(started, timeout=GONE_SECONDS)
    assert alive == []
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "executor_lost"
    assert "was lost" in done.stderr
    (line,) = shown()
    assert (line["state"], line["idempotency_key"], line["result"]) == ("lost", "the key", None)


# --- the same call again

COUNTING = "import uuid\nprint(uuid.uuid4())"


def test_the_same_key_and_request_run_once(start: Start) -> None:
    """Ten at once, and one after: all have the answer of the first, down to its call id, and one attempt was made."""
    executor = start()
    together = [executor.start(COUNTING, idempotency_key="k") for _ in range(10)]
    answers = [call.result() for call in together]
    answers.append(executor.run(COUNTING, idempotency_key="k"))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].call_id == together[0].call_id
    starts = [event for event in executor.events() if event["event"] == "attempt" and event["phase"] == "start"]
    assert len(starts) == 1
    assert executor.run(COUNTING, idempotency_key="other").stdout != answers[0].stdout, "the control: another key runs"
    assert executor.run(COUNTING).stdout != answers[0].stdout


def test_the_key_holds_in_another_process_and_after_a_restart(start: Start) -> None:
    """While the first runs elsewhere the answer is to come again; then it is the first one's."""
    executor, other = start(), start()
    code = STEPS + COUNTING
    first = executor.start(code, idempotency_key="k")
    first.says("\n")
    busy = other.run(code, idempotency_key="k")
    assert busy.error is not None
    assert (busy.status, busy.error.code, busy.attempts) == (Status.ERROR, "call_running", [])
    assert busy.error.retry_after_seconds is not None
    end(executor)
    answer = first.result()
    assert other.run(code, idempotency_key="k") == answer
    executor.close()
    assert start().run(code, idempotency_key="k") == answer


@pytest.mark.parametrize(
    "other",
    [
        {"code": "print(2)"},
        {"timeout": 7},
        {"memory_mib": 256},
        {"env": {"A": "2"}},
        {"language": "javascript", "code": "print(1)"},
        {"allow_network": True, "domains": ["allowed.test"]},
    ],
    ids=str,
)
def test_the_key_with_another_request_is_a_conflict(start: Start, other: dict[str, Any]) -> None:
    """While the first runs, and after: it is refused, names the first, and nothing runs."""
    executor = start()
    fields: dict[str, Any] = {"code": "import time\nprint('running', flush=True)\ntime.sleep(1)", "env": {"A": "1"}}
    first = executor.start(**fields, idempotency_key="k")
    first.says("running")
    for _ in range(2):
        conflict = executor.run(**fields | other, idempotency_key="k")
        assert conflict.error is not None
        assert (conflict.status, conflict.cause) == (Status.ERROR, Cause.INVALID_CALL)
        assert (conflict.error.code, conflict.attempts) == ("idempotency_conflict", [])
        assert first.call_id in conflict.error.message
        assert first.result().status is Status.SUCCESS


def test_a_key_whose_executor_died_is_lost_and_not_run_again(start: Start) -> None:
    """Nobody knows how far the code came, so the same key says `executor_lost`, each time; another request conflicts."""
    executor = start()
    call = executor.start(NEVER, idempotency_key="k")
    call.says("running")
    lost = call.call_id
    executor.kill()
    again = start()
    assert again.lost == [lost]
    for _ in range(2):
        answer = again.run(NEVER, idempotency_key="k")
        assert answer.error is not None
        assert (answer.status, answer.cause, answer.error.code) == (
            Status.ERROR, Cause.INFRASTRUCTURE, "executor_lost",
        )  # fmt: skip
        assert (answer.call_id, answer.attempts, answer.stdout) == (lost, [], "")
    conflict = again.run("print(1)", idempotency_key="k")
    assert conflict.error is not None
    assert conflict.error.code == "idempotency_conflict"
    assert again.run("print(1)", idempotency_key="k2").stdout == "1\n"


def test_a_key_that_came_to_no_attempt_may_be_used_again(start: Start) -> None:
    """A call that was cancelled in the queue, or refused for the queue, or by the policy, has used up nothing."""
    executor = start(max_concurrency=1, max_waiting=1)
    holder = executor.start(NEVER)
    holder.says("running")
    waiting = executor.start("print('at last')", idempotency_key="k")
    wait_until_open(executor, waiting)
    full = executor.run("print('at last')", idempotency_key="k2")
    assert full.error is not None
    assert full.error.code == "queue_full"
    refused = executor.run("print('at last')", idempotency_key="k3", allow_network=True, domains=[])
    assert refused.error is not None
    assert refused.error.code == "policy_refused"
    waiting.cancel()
    assert waiting.result().cause is Cause.CANCELLED
    holder.cancel()
    holder.result()
    for key in ("k", "k2", "k3"):
        assert executor.run("print('at last')", idempotency_key=key).stdout == "at last\n"


def test_who_waits_for_the_first_call_can_be_cancelled_alone(start: Start) -> None:
    """The second with the same key is cancelled; the first runs on, and its answer is kept."""
    executor = start()
    first = executor.start(STEPS, idempotency_key="k")
    first.says("\n")
    second = executor.start(STEPS, idempotency_key="k")
    assert second.call_id
    second.cancel()
    answer = second.result()
    assert (answer.status, answer.cause, answer.attempts) == (Status.KILLED, Cause.CANCELLED, [])
    assert not first.answered
    end(executor)
    assert first.result().status is Status.SUCCESS
    assert executor.run(STEPS, idempotency_key="k") == first.result()


# --- cancelled


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_can_be_cancelled_at_every_stage(start: Start, stage: str) -> None:
    """The answer says so, keeps what was written until then, and nothing is left; the others go on."""
    executor = start(max_concurrency=1)
    before = Remains.of(executor)
    *earlier, call = by_hand(executor, stage)
    call.cancel()
    launcher = executor.launcher
    if launcher.status() == psutil.STATUS_STOPPED:
        launcher.resume()  # it was stopped to reach the stage
    result = call.result()
    if stage == "at the end":  # the program had ended before: that is its ending
        assert (result.status, result.cause) in ((Status.SUCCESS, Cause.EXIT), (Status.KILLED, Cause.CANCELLED))
    else:
        assert (result.status, result.cause) == (Status.KILLED, Cause.CANCELLED), result
        assert result.error is not None
        assert result.error.code == "cancelled"
    assert len(result.attempts) == (0 if stage == "waiting for its turn" else 1)
    assert result.stdout == call.output
    if stage == "running":
        assert result.stdout == f"1 {call.call_id}\n"
    for other in earlier:
        assert not other.answered, "another call is not touched"
        other.cancel()
        assert other.result().stdout == "running\n"
    wait_for_nothing_left(executor, before)
    assert entries(executor.root) == []
    assert executor.run("print(1)").stdout == "1\n"


def test_a_cancelled_call_is_not_tried_again(start: Start) -> None:
    """Cancelled, and then its launcher is lost: there is no second attempt."""
    executor = start(attempts=3)
    call = executor.start(NEVER)
    call.says("running")
    launcher = executor.launcher
    launcher.suspend()
    call.cancel()
    kill_and_wait(launcher)
    result = call.result()
    assert len(result.attempts) == 1
    assert result.stdout == "running\n"
    assert executor.run("print(1)").stdout == "1\n"


# --- the deadline


def test_the_deadline_gives_the_answer_though_nothing_moves(start: Start) -> None:
    """A stopped launcher ends no sandbox. The caller has the timeout at once, with what was written; then all is cleaned up."""
    executor = start(margin=1)
    before = Remains.of(executor)
    call = executor.start(NEVER, timeout=1)
    call.says("running")
    launcher = executor.launcher
    launcher.suspend()
    result = call.result()
    assert (result.status, result.cause) == (Status.TIMEOUT, Cause.WALL_CLOCK), result
    assert result.error is not None
    assert result.error.code == "deadline"
    assert codes(result) == ["deadline"]
    assert result.stdout == "running\n"
    took = call.heard_at - result.attempts[0].started_at
    assert 1 <= took < 2 + 5
    until(lambda: not launcher.is_running(), "the launcher that hung was ended")
    assert executor.run("print(1)", timeout=30).stdout == "1\n"
    wait_for_nothing_left(executor, before)


def test_the_deadline_covers_the_wait_for_a_turn(start: Start) -> None:
    """A call that cannot have its whole timeout any more is not begun: it is a timeout, without an attempt."""
    executor = start(margin=1, max_concurrency=1)
    holder = executor.start(NEVER, timeout=60)
    holder.says("running")
    waiting = executor.start("print(1)", timeout=1)
    result = waiting.result()
    assert result.error is not None
    assert (result.status, result.error.code, result.attempts) == (Status.TIMEOUT, "deadline", [])
    assert not holder.answered
    holder.cancel()
    assert holder.result().cause is Cause.CANCELLED


def test_what_cannot_end_before_the_deadline_is_not_tried_again(start: Start) -> None:
    """An attempt is lost after more than the margin has gone by: its failure is the answer."""
    executor = start(margin=1)
    call = executor.start("import time\ntime.sleep(1.2)\nprint('late', flush=True)\ntime.sleep(60)", timeout=30)
    call.says("late")
    kill_and_wait(executor.launcher)
    assert codes(call.result()) == ["launcher_lost"]


def test_the_default_margin_lets_a_call_be_tried_again(start: Start) -> None:
    """The control: the same loss under the default margin leads to another attempt."""
    executor = start()
    call = executor.start(
        "import os, time\nif os.environ['SLUICEGATE_ATTEMPT'] == '1':\n    time.sleep(1.2)\n    print('late', flush=True)\n    time.sleep(60)",
        timeout=30,
    )
    call.says("late")
    kill_and_wait(executor.launcher)
    assert codes(call.result()) == ["launcher_lost", "exit"]
