"""The filter, read as the kernel reads it, and met from inside."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pyseccomp
import pytest

from sandbox.isolation import seccomp
from sandbox.isolation.plan import Filter
from tests.sandbox.isolation.conftest import PATIENCE_SECONDS, Outcome

ALLOW, KILL = "allow", "kill"
EPERM, ENOSYS = errno.EPERM, errno.ENOSYS
_AUDIT_ARCH_X86_64, _AUDIT_ARCH_I386 = 0xC000003E, 0x40000003
_X32_BIT = 0x40000000
HIGH = 0x7_0000_0000  # bits that the kernel drops from an int

x86_64_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers below are of x86_64")


def evaluate(program: bytes, number: int, arguments: tuple[int, ...], arch: int = _AUDIT_ARCH_X86_64) -> str | int:
    """Run the classic BPF that a filter is made of on one call: `allow`, `kill`, or the errno."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, arch, 0, *(value & (1 << 64) - 1 for value in padded))
    code = [struct.unpack_from("=HBBI", program, place) for place in range(0, len(program), 8)]
    accumulator, place = 0, 0
    while True:
        operation, if_true, if_false, k = code[place]
        place += 1
        match operation:
            case 0x20:  # ld [k]
                accumulator = struct.unpack_from("=I", data, k)[0]
            case 0x54:  # and #k
                accumulator &= k
            case 0x05:  # ja
                place += k
            case 0x15:
                place += if_true if accumulator == k else if_false
            case 0x35:
                place += if_true if accumulator >= k else if_false
            case 0x25:
                place += if_true if accumulator > k else if_false
            case 0x06:
                if k == 0x7FFF0000:
                    return ALLOW
                return k & 0xFFFF if k & 0xFFFF0000 == 0x00050000 else KILL
            case _:
                raise AssertionError(f"an instruction {operation:#x} that libseccomp does not make")


def number_of(name: str) -> int:
    if name == "fchmodat2":
        return 452  # on every architecture; libseccomp has its name since 2.5.5 only
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    assert isinstance(number, int)
    assert number >= 0
    return number


@pytest.fixture(scope="module")
def verdict() -> Callable[..., str | int]:
    program = seccomp.build_filter(deny_unseen_memory=False)
    return lambda name, *arguments: evaluate(program, number_of(name), arguments)


NAMESPACE_FLAGS = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
ON_A_PROCESS = ["prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"]
MODES = [("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("creat", 1), ("mkdir", 1), ("mkdirat", 2), ("mknod", 1), ("mknodat", 2), ("fchmodat2", 2)]  # fmt: skip
SET_ID = [0o4755, 0o2755, 0o6755]
UNIX, INET, INET6, NETLINK = socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK
STREAM, DGRAM, RAW = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW


@x86_64_only
@pytest.mark.parametrize(
    "name",
    [
        "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount",
        "fspick", "mount_setattr", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "add_key",
        "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "open_by_handle_at", "name_to_handle_at",
        "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "clock_settime",
        "clock_adjtime", "settimeofday", "adjtimex", "reboot", "swapon", "swapoff", "quotactl", "iopl", "ioperm",
        "acct", "syslog", "fanotify_init",
    ],
)  # fmt: skip
def test_these_calls_are_refused_whatever_their_arguments(verdict: Callable[..., str | int], name: str) -> None:
    """With EPERM."""
    assert {verdict(name), verdict(name, 1, 2, 3, 4, 5, 6), verdict(name, *[-1] * 6)} == {EPERM}


@x86_64_only
@pytest.mark.parametrize(
    "name", ["clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret", "openat2"]
)
def test_these_calls_seem_unknown(verdict: Callable[..., str | int], name: str) -> None:
    """With ENOSYS: callers then use the older way, which the filter can judge."""
    assert {verdict(name), verdict(name, *[-1] * 6)} == {ENOSYS}


@x86_64_only
@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (("clone", 0x11), ALLOW),  # fork
        (("clone", 0x3D0F00), ALLOW),  # a thread
        *((("clone", flag | 0x11), EPERM) for flag in NAMESPACE_FLAGS),
        *((("unshare", flag), EPERM) for flag in (*NAMESPACE_FLAGS, 0x80)),
        *((("unshare", flag | HIGH), EPERM) for flag in NAMESPACE_FLAGS),
        (("unshare", 0x400), ALLOW),  # CLONE_FILES
        (("personality", 0), ALLOW),
        (("personality", 0xFFFFFFFF), ALLOW),
        (("personality", HIGH), ALLOW),  # 0 to the kernel
        (("personality", 0x0040000), EPERM),  # ADDR_NO_RANDOMIZE
        (("personality", 0x0400000), EPERM),  # READ_IMPLIES_EXEC
        (("personality", 8), EPERM),
        (("personality", 0xFFFFFFFE), EPERM),
        (("personality", 0x80000000), EPERM),
        (("ioctl", 0, 0x5412), EPERM),  # TIOCSTI
        (("ioctl", 0, 0x5412 | HIGH), EPERM),
        (("ioctl", 0, 0x541C), EPERM),  # TIOCLINUX
        (("ioctl", 0, 0x541C | HIGH), EPERM),
        (("ioctl", 0, 0x5413), ALLOW),  # TIOCGWINSZ
        (("socket", UNIX, STREAM, 0), ALLOW),
        (("socket", INET, STREAM, 0), ALLOW),
        (("socket", INET, STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 6), ALLOW),
        (("socket", INET6, DGRAM, 17), ALLOW),
        (("socket", INET, STREAM, 262), ALLOW),  # MPTCP
        (("socket", NETLINK, RAW | socket.SOCK_CLOEXEC, 0), ALLOW),  # getifaddrs
        (("socket", NETLINK, RAW, 12), EPERM),  # netfilter
        (("socket", NETLINK, RAW, 15), EPERM),  # uevents
        (("socket", NETLINK | HIGH, RAW, 12), EPERM),
        (("socket", INET, RAW, 0), EPERM),
        (("socket", INET, RAW | socket.SOCK_CLOEXEC, 6), EPERM),
        (("socket", INET6 | HIGH, RAW | HIGH, 0), EPERM),
        (("socket", INET, 10, 0), EPERM),  # SOCK_PACKET
        (("socket", INET, 6, 0), EPERM),  # DCCP
        (("socket", INET, DGRAM, 1), EPERM),  # ping
        (("socket", INET6, DGRAM, 58), EPERM),
        (("socket", INET, DGRAM, 1 | HIGH), EPERM),
        (("socket", INET, STREAM, 132), EPERM),  # SCTP
        (("socket", INET, STREAM, 256), EPERM),  # SMC
        (("socketpair", UNIX, STREAM, 0), ALLOW),
        (("socketpair", INET, STREAM, 0), EPERM),
        (("socketpair", UNIX | HIGH, STREAM, 0), EPERM),
        *(((name, 1), EPERM) for name in ON_A_PROCESS),  # pid 1
        *(((name, 1 | HIGH), EPERM) for name in ON_A_PROCESS),
        *(((name, pid), ALLOW) for name in ON_A_PROCESS for pid in (0, 2, 257)),  # the program's own
        (("setpriority", 0, 0), ALLOW),  # PRIO_PROCESS
        (("setpriority", 0, 2), ALLOW),
        (("setpriority", 0 | HIGH, 1), EPERM),
        (("setpriority", 0, 1 | HIGH), EPERM),
        (("setpriority", 1, 0), EPERM),  # a group
        (("setpriority", 2, 0), EPERM),  # a user
        (("ioprio_set", 1, 0), ALLOW),
        (("ioprio_set", 1, 1), EPERM),
        (("ioprio_set", 2, 0), EPERM),
        (("ioprio_set", 3, 0), EPERM),
        *(((name, *[0] * place, bit | high), EPERM) for name, place in MODES for bit in SET_ID for high in (0, HIGH)),
        *(((name, *[0] * place, 0o1777), ALLOW) for name, place in MODES),
        (("mknod", 0, 0o10644), ALLOW),  # a pipe
        (("mknod", 0, 0o14644), EPERM),
        *((("open", 0, os.O_CREAT | os.O_WRONLY, bit), EPERM) for bit in SET_ID),
        *((("openat", 0, 0, os.O_CREAT | HIGH, bit | HIGH), EPERM) for bit in SET_ID),
        *((("openat", 0, 0, os.O_TMPFILE | os.O_RDWR, bit), EPERM) for bit in SET_ID),
        (("openat", 0, 0, os.O_CREAT, 0o1777), ALLOW),
        (("openat", 0, 0, os.O_RDONLY, 0o7777), ALLOW),  # no file is made, and the mode is whatever was there
        (("openat", 0, 0, os.O_RDONLY | os.O_DIRECTORY, 0o7777), ALLOW),
        (("sched_getaffinity", 1), ALLOW),
        (("memfd_create", 0, 0), ALLOW),
        (("shmget", 0, 0, 0), ALLOW),
        (("execve", 0, 0, 0), ALLOW),
        (("openat", 0, 0, 0), ALLOW),
        (("prctl", 0, 0, 0), ALLOW),
    ],
)
def test_these_calls_are_judged_by_their_arguments(
    verdict: Callable[..., str | int], call: tuple[str, *tuple[int, ...]], wanted: str | int
) -> None:
    """With the low half of each, as the kernel takes it."""
    assert verdict(*call) == wanted


@x86_64_only
@pytest.mark.parametrize("kind", Filter)
@pytest.mark.parametrize(
    "call",
    [
        ("fallocate", 0, 0, 0, 1 << 30), ("ioctl", 0, 0x40305828), ("ioctl", 0, 0x4030582A), ("ioctl", 0, 0x40305839),
        ("ioctl", 0, 0x40305828 | HIGH),
    ],
)  # fmt: skip
def test_no_sandbox_takes_room_without_writing(kind: Filter, call: tuple[str, *tuple[int, ...]]) -> None:
    """With EOPNOTSUPP, on which the C library writes instead."""
    program = seccomp.build_filter(kind, deny_unseen_memory=False)
    assert evaluate(program, number_of(call[0]), call[1:]) == errno.EOPNOTSUPP


@x86_64_only
@pytest.mark.parametrize("kind", [Filter.NO_UNIX_SOCKETS, Filter.NO_GROWTH])
def test_where_the_hosts_sockets_may_lie_there_is_none_that_can_be_connected(kind: Filter) -> None:
    """But those of a pair that stay what they are: streams, and packets in sequence."""
    program = seccomp.build_filter(kind, deny_unseen_memory=False)

    def answer(name: str, *arguments: int) -> str | int:
        return evaluate(program, number_of(name), arguments)

    cloexec = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    for family in (UNIX, UNIX | HIGH):
        for sort in (STREAM, DGRAM, RAW, socket.SOCK_SEQPACKET, STREAM | cloexec):
            assert answer("socket", family, sort, 0) == errno.EACCES
    for sort in (DGRAM, RAW, DGRAM | cloexec, RAW | HIGH):
        assert answer("socketpair", UNIX, sort, 0) == errno.EACCES
    for sort in (STREAM, socket.SOCK_SEQPACKET, STREAM | cloexec):
        assert answer("socketpair", UNIX, sort, 0) == ALLOW
    assert answer("socket", INET, STREAM, 0) == ALLOW


@x86_64_only
def test_in_a_full_directory_nothing_is_made_and_what_is_there_can_be_read_and_removed() -> None:
    program = seccomp.build_filter(Filter.NO_GROWTH, deny_unseen_memory=False)

    def answer(name: str, *arguments: int) -> str | int:
        return evaluate(program, number_of(name), arguments)

    made: list[tuple[str, *tuple[int, ...]]] = [
        ("mkdir",), ("mkdirat",), ("mknod",), ("mknodat",), ("symlink",), ("symlinkat",), ("link",), ("linkat",),
        ("creat",), ("rename",), ("renameat",), ("renameat2",), ("setxattr",), ("lsetxattr",), ("fsetxattr",),
        ("open", 0, os.O_CREAT | os.O_WRONLY), ("openat", 0, 0, os.O_CREAT | HIGH), ("openat", 0, 0, os.O_TMPFILE),
        ("openat", 0, 0, os.O_CREAT, 0o4755), ("ioctl", 0, 0x40049409), ("ioctl", 0, 0x4020940D), ("mmap", 0, 0, 3, 1),
        ("mmap", 0, 0, 1, 1), ("mmap", 0, 0, 3, 3), ("mmap", 0, 0, 3, 1 | HIGH),
    ]  # fmt: skip
    assert {call: answer(*call) for call in made} == dict.fromkeys(made, errno.EDQUOT)
    left: list[tuple[str, *tuple[int, ...]]] = [
        ("open", 0, os.O_RDWR), ("openat", 0, 0, os.O_RDONLY), ("openat", 0, 0, os.O_DIRECTORY), ("unlink",),
        ("unlinkat",), ("rmdir",), ("truncate",), ("ftruncate",), ("mmap", 0, 0, 3, 2), ("mmap", 0, 0, 3, 0x21),
        ("chmod", 0, 0o755), ("execve",),
    ]  # fmt: skip
    assert {call: answer(*call) for call in left} == dict.fromkeys(left, ALLOW)
    assert answer("chmod", 0, 0o4755) == EPERM
    assert answer("clone", 0x1000_0000) == EPERM


@x86_64_only
@pytest.mark.parametrize("high", [0, HIGH])
def test_every_other_family_is_refused(verdict: Callable[..., str | int], high: int) -> None:
    """All numbers up to 300 and every power of two, but four; a high bit changes nothing."""
    families = {*range(300), *(1 << bit for bit in range(32)), 0xFFFFFFFF}
    allowed = {family for family in families if verdict("socket", family | high, STREAM, 0) == ALLOW}
    assert allowed == {UNIX, INET, INET6, NETLINK}


@x86_64_only
def test_every_other_protocol_is_refused(verdict: Callable[..., str | int]) -> None:
    """All numbers up to 1000 and every power of two, but four."""
    protocols = {*range(1000), *(1 << bit for bit in range(32)), 0xFFFFFFFF}
    assert {number for number in protocols if verdict("socket", INET, STREAM, number) == ALLOW} == {0, 6, 17, 262}


@x86_64_only
def test_other_architectures_are_killed() -> None:
    """i386 and x32, where the numbers mean other calls."""
    program = seccomp.build_filter(deny_unseen_memory=False)
    assert evaluate(program, 20, (), _AUDIT_ARCH_I386) == KILL
    assert evaluate(program, 39 | _X32_BIT, ()) == KILL
    assert evaluate(program, 39, ()) == ALLOW  # getpid


@x86_64_only
def test_where_memory_is_sampled_what_cannot_be_seen_is_denied() -> None:
    """memfd, SysV shared memory and messages, but not semaphores; in the other filter they are allowed."""
    names = ("memfd_create", "shmget", "shmat", "msgget", "msgsnd")
    program = seccomp.build_filter(deny_unseen_memory=True)
    assert {evaluate(program, number_of(name), ()) for name in names} == {ENOSYS}
    assert {evaluate(program, number_of(name), ()) for name in ("semget", "semop")} == {ALLOW}
    program = seccomp.build_filter(deny_unseen_memory=False)
    assert {evaluate(program, number_of(name), ()) for name in names} == {ALLOW}


# Each prints 0, or the errno. The arguments are such that unconfined it works, or fails for another reason.
PROBES = {
    "unshare": "libc.unshare(0x10000000)",  # a user namespace
    "setns": "libc.setns(-1, 0)",
    "keyctl": "libc.syscall(250, 0, -3, 0)",  # KEYCTL_GET_KEYRING_ID of the session
    "add_key": "libc.syscall(248, b'user', b'probe', b'x', 1, -2)",
    "userfaultfd": "libc.syscall(323, 1)",
    "personality": "libc.personality(0x0040000)",
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "process_vm_readv": "libc.process_vm_readv(os.getpid(), 0, 0, 0, 0, 0)",
    "name_to_handle_at": "libc.name_to_handle_at(-1, b'x', 0, 0, 0)",
    "clone3": "libc.syscall(435, 0, 0)",
    "io_uring_setup": "libc.syscall(425, 0, 0)",
    "open_tree": "libc.syscall(428, -1, b'x', 0)",
    "pidfd_getfd": "libc.syscall(438, -1, 0, 0)",
    "an AF_ALG socket": "libc.socket(38, 5, 0)",
    "an AF_ALG socket with a high bit": "libc.syscall(41, ctypes.c_long(38 | 1 << 40), 5, 0)",
    "an AF_VSOCK socket": "libc.socket(40, 1, 0)",
    "a netfilter socket": "libc.socket(16, 3, 12)",
    "TIOCSTI": "libc.ioctl(-1, 0x5412, b'x')",
}
_PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
ctypes.set_errno(0)
print(0 if {call} >= 0 else ctypes.get_errno())
"""


@x86_64_only
@pytest.mark.parametrize("name", PROBES)
def test_a_call_that_works_outside_is_refused_inside(run: Callable[..., Outcome], name: str) -> None:
    """The same probe, first unconfined as the positive control, then in a sandbox."""
    code = textwrap.dedent(_PROBE).format(call=PROBES[name])
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if outside.stdout.strip() in (str(ENOSYS), str(errno.EAFNOSUPPORT), str(errno.EPERM)):
        pytest.skip(f"this kernel, or this user, has no {name} to begin with")
    assert outside.returncode == 0
    inside = run(code)
    assert inside.stdout.strip() == str(ENOSYS if name in ("clone3", "io_uring_setup") else EPERM)


def test_raw_and_ping_sockets_are_refused_and_ordinary_ones_are_not(run: Callable[..., Outcome]) -> None:
    """Each family."""
    outcome = run(
        "import socket as s\n"
        "for f in (s.AF_INET, s.AF_INET6):\n"
        "    for k, p in ((s.SOCK_STREAM, 0), (s.SOCK_DGRAM, 0), (s.SOCK_RAW, 255), (s.SOCK_DGRAM, 1 if f == 2 else 58)):\n"
        "        try: s.socket(f, k, p).close(); print('made')\n"
        "        except OSError as e: print(e.errno)\n"
        "a, b = s.socketpair(); a.send(b'x'); print(b.recv(1).decode())"
    )
    assert outcome.stdout.split() == ["made", "made", "1", "1"] * 2 + ["x"]
