"""Which writable file systems were full when a program ended is seen, and seeing it keeps nothing alive."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.isolation.client import FullFilesystem, KillReason, Launcher
from sandbox.isolation.filesystems import Filesystems
from sandbox.isolation.plan import MIB, Tmpfs
from tests.sandbox.isolation.conftest import Outcome, Rig, make_plan
from tests.sandbox.isolation.test_launcher import descriptors_of, first_output

TARGETS = ("/workspace", "/tmp", "/dev/shm")
SMALL = tuple(Tmpfs(target, 4 * MIB, 64) for target in TARGETS)

BY_BYTES = """
import errno
try:
    with open("{target}/big", "wb", buffering=0) as file:
        while True: file.write(bytes(100_000))
except OSError as error:
    print(error.errno == errno.ENOSPC, flush=True)
"""
BY_INODES = """
import errno
try:
    for number in range(1000): open(f"{target}/{{number}}", "x").close()
except OSError as error:
    print(error.errno == errno.ENOSPC, flush=True)
"""
NAMELESS = """
import os
file = os.open("{target}", os.O_TMPFILE | os.O_RDWR)
try:
    while True: os.write(file, bytes(100_000))
except OSError:
    print("full", flush=True)
"""
DELETES = "import os\nfor name in os.listdir('{target}'):\n    if name != 'main.py': os.unlink(f'{target}/{{name}}')\n"
STAYS = "while True: pass\n"


@pytest.fixture(scope="module", params=["auto", "sampling"])
def launcher(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """By either way of limiting memory."""
    if request.param == "auto":
        yield rig.launcher
        return
    launcher = rig.do(rig.start(memory_method="sampling"))
    yield launcher
    rig.do(launcher.close())


@pytest.fixture
def run(rig: Rig, launcher: Launcher) -> Callable[..., Outcome]:
    def run(code: str, **changes: object) -> Outcome:
        return rig.do(rig.run_async(code, launcher=launcher, tmpfs=SMALL, **changes))

    return run


@pytest.mark.parametrize("target", TARGETS)
def test_one_without_a_free_block_is_reported(run: Callable[..., Outcome], target: str) -> None:
    """With its numbers, and no other is."""
    outcome = run(BY_BYTES.format(target=target))
    assert (outcome.stdout, outcome.ending.exit_code) == ("True\n", 0)
    (full,) = outcome.ending.full_filesystems
    assert (full.target, full.exhausted) == (target, "bytes")
    assert full.size_bytes == full.used_bytes == 4 * MIB
    assert 1 <= full.used_inodes < full.inodes == 64


@pytest.mark.parametrize("target", TARGETS)
def test_one_without_a_free_inode_is_reported(run: Callable[..., Outcome], target: str) -> None:
    """With its numbers, and no other is."""
    outcome = run(BY_INODES.format(target=target))
    assert (outcome.stdout, outcome.ending.exit_code) == ("True\n", 0)
    (full,) = outcome.ending.full_filesystems
    assert (full.target, full.exhausted) == (target, "inodes")
    assert full.used_inodes == full.inodes == 64
    assert full.used_bytes < full.size_bytes == 4 * MIB


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fill", [BY_BYTES, BY_INODES])
def test_one_that_was_full_and_is_no_more_is_not_reported(run: Callable[..., Outcome], fill: str, target: str) -> None:
    """It was refused something, but not at its end."""
    outcome = run((fill + DELETES).format(target=target))
    assert outcome.stdout == "True\n"
    assert outcome.ending.full_filesystems == ()


def test_a_page_short_of_full_is_not_full(run: Callable[..., Outcome]) -> None:
    """One more page can be written; with that page, no more."""
    code = "open('/tmp/big', 'wb').write(bytes({}))"
    assert run(code.format(4 * MIB - 4096)).ending.full_filesystems == ()
    assert [one.exhausted for one in run(code.format(4 * MIB)).ending.full_filesystems] == ["bytes"]


def test_an_ordinary_program_fills_nothing(run: Callable[..., Outcome]) -> None:
    """Nor does it come near the limit of processes."""
    ending = run("open('x', 'w').write('y')").ending
    assert (ending.full_filesystems, ending.pids_limit_hits, ending.oom_kills) == ((), 0, 0)
    assert ending.pids_limit == make_plan().pids


def test_all_that_are_full_are_reported(run: Callable[..., Outcome]) -> None:
    """In the order of the plan."""
    outcome = run("".join(BY_BYTES.format(target=target) for target in reversed(TARGETS)))
    assert [one.target for one in outcome.ending.full_filesystems] == list(TARGETS)


def test_files_without_a_name_count_while_an_orphan_holds_them(run: Callable[..., Outcome]) -> None:
    """The program has ended, what it left behind has not; once all have let go, the file system is empty.

    The kernel ends the orphan while the account is taken: which of the two is first is not for us to say.
    """
    orphan = "import signal\nif os.fork() == 0: signal.pause()\n"
    assert run(NAMELESS.format(target="/tmp")).ending.full_filesystems == ()
    endings = (run(NAMELESS.format(target="/tmp") + orphan).ending for _ in range(20))
    assert any([one.target for one in ending.full_filesystems] == ["/tmp"] for ending in endings)


@pytest.mark.parametrize("fill", [BY_BYTES, NAMELESS])
def test_one_that_is_full_at_a_kill_is_reported(rig: Rig, launcher: Launcher, fill: str) -> None:
    """As it was just before, with what had no name."""

    async def scenario() -> tuple[KillReason | None, tuple[FullFilesystem, ...]]:
        code = fill.format(target="/tmp") + STAYS
        async with rig.prepared(code, launcher=launcher, tmpfs=SMALL) as sandbox:
            await sandbox.release()
            await first_output(sandbox.stdout)
            await sandbox.kill(KillReason.OUTPUT)
            ending = await sandbox.ended()
            return ending.killed_by_us, ending.full_filesystems

    reason, full = rig.do(scenario())
    assert reason is KillReason.OUTPUT
    assert [(one.target, one.exhausted) for one in full] == [("/tmp", "bytes")]


def tmpfs_bytes() -> int:
    """What all files of all tmpfs of this machine hold."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


@pytest.mark.parametrize("stage", ["prepared", "running", "ended"])
def test_what_was_in_them_is_gone_with_the_sandbox(rig: Rig, launcher: Launcher, stage: str) -> None:
    """Their memory and their descriptors, while another sandbox is being prepared and others wait."""
    size = 192 * MIB
    large = (Tmpfs("/workspace", MIB, 64), Tmpfs("/tmp", size, 64))
    code = f"open('/tmp/big', 'wb').write(bytes({size}))\nprint('full', flush=True)\n"

    async def scenario() -> tuple[int, int, int]:
        async with rig.prepared("pass", launcher=launcher):
            for _ in range(2):  # by then, what waits has all that it will have
                await rig.run_async("pass", launcher=launcher)
                await asyncio.sleep(0.2)
            descriptors, before = descriptors_of(launcher.pid), tmpfs_bytes()
            during = before
            async with rig.prepared(
                code + (STAYS if stage == "running" else ""), launcher=launcher, tmpfs=large, memory_bytes=1024 * MIB
            ) as sandbox:
                if stage != "prepared":
                    await sandbox.release()
                    await first_output(sandbox.stdout)
                    during = tmpfs_bytes()
                if stage != "ended":
                    await sandbox.kill(KillReason.TIMEOUT)
                ending = await sandbox.ended()
                after = tmpfs_bytes()
                assert [one.target for one in ending.full_filesystems] == ([] if stage == "prepared" else ["/tmp"])
            if stage == "running":
                assert during - before > size // 2, "the control: what is in them is seen"
            return after - before, descriptors_of(launcher.pid) - descriptors, size

    grown, descriptors, size = rig.do(scenario())
    assert grown < size // 2
    assert descriptors == 0


def test_closed_ones_keep_their_last_account(tmp_path: Path) -> None:
    """The descriptors are given back once; what was seen last stays."""
    fds = [os.open(tmp_path, os.O_PATH) for _ in range(2)]
    filesystems = Filesystems(SMALL[:2], fds)
    seen = filesystems.memory_bytes()
    filesystems.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    filesystems.close()
    assert seen > 0
    assert filesystems.memory_bytes() > 0


BOMB = textwrap.dedent("""
    import os, signal
    refused = 0
    while refused < 5:
        try:
            if os.fork() == 0: signal.pause()
        except BlockingIOError:
            refused += 1
    print("refused", flush=True)
    signal.pause()
""")
THREADS = textwrap.dedent("""
    import threading
    waiting = threading.Event()
    try:
        while True: threading.Thread(target=waiting.wait, daemon=True).start()
    except RuntimeError:
        print("refused", flush=True)
    import signal
    signal.pause()
""")


@pytest.mark.parametrize("code", [BOMB, THREADS])
def test_tasks_beyond_the_limit_are_counted(rig: Rig, launcher: Launcher, code: str) -> None:
    """Processes and threads alike; the limit in force is named."""

    async def scenario() -> tuple[int | None, int]:
        async with rig.prepared(code, launcher=launcher, pids=20) as sandbox:
            await sandbox.release()
            assert (await first_output(sandbox.stdout)).startswith(b"refused")
            if launcher.memory_method == "sampling":  # for several samples' time
                await rig.run_async("import time; time.sleep(0.5)", launcher=launcher)
            await sandbox.kill(KillReason.TIMEOUT)
            ending = await sandbox.ended()
            return ending.pids_limit, ending.pids_limit_hits

    limit, hits = rig.do(scenario())
    assert limit == 20
    assert hits >= (5 if code is BOMB and launcher.memory_method != "sampling" else 1)


def test_tasks_below_the_limit_are_not_counted(rig: Rig, launcher: Launcher) -> None:
    """One fewer than allowed, for as long as would be seen: pid 1, the program and its children."""
    code = (
        "import os, signal, time\nchildren = []\n"
        "for _ in range(17):\n    pid = os.fork()\n    if pid == 0: signal.pause()\n"
        "print('up', flush=True)\ntime.sleep(0.3)"
    )
    outcome = rig.do(rig.run_async(code, launcher=launcher, pids=20))
    assert outcome.stdout == "up\n"
    assert outcome.ending.pids_limit_hits == 0
