"""Ending what a killed launcher left behind in the one moment in which bubblewrap leaves it.

bwrap's outer process dies with the launcher from a certain point on, and its child with it from a later one. If the
launcher is killed between the two (some tens of microseconds of each start), the child waits for ever to be told that
its user namespace is set up. No program has been started in it; it only costs a process.
Owns: finding these. Must not: take anything else for one.
"""

from __future__ import annotations

import contextlib
import os
import signal

from sandbox.isolation.plan import INIT
from sandbox.isolation.syscalls import pidfd_open, pidfd_send_signal

_LAUNCHER = b"sandbox.isolation.launcher"  # in the command line of every launcher


def end_orphans() -> int:
    """Kill the orphans that this user may kill; return how many there were."""
    ended = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and _is_orphan(int(name)):
            with contextlib.suppress(OSError):
                handle = pidfd_open(int(name))
                try:
                    if _is_orphan(int(name)):  # still, now that the number cannot become another's
                        pidfd_send_signal(handle, signal.SIGKILL)
                        ended += 1
                finally:
                    os.close(handle)
    return ended


def _is_orphan(pid: int) -> bool:
    """A bwrap of ours whose parent is neither a bwrap nor a launcher."""
    try:
        if os.geteuid() not in (0, os.stat(f"/proc/{pid}").st_uid):
            return False
        command = _read(pid, "cmdline").split(b"\0")
        if command[0] != b"bwrap" or INIT.encode() not in command:
            return False
        parent = int(_read(pid, "stat").rpartition(b")")[2].split()[1])
        above = _read(parent, "cmdline")
    except (OSError, ValueError, IndexError):
        return False  # it has just ended
    return not above.startswith(b"bwrap\0") and _LAUNCHER not in above


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
