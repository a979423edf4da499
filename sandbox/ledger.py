"""The ledger: which calls run, what was answered under which idempotency key, and which calls were lost.

A call is written down before its first attempt and closed before its answer is given. A call that is still open when
nobody holds the lock of its executor any more was lost with it; whoever looks next says so, once. A call without a key
leaves nothing behind, unless it is recorded; one with a key leaves its answer until it expires. Keys, and what is
recorded, are their owner's: nobody else's request has that key, or sees that call.

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
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sandbox.contract import CodeCall, ToolResult
from sandbox.owners import Owner

if TYPE_CHECKING:
    from sandbox.call_store import CallStore


DEFAULT_KEEP_BYTES = 1024 * 1024 * 1024
_CLOSED = "the ledger is closed"


class State(StrEnum):
    RUNNING = "running"
    ANSWERED = "answered"
    LOST = "lost"


class LedgerUnavailable(Exception):
    """The ledger cannot be read or written. A call that is not written down is not run."""


@dataclass(frozen=True, slots=True)
class StaleScript:
    """A temporary script in a working directory of the host, to be removed if its executor can't."""

    root: str
    directory: str
    name: str


@dataclass(frozen=True, slots=True)
class Recording:
    """That a call is kept when it has ended, whether or not it has a key, and what is kept of it beside its answer.

    `details` is the kind's own: JSON. A `background` call's end is told to its owner once.
    """

    kind: str = "code_execution"
    background: bool = False
    details: str = "{}"
    script: StaleScript | None = None


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
    owner: Owner = field(default_factory=Owner)
    recording: Recording | None = None
    status: str | None = None
    cause: str | None = None


def request_digest(call: CodeCall) -> str:
    """What tells requests apart: all of a call but its idempotency key, however it was written."""
    fields = call.model_dump(mode="json", exclude={"idempotency_key"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Ledger:
    """One executor's view of the ledger. Made by `open`, given back by `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._store: CallStore | None = None
        self._closed = False

    @classmethod
    async def open(cls, directory: Path, *, keep_seconds: float | None, keep_bytes: int = DEFAULT_KEEP_BYTES) -> Self:
        """Open it, making what is missing. Raises `LedgerUnavailable`.

        `keep_bytes` bounds the answers: the oldest that have no key go first, and with nothing but keys no new one is
        taken. Tenants have equal shares of it.
        """
        self = cls()

        def work() -> CallStore:
            from sandbox.call_store import CallStore  # takes a quarter of a second, which the proxy's start takes too

            return CallStore(directory, keep_seconds, keep_bytes)

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

    async def retain(self, *, keep_seconds: float, keep_bytes: int, tenants: int) -> None:
        """How long and how much is kept from now on, and among how many tenants. Raises `LedgerUnavailable`."""
        await self._do(lambda: self._opened.retain(keep_seconds, keep_bytes, tenants))

    async def take_lost(self) -> list[Entry]:
        """The calls whose executor has gone, each told to one caller only. Raises `LedgerUnavailable`."""
        return await self._do(self._opened.take_lost)

    async def stale_scripts(self) -> dict[str, StaleScript]:
        """Scripts that lost calls may have left behind, by the calls' ids. Raises `LedgerUnavailable`."""
        return await self._do(self._opened.stale_scripts)

    async def forget_script(self, call_id: str) -> None:
        """The script of a lost call is gone. Raises `LedgerUnavailable`."""
        await self._do(lambda: self._opened.forget_script(call_id))

    async def check(self) -> None:
        """Raises `LedgerUnavailable` where its file is not, or not any more, where it is looked for."""
        await self._do(self._opened.check)

    async def trim(self) -> None:
        """Let go what has expired. Raises `LedgerUnavailable`."""
        await self._do(self._opened.trim)

    async def begin(
        self, call_id: str, call: CodeCall, owner: Owner | None = None, recording: Recording | None = None
    ) -> Entry | None:
        """Write down that a call starts; or the entry that has its owner's idempotency key.

        Raises `LedgerUnavailable`.
        """
        key, digest = call.idempotency_key, request_digest(call)
        return await self._do(lambda: self._opened.begin(call_id, key, digest, owner or Owner(), recording))

    async def end(self, call_id: str, answer: ToolResult, *, begun: bool) -> None:
        """Close a call. Its answer is kept if it is recorded, or has a key and its code may have begun.

        Where nothing has begun, its key is free again. Raises `LedgerUnavailable`.
        """
        packed = answer.model_dump_json().encode()
        await self._do(lambda: self._opened.end(call_id, packed, answer.status, answer.cause, begun=begun))

    async def lose(self, call_id: str, *, begun: bool) -> None:
        """Close a call that is still open: lost if it is recorded, or its code may have begun and it has a key; else
        forgotten.

        Raises `LedgerUnavailable`.
        """
        await self._do(lambda: self._opened.lose(call_id, begun=begun))

    async def detach(self, call_id: str) -> None:
        """A recorded call that runs is a background one from now on. Raises `LedgerUnavailable`."""
        await self._do(lambda: self._opened.detach(call_id))

    async def record(self, call_id: str, owner: Owner) -> Entry | None:
        """A recorded call of this owner's, by its id. Raises `LedgerUnavailable`."""
        return await self._do(lambda: self._opened.record(call_id, owner))

    async def records(
        self, owner: Owner, *, background: bool | None = None, limit: int = 50, before: float | None = None
    ) -> list[Entry]:
        """Recorded calls of this owner's, newest first, begun before the time `before`; without their answers' text.

        Raises `LedgerUnavailable`.
        """
        return await self._do(lambda: self._opened.records(owner, background, limit, before))

    async def take_ended(self, owner: Owner, limit: int = 20) -> list[Entry]:
        """This owner's background calls that have ended and were not taken before, oldest first.

        Raises `LedgerUnavailable`.
        """
        return await self._do(lambda: self._opened.take_ended(owner, limit))

    async def forget(self, key: str, owner: Owner | None = None) -> bool:
        """Drop what an owner's idempotency key keeps. False if nothing, or if its call runs. Raises as above."""
        return await self._do(lambda: self._opened.forget(key, owner or Owner()))

    async def entries(self) -> list[Entry]:
        """All that is in it, oldest first. Raises `LedgerUnavailable`."""
        return await self._do(self._opened.entries)

    async def close(self) -> None:
        """Give it back. What this executor has open, recorded or with a key, is lost, as far as anyone can tell."""
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(LedgerUnavailable):
                await self._do(store.close)
        self._closed = True
        self._thread.shutdown(wait=False)

    @property
    def _opened(self) -> CallStore:
        if self._store is None:
            raise LedgerUnavailable(_CLOSED)
        return self._store

    async def _do[T](self, work: Callable[[], T]) -> T:
        if self._closed:
            raise LedgerUnavailable(_CLOSED)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
