"""How a launcher that was started as root gives that up: a root directory and a uid of its own.

Owns: the launcher's mount namespace and credentials. Must not: be used twice, or with a second thread.

bubblewrap run by uid 0 would map the sandbox's user to the host's root. And an unprivileged uid often cannot reach
the interpreter, which may stand below root's home. So, as root, the launcher builds a root directory of its own in a
private mount namespace, binds into it what sandboxes need and nothing else, moves there, and becomes a uid that nothing
else has. Whatever a sandbox could break out into has no host file that its programs did not see anyway.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from sandbox.isolation import syscalls as sys
from sandbox.isolation.skeleton import SYSTEM_DIRECTORIES

# systemd documents 0x70000000-0x7FFFFFFF as used by nobody (it allots containers from 0x00080000-0x6FFFFFFF). The pid,
# at most 2**22, makes each launcher's uid its own: per-user limits and signals do not cross between launchers.
_UID_BASE = 0x7000_0000

SKELETON = "/skeleton"
BWRAP = "/bwrap"


def choose_uid(pid: int, uid_map: str) -> int:
    """The uid for the launcher `pid`; inside a user namespace that has no such uid, the highest that it has."""
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    wanted = _UID_BASE + pid
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    return max(first + count - 1 for first, _, count in ranges)


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have.

    Not for what it opens. The kernel counts the descriptors that are on their way through unix sockets by uid, and
    refuses a sender when the count exceeds the sender's own limit: sandboxes have a low one, so that what they keep on
    the way never stops whoever has a high one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class PrivateRoot:
    """A root directory in a new, private mount namespace. Build it, then `enter` it.

    Raises `OSError` from any step.
    """

    def __init__(self, place: str = "/tmp") -> None:  # noqa: S108 - a mount point; the mount is private
        os.unshare(os.CLONE_NEWNS)
        sys.mount("none", "/", None, sys.MS_REC | sys.MS_PRIVATE)
        self._place = place
        self._pending: list[tuple[int, str]] = []
        self._sources: dict[str, str] = {}
        self._tmpfs = False

    def add(self, source: str, target: str) -> None:
        """Show the host's `source` at `target`. It is opened now, before anything is mounted over it."""
        self._pending.append((os.open(source, os.O_PATH | os.O_CLOEXEC), target))
        self._sources[os.path.normpath(source)] = target

    def build(self) -> Path:
        """Mount everything; return the place of the skeleton, still empty, as seen before `enter`.

        From here on what stands below `place` on the host cannot be read: all modules must be imported.
        """
        sys.mount("tmpfs", self._place, "tmpfs", sys.MS_NOSUID | sys.MS_NODEV, "mode=0755,size=64m")
        for fd, target in self._pending:
            path = self._place + target
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            sys.mount(f"/proc/self/fd/{fd}", path, None, sys.MS_BIND | sys.MS_REC)
            os.close(fd)
        for name in SYSTEM_DIRECTORIES:
            if os.path.islink(f"/{name}"):
                os.symlink(os.readlink(f"/{name}"), f"{self._place}/{name}")
        os.mkdir(self._place + "/tmp")  # noqa: S108 - bubblewrap mounts its new root there
        os.mkdir(self._place + SKELETON)
        return Path(self._place + SKELETON)

    def enter(self) -> None:
        os.chdir(self._place)
        try:
            sys.pivot_root(".", ".")
            sys.unmount_lazily(".")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The first root file system of a machine cannot be pivoted: mount over it, and move there. Unlike a plain
            # chroot this leaves the process able to make user namespaces.
            sys.mount(".", "/", None, sys.MS_MOVE)
            os.chroot(".")
        os.chdir("/")

    def locate(self, source: str) -> str:
        """Where a host path is now. Raises `FileNotFoundError` if it was not added, nor anything above it."""
        path = os.path.normpath(source)
        above = path
        while above not in self._sources:
            if above == "/":
                raise FileNotFoundError(errno.ENOENT, "not among the directories that this launcher can show", source)
            above = os.path.dirname(above)
        return os.path.normpath(self._sources[above] + path[len(above) :])


def become(uid: int, parent: int) -> None:
    """Give up every privilege for good. `parent` is the pid that this process must die with."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    settle(parent)


def settle(parent: int) -> None:
    """What holds for every launcher, whoever started it. Raises `ProcessLookupError` if the parent has gone."""
    sys.set_no_new_privileges()
    sys.die_with_parent(parent)  # after the change of credentials, which clears it
