"""The calls of the ledger in SQLite, and the locks by which living executors are known.

Owns: `calls.sqlite` and `executors/` below one directory (0700). Must not: be used by more than one thread.
A line survives the death of every process, but the last ones not that of the machine (`synchronous=NORMAL`).
Every method raises `LedgerUnavailable` when the files cannot be used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from proxy.directories import make_private
from sandbox.contract import ToolResult
from sandbox.ledger import Entry, LedgerUnavailable, State

_FILE = "calls.sqlite"
_LOCKS = "executors"
_MAX_BYTES = 1024 * 1024 * 1024
_BUSY_SECONDS = 2.0
_SCHEMA_VERSION = 1

_metadata = MetaData()
_calls = Table(
    "calls",
    _metadata,
    Column("call_id", String, primary_key=True),
    Column("executor", String, nullable=False, index=True),
    Column("idempotency_key", String, unique=True),
    Column("request", String, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("result", LargeBinary),
)


class CallStore:
    """One executor's access. A call has the state `running` until it is ended; `keep_seconds` after that it goes.

    With None this view lets nothing go.
    """

    def __init__(self, directory: Path, keep_seconds: float | None) -> None:
        self._directory = directory
        self._keep_seconds = keep_seconds
        self.executor = secrets.token_hex(8)
        with self._explained():
            make_private(directory / _LOCKS)
            _check_private(directory)
            self._lock = _locked(self._lock_path(self.executor))
            path = directory / _FILE
            # SQLite would use the umask. Only where it is missing: to close any descriptor of a database drops every
            # lock that this process has on it, also those of another executor in it.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._engine = _engine(path)
        try:
            self._prepare()
        except LedgerUnavailable:
            self._engine.dispose()
            self._unlock()
            raise

    def _prepare(self) -> None:
        with self._begun() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if version not in (0, _SCHEMA_VERSION):
                raise ValueError(f"it is of version {version}, and this program knows version {_SCHEMA_VERSION}")
            _metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            self._forget_expired(connection)

    @contextlib.contextmanager
    def _begun(self) -> Iterator[Connection]:
        """A transaction that nobody else's comes between."""
        with self._explained(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, OSError, zlib.error, ValueError) as error:
            why = getattr(error, "orig", None) or error
            raise LedgerUnavailable(f"the ledger in `{self._directory}` cannot be used: {why}") from error

    def take_lost(self) -> list[Entry]:
        """Calls that run and whose executor has gone. They are lost from now on, and not told again."""
        with self._begun() as connection:
            running = connection.execute(select(_calls).where(_calls.c.state == State.RUNNING)).all()
            gone = {row.executor for row in running if row.executor != self.executor and self._is_gone(row.executor)}
            lost = [_entry(row) for row in running if row.executor in gone]
            connection.execute(
                update(_calls)
                .where(_calls.c.call_id.in_([entry.call_id for entry in lost]))
                .values(state=State.LOST, ended_at=time.time())
            )
        for lock in (self._directory / _LOCKS).glob("*.lock"):
            self._is_gone(lock.stem)  # removes what is left of those that had no call open
        return lost

    def begin(self, call_id: str, key: str | None, digest: str) -> Entry | None:
        """Write down a call that runs, unless another has its key: then that one."""
        with self._begun() as connection:
            if key is not None:
                self._forget_expired(connection)
                row = connection.execute(select(_calls).where(_calls.c.idempotency_key == key)).one_or_none()
                if row is not None and row.state == State.RUNNING and self._is_gone(row.executor):
                    gone = update(_calls).where(_calls.c.call_id == row.call_id)
                    connection.execute(gone.values(state=State.LOST, ended_at=time.time()))
                    row = connection.execute(select(_calls).where(_calls.c.call_id == row.call_id)).one()
                if row is not None:
                    return _entry(row)
                if _size(connection) > _MAX_BYTES:
                    raise ValueError(f"the answers that it keeps have {_MAX_BYTES // 2**20} MiB")
            connection.execute(
                insert(_calls).values(
                    call_id=call_id, executor=self.executor, idempotency_key=key, request=digest,
                    state=State.RUNNING, started_at=time.time(),
                )
            )  # fmt: skip
        return None

    def end(self, call_id: str, answer: bytes | None) -> None:
        """Close a call. With an answer (JSON) it is kept under the call's key; else nothing of it is."""
        with self._begun() as connection:
            this = _calls.c.call_id == call_id
            key = connection.execute(select(_calls.c.idempotency_key).where(this)).scalar_one_or_none()
            if answer is None or key is None:
                connection.execute(delete(_calls).where(this))
                return
            packed = zlib.compress(answer, 1)
            values = {"state": State.ANSWERED, "ended_at": time.time(), "result": packed}
            connection.execute(update(_calls).where(this).values(values))

    def lose(self, call_id: str, *, begun: bool) -> None:
        """Close a call that is open: of one whose code may have begun, nobody knows how far it came."""
        with self._begun() as connection:
            self._lose(connection, _calls.c.call_id == call_id, begun=begun)

    def forget(self, key: str) -> bool:
        """Drop the call with this key, unless it runs."""
        with self._begun() as connection:
            ended = delete(_calls).where(_calls.c.idempotency_key == key, _calls.c.state != State.RUNNING)
            return connection.execute(ended).rowcount > 0

    def entries(self) -> list[Entry]:
        """All calls, oldest first. One that runs and whose executor has gone is told as lost, and stays as it is."""
        with self._begun() as connection:
            found = [_entry(row) for row in connection.execute(select(_calls).order_by(_calls.c.started_at))]
        running = {entry.executor for entry in found if entry.state is State.RUNNING}
        gone = {executor for executor in running if self._is_gone(executor)}
        return [
            replace(entry, state=State.LOST) if entry.state is State.RUNNING and entry.executor in gone else entry
            for entry in found
        ]

    def close(self) -> None:
        """Give it back. What runs is forgotten, or lost if it has a key."""
        try:
            with self._begun() as connection:
                self._lose(connection, _calls.c.executor == self.executor, begun=True)
        finally:
            self._engine.dispose()
            self._unlock()

    def _unlock(self) -> None:
        self._lock_path(self.executor).unlink(missing_ok=True)
        os.close(self._lock)

    def _lose(self, connection: Connection, which: ColumnElement[bool], *, begun: bool) -> None:
        open_ = which & (_calls.c.state == State.RUNNING)
        connection.execute(delete(_calls).where(open_, _calls.c.idempotency_key.is_(None) | (not begun)))
        connection.execute(update(_calls).where(open_).values(state=State.LOST, ended_at=time.time()))

    def _forget_expired(self, connection: Connection) -> None:
        if self._keep_seconds is None:
            return
        before = time.time() - self._keep_seconds
        connection.execute(delete(_calls).where(_calls.c.state != State.RUNNING, _calls.c.ended_at < before))

    def _lock_path(self, executor: str) -> Path:
        return self._directory / _LOCKS / f"{executor}.lock"

    def _is_gone(self, executor: str) -> bool:
        """Whether nobody holds an executor's lock. Its file goes with it; ids are never used again."""
        if executor == self.executor:
            return False
        path = self._lock_path(executor)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)


def _check_private(directory: Path) -> None:
    """Whoever else could write there could plant answers."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ValueError("it is not a directory of this user's alone; hint: remove it, or `chmod 700` it")


def _locked(path: Path) -> int:
    """A lock file, made and held. Whoever looks for the dead may have removed it before it was locked."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)


def _engine(path: Path) -> Engine:
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": _BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # this module begins its transactions itself
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _size(connection: Connection) -> int:
    """Bytes in use in the file."""
    pages, free, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _entry(row: Any) -> Entry:
    """One row. An answer that cannot be read any more is none: nobody can say what the call came to."""
    result = None
    if row.result is not None:
        with contextlib.suppress(ValueError, zlib.error):
            result = ToolResult.model_validate_json(zlib.decompress(row.result))
    return Entry(
        row.call_id, row.executor, row.idempotency_key, row.request, State(row.state), row.started_at, row.ended_at,
        result,
    )  # fmt: skip
