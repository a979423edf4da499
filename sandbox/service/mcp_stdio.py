"""MCP over two descriptors, for one client: a message a line.

They are read and written only when they are ready, so that neither a client that says nothing nor one that reads
nothing can keep the process from ending; and without `O_NONBLOCK`, which would hold for everybody who shares them.

Owns: the framing of messages, and which ids are in use. Must not: know what is in them beside that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import Server
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from sandbox.service.mcp_wire import error_line, id_key, in_use, read_message
from sandbox.strict_json import NotJson

MAX_LINE_BYTES = 32 * 1024 * 1024  # a call with every field at its limit, each character escaped
_READ_BYTES = 64 * 1024
_WRITE_BYTES = 4096  # what a pipe that is ready takes without blocking
_FLUSH_SECONDS = 1.0


async def serve_stdio(server: Server[Any], source: int, target: int, ended: asyncio.Event) -> None:
    """Serve one client over two descriptors, until its input ends, or `ended` is set."""
    lines, wire, ids = _Lines(source), _Wire(target), set[str]()
    to_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_server = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_end_with, ended, tasks.cancel_scope)
        tasks.start_soon(_receive, lines, to_server, wire, ids)
        tasks.start_soon(_send, from_server, wire, ids, ended)
        await server.run(incoming, outgoing, server.create_initialization_options())
        with anyio.move_on_after(_FLUSH_SECONDS):
            await wire.flushed()
        tasks.cancel_scope.cancel()


async def _end_with(ended: asyncio.Event, scope: anyio.CancelScope) -> None:
    await ended.wait()
    scope.cancel()


async def _receive(
    lines: _Lines, to_server: MemoryObjectSendStream[SessionMessage | Exception], wire: _Wire, ids: set[str]
) -> None:  # fmt: skip
    """Every message of the input, until its end. A line that is none is answered with an error."""
    async with to_server:
        async for line in lines:
            if line is not None and not line.strip():
                continue
            try:
                message = _message(line)
                claim = _claimed(message, ids)
            except _Refused as error:
                await wire.write(error.answer)
                continue
            await to_server.send(SessionMessage(message, claim))


class _Refused(Exception):
    """A line that is no message to be served. `answer` is what its sender is told."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


def _claimed(message: JSONRPCMessage, ids: set[str]) -> ServerMessageMetadata | None:
    """Takes a request's id, which is given back with its answer, or when it ends without one. Raises `_Refused`."""
    if not isinstance(message, JSONRPCRequest):
        return None
    key = id_key(message.id)
    if key in ids:
        raise _Refused(in_use(key))
    ids.add(key)

    async def give_back() -> None:
        ids.discard(key)

    return ServerMessageMetadata(on_request_unanswered=give_back)


async def _send(
    from_server: MemoryObjectReceiveStream[SessionMessage], wire: _Wire, ids: set[str], ended: asyncio.Event
) -> None:
    async with from_server:
        async for message in from_server:
            if isinstance(message.message, JSONRPCResponse | JSONRPCError) and message.message.id is not None:
                ids.discard(id_key(message.message.id))
            try:
                await wire.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
            except OSError:  # nobody reads any more
                ended.set()
                return


def _message(line: bytes | None) -> JSONRPCMessage:
    """The message of a line. Raises `_Refused`, under the id that it may have."""
    if line is None:
        raise _Refused(error_line(None, INVALID_REQUEST, f"the message has more than {MAX_LINE_BYTES} bytes"))
    try:
        data = read_message(line)
    except NotJson as error:
        raise _Refused(error_line(None, PARSE_ERROR, f"the line is not JSON: {error}")) from error
    with contextlib.suppress(ValueError):
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    number = data.get("id") if isinstance(data, dict) else None
    known = isinstance(number, str | int) and not isinstance(number, bool)
    message = "the line is no message of JSON-RPC, or has text that is no Unicode"
    raise _Refused(error_line(number if known else None, INVALID_REQUEST, message))


class _Lines:
    """The lines of a descriptor, as they come; None for one that is too long, which is skipped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def __aiter__(self) -> AsyncIterator[bytes | None]:
        kept = bytearray()
        skipping = False
        while data := await self._read():
            *whole, rest = data.split(b"\n")
            for end in whole:
                line = bytes(kept) + end
                kept.clear()
                if skipping or len(line) > MAX_LINE_BYTES:
                    skipping = False
                    yield None
                else:
                    yield line
            if not skipping:
                kept += rest
            if len(kept) > MAX_LINE_BYTES:
                kept.clear()
                skipping = True

    async def _read(self) -> bytes:
        await _ready(self._fd, reading=True)
        try:
            return os.read(self._fd, _READ_BYTES)
        except OSError:  # a terminal or a socket whose other side is gone
            return b""


class _Wire:
    """Where messages are written, one at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = asyncio.Lock()

    async def write(self, message: bytes) -> None:
        """Write one line. Raises `OSError` when nobody reads any more."""
        async with self._turn:
            left = memoryview(message + b"\n")
            while left:
                await _ready(self._fd, reading=False)
                left = left[os.write(self._fd, left[:_WRITE_BYTES]) :]

    async def flushed(self) -> None:
        """Wait until what is being written is written."""
        async with self._turn:
            pass


async def _ready(fd: int, *, reading: bool) -> None:
    """Wait until a descriptor can be read or written. A file always can."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    watch: Callable[..., None] = loop.add_reader if reading else loop.add_writer
    try:
        watch(fd, ready.set)
    except PermissionError:  # what epoll cannot watch
        await asyncio.sleep(0)
        return
    try:
        await ready.wait()
    finally:
        (loop.remove_reader if reading else loop.remove_writer)(fd)
