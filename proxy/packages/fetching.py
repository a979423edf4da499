"""Reading one document of a registry, for the proxy's own use: an HTTP/1.1 client that dials only what was vetted.

Owns: the connections, and bounds on what a registry can make us keep. Must not: know packages, or follow redirects.

It runs on the proxy's own event loop, which resolves nothing: the task that dials has pinned the vetted addresses. A
connection is used again only for attempts with the same grant, and while its address is among those that are vetted.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import certifi
import h11

from proxy.attempts import Attempt, Connection
from proxy.dialling import vet
from proxy.network import Decision, Protocol
from proxy.packages.requests import BaseUrl
from proxy.resolver import ResolutionFailed, Resolver, pin

MAX_BYTES = 64 * 1024 * 1024  # of one document, before and after decompression; the largest have some 30 MiB
_MAX_HEAD = 64 * 1024
_TIMEOUT_SECONDS = 60.0
_AT_ONCE = 16  # in all: each keeps a document in memory
_CHUNK = 256 * 1024
_IDLE_SECONDS = 10.0  # servers close idle connections after some more
_IDLE_AT_ONCE = 8  # of one registry, for attempts with one grant
_USER_AGENT = "sluicegate"
_ETAG = re.compile(r'(?:W/)?"[!#-~]{1,200}"', re.ASCII)  # RFC 9110 section 8.8.3


class FetchFailed(Exception):
    """The document could not be read. The message says why."""


class FetchDenied(Exception):
    """The registry may not be asked for this attempt. The decision is written already, for `attempt`."""

    def __init__(self, decision: Decision, attempt: Attempt) -> None:
        super().__init__(decision.detail)
        self.decision = decision
        self.attempt = attempt


@dataclass(frozen=True, slots=True)
class Fetched:
    """One response: its body is decoded and whole."""

    status: int
    etag: str | None
    body: bytes


@dataclass(slots=True, eq=False)
class _Link:
    """A connection to a registry, between or within exchanges."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection

    @property
    def address(self) -> str:
        peer = self.writer.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def is_usable(self) -> bool:
        return not self.writer.is_closing() and not self.reader.at_eof()

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass(slots=True, eq=False)
class _Reading:
    """One document that is being read. `stopped` is done when nothing of it is sent any more."""

    task: asyncio.Task[Any]
    stopped: asyncio.Future[None]
    recalled: bool = False


class Fetcher:
    """Reads documents. One instance serves every attempt."""

    def __init__(self, resolver: Resolver, roots: Path | None) -> None:
        self._resolver = resolver
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.load_verify_locations(roots or certifi.where())
        self._tls.set_alpn_protocols(["http/1.1"])
        self._idle: dict[tuple[str, str], list[_Link]] = {}
        self._readings: dict[Attempt, set[_Reading]] = {}

    def close(self) -> None:
        for links in self._idle.values():
            for link in links:
                link.close()
        self._idle.clear()

    async def get(
        self, attempt: Attempt, state: Connection, base: BaseUrl, target: str, accept: str, etag: str | None
    ) -> Fetched:
        """The document at `target`, unless it is still the one of `etag`: then the status is 304.

        To be called in a task of its own: what it may dial is pinned to the task. Raises `FetchFailed`, `FetchDenied`.
        """
        try:
            async with attempt.pages, self._slots, asyncio.timeout(_TIMEOUT_SECONDS):
                return await self._get_or_begin_again(attempt, state, base, _request(base, target, accept, etag))
        except ResolutionFailed as error:
            raise FetchFailed(str(error)) from error
        except TimeoutError as error:
            raise FetchFailed(f"the registry took longer than {_TIMEOUT_SECONDS:.0f} s") from error
        except (OSError, EOFError) as error:  # `SSLError` is an OSError
            raise FetchFailed(f"the registry cannot be read: {error}") from error
        except h11.RemoteProtocolError as error:
            raise FetchFailed(f"the registry's answer is not HTTP/1.1, or not whole: {error}") from error

    async def recall(self, attempt: Attempt) -> None:
        """Have what is being read for an attempt begun again: so it is judged by what holds now. For an amendment.

        Returns when nothing of it is on its way to a registry any more.
        """
        readings = list(self._readings.get(attempt, ()))
        for reading in readings:
            reading.recalled = True
            reading.task.cancel()
        if readings:
            await asyncio.wait([reading.stopped for reading in readings])

    async def _get_or_begin_again(
        self, attempt: Attempt, state: Connection, base: BaseUrl, request: h11.Request
    ) -> Fetched:
        task = asyncio.current_task()
        assert task is not None
        while True:
            reading = _Reading(task, asyncio.get_running_loop().create_future())
            self._readings.setdefault(attempt, set()).add(reading)
            try:
                return await self._get(attempt, state, base, request)
            except asyncio.CancelledError:
                if not reading.recalled or task.uncancel():
                    raise
            finally:
                reading.stopped.set_result(None)
                self._readings[attempt].discard(reading)
                if not self._readings[attempt]:
                    del self._readings[attempt]

    async def _get(self, attempt: Attempt, state: Connection, base: BaseUrl, request: h11.Request) -> Fetched:
        resolved = await self._resolver.resolve(base.host, attempt.standing.hosts, attempt.lookups)
        vetted = vet(attempt, state, base.host, base.port, Protocol.HTTP, resolved)
        if isinstance(vetted, Decision):
            raise FetchDenied(vetted, attempt)
        key = (attempt.standing.group, _origin(base))
        while (link := self._take_idle(key, {str(address) for address in vetted})) is not None:
            try:
                return await self._exchange(key, link, request)
            except (OSError, EOFError, h11.RemoteProtocolError, _Closed):
                continue  # the server had closed it, or was about to
        vetted = vet(attempt, state, base.host, base.port, Protocol.HTTP, resolved, log_allow=True)
        if isinstance(vetted, Decision):
            raise FetchDenied(vetted, attempt)
        pin(base.host, vetted)
        tls = self._tls if base.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            base.host.text, base.port, ssl=tls, server_hostname=base.host.text if tls is not None else None
        )
        return await self._exchange(key, _Link(reader, writer, _protocol()), request)

    async def _exchange(self, key: tuple[str, str], link: _Link, request: h11.Request) -> Fetched:
        """Send, and read the response. The connection is kept if it can be used again, and else closed."""
        keep = False
        try:
            link.writer.write(link.protocol.send(request) or b"")
            link.writer.write(link.protocol.send(h11.EndOfMessage()) or b"")
            await link.writer.drain()
            fetched = await _read(link.protocol, link.reader)
            keep = link.protocol.our_state is h11.DONE and link.protocol.their_state is h11.DONE
        finally:
            if not keep:
                link.close()
        self._keep(key, link)
        return fetched

    def _keep(self, key: tuple[str, str], link: _Link) -> None:
        if not link.is_usable or link.protocol.trailing_data[0]:
            link.close()
            return
        link.protocol.start_next_cycle()
        links = self._idle.setdefault(key, [])
        links.append(link)
        if len(links) > _IDLE_AT_ONCE:
            links.pop(0).close()
        asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._drop, key, link)

    def _drop(self, key: tuple[str, str], link: _Link) -> None:
        links = self._idle.get(key, [])
        if link in links:
            links.remove(link)
            link.close()
        if not links:
            self._idle.pop(key, None)

    def _take_idle(self, key: tuple[str, str], vetted: set[str]) -> _Link | None:
        links = self._idle.get(key, [])
        while links:
            link = links.pop()
            if link.is_usable and link.address in vetted:
                return link
            link.close()
        return None


class _Closed(FetchFailed):
    """The connection ended before the response did."""


def _protocol() -> h11.Connection:
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)


def _request(base: BaseUrl, target: str, accept: str, etag: str | None) -> h11.Request:
    headers = [
        ("Host", _authority(base)), ("User-Agent", _USER_AGENT), ("Accept", accept), ("Accept-Encoding", "gzip"),
    ]  # fmt: skip
    if etag is not None:
        headers.append(("If-None-Match", etag))
    return h11.Request(method="GET", target=target, headers=headers)


async def _read(protocol: h11.Connection, reader: asyncio.StreamReader) -> Fetched:
    head: h11.Response | None = None
    body: _Body | None = None
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_CHUNK)
            if not data and head is None:
                raise _Closed("the registry closed the connection")
            protocol.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
            body = _Body(_header(head, b"content-encoding") or "identity")
        elif isinstance(event, h11.Data):
            assert body is not None
            body.add(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            assert body is not None
            content = body.end() if head.status_code == 200 else b""
            etag = _header(head, b"etag")
            return Fetched(head.status_code, etag if etag and _ETAG.fullmatch(etag) else None, content)
        elif not isinstance(event, h11.InformationalResponse):
            raise _Closed("the registry closed the connection")


class _Body:
    """A body as it comes: never more than `MAX_BYTES`, compressed or not."""

    def __init__(self, encoding: str) -> None:
        encoding = encoding.lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise FetchFailed("the registry answers in an encoding that it was not asked for")
        self._inflate = None if encoding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._received = 0
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > MAX_BYTES:
            raise FetchFailed(_TOO_LARGE)
        if self._inflate is not None:
            try:
                data = self._inflate.decompress(data, MAX_BYTES + 1 - self._size)
            except zlib.error as error:
                raise FetchFailed("what the registry has compressed cannot be read") from error
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise FetchFailed(_TOO_LARGE)
        self._parts.append(data)

    def end(self) -> bytes:
        if self._inflate is not None and (not self._inflate.eof or self._inflate.unused_data):
            raise FetchFailed("what the registry has compressed is not whole")
        return b"".join(self._parts)


_TOO_LARGE = f"the registry's document is larger than {MAX_BYTES // 2**20} MiB"


def _header(head: h11.Response, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in head.headers if key == name), None)


def _origin(base: BaseUrl) -> str:
    return f"{base.scheme}://{_authority(base)}"


def _authority(base: BaseUrl) -> str:
    return str(base).partition("://")[2].partition("/")[0]


__all__ = ["MAX_BYTES", "FetchDenied", "FetchFailed", "Fetched", "Fetcher"]
