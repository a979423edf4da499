"""What a tree holds, and when that is too much."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.isolation.plan import MIB, Workdir
from sandbox.quota import MAX_DEPTH, Usage, find_excess, low_space, usage, watch
from tests import world

ENOUGH = 1 << 40


def count(path: Path, max_bytes: int = ENOUGH, max_files: int = ENOUGH, stop: threading.Event | None = None) -> Usage:
    descriptor = os.open(path, os.O_PATH)
    try:
        return usage(descriptor, max_bytes, max_files, stop)
    finally:
        os.close(descriptor)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    return tree


def workdir(tree: Path, max_bytes: int | None = MIB, max_files: int | None = 100) -> Workdir:
    descriptor = os.open(tree, os.O_PATH)
    return Workdir(tree, "", "script", descriptor, descriptor, max_bytes, max_files)


def test_it_counts_what_the_disk_gave(tree: Path) -> None:
    """Files and directories at any depth; not the length of holes; a file with two names once."""
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/file").write_bytes(b"x" * 100_000)
    os.link(tree / "a/b/file", tree / "again")
    with open(tree / "sparse", "wb") as file:
        file.truncate(1 << 30)
    found = count(tree)
    assert found.files == 5
    assert found.depth == 2
    assert 100_000 <= found.bytes < 200_000


def test_no_link_is_followed_and_nothing_is_waited_for(tree: Path, tmp_path: Path) -> None:
    """Not to a directory, a file, itself or a pipe."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/big").write_bytes(bytes(MIB))
    for name, target in (("dir", "../outside"), ("file", "../outside/big"), ("loop", "."), ("dangling", "nowhere")):
        (tree / name).symlink_to(target)
    os.mkfifo(tree / "pipe")
    found = count(tree)
    assert found.files == 5
    assert found.bytes < 100_000


def test_it_ends_as_soon_as_it_is_too_much(tree: Path) -> None:
    for number in range(500):
        (tree / f"f{number}").touch()
    assert count(tree, max_files=10).files == 11
    stop = threading.Event()
    stop.set()
    assert count(tree, stop=stop).files == 0
    for number in range(20):
        (tree / f"d{number}").mkdir()
        (tree / f"d{number}/big").write_bytes(bytes(200_000))
    assert count(tree, max_bytes=300_000).bytes < 600_000


def test_a_directory_that_its_owner_closed_is_counted(tree: Path) -> None:
    (tree / "closed").mkdir()
    (tree / "closed/big").write_bytes(bytes(500_000))
    (tree / "closed").chmod(0)
    assert count(tree).bytes >= 500_000
    (tree / "closed").chmod(0o700)


def test_directories_that_are_too_deep_are_too_much(tree: Path) -> None:
    """The count needs a descriptor for each level: it has so many and no more."""
    here = os.open(tree, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 50):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = len(os.listdir("/proc/self/fd"))
    assert count(tree).depth == MAX_DEPTH + 1
    assert len(os.listdir("/proc/self/fd")) == before
    one = workdir(tree, ENOUGH, ENOUGH)
    excess = find_excess(one)
    os.close(one.root_fd)
    assert excess is not None
    assert "deep" in excess.text


def test_a_tree_that_was_removed_holds_nothing(tree: Path) -> None:
    descriptor = os.open(tree, os.O_PATH)
    tree.rmdir()
    assert usage(descriptor, ENOUGH, ENOUGH) == Usage(0, 0, 0)
    os.close(descriptor)


def test_a_file_system_with_little_left_is_too_full_for_anybody(tree: Path) -> None:
    """A twentieth of a small one is kept, whatever the tree itself may hold."""
    with world.small_filesystem(tree, 20 * MIB):
        one = workdir(tree, None, None)
        assert low_space(one.root_fd) is None
        (tree / "big").write_bytes(bytes(19 * MIB + MIB // 2))
        found = find_excess(one)
        os.close(one.root_fd)
    assert found is not None
    assert "left on the host" in found.text


async def finished(one: Workdir, act: Callable[[], object]) -> str:
    watching = asyncio.create_task(watch(one))
    await asyncio.sleep(0)
    act()
    return (await asyncio.wait_for(watching, 30)).exhausted


@pytest.mark.parametrize("max_bytes", [MIB, 64 * MIB])
def test_a_watch_sees_what_is_written_after_its_start(tree: Path, max_bytes: int) -> None:
    one = workdir(tree, max_bytes)
    assert asyncio.run(finished(one, lambda: (tree / "big").write_bytes(bytes(2 * max_bytes)))) == "bytes"
    os.close(one.root_fd)


def test_a_watch_sees_files_too(tree: Path) -> None:
    one = workdir(tree)

    def fill() -> None:
        for number in range(200):
            (tree / f"f{number}").touch()

    assert asyncio.run(finished(one, fill)) == "inodes"
    os.close(one.root_fd)


def test_a_watch_that_is_cancelled_gives_its_descriptors_back_and_does_not_linger(tree: Path) -> None:
    for number in range(3000):
        (tree / f"f{number}").touch()
    one = workdir(tree, ENOUGH, ENOUGH)
    before = len(os.listdir("/proc/self/fd"))

    async def scenario() -> float:
        watching = asyncio.create_task(watch(one))
        await asyncio.sleep(1.4)  # within a count, or just after one
        started = time.monotonic()
        watching.cancel()
        await asyncio.wait({watching})
        return time.monotonic() - started

    assert asyncio.run(scenario()) < 5
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(one.root_fd)
