"""Working directories of calls: whose is where, what a call's `working_dir` leads to, and the script that goes again.

A call's code has one directory of the host's at `/workspace`, the root, and is run there or in a directory below. Which
one is found out by descriptors, with the kernel's own word that no link and no `..` leads out of the root; what holds
while the code runs is that the root is all there is (`isolation/attaching.py`).
Owns: these directories and their owners on the disk, the names of scripts. Must not: know calls, or who may ask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from proxy.directories import make_private
from sandbox.contract import InvalidCall
from sandbox.isolation import syscalls
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import WORKSPACE, Workdir
from sandbox.owners import InvalidUser, Owner, check_user
from sandbox.quota import Excess, find_excess
from sandbox.state import InvalidSettings

# Owns users' files on the disk where root runs the service. Launchers take this number and their pid, which is not 0:
# no process ever has it (see `privilege.py` for the range).
USER_DATA_UID = 0x7000_0000
_SCRIPT = re.compile(r"code_exec_[0-9a-f]{16}\.py", re.ASCII)
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_MAX_PATH_BYTES = 4096  # PATH_MAX, with the NUL at its end
_RESOLVE = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
_MAX_SHOWN_CHARS = 200
_ATTEMPTS = 20  # at a way whose directories are renamed while the kernel goes it
_SYSTEM = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys", "/usr",
    "/var/cache", "/var/lib", "/var/log", "/var/run", "/var/spool",
)  # fmt: skip


class UserDataFull(Exception):
    """The directory holds as much as it may, or more; no code is run there until there is room."""

    code = "user_data_full"

    def __init__(self, excess: Excess) -> None:
        super().__init__(f"{excess.text}\nhint: {excess.hint}")
        self.excess = excess


@dataclass(frozen=True, slots=True)
class Quota:
    """What one user's directory may hold (`code_exec.user_data`)."""

    max_bytes: int
    max_files: int


class Placed:
    """Where one call's code is run, held by descriptors; use it as a context manager.

    `used` is the directory below the root, `.` for the root itself. `replaced` tells that the root was taken in place
    of what the call asked for, and `reason` why.
    """

    def __init__(self, workdir: Workdir, *, reason: str | None) -> None:
        self.workdir = workdir
        self.used = workdir.directory.encode(errors="backslashreplace").decode() or "."
        self.replaced = reason is not None
        self.reason = reason
        self._open = True

    def require_room(self) -> None:
        """Count what is there, which takes time. Raises `UserDataFull`."""
        try:
            excess = find_excess(self.workdir)
        except OSError as error:
            raise IsolationUnavailable(f"`{self.workdir.root}` could not be looked at: {error.strerror}") from error
        if excess is not None:
            raise UserDataFull(excess)

    def remove_script(self) -> None:
        """Remove what has the script's name in the directory that was held since before the start.

        Wherever that is by now, and whatever it is but a directory; no link is followed. An attempt that is to follow
        needs it done, since it writes the script anew.
        """
        if self._open:
            with contextlib.suppress(OSError):
                _unlink(self.workdir.script, self.workdir.directory_fd)

    def close(self) -> None:
        """Remove the script, if that has not been done, and give the descriptors back."""
        if self._open:
            self.remove_script()
            self._open = False
            os.close(self.workdir.directory_fd)
            os.close(self.workdir.root_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except PermissionError:
        # The code took from its owner the right to write there. Who is that owner, or root, takes it back.
        place = f"/proc/self/fd/{directory}"
        os.chmod(place, stat.S_IMODE(os.fstat(directory).st_mode) | stat.S_IRWXU)
        os.unlink(name, dir_fd=directory)


class WorkingDirectories:
    """The directories below `state_dir`, and what of the host no working directory may have in it.

    `protected` are the policy file, the audit log, the socket of the service, and their like.
    """

    def __init__(self, state_dir: Path, protected: Iterable[Path] = ()) -> None:
        self._state_dir = state_dir
        self._protected = (state_dir, *protected)

    def user_root(self, owner: Owner) -> Path:
        """The root of a user's, made if it is not there. Raises `InvalidUser`, `InvalidSettings`, `OSError`."""
        above = self._state_dir / "user_data"
        if owner.tenant:
            if not _TENANT.fullmatch(owner.tenant):
                raise InvalidUser(f"`{owner.tenant[:80]!a}` is not a tenant's name")
            above = self._state_dir / "tenants" / owner.tenant / "user_data"
        root = above / check_user(owner.user)
        make_private(root)
        with _opened(root) as descriptor:
            status = os.fstat(descriptor)
            if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:  # its code did that; without it, none could undo it
                os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            if os.geteuid() == 0 and status.st_uid == 0:
                try:
                    os.chown(f"/proc/self/fd/{descriptor}", USER_DATA_UID, USER_DATA_UID)
                except OSError as error:
                    raise InvalidSettings(
                        f"`{root}` cannot be given to the user id {USER_DATA_UID}: {error.strerror}\n"
                        "hint: run sluicegate as an ordinary user where root has few user ids, as in a container"
                    ) from error
        return root

    def check_client_root(self, root: Path) -> Path:
        """The directory that a client works in, without links. Raises `InvalidSettings` for one that code may not have.

        Started as root, what code writes there belongs to the directory's owner, and it can do with that owner's files
        in it what the owner can.
        """
        true = Path(os.path.realpath(root))
        with _opened(true) as descriptor:
            self._check(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        return true

    def place(self, root: Path, working_dir: str | None, *, quota: Quota | None, client: bool) -> Placed:
        """Where a call's code is run: in `root`, at what it names with `working_dir`.

        An absolute path and a way that lead elsewhere are replaced by the root. With `client` the root is a directory
        of a client's own, as for `check_client_root`. Raises `InvalidCall` for what is no directory of the root's, and
        `InvalidSettings` for the root.
        """
        if client:
            root = Path(os.path.realpath(root))
        with contextlib.ExitStack() as stack:
            root_fd = _open_root(root)
            stack.callback(os.close, root_fd)
            true = os.readlink(f"/proc/self/fd/{root_fd}")
            if client:
                self._check(Path(true))
            below, reason = _beneath(working_dir, (str(root), true))
            directory_fd = None if below is None else _resolve(root_fd, below, working_dir or "")
            if directory_fd is None:
                reason = reason or f"`{_shown(working_dir or '')}` leads out of the directory that calls work in"
                directory_fd = os.dup(root_fd)
            stack.callback(os.close, directory_fd)
            script = f"code_exec_{secrets.token_hex(8)}.py"
            directory = _relative(directory_fd, true, script)
            _require_writable(directory_fd, directory)
            stack.pop_all()
        max_bytes, max_files = (None, None) if quota is None else (quota.max_bytes, quota.max_files)
        workdir = Workdir(root, directory, script, root_fd, directory_fd, max_bytes, max_files)
        return Placed(workdir, reason=reason)

    def _check(self, root: Path) -> None:
        for path in map(Path, _SYSTEM):
            if _overlap(root, path) or _overlap(root, Path(os.path.realpath(path))):
                raise InvalidSettings(
                    f"`{root}` cannot be a working directory: it is the system's (`{path}`)\n"
                    "hint: name the directory of a project"
                )
        for path in self._protected:
            true = Path(os.path.realpath(path))
            if _overlap(root, true) or _same_by_number(root, true):
                raise InvalidSettings(
                    f"`{root}` cannot be a working directory: `{true}` is in it, or it is in that\n"
                    "hint: name a directory that has nothing of sluicegate's own in it"
                )


def remove_stale(root: Path, directory: str, script: str) -> None:
    """Remove the script of a call whose executor was killed. Nothing but a regular file with a script's name goes."""
    if not _SCRIPT.fullmatch(script):
        return
    with contextlib.suppress(OSError, InvalidSettings), _opened(root) as root_fd:
        resolve = _RESOLVE | syscalls.RESOLVE_NO_SYMLINKS
        descriptor = syscalls.open_resolved(root_fd, directory or ".", os.O_PATH | os.O_DIRECTORY, resolve)
        try:
            if stat.S_ISREG(os.stat(script, dir_fd=descriptor, follow_symlinks=False).st_mode):
                _unlink(script, descriptor)
        finally:
            os.close(descriptor)


def _open_root(root: Path) -> int:
    try:
        return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidSettings(
            f"`{root}` cannot be a working directory: {error.strerror}\n"
            "hint: name a directory that is there, and no link"
        ) from error


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[int]:
    descriptor = _open_root(root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _invalid(problem: str) -> InvalidCall:
    return InvalidCall([f"working_dir: {problem}"])


def _shown(text: str) -> str:
    return (text if text.isprintable() else ascii(text)[1:-1])[:_MAX_SHOWN_CHARS]


def _beneath(working_dir: str | None, roots: Iterable[str]) -> tuple[str | None, str | None]:
    """What a call's `working_dir` is relative to the root, as a text; or None, and why the root is taken instead.

    `roots` are the names that the root has on the host; inside it is `/workspace`, which is taken for it, too.
    """
    if working_dir is None or working_dir == "":
        return ".", None
    if "\0" in working_dir:
        raise _invalid("it contains a NUL character")
    try:
        size = len(working_dir.encode())
    except UnicodeEncodeError:
        raise _invalid("it has a lone surrogate, which is no character") from None
    if size >= _MAX_PATH_BYTES:
        raise _invalid(f"it has {size} bytes, and a path has at most {_MAX_PATH_BYTES - 1}")
    if not working_dir.startswith("/"):
        return working_dir, None
    for path in (working_dir, "/" + os.path.normpath(working_dir).lstrip("/")):
        for root in (*roots, WORKSPACE):
            if path == root or path.startswith(root + "/"):
                return path[len(root) :].strip("/") or ".", None
    return None, f"`{_shown(working_dir)}` is outside of the directory that calls work in"


def _resolve(root_fd: int, below: str, asked: str) -> int | None:
    """The directory, open; None where the way leads out of the root. Raises `InvalidCall`, `IsolationUnavailable`."""
    for _ in range(_ATTEMPTS):
        try:
            return syscalls.open_resolved(root_fd, below, os.O_PATH | os.O_DIRECTORY, _RESOLVE)
        except OSError as error:
            match error.errno:
                case errno.EXDEV:
                    return None
                case errno.EAGAIN:
                    continue
                case errno.ENOENT:
                    code = f"os.makedirs({below!r})" if len(below) <= _MAX_SHOWN_CHARS else "os.makedirs"
                    raise _invalid(
                        f"`{_shown(asked)}` does not exist; a call without `working_dir` can make it: `{code}`"
                    ) from None
                case errno.ENOTDIR:
                    raise _invalid(f"`{_shown(asked)}` is not a directory") from None
                case errno.ENAMETOOLONG:
                    raise _invalid("it has a part that is longer than the file system's names may be") from None
                case errno.ELOOP:
                    raise _invalid(f"`{_shown(asked)}` leads through links without end") from None
                case errno.EACCES:
                    raise _invalid(f"`{_shown(asked)}` cannot be entered: {error.strerror}") from None
            remedy = "\nhint: use a kernel of version 5.12 or later" if error.errno == errno.ENOSYS else ""
            raise IsolationUnavailable(f"a working directory could not be opened: {error.strerror}{remedy}") from error
    return None


def _relative(directory_fd: int, root: str, script: str) -> str:
    """What the kernel calls a directory, relative to the root. Raises `InvalidCall`."""
    too_long = f"the way to it has more than {_MAX_PATH_BYTES - 1} bytes"
    try:
        path = os.readlink(f"/proc/self/fd/{directory_fd}")
    except OSError:
        raise _invalid(too_long) from None
    below = path.removeprefix(root).strip("/")
    if len(os.fsencode(f"{WORKSPACE}/{below}/{script}")) >= _MAX_PATH_BYTES:
        raise _invalid(too_long)
    if path != root and not path.startswith(root + "/"):
        raise _invalid("it was moved or removed meanwhile")
    return below


def _require_writable(directory_fd: int, directory: str) -> None:
    """Where that can be known beforehand. Raises `InvalidCall`."""
    owners = stat.S_IWUSR | stat.S_IXUSR
    if os.geteuid() == 0:
        writable = os.fstat(directory_fd).st_mode & owners == owners
    else:
        writable = os.access(f"/proc/self/fd/{directory_fd}", os.W_OK | os.X_OK)
    if not writable:
        raise _invalid(f"`{_shown(directory) or '.'}` cannot be written; make it so with `chmod u+rwx`")


def _overlap(one: Path, other: Path) -> bool:
    return one == other or one in other.parents or other in one.parents


def _same_by_number(one: Path, other: Path) -> bool:
    """Whether one is the other, or is in it, under another name: a directory can be mounted at two places."""
    return bool(_numbers([one]) & _numbers([other, *other.parents]) or _numbers([other]) & _numbers(one.parents))


def _numbers(paths: Iterable[Path]) -> set[tuple[int, int]]:
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            found.add((status.st_dev, status.st_ino))
    return found
