"""A sandbox's network: every address local, all TCP captured, the listeners. Raw netlink, no binaries.

Owns: what is set inside one network namespace, by a process that has joined it with the namespace's capabilities.
Must not: decide anything, or speak to anything outside that namespace.

The routes make every address local (AnyIP); one TPROXY rule per family then gives every TCP connection, whatever its
address and port, to one listener, on which `getsockname()` of an accepted socket is the address that was dialled.
127/8 and ::1 are left alone, so that a server of the program's own works, and TCP port 53 is left to the DNS listener.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct

EXPLICIT_PORT = 3128
DNS_PORT = 53
CATCH_PORT = 1  # below ip_unprivileged_port_start, so that no program inside can want it

_LISTEN_BACKLOG = 512

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_RTMGRP_LINK = 1

_NLMSG_ERROR = 2
_NLM_REQUEST_ACK = 0x1 | 0x4
_NLM_CREATE = 0x400
_NLM_EXCL = 0x200
_NLM_APPEND = 0x800
_RTM_NEWROUTE = 24
_RTA_OIF = 4
_RTA_PREFSRC = 7
_RT_TABLE_LOCAL = 255
_RTPROT_BOOT = 3
_RT_SCOPE_HOST = 254
_RTN_LOCAL = 2

_NETLINK_NETFILTER = 12
_NFNL_BATCH_BEGIN = 0x10
_NFNL_BATCH_END = 0x11
_NFNL_SUBSYS_NFTABLES = 10
_NFT_NEWTABLE, _NFT_NEWCHAIN, _NFT_NEWRULE = ((_NFNL_SUBSYS_NFTABLES << 8) | n for n in (0, 3, 6))
_NFPROTO = {socket.AF_INET: 2, socket.AF_INET6: 10}
_NF_INET_PRE_ROUTING = 0
_PRIORITY_MANGLE = -150
_NFT_META_L4PROTO = 16
_NFT_CMP_EQ, _NFT_CMP_NEQ = 0, 1
_NFT_PAYLOAD_NETWORK, _NFT_PAYLOAD_TRANSPORT = 1, 2

_IP_PKTINFO = 8
_IP_FREEBIND = 15
_IP_TRANSPARENT = 19
_IPV6_RECVPKTINFO = 49
_IPV6_TRANSPARENT = 75
_IPV6_FREEBIND = 78


def wait_for_loopback(timeout_seconds: float) -> None:
    """Wait until `lo` is up. bubblewrap raises it itself, and fails if anyone else did so first.

    Raises `TimeoutError`.
    """
    with (
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as events,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as query,
    ):
        events.bind((0, _RTMGRP_LINK))  # before the query, so that no change is missed
        poll = select.poll()
        poll.register(events, select.POLLIN)
        while True:
            flags = fcntl.ioctl(query, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
            if struct.unpack_from("=16xH", flags)[0] & _IFF_UP:
                return
            if not poll.poll(timeout_seconds * 1000):
                raise TimeoutError("the sandbox's loopback interface did not come up")
            events.recv(65536)


def raise_loopback() -> None:
    """Bring `lo` up, where no bubblewrap does it (see `wait_for_loopback`)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def capture_everything() -> list[tuple[str, socket.socket]]:
    """Set the routes and rules, open the listeners, and return them with their kinds.

    Without IPv6 in the kernel there are only the kinds of IPv4: no program can make an IPv6 socket either.
    Raises `OSError` from the step that failed.
    """
    loopback = socket.if_nametoindex("lo")
    listeners = [("explicit", _tcp_listener(socket.AF_INET, "127.0.0.1", EXPLICIT_PORT))]
    families: list[tuple[str, socket.AddressFamily, str]] = [("4", socket.AF_INET, "0.0.0.0")]  # noqa: S104 - inside
    if _has_ipv6():
        families.append(("6", socket.AF_INET6, "::"))
    for digit, family, wildcard in families:
        _make_every_address_local(family, loopback)
        listeners.append((f"tcp{digit}", _tcp_listener(family, wildcard, CATCH_PORT, transparent=True)))
        listeners.append((f"dns-udp{digit}", _dns_udp(family, wildcard)))
        listeners.append((f"dns-tcp{digit}", _tcp_listener(family, wildcard, DNS_PORT)))
        _capture_tcp(family)
    return listeners


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC).close()
    except OSError:
        return False
    return True


# --- netlink ---------------------------------------------------------------------------------------------------------


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | 0x8000, b"".join(attributes))


def _number(value: int) -> bytes:
    return struct.pack("!I", value)


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


def _ask(protocol: int, payload: bytes, acknowledgements: int, what: str) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        sock.bind((0, 0))
        sock.send(payload)
        while acknowledgements:
            answer = sock.recv(65536)
            while len(answer) >= 20:
                length, kind = struct.unpack_from("=IH", answer)
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", answer, 16)[0]
                    if number:
                        raise OSError(number, f"{what}: {os.strerror(number)}")
                    acknowledgements -= 1
                answer = answer[(length + 3) & ~3 :]


def _make_every_address_local(family: socket.AddressFamily, loopback: int) -> None:
    header = struct.pack("=8BI", family, 0, 0, 0, _RT_TABLE_LOCAL, _RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL, 0)
    body = header + _attribute(_RTA_OIF, struct.pack("=I", loopback))
    if family == socket.AF_INET:
        # Without it the kernel takes the destination as the source too, and a connection's two ends are the same.
        body += _attribute(_RTA_PREFSRC, socket.inet_pton(socket.AF_INET, "127.0.0.1"))
    flags = _NLM_REQUEST_ACK | _NLM_CREATE | _NLM_EXCL
    _ask(0, _message(_RTM_NEWROUTE, flags, 1, body), 1, f"the local default route of {family.name}")


def _expression(name: bytes, *attributes: bytes) -> bytes:
    return _nested(1, _attribute(1, name + b"\0"), _nested(2, *attributes))


def _load(base: int, offset: int, length: int) -> bytes:
    return _expression(
        b"payload", *(_attribute(n, _number(v)) for n, v in enumerate((1, base, offset, length), start=1))
    )


def _compare(operator: int, data: bytes) -> bytes:
    return _expression(
        b"cmp", _attribute(1, _number(1)), _attribute(2, _number(operator)), _nested(3, _attribute(1, data))
    )


def _mask(mask: bytes) -> bytes:
    return _expression(
        b"bitwise",
        *(_attribute(n, _number(v)) for n, v in enumerate((1, 1, len(mask)), start=1)),
        _nested(4, _attribute(1, mask)),
        _nested(5, _attribute(1, bytes(len(mask)))),
    )


def _capture_tcp(family: socket.AddressFamily) -> None:
    """`meta l4proto tcp, not loopback, not port 53: tproxy to :CATCH_PORT`, before routing."""
    protocol = _NFPROTO[family]
    if family == socket.AF_INET:
        not_loopback = [_load(_NFT_PAYLOAD_NETWORK, 16, 4), _mask(b"\xff\0\0\0"), _compare(_NFT_CMP_NEQ, b"\x7f\0\0\0")]
    else:
        one = socket.inet_pton(socket.AF_INET6, "::1")
        not_loopback = [_load(_NFT_PAYLOAD_NETWORK, 24, 16), _compare(_NFT_CMP_NEQ, one)]
    rule = [
        _expression(b"meta", _attribute(2, _number(_NFT_META_L4PROTO)), _attribute(1, _number(1))),
        _compare(_NFT_CMP_EQ, bytes([socket.IPPROTO_TCP])),
        *not_loopback,
        _load(_NFT_PAYLOAD_TRANSPORT, 2, 2),
        _compare(_NFT_CMP_NEQ, struct.pack("!H", DNS_PORT)),
        _expression(b"immediate", _attribute(1, _number(1)), _nested(2, _attribute(1, struct.pack("!H", CATCH_PORT)))),
        _expression(b"tproxy", _attribute(1, _number(protocol)), _attribute(3, _number(1))),
    ]
    table = _attribute(1, b"sluicegate\0")
    hook = _nested(4, _attribute(1, _number(_NF_INET_PRE_ROUTING)), _attribute(2, struct.pack("!i", _PRIORITY_MANGLE)))
    chain = table + _attribute(3, b"capture\0") + hook + _attribute(7, b"filter\0")
    rules = table + _attribute(2, b"capture\0") + _nested(4, *rule)
    head = struct.pack("!BBH", protocol, 0, 0)
    batch = struct.pack("!BBH", 0, 0, _NFNL_SUBSYS_NFTABLES)
    create = _NLM_REQUEST_ACK | _NLM_CREATE
    payload = (
        _message(_NFNL_BATCH_BEGIN, 1, 0, batch)
        + _message(_NFT_NEWTABLE, create, 1, head + table)
        + _message(_NFT_NEWCHAIN, create, 2, head + chain)
        + _message(_NFT_NEWRULE, create | _NLM_APPEND, 3, head + rules)
        + _message(_NFNL_BATCH_END, 1, 4, batch)
    )
    _ask(_NETLINK_NETFILTER, payload, 3, f"the capture rule of {family.name} (nf_tables with tproxy)")


# --- listeners -------------------------------------------------------------------------------------------------------


def _tcp_listener(family: socket.AddressFamily, address: str, port: int, *, transparent: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if transparent:
        level, option = (
            (socket.IPPROTO_IP, _IP_TRANSPARENT)
            if family == socket.AF_INET
            else (socket.IPPROTO_IPV6, _IPV6_TRANSPARENT)
        )
        sock.setsockopt(level, option, 1)
    sock.bind((address, port))
    sock.listen(_LISTEN_BACKLOG)
    return sock


def _dns_udp(family: socket.AddressFamily, address: str) -> socket.socket:
    """With packet information, so that the answer can come from the address that was asked."""
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    sock.bind((address, DNS_PORT))
    return sock
