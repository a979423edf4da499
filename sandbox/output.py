"""What a program writes: read to the end, counted exactly, kept up to a cap, passed on as it comes.

Owns: the reading ends of one attempt's two pipes while it collects. Must not: slow the program down, or grow with what
it writes.

The streams are UTF-8; what is not is replaced, and said so. The caps and counts are of characters (code points), as in
the contract. The end is the end of the pipes, which the kernel closes with the namespace: no descendant survives to
hold them open.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger("sluicegate")
_READ_BYTES = 64 * 1024  # a pipe's default capacity
_READS_PER_TURN = 8  # then the event loop goes round: an endless stream must not starve it


@dataclass(frozen=True, slots=True)
class Stream:
    """`text` has at most the cap; `chars` is how many there were; `replaced` whether any was not UTF-8."""

    text: str = ""
    chars: int = 0
    bytes: int = 0
    truncated: bool = False
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Collected:
    stdout: Stream = field(default_factory=Stream)
    stderr: Stream = field(default_factory=Stream)

    @property
    def bytes(self) -> int:
        return self.stdout.bytes + self.stderr.bytes


class _Recorder:
    """One stream's text."""

    def __init__(self, cap_chars: int, sink: Callable[[bytes], None] | None) -> None:
        self._cap = cap_chars
        self._sink = sink
        # Strictly at first: what fails is decoded again with replacement, from there on. So `replaced` is exact,
        # which looking for U+FFFD in the text would not be.
        self._strict = codecs.getincrementaldecoder("utf-8")("strict")
        self._lenient = codecs.getincrementaldecoder("utf-8")("replace")
        self._replaced = False
        self._parts: list[str] = []
        self._kept = 0
        self._chars = 0
        self.bytes = 0

    def add(self, data: bytes, *, final: bool = False) -> None:
        self.bytes += len(data)
        if self._cap:
            self._keep(data, final)
        if data and self._sink is not None:
            try:
                self._sink(data)
            except Exception:  # noqa: BLE001 - the caller's own code
                # Somebody who listens no more is no reason to lose the result.
                self._sink = None
                _log.exception("a sink of output failed, and is given no more")

    def _keep(self, data: bytes, final: bool) -> None:
        text = self._decode(data, final)
        self._chars += len(text)
        if text and self._kept < self._cap:
            part = text[: self._cap - self._kept]
            self._kept += len(part)
            self._parts.append(part)

    def stream(self) -> Stream:
        return Stream("".join(self._parts), self._chars, self.bytes, self._chars > self._kept, self._replaced)

    def _decode(self, data: bytes, final: bool) -> str:
        if not self._replaced:
            pending, _ = self._strict.getstate()
            try:
                return self._strict.decode(data, final)
            except UnicodeDecodeError:
                self._replaced = True
                self._lenient.setstate((pending, 0))
        return self._lenient.decode(data, final)


class Collector:
    """Collects one attempt's output. A sink gets the bytes of its stream as they come; it must not block.

    A sink that raises is logged, and gets no more; what it was to see is collected all the same.

    A stream of which no character is to be kept may be no text: its bytes alone are counted.
    `flooded` is set once both streams together have brought more than `max_bytes`; they are read on all the same.
    """

    def __init__(
        self,
        max_stdout_chars: int,
        max_stderr_chars: int,
        *,
        max_bytes: int | None = None,
        stdout_sink: Callable[[bytes], None] | None = None,
        stderr_sink: Callable[[bytes], None] | None = None,
    ) -> None:
        self._stdout = _Recorder(max_stdout_chars, stdout_sink)
        self._stderr = _Recorder(max_stderr_chars, stderr_sink)
        self._max_bytes = max_bytes
        self.flooded = asyncio.Event()

    async def collect(self, stdout: int, stderr: int) -> None:
        """Read both to their ends. The descriptors are non-blocking and remain the caller's."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_read(stdout, self._stdout, self._count))
            tasks.create_task(_read(stderr, self._stderr, self._count))

    def finish(self) -> Collected:
        """What was written so far."""
        return Collected(self._stdout.stream(), self._stderr.stream())

    def _count(self) -> None:
        if self._max_bytes is not None and self._stdout.bytes + self._stderr.bytes > self._max_bytes:
            self.flooded.set()


async def _read(fd: int, recorder: _Recorder, after_each: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        try:
            for _ in range(_READS_PER_TURN):
                data = os.read(fd, _READ_BYTES)
                recorder.add(data, final=not data)
                after_each()
                if not data:
                    loop.remove_reader(fd)
                    ended.set_result(None)
                    return
        except BlockingIOError:
            pass
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits
            loop.remove_reader(fd)
            if not ended.done():
                ended.set_exception(error)

    loop.add_reader(fd, on_readable)
    try:
        await ended
    finally:
        loop.remove_reader(fd)
