"""The program of a preparation sandbox: does one job, and hands out what it made by its standard output (`outlet`).

Runs inside, as code of nobody's call, with the standard library and the modules that `program` sends along: this one,
and those of the job's operation, `inside_resolve`, `inside_facts` or `inside_fetch`.
Owns: the way out. Must not: import or run anything that was fetched; the same holds for the other three.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from sandbox.packages import outlet

MAX_MESSAGE = 8 * 1024  # of what others say
type Operation = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def main(job: Mapping[str, Any], operation: Operation) -> None:
    """Do the job."""
    enlarge_pipe(1)
    hand_out(outlet.REPORT, json.dumps(operation(job)).encode())


def hand_out(number: int, data: bytes) -> None:
    """Write `data` as a part of one stream."""
    for frame in outlet.frames(number, data):
        view = memoryview(frame)
        while view:
            view = view[os.write(1, view) :]


def enlarge_pipe(descriptor: int) -> None:
    """Fewer, larger pieces pass through it. Where the kernel refuses, it stays as it is."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, outlet.PIECE_BYTES)
