"""JSON messages with file descriptors over a unix SEQPACKET socket. Standard library only.

One `send` is one message. A body that would not fit a packet travels in a sealed memory file, as the first descriptor.
Owns: framing. Must not: know what the messages mean.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy import memory_file

if TYPE_CHECKING:
    import asyncio

type Message = dict[str, object]

_INLINE_BYTES = 32 * 1024  # well below the smallest default send buffer (net.core.wmem_default, 208 KiB)
_MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_FDS = 64  # the kernel's own limit is 253 (SCM_MAX_FD)


class ChannelClosed(ConnectionError):
    """The other side has gone, or what it sent was not a message."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message. The descriptors are duplicated by the kernel: the caller still owns its own.

    Raises `ChannelClosed`; on a non-blocking socket `BlockingIOError` when the other side does not read.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    memory = -1
    try:
        if len(body) > _INLINE_BYTES:
            memory = memory_file.create("sluicegate-message")
            with open(memory, "wb", closefd=False) as file:
                file.write(body)
            memory_file.seal(memory)
            body, fds = b"M", [memory, *fds]
        else:
            body = b"J" + body
        try:
            socket.send_fds(sock, [body], list(fds))
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError) as error:
            raise ChannelClosed("the other side has closed the channel") from error
    finally:
        if memory >= 0:
            os.close(memory)


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message and its descriptors, which the caller then owns (close-on-exec).

    Raises `ChannelClosed`; on a non-blocking socket `BlockingIOError` when there is none.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            _INLINE_BYTES + 1, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError as error:
        raise ChannelClosed("the other side has closed the channel") from error
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    try:
        if not data:
            raise ChannelClosed("the other side has closed the channel")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ChannelClosed("a message was cut short")
        body = data[1:]
        if data[:1] == b"M":
            body = _read_memory(fds.pop(0))
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ChannelClosed("a message was not an object")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, (ValueError, IndexError)):
            raise ChannelClosed("what came was not a message") from error
        raise
    return message, fds


def _read_memory(fd: int) -> bytes:
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_BODY_BYTES:
            raise ChannelClosed("a message was too large")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


class Channel:
    """The asyncio side of one end. One task may receive; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._writing: set[asyncio.Future[None]] = set()  # who waits for the other side to read

    def fileno(self) -> int:
        return self._sock.fileno()

    async def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message, waiting while the other side is behind. Raises `ChannelClosed`."""
        while True:
            try:
                return send(self._sock, message, fds)
            except BlockingIOError:
                await self._ready(write=True)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    async def receive(self) -> tuple[Message, list[int]]:
        """Receive one message. Raises `ChannelClosed`."""
        while True:
            try:
                return receive(self._sock)
            except BlockingIOError:
                await self._ready(write=False)
            except ChannelClosed:
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    async def _ready(self, *, write: bool) -> None:
        import asyncio  # only here: the launcher, which has no event loop, is forked for every sandbox

        if self._sock.fileno() < 0:
            raise ChannelClosed("the channel is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        fd = self._sock.fileno()

        waiting = self._writing if write else {future}
        waiting.add(future)

        def wake() -> None:
            for one in waiting:
                if not one.done():
                    one.set_result(None)

        if write:
            loop.add_writer(fd, wake)
        else:
            loop.add_reader(fd, wake)
        try:
            await future
        finally:
            waiting.discard(future)
            if not write:
                loop.remove_reader(fd)
            elif not waiting:
                loop.remove_writer(fd)
