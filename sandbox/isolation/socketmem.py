"""What the sockets of one network namespace hold in their buffers, which is in nobody's RSS. Raw netlink (sock_diag).

Owns: one netlink socket, opened inside the namespace and asked from outside. Must not: decide what is too much.

Of unix sockets the kernel tells what each sender has out, but not of a sender that is closed, while its receiver still
holds the data. So a receiver with anything in its queue counts with all that its senders can have put there.
"""

from __future__ import annotations

import socket
import struct

_SOCK_DIAG = 4  # the netlink family
_BY_FAMILY = 20
_DUMP_REQUEST = 0x301
_DONE, _ERROR = 3, 2
_ALL_STATES = 0xFFFF_FFFF
_SHOW_QUEUE = 0x10  # UDIAG_SHOW_RQLEN
_UNIX_HEAD, _UNIX_QUEUE = 16, 4
_INET_HEAD, _INET_MEMORY = 72, 7
_LISTENING = 10
_ANSWER_BYTES = 65536
_TIMEOUT_SECONDS = 0.5
_INET = (
    (socket.AF_INET, socket.IPPROTO_TCP), (socket.AF_INET6, socket.IPPROTO_TCP), (socket.AF_INET, socket.IPPROTO_UDP),
    (socket.AF_INET6, socket.IPPROTO_UDP),
)  # fmt: skip


class SocketMemory:
    """Asks through a socket that `open_diagnostics` made; closes it at the end."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)
        self._sock.settimeout(_TIMEOUT_SECONDS)
        # The most that one sender can have out; the kernel doubles what is asked for.
        self._one_sender = 2 * _number("/proc/sys/net/core/wmem_max", 212_992)
        self._datagrams = 1 + _number("/proc/sys/net/unix/max_dgram_qlen", 10)

    def total(self) -> int:
        """Bytes, rounded up. Raises `OSError`."""
        used = 0
        request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_QUEUE, 0, 0)
        for head, attributes in self._dump(request, _UNIX_HEAD):
            _, kind, state = struct.unpack_from("=BBB", head)
            queue = attributes.get(_UNIX_QUEUE, b"")
            if state != _LISTENING and len(queue) >= 4 and struct.unpack_from("=I", queue)[0]:
                used += self._one_sender * (self._datagrams if kind == socket.SOCK_DGRAM else 1)
        for family, protocol in _INET:
            request = struct.pack("=BBBBI48x", family, protocol, 1 << (_INET_MEMORY - 1), 0, _ALL_STATES)
            for _, attributes in self._dump(request, _INET_HEAD):
                memory = attributes.get(_INET_MEMORY, b"")
                if len(memory) >= 32:
                    received, _, sent, _, _, queued, _, backlog = struct.unpack_from("=8I", memory)
                    used += received + max(sent, queued) + backlog
        return used

    def close(self) -> None:
        self._sock.close()

    def _dump(self, request: bytes, head_bytes: int) -> list[tuple[bytes, dict[int, bytes]]]:
        self._sock.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + request)
        found: list[tuple[bytes, dict[int, bytes]]] = []
        while True:
            data = self._sock.recv(_ANSWER_BYTES)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_DONE, _ERROR):  # an error: the kernel has no such sockets, or cannot tell
                    return found
                body = data[16:length]
                found.append((body[:head_bytes], _attributes(body[head_bytes:])))
                data = data[(length + 3) & ~3 :]


def open_diagnostics() -> socket.socket:
    """A socket for `SocketMemory`, of the network namespace of this process."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def _number(path: str, otherwise: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return otherwise
