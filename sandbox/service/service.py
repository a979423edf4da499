"""The service, whatever the transport: who may ask for what, which calls are whose, what is kept of them.

A call is admitted (within its tenant's bounds, and those of all), placed in its caller's directory if it is a code_exec
call, and begun. While it runs it is a `LiveCall` here; afterwards it is what the ledger has. Its owner is part of every
question: nobody else's calls are to be found.

Owns: the calls that run, and who sees what. Must not: know HTTP or MCP, or how a call is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from proxy.network import Mode
from sandbox.calls import RunningCall, Terms
from sandbox.code_exec import CodeExecCall, Note, WorkingDirReport
from sandbox.contract import Cause, CodeCall, ToolResult
from sandbox.executor import Executor
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import MIB
from sandbox.ledger import LedgerUnavailable, Recording, StaleScript, State
from sandbox.output import Stream
from sandbox.owners import Caller
from sandbox.policy.schema import Policy
from sandbox.policy_file import LoadedPolicy
from sandbox.service.explaining import explain_network
from sandbox.service.feed import Feed
from sandbox.service.guarded import places_of
from sandbox.service.live import LiveCall
from sandbox.service.model import (
    Busy,
    CallList,
    CallRecord,
    Draining,
    FeedEvent,
    Kind,
    NetworkExplanation,
    NotFound,
    OutputSlice,
    PlaceRefused,
    QueueIsFull,
    StreamName,
    Unavailable,
)
from sandbox.service.rates import Bounds
from sandbox.service.records import Details, note_of, record_of, summary_of
from sandbox.state import InvalidSettings
from sandbox.workdir import Placed, Quota, WorkingDirectories

MAX_LISTED = 200
MAX_OUTPUT_CHARS = 200_000
_SETTLE_SECONDS = 15.0
_BY_SERVICE = "the service was ended, and the call with it"
_CALL_ID = re.compile(r"call-[0-9a-f]{16}", re.ASCII)


class Observer(Protocol):
    """Who counts what becomes of calls. It must not block, or raise."""

    def ended(self, live: LiveCall, answer: ToolResult | None) -> None:
        """A call has its answer; None where it has none, by a fault of this side's."""

    def refused(self, tenant: str, code: str) -> None:
        """A call was not begun: `code` is a `ServiceError`'s."""


class Nobody:
    """An observer that looks away."""

    def ended(self, live: LiveCall, answer: ToolResult | None) -> None:
        pass

    def refused(self, tenant: str, code: str) -> None:
        pass


class Service:
    """Use it as an asynchronous context manager, inside that of its executor.

    `local_directory` is the client's own working directory where the operator started the service for one client
    alone. `protected` are files that no working directory may have in it.
    """

    def __init__(
        self, executor: Executor, *, local_directory: Path | None = None, protected: Sequence[Path] = (),
        observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self.executor = executor
        self.observer = observer or Nobody()
        self._directories = WorkingDirectories(
            executor.settings.state_dir, lambda: places_of(executor, [path.absolute() for path in protected])
        )
        self._local_directory = local_directory
        self._live: dict[str, LiveCall] = {}
        self._at_clients: dict[str, Placed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bounds: dict[str, Bounds] = {}
        self._bounds_of: LoadedPolicy | None = None
        self._draining = False

    async def __aenter__(self) -> Self:
        """Raises `InvalidSettings` for a local directory that no code may have."""
        if self._local_directory is not None:
            self._local_directory = self._directories.check_client_root(self._local_directory)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs."""
        self._draining = True
        for live in list(self._live.values()):
            live.cancel(_BY_SERVICE)
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def loaded(self) -> LoadedPolicy:
        """The policy in force."""
        return self.executor.policy

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def open_calls(self) -> tuple[int, int]:
        """How many wait for their turn, and how many are worked on."""
        waiting = sum(live.state == "waiting" for live in self._live.values())
        return waiting, len(self._live) - waiting

    async def reload(self, loaded: LoadedPolicy) -> None:
        """Put another policy in force. Raises `ReloadRefused`, and then nothing has changed.

        A call in a client's directory that has now something of the service's in it is ended.
        """
        await self.executor.reload(loaded)
        for call_id, placed in list(self._at_clients.items()):
            if not self._directories.allows(placed):
                self._live[call_id].cancel()

    async def drain(self, seconds: float) -> None:
        """Begin nothing more; give what runs so long to end, then end it."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
        for live in list(self._live.values()):
            live.cancel(_BY_SERVICE)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=_SETTLE_SECONDS)

    # --- beginning

    async def submit_call(self, caller: Caller, call: CodeCall, *, background: bool = False) -> LiveCall:
        """Begin a Code Execution call; once this returns, it is not lost without a word if it was detached.

        Raises `Busy`, `QueueIsFull`, `Draining`, `UnknownTenant`, and then nothing was begun.
        """
        with contextlib.ExitStack() as held:
            self._admit(caller.tenant, held)
            live = self._begin(caller, call, Recording("code_execution", background), Details(), None, held)
        return await self._noted(live)

    async def submit_code_exec(self, caller: Caller, call: CodeExecCall) -> LiveCall:
        """Begin a code_exec call, as `submit_call`.

        Raises also `InvalidCall` for a `working_dir` that is none, `PlaceRefused`, `Unavailable`.
        """
        policy = self.executor.policy_of(caller.tenant).policy
        seconds = min(call.timeout, policy.limits.timeout_seconds.max)
        asked = _code_call(call.code, seconds, policy)
        with contextlib.ExitStack() as held:
            self._admit(caller.tenant, held)
            placed, report = await self._placed(caller, call.working_dir, policy)
            held.callback(placed.close)
            where = placed.workdir
            script = StaleScript(str(where.root), where.directory, where.script)
            details = Details(timeout_seconds=seconds, working_dir=report)
            recording = Recording("code_exec", call.background, details.model_dump_json(), script)
            live = self._begin(caller, asked, recording, details, placed, held)
        return await self._noted(live)

    def _begin(
        self, caller: Caller, call: CodeCall, recording: Recording, details: Details, placed: Placed | None,
        held: contextlib.ExitStack,
    ) -> LiveCall:  # fmt: skip
        """Begin it. What is `held` for it is then given back at its end, and until then by whoever holds it."""
        feed = Feed()
        self._require_not_draining()  # it may have begun to while the call's place was looked up
        running = self.executor.submit(
            call,
            lambda data: feed.write("stdout", data),
            lambda data: feed.write("stderr", data),
            lambda text: live.tell_progress(text),  # noqa: PLW0108 - `live` is made below
            Terms(caller.owner, recording, placed),
        )
        kind: Kind = "code_exec" if recording.kind == "code_exec" else "code_execution"
        live = LiveCall(
            running, caller, kind, background=recording.background, details=details, feed=feed,
            position=self.executor.position, notes=self.take_notes,
        )  # fmt: skip
        self._live[running.call_id] = live
        if placed is not None and placed.workdir.client:
            self._at_clients[running.call_id] = placed
            held.callback(self._at_clients.pop, running.call_id)
        task = asyncio.create_task(self._see_off(live, running, held.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return live

    async def _noted(self, live: LiveCall) -> LiveCall:
        """The call, once it is not lost without a word any more; for one with an earlier one's key, that one."""
        if not live.background:
            return live
        own = live.call_id
        await live.noted()
        if live.call_id == own:
            return live
        if (first := self._found(live.caller, live.call_id)) is None:
            await live.settle(_SETTLE_SECONDS)  # what that was answered is known
            return live
        first.background = True  # from now on it is a task, whoever else waits for it
        with contextlib.suppress(LedgerUnavailable):
            await self.executor.ledger.detach(first.call_id)
        return first

    async def _see_off(self, live: LiveCall, running: RunningCall, held: contextlib.ExitStack) -> None:
        """Wait for the end of a call, and give back what it had."""
        await running.settled.wait()
        answer: ToolResult | None = None
        try:
            with contextlib.suppress(Exception):  # whoever waits for the answer is told
                answer = await running.result()
        finally:
            held.close()
            del self._live[running.call_id]
            live.feed.end(_last_event(answer, "lost" if answer is None else "finished"))
            live.ended.set()
            self.observer.ended(live, answer)

    # --- bounds

    def _bounds_in_force(self) -> dict[str, Bounds]:
        """Those of the policy in force, from the moment that it is."""
        if self._bounds_of is not self.loaded:
            before, self._bounds_of = self._bounds, self.loaded
            self._bounds = {"": Bounds(None)} | {tenant.name: Bounds(tenant) for tenant in self.loaded.policy.tenants}
            for name, bounds in before.items():
                # A tenant that is gone may have calls open, which end.
                self._bounds.setdefault(name, Bounds(None)).take_over(bounds)
        return self._bounds

    def _admit(self, tenant: str, held: contextlib.ExitStack) -> None:
        """Count one more call of a tenant's, for as long as it is `held`.

        Raises `Busy`, `QueueIsFull`, `Draining`, `UnknownTenant`.
        """
        self.executor.policy_of(tenant)
        settings, admission = self.executor.settings, self.executor.admission
        try:
            self._require_not_draining()
            bounds = self._bounds_in_force()
            opened = sum(one.open for one in bounds.values())
            left = settings.max_concurrency + settings.max_waiting - opened
            if left <= 0:
                raise QueueIsFull(
                    f"{opened} calls are open, and no more may be",
                    retry_after_seconds=admission.retry_after_seconds,
                )
            if tenant and bounds[tenant].open >= left:  # so that a place is left for each of the others, however many
                raise Busy(
                    "busy",
                    f"tenant `{tenant}` has {bounds[tenant].open} calls open, and {left} more may be, of all tenants",
                    admission.retry_after_seconds,
                )
            bounds[tenant].admit()
            held.callback(self._release, tenant)
        except (Draining, QueueIsFull, Busy) as error:
            self.observer.refused(tenant, error.code)
            raise

    def _require_not_draining(self) -> None:
        if self._draining:
            raise Draining("the service is about to end, and begins nothing more", retry_after_seconds=1.0)

    def _release(self, tenant: str) -> None:
        self._bounds[tenant].release()

    # --- places

    async def _placed(
        self, caller: Caller, working_dir: str | None, policy: Policy
    ) -> tuple[Placed, WorkingDirReport]:  # fmt: skip
        """Where a call runs. Raises `InvalidCall`, `PlaceRefused`, `Unavailable`."""
        placing = asyncio.ensure_future(asyncio.to_thread(self._place, caller, working_dir, policy))
        try:
            placed, report = await asyncio.shield(placing)
            try:
                await placed.require_room()
            except BaseException:
                placed.close()
                raise
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # nobody waits for it any more
                (await placing)[0].close()
            raise
        except InvalidSettings as error:
            raise PlaceRefused(str(error)) from error
        except (OSError, IsolationUnavailable) as error:
            raise Unavailable(f"the directory cannot be had: {error}", "directory_unavailable") from error
        if placed.full is not None:
            report = report.model_copy(update={"reason": "; ".join(filter(None, (report.reason, placed.full)))})
        return placed, report

    def _place(self, caller: Caller, working_dir: str | None, policy: Policy) -> tuple[Placed, WorkingDirReport]:
        limits = policy.code_exec.user_data
        placed, note = self._at_client(caller, working_dir, policy)
        if placed is None:
            root = self._directories.user_root(caller.owner)
            quota = Quota(limits.max_mib * MIB, limits.max_files)
            placed = self._directories.place(root, working_dir, quota=quota, client=False)
        reasons = [reason for reason in (note, placed.reason) if reason is not None]
        report = WorkingDirReport(
            requested=working_dir, used=placed.used, replaced=bool(reasons), reason="; ".join(reasons) or None
        )
        return placed, report

    def _at_client(
        self, caller: Caller, working_dir: str | None, policy: Policy
    ) -> tuple[Placed | None, str | None]:  # fmt: skip
        """A place in the client's own directory, if the caller works there; and why not, where it asked to."""
        if caller.admin and self._local_directory is not None:
            return self._directories.place(self._local_directory, working_dir, quota=None, client=True), None
        if caller.directory is None:
            return None, None
        if not caller.admin:
            return None, "only an admin works in the client's directory"
        allowed = [Path(path) for path in policy.code_exec.working_directories]
        placed = self._directories.place_below(allowed, caller.directory, working_dir)
        if placed is not None:
            return placed, None
        return None, f"`{caller.directory}` is not below one of the policy's `code_exec.working_directories`"

    # --- what is known of calls

    async def record(self, caller: Caller, call_id: str) -> CallRecord:
        """What is known of a call of this caller's. Raises `NotFound`, `Unavailable`."""
        live = self._found(caller, call_id)
        if live is not None and live.answer is None:
            return live.record()
        entry = None
        if _CALL_ID.fullmatch(call_id):
            with _explained():
                entry = await self.executor.ledger.record(call_id, caller.owner)
        if live is not None and (entry is None or entry.state is State.RUNNING):
            return live.record()  # its deadline's answer has been given, and it is still being cleaned up
        if entry is None:
            raise NotFound(f"there is no call {call_id[:64]!a}, or not any more")
        return record_of(entry, self._keep_seconds)

    async def calls(
        self, caller: Caller, *, background: bool | None = None, limit: int = 50, before: float | None = None
    ) -> CallList:
        """This caller's calls, newest first. Raises `Unavailable`."""
        limit = max(1, min(limit, MAX_LISTED))
        with _explained():
            entries = await self.executor.ledger.records(
                caller.owner, background=background, limit=limit + 1, before=before
            )
        listed = [summary_of(entry) for entry in entries[:limit]]
        for place, summary in enumerate(listed):
            live = self._found(caller, summary.call_id)
            if live is not None and summary.state == "running":
                listed[place] = summary.model_copy(update={"state": live.state})
        return CallList(calls=listed, next_before=listed[-1].submitted_at if len(entries) > limit else None)

    async def output(
        self, caller: Caller, call_id: str, stream: StreamName, offset: int = 0, limit: int = 30_000
    ) -> OutputSlice:
        """A part of what a call's program wrote, also while it runs. Raises `NotFound`, `Unavailable`."""
        live = self._found(caller, call_id)
        if live is not None:
            written: Stream = getattr(live.output_so_far(), stream)
            text, total, state = written.text, written.chars, live.state
        else:
            record = await self.record(caller, call_id)
            state = record.state
            text = "" if record.result is None else getattr(record.result, stream)
            total = len(text) if record.result is None else getattr(record.result.output_chars, stream)
        offset = max(offset, 0)
        part = text[offset : offset + max(1, min(limit, MAX_OUTPUT_CHARS))]
        end = offset + len(part)
        return OutputSlice(
            call_id=call_id, stream=stream, offset=offset, text=part, next_offset=end if end < len(text) else None,
            kept_chars=len(text), total_chars=total, state=state,
        )  # fmt: skip

    async def wait(self, caller: Caller, call_id: str, seconds: float) -> CallRecord:
        """What is known of a call once it has ended, or after so long. Raises `NotFound`, `Unavailable`."""
        if (live := self._found(caller, call_id)) is not None:
            await live.settle(seconds)
        return await self.record(caller, call_id)

    async def cancel(self, caller: Caller, call_id: str) -> CallRecord:
        """End a call, and tell what became of it; one that has ended stays as it is.

        Raises `NotFound`, `Unavailable`.
        """
        if (live := self._found(caller, call_id)) is not None:
            live.cancel()
            await live.settle(_SETTLE_SECONDS)
        return await self.record(caller, call_id)

    async def events(self, caller: Caller, call_id: str, after: int = 0) -> AsyncIterator[FeedEvent]:
        """The life of a call as it happens; of one that has ended, its result alone.

        Raises `NotFound`, `Unavailable` before the first event.
        """
        live = self._found(caller, call_id)
        if live is None:
            record = await self.record(caller, call_id)
            yield FeedEvent(id=after + 1, kind="result", data=_last_event(record.result, record.state))
            return
        async for event in live.feed.follow(after):
            yield event

    async def take_notes(self, caller: Caller) -> list[Note]:
        """This caller's detached calls that have ended, each told once. None, where they cannot be looked up."""
        try:
            return [note_of(entry) for entry in await self.executor.ledger.take_ended(caller.owner)]
        except LedgerUnavailable:
            return []

    async def explain(
        self, caller: Caller, target: str, *, language: str = "python", allow_network: bool = False,
        domains: Sequence[str] | None = None, method: str = "GET",
    ) -> NetworkExplanation:  # fmt: skip
        """What would become of a request. Raises `InvalidCall`, `UnknownTenant`, `InvalidPolicy`."""
        return await explain_network(
            self.executor, caller.tenant, target, language=language, allow_network=allow_network, domains=domains,
            method=method,
        )  # fmt: skip

    @property
    def _keep_seconds(self) -> float:
        return self.loaded.policy.calls.keep_hours * 3600

    def _found(self, caller: Caller, call_id: str) -> LiveCall | None:
        live = self._live.get(call_id)
        return live if live is not None and live.caller.owner == caller.owner else None


def _fit(text: str) -> str:
    """A text that may have a name of the file system in it, whose bytes need not be a text's."""
    return text.encode(errors="backslashreplace").decode()


def _last_event(answer: ToolResult | None, state: str) -> dict[str, Any]:
    if answer is None:
        return {"state": state}
    cancelled = answer.cause is Cause.CANCELLED
    return {"state": "cancelled" if cancelled else state, "result": answer.model_dump(mode="json")}


def _code_call(code: str, seconds: float, policy: Policy) -> CodeCall:
    """A code_exec call as a Code Execution call, with the network and packages that the policy gives all of them."""
    section = policy.code_exec
    domains = {Mode.NAMED: [str(name) for name in section.domains], Mode.UNRESTRICTED: []}.get(section.network)
    return CodeCall(
        language="python", code=code, timeout=seconds, packages=list(section.packages),
        allow_network=section.network is not Mode.BLOCK_ALL, domains=domains,
    )  # fmt: skip


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except LedgerUnavailable as error:
        raise Unavailable(str(error)) from error
