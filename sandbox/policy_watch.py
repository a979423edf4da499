"""A policy file that is watched: each new content, read whole, as a policy or as what is wrong with it.

Owns: noticing. Must not: put a policy in force, or say so in a log; whoever reads from it does.

The file's stamp is looked at about once a second, since that works wherever a file can lie: files written in place,
files replaced by a rename, links that are turned to another file (the way mounted configuration is updated), network
file systems. What was read counts only if nothing has changed for a moment before it and while it was read, so that a
file which is just being written is left alone. A change that leaves no trace in the stamp, within one tick of the file
system's clock, is found all the same: a young file is read again until it is old.

Only the policy file itself is watched. Files that it names (lists, advisories, authorities) are read again when it
changes, or when `poke` asks for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.policy_file import InvalidPolicy, LoadedPolicy, parse_policy, read_policy_text

type Stamp = tuple[int, int, int, int, int] | str  # device, inode, times of content and inode in ns, size; or no file

_YOUNG_SECONDS = 2.0  # coarser than the clock of any file system that is still in use
_MAX_SETTLING = 20  # of a file that never rests, as it is then


@dataclass(frozen=True, slots=True)
class _Reading:
    """What stood in the file: its text, or the message for want of it; and what that comes to."""

    content: str
    outcome: LoadedPolicy | InvalidPolicy


class PolicyWatch:
    """Watches one policy file. `current` is the policy in force, which was loaded from it."""

    def __init__(
        self, path: Path, current: LoadedPolicy, *, interval_seconds: float = 1.0, settling_seconds: float = 0.2,
        look: Callable[[Path], Stamp] | None = None,
    ) -> None:  # fmt: skip
        """`settling_seconds`: for how long a file must have rested before it is read. `look` gives a file's stamp."""
        self._path = path
        self._look = look or stamp_of
        self._interval, self._settling = interval_seconds, settling_seconds
        self._digest = current.digest
        self._told: str | None = None  # the content that was last told to be wrong
        self._seen: Stamp | None = None  # of a file that was read and is old enough for its stamp to be trusted
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Look now, and tell what is found even if it is nothing new. For a signal's handler in the event loop."""
        self._poked.set()

    async def changes(self) -> AsyncIterator[LoadedPolicy | InvalidPolicy]:
        """Each new policy, and each content that is none, once; whatever is found when `poke` asks. Never ends.

        A file that is gone or cannot be read is an `InvalidPolicy`. After one, the policy in force is told again when
        it is back. Comments and spelling make no new policy.
        """
        while True:
            poked = self._poked.is_set()
            self._poked.clear()
            stamp = self._look(self._path)
            if poked or stamp != self._seen:
                reading = await self._read()
                if self._is_news(reading) or poked:
                    self._keep(reading)
                    yield reading.outcome
                    continue  # whatever came meanwhile is looked at without delay
            await self._wait(self._interval)

    async def _read(self) -> _Reading:
        """The content of a file that rests; of one that never does, its content as it is after a while."""
        stamp = self._look(self._path)
        for _ in range(_MAX_SETTLING):
            await asyncio.sleep(self._settling)
            before, stamp = stamp, self._look(self._path)
            if before != stamp:
                continue
            reading = await asyncio.to_thread(_load, self._path)
            if self._look(self._path) == stamp:
                break
        else:
            reading = await asyncio.to_thread(_load, self._path)
        self._seen = None if _is_young(stamp) else stamp
        return reading

    def _is_news(self, reading: _Reading) -> bool:
        if isinstance(reading.outcome, InvalidPolicy):
            return reading.content != self._told
        return reading.outcome.digest != self._digest or self._told is not None

    def _keep(self, reading: _Reading) -> None:
        if isinstance(reading.outcome, InvalidPolicy):
            self._told = reading.content
        else:
            self._told, self._digest = None, reading.outcome.digest

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
        except TimeoutError:
            pass  # it is time to look


def stamp_of(path: Path) -> Stamp:
    """What changes when a file does. Links are followed, so that turning one is a change."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return str(error)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def _is_young(stamp: Stamp) -> bool:
    return not isinstance(stamp, str) and time.time() - max(stamp[2], stamp[3]) / 1e9 < _YOUNG_SECONDS


def _load(path: Path) -> _Reading:
    try:
        text = read_policy_text(path)
    except InvalidPolicy as error:
        return _Reading(str(error), error)
    try:
        return _Reading(text, parse_policy(text, file=str(path), path=path))
    except InvalidPolicy as error:
        return _Reading(text, error)
