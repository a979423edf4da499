"""The messages between the executor and the proxy, and the executor's side of them.

Executor to proxy: `start` (once), `attach`, `amend`, `detach`, `facts`. Proxy to executor: `authority`, `ready`,
`failed`, and one `reply` for every request, matched by its `id`. The proxy ends when the channel does.
Owns: the vocabulary. Must not: import mitmproxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy import channel
from proxy.channel import Channel, ChannelClosed, Message
from proxy.network import Grant

_START_SECONDS = 60.0
_REPLY_SECONDS = 10.0  # an answer takes a millisecond; a proxy that gives none in this time serves nobody
_BUSY_REPLY_SECONDS = 60.0  # but one that is at work all the while is not hung
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 10.0


class ProxyUnavailable(Exception):
    """The proxy could not be started, has ended, or did not answer. Without it nothing has network."""


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """What one proxy process is started with. Paths are the host's."""

    authority_dir: Path
    audit_path: Path
    upstream_ca_file: Path | None = None

    def to_message(self) -> Message:
        return {
            "authority_dir": str(self.authority_dir),
            "audit_path": str(self.audit_path),
            "upstream_ca_file": None if self.upstream_ca_file is None else str(self.upstream_ca_file),
        }

    @classmethod
    def from_message(cls, message: Message) -> ProxyConfig:
        ca_file = message["upstream_ca_file"]
        return cls(
            Path(str(message["authority_dir"])),
            Path(str(message["audit_path"])),
            None if ca_file is None else Path(str(ca_file)),
        )


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """What the log says of an attempt's start, besides its grant."""

    language: str
    domains: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """What the log says of an attempt's end."""

    status: str
    cause: str
    exit_code: int | None
    duration_seconds: float


@dataclass(frozen=True, slots=True)
class NetworkCounts:
    """What the proxy counted for one attempt."""

    allowed: int = 0
    denied: int = 0
    destinations: list[dict[str, object]] = field(default_factory=list)


class Proxy:
    """The executor's handle on one proxy process."""

    def __init__(self, process: subprocess.Popen[bytes], link: Channel) -> None:
        self._process = process
        self._link = link
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._next_id = 0
        self._authority: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._reader = asyncio.create_task(self._read(), name="proxy channel")

    @classmethod
    async def start(cls, config: ProxyConfig, *, command: Sequence[str] | None = None) -> Proxy:
        """Start the process. Its `certificate` and `ready` are awaited separately. Raises `ProxyUnavailable`."""
        ours, theirs = channel.pair()
        os.set_inheritable(theirs.fileno(), True)
        argv = [*(command or (sys.executable, "-P", "-m", "proxy.server")), str(theirs.fileno())]
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
        try:
            process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise ProxyUnavailable(f"the proxy could not be started: {error}") from error
        finally:
            theirs.close()
        self = cls(process, Channel(ours))
        try:
            await self._send({"type": "start", **config.to_message()})
        except ProxyUnavailable:
            await self.close()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    async def certificate(self) -> Path:
        """The path of the authority's certificate, once it exists. Raises `ProxyUnavailable`."""
        return await self._within(self._authority, _START_SECONDS, "to have its certificate authority")

    async def ready(self) -> None:
        """Return when attempts can be attached. Raises `ProxyUnavailable`."""
        await self._within(self._ready, _START_SECONDS, "to be ready")

    async def attach(self, grant: Grant, listeners: Sequence[tuple[str, socket.socket]], start: AttemptStart) -> None:
        """Serve an attempt's listeners under its grant. The sockets are duplicated; the caller closes its own.

        Raises `ProxyUnavailable`, also when the attempt's start could not be written to the audit log.
        """
        await self._request(
            {
                "type": "attach",
                "grant": grant.model_dump(mode="json"),
                "kinds": [kind for kind, _ in listeners],
                "language": start.language,
                "domains": None if start.domains is None else list(start.domains),
            },
            [sock.fileno() for _, sock in listeners],
        )

    async def amend(self, attempt_id: str, grant: Grant | None) -> bool:
        """From now on an attached attempt may do what its grant AND this one allow; None: nothing.

        Amendments add up. What is under way and not allowed any more has been cut when this returns. False: no such
        attempt is attached, it has ended, say; one that is attached later has to be amended later. Raises
        `ProxyUnavailable`; where the proxy still serves the attempt, nothing is allowed to it then.
        """
        message: Message = {"type": "amend", "attempt_id": attempt_id}
        reply = await self._request({**message, "grant": None if grant is None else grant.model_dump(mode="json")})
        return reply["attached"] is True

    async def detach(self, attempt_id: str, end: AttemptEnd) -> NetworkCounts:
        """End an attempt's listeners and connections and write its end. Raises `ProxyUnavailable`."""
        reply = await self._request(
            {
                "type": "detach",
                "attempt_id": attempt_id,
                "status": end.status,
                "cause": end.cause,
                "exit_code": end.exit_code,
                "duration_seconds": end.duration_seconds,
            }
        )
        destinations = reply["destinations"]
        assert isinstance(destinations, list)
        return NetworkCounts(int(str(reply["allowed"])), int(str(reply["denied"])), destinations)

    async def facts(self, grant: Grant, registry: str, wanted: Mapping[str, Sequence[str]]) -> Mapping[str, Message]:
        """What it has read just now of files of a registry's projects, for attempts with such a grant, by project.

        `registry` is its id in the grant; `packages.facts` reads what is told of one project. A project is left out
        where nothing has just been read. Raises `ProxyUnavailable`.
        """
        message: Message = {"type": "facts", "grant": grant.model_dump(mode="json"), "registry": registry}
        reply = await self._request({**message, "wanted": {name: list(files) for name, files in wanted.items()}})
        pages = reply["pages"]
        assert isinstance(pages, dict)
        return pages

    async def close(self) -> None:
        """End the process and wait for it."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._lose("the proxy was closed")
        self._link.close()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            await loop.run_in_executor(None, self._process.wait)

    async def _request(self, message: Message, fds: Sequence[int] = ()) -> Message:
        if self.lost.is_set():
            raise ProxyUnavailable("the proxy has ended")
        self._next_id += 1
        number = self._next_id
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self._send({**message, "id": number}, fds)
            reply = await self._within(future, _REPLY_SECONDS, f"to answer `{message['type']}`")
        finally:
            self._pending.pop(number, None)
        if reply.get("error") is not None:
            raise ProxyUnavailable(f"the proxy refused `{message['type']}`: {reply['error']}")
        return reply

    async def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        try:
            await self._link.send(message, fds)
        except ChannelClosed as error:
            self.lost.set()  # whoever reads of it here need not wait until it is read at the other end, too
            raise ProxyUnavailable(f"the proxy has ended: {error}") from error

    async def _within[T](self, future: asyncio.Future[T], seconds: float, what: str) -> T:
        """Await an answer. A proxy that has done nothing at all for `seconds` is ended, and a busy one much later."""
        idle = waited = 0.0  # by looks, not by a clock: where this process was held up, the answer is there already
        work = self._work_done()
        while not (await asyncio.wait([future], timeout=_LOOK_SECONDS))[0]:
            before, work = work, self._work_done()
            waited += _LOOK_SECONDS
            idle = idle + _LOOK_SECONDS if work is None or work == before else 0.0
            if idle >= seconds or waited >= max(seconds, _BUSY_REPLY_SECONDS):
                why = f"the proxy took longer than {waited:.0f} s {what}, and was ended"
                self._process.kill()  # one that hangs is as good as lost, and for a lost one a new one is started
                self._lose(why)
                raise ProxyUnavailable(why)
        return future.result()

    def _work_done(self) -> object:
        """What changes while the process works, proc_pid_stat(5): its CPU time. None when that cannot be read.

        Read from outside, so that it waits behind nothing.
        """
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return fields[11:13]
        except OSError:
            return None

    async def _read(self) -> None:
        why = "the proxy has ended"
        try:
            while True:
                message, fds = await self._link.receive()
                for fd in fds:
                    os.close(fd)
                match message.get("type"):
                    case "authority":
                        self._authority.set_result(Path(str(message["certificate"])))
                    case "ready":
                        self._ready.set_result(None)
                    case "failed":
                        why = str(message["error"])
                    case _:
                        future = self._pending.get(int(str(message["id"])))
                        if future is not None and not future.done():
                            future.set_result(message)
        except ChannelClosed:
            self._lose(why)

    def _lose(self, why: str) -> None:
        self.lost.set()
        waiting: list[asyncio.Future[Any]] = [self._authority, self._ready, *self._pending.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(ProxyUnavailable(why))
                future.exception()  # retrieved: nobody need be waiting
