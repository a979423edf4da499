"""Finding, making and sweeping the cgroup directories under which a launcher's groups stand.

Owns: where in the hierarchies. Must not: know groups of attempts (`memory.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sandbox.isolation.memory import PREFIX

_LEAF = "launcher"
_DEAD_STATES = "ZXx"  # a zombie that nobody waits for is dead, too
_V1_CONTROLLERS = {"memory": True, "pids": True, "cpuacct": False}  # whether it is needed


@dataclass(frozen=True, slots=True)
class Subtree:
    """Directories of one launcher's own: `directories` by controller for v1, under the key `unified` for v2."""

    version: Literal["v1", "v2"]
    directories: dict[str, str]


def start_time(pid: int) -> str | None:
    """In clock ticks since boot: with the pid, a name that no other process ever has. None if it does not run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in _DEAD_STATES else fields[19]


def own_name() -> str:
    return f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"


def _is_dead(name: str) -> bool:
    pid, _, started = name.removeprefix(PREFIX).partition("-")
    return pid.isdigit() and start_time(int(pid)) != started


def remove_tree(directory: str) -> None:
    """Remove a cgroup directory and those below it. What is busy or gone is left."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _sweep(parent: str) -> None:
    """Remove what launchers that were killed left behind. Their sandboxes died with them."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False) and _is_dead(entry.name):
                remove_tree(entry.path)


def _mounts() -> Iterator[tuple[str, str, str]]:
    """(file system type, mount point, super options) of each cgroup mount."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            if kind in ("cgroup", "cgroup2"):
                yield kind, before.split()[4].replace("\\040", " "), options


def _own_paths() -> dict[str, str]:
    """Controller → this process's path in its hierarchy; v2's under `unified`."""
    paths = {}
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(",") if controllers else ["unified"]:
                paths[controller] = path
    return paths


def make_subtree(uid: int, gid: int) -> Subtree | None:
    """A subtree of this process's own, which `uid` may write. None if no hierarchy lets us."""
    return _make_v1(uid, gid) or _make_v2(uid, gid)


def _make_v1(uid: int, gid: int) -> Subtree | None:
    own = _own_paths()
    made: dict[str, str] = {}
    for controller, needed in _V1_CONTROLLERS.items():
        point = next(
            (p for kind, p, options in _mounts() if kind == "cgroup" and controller in options.split(",")), None
        )
        directory = _make_v1_directory(point, own.get(controller, "/"), uid, gid) if point else None
        if directory is not None:
            made[controller] = directory
        elif needed:
            for path in made.values():
                remove_tree(path)
            return None
    return Subtree("v1", made)


def _make_v1_directory(point: str, own: str, uid: int, gid: int) -> str | None:
    """At the top of the hierarchy, where the next start finds what was left, from wherever it is started;

    but below this process's own group if that has a memory limit, which must go on holding.
    """
    parents = [point, point + own]
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{point}{own}/memory.limit_in_bytes", encoding="ascii") as file,
    ):
        if int(file.read()) < 1 << 60:
            parents.reverse()
    for parent in parents:
        _sweep(parent)
        directory = f"{parent.rstrip('/')}/{own_name()}"
        with contextlib.suppress(OSError):
            os.mkdir(directory)
            os.chown(directory, uid, gid)
            return directory
    return None


def _make_v2(uid: int, gid: int) -> Subtree | None:
    """Beside this process's group, in a subtree that was delegated with the service in a leaf of its own.

    This process moves into the subtree: to move another, one must be able to write the group above both.
    """
    point = next((p for kind, p, _ in _mounts() if kind == "cgroup2"), None)
    own = _own_paths().get("unified")
    if point is None or own is None:
        return None
    for parent in dict.fromkeys((os.path.dirname(point + own.rstrip("/")) if own != "/" else point, point)):
        if not parent.startswith(point):
            continue
        _sweep(parent)
        directory = f"{parent.rstrip('/')}/{own_name()}"
        leaf = f"{directory}/{_LEAF}"
        try:
            with contextlib.suppress(OSError), open(f"{parent}/cgroup.subtree_control", "w", encoding="ascii") as file:
                file.write("+memory +pids")
            os.mkdir(directory)
            with open(f"{directory}/cgroup.subtree_control", "w", encoding="ascii") as file:
                file.write("+memory +pids")
            os.mkdir(leaf)
            with open(f"{leaf}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
            for path in (directory, f"{directory}/cgroup.procs", f"{directory}/cgroup.subtree_control"):
                os.chown(path, uid, gid)
            return Subtree("v2", {"unified": directory})
        except OSError:
            with contextlib.suppress(OSError), open(f"{point}{own}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
            remove_tree(directory)
    return None
