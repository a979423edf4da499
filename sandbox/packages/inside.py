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
import signal
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sandbox.packages import outlet

MAX_MESSAGE = 8 * 1024  # of what others say
type Operation = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def main(job: Mapping[str, Any], operation: Operation) -> None:
    """Do the job, and end. Nothing runs after it, and no traceback is made: that imports, and reads files.

    Python has a handler for one signal, SIGINT, which would raise at any point; every other that is caught ends us.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_and_end(lambda: _do(job, operation))


def _do(job: Mapping[str, Any], operation: Operation) -> None:
    enlarge_pipe(1)
    hand_out(outlet.REPORT, json.dumps(operation(job)).encode())


def run_and_end(run: Callable[[], None]) -> NoReturn:
    """The outermost frame of a process: a fault is a line on its standard error, and a status."""
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - its outermost frame
        with contextlib.suppress(Exception):  # whatever it says, and wherever that goes
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        os._exit(1)
    os._exit(0)


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
