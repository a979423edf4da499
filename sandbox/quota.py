"""How much a working directory holds, and whether that is more than it may. Owns: the rhythm of looking, and the words.

The count itself is `sandbox.tally`'s. What a program has deleted and still holds open is in no directory: the floor of
free space holds for that, too. Must not: end anything, or remove anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import Literal

from sandbox.isolation.plan import MIB, Workdir
from sandbox.tally import BLOCK_BYTES, Tree, Usage, counted

BYTES_KEY = "code_exec.user_data.max_mib"
FILES_KEY = "code_exec.user_data.max_files"
# What calls leave free for the ledger, the log and the host's other programs: a twentieth of the file system, at most
# 1 GiB, and at least 256 MiB, or a quarter of one that is as small as that.
_FLOOR_BYTES = 1024 * MIB
_LEAST_FLOOR_BYTES = 256 * MIB
_FLOOR_SHARE = 20
_LEAST_FLOOR_SHARE = 4
_FLOOR_FILES = 65_536  # of those that the file system can still have; a twentieth of all, where that is less
_LOOK_SECONDS = 0.25  # at the free space, which takes microseconds
_NEAR_LOOK_SECONDS = 0.05
_NEAR_BYTES = 4096 * MIB  # above the floor: about a second of a fast disk's
_COUNT_SECONDS = 1.0  # between two counts; and nine times what the last one took
_LAST_COUNT_SECONDS = 3.0  # an answer waits no longer for it; whoever comes next counts in any case
_FRESH_SECONDS = 5.0  # how long a count is good for the next call, where it found much room
_MUCH_ROOM = 0.8  # at most this much of a bound is taken
_SCRIPT_BYTES = MIB // 2  # more than 100,000 characters have
_MAKE_ROOM = "remove what is not needed any more"


@dataclass(frozen=True, slots=True)
class Excess:
    """Why nothing more may be written: which bound was passed, and the words for it."""

    exhausted: Literal["bytes", "inodes"]
    limit: int
    text: str
    hint: str


def excess_of(found: Usage, workdir: Workdir) -> Excess | None:
    """Which bound of the tree's is passed, if one is."""
    if workdir.max_bytes is not None and found.bytes > workdir.max_bytes:
        text = f"the working directory holds more than {workdir.max_bytes // MIB} MiB (`{BYTES_KEY}`)"
        return Excess("bytes", workdir.max_bytes, text, _MAKE_ROOM)
    if workdir.max_files is not None and found.files > workdir.max_files:
        text = f"the working directory holds more than {workdir.max_files} files (`{FILES_KEY}`)"
        return Excess("inodes", workdir.max_files, text, _MAKE_ROOM)
    if workdir.max_files is not None and found.torn:
        text = "the working directory has deep directories that are moved about, and cannot be counted"
        return Excess("inodes", workdir.max_files, text, "leave directories where they are")
    return None


def low_space(directory: int) -> Excess | None:
    """Whether the host's file system has less left than it keeps for others. Raises `OSError`."""
    found = os.fstatvfs(directory)
    floor = _floor(found)
    if found.f_bavail * found.f_frsize < floor:
        text = f"the file system of the working directory has less than {floor // MIB} MiB left on the host"
        return Excess("bytes", floor, text, "whoever runs this host must make room there")
    least = min(_FLOOR_FILES, found.f_files // _FLOOR_SHARE)  # 0 where a file system has as many as it has room for
    if found.f_favail < least:
        text = f"the file system of the working directory can have less than {least} more files on the host"
        return Excess("inodes", least, text, "whoever runs this host must remove files there")
    return None


async def find_usage(workdir: Workdir) -> Usage | None:
    """What the tree holds by now; None where it has no bounds. A count of a moment ago will do where it found room.

    Raises `OSError`.
    """
    tree = _tree(workdir)
    if tree is None:
        return None
    known = counted.known(tree, time.monotonic() - _FRESH_SECONDS)
    if known is None or known.torn:
        return await counted.count(tree)
    taken = max(known.bytes / (workdir.max_bytes or 1), known.files / (workdir.max_files or 1))
    return known if taken <= _MUCH_ROOM else await counted.count(tree)


async def find_last_excess(workdir: Workdir) -> Excess | None:
    """Which bound the tree has passed when its program has ended. None, too, where that can't be known by now."""
    tree = None if workdir.full else _tree(workdir)
    if tree is None:
        return None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LAST_COUNT_SECONDS):
            return excess_of(_without_script(await counted.count(tree), workdir), workdir)
    return None


async def watch(workdir: Workdir) -> Excess:
    """Wait until the tree has passed a bound, or the host's file system its own. Raises `OSError`.

    It counts a tenth of the time at most; up to half of it while so much space vanishes that the tree could be full.
    Nothing is counted where nothing can be made.
    """
    loop = asyncio.get_running_loop()
    tree = None if workdir.full else _tree(workdir)
    early, due = loop.time(), loop.time() + _COUNT_SECONDS
    free, room = _free(workdir.root_fd), workdir.max_bytes or 0
    near = True
    while True:
        await asyncio.sleep(_NEAR_LOOK_SECONDS if near else _LOOK_SECONDS)
        if (low := low_space(workdir.root_fd)) is not None:
            return low
        near = _is_near(workdir.root_fd)
        now = loop.time()
        if tree is None or (now < due and (now < early or free - _free(workdir.root_fd) <= room)):
            continue
        free = _free(workdir.root_fd)
        found = _without_script(await counted.count(tree), workdir)
        if (excess := excess_of(found, workdir)) is not None:
            return excess
        room, ended = (workdir.max_bytes or 0) - found.bytes, loop.time()
        early = ended + (ended - now)
        due = ended + max(_COUNT_SECONDS, 9 * (ended - now))


def _tree(workdir: Workdir) -> Tree | None:
    if workdir.max_bytes is None or workdir.max_files is None:
        return None
    return Tree(workdir.root_fd, workdir.max_bytes + _SCRIPT_BYTES, workdir.max_files + 1)


def _without_script(found: Usage, workdir: Workdir) -> Usage:
    """What is there beside the call's own script, which goes with the call."""
    try:
        status = os.stat(workdir.script, dir_fd=workdir.directory_fd, follow_symlinks=False)
    except OSError:
        return found
    size = min(status.st_blocks * BLOCK_BYTES, _SCRIPT_BYTES)  # the code may have made it larger
    return Usage(found.bytes - size, found.files - 1, found.torn)


def _floor(found: os.statvfs_result) -> int:
    size = found.f_blocks * found.f_frsize
    least = min(_LEAST_FLOOR_BYTES, size // _LEAST_FLOOR_SHARE)
    return max(min(_FLOOR_BYTES, size // _FLOOR_SHARE), least)


def _is_near(directory: int) -> bool:
    found = os.fstatvfs(directory)
    return found.f_bavail * found.f_frsize < _floor(found) + _NEAR_BYTES


def _free(directory: int) -> int:
    found = os.fstatvfs(directory)
    return found.f_bavail * found.f_frsize
