"""What a killed launcher left behind goes at the next start; what belongs to a living one stays."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.isolation import cgroups
from sandbox.isolation.confine import _locked_directory, _sweep
from sandbox.isolation.memory import PREFIX
from tests.sandbox.isolation.conftest import Rig


def test_a_skeleton_whose_lock_nobody_holds_is_removed(tmp_path: Path) -> None:
    """The lock ends with its process, however that ends; others' directories and files are left alone."""
    alive, lock = _locked_directory(tmp_path)
    dead = tmp_path / "sluicegate-launcher-dead"
    (dead / "root" / "etc").mkdir(parents=True)
    (tmp_path / "audit.jsonl").write_text("kept")
    (tmp_path / "sluicegate-launcher-link").symlink_to("/usr")
    _sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, "audit.jsonl", "sluicegate-launcher-link"}
    fcntl.flock(lock, fcntl.LOCK_UN)
    _sweep(tmp_path)
    assert not alive.exists()
    os.close(lock)


def test_a_process_that_ended_is_dead_under_its_old_name() -> None:
    """By pid and start time; a zombie and a reused number are dead, too."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = cgroups.start_time(process.pid)
        assert not cgroups._is_dead(f"{PREFIX}{process.pid}-{started}")
        assert cgroups._is_dead(f"{PREFIX}{process.pid}-1")
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert cgroups._is_dead(f"{PREFIX}{process.pid}-{started}")  # not waited for yet
    assert cgroups._is_dead(f"{PREFIX}{process.pid}-{started}")
    assert not cgroups._is_dead(f"{PREFIX}something-else")


def test_cgroups_of_the_dead_are_swept_at_the_next_start(rig: Rig) -> None:
    """With all below them; those of a living launcher are left."""
    if not rig.launcher.memory_method.startswith("cgroup"):
        pytest.skip("there are none")
    own = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{PREFIX}{rig.launcher.pid}-*")]
    assert own
    left = Path(own[0]).parent / f"{PREFIX}4194305-1"  # above the greatest pid there can be
    (left / "7").mkdir(parents=True)

    async def start_and_close() -> None:
        async with rig.another():
            pass

    rig.do(start_and_close())
    assert not left.exists()
    assert all(Path(path).is_dir() for path in own)
