"""Runs a command as an unprivileged user who can reach the project and the interpreter.

Owns: one private mount namespace per command. The interpreter often stands below a home that only its owner may enter:
there, such a directory is covered by an empty one in which nothing but what is needed appears.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

UID = GID = 65534  # nobody, who owns nothing

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000


@contextlib.contextmanager
def unprivileged_command() -> Iterator[list[str]]:
    """The words to put before a command. None are needed by a user who is not root."""
    yield [] if os.getuid() != 0 else [sys.executable, "-I", str(Path(__file__).resolve())]


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() if options else None) != 0:
        raise OSError(ctypes.get_errno(), f"mount on {target}: {os.strerror(ctypes.get_errno())}")


def _closed_ancestor(path: str) -> str | None:
    """The topmost directory above `path` that others may not enter."""
    for ancestor in reversed(Path(path).parents):
        if not ancestor.stat().st_mode & stat.S_IXOTH:
            return str(ancestor)
    return None


def _open_up(needed: list[str]) -> None:
    """Make the needed trees reachable, in a mount namespace that only this process and its children have."""
    os.unshare(os.CLONE_NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    closed: dict[str, list[tuple[str, int]]] = {}
    for path in needed:
        ancestor = _closed_ancestor(path)
        if ancestor is not None:
            closed.setdefault(ancestor, []).append((path, os.open(path, os.O_PATH)))
    for ancestor, trees in closed.items():
        _mount("tmpfs", ancestor, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
        for path, fd in trees:
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)
            os.close(fd)


def main(command: list[str]) -> None:
    project = str(Path(__file__).resolve().parent.parent)
    here = os.getcwd()
    _open_up(list(dict.fromkeys(map(os.path.realpath, (sys.base_prefix, sys.prefix, project)))))
    os.chdir(here)
    os.setgroups([])
    os.setresgid(GID, GID, GID)
    os.setresuid(UID, UID, UID)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
