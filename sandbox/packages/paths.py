"""Paths inside archives and trees: what may become a file of ours, and what may not. Pure.

Used on both sides of the preparation sandbox: by what unpacks there, and again by what takes the tree from it.
Owns: the grammar of a safe path. Must not: touch a file system, or mend a path that is not safe.
"""

from __future__ import annotations

import re
import unicodedata

MAX_PATH_BYTES = 1024  # well below the kernel's 4096, with room for the store's own part
MAX_NAME_BYTES = 255  # the kernel's
MAX_DEPTH = 64
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class UnsafePath(ValueError):
    """The path is none that a file of ours may have. The message says why."""


def safe_path(text: str) -> str:
    """The path, unchanged, if it is relative, plain, and stays below its root. Raises `UnsafePath`."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UnsafePath("it is not UTF-8") from None
    if not 1 <= size <= MAX_PATH_BYTES:
        raise UnsafePath("it is empty" if not size else f"it is longer than {MAX_PATH_BYTES} bytes")
    if _CONTROL.search(text):
        raise UnsafePath("it has a control character")
    if "\\" in text:
        raise UnsafePath("it has a backslash")
    if text.startswith("/") or (len(text) > 1 and text[1] == ":" and text[0].isalpha()):
        raise UnsafePath("it is absolute")
    parts = text.split("/")
    if len(parts) > MAX_DEPTH:
        raise UnsafePath(f"it is deeper than {MAX_DEPTH} directories")
    for part in parts:
        if part in ("", ".", ".."):
            raise UnsafePath(f"`{part}` is among its parts" if part else "one of its parts is empty")
        if len(part.encode()) > MAX_NAME_BYTES:
            raise UnsafePath(f"one of its parts is longer than {MAX_NAME_BYTES} bytes")
    return text


class PathSet:
    """The files of one tree: each path once, in no other spelling, and never both a file and a directory.

    Spellings that some file system takes for one another (case, Unicode composition) are one path here.
    """

    def __init__(self) -> None:
        self._directories: dict[str, str] = {}  # folded -> as it is spelt
        self._files: dict[str, str] = {}

    def add(self, path: str) -> None:
        """Add a file by its safe path. Raises `UnsafePath`."""
        start = 0
        while (slash := path.find("/", start)) >= 0:
            self._add_directory(path[:slash])
            start = slash + 1
        folded = _folded(path)
        if folded in self._directories:
            raise UnsafePath("it is a file and a directory at once")
        if (known := self._files.get(folded)) is not None:
            raise UnsafePath(
                "it is there twice" if known == path else f"it differs from `{known}` only in its spelling"
            )
        self._files[folded] = path

    def _add_directory(self, path: str) -> None:
        folded = _folded(path)
        if folded in self._files:
            raise UnsafePath(f"`{path}` is a file and a directory at once")
        if (known := self._directories.setdefault(folded, path)) != path:
            raise UnsafePath(f"its directory differs from `{known}` only in its spelling")


def _folded(path: str) -> str:
    """The form that spellings share which differ in case or Unicode composition alone."""
    return (
        path.lower() if path.isascii() else unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
    )
