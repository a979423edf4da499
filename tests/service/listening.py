"""An HTTP server of ours in this process, with an application of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from starlette.types import ASGIApp

from sandbox.service.address import Bound
from sandbox.service.listening import UnixSocket
from sandbox.service.places import Places
from sandbox.service.server import HttpServer

PATIENCE = 60.0


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, path: Path, places: Places | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpServer]:
    """Serve `app` at a unix socket."""
    async with asyncio.timeout(PATIENCE):
        with contextlib.closing(UnixSocket(path)) as made:
            server = HttpServer(app, Bound(made.socket, "", tls), places or Places(100))
            serving = asyncio.create_task(server.serve())
            try:
                yield server
            finally:
                server.should_exit = server.force_exit = True
                await serving


class Peer:
    """A client that says what it likes, when it likes, and has read all that came before its connection broke."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._said = b""

    async def say(self, data: bytes) -> None:
        """Raises `ConnectionError` once nobody listens."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def end(self) -> None:
        """Close the half that it speaks on."""
        self._socket.shutdown(socket.SHUT_WR)

    async def until(self, text: bytes) -> bytes:
        """What comes up to and with a text."""
        while text not in self._said:
            part = await self._receive()
            assert part, self._said
            self._said += part
        found, _, self._said = self._said.partition(text)
        return found + text

    async def rest(self) -> bytes:
        """All that comes until the other side closes."""
        while part := await self._receive():
            self._said += part
        return self._said

    async def _receive(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, 100_000)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
