"""Directories of the host as mounts that are nowhere yet, for the sandboxes of a launcher that was started as root.

A sandbox's files belong to the launcher's uid, which nothing else has and which is another at each start; what lies in
a working directory belongs to whoever owns that directory. The mount maps the one to the other: no file is handed
over, and no uid of the host is given to the code but that one, for this tree alone.
Owns: the user namespaces that hold such a mapping. Must not: choose a directory, or put a mount anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

from sandbox.isolation import syscalls

_MAX_MAPS = 64  # owners of directories: one for all users', and those of projects
_HOLDER = "import os; os.unshare(os.CLONE_NEWUSER); os.write(1, b'U'); os.read(0, 1)"
_OLD_KERNEL = "use a kernel of version 5.12 or later"
_REMEDIES = {
    errno.ENOSYS: _OLD_KERNEL,
    errno.EINVAL: "keep the directory on a file system whose owners can be mapped (ext4, xfs, btrfs; tmpfs from Linux "
    "6.3 on); overlayfs, on which containers have their root, is none: give a volume",
    errno.EPERM: "run sluicegate as an ordinary user where root is not the host's own, as in a container without "
    "privileges",
}

type Owner = tuple[int, int]  # uid and gid, as they are on the disk


class Trees:
    """Detached mounts in which one owner's files are the launcher's `uid` and `gid`. Any thread may use it."""

    def __init__(self, uid: int, gid: int) -> None:
        self._uid, self._gid = uid, gid
        self._maps: dict[Owner, int] = {}
        self._lock = threading.Lock()

    def has_map(self, owner: Owner) -> bool:
        """Whether `detach` takes no time for a directory of this owner's."""
        return owner in self._maps

    def make_map(self, owner: Owner) -> None:
        """Take the time (15 ms) that the first directory of an owner's needs. Raises `OSError`."""
        with self._lock:
            self._map(owner)

    def detach(self, directory: int) -> int:
        """A mount of this directory alone, without devices and set-user-id; the caller owns the descriptor.

        Raises `OSError`, whose remedy is `remedy`'s to say.
        """
        status = os.fstat(directory)
        mount = syscalls.clone_mount(directory)
        try:
            with self._lock:
                syscalls.set_mount_attributes(
                    mount, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_IDMAP,
                    propagation=syscalls.MS_PRIVATE, user_namespace=self._map((status.st_uid, status.st_gid)),
                )  # fmt: skip
        except BaseException:
            os.close(mount)
            raise
        return mount

    def close(self) -> None:
        with self._lock:
            while self._maps:
                os.close(self._maps.popitem()[1])

    def _map(self, owner: Owner) -> int:
        if owner not in self._maps:
            while len(self._maps) >= _MAX_MAPS:
                os.close(self._maps.pop(next(iter(self._maps))))
            self._maps[owner] = self._user_namespace(owner)
        return self._maps[owner]

    def _user_namespace(self, owner: Owner) -> int:
        """One in which the owner on the disk is the launcher's user. A process of its own makes it, and then ends."""
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={}, cwd="/",
        ) as holder:  # fmt: skip
            assert holder.stdin is not None
            assert holder.stdout is not None
            if holder.stdout.read(1) != b"U":
                raise OSError(errno.EPERM, "a user namespace could not be made")
            place = Path(f"/proc/{holder.pid}")
            (place / "uid_map").write_text(f"{owner[0]} {self._uid} 1")
            (place / "gid_map").write_text(f"{owner[1]} {self._gid} 1")
            namespace = os.open(place / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.suppress(BrokenPipeError):
                holder.stdin.write(b"E")
        return namespace


def remedy(error: OSError) -> str:
    """What to do where a directory could not be made a mount; empty where nothing general is known."""
    return _REMEDIES.get(error.errno or 0, "")
