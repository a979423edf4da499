"""What a tree holds, whatever its code does to it, and whose turn it is to know."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from sandbox.tally import HELD_LEVELS, Count, Tallies, Tree, Turns, Usage

ENOUGH = 1 << 40


def count(path: Path, max_bytes: int = ENOUGH, max_files: int = ENOUGH) -> Usage:
    descriptor = os.open(path, os.O_PATH)
    one = Count(Tree(descriptor, max_bytes, max_files))
    try:
        while not one.go_on(time.monotonic() + 10):
            pass
        return one.usage()
    finally:
        one.close()
        os.close(descriptor)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    return tree


def deepen(tree: Path, levels: int) -> None:
    """Directories that are nested so deep, each with a file."""
    here = os.open(tree, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_it_counts_what_the_disk_gave(tree: Path) -> None:
    """Files and directories at any depth; not the length of holes; a file with two names once."""
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/file").write_bytes(b"x" * 100_000)
    os.link(tree / "a/b/file", tree / "again")
    with open(tree / "sparse", "wb") as file:
        file.truncate(1 << 30)
    found = count(tree)
    assert found.files == 5
    assert 100_000 <= found.bytes < 200_000


def test_no_link_is_followed_and_nothing_is_waited_for(tree: Path, tmp_path: Path) -> None:
    """Not to a directory, a file, itself or a pipe."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/big").write_bytes(bytes(1 << 20))
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


def test_a_tree_may_be_as_deep_as_it_likes(tree: Path) -> None:
    """All of it counts, by a few descriptors; the way back is found, and what lies beside it."""
    deepen(tree, 1000)
    (tree / "last").mkdir()
    (tree / "last/file").touch()
    before = len(os.listdir("/proc/self/fd"))
    descriptor = os.open(tree, os.O_PATH)
    one = Count(Tree(descriptor, ENOUGH, ENOUGH))
    most = 0
    while not one.go_on(0):
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert one.usage() == Usage(one.bytes, 2002)
    assert HELD_LEVELS < most < HELD_LEVELS + 10
    one.close()
    os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_never_leaves_the_tree_though_the_way_back_is_moved(tree: Path, tmp_path: Path) -> None:
    """A deep directory that is moved up would lead above the root by as many `..` as it was deep."""
    for number in range(5000):
        (tmp_path / f"outside{number}").touch()
    deepen(tree, 60)
    descriptor = os.open(tree, os.O_PATH)
    one = Count(Tree(descriptor, ENOUGH, ENOUGH))
    while one.files < 110:  # far below
        assert not one.go_on(0)
    os.rename("/".join([str(tree)] + ["d"] * 40), tree / "moved")
    while not one.go_on(time.monotonic() + 10):
        pass
    assert one.usage().files == 120, "all that is there, counted anew, and nothing outside"
    one.close()
    os.close(descriptor)


def test_one_that_is_moved_about_without_rest_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepen(tree, 200)
    reopen = Count._reopen
    moved: list[Path] = []

    def move(self: Count, above: object, below: int) -> None:
        moved.append(tree / str(len(moved)))
        os.rename(os.readlink(f"/proc/self/fd/{below}"), moved[-1])
        reopen(self, above, below)  # type: ignore[arg-type]

    monkeypatch.setattr(Count, "_reopen", move)
    assert count(tree).torn
    assert len(moved) == 5, "the control: it had begun anew"


def test_a_tree_that_was_removed_holds_nothing(tree: Path) -> None:
    descriptor = os.open(tree, os.O_PATH)
    tree.rmdir()
    one = Count(Tree(descriptor, ENOUGH, ENOUGH))
    assert one.go_on(time.monotonic() + 10)
    assert one.usage() == Usage(0, 0)
    one.close()
    os.close(descriptor)


class Rig:
    """Tallies, with trees of so many files."""

    def __init__(self, tmp_path: Path, **files: int) -> None:
        self.tallies = Tallies(Turns(threads=1))
        self.trees = {}
        for name, number in files.items():
            (tmp_path / name).mkdir()
            for place in range(number):
                (tmp_path / name / str(place)).touch()
            self.trees[name] = Tree(os.open(tmp_path / name, os.O_PATH), ENOUGH, ENOUGH)

    def close(self) -> None:
        for tree in self.trees.values():
            os.close(tree.root_fd)


def test_a_small_tree_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    """By one thread, which takes turns."""
    rig = Rig(tmp_path, large=30_000, small=10)

    async def scenario() -> list[str]:
        done: list[str] = []

        async def count(name: str) -> None:
            await rig.tallies.count(rig.trees[name])
            done.append(name)

        large = asyncio.create_task(count("large"))
        await asyncio.sleep(0)
        await asyncio.gather(large, count("small"))
        return done

    assert asyncio.run(scenario()) == ["small", "large"]
    rig.close()


def test_of_one_tree_there_is_one_count_at_a_time_and_none_is_older_than_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who come while it is counted share the next."""
    rig = Rig(tmp_path, tree=20_000)
    begun: list[Count] = []
    begin = rig.tallies._turns.begin

    def note(count: Count) -> Future[Usage]:
        begun.append(count)
        return begin(count)

    monkeypatch.setattr(rig.tallies._turns, "begin", note)

    async def scenario() -> list[Usage]:
        first = asyncio.create_task(rig.tallies.count(rig.trees["tree"]))
        await asyncio.sleep(0)
        (tmp_path / "tree/more").touch()
        return await asyncio.gather(first, *(rig.tallies.count(rig.trees["tree"]) for _ in range(10)))

    _, *others = asyncio.run(scenario())
    assert len(begun) == 2
    assert {found.files for found in others} == {20_001}
    rig.close()


def test_who_does_not_wait_any_more_takes_nothing_from_the_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path, tree=20_000)

    async def scenario() -> Usage:
        gone = asyncio.create_task(rig.tallies.count(rig.trees["tree"]))
        await asyncio.sleep(0)
        stays = asyncio.create_task(rig.tallies.count(rig.trees["tree"]))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert asyncio.run(scenario()).files == 20_000
    rig.close()


def test_a_fault_is_told_to_who_waits_and_the_next_count_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, tree=10)
    begin = rig.tallies._turns.begin

    def broken(count: Count) -> Future[Usage]:
        count.close()
        return begin(count)

    with monkeypatch.context() as patch:
        patch.setattr(rig.tallies._turns, "begin", broken)
        with pytest.raises(OSError, match="Bad file descriptor"):
            asyncio.run(rig.tallies.count(rig.trees["tree"]))
    assert asyncio.run(rig.tallies.count(rig.trees["tree"])).files == 10
    rig.close()
