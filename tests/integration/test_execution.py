"""What happens to the code itself: output, endings, limits, environment."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox import Executor, Settings
from sandbox.contract import MAX_STDERR_CHARS, MAX_STDOUT_CHARS, Cause, CodeCall, Status, ToolResult
from sandbox.isolation.plan import GATE, INIT
from sandbox.isolation.pool import MAX_PLANS
from tests.lab import Lab, descriptors

MIB = 1024 * 1024


def run(lab: Lab, code: str, **fields: Any) -> ToolResult:
    return lab.run(code, prelude=False, **fields).result


def sandbox_processes(lab: Lab) -> list[psutil.Process]:
    """The processes of attempts: everything below the launcher."""
    return psutil.Process(lab.launcher_pid).children(recursive=True)


def only_waits(bwrap: psutil.Process) -> bool:
    """Whether nothing runs in a sandbox but its pid 1 and, in one for JavaScript, a runtime at its gate."""
    below = [process.cmdline() for process in bwrap.children(recursive=True)]
    firsts = sum(INIT in words for words in below)
    gates = sum(GATE in words and INIT not in words for words in below)  # pid 1 is told of it, too
    return firsts == 1 and gates <= 1 and firsts + gates == len(below)


def wait_until_alone(lab: Lab, seconds: float) -> None:
    """Return once no process of an attempt is left but those of the sandboxes that wait for the next one."""
    deadline = time.monotonic() + seconds
    while True:
        sandboxes = psutil.Process(lab.launcher_pid).children()
        try:
            if len(sandboxes) <= MAX_PLANS * Settings().warm_sandboxes and all(map(only_waits, sandboxes)):
                return
        except psutil.NoSuchProcess:
            pass  # looked at while it ended
        assert time.monotonic() < deadline, "\n".join(
            f"{process.pid} {' '.join(process.cmdline())[-60:]}" for process in sandbox_processes(lab)
        )
        psutil.wait_procs(sandbox_processes(lab), timeout=0.1)


def test_output_and_status_are_the_codes(lab: Lab) -> None:
    """Both streams stay apart and the exit code is the program's."""
    result = run(lab, "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)")
    assert (result.status, result.exit_code) == (Status.ERROR, 7)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert result.network.mode == "block-all"
    assert len(result.attempts) == 1


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("pass", Status.SUCCESS, 0),
        ("raise SystemExit(0)", Status.SUCCESS, 0),
        ("raise SystemExit(137)", Status.ERROR, 137),
        ("raise SystemExit(124)", Status.ERROR, 124),
        ("import os; os._exit(3)", Status.ERROR, 3),
        ("1/0", Status.ERROR, 1),
        ("def x(", Status.ERROR, 1),
        ("x = bytearray(10**15)", Status.ERROR, 1),
    ],
)
def test_an_ending_is_told_from_evidence(lab: Lab, code: str, status: Status, exit_code: int) -> None:
    """An exit with 137 or 124 is the program's own, and not taken for a kill or a timeout."""
    result = run(lab, code)
    assert (result.status, result.exit_code) == (status, exit_code), result


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_a_signal_is_reported_as_one(lab: Lab, name: str) -> None:
    """A program that dies of a signal has not exited: the attempt names the signal."""
    result = run(
        lab, f"import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.kill(os.getpid(), signal.{name})"
    )
    assert result.status in (Status.ERROR, Status.KILLED)
    import signal

    assert result.attempts[0].signal == getattr(signal, name)


def test_a_timeout_ends_every_process_at_once(lab: Lab) -> None:
    """Children, new sessions and those that ignore signals are gone when the answer is there."""
    started = time.monotonic()
    result = run(
        lab,
        """
import os, signal, subprocess, sys
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["setsid", "sleep", "301"])
subprocess.Popen([sys.executable, "-c", "import signal, time\\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\\ntime.sleep(302)"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: pass
    os._exit(0)
print("started", flush=True)
while True: pass
""",
        timeout=2,
    )
    assert result.status == Status.TIMEOUT
    assert result.stdout == "started\n"
    assert time.monotonic() - started < 6
    wait_until_alone(lab, 5)


def test_a_child_that_holds_the_output_does_not_hold_the_answer(lab: Lab) -> None:
    """The program has ended: what it left running, with its streams open, ends with it."""
    started = time.monotonic()
    result = run(
        lab, "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '300'])\nprint('x' * 100_000)", timeout=30
    )
    assert result.status == Status.SUCCESS
    assert len(result.stdout) == 100_001
    assert time.monotonic() - started < 10
    wait_until_alone(lab, 5)


def test_orphans_are_reaped(lab: Lab) -> None:
    """500 orphans leave no zombie inside: the first process of the sandbox reaps."""
    result = run(
        lab,
        """
import os, time
for _ in range(10):
    for _ in range(50):
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
def zombies():
    found = 0
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                found += open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                pass
    return found
deadline = time.monotonic() + 20
while zombies() and time.monotonic() < deadline:
    os.sched_yield()
print(zombies())
""",
    )
    assert result.stdout == "0\n", result.stderr


@pytest.mark.parametrize("size", [65_536, 1_000_000, 10_000_000])
def test_both_streams_at_once_never_block_the_code(lab: Lab, size: int) -> None:
    """Output of any size on both streams is read while it is written; the counts are exact."""
    result = run(
        lab,
        f"""
import os, threading
def fill(fd, letter):
    left = {size}
    while left:
        left -= os.write(fd, letter * min(left, 65536))
threads = [threading.Thread(target=fill, args=a) for a in ((1, b"o"), (2, b"e"))]
[t.start() for t in threads]; [t.join() for t in threads]
""",
    )
    assert result.status == Status.SUCCESS
    assert (result.output_chars.stdout, result.output_chars.stderr) == (size, size)
    assert result.truncated.stdout == (size > MAX_STDOUT_CHARS)
    assert result.truncated.stderr == (size > MAX_STDERR_CHARS)
    assert set(result.stdout) == {"o"}
    assert set(result.stderr) <= {"e"}


@pytest.mark.parametrize("letter", ["a", "é", "😀"])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_truncation_is_told_exactly(lab: Lab, over: int, letter: str) -> None:
    """One below, at and one above the cap, counted in characters: flag and total are exact."""
    size = MAX_STDOUT_CHARS + over
    result = run(
        lab,
        f"import sys\nsys.stdout.write({letter!r} * {size})\nsys.stderr.write({letter!r} * {MAX_STDERR_CHARS + over})",
    )
    assert result.status == Status.SUCCESS
    assert result.truncated.stdout == (over > 0)
    assert result.truncated.stderr == (over > 0)
    assert result.output_chars.stdout == size
    assert result.output_chars.stderr == MAX_STDERR_CHARS + over
    assert len(result.stdout) <= MAX_STDOUT_CHARS
    if over <= 0:
        assert result.stdout == letter * size


def test_endless_output_costs_no_memory(lab: Lab) -> None:
    """`yes` until it is too much: the reader's memory stays flat, and the count is of all."""
    own = psutil.Process(os.getpid())
    before = own.memory_info().rss
    result = run(lab, "import subprocess\nsubprocess.run(['yes'])", timeout=60)
    assert (result.status, result.cause) == (Status.KILLED, Cause.OUTPUT_FLOOD)
    evidence = result.attempts[0].evidence
    assert evidence.output_bytes > evidence.output_limit_bytes == 256 * MIB
    assert evidence.output_bytes == result.output_chars.stdout
    assert result.output_chars.stdout > 10 * MAX_STDOUT_CHARS
    assert result.truncated.stdout
    assert own.memory_info().rss - before < 64 * MIB


def test_output_before_a_timeout_is_kept(lab: Lab) -> None:
    """What was printed without a flush before a hang is in the result."""
    result = run(
        lab, "import sys, time\nprint('unflushed')\nsys.stdout.write('no line end')\ntime.sleep(300)", timeout=2
    )
    assert (result.status, result.stdout) == (Status.TIMEOUT, "unflushed\nno line end")


def test_text_is_utf8_and_time_is_utc(lab: Lab) -> None:
    """Any character prints, whatever the host's locale, and the clock's zone is UTC."""
    result = run(
        lab,
        "import sys, time\nprint('żółć 漢字 😀', sys.stdout.encoding, time.tzname[0])\nprint('😀', file=sys.stderr)",
    )
    assert result.stdout == "żółć 漢字 😀 utf-8 UTC\n", result.stderr
    assert result.stderr == "😀\n"


def test_bytes_that_are_no_text_do_not_break_the_result(lab: Lab) -> None:
    """Output that is not UTF-8 is replaced, and the result is valid JSON."""
    result = run(lab, "import os\nos.write(1, b'\\xff\\xfe ok \\x00 \\xf0\\x9f')")
    assert result.status == Status.SUCCESS
    assert " ok \0 " in result.stdout
    json.loads(result.model_dump_json())


def test_too_much_memory_is_killed_and_named(lab: Lab) -> None:
    """A hog is `killed` for its memory in one attempt, and is not tried again."""
    result = run(lab, "hog = []\nwhile True:\n    hog.append(b'x' * (8 << 20))", memory_mib=128, timeout=60)
    if result.status == Status.ERROR:  # where only a limit on each process can be had, Python says it itself
        assert "MemoryError" in result.stderr
    else:
        assert result.status == Status.KILLED
        assert result.error is not None
        assert "memory" in (result.error.code + result.attempts[0].cause)
    assert len(result.attempts) == 1
    assert result.attempts[0].memory_method
    assert result.usage.peak_memory_bytes is None or result.usage.peak_memory_bytes < 400 * MIB


def test_memory_of_many_processes_is_counted_together(lab: Lab) -> None:
    """Eight children that are each within the limit are not, together."""
    result = run(
        lab,
        """
import os, signal
for _ in range(8):
    if os.fork() == 0:
        hog = bytearray(os.urandom(1 << 20) * 60)
        print("grown", flush=True)
        signal.pause()
for _ in range(8):
    os.wait()
""",
        memory_mib=160,
        timeout=60,
    )
    assert result.status == Status.KILLED, result
    assert "memory" in result.attempts[0].cause
    assert result.stdout.count("grown") < 8


def test_a_fork_bomb_is_contained(lab: Lab) -> None:
    """Processes have a limit, the answer comes, and the host can still start them."""
    result = run(
        lab,
        """
import os, signal
count = 0
try:
    while count < 2000:
        if os.fork() == 0:
            signal.pause()
        count += 1
except OSError as error:
    print("stopped", count, error.errno)
""",
        timeout=30,
    )
    assert result.stdout.startswith("stopped "), result
    assert int(result.stdout.split()[1]) < 1500
    wait_until_alone(lab, 5)
    assert run(lab, "print(1)").stdout == "1\n"


@pytest.mark.parametrize("place", ["/tmp", "/workspace", "/dev/shm"])
def test_a_full_disk_is_an_error_and_not_a_kill(lab: Lab, place: str) -> None:
    """A full directory is ENOSPC, in bytes and in files, and the program lives on."""
    result = run(
        lab,
        f"""
import errno, os
def fill():
    with open("{place}/big", "wb") as file:
        for _ in range(4096):
            file.write(bytes(1 << 20))
try:
    fill()
except OSError as error:
    print(errno.errorcode[error.errno])
os.unlink("{place}/big")
open("{place}/small", "w").write("again")
print(open("{place}/small").read())
""",
        memory_mib=1024,
        timeout=120,
    )
    assert result.status == Status.SUCCESS, result
    lines = result.stdout.split()
    assert lines[0] in ("ENOSPC", "EDQUOT", "EFBIG")
    assert lines[1] == "again"


def test_standard_input_is_at_its_end(lab: Lab) -> None:
    """`input()` is EOFError at once, not a wait until the timeout."""
    result = run(lab, "import sys\ntry:\n    input()\nexcept EOFError:\n    print('eof', repr(sys.stdin.read()))")
    assert result.stdout == "eof ''\n", result.stderr


def test_the_environment_is_a_list_and_not_the_hosts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of the caller's environment is nowhere inside, and the call's variables are."""
    monkeypatch.setenv("CANARY_SECRET", "canary-value")
    result = run(lab, "import os, json\nprint(json.dumps(dict(os.environ)))", env={"GREETING": "hällo = 1"})
    inside = json.loads(result.stdout)
    assert inside["GREETING"] == "hällo = 1"
    assert "canary-value" not in result.stdout
    assert not {name for name in inside if name.startswith("CANARY")}
    assert inside["HOME"] == "/workspace"


def test_state_does_not_pass_from_one_attempt_to_the_next(lab: Lab) -> None:
    """Each attempt is fresh: no file, no process, no shared memory of the one before."""
    code = """
import os, glob
print(sorted(glob.glob("/tmp/*") + glob.glob("/workspace/*") + glob.glob("/dev/shm/*")))
for place in ("/tmp", "/workspace", "/dev/shm"):
    open(f"{place}/left-behind", "w").write("x")
"""
    first, second = run(lab, code), run(lab, code)
    assert first.status == Status.SUCCESS
    assert first.stdout == second.stdout
    assert "left-behind" not in second.stdout


def test_the_usual_modules_work(lab: Lab) -> None:
    """Threads, processes, pools, temporary files, sqlite, subprocesses and asyncio are not harmed by the confinement."""
    result = run(
        lab,
        """
import asyncio, concurrent.futures, multiprocessing, sqlite3, subprocess, sys, tempfile, threading, zoneinfo, uuid, ctypes, mmap
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    assert sum(pool.map(lambda n: n, range(100))) == 4950
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert sum(pool.map(abs, range(100))) == 4950
multiprocessing.Semaphore(1).acquire()
with tempfile.TemporaryDirectory() as directory:
    sqlite3.connect(directory + "/x.db").execute("create table t (x)")
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
assert subprocess.run(["sh", "-c", "ls / | wc -l"], capture_output=True).returncode == 0
async def main():
    process = await asyncio.create_subprocess_exec("echo", "x", stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0]
assert asyncio.run(main()) == b"x\\n"
print("fine")
""",
    )
    assert result.stdout == "fine\n", result.stderr


def test_a_traceback_names_the_codes_lines(lab: Lab) -> None:
    """An error shows the line of the code that the caller wrote."""
    result = run(lab, "x = 1\ndef broken():\n    return unknown_name\n\nbroken()\n")
    assert "line 3" in result.stderr
    assert "unknown_name" in result.stderr
    assert "/root" not in result.stderr


def test_usage_is_measured(lab: Lab) -> None:
    """Wall time, processor time and peak memory are the attempt's, near what it used."""
    result = run(
        lab,
        "import time\nend = time.process_time() + 0.5\nx = bytearray(50 << 20)\nwhile time.process_time() < end: pass",
    )
    assert 0.5 <= result.usage.wall_seconds < 20
    assert result.usage.cpu_seconds is None or 0.4 <= result.usage.cpu_seconds < 5
    assert result.usage.peak_memory_bytes is None or result.usage.peak_memory_bytes > 50 * MIB


def test_forty_calls_at_once_each_have_their_answer(lab: Lab) -> None:
    """Every call is terminal, none is lost or mixed with another."""

    async def main() -> list[ToolResult]:
        root = lab.log.parent
        async with Executor(
            lab.policy, settings=Settings(state_dir=root / "many", audit_log=root / "many.jsonl")
        ) as executor:
            calls = [
                CodeCall(language="python", code=f"print({n})\nraise SystemExit({n % 7})", timeout=120)
                for n in range(40)
            ]
            return list(await asyncio.gather(*(executor.run(call) for call in calls)))

    results = asyncio.run(main())
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(40)]
    assert [result.exit_code for result in results] == [n % 7 for n in range(40)]
    assert len({result.call_id for result in results}) == 40


def test_fifty_attempts_leave_nothing_behind(lab: Lab) -> None:
    """Files, mounts, descriptors and processes are back where they were, killed attempts included."""
    pids = (lab.launcher_pid, lab.proxy_pid, os.getpid())

    def state() -> tuple[int, int, list[int]]:
        mounts = sum(Path(f"/proc/{pid}/mounts").read_text().count("\n") for pid in pids)
        files = sum(len(names) + len(kinds) for _, kinds, names in os.walk(lab.log.parent / "state"))
        return mounts, files, [descriptors(pid) for pid in pids]

    run(lab, "print(1)")
    run(lab, "import time; time.sleep(60)", timeout=1)
    wait_until_alone(lab, 5)
    before = state()
    for number in range(50):
        if number % 25 == 0:
            run(lab, "import time; time.sleep(60)", timeout=1)
        else:
            run(lab, "print(1)")
    wait_until_alone(lab, 5)
    after = state()
    assert after[:2] == before[:2]
    assert all(now <= then + 2 for now, then in zip(after[2], before[2], strict=True)), (before, after)
