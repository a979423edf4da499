"""Memory limits without a group of the kernel's: the tree is added up now and then.

An excess is seen after the fact, at most `TICK_SECONDS` later: measured peaks at a limit of 256 MiB were up to 326 MiB,
with eight processes up to 486 MiB. Imported only where it is used: the launcher is small without psutil.

Owns: the sums. Must not: kill processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import psutil

from sandbox.isolation.memory import Evidence, Group

TICK_SECONDS = 0.05
_INODE_BYTES = 1024  # of kernel memory for each file of a tmpfs; shmem_inode_cache and its dentry, rounded up


class Sampling:
    """No group in the kernel: the tree's memory is added up every `TICK_SECONDS`."""

    method = "sampling"

    def group(self, name: str, memory_bytes: int, pids: int) -> Group:
        return _SampledGroup(memory_bytes)


class _SampledGroup:
    oom_fd: int | None = None
    tick_seconds: float | None = TICK_SECONDS
    entrances: tuple[int, ...] = ()

    def __init__(self, memory_bytes: int) -> None:
        self._limit = memory_bytes
        self._pid: int | None = None
        self._tmpfs: list[int] = []
        self._peak = 0
        self._cpu = 0.0
        self._exceeded = False

    def admit(self, pid: int) -> None:
        """There is no group."""

    def watch(self, pid: int, tmpfs: Sequence[int]) -> None:
        self._pid, self._tmpfs = pid, list(tmpfs)

    def exceeded(self) -> bool:
        if self._pid is not None and not self._exceeded:
            files = sum(map(_tmpfs_bytes, self._tmpfs))
            tree = _tree(self._pid)
            used = files + sum(map(_resident_bytes, tree))
            if used > self._limit:  # pages shared by forks are counted once each: confirm with the shares
                used = files + sum(map(_proportional_bytes, tree))
                self._exceeded = used > self._limit
            self._peak = max(self._peak, used)
            self._cpu = max(self._cpu, sum(map(_cpu_seconds, tree)))
        return self._exceeded

    def evidence(self) -> Evidence:
        return Evidence(cpu_seconds=self._cpu or None, peak_memory_bytes=self._peak or None)

    def remove(self) -> bool:
        for fd in self._tmpfs:
            os.close(fd)
        self._tmpfs = []
        return True


def _tree(root: int) -> list[psutil.Process]:
    """The process and its descendants; orphans of a pid namespace are its pid 1's children, so none is missed.

    By the kernel's own lists of children: psutil's would read every process of the machine, which takes 20 ms.
    """
    pids = [root]
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    pids += map(int, file.read().split())
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return _resident_bytes(process)  # gone, or it made itself undumpable: then it is counted in full


def _cpu_seconds(process: psutil.Process) -> float:
    """Of the process and of the children that it has waited for."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _tmpfs_bytes(fd: int) -> int:
    usage = os.fstatvfs(fd)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * _INODE_BYTES
