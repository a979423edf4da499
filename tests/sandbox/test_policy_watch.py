"""A watched policy file is told anew when it means something else, once; what is broken is told once, and then no more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.policy_file import InvalidPolicy, LoadedPolicy, load_policy
from sandbox.policy_watch import PolicyWatch, Stamp, stamp_of

SECONDS = 30  # far more than any of this takes
OLD = (1, 1, 0, 0, 1)  # the stamp of a file that was written long ago
YOUNG = (1, 1, 2**62, 2**62, 1)  # and of one that stays young


class Watched:
    """A file that is watched closely, and what is told of it."""

    def __init__(self, path: Path, look: Callable[[Path], Stamp] = stamp_of, interval_seconds: float = 0.01) -> None:
        self.path, self.look = path, look
        self.told: asyncio.Queue[LoadedPolicy | InvalidPolicy] = asyncio.Queue()
        self._looked = asyncio.Event()
        self.watch = PolicyWatch(
            path, load_policy(path), interval_seconds=interval_seconds, settling_seconds=0.01, look=self._counted
        )

    def _counted(self, path: Path) -> Stamp:
        self._looked.set()
        return self.look(path)

    async def listen(self) -> None:
        async for found in self.watch.changes():
            self.told.put_nowait(found)

    async def name(self) -> str:
        """The name of the next policy."""
        async with asyncio.timeout(SECONDS):
            found = await self.told.get()
        assert isinstance(found, LoadedPolicy), found
        assert found.path == self.path
        return found.policy.name

    async def fault(self) -> str:
        """What is wrong with what comes next."""
        async with asyncio.timeout(SECONDS):
            found = await self.told.get()
        assert isinstance(found, InvalidPolicy), found
        return str(found)

    async def nothing(self) -> None:
        """Nothing is told, though the file was looked at often enough to be read twice."""
        async with asyncio.timeout(SECONDS):
            for _ in range(12):
                self._looked.clear()
                await self._looked.wait()
        assert self.told.empty()


type Story = Callable[[Watched], Awaitable[None]]


def run(story: Story, watched: Watched) -> None:
    async def told() -> None:
        listening = asyncio.ensure_future(watched.listen())
        try:
            await story(watched)
        finally:
            listening.cancel()

    asyncio.run(told())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(named("first"))
    return file


def named(name: str) -> str:
    return f"version: 1\nname: {name}\n"


def replace(path: Path, text: str) -> None:
    """As editors and deployments do it."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.rename(path)


@pytest.mark.parametrize("write", [Path.write_text, replace], ids=["in place", "by rename"])
def test_a_change_is_told(path: Path, write: Callable[[Path, str], None]) -> None:
    async def story(watched: Watched) -> None:
        for name in ("second", "third", "first"):
            write(path, named(name))
            assert await watched.name() == name
        await watched.nothing()

    run(story, Watched(path))


def test_a_change_between_loading_and_watching_is_told(path: Path) -> None:
    watched = Watched(path)
    path.write_text(named("second"))

    async def story(watched: Watched) -> None:
        assert await watched.name() == "second"

    run(story, watched)


def test_what_means_the_same_is_not_told(path: Path) -> None:
    async def story(watched: Watched) -> None:
        await watched.nothing()
        path.write_text(f"# a comment\n{named('first')}network: {{modes: [block-all]}}\n")
        await watched.nothing()

    run(story, Watched(path))


def test_a_change_that_leaves_the_stamp_as_it_was_is_told_while_the_file_is_young(path: Path) -> None:
    """Of the same size, and at the same time as far as the file system's clock tells."""

    async def story(watched: Watched) -> None:
        await watched.nothing()
        path.write_text(named("other"))
        assert await watched.name() == "other"

    run(story, Watched(path, lambda _: YOUNG))


def test_an_old_file_is_not_read_again_and_again(path: Path) -> None:
    """What its stamp does not show is not seen; the control is that it is, when asked for."""

    async def story(watched: Watched) -> None:
        await watched.nothing()
        path.write_text(named("other"))
        await watched.nothing()
        watched.watch.poke()
        assert await watched.name() == "other"

    run(story, Watched(path, lambda _: OLD))


def test_a_broken_file_is_told_once_and_so_is_its_mending(path: Path) -> None:
    async def story(watched: Watched) -> None:
        path.write_text("version: 2\n")
        assert "`2` is no version" in await watched.fault()
        os.utime(path)
        await watched.nothing()
        path.write_text("version: 3\n")
        assert "`3` is no version" in await watched.fault()
        path.write_text(named("first"))  # what is in force: that it is back is news after a fault
        assert await watched.name() == "first"
        await watched.nothing()

    run(story, Watched(path))


def test_a_file_that_is_gone_or_no_text_is_told_and_so_is_its_return(path: Path) -> None:
    async def story(watched: Watched) -> None:
        path.unlink()
        assert "no such file" in await watched.fault()
        await watched.nothing()
        path.mkdir()
        assert "not a file" in await watched.fault()
        path.rmdir()
        replace(path, "")
        assert "empty" in await watched.fault()
        replace(path, named("second"))
        assert await watched.name() == "second"

    run(story, Watched(path))


def test_a_link_that_is_turned_to_another_file_is_a_change(tmp_path: Path) -> None:
    """The way a mounted configuration is updated: the file is a link through a link to a directory that is swapped."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_text(named(name))
    (tmp_path / "..data").symlink_to("first")
    path = tmp_path / "policy.yaml"
    path.symlink_to("..data/policy.yaml")

    async def story(watched: Watched) -> None:
        await watched.nothing()
        (tmp_path / "..new").symlink_to("second")
        (tmp_path / "..new").rename(tmp_path / "..data")
        assert await watched.name() == "second"

    run(story, Watched(path))


def test_a_file_that_is_being_written_is_left_alone_until_it_rests(path: Path) -> None:
    """What it begins with is a policy, too, and is told if it stays like that: the control."""

    async def story(watched: Watched) -> None:
        stamps = iter(range(10**9))
        path.write_text(named("beginning"))
        watched.look = lambda _: (1, 1, next(stamps), 0, 1)
        watched.watch.poke()
        await watched.nothing()
        replace(path, named("whole"))
        watched.look = stamp_of
        assert await watched.name() == "whole"
        replace(path, named("beginning"))
        assert await watched.name() == "beginning"

    run(story, Watched(path, lambda _: OLD))


def test_a_file_that_never_rests_is_read_after_a_while(path: Path) -> None:
    stamps = iter(range(10**9))

    async def story(watched: Watched) -> None:
        path.write_text(named("restless"))
        assert await watched.name() == "restless"

    run(story, Watched(path, lambda _: (1, 1, next(stamps), 0, 1)))


def test_who_pokes_is_told_what_is_there_though_it_is_no_news(path: Path) -> None:
    async def story(watched: Watched) -> None:
        watched.watch.poke()
        assert await watched.name() == "first"
        path.write_text("version: 2\n")
        assert "`2` is no version" in await watched.fault()
        watched.watch.poke()
        assert "`2` is no version" in await watched.fault()
        await watched.nothing()

    run(story, Watched(path))


def test_a_poke_does_not_wait_for_the_next_look(path: Path) -> None:
    async def story(watched: Watched) -> None:
        for name in ("first", "second", "third"):
            path.write_text(named(name))
            watched.watch.poke()
            assert await watched.name() == name

    run(story, Watched(path, lambda _: OLD, interval_seconds=3600))


def test_files_that_the_policy_names_are_looked_at_again_when_asked(path: Path, tmp_path: Path) -> None:
    """The text is the same, and what was wrong with it is mended."""
    database = tmp_path / "osv"

    async def story(watched: Watched) -> None:
        path.write_text(f"{named('second')}packages: {{prepare: true, advisories: {{db_dir: {database}}}}}\n")
        assert "db_dir" in await watched.fault()
        database.mkdir()
        (database / "a.json").write_text("{}")
        watched.watch.poke()
        assert await watched.name() == "second"

    run(story, Watched(path))
