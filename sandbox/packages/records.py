"""Reading what a preparation sandbox handed out (`outlet`): its frames, and the records of one artifact. Pure.

Owns: the check of the form. Must not: open a file, or trust a length, a number or a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from sandbox.packages.outlet import HEAD, PIECE_BYTES

_MAX_HEADER = 16 * 1024


class InvalidOutlet(ValueError):
    """What came out of the sandbox is not of this form."""


class Frames:
    """Tells the streams apart: `on_piece` is called with a stream's number and the next bytes of it."""

    def __init__(self, on_piece: Callable[[int, bytes], None]) -> None:
        self._on_piece = on_piece
        self._head = b""
        self._number = self._left = 0

    def feed(self, data: bytes) -> None:
        """Raises `InvalidOutlet`, and whatever the callback raises."""
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                self._on_piece(self._number, piece)
                continue
            part = data[at : at + HEAD.size - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == HEAD.size:
                self._number, self._left = HEAD.unpack(self._head)
                self._head = b""
                if not 1 <= self._left <= PIECE_BYTES:
                    raise InvalidOutlet("a frame is empty or too long")

    def finish(self) -> None:
        """Raises `InvalidOutlet` if the end is within a frame."""
        if self._head or self._left:
            raise InvalidOutlet("it ends within a frame")


@dataclass(frozen=True, slots=True)
class FileHead:
    """What comes before the bytes of a file."""

    path: str
    size: int
    executable: bool


@dataclass(frozen=True, slots=True)
class Done:
    """An artifact's last record: `facts` of one that was unpacked, or why it was not."""

    facts: dict[str, object]
    failed: bool


class Records:
    """Reads the records of one artifact from the pieces of its stream.

    `on_file` is called for a head, `on_data` for parts of that file's bytes, which add up to its size.
    """

    def __init__(self, on_file: Callable[[FileHead], None], on_data: Callable[[memoryview], None]) -> None:
        self._on_file, self._on_data = on_file, on_data
        self._header = b""
        self._left = 0
        self.done: Done | None = None

    def feed(self, piece: bytes) -> None:
        """Raises `InvalidOutlet`, and whatever the callbacks raise."""
        view = memoryview(piece)
        while view:
            if self.done is not None:
                raise InvalidOutlet("something follows the last record")
            if self._left:
                part, view = view[: self._left], view[self._left :]
                self._left -= len(part)
                self._on_data(part)
                continue
            end = piece.find(b"\n", len(piece) - len(view))
            if end < 0:
                self._header += bytes(view)
                if len(self._header) > _MAX_HEADER:
                    raise InvalidOutlet("a record's line is too long")
                return
            cut = end - (len(piece) - len(view))
            header, self._header = self._header + bytes(view[:cut]), b""
            view = view[cut + 1 :]
            self._on_header(header)

    def _on_header(self, line: bytes) -> None:
        if len(line) > _MAX_HEADER:
            raise InvalidOutlet("a record's line is too long")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidOutlet("a record is not JSON") from error
        match value:
            case {"file": str(path), "size": int(size), "executable": bool(executable), **rest} if not rest:
                if isinstance(size, bool) or size < 0:
                    raise InvalidOutlet("a file's size is none")
                self._left = size
                self._on_file(FileHead(path, size, executable))
            case {"done": dict(facts), **rest} if not rest:
                self.done = Done(facts, failed=False)
            case {"failed": dict(facts), **rest} if not rest:
                self.done = Done(facts, failed=True)
            case _:
                raise InvalidOutlet("a record is of no known kind")
