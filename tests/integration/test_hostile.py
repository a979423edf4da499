"""Hostile endings: whatever a program does, it has an answer in time, and nobody else and nothing later is harmed.

Each program runs in an executor of its own process, as this user and as nobody, while another attempt runs beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.contract import AttemptRecord, Cause, Status, ToolResult
from tests.remote_executor import Remains, RemoteExecutor, wait_for_nothing_left
from tests.unprivileged import unprivileged_command

MIB = 1024 * 1024
GRACE_SECONDS = 1.0  # beyond the limit, on a machine that does nothing else
LOADED_SECONDS = 5.0  # the same, where the tests' own processes compete with the sandbox
POLICY = """\
version: 1
name: tests-hostile
attempts: {max: 2}
limits:
  timeout_seconds: {default: 30, max: 100}
  memory_mib: {default: 512, max: 2048}
  output_mib: 32
"""


@pytest.fixture(scope="module", params=["as-we-are", pytest.param("as-nobody", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> Iterator[RemoteExecutor]:
    """An executor with a policy under which what fails on our side would be tried again."""
    root = Path(tempfile.mkdtemp(prefix="sg-"))
    root.chmod(0o777)
    (root / "policy.yaml").write_text(POLICY)
    try:
        with unprivileged_command() as prefix:
            if request.param == "as-we-are":
                prefix = []
            elif not prefix:
                pytest.skip("the tests already run as an unprivileged user")
            with RemoteExecutor(root, prefix, warm_sandboxes=0) as remote:
                remote.run("pass")  # what the first one makes is there before anything is counted
                yield remote
    finally:
        shutil.rmtree(root)


type Holds = Callable[[AttemptRecord], bool]


@dataclass(frozen=True)
class Ending:
    """What a program must end as: any of these, since what the kernel refuses first is not always the same."""

    name: str
    language: str
    code: str
    expected: frozenset[tuple[Status, Cause]]
    evidence: Holds = lambda record: True
    timeout: float = 30
    memory_mib: int = 512
    sampled: frozenset[tuple[Status, Cause]] = frozenset()  # and these, where samples may come too late

    def __str__(self) -> str:
        return f"{self.language}: {self.name}"


TIMEOUT = (Status.TIMEOUT, Cause.WALL_CLOCK)
MEMORY = (Status.KILLED, Cause.MEMORY)
FLOOD = (Status.KILLED, Cause.OUTPUT_FLOOD)
DISK = (Status.ERROR, Cause.DISK)
PIDS = (Status.ERROR, Cause.PIDS)
SUCCESS = (Status.SUCCESS, Cause.EXIT)
ERROR = (Status.ERROR, Cause.EXIT)
SIGNAL = (Status.ERROR, Cause.SIGNAL)


def timed(record: AttemptRecord) -> bool:
    """It was given its time, and no more."""
    return record.ended_at - record.started_at >= record.evidence.wall_limit_seconds


def at_process_limit(record: AttemptRecord) -> bool:
    evidence = record.evidence
    return evidence.process_limit is not None and (evidence.process_limit_hits or 0) > 0


def over_memory(record: AttemptRecord) -> bool:
    """The kernel killed for it, or the samples saw what was too much; and what was seen is no more than a sample late."""
    evidence = record.evidence
    if record.memory_method == "sampling":
        return (evidence.peak_memory_bytes or 0) > evidence.memory_limit_bytes * 0.5
    return evidence.memory_kills > 0 and (evidence.peak_memory_bytes or 0) >= evidence.memory_limit_bytes - 2 * MIB


def flooded(record: AttemptRecord) -> bool:
    return record.evidence.output_bytes > record.evidence.output_limit_bytes == 32 * MIB


def disk(path: str, exhausted: str) -> Holds:
    return lambda record: [(full.path, full.exhausted) for full in record.evidence.full_disks] == [(path, exhausted)]


def ended_with(number: int) -> Holds:
    return lambda record: record.signal == number


PLACES = ("/tmp", "/workspace", "/dev/shm")
BYTES = 'open("{place}/big", "wb").write(bytes(300 << 20))'
INODES = 'n = 0\nwhile True:\n    open(f"{place}/{{n}}", "w").close()\n    n += 1'
JS_BYTES = (
    'const fs = require("fs"), fd = fs.openSync("{place}/big", "w"), block = Buffer.alloc(1 << 20);'
    " for (;;) fs.writeSync(fd, block);"
)
JS_INODES = 'const fs = require("fs"); for (let n = 0; ; n++) fs.closeSync(fs.openSync(`{place}/${{n}}`, "w"));'


def endings() -> Iterator[Ending]:
    def case(name: str, code: str, *expected: tuple[Status, Cause], language: str = "python", **more: object) -> Ending:
        return Ending(name, language, code, frozenset(expected), **more)  # type: ignore[arg-type]  # a table's rows

    yield case(
        "fork bomb that gives up", "import os, signal\nwhile True:\n    if os.fork() == 0: signal.pause()", PIDS,
        evidence=lambda record: record.cause is not Cause.PIDS or at_process_limit(record), sampled=frozenset({ERROR}),
    )  # fmt: skip
    yield case(
        "fork bomb that goes on",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        TIMEOUT, timeout=3, evidence=timed,
    )  # fmt: skip
    yield case("shell fork bomb", "import os\nos.system('b() { b | b & b; }; b')\nwhile True: pass", TIMEOUT, timeout=3)
    yield case(
        "10 GB at once", "x = bytearray(10_000_000_000)\nfor n in range(0, len(x), 4096): x[n] = 1", MEMORY, ERROR,
        evidence=lambda record: record.cause is not Cause.MEMORY or over_memory(record),
    )  # fmt: skip
    yield case(
        "10 GB bit by bit", "x = []\nwhile True: x.append(b'x' * (4 << 20))", MEMORY, ERROR, memory_mib=128,
        evidence=lambda record: record.cause is not Cause.MEMORY or over_memory(record),
    )  # fmt: skip
    for place in PLACES:
        yield case(
            f"{place} full of bytes", BYTES.format(place=place), DISK, evidence=disk(place, "bytes"), memory_mib=1024
        )
        yield case(
            f"{place} full of files", INODES.format(place=place), DISK, evidence=disk(place, "inodes"), memory_mib=1024
        )
    yield case(
        "endless output on both streams",
        "import os, threading\nfor fd in 1, 2:\n    threading.Thread(target=lambda fd=fd: [os.write(fd, bytes(65536)) for _ in iter(int, 1)]).start()",
        FLOOD, evidence=flooded,
    )  # fmt: skip
    yield case(
        "setsid grandchildren hold the pipes",
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(300)\n        os._exit(0)\nprint('done')",
        SUCCESS,
    )  # fmt: skip
    yield case(
        "SIGTERM and all others ignored",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        TIMEOUT, timeout=2, evidence=timed,
    )  # fmt: skip
    yield case(
        "self-stop", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", TIMEOUT, timeout=2, evidence=timed
    )
    yield case(
        "stop of the whole group", "import os, signal\nos.killpg(0, signal.SIGSTOP)", TIMEOUT, timeout=2, evidence=timed
    )
    yield case(
        "kill -1",  # which spares who sends it, and pid 1
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '300'])\nos.kill(-1, 9)\nassert child.wait() == -9", SUCCESS,
    )  # fmt: skip
    yield case(
        "kill -1 by a child", "import subprocess, time\nsubprocess.run(['sh', '-c', 'kill -9 -1'])\ntime.sleep(60)", SIGNAL,
        evidence=ended_with(9),
    )  # fmt: skip
    yield case("kill of pid 1", "import os, signal\nfor n in 9, 15, 2, 19: os.kill(1, n)\nprint('alive')", SUCCESS)
    yield case(
        "deep zombies",  # a chain of processes, each with a child that is dead and never waited for
        "import os, signal\nfor depth in range(55):\n    if os.fork() == 0: os._exit(0)\n    if os.fork() != 0: signal.pause()\nprint('deep', flush=True)\nsignal.pause()",
        TIMEOUT, timeout=2, evidence=timed,
    )  # fmt: skip
    yield case(
        "descriptors 0, 1, 2 closed",
        "import os\nprint('x', flush=True)\nfor fd in 0, 1, 2: os.close(fd)\nos._exit(0)",
        SUCCESS,
    )
    yield case("all descriptors closed", "import os\nos.closerange(0, 1 << 20)\nos._exit(5)", ERROR)
    yield case(
        "all descriptors closed, and waiting", "import os, time\nos.closerange(0, 1 << 20)\ntime.sleep(300)", TIMEOUT,
        timeout=2, evidence=timed,
    )  # fmt: skip
    yield case("recursion", "def f(): f()\nf()", ERROR)
    yield case(
        "recursion without a limit",
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n + 'x')\ndef f(n): return f(n + 1)\nf(0)",
        SIGNAL, MEMORY, ERROR, memory_mib=256,
    )  # fmt: skip
    yield case(
        "recursion of the C stack",
        "import ctypes\nctypes.string_at(0)",
        SIGNAL, evidence=ended_with(11),
    )  # fmt: skip
    yield case(
        "100,000 threads",
        "import threading, signal\nlock = threading.Lock()\nlock.acquire()\nfor n in range(100_000): threading.Thread(target=lock.acquire, daemon=True).start()",
        PIDS, evidence=lambda record: record.cause is not Cause.PIDS or at_process_limit(record),
        sampled=frozenset({ERROR}),
    )  # fmt: skip
    js = "javascript"
    yield case(
        "fork bomb",
        'const { spawn } = require("child_process"); const bomb = () => { spawn("sleep", ["300"]).on("error", (e) => { throw e; }); setImmediate(bomb); }; bomb();',
        PIDS, language=js, evidence=lambda record: record.cause is not Cause.PIDS or at_process_limit(record),
        sampled=frozenset({ERROR, MEMORY}),
    )  # fmt: skip
    yield case(
        "10 GB bit by bit", "const x = []; for (;;) x.push(Buffer.alloc(4 << 20, 1));", MEMORY, language=js,
        evidence=over_memory, memory_mib=256,
    )  # fmt: skip
    yield case(
        "10 GB on the heap",
        "const x = []; for (;;) x.push(new Array(1e5).fill(1.5));",
        MEMORY,
        language=js,
        memory_mib=256,
        sampled=frozenset({ERROR, SIGNAL}),  # RLIMIT_DATA may stop it before a sample does
    )
    for place in PLACES:
        yield case(
            f"{place} full of bytes", JS_BYTES.format(place=place), DISK, language=js, evidence=disk(place, "bytes"),
            memory_mib=1024,
        )  # fmt: skip
    yield case(
        "/tmp full of files", JS_INODES.format(place="/tmp"), DISK, language=js, evidence=disk("/tmp", "inodes"),
        memory_mib=1024,
    )  # fmt: skip
    yield case(
        "endless output on both streams",
        'const { writeSync } = require("fs"), block = Buffer.alloc(65536, 97); const put = (fd) => { try { writeSync(fd, block); } catch (e) { if (e.code !== "EAGAIN") throw e; } }; for (;;) { put(1); put(2); }',
        FLOOD, language=js, evidence=flooded,
    )  # fmt: skip
    yield case(
        "detached grandchildren hold the pipes",
        'const { spawn } = require("child_process"); spawn("sh", ["-c", "setsid sleep 300 & setsid sleep 301"], { detached: true, stdio: "inherit" }).unref(); console.log("done");',
        SUCCESS, language=js,
    )  # fmt: skip
    yield case(
        "SIGTERM ignored", 'process.on("SIGTERM", () => {}); process.on("SIGINT", () => {}); for (;;);', TIMEOUT,
        language=js, timeout=2, evidence=timed,
    )  # fmt: skip
    yield case("self-stop", 'process.kill(process.pid, "SIGSTOP"); for (;;);', TIMEOUT, language=js, timeout=2)
    yield case(
        "kill -1",
        'const child = require("child_process").spawn("sleep", ["300"]); child.on("exit", (_, signal) => process.exit(signal === "SIGKILL" ? 0 : 1)); child.on("spawn", () => process.kill(-1, "SIGKILL"));',
        SUCCESS, language=js,
    )  # fmt: skip
    yield case(
        "descriptors 0, 1, 2 closed", 'const fs = require("fs"); for (const fd of [0, 1, 2]) fs.closeSync(fd); process.exit(0);',
        SUCCESS, language=js,
    )  # fmt: skip
    yield case("recursion", "const f = () => f(); f();", ERROR, language=js)
    yield case(
        "a loop that takes turns only", "const spin = () => Promise.resolve().then(spin); spin();", TIMEOUT, language=js,
        timeout=2, evidence=lambda record: record.cause is not Cause.WALL_CLOCK or timed(record),
        sampled=frozenset({MEMORY}),  # its garbage may stand at the limit when a sample is taken
    )  # fmt: skip
    yield case(
        "100,000 threads",
        'const { Worker } = require("worker_threads"); for (let n = 0; n < 100000; n++) new Worker("setInterval(() => {}, 1000)", { eval: true });',
        PIDS, MEMORY, SIGNAL, ERROR, language=js, memory_mib=1024,
    )  # fmt: skip


NEIGHBOUR = """
import os, signal, threading, time
open("/tmp/mine", "w").write("mine")
print("ready", flush=True)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
    if os.fork() == 0: os._exit(0)
    os.wait()
    open("/tmp/more", "wb").write(bytes(1 << 20))
    time.sleep(0.01)
print(open("/tmp/mine").read(), len(bytearray(32 << 20)))
"""


@pytest.mark.parametrize("ending", list(endings()), ids=str)
def test_a_hostile_program_has_its_answer_in_time_and_harms_nobody(executor: RemoteExecutor, ending: Ending) -> None:
    """The right status and cause with their evidence, once, within the limit; a neighbour unharmed; nothing left."""
    before = Remains.of(executor)
    neighbour = executor.start(NEIGHBOUR, timeout=60)
    neighbour.says("ready")
    call = executor.start(ending.code, language=ending.language, timeout=ending.timeout, memory_mib=ending.memory_mib)
    result = call.result()
    (record,) = result.attempts  # what the program did is never tried again
    allowed = ending.expected | (ending.sampled if record.memory_method == "sampling" else frozenset())
    assert (result.status, result.cause) in allowed, result
    assert ending.evidence(record), record
    assert record.evidence.memory_limit_bytes == ending.memory_mib * MIB
    assert record.ended_at - record.started_at < ending.timeout + LOADED_SECONDS
    assert call.heard_at - record.ended_at < LOADED_SECONDS
    beside = neighbour.result()
    assert (beside.status, beside.stdout) == (Status.SUCCESS, f"ready\nmine {32 << 20}\n"), beside
    wait_for_nothing_left(executor, before)


ORPHANS = """
import os
for _ in range(10):
    for _ in range(50):
        if os.fork() == 0:
            if os.fork() == 0: os._exit(0)
            os._exit(0)
        os.wait()
states = []
while len(states) != 2:
    states = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try: states.append(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0])
        except OSError: pass
print("Z" in states, len(states))
"""


def test_500_orphans_leave_no_zombie(executor: RemoteExecutor) -> None:
    """In the end there are pid 1 and the program, and the process limit was never reached."""
    result = executor.run(ORPHANS)
    assert (result.status, result.stdout) == (Status.SUCCESS, "False 2\n"), result
    assert result.attempts[0].evidence.process_limit_hits in (0, None)


def test_partial_output_is_kept_on_every_ending(executor: RemoteExecutor) -> None:
    """What was written before a timeout, a kill for memory, a flood or a signal is in the result."""
    said = "import os, signal\nprint('partial ü', flush=False)\nos.write(2, b'err')\n"
    ends: dict[str, tuple[str, dict[str, float]]] = {
        "timeout": ("while True: pass", {"timeout": 1}),
        "killed": ("x = []\nwhile True: x.append(b'x' * (1 << 20))", {"memory_mib": 128}),
        "signal": ("os.kill(os.getpid(), signal.SIGKILL)", {}),
        "exit": ("os._exit(3)", {}),
    }
    for code, more in ends.values():
        result: ToolResult = executor.run(said + code, **more)
        assert result.status is not Status.SUCCESS
        assert result.stdout == "partial ü\n"
        assert result.stderr.startswith("err")


def test_the_limit_is_kept_to_a_second(executor: RemoteExecutor) -> None:
    """Of five timeouts of one second, the quickest took no second longer: none of it is a fixed delay."""
    took = []
    for _ in range(5):
        (record,) = executor.run("while True: pass", timeout=1).attempts
        took.append(record.ended_at - record.started_at - 1)
    assert 0 <= min(took) < GRACE_SECONDS
