"""The closed world the tests run in: a network namespace of the test process's own, with nothing but `lo`.

Every address of both families is local there, so a test's server can stand at any public, private or metadata address,
a leak of the product's arrives at a server that records it, and no packet can leave the machine. The resolver's
configuration is replaced in a mount namespace of the test process's own: names are answered by the test's DNS server.

Owns: the namespaces of this process. Must not: know the product.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import itertools
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MARK = "SLUICEGATE_TEST_WORLD"
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_RTM_NEWADDR, _RTM_NEWROUTE = 20, 24
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 1, 4, 0x200, 0x400
_RTA_OIF, _RTA_PREFSRC = 4, 7
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RT_TABLE_LOCAL, _RTPROT_STATIC, _RT_SCOPE_HOST, _RTN_LOCAL = 255, 4, 254, 2

OWN_ADDRESS = "20.255.0.1"  # a public address that an interface of this world has, as a server in a cloud does

_octets = itertools.count(1)


def public_address() -> str:
    """A public IPv4 address that nobody else in this process has. It exists in the closed world only."""
    number = next(_octets)
    return f"20.1.{number >> 8}.{number & 255}"


def public_address_v6() -> str:
    """A public IPv6 address that nobody else in this process has. It exists in the closed world only."""
    return f"2600:1::{next(_octets):x}"


def enter() -> None:
    """Move this process into a closed world. Raises `OSError` when that cannot be: then no test may run.

    Must be called while the process has one thread, unless it is root. The threads and children started later follow.
    """
    if os.environ.get(_MARK) == _place():
        return
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)
    else:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET | os.CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _lo_up()
    index = socket.if_nametoindex("lo")
    # Without a preferred source the peer address of a connection would be its destination's.
    _add_local_default(socket.AF_INET, index, ipaddress.ip_address("127.0.0.1").packed)
    _add_local_default(socket.AF_INET6, index, None)
    _add_address(index, ipaddress.IPv4Address(OWN_ADDRESS))
    # The tests' servers stand at ports 53, 80 and 443, also when nobody is root.
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    # An address that is local by route only can be bound over IPv4, but over IPv6 not without this.
    Path("/proc/sys/net/ipv6/ip_nonlocal_bind").write_text("1")
    _replace("/etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:5 attempts:1\n")
    _replace("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    os.environ[_MARK] = _place()


@contextlib.contextmanager
def small_filesystem(directory: Path, size_bytes: int) -> Iterator[None]:
    """An empty file system of that size over a directory, for this process and the children it starts meanwhile."""
    _mount("none", str(directory), 0, "tmpfs", f"size={size_bytes}")
    try:
        yield
    finally:
        ctypes.CDLL(None).umount2(str(directory).encode(), _MNT_DETACH)


@contextlib.contextmanager
def hidden(path: str) -> Iterator[None]:
    """No program stands at `path`, for this process and the children it starts meanwhile."""
    _mount("/dev/null", os.path.realpath(path), _MS_BIND)
    try:
        yield
    finally:
        ctypes.CDLL(None).umount2(os.path.realpath(path).encode(), _MNT_DETACH)


def adopt_orphans() -> None:
    """From now on the descendants of a child that dies become children of this process: none can be overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _place() -> str:
    """This process's namespace and its part in a distributed run: each worker has a world of its own."""
    return f"{os.readlink('/proc/thread-self/ns/net')} {os.environ.get('PYTEST_XDIST_WORKER', '')}"


def _mount(source: str, target: str, flags: int, kind: str | None = None, data: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    kind_bytes, data_bytes = (None if text is None else text.encode() for text in (kind, data))
    if libc.mount(source.encode(), target.encode(), kind_bytes, flags, data_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _replace(path: str, text: str) -> None:
    """Put a file over another one, for this process and its children only."""
    if os.path.exists(path) and Path(path).read_text() == text:
        return  # a worker's parent has done so; over a file that has no name any more nothing can be mounted
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    target = os.path.realpath(path)
    if not os.path.exists(target):
        raise FileNotFoundError(f"`{path}` does not exist, so it cannot be replaced for the tests")
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
    _mount(file.name, target, _MS_BIND)
    os.unlink(file.name)


def _lo_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        flags = struct.unpack("16sH22x", request)[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _netlink(kind: int, body: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_CREATE | _NLM_F_EXCL
        sock.send(struct.pack("IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        error = struct.unpack_from("i", sock.recv(65536), 16)[0]
    if error:
        raise OSError(-error, os.strerror(-error))


def _add_local_default(family: socket.AddressFamily, index: int, source: bytes | None) -> None:
    body = struct.pack("BBBBBBBBI", family, 0, 0, 0, _RT_TABLE_LOCAL, _RTPROT_STATIC, _RT_SCOPE_HOST, _RTN_LOCAL, 0)
    body += _attribute(_RTA_OIF, struct.pack("i", index))
    if source is not None:
        body += _attribute(_RTA_PREFSRC, source)
    _netlink(_RTM_NEWROUTE, body)


def _add_address(index: int, address: ipaddress.IPv4Address) -> None:
    body = struct.pack("BBBBi", socket.AF_INET, 32, 0, 0, index)
    _netlink(_RTM_NEWADDR, body + _attribute(_IFA_LOCAL, address.packed) + _attribute(_IFA_ADDRESS, address.packed))


@dataclass(frozen=True)
class Traffic:
    """What this world's kernel has counted: connections opened, datagrams sent (both families)."""

    tcp_opened: int
    udp_sent: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.tcp_opened - other.tcp_opened, self.udp_sent - other.udp_sent)


def traffic() -> Traffic:
    """The counters now. They count what is sent from this world, so not what stays inside a sandbox's own."""
    rows = [line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()]
    values = {
        (head[0], name): int(value)
        for head, data in itertools.pairwise(rows)
        if head[0] == data[0]
        for name, value in zip(head[1:], data[1:], strict=True)
    }
    six = dict(line.split() for line in Path("/proc/thread-self/net/snmp6").read_text().splitlines())
    return Traffic(
        values["Tcp:", "ActiveOpens"], values["Udp:", "OutDatagrams"] + int(six.get("Udp6OutDatagrams", "0"))
    )
