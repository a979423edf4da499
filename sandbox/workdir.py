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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from proxy.directories import make_private
from sandbox.contract import InvalidCall
from sandbox.isolation import syscalls
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import WORKSPACE, Workdir
from sandbox.owners import InvalidUser, Owner, check_user
from sandbox.protected import Place, check, installation, settings_of_clients, way_of
from sandbox.quota import excess_of, find_usage, low_space
from sandbox.state import InvalidSettings

# Owns users' files on the disk where root runs the service. Launchers take this number and their pid, which is not 0:
# no process ever has it (see `privilege.py` for the range).
USER_DATA_UID = 0x7000_0000
FULL = "user_data_full"
_SCRIPT = re.compile(r"code_exec_[0-9a-f]{16}\.py", re.ASCII)
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_MAX_PATH_BYTES = 4096  # PATH_MAX, with the NUL at its end
_RESOLVE_BELOW = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS
_RESOLVE = _RESOLVE_BELOW | syscalls.RESOLVE_NO_XDEV
_ANYWHERE = -1  # for a path that is absolute
_MAX_SHOWN_CHARS = 200
_ATTEMPTS = 20  # at a way whose directories are renamed while the kernel goes it


@dataclass(frozen=True, slots=True)
class Quota:
    """What one user's directory may hold (`code_exec.user_data`)."""

    max_bytes: int
    max_files: int


class Placed:
    """Where one call's code is run, held by descriptors; use it as a context manager.

    `used` is the directory below the root, `.` for the root itself. `replaced` tells that the root was taken in place
    of what the call asked for, and `reason` why. `full`, once `require_room` has been waited for, tells in words that
    nothing more may be put there.
    """

    def __init__(self, workdir: Workdir, *, reason: str | None) -> None:
        self.workdir = workdir
        self.used = workdir.directory.encode(errors="backslashreplace").decode() or "."
        self.replaced = reason is not None
        self.reason = reason
        self.full: str | None = None
        self._open = True

    async def require_room(self) -> None:
        """Find out what there is room for. In a directory that is full, code may read and remove, and nothing else.

        Raises `IsolationUnavailable` where the host's file system is full.
        """
        try:
            if (low := low_space(self.workdir.root_fd)) is not None:
                raise IsolationUnavailable(f"{low.text}\nhint: {low.hint}")
            found = await find_usage(self.workdir)
        except OSError as error:
            raise IsolationUnavailable(f"`{self.workdir.root}` could not be looked at: {error.strerror}") from error
        if found is None or self.workdir.max_bytes is None:
            return
        if (excess := excess_of(found, self.workdir)) is None:
            self.workdir = replace(self.workdir, room_bytes=self.workdir.max_bytes - found.bytes)
            return
        self.workdir = replace(self.workdir, full=True)
        self.full = f"{FULL}: {excess.text}; until there is room, code can read and remove, and make and write nothing"

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

    `protected` tells, each time, what that is beside the state directory and this program: the policy file, the audit
    log, the socket of the service, and their like.
    """

    def __init__(self, state_dir: Path, protected: Callable[[], Iterable[Place]] = tuple) -> None:
        self._state_dir = state_dir.absolute()
        self._protected = protected

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
        with _opened(root, links=True) as descriptor:
            true = _name_of(descriptor)
        self._check(true)
        return Path(true)

    def allows(self, placed: Placed) -> bool:
        """Whether a client's directory that was open before may still be had."""
        try:
            self._check(_name_of(placed.workdir.root_fd))
        except InvalidSettings:
            return False
        return True

    def place(self, root: Path, working_dir: str | None, *, quota: Quota | None, client: bool) -> Placed:
        """Where a call's code is run: in `root`, at what it names with `working_dir`.

        An absolute path and a way that lead elsewhere are replaced by the root. With `client` the root is a directory
        of a client's own, as `check_client_root` gave it: no link is followed to it. Raises `InvalidCall` for what is
        no directory of the root's, and `InvalidSettings` for the root.
        """
        root_fd = _open_root(root, links=False) if client else _open_root(root)
        return self._placed(root_fd, str(root), working_dir, quota=quota, client=client)

    def place_below(self, allowed: Sequence[Path], directory: Path, working_dir: str | None) -> Placed | None:
        """As `place` with `client`, in a directory that a client told; None where it is in none of those allowed.

        It is opened below an allowed one, whose name it begins with, by the kernel's own word that no link and no `..`
        leads out; what is looked at, and then used, is what was opened. Raises as `place`.
        """
        for one in allowed:
            below = _below(str(directory), (str(one), way_of(one).true))
            if below is None:
                continue
            above = self._open_allowed(one, allowed)
            try:
                root_fd = _open_below(above, below, directory)
            finally:
                os.close(above)
            if root_fd is not None:
                return self._placed(root_fd, str(directory), working_dir, quota=None, client=True)
        return None

    def _placed(self, root_fd: int, name: str, working_dir: str | None, *, quota: Quota | None, client: bool) -> Placed:
        """It takes the descriptor of the root over."""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, root_fd)
            true = _name_of(root_fd)
            if client:
                self._check(true)
            below, reason = _beneath(working_dir, (name, true))
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
        workdir = Workdir(Path(true), directory, script, root_fd, directory_fd, max_bytes, max_files, client)
        return Placed(workdir, reason=reason)

    def _check(self, root: str) -> None:
        own = Place(self._state_dir, "the state directory")
        check(root, (own, *installation(), *settings_of_clients(), *self._protected()))

    def _open_allowed(self, allowed: Path, every: Sequence[Path]) -> int:
        """An allowed directory, open. Code that may work in one must not be able to lead another elsewhere."""
        way = way_of(allowed)
        written = [str(self._state_dir), *(way_of(path).true for path in every)]
        for link in way.links:
            if any(link.startswith(f"{place}/") for place in written):
                raise InvalidSettings(
                    f"`{allowed}` cannot be worked in: the link `{link}` on the way to it lies where code may write\n"
                    "hint: write the directory in `code_exec.working_directories` as it is without links"
                )
        return _open_root(Path(way.true), links=False)


def remove_stale(root: Path, directory: str, script: str) -> None:
    """Remove the script of a call whose executor was killed. Nothing but a regular file with a script's name goes."""
    if not _SCRIPT.fullmatch(script):
        return
    with contextlib.suppress(OSError, InvalidSettings), _opened(root, links=False) as root_fd:
        resolve = _RESOLVE | syscalls.RESOLVE_NO_SYMLINKS
        descriptor = syscalls.open_resolved(root_fd, directory or ".", os.O_PATH | os.O_DIRECTORY, resolve)
        try:
            if stat.S_ISREG(os.stat(script, dir_fd=descriptor, follow_symlinks=False).st_mode):
                _unlink(script, descriptor)
        finally:
            os.close(descriptor)


def _open_root(root: Path, *, links: bool | None = None) -> int:
    """By default links may be on the way, and the directory is none. Raises `InvalidSettings`."""
    flags = os.O_PATH | os.O_DIRECTORY
    try:
        if links is False:
            resolve = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
            return syscalls.open_resolved(_ANYWHERE, str(root), flags, resolve)
        return os.open(root, flags | (0 if links else os.O_NOFOLLOW) | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidSettings(
            f"`{root}` cannot be a working directory: {os.strerror(error.errno or 0)}\n"
            "hint: name a directory that is there, and no link"
        ) from error


def _open_below(above: int, below: str, directory: Path) -> int | None:
    """None where it leads out. Raises `InvalidSettings`."""
    for _ in range(_ATTEMPTS):
        try:
            return syscalls.open_resolved(above, below, os.O_PATH | os.O_DIRECTORY, _RESOLVE_BELOW)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return None
            if error.errno != errno.EAGAIN:
                raise InvalidSettings(
                    f"`{directory}` cannot be a working directory: {os.strerror(error.errno or 0)}\n"
                    "hint: name a directory that is there"
                ) from error
    return None


def _name_of(descriptor: int) -> str:
    """What the kernel calls a directory."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _below(path: str, roots: Iterable[str]) -> str | None:
    """What a path is relative to the first of the roots whose name it begins with; `.` for itself."""
    for one in (path, "/" + os.path.normpath(path).lstrip("/")):
        for root in roots:
            if one == root or one.startswith(root.rstrip("/") + "/"):
                return one[len(root) :].strip("/") or "."
    return None


@contextlib.contextmanager
def _opened(root: Path, *, links: bool | None = None) -> Iterator[int]:
    descriptor = _open_root(root, links=links)
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
    below = _below(working_dir, (*roots, WORKSPACE))
    if below is None:
        return None, f"`{_shown(working_dir)}` is outside of the directory that calls work in"
    return below, None


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
        path = _name_of(directory_fd)
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
