"""Directories that only their owner may enter. Owns: their modes. Standard library only."""

from __future__ import annotations

import contextlib
from pathlib import Path


def make_private(directory: Path) -> None:
    """Make a directory and those above it that are missing, each 0700 whatever the umask. Raises `OSError`.

    `Path.mkdir(parents=True, mode=0o700)` gives that mode to the last one only.
    """
    for path in (*reversed(directory.parents), directory):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
