"""Memory limits without a group of the kernel's: the tree is added up now and then.

An excess is seen after the fact, at most `TICK_SECONDS` later, or `_CONFIRM_SECONDS` if it takes a closer look.
Measured peaks at a limit of 256 MiB were up to 326 MiB, with eight processes up to 486 MiB.

Each tick makes a bound from what the kernel has ready; only if that exceeds the limit, it looks closer. What a closer
look may cost is bounded too, since the launcher does nothing else meanwhile, and code inside decides how much there is
to look at: what was not reached is counted by its bound.

Owns: the sums. Must not: kill processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from sandbox.isolation.filesystems import Filesystems
from sandbox.isolation.memory import Evidence, Group
from sandbox.isolation.socketmem import SocketMemory

TICK_SECONDS = 0.05
_CONFIRM_SECONDS = 0.2  # between two closer looks at one tree
_LOOK_CPU_SECONDS = 0.1  # for one; 16 processes of 40 MiB each took 0.01, a thousand mappings about 0.001
_LOOK_SHARE = 4  # the time from one to the next is at least so many times what it took

_READ_BYTES = 65536
_SHARED_ANONYMOUS = b"/dev/zero (deleted)"  # what the kernel calls a mapping that is both


class Sampling:
    """No group in the kernel: the tree's memory is added up every `TICK_SECONDS`."""

    method = "sampling"

    def group(self, name: str, memory_bytes: int, pids: int) -> Group:
        return _SampledGroup(memory_bytes, pids)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of one process, from `statm`: `other` is what is mapped but neither private and writable nor the program's text.

    Memory that is shared and anonymous is in `other`, whether or not this process has touched it.
    """

    resident: int
    other: int


class _SampledGroup:
    oom_fd: int | None = None
    tick_seconds: float | None = TICK_SECONDS
    entrances: tuple[int, ...] = ()

    def __init__(self, memory_bytes: int, pids: int) -> None:
        self._limit = memory_bytes
        self._pids = pids
        self._pids_hits = 0
        self._pid: int | None = None
        self._filesystems = Filesystems()
        self._peak = 0
        self._cpu = 0.0
        self._exceeded = False
        self._next_look = 0.0
        self._sockets: SocketMemory | None = None
        self._socket_bytes = 0
        self._next_count = 0.0

    def admit(self, pid: int) -> None:
        """There is no group."""

    def watch(self, pid: int, filesystems: Filesystems, diagnostics: Sequence[int]) -> None:
        for fd in diagnostics:
            self._sockets = SocketMemory(fd)
        self._filesystems = filesystems
        self._pid = pid

    def exceeded(self) -> bool:
        if self._pid is None or self._exceeded:
            return self._exceeded
        files = self._filesystems.memory_bytes() + self._in_sockets()
        pids, tasks = _tree(self._pid)
        self._pids_hits += tasks >= self._pids
        tree = {pid: sizes for pid in pids if (sizes := _sizes(pid)) is not None}
        self._cpu = max(self._cpu, sum(map(_cpu_seconds, tree)))
        resident = files + sum(sizes.resident for sizes in tree.values())
        if resident + sum(sizes.other for sizes in tree.values()) <= self._limit:
            self._peak = max(self._peak, resident)
        elif (now := time.monotonic()) >= self._next_look:
            used = files + _look(tree, self._limit - files)
            self._next_look = time.monotonic() + max(_CONFIRM_SECONDS, _LOOK_SHARE * (time.monotonic() - now))
            self._peak = max(self._peak, used)
            self._exceeded = used > self._limit
        return self._exceeded

    def _in_sockets(self) -> int:
        """As of the last count, which is made no more often than a closer look."""
        if self._sockets is not None and (now := time.monotonic()) >= self._next_count:
            self._socket_bytes = self._sockets.total()
            self._next_count = time.monotonic() + max(_CONFIRM_SECONDS, _LOOK_SHARE * (time.monotonic() - now))
        return self._socket_bytes

    def evidence(self) -> Evidence:
        return Evidence(
            pids_limit_hits=self._pids_hits, cpu_seconds=self._cpu or None, peak_memory_bytes=self._peak or None
        )

    def remove(self) -> bool:
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        return True


def _look(tree: dict[int, _Sizes], enough: int) -> int:
    """The bytes of a tree but for its files and sockets: what is private once, and what is shared by forks once.

    Memory that is shared and anonymous is counted by the size of its mapping: pages of it that no process has in its
    table are in nobody's RSS, and still there. Cheap things come first; it ends when they are below `enough`.
    """
    give_up_at = time.thread_time() + _LOOK_CPU_SECONDS
    shared: dict[bytes, int] = {}
    unseen = 0
    for pid, sizes in tree.items():
        found = _shared_anonymous(pid, give_up_at)
        if found is None:
            unseen += sizes.other
            continue
        for inode, size in found.items():
            shared[inode] = max(shared.get(inode, 0), size)
    common = sum(shared.values()) + unseen
    private = {pid: _private_bytes(pid, sizes) for pid, sizes in tree.items()}
    for pid in sorted(private, key=private.__getitem__, reverse=True):
        if common + sum(private.values()) <= enough or time.thread_time() > give_up_at:
            break
        private[pid] = _proportional_bytes(pid, private[pid])
    return common + sum(private.values())


def _tree(root: int) -> tuple[list[int], int]:
    """The process and its descendants, and how many tasks they are: each thread is one, and each zombie.

    Orphans of a pid namespace are its pid 1's children, so none is missed. By the kernel's own lists of children: to
    read every process of the machine takes 20 ms.
    """
    pids, tasks = [root], 0
    for pid in pids:
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
            tasks += len(threads)
            for thread in threads:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    pids += map(int, file.read().split())
    return pids, tasks


def _sizes(pid: int) -> _Sizes | None:
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None  # gone
    return _Sizes(memory.rss, max(0, memory.vms - memory.text - memory.data))


def _shared_anonymous(pid: int, give_up_at: float) -> dict[bytes, int] | None:
    """The sizes of these mappings by inode; None if they could not be seen, or not in time."""
    found: dict[bytes, int] = {}
    rest = b""
    try:
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.endswith(_SHARED_ANONYMOUS):
                        addresses, _, offset, _, inode, *_ = line.split()
                        start, end = addresses.split(b"-")
                        reach = int(offset, 16) + int(end, 16) - int(start, 16)
                        found[inode] = max(found.get(inode, 0), reach)
                if time.thread_time() > give_up_at:
                    return None
    except OSError:
        return None  # it made itself undumpable, or has gone
    return found


def _private_bytes(pid: int, sizes: _Sizes) -> int:
    """What is resident and neither a file of a tmpfs nor shared and anonymous, which are counted for themselves."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return _kibibytes(file.read(), b"RssAnon:", b"RssFile:")
    except OSError:
        return sizes.resident


def _proportional_bytes(pid: int, private: int) -> int:
    """The same with each page divided by the number of processes that have it. Costs the more, the more there is."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return _kibibytes(file.read(), b"Pss_Anon:", b"Pss_File:")
    except OSError:
        return private  # gone, or it made itself undumpable: then it is counted in full


def _kibibytes(text: bytes, *keys: bytes) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(keys)) * 1024


def _cpu_seconds(pid: int) -> float:
    """Of the process and of the children that it has waited for."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
