"""The host's side of the outlet: what a preparation sandbox wrote, made into plain trees.

Nothing here reads an archive. A tree is of regular files and directories that this process makes itself, below an empty
directory of its own, so that no path of the stream can meet a link.
Owns: the check of what comes out. Must not: trust what was checked inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from sandbox.packages.outlet import REPORT
from sandbox.packages.paths import PathSet, UnsafePath, safe_path
from sandbox.packages.records import Done, FileHead, Frames, InvalidOutlet, Records
from sandbox.packages.unpack import Bounds

FILE_MODE = 0o444
PROGRAM_MODE = 0o555
_MAX_REPORT = 64 * 1024 * 1024


class TooLarge(Exception):
    """A tree has more bytes or files than it may have."""


class Tree:
    """One artifact's tree, as it comes. `files` are the paths with their sizes, in the order in which they came."""

    def __init__(self, root: Path, bounds: Bounds) -> None:
        self.root = root
        self.files: dict[str, int] = {}
        self.bytes = 0
        self.fault: Exception | None = None  # nothing more is written after it
        self._bounds = bounds
        self._paths = PathSet()
        self._made = {""}
        self._file: IO[bytes] | None = None
        self._records = Records(self._on_file, self._on_data)
        root.mkdir(mode=0o700)

    def feed(self, piece: bytes) -> None:
        """Raises `OSError`. What is wrong with the stream is kept as `fault`."""
        if self.fault is not None:
            return
        try:
            self._records.feed(piece)
        except (InvalidOutlet, UnsafePath, TooLarge) as error:
            self.fault = error

    def finish(self) -> Done | None:
        """The last record; None if there is none, or the tree is at fault."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._records.done if self.fault is None else None

    def leave_out(self, path: str) -> None:
        """Remove one of its files, its bytecode, and the directories that are then empty. Raises `OSError`.

        What has gone already, as another's bytecode, is no fault.
        """
        directory, _, name = path.rpartition("/")
        compiled = f"{directory}/__pycache__/{name[:-3]}." if directory else f"__pycache__/{name[:-3]}."
        gone = [one for one in self.files if name.endswith(".py") and one.startswith(compiled)]
        for one in (path, *gone):
            if one in self.files:
                os.unlink(self.root / one)
                self.bytes -= self.files.pop(one)
                self._remove_empty(one.rpartition("/")[0])

    def _remove_empty(self, directory: str) -> None:
        """An empty directory is a module too, of nothing."""
        while directory and not os.listdir(self.root / directory):
            os.rmdir(self.root / directory)
            self._made.discard(directory)
            directory = directory.rpartition("/")[0]

    def _on_file(self, head: FileHead) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self.bytes += head.size
        if len(self.files) >= self._bounds.files or self.bytes > self._bounds.bytes:
            raise TooLarge(f"it has more than {self._bounds.files} files or {self._bounds.bytes} bytes")
        self._paths.add(safe_path(head.path))
        self._make_directory(head.path.rpartition("/")[0])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(f"{self.root}/{head.path}", flags, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        os.fchmod(descriptor, PROGRAM_MODE if head.executable else FILE_MODE)
        self.files[head.path] = head.size

    def _on_data(self, data: memoryview) -> None:
        assert self._file is not None  # data follows a head
        self._file.write(data)

    def _make_directory(self, path: str) -> None:
        if path in self._made:
            return
        self._make_directory(path.rpartition("/")[0])
        os.mkdir(f"{self.root}/{path}", 0o700)
        self._made.add(path)


def receive(pieces: Iterable[bytes], trees: Sequence[Tree]) -> bytes:
    """Make the trees of what the sandbox wrote, as it comes; return the program's report.

    Raises `InvalidOutlet`, `OSError`.
    """
    report = bytearray()

    def on_piece(number: int, piece: bytes) -> None:
        nonlocal report
        if number == REPORT:
            report += piece
            if len(report) > _MAX_REPORT:
                raise InvalidOutlet("the report is too long")
        elif number <= len(trees):
            trees[number - 1].feed(piece)
        else:
            raise InvalidOutlet("a stream is of no artifact of the job")

    frames = Frames(on_piece)
    for piece in pieces:
        frames.feed(piece)
    frames.finish()
    return bytes(report)
