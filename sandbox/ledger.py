"""The ledger: which calls run, what was answered under which idempotency key, and which calls were lost.

A call is written down before its first attempt and closed before its answer is given. A call that is still open when
nobody holds the lock of its executor any more was lost with it; whoever looks next says so, once. A call without a key
leaves nothing behind; one with a key leaves its answer until it expires.

Owns: the thread that every access goes through, so that the event loop never waits for the disk. Must not: know how
calls are stored (`call_store`) or run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sandbox.contract import CodeCall, ToolResult

if TYPE_CHECKING:
    from sandbox.call_store import CallStore


class State(StrEnum):
    RUNNING = "running"
    ANSWERED = "answered"
    LOST = "lost"


class LedgerUnavailable(Exception):
    """The ledger cannot be read or written. A call that is not written down is not run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call as the ledger has it. `request` is the digest of what was asked; times are seconds since the epoch."""

    call_id: str
    executor: str
    idempotency_key: str | None
    request: str
    state: State
    started_at: float
    ended_at: float | None
    result: ToolResult | None


def request_digest(call: CodeCall) -> str:
    """What tells requests apart: all of a call but its idempotency key, however it was written."""
    fields = call.model_dump(mode="json", exclude={"idempotency_key"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Ledger:
    """One executor's view of the ledger. Made by `open`, given back by `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._store: CallStore | None = None

    @classmethod
    async def open(cls, directory: Path, *, keep_seconds: float | None) -> Self:
        """Open it, making what is missing. Raises `LedgerUnavailable`."""
        self = cls()

        def work() -> CallStore:
            from sandbox.call_store import CallStore  # takes a quarter of a second, which the proxy's start takes too

            return CallStore(directory, keep_seconds)

        try:
            self._store = await self._do(work)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    @property
    def executor(self) -> str:
        """The name of this view, in the entries of its calls."""
        return self._opened.executor

    async def take_lost(self) -> list[Entry]:
        """The calls whose executor has gone, each told to one caller only. Raises `LedgerUnavailable`."""
        return await self._do(self._opened.take_lost)

    async def begin(self, call_id: str, call: CodeCall) -> Entry | None:
        """Write down that a call starts; or the entry that has its idempotency key. Raises `LedgerUnavailable`."""
        return await self._do(lambda: self._opened.begin(call_id, call.idempotency_key, request_digest(call)))

    async def end(self, call_id: str, answer: ToolResult | None) -> None:
        """Close a call. `answer` is kept if the call has a key; None forgets the call. Raises `LedgerUnavailable`."""
        packed = None if answer is None else answer.model_dump_json().encode()
        await self._do(lambda: self._opened.end(call_id, packed))

    async def lose(self, call_id: str, *, begun: bool) -> None:
        """Close a call that is still open: lost if its code may have begun and it has a key, else forgotten.

        Raises `LedgerUnavailable`.
        """
        await self._do(lambda: self._opened.lose(call_id, begun=begun))

    async def forget(self, key: str) -> bool:
        """Drop what is kept under an idempotency key. False if nothing is, or its call runs. Raises as above."""
        return await self._do(lambda: self._opened.forget(key))

    async def entries(self) -> list[Entry]:
        """All that is in it, oldest first. Raises `LedgerUnavailable`."""
        return await self._do(self._opened.entries)

    async def close(self) -> None:
        """Give it back. A call of this executor's that is open and has a key is lost, as far as anyone can tell."""
        if self._store is not None:
            with contextlib.suppress(LedgerUnavailable):
                await self._do(self._store.close)
            self._store = None
        self._thread.shutdown(wait=False)

    @property
    def _opened(self) -> CallStore:
        if self._store is None:
            raise LedgerUnavailable("the ledger is closed")
        return self._store

    async def _do[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
