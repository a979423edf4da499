"""The few system calls that not every build of the standard library offers. Owns: their C signatures. Decides nothing.

Those of pidfds are here by number: a Python that was built for an old C library has no names for them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
P_PIDFD = 3  # of waitid(2)
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_IDMAP = 0x10_0000
RESOLVE_NO_XDEV = 0x1
RESOLVE_NO_MAGICLINKS = 0x2
RESOLVE_NO_SYMLINKS = 0x4
RESOLVE_BENEATH = 0x8

_CLOSE_RANGE = 436  # on every architecture; the C library has it since glibc 2.34 only
_PIDFD_SEND_SIGNAL = 424  # on every architecture, as is the next
_PIDFD_OPEN = 434
_OPEN_TREE = 428  # on every architecture, as are the next
_MOVE_MOUNT = 429
_OPENAT2 = 437
_MOUNT_SETATTR = 442
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2). Raises `OSError` that names the target."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind is not None else None,
        ctypes.c_ulong(flags),
        options.encode() if options is not None else None,
    )
    _check(result, f"mount on `{target}`")


def unmount_lazily(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount `{target}`")


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.pivot_root(new_root.encode(), put_old.encode()), f"pivot_root to `{new_root}`")


def clone_mount(directory: int) -> int:
    """A mount of this directory alone, that is nowhere yet; it goes with its descriptor, which is close-on-exec.

    What is mounted below the directory is not in it. Raises `OSError`: EINVAL where the directory is in another mount
    namespace, or something is mounted below it that this process may not uncover.
    """
    flags = _OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC
    mount_: int = _libc.syscall(ctypes.c_long(_OPEN_TREE), ctypes.c_int(directory), b"", ctypes.c_uint(flags))
    _check(mount_, "open_tree")
    return mount_


def set_mount_attributes(mount_: int, attributes: int, *, propagation: int = 0, user_namespace: int = -1) -> None:
    """mount_setattr(2) on a mount that is nowhere yet; `user_namespace` is the mapping of `MOUNT_ATTR_IDMAP`.

    Raises `OSError`.
    """
    value = struct.pack("=QQQQ", attributes, 0, propagation, max(0, user_namespace))
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(mount_), b"", ctypes.c_uint(_AT_EMPTY_PATH), value,
        ctypes.c_size_t(len(value)),
    )  # fmt: skip
    _check(result, "mount_setattr")


def attach_mount(mount_: int, target: str) -> None:
    """Put a mount that is nowhere yet over `target`. Raises `OSError`."""
    result = _libc.syscall(
        ctypes.c_long(_MOVE_MOUNT), ctypes.c_int(mount_), b"", ctypes.c_int(_AT_FDCWD), target.encode(),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )  # fmt: skip
    _check(result, f"move_mount to `{target}`")


def open_resolved(directory: int, path: str, flags: int, resolve: int) -> int:
    """openat2(2), close-on-exec. `path` may not have a NUL character. Raises `OSError`: EXDEV for a way out."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    descriptor: int = _libc.syscall(
        ctypes.c_long(_OPENAT2), ctypes.c_int(directory), os.fsencode(path), how, ctypes.c_size_t(len(how))
    )
    _check(descriptor, f"open `{path}`")
    return descriptor


def close_range(first: int, last: int) -> None:
    """Close these descriptors, as many as are open. Raises `OSError` (a kernel before 5.9)."""
    result = _libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(0))
    _check(result, "close_range")


def pidfd_open(pid: int) -> int:
    """A descriptor of this process, close-on-exec. Raises `OSError`: `ProcessLookupError` if it has gone."""
    descriptor: int = _libc.syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))
    _check(descriptor, "pidfd_open")
    return descriptor


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Raises `OSError`: `ProcessLookupError` if the process has ended."""
    result = _libc.syscall(
        ctypes.c_long(_PIDFD_SEND_SIGNAL), ctypes.c_int(descriptor), ctypes.c_int(number), None, ctypes.c_uint(0)
    )
    _check(result, "pidfd_send_signal")


def _prctl(option: int, value: int, what: str) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), what)


def set_no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "set no_new_privs")


def die_with_parent(expected_parent: int) -> None:
    """SIGKILL when the thread that started this process ends. The kernel clears it at a credential change."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "set the parent-death signal")
    if os.getppid() != expected_parent:
        raise ProcessLookupError("the parent ended before the parent-death signal was set")
