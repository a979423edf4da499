"""The memory and process limits of a sandbox's whole tree, and the evidence of what they did.

Owns: cgroup directories (v1, v2); where none can be written, `sampling.py` does what can be done without. Must not:
kill processes, or know why a sandbox ended.

Only the sandbox is in its group: bubblewrap's outer process and the launcher stay outside, so that a full group never
takes the one who reports it. Directories carry the launcher's pid and start time, so that the next start can tell
those of the dead (`sweep`).

v1 kills one process of a full group and lets the rest go on: `oom_fd` becomes readable and the launcher kills the rest.
v2 kills the whole group itself (`memory.oom.group`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox.isolation.filesystems import Filesystems

PREFIX = "sluicegate-"
_V1_OPTIONAL = "cpuacct"
_LARGEST_CHARGE = 2 * 1024 * 1024  # at once, a huge page; a group is full when the next one would be too much


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the limits did. None where it could not be measured.

    `oom_kills` are processes that were killed since this group, and not one above it, was full.
    """

    oom_kills: int = 0
    pids_limit_hits: int = 0
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None


class Group(Protocol):
    """One sandbox's account."""

    oom_fd: int | None
    tick_seconds: float | None
    entrances: tuple[int, ...]  # descriptors into which pid 1 writes `0` to enter; closed by `remove`

    def admit(self, pid: int) -> None:
        """Put pid 1 into the group from outside, where it cannot enter by itself."""

    def watch(self, pid: int, filesystems: Filesystems, diagnostics: Sequence[int]) -> None:
        """Tell what to sample: the tree, file systems (the caller's), and a socket for `SocketMemory` (now its own)."""

    def exceeded(self) -> bool:
        """Whether the limit did its work. Asked when `oom_fd` is readable, and at every tick."""

    def evidence(self) -> Evidence: ...

    def remove(self) -> bool:
        """Whether nothing of it is left."""


class Accounting(Protocol):
    """Makes groups by one method."""

    method: str

    def group(self, name: str, memory_bytes: int, pids: int) -> Group: ...


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, value: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _keyed(text: str) -> dict[str, int]:
    return {
        name: int(value) for name, _, value in (line.partition(" ") for line in text.splitlines()) if value.isdigit()
    }


def _removed(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # busy: a process of it is still being buried
    return True


# --- v1 --------------------------------------------------------------------------------------------------------------


class _V1Group:
    tick_seconds: float | None = None

    def __init__(self, directories: dict[str, str], memory_bytes: int, pids: int) -> None:
        self._directories = directories
        self._memory_bytes = memory_bytes
        self.oom_fd: int | None = None
        self.entrances: tuple[int, ...] = ()
        try:
            for directory in directories.values():
                os.mkdir(directory)
            memory = directories["memory"]
            _write(f"{memory}/memory.limit_in_bytes", memory_bytes)
            with contextlib.suppress(FileNotFoundError):  # without swap accounting there is no such file
                _write(f"{memory}/memory.memsw.limit_in_bytes", memory_bytes)
            with contextlib.suppress(FileNotFoundError):  # v1 counts the buffers of TCP for themselves; at the limit,
                _write(f"{memory}/memory.kmem.tcp.limit_in_bytes", memory_bytes)  # senders wait and nobody is killed
            _write(f"{directories['pids']}/pids.max", pids)
            self.oom_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            control = os.open(f"{memory}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _write(f"{memory}/cgroup.event_control", f"{self.oom_fd} {control}")
            finally:
                os.close(control)
            for directory in directories.values():
                self.entrances += (os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC),)
        except OSError:
            self.remove()
            raise

    def admit(self, pid: int) -> None:
        """Pid 1 enters by itself: a thread that moves only itself (`tasks`) is spared the kernel's lock on all forks,

        which costs an RCU period (8 ms measured) whenever it was not taken for a while.
        """

    def watch(self, pid: int, filesystems: Filesystems, diagnostics: Sequence[int]) -> None:
        """Nothing to sample."""

    def exceeded(self) -> bool:
        """The kernel says so when it finds nothing more to reclaim, before it chooses whom to kill and counts it.

        It also says so to each group below one that is full, and counts whom it then kills.
        """
        try:
            return self.oom_fd is not None and os.eventfd_read(self.oom_fd) > 0 and self._was_full()
        except BlockingIOError:
            return False

    def _was_full(self) -> bool:
        """By the highest usage: `failcnt` stays 0 under recent kernels (6.18)."""
        peak = 0
        for name in ("memory.max_usage_in_bytes", "memory.memsw.max_usage_in_bytes"):  # the second with swap accounting
            with contextlib.suppress(FileNotFoundError):
                peak = max(peak, int(_read(f"{self._directories['memory']}/{name}")))
        return peak >= self._memory_bytes - _LARGEST_CHARGE

    def _oom_kills(self) -> int:
        if not self._was_full():
            return 0
        return _keyed(_read(f"{self._directories['memory']}/memory.oom_control")).get("oom_kill", 0)

    def evidence(self) -> Evidence:
        cpu = self._directories.get(_V1_OPTIONAL)
        return Evidence(
            oom_kills=self._oom_kills(),
            pids_limit_hits=_keyed(_read(f"{self._directories['pids']}/pids.events")).get("max", 0),
            cpu_seconds=int(_read(f"{cpu}/cpuacct.usage")) / 1e9 if cpu else None,
            peak_memory_bytes=int(_read(f"{self._directories['memory']}/memory.max_usage_in_bytes")),
        )

    def remove(self) -> bool:
        for fd in (*self.entrances, *([self.oom_fd] if self.oom_fd is not None else [])):
            os.close(fd)
        self.entrances, self.oom_fd = (), None
        left = [directory for directory in self._directories.values() if not _removed(directory)]
        return not left


class V1:
    """One directory for each controller, below `parents`, which this process may write."""

    method = "cgroup-v1"

    def __init__(self, parents: dict[str, str]) -> None:
        self._parents = parents

    def group(self, name: str, memory_bytes: int, pids: int) -> Group:
        return _V1Group({c: f"{parent}/{name}" for c, parent in self._parents.items()}, memory_bytes, pids)


# --- v2 --------------------------------------------------------------------------------------------------------------


class _V2Group:
    oom_fd: int | None = None
    tick_seconds: float | None = None
    entrances: tuple[int, ...] = ()  # `cgroup.threads` does not lead from one domain to another

    def __init__(self, directory: str, memory_bytes: int, pids: int) -> None:
        self._directory = directory
        os.mkdir(directory)
        try:
            _write(f"{directory}/memory.max", memory_bytes)
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                _write(f"{directory}/memory.swap.max", 0)
            _write(f"{directory}/memory.oom.group", 1)
            _write(f"{directory}/pids.max", pids)
        except OSError:
            self.remove()
            raise

    def admit(self, pid: int) -> None:
        _write(f"{self._directory}/cgroup.procs", pid)

    def watch(self, pid: int, filesystems: Filesystems, diagnostics: Sequence[int]) -> None:
        """Nothing to sample."""

    def exceeded(self) -> bool:
        return self._oom_kills() > 0

    def _oom_kills(self) -> int:
        """`oom_kill` counts whoever's limit it was; `oom` is this group's."""
        return self._events("memory", "oom_kill") if self._events("memory", "oom") else 0

    def _events(self, controller: str, key: str) -> int:
        return _keyed(_read(f"{self._directory}/{controller}.events")).get(key, 0)

    def evidence(self) -> Evidence:
        peak = None
        with contextlib.suppress(FileNotFoundError):  # `memory.peak` came with Linux 5.19
            peak = int(_read(f"{self._directory}/memory.peak"))
        return Evidence(
            oom_kills=self._oom_kills(),
            pids_limit_hits=self._events("pids", "max"),
            cpu_seconds=_keyed(_read(f"{self._directory}/cpu.stat")).get("usage_usec", 0) / 1e6,
            peak_memory_bytes=peak,
        )

    def remove(self) -> bool:
        return _removed(self._directory)


class V2:
    """Directories below `parent`, a subtree of this process's own with the controllers enabled."""

    method = "cgroup-v2"

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def group(self, name: str, memory_bytes: int, pids: int) -> Group:
        return _V2Group(f"{self._parent}/{name}", memory_bytes, pids)
