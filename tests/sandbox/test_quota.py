"""When what a tree holds is too much, and who looks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.isolation.plan import MIB, Workdir
from sandbox.quota import find_last_excess, find_usage, low_space, watch
from tests import world
from tests.remote_executor import until

ENOUGH = 1 << 40


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    return tree


def workdir(tree: Path, max_bytes: int | None = MIB, max_files: int | None = 100) -> Workdir:
    descriptor = os.open(tree, os.O_PATH)
    return Workdir(tree, "", "script", descriptor, descriptor, max_bytes, max_files)


def test_a_file_system_with_little_left_is_too_full_for_anybody(tree: Path) -> None:
    """A quarter of a small one is kept, whatever the tree itself may hold."""
    with world.small_filesystem(tree, 20 * MIB):
        one = workdir(tree, None, None)
        assert low_space(one.root_fd) is None
        (tree / "big").write_bytes(bytes(16 * MIB))
        found = low_space(one.root_fd)
        os.close(one.root_fd)
    assert found is not None
    assert "less than 5 MiB left on the host" in found.text


@pytest.mark.parametrize(("all_files", "left", "wanted"), [(1000, 49, True), (1000, 50, False), (0, 0, False)])
def test_a_file_system_that_can_have_few_more_files_is_too_full_too(
    tree: Path, monkeypatch: pytest.MonkeyPatch, all_files: int, left: int, wanted: bool
) -> None:
    """A twentieth is kept of those that it can have, where it has a limit."""
    one = workdir(tree, None, None)
    numbers = (4096, 4096, 1 << 30, 1 << 30, 1 << 30, all_files, left, left, 0, 255)
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(numbers))
    found = low_space(one.root_fd)
    os.close(one.root_fd)
    assert (found is not None and found.exhausted == "inodes") == wanted


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

    async def scenario() -> float:
        watching = asyncio.create_task(watch(one))
        await asyncio.sleep(1.4)  # within a count, or just after one
        started = time.monotonic()
        watching.cancel()
        await asyncio.wait({watching})
        return time.monotonic() - started

    asyncio.run(scenario())  # the loop's own descriptors of the first time
    before = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(scenario()) < 5
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors are left")
    os.close(one.root_fd)


def append(path: Path, size: int) -> None:
    with open(path, "ab") as file:
        file.write(bytes(size))


def test_a_count_of_a_moment_ago_will_do_where_there_was_much_room(tree: Path) -> None:
    """And not where there was little: what was written since could be too much."""
    one = workdir(tree, MIB, 100)

    async def scenario() -> list[int]:
        found = []
        for kib in (100, 100, 700, 100, 100):
            found.append((await find_usage(one) or pytest.fail("it has bounds")).bytes)
            append(tree / "file", kib * 1024)
            if kib == 700:
                await find_last_excess(one)
        return found

    first, again, third, counted, last = asyncio.run(scenario())
    os.close(one.root_fd)
    assert first == again == third, "the control: much was written meanwhile"
    assert counted > first
    assert last > counted


def test_a_calls_own_script_is_not_too_much(tree: Path) -> None:
    """It goes with the call; what the code has made of it counts beyond what a script has."""
    (tree / "file").write_bytes(bytes(MIB))
    for size, wanted in ((100_000, False), (2 * MIB, True)):
        (tree / "script").write_bytes(bytes(size))
        one = workdir(tree, MIB + 65536, 1)
        assert (asyncio.run(find_last_excess(one)) is not None) == wanted
        os.close(one.root_fd)


def test_what_is_too_much_at_the_end_is_known(tree: Path) -> None:
    one = workdir(tree, MIB, 100)
    assert asyncio.run(find_last_excess(one)) is None
    (tree / "big").write_bytes(bytes(2 * MIB))
    excess = asyncio.run(find_last_excess(one))
    assert excess is not None
    assert excess.exhausted == "bytes"
    assert asyncio.run(find_last_excess(replace(one, full=True))) is None, "nothing can have been put there"
    os.close(one.root_fd)
