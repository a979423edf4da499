"""The seccomp filter of every sandbox, built once through libseccomp.

Owns: which system calls a program may not make, and the answer it gets. Must not: load the filter (bubblewrap does).

The filter denies by name and otherwise allows: the namespaces, the absent capabilities and the empty network are what
confines; this takes away the kernel's less trodden ground, and the few calls that work without any privilege.

Arguments are 64 bits wide to the filter and 32 to the kernel's `int`s: a test for equality is passed by setting a high
bit that the kernel then drops. So values are denied by masked compares of the low half, or by `NE`, which a high bit
can only make deny more. libseccomp takes one compare per argument and rule, hence the rules per bit.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable

import pyseccomp

from proxy import memory_file
from sandbox.isolation.plan import Filter

_LOW = 0xFFFF_FFFF

_EPERM = (
    # namespaces and mounts, by the old interface and the new
    "setns mount umount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick "
    "mount_setattr "
    # other processes' memory and descriptors
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd move_pages migrate_pages "
    # kernel objects and interfaces that no program here needs
    "add_key request_key keyctl bpf perf_event_open userfaultfd fanotify_init lookup_dcookie nfsservctl "
    "open_by_handle_at name_to_handle_at modify_ldt vm86 vm86old uselib sysfs _sysctl "
    # the machine
    "init_module finit_module delete_module create_module get_kernel_syms query_module kexec_load kexec_file_load "
    "clock_settime clock_settime64 clock_adjtime clock_adjtime64 settimeofday stime adjtimex reboot swapon swapoff "
    "quotactl quotactl_fd acct syslog vhangup iopl ioperm sethostname setdomainname"
).split()

# Programs probe for these and have a way without them, if the kernel seems not to know them.
_ENOSYS = "clone3 io_uring_setup io_uring_enter io_uring_register memfd_secret openat2".split()

# Memory that neither RSS nor the size of a file system shows. Semaphores stay: they hold next to none.
_UNSEEN_MEMORY = "memfd_create shmget shmat shmctl msgget msgsnd".split()

# Calls that change another process, which its number as the first argument names.
_ON_A_PROCESS = "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr".split()
_PID_1 = 1  # the only process inside that is not the program's own; it has one thread
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1

_CLONE_NAMESPACES = (0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
_CLONE_NEWTIME = 0x80  # unshare only: in clone's flags these bits are the exit signal

_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_IPPROTO_MPTCP = 262  # Go and Node listen with it
_PROTOCOLS = (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP, _IPPROTO_MPTCP)
_SOCKET_TYPE_MASK = 0xF
_DENIED_TYPES = (socket.SOCK_RAW, 6, 10)  # SOCK_DCCP; SOCK_PACKET, by which AF_INET becomes AF_PACKET
_NETLINK_ROUTE = 0

# A file with these bits could be run by somebody on the host, where a working directory is. Which argument is the mode,
# and, of calls that look at it only when they make a file, which are the flags. openat2 has both behind a pointer.
_SET_ID_BITS = (stat.S_ISUID, stat.S_ISGID)
_MODES = {
    "chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mkdir": 1, "mkdirat": 2, "mknod": 1,
    "mknodat": 2,
}  # fmt: skip
_NUMBERS = {"fchmodat2": 452, "setxattrat": 463}  # on every architecture; libseccomp has the name since 2.5.5 only
_MODES_OF_NEW = {"open": (1, 2), "openat": (2, 3)}
_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY
_MAKING = (os.O_CREAT, _TMPFILE)

# Room on a disk by the gigabyte within a moment, faster than anybody can look. The C library then writes zeros instead.
_FALLOCATE_IOCTLS = (0x4030_5828, 0x4030_582A, 0x4030_5839)  # FS_IOC_RESVSP, FS_IOC_RESVSP64, FS_IOC_ZERO_RANGE

# What makes a tree hold more while no file may become longer: a name, an attribute, a page of a hole that is written to
# by a mapping, another file's blocks. Sockets are names, too.
_GROWING = (
    "mkdir mkdirat mknod mknodat symlink symlinkat link linkat creat rename renameat renameat2 setxattr lsetxattr "
    "fsetxattr setxattrat"
).split()
_CLONING_IOCTLS = (0x4004_9409, 0x4020_940D)  # FICLONE, FICLONERANGE
_MAP_SHARED, _MAP_ANONYMOUS = 0x1, 0x20  # MAP_SHARED_VALIDATE has the bit of MAP_SHARED
# Of a pair, these are datagram sockets (to the kernel, raw ones are), which can be connected anew, to any path.
_UNCONNECTED_TYPES = (socket.SOCK_DGRAM, socket.SOCK_RAW)

_TIOCSTI = 0x5412  # types into the terminal
_TIOCLINUX = 0x541C  # pastes into it


def _denied_values(argument: int, allowed: Iterable[int]) -> list[pyseccomp.Arg]:
    """Compares that together match every 32-bit value of `argument` but the allowed ones."""
    allowed = frozenset(allowed)
    union = 0
    for value in allowed:
        union |= value
    low_bits = 6
    compares = [
        pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, 1 << bit, 1 << bit)
        for bit in range(low_bits, 32)
        if not union >> bit & 1
    ]
    high = [value & ~((1 << low_bits) - 1) & _LOW for value in (*allowed, 0)]
    for page in sorted(set(high)):
        compares += [
            pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, _LOW, value)
            for value in range(page, page + (1 << low_bits))
            if value not in allowed
        ]
    return compares


def _build(kind: Filter, *, deny_unseen_memory: bool) -> pyseccomp.SyscallFilter:
    seccomp = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    # Calls of another architecture (i386, x32) have other numbers, which no rule here would match.
    seccomp.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    eperm, enosys = pyseccomp.ERRNO(errno.EPERM), pyseccomp.ERRNO(errno.ENOSYS)

    def deny(action: int, name: str, *compares: pyseccomp.Arg) -> None:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        assert isinstance(number, int)
        if number < 0:
            number = _NUMBERS.get(name, number)
        if number >= 0:  # negative: this architecture, or this libseccomp, has no such call
            seccomp.add_rule(action, number, *compares)

    def masked(argument: int, mask: int, value: int) -> pyseccomp.Arg:
        return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)

    for name in _EPERM:
        deny(eperm, name)
    for name in _ENOSYS + (_UNSEEN_MEMORY if deny_unseen_memory else []):
        deny(enosys, name)

    for flag in _CLONE_NAMESPACES:
        deny(eperm, "clone", masked(0, flag, flag))
        deny(eperm, "unshare", masked(0, flag, flag))
    deny(eperm, "unshare", masked(0, _CLONE_NEWTIME, _CLONE_NEWTIME))

    # A value with some bit set and the next one clear, in a ring, is neither 0 (PER_LINUX) nor all ones (the query).
    for bit in range(32):
        following = (bit + 1) % 32
        deny(eperm, "personality", masked(0, 1 << bit | 1 << following, 1 << bit))

    for name in _ON_A_PROCESS:
        deny(eperm, name, masked(0, _LOW, _PID_1))
    for name, who_process in (("setpriority", _PRIO_PROCESS), ("ioprio_set", _IOPRIO_WHO_PROCESS)):
        deny(eperm, name, pyseccomp.Arg(0, pyseccomp.NE, who_process))  # of a group or a user, which pid 1 is in
        deny(eperm, name, masked(1, _LOW, _PID_1))

    # Where nothing can be made, there is one rule for these calls: libseccomp takes none that another goes into.
    refused = _GROWING if kind is Filter.NO_GROWTH else []
    for bit in _SET_ID_BITS:
        for name, mode in _MODES.items():
            if name not in refused:
                deny(eperm, name, masked(mode, bit, bit))
        for name, (flags, mode) in _MODES_OF_NEW.items():
            for making in _MAKING if kind is not Filter.NO_GROWTH else ():
                deny(eperm, name, masked(flags, making, making), masked(mode, bit, bit))

    for request in (_TIOCSTI, _TIOCLINUX):
        deny(eperm, "ioctl", masked(1, _LOW, request))

    for compare in _denied_values(0, _FAMILIES):
        deny(eperm, "socket", compare)
    for compare in _denied_values(2, _PROTOCOLS):
        deny(eperm, "socket", compare)
    for family in (socket.AF_INET, socket.AF_INET6):
        for number in _DENIED_TYPES:
            deny(eperm, "socket", masked(0, _LOW, family), masked(1, _SOCKET_TYPE_MASK, number))
    netlink = masked(0, _LOW, socket.AF_NETLINK)
    deny(eperm, "socket", netlink, pyseccomp.Arg(2, pyseccomp.NE, _NETLINK_ROUTE))
    deny(eperm, "socketpair", pyseccomp.Arg(0, pyseccomp.NE, socket.AF_UNIX))

    eopnotsupp = pyseccomp.ERRNO(errno.EOPNOTSUPP)
    deny(eopnotsupp, "fallocate")
    for request in _FALLOCATE_IOCTLS:
        deny(eopnotsupp, "ioctl", masked(1, _LOW, request))

    if kind is not Filter.COMMON:
        eacces = pyseccomp.ERRNO(errno.EACCES)
        deny(eacces, "socket", masked(0, _LOW, socket.AF_UNIX))
        for number in _UNCONNECTED_TYPES:
            deny(eacces, "socketpair", masked(1, _SOCKET_TYPE_MASK, number))

    if kind is Filter.NO_GROWTH:
        edquot = pyseccomp.ERRNO(errno.EDQUOT)
        for name in refused:
            deny(edquot, name)
        for name, (flags, _) in _MODES_OF_NEW.items():
            for making in _MAKING:
                deny(edquot, name, masked(flags, making, making))
        for request in _CLONING_IOCTLS:
            deny(edquot, "ioctl", masked(1, _LOW, request))
        deny(edquot, "mmap", masked(3, _MAP_SHARED | _MAP_ANONYMOUS, _MAP_SHARED))
    return seccomp


def build_filter(kind: Filter = Filter.COMMON, *, deny_unseen_memory: bool) -> bytes:
    """The filter as BPF, for `bwrap --seccomp`.

    `deny_unseen_memory` where memory is sampled, not accounted for by the kernel. Raises `OSError` from libseccomp.
    """
    seccomp = _build(kind, deny_unseen_memory=deny_unseen_memory)
    with open(memory_file.create("seccomp"), "w+b") as file:
        seccomp.export_bpf(file)
        file.seek(0)
        return file.read()
