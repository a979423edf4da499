"""The audit log: an append-only file of JSON lines that is a hash chain, and its rotation.

Each line has `seq`, its number in the file, and `prev`, the SHA-256 of the raw line before it, without the newline.
The first line of a file continues the last line of the file rotated out before it; the very first has 64 zeros. A line
that was changed, removed or inserted shows, unless everything after it was written anew: see `docs/audit.md`.

Several processes may append to one file. Each line is written under an exclusive `flock`; the tail is read again only
when the file is not as this process left it. A log that is moved, removed or shortened under us is noticed at the next
line, and the line that says so chains on what was lost, so that the gap stays visible.

Owns: the log's file and its predecessors `<name>.1` (the newest) to `<name>.<keep>`. Must not: know what events mean,
or swallow a failure: what is not written did not happen, and the caller denies it. Reading is `proxy.audit_reader`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.directories import make_private
from proxy.events import Event, ProxyEvent

DEFAULT_MAX_BYTES = 64 * 1024 * 1024
DEFAULT_KEEP = 10
GENESIS = "0" * 64
MAX_LINE_BYTES = 1024 * 1024  # ours stay below 512 KiB: 256 domains of 300 characters, each at most 6 bytes in JSON

# A line takes microseconds, and meanwhile the proxy does nothing else: whoever holds the lock this long is stopped or
# hostile.
_LOCK_SECONDS = 0.25
_TAIL_BYTES = 8192
_START = b'{"seq":'
_ENCODE = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


class AuditUnavailable(Exception):
    """The log cannot be written or read. Whoever was about to act on an event must not."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """How a file ends: its size, the hash of its last line, that line's number, and whether a newline follows it."""

    size: int
    hash: str
    seq: int
    terminated: bool


class AuditLog:
    """Appends events to one file. Safe to share between threads, and to use after a fork.

    `fsync` makes each line survive a power failure, at the price of a disk's round trip for each decision. Without it a
    line survives the death of every process, but not of the machine.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        keep: int = DEFAULT_KEEP,
        fsync: bool = False,
    ) -> None:
        """Open the log, making it (0600) and its directories (0700) where missing. Raises `AuditUnavailable`."""
        if keep < 1:
            raise ValueError("at least one rotated file is kept, or a rotation would break the chain")
        self.path = Path(os.path.abspath(path))
        self._max_bytes = max_bytes
        self._keep = keep
        self._fsync = fsync
        self._thread_lock = threading.Lock()
        self._fd = -1
        self._inode = (0, 0)
        self._tail: _Tail | None = None  # None: this file's end is not known yet
        self._lost: _Tail | None = None  # the end of a file that was taken away from us
        self._pid = os.getpid()
        with self._thread_lock, self._failing_closed():
            make_private(self.path.parent)
            self._open()

    def write(self, event: Event) -> int:
        """Append one event as one line, and return its length in bytes. When this returns, the kernel has all of it.

        Raises `AuditUnavailable`; then no part of the line is in the file, or the part will be marked as incomplete.
        May block for a quarter of a second when another process holds the lock.
        """
        with self._thread_lock, self._failing_closed():
            if self._pid != os.getpid():
                self._start_anew()
            try:
                self._lock_current()
                return self._append(event)
            finally:
                if self._fd >= 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._thread_lock:
            self._close()

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _failing_closed(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise AuditUnavailable(f"the audit log `{self.path}` cannot be written: {why(error)}") from error

    def _start_anew(self) -> None:
        """After a fork: the inherited descriptor shares its lock with the parent, so it protects from nobody."""
        self._close()
        self._tail = None
        self._pid = os.getpid()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Open the path, not its directories: those are made once, and a log whose directory went away fails closed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o600)
        try:
            status = os.fstat(fd)
            _refuse_unsafe(status)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._inode = (status.st_dev, status.st_ino)

    def _lock_current(self) -> None:
        """Hold the lock on the file that the path names now, with `_tail` true of it."""
        for _ in range(8):
            if self._fd < 0:
                self._open()
            lock(self._fd, fcntl.LOCK_EX)
            try:
                now = os.stat(self.path, follow_symlinks=False)
            except FileNotFoundError:
                now = None
            if now is not None and (now.st_dev, now.st_ino) == self._inode:
                if self._tail is None:
                    self._begin(now.st_size)
                elif now.st_size != self._tail.size:
                    self._catch_up(now.st_size)
                return
            self._let_go()
        raise OSError(errno.EAGAIN, "it is replaced again and again")

    def _begin(self, size: int) -> None:
        """A file that is new to this process: learn how it ends, and what it continues if it is empty."""
        tail = _read_tail(self._fd, size)
        notice: tuple[str, str] | None = None
        if not tail.terminated:
            notice = "recovered", "the line before is incomplete"
        if self._lost is not None:
            notice = "replaced", f"the file that was open, of {self._lost.seq} lines, is no longer there"
            tail = replace(tail, hash=self._lost.hash) if size == 0 else tail
        elif size == 0 and (newest := self._newest_rotated()) is not None:
            notice = "rotated", f"continues a file of {newest.seq} lines"
            tail = replace(tail, hash=newest.hash)
        self._tail = tail
        if notice is not None:
            self._note(*notice)
            self._lost = None

    def _catch_up(self, size: int) -> None:
        """Others have written, or someone has cut the file: appenders never shorten it."""
        known = self._tail
        assert known is not None
        if size < known.size:
            self._tail = replace(known, size=size, terminated=is_terminated(self._fd, size))
            self._note("shortened", f"from {known.size} to {size} bytes")
            return
        self._tail = _read_tail(self._fd, size)
        if not self._tail.terminated:
            self._note("recovered", "the line before is incomplete")

    def _let_go(self) -> None:
        """The path names another file, or none: close the open one, and remember its end unless it was rotated."""
        fd, self._fd, self._tail = self._fd, -1, None
        try:
            self._lost = _read_tail(fd, os.fstat(fd).st_size)
            if any(inode_of(path) == self._inode for path in rotated_files(self.path)):
                self._lost = None
        finally:
            os.close(fd)

    def _newest_rotated(self) -> _Tail | None:
        for path in rotated_files(self.path)[-1:]:
            with open(path, "rb", opener=open_plain) as file:
                return _read_tail(file.fileno(), os.fstat(file.fileno()).st_size)
        return None

    def _append(self, event: Event) -> int:
        line = self._encode(event)
        assert self._tail is not None
        if self._tail.size > 0 and self._tail.size + len(line) > self._max_bytes:
            self._rotate()
            self._lock_current()
            line = self._encode(event)
        self._write_line(line)
        return len(line)

    def _note(self, what: str, detail: str) -> None:
        self._write_line(self._encode(ProxyEvent(time=time.time(), what=what, detail=detail)))

    def _encode(self, event: Event) -> bytes:
        assert self._tail is not None
        fields = {"seq": self._tail.seq + 1, **event.to_json(), "prev": self._tail.hash}
        return _ENCODE(fields).encode("ascii") + b"\n"

    def _write_line(self, line: bytes) -> None:
        """Append the whole line or nothing. The lock is held.

        When it fails and the rest can't be cut off either (a file with the append-only attribute), `_tail` no longer
        has the file's size: the next line reads the end again, ends the broken line and says so.
        """
        tail = self._tail
        assert tail is not None
        data = line if tail.terminated else b"\n" + line
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError:
            if done:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, tail.size)
            raise
        self._tail = _Tail(tail.size + len(data), hashlib.sha256(line[:-1]).hexdigest(), tail.seq + 1, terminated=True)

    def _rotate(self) -> None:
        """Move the full file aside, as `<name>.1`. The lock is held on it; the path's own rename comes last.

        A crash half-way leaves a gap in the numbers, which the next rotation fills.
        """
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._keep + 1))]
        free = next((number for number, name in enumerate(names) if number and not name.exists()), self._keep)
        for number in range(free, 0, -1):
            os.rename(names[number - 1], names[number])
        for surplus in set(rotated_files(self.path)) - set(names):
            surplus.unlink()
        if self._fsync:
            _sync_directory(self.path.parent)


def why(error: BaseException) -> str:
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def lock(fd: int, how: int) -> None:
    """`flock`, waiting a bounded time. Raises `OSError`."""
    deadline = None
    while True:
        try:
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            deadline = deadline or now + _LOCK_SECONDS
            if now > deadline:
                raise OSError(errno.EDEADLK, "another process holds its lock and does not let go") from None
            time.sleep(0.0001)


def rotated_files(path: Path) -> list[Path]:
    """The rotated files of a log that exist, oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.([1-9][0-9]{0,5})\Z", re.ASCII)
    numbers = [int(match[1]) for name in os.listdir(path.parent) if (match := pattern.match(name))]
    return [path.with_name(f"{path.name}.{number}") for number in sorted(numbers, reverse=True)]


def inode_of(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def open_plain(path: str, flags: int) -> int:
    """An `opener` that follows no link and waits for no FIFO."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_terminated(fd: int, size: int) -> bool:
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


def parse_line(line: bytes) -> dict[str, object] | None:
    """The JSON object that a line is, None when it is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _refuse_unsafe(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to uid {status.st_uid}, not to this process's {os.geteuid()}")
    if status.st_mode & 0o022:
        raise OSError(errno.EPERM, "others may write to it\nhint: `chmod 600` it, and look at what they wrote")


def _read_tail(fd: int, size: int) -> _Tail:
    """Read back from the end to a line whose number can be read; damaged lines after it are counted on from there."""
    if size == 0:
        return _Tail(0, GENESIS, 0, terminated=True)
    want = min(size, _TAIL_BYTES)
    while True:
        data = os.pread(fd, want, size - want)
        terminated = data.endswith(b"\n")
        lines = data.removesuffix(b"\n").split(b"\n")
        whole = lines if want == size else lines[1:]  # the first may have begun before what was read
        for after, line in enumerate(reversed(whole)):
            seq = _seq_of(line)
            if seq is not None:
                return _Tail(size, hashlib.sha256(whole[-1]).hexdigest(), seq + after, terminated)
        if want == size and len(lines) == 1 and not terminated and (data[:7] == _START or _START.startswith(data)):
            return _Tail(size, hashlib.sha256(data).hexdigest(), 1, terminated)  # a crash within the first line
        if want >= min(size, 4 * MAX_LINE_BYTES):
            raise OSError(errno.EINVAL, "what is in it is no audit log")
        want = min(size, want * 4)


def _seq_of(line: bytes) -> int | None:
    fields = parse_line(line)
    seq = fields.get("seq") if fields is not None else None
    return seq if isinstance(seq, int) and not isinstance(seq, bool) and seq > 0 else None


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
