"""A directory of the host's in a sandbox that already waits, and what becomes of it when things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sandbox.isolation import trees
from sandbox.isolation.client import Ending, IsolationUnavailable, KillReason, Launcher
from sandbox.isolation.plan import Workdir
from sandbox.isolation.pool import WarmPool
from sandbox.isolation.trees import Trees
from sandbox.owners import Owner
from sandbox.workdir import Placed, WorkingDirectories
from tests.sandbox.isolation.conftest import Rig, finish, make_plan
from tests.sandbox.isolation.test_launcher import descendants, descriptors_of
from tests.sandbox.isolation.test_pool import settled

ROOT = os.getuid() == 0
PRINT = b"import os; print(os.getcwd(), sorted(os.listdir('.')), os.environ['HOME'])"


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[Placed]:
    directories = WorkingDirectories(tmp_path / "state")
    root = directories.user_root(Owner("", "alice"))
    (root / "file").touch()
    with directories.place(root, None, quota=None, client=False) as placed:
        yield placed


@pytest.fixture
def launcher(rig: Rig) -> Iterator[Launcher]:
    launcher = rig.do(rig.start())
    yield launcher
    rig.do(launcher.close())


async def run(launcher: Launcher, workdir: Workdir, code: bytes = PRINT) -> tuple[Ending, str]:
    sandbox = await launcher.launch(make_plan(), code=code, workdir=workdir)
    try:
        await sandbox.attach(workdir)
        outcome = await finish(sandbox)
        return outcome.ending, outcome.stdout
    finally:
        await sandbox.close()


def test_a_sandbox_that_waited_gets_the_directory_of_its_call(rig: Rig, launcher: Launcher, placed: Placed) -> None:
    """It needs no plan of its own; the next one, without a directory, has the empty one as ever."""

    async def scenario() -> tuple[bool, str, str]:
        pool = WarmPool(launcher, 1)
        await (await pool.launch(make_plan(), code=b"pass")).close()
        await settled(pool)
        waiting = pool.waiting
        sandbox = await pool.launch(make_plan(), code=PRINT, workdir=placed.workdir)
        await sandbox.attach(placed.workdir)
        with_one = (await finish(sandbox)).stdout
        other = await pool.launch(make_plan(), code=PRINT)
        without = (await finish(other)).stdout
        found = sandbox in waiting
        for one in (sandbox, other):
            await one.close()
        await pool.close()
        return found, with_one, without

    script = placed.workdir.script
    assert rig.do(scenario()) == (
        True,
        f"/workspace {sorted(['file', script])} /tmp\n",
        "/workspace ['main.py'] /workspace\n",
    )


def test_nothing_is_kept_open_for_it(rig: Rig, launcher: Launcher, placed: Placed) -> None:
    """Neither by the launcher nor here, whether the sandbox ran, was given up or had ended before."""

    async def scenario() -> list[int]:
        left = []
        await run(launcher, placed.workdir)
        placed.remove_script()
        before = descriptors_of(launcher.pid), descriptors_of(os.getpid())
        for stage in ("run", "attached", "prepared", "ended"):
            if stage == "run":
                await run(launcher, placed.workdir)
                placed.remove_script()
            else:
                sandbox = await launcher.launch(make_plan(), code=PRINT, workdir=placed.workdir)
                if stage == "ended":
                    await sandbox.kill(KillReason.CANCELLED)
                    await sandbox.ended()
                if stage != "prepared":
                    await sandbox.attach(placed.workdir)
                await sandbox.close()
            await run(launcher, placed.workdir)  # the launcher has heard all that was sent before
            placed.remove_script()
            left += [descriptors_of(launcher.pid) - before[0], descriptors_of(os.getpid()) - before[1]]
        return left

    assert rig.do(scenario()) == [0] * 8
    assert descendants(launcher.pid) == []


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 50, 200, 1000])
def test_a_kill_while_it_is_put_there_leaves_nothing(rig: Rig, launcher: Launcher, placed: Placed, turns: int) -> None:
    """Wherever it falls."""

    async def scenario() -> Ending:
        sandbox = await launcher.launch(make_plan(), code=b"while True: pass", workdir=placed.workdir)
        await sandbox.attach(placed.workdir)
        await sandbox.release()
        for _ in range(turns):
            await asyncio.sleep(0)
        await sandbox.kill(KillReason.TIMEOUT)
        ending = await sandbox.ended()
        await sandbox.close()
        return ending

    ending = rig.do(scenario())
    assert (ending.killed_by_us, ending.failure) == (KillReason.TIMEOUT, None)
    assert descendants(launcher.pid) == []
    assert str(placed.workdir.root) not in Path("/proc/self/mountinfo").read_text()


def test_a_helper_that_is_killed_costs_its_own_sandbox_only(rig: Rig, launcher: Launcher, placed: Placed) -> None:
    """At worst: whoever kills it as it starts, kills that sandbox, which says so, and the next is as ever."""

    async def scenario() -> tuple[list[Ending], str]:
        endings = []
        for _ in range(20):
            sandbox = await launcher.launch(make_plan(), code=b"pass", workdir=placed.workdir)
            before = set(psutil.Process(launcher.pid).children())
            await sandbox.attach(placed.workdir)
            await sandbox.release()
            for _ in range(50):
                for one in set(psutil.Process(launcher.pid).children()) - before:
                    with contextlib.suppress(psutil.Error):
                        one.send_signal(signal.SIGKILL)
                await asyncio.sleep(0)
            endings.append(await sandbox.ended())
            await sandbox.close()
            placed.remove_script()
        return endings, (await run(launcher, placed.workdir, b"print('as ever')"))[1]

    endings, output = rig.do(scenario())
    for ending in endings:
        assert ending.exit_code == 0 or "working directory could not be put" in (ending.failure or ""), ending
    assert output == "as ever\n"


@pytest.mark.parametrize("change", ["another", "removed", "link"])
def test_a_root_that_is_replaced_before_the_start_is_never_followed(
    rig: Rig, launcher: Launcher, placed: Placed, tmp_path: Path, change: str
) -> None:
    """What was opened is what is shown; where it must be found again by name and cannot be, the ending says so."""
    root = placed.workdir.root
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret").touch()

    async def scenario() -> tuple[Ending, str]:
        if change == "removed":
            (root / "file").unlink()
            root.rmdir()
        else:
            root.rename(root.with_name("kept"))
            (root.symlink_to if change == "link" else other.rename)(root if change != "link" else other)
        return await run(launcher, placed.workdir)

    ending, output = rig.do(scenario())
    assert "secret" not in output
    if change == "removed":
        assert ending.exit_code is None
        assert ending.failure is not None
    else:
        assert "'file'" in output


def test_a_working_directory_that_is_replaced_inside_is_never_entered(
    rig: Rig, launcher: Launcher, placed: Placed
) -> None:
    """The directory below the root is entered by name, and left at once if it is not the one that was looked at."""
    root = placed.workdir.root
    (root / "sub").mkdir(mode=0o777)
    (root / "sub").chmod(0o777)
    workdir = replace(placed.workdir, directory="sub")  # whose descriptor is of the root

    async def scenario() -> tuple[Ending, str]:
        return await run(launcher, workdir)

    ending, output = rig.do(scenario())
    assert output == ""
    assert ending.failure == "the working directory `/workspace/sub` was replaced while the call started"
    assert not ending.released
    assert list((root / "sub").iterdir()) == []


@pytest.mark.skipif(not ROOT, reason="only root maps owners")
class TestTrees:
    def test_a_mapping_is_made_once_for_each_owner(self, tmp_path: Path) -> None:
        """And all are given back; more than a bound are not kept."""
        before = len(os.listdir("/proc/self/fd"))
        made = Trees(0x7000_0001, 0x7000_0001)
        directory = os.open(tmp_path, os.O_PATH)
        assert not made.has_map((0, 0))
        for _ in range(3):
            os.close(made.detach(directory))
        assert made.has_map((0, 0))
        assert len(os.listdir("/proc/self/fd")) == before + 2
        for uid in range(1, trees._MAX_MAPS + 1):
            made.make_map((uid, uid))
        assert not made.has_map((0, 0))
        made.close()
        os.close(directory)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_what_cannot_be_mapped_is_named_with_a_remedy(self, rig: Rig, launcher: Launcher, placed: Placed) -> None:
        proc = os.open("/proc/self", os.O_PATH)
        workdir = replace(placed.workdir, root_fd=proc, root=Path("/proc/self"))
        with pytest.raises(
            IsolationUnavailable, match=r"`/proc/self` could not be made .*\nhint: keep the directory on"
        ):
            rig.do(run(launcher, workdir))
        os.close(proc)
