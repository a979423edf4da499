"""What a tree of files holds, counted while code changes it, and while others wait for counts of theirs.

Nothing that the code leaves there can mislead or hold up a count: it goes by descriptors and follows no link, opens
directories only, and gives up as soon as a bound is passed. What counts is what the disk has given: a hole in a file is
nothing, a file with two names is one. A tree may be as deep as it likes: above the last few directories the way back is
by `..`, and what is found there must be what was there before.
Owns: the counts, whose turn it is, and what was found. Must not: remove anything. A directory that its owner may not
read is made readable for the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

HELD_LEVELS = 16  # how many directories a count has open at once, beside the root
_AT_ONCE = 48  # counts that are begun and not done, which bounds the descriptors of all; others wait
_SLICE_SECONDS = 0.005  # then it is another tree's turn
_TRIES = 5  # how often a count begins anew, when the way back was moved under it
_KEPT = 4096  # trees whose last count is known
BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are
_LOOK_EVERY = 32  # entries, between two looks at the clock

# Of a directory that is gone since, is none any more, or is another user's, in which the code can write nothing.
_ANOTHERS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ESTALE})

type Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Usage:
    """What was counted; where a bound was passed, up to there. `torn`: directories moved too fast for a count."""

    bytes: int
    files: int
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory that its owner keeps open, and the bounds beyond which counting has no use."""

    root_fd: int
    max_bytes: int
    max_files: int


@dataclass(slots=True)
class _Level:
    """A directory on the way: its descriptor, which may be closed meanwhile, and what in it is still to be visited."""

    fd: int
    identity: Identity
    entries: contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]] | None
    reading: Iterator[os.DirEntry[str]]
    names: list[str]


class _Torn(Exception):
    """What was found a moment ago is not there any more: the way back, or the right to read."""


class Count:
    """One count, a slice at a time. `close` gives back what it has open."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._root_fd = os.dup(tree.root_fd)
        self._levels: list[_Level] = []
        self._begun = False
        self._linked: set[Identity] = set()
        self._tries = 0
        self.bytes = self.files = 0
        self.torn = False

    def go_on(self, until: float) -> bool:
        """Count up to a time (monotonic). Whether it is done. Raises `OSError`."""
        try:
            if not self._begun:
                self._begin()
            return self._walk(until)
        except _Torn:
            self._leave()
            self._tries += 1
            self._begun = False
            self._linked.clear()
            self.bytes = self.files = 0
            self.torn = self._tries >= _TRIES
            return self.torn

    def usage(self) -> Usage:
        return Usage(self.bytes, self.files, self.torn)

    def close(self) -> None:
        self._leave()
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    def _leave(self) -> None:
        while self._levels:
            self._close_level(self._levels.pop())

    def _begin(self) -> None:
        self._begun = True
        with contextlib.suppress(FileNotFoundError):  # else it was removed, and holds nothing
            self._enter(_open_directory(".", self._root_fd))

    def _enter(self, fd: int) -> None:
        try:
            status = os.fstat(fd)
            entries = os.scandir(fd)
        except BaseException:
            os.close(fd)
            raise
        self._levels.append(_Level(fd, (status.st_dev, status.st_ino), entries, entries, []))
        if len(self._levels) > HELD_LEVELS + 1:  # never the root's
            above = self._levels[-1 - HELD_LEVELS]
            os.close(above.fd)
            above.fd = -1

    def _walk(self, until: float) -> bool:
        number = 0
        while self._levels:
            number += 1
            if number % _LOOK_EVERY == 0 and time.monotonic() >= until:
                return False
            level = self._levels[-1]
            if level.entries is not None:
                self._read(level)
            elif level.names:
                self._visit(level.names.pop(), level.fd)
            else:
                self._go_back()
            if self.bytes > self._tree.max_bytes or self.files > self._tree.max_files:
                break
        self._leave()
        return True

    def _visit(self, name: str, above: int) -> None:
        try:
            below = _open_directory(name, above)
        except OSError as error:
            if error.errno not in _ANOTHERS:
                raise
        else:
            self._enter(below)

    def _read(self, level: _Level) -> None:
        """One entry."""
        entry = next(level.reading, None)
        if entry is None:
            assert level.entries is not None
            level.entries.__exit__(None, None, None)
            level.entries = None
            return
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return  # gone since
        self._add(status)
        if stat.S_ISDIR(status.st_mode):
            level.names.append(entry.name)

    def _add(self, status: os.stat_result) -> None:
        self.files += 1  # also for another name of what was counted: it takes room, too
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            identity = (status.st_dev, status.st_ino)
            if identity in self._linked:
                return
            self._linked.add(identity)
        self.bytes += status.st_blocks * BLOCK_BYTES

    def _go_back(self) -> None:
        below = self._levels.pop()
        try:
            if self._levels and self._levels[-1].fd < 0:
                self._reopen(self._levels[-1], below.fd)
        finally:
            self._close_level(below)

    def _reopen(self, above: _Level, below: int) -> None:
        try:
            fd = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=below)
        except OSError as error:
            raise _Torn from error
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != above.identity:
            os.close(fd)
            raise _Torn
        above.fd = fd

    @staticmethod
    def _close_level(level: _Level) -> None:
        if level.entries is not None:
            level.entries.__exit__(None, None, None)
        if level.fd >= 0:
            os.close(level.fd)


def _open_directory(name: str, above: int) -> int:
    """Raises `OSError`, also for what is no directory: a pipe would not be waited for. Raises `_Torn`."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=above)
    except PermissionError:
        # Who owns it may read it again at any time; so may we, where we are its owner.
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            status = os.fstat(handle)
            if status.st_uid != os.geteuid():
                raise
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            try:
                return os.open(f"/proc/self/fd/{handle}", flags & ~os.O_NOFOLLOW)
            except PermissionError as error:
                raise _Torn from error
        finally:
            os.close(handle)


class Turns:
    """Counts of many trees by two threads, a slice of each in turn: a small one need not wait for a large one's end."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, "working-directory")
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Count, Future[Usage]]] = deque()
        self._begun = 0

    def begin(self, count: Count) -> Future[Usage]:
        """The count's result, which nobody can cancel. It closes the count."""
        future: Future[Usage] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._waiting.append((count, future))
        self._fill()
        return future

    def _fill(self) -> None:
        with self._lock:
            while self._waiting and self._begun < _AT_ONCE:
                self._begun += 1
                self._pool.submit(self._slice, *self._waiting.popleft())

    def _slice(self, count: Count, future: Future[Usage]) -> None:
        try:
            if not count.go_on(time.monotonic() + _SLICE_SECONDS):
                self._pool.submit(self._slice, count, future)
                return
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            count.close()
            future.set_exception(error)
        else:
            count.close()
            future.set_result(count.usage())
        with self._lock:
            self._begun -= 1
        self._fill()


@dataclass(frozen=True, slots=True)
class _Found:
    began: float
    usage: Usage


type _Key = tuple[int, int, int, int]


class Tallies:
    """The last count of each tree. Of one tree there is one count at a time, for whoever waits for one."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._lock = threading.RLock()  # a count that is done at once is kept by who began it
        self._found: dict[_Key, _Found] = {}
        self._counting: dict[_Key, Future[Usage]] = {}

    def known(self, tree: Tree, since: float) -> Usage | None:
        """What was found by a count that began after `since` (monotonic), if there was one. Raises `OSError`."""
        found = self._found.get(_key(tree))
        return found.usage if found is not None and found.began >= since else None

    async def count(self, tree: Tree) -> Usage:
        """What it holds: counted from now on, not before. Raises `OSError`."""
        since, key = time.monotonic(), _key(tree)
        while True:
            with self._lock:
                found = self._found.get(key)
                if found is not None and found.began >= since:
                    return found.usage
                counting = self._counting.get(key) or self._begin(tree, key)
            await asyncio.wrap_future(counting)

    def _begin(self, tree: Tree, key: _Key) -> Future[Usage]:
        began = time.monotonic()
        counting = self._counting[key] = self._turns.begin(Count(tree))
        counting.add_done_callback(lambda done: self._keep(key, began, done))
        return counting

    def _keep(self, key: _Key, began: float, done: Future[Usage]) -> None:
        with self._lock:
            del self._counting[key]
            if done.exception() is None:
                self._found.pop(key, None)
                while len(self._found) >= _KEPT:
                    del self._found[next(iter(self._found))]
                self._found[key] = _Found(began, done.result())


def _key(tree: Tree) -> _Key:
    status = os.fstat(tree.root_fd)
    return status.st_dev, status.st_ino, tree.max_bytes, tree.max_files


# For the whole process: what all counts together take of its descriptors and of the processors is bounded by it.
counted = Tallies(Turns())
