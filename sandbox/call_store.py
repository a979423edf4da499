"""The calls of the ledger in SQLite, and the locks by which living executors are known.

Owns: `calls.sqlite` and `executors/` below one directory (0700). Must not: be used by more than one thread.
A line survives the death of every process, but the last ones not that of the machine (`synchronous=NORMAL`).
Every method raises `LedgerUnavailable` when the files cannot be used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from proxy.directories import make_private
from sandbox.contract import ToolResult
from sandbox.ledger import Entry, LedgerUnavailable, Recording, StaleScript, State
from sandbox.owners import Owner

_FILE = "calls.sqlite"
_LOCKS = "executors"
_BUSY_SECONDS = 2.0
_SCHEMA_VERSION = 2
_ENDS_BETWEEN_TRIMS = 64

_metadata = MetaData()
_calls = Table(
    "calls",
    _metadata,
    Column("call_id", String, primary_key=True),
    Column("executor", String, nullable=False, index=True),
    Column("tenant", String, nullable=False, server_default=""),
    Column("user", String, nullable=False, server_default=""),
    Column("idempotency_key", String),
    Column("request", String, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("result", LargeBinary),
    Column("result_bytes", Integer, nullable=False, server_default="0"),
    Column("status", String),
    Column("cause", String),
    Column("recorded", Boolean, nullable=False, server_default="0"),
    Column("kind", String, nullable=False, server_default="code_execution"),
    Column("background", Boolean, nullable=False, server_default="0"),
    Column("told", Boolean, nullable=False, server_default="0"),
    Column("details", String, nullable=False, server_default="{}"),
    Column("script", String),
    UniqueConstraint("tenant", "user", "idempotency_key"),
    Index("owners", "tenant", "user", "started_at"),
)
# Of version 1: what it had, in the order in which it is copied. Its indexes' names are needed again.
_VERSION_1 = ("call_id", "executor", "idempotency_key", "request", "state", "started_at", "ended_at", "result")
_INDEXES_1 = ("ix_calls_executor", "ix_calls_state")
_WITHOUT_RESULT = [column for column in _calls.c if column.name != "result"]


class CallStore:
    """One executor's access. A call has the state `running` until it is ended; `keep_seconds` after that it goes.

    With None this view lets nothing go. `keep_bytes` is of the answers, as they are stored.
    """

    def __init__(self, directory: Path, keep_seconds: float | None, keep_bytes: int) -> None:
        self._directory = directory
        self._keep_seconds = keep_seconds
        self._keep_bytes = keep_bytes
        self._tenants = 1
        self._ends = 0
        self._kept_under_keys: dict[str, int] = {}
        self._unclosed: dict[str, bool] = {}
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
            with self._explained():
                self._file = os.stat(path)
        except LedgerUnavailable:
            self._engine.dispose()
            self._unlock()
            raise

    def _prepare(self) -> None:
        with self._begun() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if version not in (0, 1, _SCHEMA_VERSION):
                raise ValueError(f"it is of version {version}, and this program knows version {_SCHEMA_VERSION}")
            if version == 1:
                _set_aside_version_1(connection)
            _metadata.create_all(connection)
            if version == 1:
                _take_version_1(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            self._trim(connection)

    def retain(self, keep_seconds: float, keep_bytes: int, tenants: int) -> None:
        """What is kept from now on."""
        before = self._keep_seconds, self._keep_bytes, self._tenants
        self._keep_seconds, self._keep_bytes, self._tenants = keep_seconds, keep_bytes, max(tenants, 1)
        try:
            with self._begun() as connection:
                self._trim(connection)
        except LedgerUnavailable:
            self._keep_seconds, self._keep_bytes, self._tenants = before
            raise

    @contextlib.contextmanager
    def _begun(self) -> Iterator[Connection]:
        """A transaction that nobody else's comes between. It closes first what could not be closed before."""
        with self._explained(), self._engine.begin() as connection:
            for call_id, begun in self._unclosed.items():
                self._lose(connection, _calls.c.call_id == call_id, begun=begun)
            yield connection
        self._unclosed.clear()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, OSError, zlib.error, ValueError) as error:
            why = getattr(error, "orig", None) or error
            raise LedgerUnavailable(f"the ledger in `{self._directory}` cannot be used: {why}") from error

    def check(self) -> None:
        """Whether what is written still comes to where the next executor looks: the file may have been taken away."""
        with self._explained():
            if not os.path.samestat(self._file, os.stat(self._directory / _FILE)):
                raise FileNotFoundError(f"another `{_FILE}` is there than the one in use")

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

    def stale_scripts(self) -> dict[str, StaleScript]:
        """Scripts of lost calls, by the calls' ids."""
        which = (_calls.c.state == State.LOST) & _calls.c.script.is_not(None)
        with self._begun() as connection:
            rows = connection.execute(select(_calls.c.call_id, _calls.c.script).where(which)).all()
        return {row.call_id: StaleScript(**json.loads(row.script)) for row in rows}

    def forget_script(self, call_id: str) -> None:
        with self._begun() as connection:
            connection.execute(update(_calls).where(_calls.c.call_id == call_id).values(script=None))

    def trim(self) -> None:
        """Let go what has expired, and what is beyond a tenant's share."""
        with self._begun() as connection:
            self._trim(connection)

    def begin(
        self, call_id: str, key: str | None, digest: str, owner: Owner, recording: Recording | None
    ) -> Entry | None:
        """Write down a call that runs, unless another of its owner's has its key: then that one."""
        with self._begun() as connection:
            if key is not None:
                self._forget_expired(connection)
                with_key = _of(owner) & (_calls.c.idempotency_key == key)
                row = connection.execute(select(_calls).where(with_key)).one_or_none()
                if row is not None and row.state == State.RUNNING and self._is_gone(row.executor):
                    gone = update(_calls).where(_calls.c.call_id == row.call_id)
                    connection.execute(gone.values(state=State.LOST, ended_at=time.time()))
                    row = connection.execute(select(_calls).where(_calls.c.call_id == row.call_id)).one()
                if row is not None:
                    return _entry(row)
                if self._kept_under_keys.get(owner.tenant, 0) > self._share:
                    raise ValueError(
                        f"the answers that it keeps under idempotency keys have {self._share // 2**20} MiB"
                    )
            values = {
                "call_id": call_id, "executor": self.executor, "idempotency_key": key, "request": digest,
                "state": State.RUNNING, "started_at": time.time(), "tenant": owner.tenant, "user": owner.user,
            }  # fmt: skip
            if recording is not None:
                script = None if recording.script is None else json.dumps(asdict(recording.script))
                values |= {
                    "recorded": True, "kind": recording.kind, "background": recording.background,
                    "details": recording.details, "script": script,
                }  # fmt: skip
            connection.execute(insert(_calls).values(values))
        return None

    def end(self, call_id: str, answer: bytes, status: str, cause: str, *, begun: bool) -> None:
        """Close a call. Its answer (JSON) is kept if it is recorded, or has a key and may have begun; else nothing is.

        The key of one that can't have begun is free again.
        """
        with self._begun() as connection:
            this = _calls.c.call_id == call_id
            columns = select(_calls.c.idempotency_key, _calls.c.recorded).where(this)
            row = connection.execute(columns).one_or_none()
            if row is None or not (row.recorded or (begun and row.idempotency_key is not None)):
                connection.execute(delete(_calls).where(this))
                return
            packed = zlib.compress(answer, 1)
            values = {
                "state": State.ANSWERED, "status": status, "cause": cause, "ended_at": time.time(), "result": packed,
                "result_bytes": len(packed), "idempotency_key": row.idempotency_key if begun else None, "script": None,
            }  # fmt: skip
            connection.execute(update(_calls).where(this).values(values))
            self._ends += 1
            if self._ends % _ENDS_BETWEEN_TRIMS == 0:
                self._trim(connection)

    def lose(self, call_id: str, *, begun: bool) -> None:
        """Close a call that is open: of one whose code may have begun, nobody knows how far it came."""
        try:
            with self._begun() as connection:
                self._lose(connection, _calls.c.call_id == call_id, begun=begun)
        except LedgerUnavailable:
            self._unclosed[call_id] = begun
            raise

    def detach(self, call_id: str) -> None:
        """From now on it is a background call, if it is recorded."""
        with self._begun() as connection:
            this = (_calls.c.call_id == call_id) & _calls.c.recorded
            connection.execute(update(_calls).where(this).values(background=True))

    def record(self, call_id: str, owner: Owner) -> Entry | None:
        """A recorded call, if it is this owner's."""
        which = self._seen_by(owner) & (_calls.c.call_id == call_id)
        with self._begun() as connection:
            row = connection.execute(select(_calls).where(which)).one_or_none()
        return None if row is None else self._as_it_is(_entry(row))

    def records(self, owner: Owner, background: bool | None, limit: int, before: float | None) -> list[Entry]:
        """Recorded calls, newest first, without their answers."""
        which = self._seen_by(owner)
        if background is not None:
            which &= _calls.c.background == background
        if before is not None:
            which &= _calls.c.started_at < before
        query = select(*_WITHOUT_RESULT).where(which).order_by(_calls.c.started_at.desc()).limit(limit)
        with self._begun() as connection:
            return [self._as_it_is(_entry(row)) for row in connection.execute(query)]

    def take_ended(self, owner: Owner, limit: int) -> list[Entry]:
        """Background calls that have ended, each once, oldest first."""
        which = self._seen_by(owner) & _calls.c.background & ~_calls.c.told & (_calls.c.state != State.RUNNING)
        with self._begun() as connection:
            rows = connection.execute(select(_calls).where(which).order_by(_calls.c.ended_at).limit(limit)).all()
            taken = update(_calls).where(_calls.c.call_id.in_([row.call_id for row in rows]))
            if rows:
                connection.execute(taken.values(told=True))
        return [_entry(row) for row in rows]

    def _seen_by(self, owner: Owner) -> ColumnElement[bool]:
        """What is recorded for an owner, and has not expired, though it may still be there."""
        recorded = _of(owner) & _calls.c.recorded
        if self._keep_seconds is None:
            return recorded
        return recorded & (_calls.c.ended_at.is_(None) | (_calls.c.ended_at >= time.time() - self._keep_seconds))

    def forget(self, key: str, owner: Owner) -> bool:
        """Drop the call with this key, unless it runs."""
        with self._begun() as connection:
            ended = _of(owner) & (_calls.c.idempotency_key == key) & (_calls.c.state != State.RUNNING)
            return connection.execute(delete(_calls).where(ended)).rowcount > 0

    def entries(self) -> list[Entry]:
        """All calls, oldest first. One that runs and whose executor has gone is told as lost, and stays as it is."""
        with self._begun() as connection:
            found = [_entry(row) for row in connection.execute(select(_calls).order_by(_calls.c.started_at))]
        return [self._as_it_is(entry) for entry in found]

    def _as_it_is(self, entry: Entry) -> Entry:
        if entry.state is State.RUNNING and self._is_gone(entry.executor):
            return replace(entry, state=State.LOST)
        return entry

    def close(self) -> None:
        """Give it back. What runs is forgotten, or lost if it is recorded or has a key."""
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
        unkept = ~_calls.c.recorded & (_calls.c.idempotency_key.is_(None) | (not begun))
        connection.execute(delete(_calls).where(open_, unkept))
        values: dict[str, Any] = {"state": State.LOST, "ended_at": time.time()}
        if not begun:
            values["idempotency_key"] = None
        connection.execute(update(_calls).where(open_).values(values))

    @property
    def _share(self) -> int:
        """Bytes of answers that one tenant may have here."""
        return self._keep_bytes // self._tenants

    def _trim(self, connection: Connection) -> None:
        """Let go what has expired, and of each tenant's answers the oldest without a key that are beyond its share."""
        self._forget_expired(connection)
        if self._keep_seconds is None:
            return
        size = func.sum(_calls.c.result_bytes)
        keyed = select(_calls.c.tenant, size).where(_calls.c.idempotency_key.is_not(None)).group_by(_calls.c.tenant)
        self._kept_under_keys = {row.tenant: row[1] for row in connection.execute(keyed)}
        for tenant, total in connection.execute(select(_calls.c.tenant, size).group_by(_calls.c.tenant)).all():
            excess = total - self._share
            ended = (_calls.c.tenant == tenant) & _calls.c.idempotency_key.is_(None) & (_calls.c.state != State.RUNNING)
            oldest = select(_calls.c.call_id, _calls.c.result_bytes).where(ended).order_by(_calls.c.ended_at)
            for row in connection.execute(oldest).all() if excess > 0 else ():
                if excess <= 0:
                    break
                connection.execute(delete(_calls).where(_calls.c.call_id == row.call_id))
                excess -= row.result_bytes

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


def _of(owner: Owner) -> ColumnElement[bool]:
    return (_calls.c.tenant == owner.tenant) & (_calls.c.user == owner.user)


def _set_aside_version_1(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE calls RENAME TO calls_1")
    for name in _INDEXES_1:
        connection.exec_driver_sql(f"DROP INDEX IF EXISTS {name}")


def _take_version_1(connection: Connection) -> None:
    columns = ", ".join(_VERSION_1)
    connection.exec_driver_sql(
        f"INSERT INTO calls ({columns}, result_bytes) "  # noqa: S608 - names of our own
        f"SELECT {columns}, coalesce(length(result), 0) FROM calls_1"
    )
    connection.exec_driver_sql("DROP TABLE calls_1")


def _entry(row: Any) -> Entry:
    """One row. An answer that cannot be read any more is none: nobody can say what the call came to."""
    result, packed = None, getattr(row, "result", None)
    if packed is not None:
        with contextlib.suppress(ValueError, zlib.error):
            result = ToolResult.model_validate_json(zlib.decompress(packed))
    script = None if row.script is None else StaleScript(**json.loads(row.script))
    recording = Recording(row.kind, row.background, row.details, script) if row.recorded else None
    return Entry(
        row.call_id, row.executor, row.idempotency_key, row.request, State(row.state), row.started_at, row.ended_at,
        result, Owner(row.tenant, row.user), recording, row.status, row.cause,
    )  # fmt: skip
