"""How much a working directory holds, and whether that is more than it may. Owns: the count, and its rhythm.

Nothing that the code leaves there can mislead or hold up the count: it goes by descriptors and follows no link, opens
directories only, and gives up as soon as a bound is passed. What counts is what the disk has given: a hole in a file is
nothing, a file with two names is one.
Must not: end anything, or remove anything. A directory that its owner may not read is made readable for the owner.

What a program has deleted and still holds open is in no directory. The floor of free space holds for that, too.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from sandbox.isolation.plan import MIB, Workdir

BYTES_KEY = "code_exec.user_data.max_mib"
FILES_KEY = "code_exec.user_data.max_files"
MAX_DEPTH = 128  # each level is a descriptor for the time of the count
_FLOOR_BYTES = 1024 * MIB
_FLOOR_SHARE = 20  # a twentieth of the file system, where that is less
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are
_LOOK_SECONDS = 0.25  # at the free space, which takes microseconds
_COUNT_SECONDS = 1.0  # between two counts; and nine times what the last one took
_MAKE_ROOM = "remove what is not needed any more"
# For the whole process: what all counts together take of its descriptors and of the processors is bounded by it.
_counters = ThreadPoolExecutor(2, "working-directory")


@dataclass(frozen=True, slots=True)
class Usage:
    """What was counted; where a bound was passed, up to there. `depth` is of directories below the root."""

    bytes: int
    files: int
    depth: int


@dataclass(frozen=True, slots=True)
class Excess:
    """Why nothing more may be written: which bound was passed, and the words for it."""

    exhausted: Literal["bytes", "inodes"]
    limit: int
    text: str
    hint: str


class _Count:
    def __init__(self, max_bytes: int, max_files: int, stop: threading.Event) -> None:
        self._max_bytes, self._max_files, self._stop = max_bytes, max_files, stop
        self._linked: set[tuple[int, int]] = set()
        self.bytes = self.files = self.depth = 0

    def enough(self) -> bool:
        passed = self.bytes > self._max_bytes or self.files > self._max_files or self.depth > MAX_DEPTH
        return passed or self._stop.is_set()

    def visit(self, directory: int, depth: int) -> None:
        """Count what is in a directory; the descriptor is of the caller's."""
        self.depth = max(self.depth, depth)
        if self.enough():
            return
        for name in list(self._entries(directory)):
            try:
                below = _open_directory(name, directory)
            except OSError:
                continue  # gone since, or another's, in which the code can write nothing either
            try:
                self.visit(below, depth + 1)
            finally:
                os.close(below)
            if self.enough():
                return

    def _entries(self, directory: int) -> Iterator[str]:
        """The directories in it; all else is counted on the way."""
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone since
                self._add(status)
                if self.enough():
                    return
                if stat.S_ISDIR(status.st_mode):
                    yield entry.name

    def _add(self, status: os.stat_result) -> None:
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            identity = (status.st_dev, status.st_ino)
            if identity in self._linked:
                self.files += 1  # the name takes room, too
                return
            self._linked.add(identity)
        self.files += 1
        self.bytes += status.st_blocks * _BLOCK_BYTES


def _open_directory(name: str, above: int) -> int:
    """Raises `OSError`, also for what is no directory: a pipe would not be waited for."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=above)
    except PermissionError:
        # Who owns it may read it again at any time; so may we, where we are its owner.
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(os.fstat(handle).st_mode) | stat.S_IRWXU)
            return os.open(f"/proc/self/fd/{handle}", flags & ~os.O_NOFOLLOW)
        finally:
            os.close(handle)


def usage(root_fd: int, max_bytes: int, max_files: int, stop: threading.Event | None = None) -> Usage:
    """What is below a directory, counted until one of the bounds is passed, or `stop` is set. Raises `OSError`."""
    count = _Count(max_bytes, max_files, stop or threading.Event())
    try:
        root = _open_directory(".", root_fd)
    except FileNotFoundError:  # it was removed
        return Usage(0, 0, 0)
    try:
        count.visit(root, 0)
    finally:
        os.close(root)
    return Usage(count.bytes, count.files, count.depth)


def excess_of(found: Usage, workdir: Workdir) -> Excess | None:
    """Which bound of the tree's is passed, if one is."""
    if workdir.max_bytes is not None and found.bytes > workdir.max_bytes:
        text = f"the working directory holds more than {workdir.max_bytes // MIB} MiB (`{BYTES_KEY}`)"
        return Excess("bytes", workdir.max_bytes, text, _MAKE_ROOM)
    if workdir.max_files is not None and found.files > workdir.max_files:
        text = f"the working directory holds more than {workdir.max_files} files (`{FILES_KEY}`)"
        return Excess("inodes", workdir.max_files, text, _MAKE_ROOM)
    if found.depth > MAX_DEPTH:
        text = f"the working directory has directories more than {MAX_DEPTH} deep"
        return Excess("inodes", MAX_DEPTH, text, "remove those that are nested so deep")
    return None


def low_space(directory: int) -> Excess | None:
    """Whether the host's file system has less left than it keeps for others. Raises `OSError`."""
    found = os.fstatvfs(directory)
    floor = min(_FLOOR_BYTES, found.f_blocks * found.f_frsize // _FLOOR_SHARE)
    if found.f_bavail * found.f_frsize >= floor:
        return None
    text = f"the file system of the working directory has less than {floor // MIB} MiB left on the host"
    return Excess("bytes", floor, text, "whoever runs this host must make room there")


def find_excess(workdir: Workdir, stop: threading.Event | None = None) -> Excess | None:
    """Which bound the tree has passed by now, if any: about half a second for each 100,000 files. Raises `OSError`."""
    if (low := low_space(workdir.root_fd)) is not None:
        return low
    if workdir.max_bytes is None or workdir.max_files is None:
        return None
    return excess_of(usage(workdir.root_fd, workdir.max_bytes, workdir.max_files, stop), workdir)


async def watch(workdir: Workdir) -> Excess:
    """Wait until the tree has passed a bound. Raises `OSError`.

    It counts a tenth of the time at most; up to half of it while so much space vanishes that the tree could be full.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    counting: asyncio.Future[Usage] | None = None
    root_fd = os.dup(workdir.root_fd)  # a count may still run when who waits here has been cancelled
    early, due = loop.time(), loop.time() + _COUNT_SECONDS
    free, room = _free(root_fd), workdir.max_bytes
    try:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (low := low_space(root_fd)) is not None:
                return low
            if workdir.max_bytes is None or workdir.max_files is None or room is None:
                continue
            now = loop.time()
            if now < due and (now < early or free - _free(root_fd) <= room):
                continue
            free = _free(root_fd)
            counting = loop.run_in_executor(_counters, usage, root_fd, workdir.max_bytes, workdir.max_files, stop)
            found = await asyncio.shield(counting)
            if (excess := excess_of(found, workdir)) is not None:
                return excess
            room, ended = workdir.max_bytes - found.bytes, loop.time()
            early = ended + (ended - now)
            due = ended + max(_COUNT_SECONDS, 9 * (ended - now))
    finally:
        stop.set()
        if counting is not None and not counting.done():
            await asyncio.wait([counting])
        os.close(root_fd)


def _free(directory: int) -> int:
    found = os.fstatvfs(directory)
    return found.f_bavail * found.f_frsize
