"""The executor's side of the launcher: start it, launch sandboxes, hear how they ended.

Owns: the launcher process, the pipes of each sandbox. Must not: decide how long a sandbox may live.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, cast

from proxy import channel, memory_file
from proxy.channel import Channel, ChannelClosed, Message
from sandbox.isolation import cgroups, trees
from sandbox.isolation.plan import PACKAGES, LaunchPlan, Workdir, without_call
from sandbox.isolation.trees import Trees

_START_TIMEOUT_SECONDS = 20.0
_LAUNCH_TIMEOUT_SECONDS = 30.0
_STOP_TIMEOUT_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_WORKDIR_HOME = "/tmp"  # noqa: S108 - inside the sandbox: what programs keep in their home is not for the directory
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from sandbox.isolation.launcher import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class IsolationUnavailable(Exception):
    """A sandbox cannot be had. The message names what is missing and the remedy. There is no weaker mode."""


class KillReason(StrEnum):
    TIMEOUT = "timeout"
    MEMORY = "memory"
    PROXY_LOST = "proxy_lost"
    CANCELLED = "cancelled"
    OUTPUT = "output"  # more than what may be read of one program
    DISK = "disk"  # more in its working directory than may be there


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """What one launcher is started with.

    `authority_certificate` is a PEM file that sandboxes trust besides the public roots. `packages` and `readable` are
    host directories that plans may mount: a launcher that was started as root can show nothing else. `state_dir` is
    where one that was not keeps its skeleton. `memory_method` is `auto`, or `sampling` to leave cgroups alone.
    """

    authority_certificate: Path | None = None
    packages: Path | None = None
    readable: tuple[Path, ...] = ()
    state_dir: Path | None = None
    memory_method: str = "auto"
    bwrap: str = "bwrap"

    def as_message(self) -> Message:
        """Raises `OSError` if the certificate cannot be read."""
        certificate = self.authority_certificate
        state_dir = self.state_dir or Path(tempfile.gettempdir())
        readable = [Path(sys.base_prefix), *self.readable, *([self.packages] if self.packages else [])]
        return {
            "authority_certificate": certificate.read_text(encoding="ascii") if certificate is not None else None,
            "readable": [os.path.realpath(path) for path in dict.fromkeys(readable)],
            "state_dir": str(state_dir.absolute()),
            "memory_method": self.memory_method,
            "bwrap": self.bwrap,
        }


@dataclass(frozen=True, slots=True)
class FullFilesystem:
    """A writable file system that could take no more when the program ended: no block free, or no inode.

    Only what was there then counts: not what the program had deleted by then, and of files without a name (such as
    `tempfile.TemporaryFile`) only those that a process still held which outlived it, or that was killed by us.
    """

    target: str
    size_bytes: int
    used_bytes: int
    inodes: int
    used_inodes: int
    exhausted: Literal["bytes", "inodes"]


@dataclass(frozen=True, slots=True)
class Ending:
    """The evidence of how a sandbox ended. `failure` is ours, not the program's.

    `exit_code` or `signal` is the program's own wait status; both are None if it was not seen to end. Seconds and
    bytes are of the whole tree where the kernel accounted for it, else of the program and what it waited for.
    `oom_kills` are processes that the kernel killed since the tree had reached its limit of memory; 0 where memory is
    sampled: there an excess is a kill of ours. `pids_limit` is the most tasks (processes and threads) that the tree may
    have, pid 1 among them; None if the sandbox ended before it was set. `pids_limit_hits` are tasks that were refused
    for it, as the kernel counted them; where memory is sampled the limit is RLIMIT_NPROC, whose refusals nobody counts:
    there they are the samples that saw as many tasks as allowed, so 0 proves nothing.
    `released` tells whether the program was started. If it was, and there is neither a wait status nor a failure nor a
    kill, pid 1 ended without its report: from then on, that is the doing of what ran inside.
    """

    exit_code: int | None = None
    signal: int | None = None
    killed_by_us: KillReason | None = None
    oom_kills: int = 0
    pids_limit: int | None = None
    pids_limit_hits: int = 0
    full_filesystems: tuple[FullFilesystem, ...] = ()
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    failure: str | None = None
    released: bool = False


_ENDED_WITH_LAUNCHER = Ending(failure="the launcher was lost")


def _retrieved(future: asyncio.Future[None]) -> None:
    """Mark an exception as seen, so that nobody need wait for this future."""
    if not future.cancelled():
        future.exception()


class Sandbox:
    """A prepared sandbox: namespaces made, listeners open, the code not yet running.

    Who has it must `close` it. The listeners live in the sandbox's network namespace, and keep it alive while open.
    """

    def __init__(self, launcher: Launcher, number: int, payload: int, stdout: int, stderr: int) -> None:
        loop = asyncio.get_running_loop()
        self._launcher = launcher
        self._number = number
        self._payload = payload
        self._prepared: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Ending] = loop.create_future()
        self._prepared.add_done_callback(_retrieved)
        self.listeners: list[tuple[str, socket.socket]] = []
        self.stdout = stdout
        self.stderr = stderr

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known here."""
        return not self._ended.done()

    def load(self, plan: LaunchPlan, code: bytes, workdir: Workdir | None = None) -> None:
        """Give it what it will run, once: the code, where, and what of the plan is the call's own."""
        packages = PACKAGES if plan.packages is not None else None
        main, environment, place = plan.main, dict(plan.call_environment), None
        if workdir is not None:
            status = os.fstat(workdir.directory_fd)
            main = workdir.main
            place = (workdir.inside, status.st_dev, status.st_ino, workdir.max_file_bytes, not workdir.full)
            environment["HOME"] = _WORKDIR_HOME
        call = (main, code, plan.arguments, environment, packages, place)
        data = marshal.dumps(call, 4)  # known to 3.4 and later
        with open(self._payload, "wb") as file:
            self._payload = -1
            file.write(data)
            file.flush()
            memory_file.seal(file.fileno())

    async def attach(self, workdir: Workdir) -> None:
        """Put a directory at `/workspace`, before the release. Raises `IsolationUnavailable`.

        Where the launcher cannot put it there, the sandbox ends, and its ending says why.
        """
        mount, detached = await self._launcher._open_tree(workdir)
        try:
            await self._launcher._send({"op": "attach", "id": self._number, "detached": detached}, [mount])
        finally:
            os.close(mount)

    async def release(self) -> None:
        """Start what was loaded. Raises `IsolationUnavailable` if the launcher is lost."""
        await self._launcher._send({"op": "release", "id": self._number})

    async def kill(self, why: KillReason) -> None:
        """End the whole pid namespace, at any stage. Does nothing to one that has ended."""
        while not self._ended.done():
            try:
                await self._launcher._send({"op": "kill", "id": self._number, "reason": why.value})
                break
            except IsolationUnavailable:
                if self._launcher.lost.is_set():
                    break  # it has died with the launcher
                await asyncio.sleep(_RETRY_SECONDS)

    async def ended(self) -> Ending:
        """Wait for the end, when nothing of the sandbox is left."""
        return await asyncio.shield(self._ended)

    def close_listeners(self) -> None:
        """Close this process's copies, once the proxy has its own."""
        for _, listener in self.listeners:
            listener.close()
        self.listeners = []

    async def close(self) -> None:
        """End it if it has not, and give back every descriptor."""
        await self.kill(KillReason.CANCELLED)
        await self.ended()
        self.close_listeners()
        for fd in (self._payload, self.stdout, self.stderr):
            if fd >= 0:
                os.close(fd)
        self._payload = self.stdout = self.stderr = -1

    # --- from the launcher

    def _on_prepared(self, kinds: list[str], fds: list[int]) -> None:
        sockets = [socket.socket(fileno=fd) for fd in fds]
        self.listeners = list(zip(kinds, sockets, strict=True))
        if self._ended.done():
            self.close_listeners()
        elif not self._prepared.done():
            self._prepared.set_result(None)

    def _on_refused(self, message: str) -> None:
        self._on_ended(Ending(failure=message))

    def _on_ended(self, ending: Ending) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)
        if not self._prepared.done():
            self._prepared.set_exception(
                IsolationUnavailable(ending.failure or "the sandbox was ended while it was prepared")
            )


class Launcher:
    """The launcher process. `lost` is set when it has ended; its sandboxes have then ended too."""

    def __init__(self, process: subprocess.Popen[bytes], channel_: Channel, started: Message) -> None:
        self._process = process
        self._channel = channel_
        self._leftovers = cast("list[str]", started["leftovers"])
        self._sandboxes: dict[int, Sandbox] = {}
        self._numbers = 0
        self._trees = Trees(*cast("list[int]", started["user"])) if os.geteuid() == 0 else None
        self.memory_method = cast(str, started["memory_method"])
        self.lost = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, config: LauncherConfig) -> Launcher:
        """Start the process. Raises `IsolationUnavailable`, which names what is missing and the remedy."""
        ours, theirs = channel.pair()
        try:
            message = config.as_message()
            root = str(Path(__file__).resolve().parents[2])
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, root, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={}, cwd="/",
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise IsolationUnavailable(f"the launcher could not be started: {error}") from error
        finally:
            theirs.close()
        connection = Channel(ours)
        try:
            async with asyncio.timeout(_START_TIMEOUT_SECONDS):
                await connection.send(message)
                answer, _ = await connection.receive()
            if answer["op"] != "started":
                raise IsolationUnavailable(_with_hint(cast(str, answer["message"])))
        except BaseException as error:
            connection.close()
            process.kill()
            process.wait()
            if isinstance(error, (ChannelClosed, TimeoutError)):
                raise IsolationUnavailable("the launcher ended, or hung, while it started") from error
            raise
        return cls(process, connection, answer)

    async def launch(self, plan: LaunchPlan, *, code: bytes, workdir: Workdir | None = None) -> Sandbox:
        """Prepare a sandbox and load it with `code`. Raises `IsolationUnavailable`."""
        sandbox = await self.prepare(plan)
        sandbox.load(plan, code, workdir)
        return sandbox

    async def prepare(self, plan: LaunchPlan) -> Sandbox:
        """Prepare a sandbox that waits for what it will run. Raises `IsolationUnavailable`."""
        payload = memory_file.create("sluicegate-payload")
        stdout, stdout_w = os.pipe2(os.O_CLOEXEC)
        stderr, stderr_w = os.pipe2(os.O_CLOEXEC)
        for fd in (stdout, stderr):
            os.set_blocking(fd, False)
        self._numbers += 1
        number = self._numbers
        sandbox = Sandbox(self, number, payload, stdout, stderr)
        self._sandboxes[number] = sandbox
        # What the call gave stays out of the message: only pid 1 needs it, and has it by descriptor.
        message: Message = {"op": "launch", "id": number, "plan": without_call(plan).as_message()}
        try:
            try:
                await self._send(message, [payload, stdout_w, stderr_w])
            finally:
                for fd in (stdout_w, stderr_w):
                    os.close(fd)
            async with asyncio.timeout(_LAUNCH_TIMEOUT_SECONDS):
                await asyncio.shield(sandbox._prepared)
        except BaseException as error:
            if isinstance(error, IsolationUnavailable) and not sandbox._ended.done():  # the launcher never heard of it
                self._sandboxes.pop(number, None)
                sandbox._on_ended(Ending(failure=str(error)))
            await asyncio.shield(sandbox.close())
            if isinstance(error, TimeoutError):
                raise IsolationUnavailable("the sandbox was not prepared in time") from error
            raise
        return sandbox

    async def close(self) -> None:
        """End every sandbox and the process, and remove what it could not remove itself."""
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening
        self._channel.close()
        await asyncio.to_thread(self._wait_or_kill)
        self._forget(Ending(killed_by_us=KillReason.CANCELLED))

    async def _open_tree(self, workdir: Workdir) -> tuple[int, bool]:
        """What the launcher needs to show a directory: a mount, where it was started as root, else the directory."""
        if self._trees is None:
            return os.dup(workdir.root_fd), False
        status = os.fstat(workdir.root_fd)
        owner = (status.st_uid, status.st_gid)
        try:
            if not self._trees.has_map(owner):
                await asyncio.shield(asyncio.to_thread(self._trees.make_map, owner))
            return self._trees.detach(workdir.root_fd), True
        except OSError as error:
            remedy = trees.remedy(error)
            text = f"`{workdir.root}` could not be made the working directory of a sandbox: {error.strerror}"
            raise IsolationUnavailable(f"{text}\nhint: {remedy}" if remedy else text) from error

    def _wait_or_kill(self) -> None:
        try:
            self._process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _forget(self, ending: Ending) -> None:
        self.lost.set()
        if self._trees is not None:
            self._trees.close()
        for sandbox in list(self._sandboxes.values()):
            sandbox._on_ended(ending)
        self._sandboxes.clear()
        for directory in self._leftovers:
            cgroups.remove_tree(directory)

    async def _send(self, message: Message, fds: list[int] | None = None) -> None:
        try:
            await self._channel.send(message, fds or [])
        except ChannelClosed as error:
            if self._channel.fileno() < 0 or isinstance(error.__cause__, ChannelClosed):
                await self.lost.wait()  # `_listen` and `close` see the same end, and set it: whoever asks is then told
                raise IsolationUnavailable("the launcher was lost") from error
            raise IsolationUnavailable(f"the launcher could not be reached: {error}") from error

    async def _listen(self) -> None:
        try:
            while True:
                message, fds = await self._channel.receive()
                self._on_message(message, fds)
        except ChannelClosed:
            self._channel.close()
            await asyncio.to_thread(self._wait_or_kill)
            self._forget(_ENDED_WITH_LAUNCHER)

    def _on_message(self, message: Message, fds: list[int]) -> None:
        number = cast(int, message["id"])
        sandbox = self._sandboxes[number]
        match message["op"]:
            case "prepared":
                sandbox._on_prepared(cast("list[str]", message["kinds"]), fds)
            case "refused":
                del self._sandboxes[number]
                sandbox._on_refused(cast(str, message["message"]))
            case "ended":
                del self._sandboxes[number]
                sandbox._on_ended(_ending(message))


def _with_hint(message: str) -> str:
    return (
        message if "hint:" in message else f"{message}\nhint: `sluicegate doctor` names what is missing, and the remedy"
    )


def _ending(message: Message) -> Ending:
    values = {key: value for key, value in message.items() if key not in ("op", "id")}
    reason = values.pop("killed_by_us")
    full = cast("list[dict[str, object]]", values.pop("full_filesystems"))
    return Ending(
        **values,  # type: ignore[arg-type]  # ours
        killed_by_us=KillReason(cast(str, reason)) if reason is not None else None,
        full_filesystems=tuple(FullFilesystem(**one) for one in full),  # type: ignore[arg-type]  # ours
    )
