"""The writable file systems of one sandbox, seen from the launcher: how full they are, and were at the ending.

Owns: a descriptor of each, until the ending. Must not: know why a sandbox ended.

A descriptor keeps its file system alive, with all that is in it, and whoever lets go of the last one waits until that
is freed (0.03 ms when it holds little, 14 ms for 256 MiB). So they are closed at the first sign of an ending: before a
kill, after which the sandbox's own last process waits, and at the program's report, where it can still be the launcher.
For the same reason a forked helper must not keep them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from sandbox.isolation.plan import Tmpfs

_INODE_BYTES = 1024  # of kernel memory for each file of a tmpfs; shmem_inode_cache and its dentry, rounded up


class Filesystems:
    """Takes ownership of the descriptors: one for each of `tmpfs`, in its order. O_PATH is enough."""

    def __init__(self, tmpfs: Sequence[Tmpfs] = (), fds: Sequence[int] = ()) -> None:
        self._open = list(zip((one.target for one in tmpfs), fds, strict=True))
        self._memory_bytes = 0
        self._full: list[dict[str, object]] = []

    def memory_bytes(self) -> int:
        """What they hold in memory; of closed ones, what they held when they were closed. Raises `OSError`."""
        if self._open:
            self._memory_bytes = sum(_memory_bytes(os.fstatvfs(fd)) for _, fd in self._open)
        return self._memory_bytes

    def full(self) -> list[dict[str, object]]:
        """Those that could take no more when they were closed, each as `client.FullFilesystem`, as a message."""
        return self._full

    def close(self) -> None:
        """Look at them for the last time. Once closed, nothing more is seen of them."""
        opened, self._open = self._open, []
        memory_bytes = 0
        for target, fd in opened:
            with contextlib.suppress(OSError):  # the others' evidence is worth having
                usage = os.fstatvfs(fd)
                memory_bytes += _memory_bytes(usage)
                if (full := _full(target, usage)) is not None:
                    self._full.append(full)
            os.close(fd)
        if opened:
            self._memory_bytes = memory_bytes


def _memory_bytes(usage: os.statvfs_result) -> int:
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * _INODE_BYTES


def _full(target: str, usage: os.statvfs_result) -> dict[str, object] | None:
    """A total of 0 is no limit. The kernel sums its counters exactly for statvfs(2), and refuses by the same sums."""
    if usage.f_blocks and not usage.f_bfree:
        exhausted = "bytes"
    elif usage.f_files and not usage.f_ffree:
        exhausted = "inodes"
    else:
        return None
    return {
        "target": target,
        "size_bytes": usage.f_blocks * usage.f_frsize,
        "used_bytes": (usage.f_blocks - usage.f_bfree) * usage.f_frsize,
        "inodes": usage.f_files,
        "used_inodes": usage.f_files - usage.f_ffree,
        "exhausted": exhausted,
    }
