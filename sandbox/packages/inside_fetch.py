"""Inside a preparation sandbox: fetching artifacts, unpacking and compiling them.

Processes. The program itself is single-threaded and reads nothing hostile: it starts *fetchers*, which each keep a
connection, hold what they get to its digest, and pass it on as a file without a name; and for each artifact a *parser*
of its own, which unpacks and compiles it into a pipe. The program labels what comes out of that pipe. So whoever takes
over a parser by a hostile archive can speak for that one artifact only: it has no other's file, can write none that
another would read, and all of these processes are undumpable, so that none can open what another has.

Owns: the order of these steps. Must not: import or run anything that was fetched.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import http.client
import importlib.util
import json
import marshal
import os
import resource
import selectors
import socket
import ssl
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Mapping
from typing import IO, Any, cast

from sandbox.packages import outlet
from sandbox.packages.inside import MAX_MESSAGE, enlarge_pipe, hand_out, run_and_end
from sandbox.packages.inside_client import Client, trust
from sandbox.packages.unpack import Bounds, Member, RefusedArchive, open_tarball, open_wheel

_WORKSPACE = "/workspace"
_CHUNK = 1 << 18
_FETCHERS = 8
_AHEAD = 8  # artifacts that are fetched and not yet unpacked: they lie in memory
_MAX_SOURCE = 8 * 1024 * 1024
_PR_SET_DUMPABLE = 4
_UNCHECKED = (1).to_bytes(4, "little")  # PEP 552: by hash, and never compared with the source


class _Failed(Exception):
    """An artifact could not be had. `facts` say why."""

    def __init__(self, **facts: object) -> None:
        super().__init__(str(facts))
        self.facts = facts


def fetch(job: Mapping[str, Any]) -> dict[str, Any]:
    """Fetch, unpack and compile the artifacts of the job; each is a stream of the outlet."""
    set_undumpable()
    artifacts = job["artifacts"]
    _Fetch(artifacts, trust(job), parsers=len(os.sched_getaffinity(0))).run()
    return {"artifacts": len(artifacts)}


class _Fetch:
    """The one process that sees all artifacts, and reads none of them."""

    def __init__(self, artifacts: list[Mapping[str, Any]], context: ssl.SSLContext, *, parsers: int) -> None:
        self._artifacts = artifacts
        self._context = context
        self._parsers = parsers
        self._waiting = deque(range(len(artifacts)))
        self._fetched: deque[tuple[int, int]] = deque()  # number, descriptor
        self._selector = selectors.DefaultSelector()
        self._fetching = self._unpacking = 0
        self._idle: list[socket.socket] = []

    def run(self) -> None:
        for _ in range(min(_FETCHERS, len(self._artifacts))):
            self._idle.append(self._start_fetcher())
        while self._waiting or self._fetched or self._fetching or self._unpacking:
            while self._waiting and self._idle and self._fetching + len(self._fetched) < _AHEAD:
                number = self._waiting.popleft()
                fetcher = self._idle.pop()
                fetcher.send(number.to_bytes(4, "little"))
                self._fetching += 1
                on_fetched = functools.partial(self._on_fetched, number)
                self._selector.register(fetcher, selectors.EVENT_READ, on_fetched)
            while self._fetched and self._unpacking < self._parsers:
                self._start_parser(*self._fetched.popleft())
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _start_fetcher(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            for other in self._idle:
                other.close()
            run_and_end(lambda: _serve_fetches(self._artifacts, Client(self._context), theirs))
        theirs.close()
        return ours

    def _on_fetched(self, number: int, fetcher: socket.socket) -> None:
        """It answers for what it was asked, and for no other artifact."""
        data, fds, _, _ = socket.recv_fds(fetcher, 65536, 1)
        self._selector.unregister(fetcher)
        self._fetching -= 1
        if not data:
            raise ChildProcessError("a fetcher ended early")
        answer = json.loads(data)
        self._idle.append(fetcher)
        if fds:
            self._fetched.append((number, fds[0]))
        else:
            hand_out(number + 1, outlet.record({"failed": answer["failed"]}))

    def _start_parser(self, number: int, archive: int) -> None:
        output, output_w = os.pipe()
        enlarge_pipe(output)
        pid = os.fork()
        if pid == 0:
            os.dup2(output_w, 1)
            os.dup2(archive, 0)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the others have: no number is larger
            run_and_end(lambda: _parse_alone(self._artifacts[number]))
        os.close(output_w)
        os.close(archive)
        self._unpacking += 1
        self._selector.register(output, selectors.EVENT_READ, lambda _: self._on_parsed(number, output, pid))

    def _on_parsed(self, number: int, output: int, pid: int) -> None:
        data = os.read(output, outlet.PIECE_BYTES)
        if data:
            hand_out(number + 1, data)
            return
        self._selector.unregister(output)
        os.close(output)
        os.waitpid(pid, 0)
        self._unpacking -= 1


def forbid_files() -> None:
    """No file can be written any more, whoever runs here. Pipes can."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def set_undumpable() -> None:
    """Inherited by forks: `/proc/PID/mem` and `/proc/PID/fd` are then closed to processes of the same uid."""
    import ctypes

    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def _serve_fetches(artifacts: list[Mapping[str, Any]], client: Client, requests: socket.socket) -> None:
    while data := requests.recv(4):
        number = int.from_bytes(data, "little")
        try:
            with tempfile.TemporaryFile(dir=_WORKSPACE) as file:
                _fetch_one(client, artifacts[number], cast("IO[bytes]", file))
                file.flush()
                socket.send_fds(requests, [b"{}"], [file.fileno()])
        except _Failed as failure:
            requests.send(json.dumps({"failed": failure.facts}).encode())
        except (OSError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                full = {"reason": "closure_too_large", "message": "what is fetched does not fit into the sandbox"}
                requests.send(json.dumps({"failed": full}).encode())
                continue
            requests.send(json.dumps({"failed": {"status": None, "message": why}}).encode())


def _fetch_one(client: Client, artifact: Mapping[str, Any], file: IO[bytes]) -> None:
    digest, limit, size = hashlib.new(artifact["algorithm"]), artifact["max_bytes"], 0
    with client.get(artifact["url"]) as response:
        if response.status != 200:
            message = response.read(MAX_MESSAGE).decode("utf-8", "replace")
            raise _Failed(status=response.status, message=message)
        while chunk := response.read(_CHUNK):
            size += len(chunk)
            if size > limit:
                raise _Failed(reason="closure_too_large", message=f"it is larger than {limit} bytes")
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != artifact["digest"]:
        raise _Failed(reason="hash_mismatch", message=f"its {artifact['algorithm']} is not the one that was locked")


# Unpacking: one process for each archive, which has nothing else


def _parse_alone(artifact: Mapping[str, Any]) -> None:
    forbid_files()
    _parse(artifact)


def _parse(artifact: Mapping[str, Any]) -> None:
    warnings.simplefilter("ignore")  # of hostile source's syntax
    bounds = Bounds(**artifact["bounds"])
    with os.fdopen(1, "wb", buffering=outlet.PIECE_BYTES) as out, os.fdopen(0, "rb") as archive:
        try:
            found: dict[str, object] = {}
            if artifact["kind"] == "wheel":
                wheel = open_wheel(archive, bounds)
                found = {"name": wheel.name, "version": wheel.version}
                members = wheel.members
            else:
                members = open_tarball(archive, bounds)
            for member in members:
                _hand_out_file(out, member, artifact["prefix"])
            out.write(outlet.record({"done": found}))
        except RefusedArchive as refused:
            out.write(outlet.record({"failed": {"reason": refused.reason, "message": str(refused)}}))


def _hand_out_file(out: IO[bytes], member: Member, prefix: str | None) -> None:
    """One file and, where it is Python that will be imported below `prefix`, its bytecode."""
    head = {"file": member.path, "size": member.size, "executable": member.executable}
    compiled = prefix is not None and _is_module(member)
    parts, left, first = [], member.size, True
    while left or first:
        chunk = member.read(min(left, _CHUNK)) if left else b""
        if left and not chunk:
            raise RefusedArchive("unsafe_archive_path", "a file of it is shorter than it says")
        if first:  # only now: what cannot be read has no head
            out.write(outlet.record(head))
            first = False
        out.write(chunk)
        left -= len(chunk)
        if compiled:
            parts.append(chunk)
    if compiled and prefix is not None:
        _compile(out, member.path, b"".join(parts), prefix)


def _is_module(member: Member) -> bool:
    """Tests are left to be compiled when they are imported, which is hardly ever: they are a quarter of some wheels."""
    directories = member.path.split("/")[:-1]
    return (
        member.path.endswith(".py")
        and member.size <= _MAX_SOURCE
        and "tests" not in directories
        and not any(one.endswith(".dist-info") for one in directories)
        and directories[:1] != ["bin"]
    )


def _compile(out: IO[bytes], path: str, source: bytes, prefix: str) -> None:
    """Bytecode of an unchecked hash: it stays valid whatever becomes of the file's times. Compiling runs nothing."""
    directory, _, name = path.rpartition("/")
    try:
        code = compile(source, f"{prefix}/{path}", "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return  # then it fails when it is imported, or never is
    data = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source) + marshal.dumps(code)
    target = f"__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    full = f"{directory}/{target}" if directory else target
    out.write(outlet.record({"file": full, "size": len(data), "executable": False}))
    out.write(data)
