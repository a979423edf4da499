"""Whatever ends a sandbox or its launcher, at whatever moment, nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.isolation import cgroups, syscalls
from sandbox.isolation.client import Ending, IsolationUnavailable, KillReason, Launcher, LauncherConfig, Sandbox
from sandbox.isolation.plan import Tmpfs
from tests.sandbox.isolation.conftest import PATIENCE_SECONDS, Rig, finish, make_plan

SPINNING = (
    "import os, time\n"
    "for _ in range(3):\n"
    "    if os.fork() == 0:\n"
    "        os.setsid()\n"
    "        while True: pass\n"
    "print('up', flush=True)\nwhile True: pass\n"
)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found[1:]


def groups_of(pid: int) -> list[str]:
    """The cgroup directories of the sandboxes of a launcher."""
    return [str(p) for p in Path("/sys/fs/cgroup").glob(f"*/sluicegate-{pid}-*/*/")]


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def first_output(fd: int) -> bytes:
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await readable.wait()
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 65536)


async def all_gone(handles: list[int]) -> None:
    """Wait until every process behind these pidfds has ended."""
    loop = asyncio.get_running_loop()
    for handle in handles:
        gone = asyncio.Event()
        loop.add_reader(handle, gone.set)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await gone.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)


@pytest.mark.parametrize("stage", ["prepared", "released", "running"])
def test_a_kill_leaves_nothing_at_any_stage(rig: Rig, stage: str) -> None:
    """No process, cgroup or descriptor; the reason is in the ending."""

    async def scenario() -> tuple[Ending, list[int], list[str], int]:
        async with rig.another() as launcher:
            await rig.run_async("pass", launcher=launcher)
            before = descriptors_of(launcher.pid)
            async with rig.prepared(SPINNING, launcher=launcher) as sandbox:
                if stage != "prepared":
                    await sandbox.release()
                if stage == "running":
                    assert (await first_output(sandbox.stdout)).startswith(b"up")
                assert len(descendants(launcher.pid)) >= 2
                await sandbox.kill(KillReason.TIMEOUT)
                ending = await sandbox.ended()
                left = descendants(launcher.pid), groups_of(launcher.pid)
            return ending, *left, descriptors_of(launcher.pid) - before

    ending, processes, groups, descriptors = rig.do(scenario())
    assert (ending.killed_by_us, ending.exit_code, ending.signal, ending.failure) == (
        KillReason.TIMEOUT,
        None,
        None,
        None,
    )
    assert (processes, groups, descriptors) == ([], [], 0)


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 100, 400])
def test_a_launch_that_is_cancelled_leaves_nothing(rig: Rig, turns: int) -> None:
    """Wherever in its course the cancellation falls, here after so many turns of the event loop."""

    async def scenario() -> tuple[list[int], list[str]]:
        async with rig.another() as launcher:
            task = asyncio.create_task(launcher.launch(make_plan(), code=b"while True: pass"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await (await task).close()
            except asyncio.CancelledError:
                pass
            return descendants(launcher.pid), groups_of(launcher.pid)

    assert rig.do(scenario()) == ([], [])


def test_after_many_sandboxes_nothing_has_grown(rig: Rig) -> None:
    """100, ended in every manner, four at a time: descriptors of both sides, processes and cgroups as before."""
    codes = [
        "pass",
        "1/0",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.fork(); os._exit(0)",
        "while True: pass",
    ]

    async def one(launcher: Launcher, number: int) -> None:
        code = codes[number % len(codes)]
        async with rig.prepared(code, launcher=launcher) as sandbox:
            if code.startswith("while"):
                sandbox.close_listeners()
                await sandbox.release()
                await sandbox.kill(KillReason.CANCELLED)
            else:
                await finish(sandbox)

    async def scenario() -> tuple[int, int, list[int], list[str]]:
        async with rig.another() as launcher:
            await one(launcher, 0)
            ours, theirs = descriptors_of(os.getpid()), descriptors_of(launcher.pid)
            for start in range(0, 100, 4):
                await asyncio.gather(*(one(launcher, number) for number in range(start, start + 4)))
            return (
                descriptors_of(os.getpid()) - ours,
                descriptors_of(launcher.pid) - theirs,
                descendants(launcher.pid),
                groups_of(launcher.pid),
            )

    assert rig.do(scenario()) == (0, 0, [], [])


def test_sigkill_of_the_launcher_ends_its_sandboxes(rig: Rig) -> None:
    """The kernel sees to it; the executor is told, and no cgroup is left."""

    async def scenario() -> tuple[list[Ending], str, list[str]]:
        launcher = await rig.start()
        running, waiting = (
            await launcher.launch(make_plan(), code=SPINNING.encode()),
            await launcher.launch(make_plan(), code=b"pass"),
        )
        await running.release()
        assert (await first_output(running.stdout)).startswith(b"up")
        processes = descendants(launcher.pid)
        assert len(processes) >= 2 + 2 + 4  # two bwraps, two of pid 1, the program and its forks
        handles = [syscalls.pidfd_open(pid) for pid in processes]
        os.kill(launcher.pid, signal.SIGKILL)
        await all_gone(handles)
        await launcher.lost.wait()
        endings = [await running.ended(), await waiting.ended()]
        with pytest.raises(IsolationUnavailable) as caught:
            await launcher.launch(make_plan(), code=b"pass")
        for sandbox in (running, waiting):
            await sandbox.close()
        pid = launcher.pid
        await launcher.close()
        return endings, str(caught.value), [str(p) for p in Path("/sys/fs/cgroup").glob(f"*/sluicegate-{pid}-*")]

    endings, message, left = rig.do(scenario())
    assert [ending.failure for ending in endings] == ["the launcher was lost"] * 2
    assert message == "the launcher was lost"
    assert left == []


def test_sigkill_of_the_launcher_while_sandboxes_start_leaves_nothing(rig: Rig) -> None:
    """Whenever it comes: what bubblewrap itself cannot clean up, the next start of a launcher does."""

    def ours() -> set[int]:
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                if arguments[0] == "bwrap" and marker in arguments:
                    found.add(int(name))
        return found

    marker = f"marker-{os.getpid()}"

    async def scenario() -> set[int]:
        plan = make_plan()
        plan = replace(plan, argv=(*plan.argv[:-1], "-X", marker, plan.argv[-1]))
        for number in range(20):
            launcher = await rig.start()
            tasks = [asyncio.create_task(launcher.launch(plan, code=b"while True: pass")) for _ in range(2)]
            for _ in range(number % 6):
                await asyncio.sleep(0)
            while number >= 6 and not ours() and not all(task.done() for task in tasks):  # noqa: ASYNC110
                await asyncio.sleep(0)
            os.kill(launcher.pid, signal.SIGKILL)
            for sandbox in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(sandbox, Sandbox):
                    await sandbox.close()
            await launcher.close()
        handles = []
        for pid in ours():
            with contextlib.suppress(ProcessLookupError):
                handles.append(syscalls.pidfd_open(pid))
        await (await rig.start()).close()
        await all_gone(handles)
        return ours()

    assert rig.do(scenario()) == set()


def test_closing_the_launcher_ends_its_sandboxes(rig: Rig) -> None:
    """They are told to be cancelled."""

    async def scenario() -> Ending:
        launcher = await rig.start()
        sandbox = await launcher.launch(make_plan(), code=SPINNING.encode())
        await sandbox.release()
        await first_output(sandbox.stdout)
        handles = [syscalls.pidfd_open(pid) for pid in descendants(launcher.pid)]
        await launcher.close()
        await all_gone(handles)
        ending = await sandbox.ended()
        await sandbox.close()
        return ending

    assert rig.do(scenario()).killed_by_us is KillReason.CANCELLED


def test_the_end_of_the_executor_ends_launcher_and_sandboxes(rig: Rig, tmp_path: Path) -> None:
    """SIGKILL of the process that started the launcher: nothing it started survives."""
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from sandbox.isolation.client import Launcher, LauncherConfig\n"
        "from tests.sandbox.isolation.conftest import make_plan\n"
        "async def main():\n"
        "    launcher = await Launcher.start(LauncherConfig(state_dir=Path(sys.argv[1])))\n"
        "    sandbox = await launcher.launch(make_plan(), code=sys.argv[2].encode())\n"
        "    await sandbox.release()\n"
        "    while not sys.stdin.closed:\n"
        "        try: import os; print(os.read(sandbox.stdout, 99), launcher.pid, flush=True); break\n"
        "        except BlockingIOError: await asyncio.sleep(0)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), SPINNING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout is not None
        line = executor.stdout.readline()
        assert line.startswith("b'up")
        handles = [syscalls.pidfd_open(pid) for pid in descendants(executor.pid)]
        assert len(handles) >= 1 + 2 + 4
        executor.kill()
    rig.do(all_gone(handles))
    rig.do(_start_and_close(rig, tmp_path))  # the next start sweeps
    assert [str(p) for p in Path("/sys/fs/cgroup").glob(f"*/sluicegate-{line.split()[-1]}-*")] == []
    assert list(tmp_path.iterdir()) == []


async def _start_and_close(rig: Rig, state_dir: Path) -> None:
    await (await Launcher.start(LauncherConfig(state_dir=state_dir))).close()


def test_a_descendant_that_holds_the_pipes_delays_nothing(rig: Rig) -> None:
    """A daemon with its own session ends with the program."""
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('done')"
    outcome = rig.run(code)
    assert (outcome.stdout, outcome.ending.exit_code) == ("done\n", 0)


def test_a_fork_bomb_is_bounded_and_killed(rig: Rig) -> None:
    """By its own limit, which is in the evidence; and one kill ends all of it."""

    async def scenario() -> tuple[Ending, list[int]]:
        async with rig.another() as launcher:
            code = "import os\nprint('up', flush=True)\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
            async with rig.prepared(code, launcher=launcher, pids=40) as sandbox:
                sandbox.close_listeners()
                await sandbox.release()
                await first_output(sandbox.stdout)
                while len(descendants(launcher.pid)) < 35:  # noqa: ASYNC110 - no one tells
                    await asyncio.sleep(0)
                most = 0
                for _ in range(50):
                    most = max(most, len(descendants(launcher.pid)))
                    await asyncio.sleep(0)
                await sandbox.kill(KillReason.TIMEOUT)
                ending = await sandbox.ended()
            assert most <= 40 + 2  # and bwrap, and a helper
            return ending, descendants(launcher.pid)

    ending, left = rig.do(scenario())
    assert (ending.killed_by_us, left) == (KillReason.TIMEOUT, [])
    if rig.launcher.memory_method.startswith("cgroup"):
        assert ending.pids_limit_hits > 0


def test_endless_output_ends_with_the_kill_and_is_counted(rig: Rig) -> None:
    """The cap is exact, the count goes on, and the program was never blocked by a full pipe."""
    from sandbox.output import Collector

    async def scenario() -> tuple[int, int, bool, int]:
        code = "import os\nwhile True: os.write(1, b'y' * 65536); os.write(2, b'z' * 65536)"
        async with rig.prepared(code) as sandbox:
            seen = 0

            def sink(data: bytes) -> None:
                nonlocal seen
                seen += len(data)

            collector = Collector(1_000_000, 100_000, stdout_sink=sink)
            collecting = asyncio.create_task(collector.collect(sandbox.stdout, sandbox.stderr))
            sandbox.close_listeners()
            await sandbox.release()
            while seen < 50_000_000:  # noqa: ASYNC110 - the collector tells nobody
                await asyncio.sleep(0)
            await sandbox.kill(KillReason.TIMEOUT)
            await sandbox.ended()
            await collecting
            output = collector.finish()
            assert output.stdout.chars == seen
            return len(output.stdout.text), len(output.stderr.text), output.stderr.truncated, seen

    kept_out, kept_err, truncated, seen = rig.do(scenario())
    assert (kept_out, kept_err, truncated) == (1_000_000, 100_000, True)
    assert seen >= 50_000_000


def test_what_bubblewrap_says_is_ours_and_not_the_programs(rig: Rig) -> None:
    """A mount that cannot be fails the launch, or the sandbox that was already prepared, with bubblewrap's words."""

    async def scenario() -> tuple[str | None, str]:
        tmpfs = (*make_plan().tmpfs, Tmpfs("/usr/not/there", 4096, 10))
        try:
            outcome = await rig.run_async("print('ran')", tmpfs=tmpfs)
        except IsolationUnavailable as error:
            return str(error), ""
        return outcome.ending.failure, outcome.stdout + outcome.stderr

    message, output = rig.do(scenario())
    assert message is not None
    assert message.startswith("bwrap: ")
    assert output == ""


def test_an_interpreter_that_cannot_start_is_our_failure(rig: Rig) -> None:
    """Its message is the failure's, and the program's output is empty."""
    for argv, words in (
        (("/usr/bin/python3", "/no/such/file"), "No such file"),
        (("/usr/bin/false",), "pid 1 of the sandbox ended without a report"),
    ):
        try:
            outcome = rig.run("print('ran')", argv=argv)
        except IsolationUnavailable as error:  # it ended before the launch did
            assert words in str(error)  # noqa: PT017
            continue
        assert outcome.ending.failure is not None
        assert words in outcome.ending.failure
        assert (outcome.stdout, outcome.stderr, outcome.ending.exit_code) == ("", "", None)


def test_without_bubblewrap_the_start_is_refused_with_the_remedy(rig: Rig) -> None:
    """There is no weaker mode."""
    with pytest.raises(IsolationUnavailable, match="hint: install the package `bubblewrap`"):
        rig.do(rig.start(bwrap="no-such-bwrap"))


def test_the_launcher_keeps_no_privilege(rig: Rig) -> None:
    """Every uid and gid is the unprivileged one, no capability, no supplementary group of root's, no_new_privs."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{rig.launcher.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    if os.getuid() == 0:
        assert set(status["Uid"].split()) == {str(0x7000_0000 + rig.launcher.pid)}
        assert set(status["Gid"].split()) == {str(0x7000_0000 + rig.launcher.pid)}
        assert status["Groups"].strip() == ""
    assert (status["CapEff"], status["CapPrm"], status["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")


def test_the_launcher_sees_only_what_sandboxes_may(rig: Rig) -> None:
    """Started as root, it has a root directory of its own without the host's files."""
    if os.getuid() != 0:
        pytest.skip("as an ordinary user it is confined by being that user")
    names = set(os.listdir(f"/proc/{rig.launcher.pid}/root"))
    assert {"usr", "proc", "dev", "skeleton", "sources"} <= names
    assert not names & {"etc", "root", "home", "var", "work", "sys"}


def test_a_pid_1_that_ends_without_a_report_is_not_our_failure_once_the_program_runs(rig: Rig) -> None:
    """Whatever it was that ended it, the program is what could."""

    async def scenario() -> Ending:
        async with rig.another() as launcher, rig.prepared(SPINNING, launcher=launcher) as sandbox:
            await sandbox.release()
            await first_output(sandbox.stdout)
            for pid in descendants(launcher.pid):
                if re.search(r"^NSpid:.*\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                    os.kill(pid, signal.SIGKILL)
                    break  # the others go with it
            return await sandbox.ended()

    ending = rig.do(scenario())
    assert (ending.released, ending.failure, ending.exit_code, ending.signal, ending.killed_by_us) == (
        True, None, None, None, None,
    )  # fmt: skip


def test_whoever_finds_the_launcher_gone_knows_that_it_is_lost(rig: Rig) -> None:
    """`lost` is set when the first call that meets its end raises, and before the endings are there."""

    async def scenario() -> list[bool]:
        launcher = await rig.start()
        sandbox = await launcher.launch(make_plan(), code=SPINNING.encode())
        await sandbox.release()
        await first_output(sandbox.stdout)  # so its helper has gone, which had all descriptors of the launcher
        ended = asyncio.create_task(sandbox.ended())
        seen: list[bool] = []
        ended.add_done_callback(lambda _: seen.append(launcher.lost.is_set()))
        handle = syscalls.pidfd_open(launcher.pid)
        os.kill(launcher.pid, signal.SIGKILL)
        select.select([handle], [], [])  # blocking: the loop must not hear of it first
        os.close(handle)
        with pytest.raises(IsolationUnavailable, match="the launcher was lost"):
            await sandbox.release()
        seen.append(launcher.lost.is_set())
        await ended
        await asyncio.sleep(0)
        await sandbox.close()
        await launcher.close()
        return seen

    assert rig.do(scenario()) == [True, True]


FLYING = """
import array, os, socket, time
fd, pairs, most = os.open("/dev/null", 0), [], 0
for size in (250, 25, 1):
    try:
        while len(pairs) < 300:
            pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
            pairs[-1][0].setblocking(False)
            try:
                while True:
                    pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * size))])
                    most += size
            except BlockingIOError:
                pass
    except OSError:
        pass
print(f"{most}", flush=True)
time.sleep(600)
"""


def test_descriptors_kept_on_their_way_stop_no_other_sandbox(rig: Rig) -> None:
    """As many as the kernel lets one sandbox have, under a launcher whose own limit was as low when it started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("`doctor` fails on this host")

    async def scenario() -> tuple[int, list[str], bool]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            launcher = await rig.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            async with rig.prepared(FLYING, launcher=launcher) as sandbox:
                await sandbox.release()
                flying = int((await first_output(sandbox.stdout)).split()[-1])
                outputs = [(await rig.run_async("print('fine')", launcher=launcher)).stdout for _ in range(3)]
            return flying, outputs, launcher.lost.is_set()
        finally:
            await launcher.close()

    flying, outputs, lost = rig.do(scenario())
    assert 256 < flying < 4096
    assert (outputs, lost) == (["fine\n"] * 3, False)


ONE_FAILS = """
import errno, os, sys
from pathlib import Path
from tests.sandbox.isolation.conftest import make_plan
from sandbox.isolation.client import LauncherConfig
from sandbox.isolation.confine import confine
from sandbox.isolation.poller import Poller
from sandbox.isolation.supervision import Supervision

def send(message, fds):
    if message["id"] == 1:
        raise OSError(errno.ETOOMANYREFS, "too many references")
    prepared.append(message["id"])

def finished(number, ending):
    endings[number] = ending
    del alive[number]

plan, null, prepared, endings, alive = make_plan(), os.open(os.devnull, os.O_RDWR), [], {}, {}
confinement, poller = confine(LauncherConfig(state_dir=Path(sys.argv[1])).as_message(), os.getppid()), Poller()
for number in (1, 2):
    alive[number] = Supervision(
        number, plan, [null] * 3, confinement=confinement, poller=poller, send=send, finished=finished
    )
while 1 in alive or not prepared:
    poller.run_once()
alive[2].kill("cancelled")
while alive:
    poller.run_once()
print(endings[1]["failure"], "|", endings[2]["failure"], endings[2]["killed_by_us"], *confinement.leftovers)
confinement.clean_up()
"""


def test_an_error_in_one_sandbox_is_the_end_of_that_one(tmp_path: Path) -> None:
    """The kernel refuses to send its listeners: it fails, with the reason, and its neighbour is prepared and ended."""
    # With the name by which other launchers know that what it starts is no orphan.
    command = [sys.executable, "-c", ONE_FAILS, str(tmp_path), "sandbox.isolation.launcher"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert answer.returncode == 0, answer.stderr
    first, _, second = answer.stdout.partition("|")
    assert "too many references" in first
    failure, reason, *leftovers = second.split()
    assert (failure, reason) == ("None", "cancelled")
    for directory in leftovers:
        cgroups.remove_tree(directory)


def test_one_sandbox_has_only_a_part_of_the_inotify_instances(rig: Rig) -> None:
    """The kernel counts them by uid, which all sandboxes of a launcher share."""
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nn = 0\nwhile libc.inotify_init() >= 0: n += 1\n"
        "print(n, flush=True)\nimport time; time.sleep(600)"
    )

    async def scenario() -> tuple[int, str]:
        async with rig.another() as launcher, rig.prepared(code, launcher=launcher) as sandbox:
            await sandbox.release()
            first = int(await first_output(sandbox.stdout))
            other = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
            return first, (await rig.run_async(other, launcher=launcher)).stdout

    assert rig.do(scenario()) == (32, "True\n")
