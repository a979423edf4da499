"""Reading the audit log back, through its rotated files: its events, and whether its chain is whole.

Owns: nothing; it opens files read-only. Must not: trust a line. The file may hold anything, of any length.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from proxy.audit import (
    GENESIS,
    MAX_LINE_BYTES,
    AuditUnavailable,
    inode_of,
    lock,
    open_plain,
    parse_line,
    rotated_files,
    why,
)

_EXPLAINS_INCOMPLETE = frozenset({"recovered", "rotated", "replaced"})  # what the writer notes after a line cut short


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not what it should be, by its file and its number there."""

    file: Path
    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.why}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that could be read. Its fields are whatever stood there: not every log was written by us."""

    file: Path
    number: int
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a log's files show. `bad` is the first line that breaks the chain, None when it is intact.

    `incomplete` are lines that a crash cut short and the chain includes as they are: only their events are lost.
    `from_beginning` is false when older files were rotated out, so that the first line continues one that is gone.
    """

    files: int
    lines: int
    bad: BadLine | None
    incomplete: tuple[BadLine, ...]
    from_beginning: bool

    @property
    def ok(self) -> bool:
        return self.bad is None


def verify(path: Path) -> VerifyReport:
    """Check the chain of a log from its oldest file on. Raises `AuditUnavailable` when a file can't be read."""
    previous: str | None = None
    from_beginning = True
    damaged: BadLine | None = None  # no event; innocent if the next line explains it, or if it is the very end
    incomplete: list[BadLine] = []
    bad: BadLine | None = None
    count = 0
    raw = b""
    with _open_all(path) as files:
        for opened in files:
            for number, raw in _raw_lines(opened):
                count += 1
                line = raw.removesuffix(b"\n")
                fields = parse_line(line) if raw.endswith(b"\n") else None
                if damaged is not None:
                    if not _explains(fields):
                        bad = damaged
                        break
                    incomplete.append(damaged)
                    damaged = None
                if fields is None:
                    damaged = BadLine(opened.path, number, _fault(raw))
                elif previous is None and fields.get("prev") != GENESIS:
                    from_beginning = False
                if fields is not None and (bad := _break(opened.path, number, fields, previous)) is not None:
                    break
                previous = hashlib.sha256(line).hexdigest()
            if bad is not None:
                break
    if bad is None and damaged is not None:
        if raw.endswith(b"\n"):
            bad = damaged
        else:
            incomplete.append(damaged)
    return VerifyReport(len(files), count, bad, tuple(incomplete), from_beginning)


def _explains(fields: Mapping[str, object] | None) -> bool:
    return fields is not None and fields.get("event") == "proxy" and fields.get("what") in _EXPLAINS_INCOMPLETE


def _fault(raw: bytes) -> str:
    return "it is longer than any event" if len(raw) > MAX_LINE_BYTES else "it is not a whole event"


def _break(path: Path, number: int, fields: Mapping[str, object], previous: str | None) -> BadLine | None:
    if fields.get("seq") != number:
        return BadLine(path, number, f"its `seq` is not {number}: lines are missing, added or changed")
    if previous is not None and fields.get("prev") != previous:
        return BadLine(
            path, number, "its `prev` is not the hash of the line before: it was changed, or lines are missing"
        )
    return None


def read(
    path: Path, *, call_id: str | None = None, tenant: str | None = None, denied: bool = False
) -> Iterator[Line | BadLine]:
    """The events of a log, oldest first. Lines that can't be read are reported, not passed over, whatever is asked for.

    `tenant` is the whole name. Lines that were written before there were tenants are nobody's.
    Raises `AuditUnavailable` when a file can't be read.
    """
    with _open_all(path) as files:
        for opened in files:
            for number, raw in _raw_lines(opened):
                fields = parse_line(raw)
                if fields is None:
                    yield BadLine(opened.path, number, _fault(raw))
                elif _wanted(fields, call_id, tenant, denied=denied):
                    yield Line(opened.path, number, fields)


def _wanted(fields: Mapping[str, object], call_id: str | None, tenant: str | None, *, denied: bool) -> bool:
    if call_id is not None and not str(fields.get("call_id", "")).startswith(call_id):
        return False
    if tenant is not None and fields.get("tenant", "") != tenant:
        return False
    return not denied or fields.get("decision") == "deny"


@dataclass(frozen=True, slots=True)
class _Opened:
    file: BinaryIO
    path: Path
    size: int


@contextlib.contextmanager
def _open_all(path: Path) -> Iterator[list[_Opened]]:
    """All files of a log, oldest first, each with its size as of now. A rotation after this changes nothing."""
    path = Path(os.path.abspath(path))
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(8):
                names = _files(path)
                files = [stack.enter_context(open(name, "rb", opener=open_plain)) for name in names]
                inodes = [(status.st_dev, status.st_ino) for status in (os.fstat(file.fileno()) for file in files)]
                if _files(path) == names and inodes == [inode_of(name) for name in names]:
                    break
                stack.pop_all().close()
            else:
                raise OSError(errno.EAGAIN, "it is rotated again and again")
            yield [_Opened(file, name, _settled_size(file.fileno())) for file, name in zip(files, names, strict=True)]
        except OSError as error:
            raise AuditUnavailable(f"the audit log `{path}` cannot be read: {why(error)}") from error


def _files(path: Path) -> list[Path]:
    rotated = rotated_files(path)
    # A crash within a rotation leaves the path itself missing until the next line.
    return rotated if rotated and inode_of(path) is None else [*rotated, path]


def _settled_size(fd: int) -> int:
    """The file's size between two lines, never within one: writers hold the lock while they write."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    lock(fd, fcntl.LOCK_SH)
    try:
        return os.fstat(fd).st_size
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _raw_lines(opened: _Opened) -> Iterator[tuple[int, bytes]]:
    """Lines with their newline, up to the file's size; of one longer than the bound only the beginning, without it."""
    number = 0
    left = opened.size
    while left > 0:
        number += 1
        raw = part = opened.file.readline(min(left, MAX_LINE_BYTES + 1))
        left -= len(part)
        while part and left > 0 and not part.endswith(b"\n"):
            part = opened.file.readline(min(left, MAX_LINE_BYTES))
            left -= len(part)
        if not raw:
            return  # shortened meanwhile
        yield number, raw
