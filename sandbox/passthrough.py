"""A program's output, passed on as it comes without ever waiting for whoever reads it.

Owns: one writing thread per stream. When the reader is far behind, output is dropped and counted rather than kept.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_CLOSE_SECONDS = 5.0
_QUEUE_BYTES = 16 * 1024 * 1024


class Passthrough:
    """A sink of bytes that writes to a descriptor from a thread of its own. A closed pipe is told, not raised."""

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        """`on_gone` is called from that thread when nobody reads any more."""
        self._fd = fd
        self._on_gone = on_gone
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self.dropped_bytes = 0
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"passthrough {fd}")
        self._thread.start()

    def __call__(self, data: bytes) -> None:
        with self._lock:
            if self._queued + len(data) > _QUEUE_BYTES:
                self.dropped_bytes += len(data)
                return
            self._queued += len(data)
        self._queue.put(data)

    def close(self) -> None:
        """Write what is queued, waiting at most a few seconds for a reader that does not read."""
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _write(self) -> None:
        while (data := self._queue.get()) is not None:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except OSError as error:
                    self.error = error
                    self._on_gone()
                    return
            with self._lock:
                self._queued -= len(data)


def printable(text: str) -> str:
    """`text` with everything that a terminal might act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
