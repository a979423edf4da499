"""The executor: what answers calls under one policy, from its start to its end.

Owns: the processes and the ledger behind it, and which calls run. Must not: know how a call is answered; that is
`execute`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.admission import Admission
from sandbox.attempt import Sink
from sandbox.backend import Backend
from sandbox.call_log import report_lost
from sandbox.calls import RunningCall
from sandbox.contract import CodeCall, ToolResult
from sandbox.execute import Story
from sandbox.languages import Languages
from sandbox.ledger import Entry, Ledger
from sandbox.packages.supply import Supply
from sandbox.permits import Permits
from sandbox.policy_file import LoadedPolicy, load_policy
from sandbox.settings import Settings


class Executor:
    """Runs calls under one policy. Use it as an asynchronous context manager; calls may run concurrently.

    Raises `InvalidPolicy` when it is made from a file that is none.
    """

    def __init__(self, policy: Path | LoadedPolicy, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.policy = policy if isinstance(policy, LoadedPolicy) else load_policy(policy)
        self.audit_path = self.settings.audit_log or self.settings.state_dir / self.policy.policy.audit.path
        self.lost: list[Entry] = []
        self._languages = Languages(self.settings)
        self._backend = Backend(
            self.settings, audit_path=self.audit_path, upstream_ca_file=self.policy.policy.network.upstream.ca_file,
            readable=lambda: (*self._languages.readable(), *self._supply.readable()),
        )  # fmt: skip
        self._supply = Supply(self.policy, self.settings.state_dir, self._backend.ready)
        self._permits = Permits(self.policy, self._supply)
        self._admission = Admission(self.settings.max_concurrency, self.settings.max_waiting)
        self._story: Story | None = None
        self._running: dict[str, RunningCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Start the proxy and the launcher. `lost` has then the calls that an executor before this one left open.

        Raises `IsolationUnavailable`, `ProxyUnavailable`, `LedgerUnavailable`.
        """
        keep_seconds = self.policy.policy.calls.keep_hours * 3600
        opening = asyncio.create_task(Ledger.open(self.settings.state_dir / "calls", keep_seconds=keep_seconds))
        self._supply.open()
        try:
            await self._backend.ready()
            ledger = await opening
            self.lost = await ledger.take_lost()
            await report_lost(self.audit_path, self.lost)
        except BaseException:
            await asyncio.shield(self._end(opening))
            raise
        self._story = Story(
            policy=self.policy,
            audit_path=self.audit_path,
            permits=self._permits,
            ledger=ledger,
            admission=self._admission,
            supply=self._supply,
            backend=self._backend,
            languages=self._languages,
            running=self._running,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every call that still runs, and both processes."""
        story, self._story = self._story, None
        await asyncio.shield(self._end(None, story))

    async def _end(self, opening: asyncio.Task[Ledger] | None, story: Story | None = None) -> None:
        for running in list(self._running.values()):
            running.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._backend.close()
        if opening is not None:
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()
        if story is not None:
            await story.ledger.close()

    @property
    def launcher_pid(self) -> int | None:
        return self._backend.launcher_pid

    @property
    def proxy_pid(self) -> int | None:
        return self._backend.proxy_pid

    async def run(self, call: CodeCall, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None) -> ToolResult:
        """Answer one call. Whatever happens inside is in the result; the sinks see the output's bytes as they come.

        Raises only what is this side's fault and no attempt's: `InvalidPolicy` when the registries that the policy
        leaves to the language's client cannot be found out, `RuntimeError` outside the executor's `async with`. When
        the task that waits here is cancelled, so is the call, and nothing of it is left when this raises.
        """
        running = self.submit(call, stdout_sink, stderr_sink)
        try:
            return await running.result()
        except asyncio.CancelledError:
            running.cancel()
            await running.settled.wait()
            raise

    def submit(
        self, call: CodeCall, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> RunningCall:  # fmt: skip
        """Start a call and return its handle at once: its id, its answer, and the way to cancel it. Raises as `run`.

        `progress` is told in a few words what the preparation of the call's packages is at.
        """
        if self._story is None:
            raise RuntimeError("an `Executor` runs calls inside its `async with` statement only")
        running = RunningCall(f"call-{secrets.token_hex(8)}", stdout_sink, stderr_sink, progress)
        self._running[running.call_id] = running
        task = asyncio.create_task(self._see_through(self._story, call, running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    def cancel(self, call_id: str) -> bool:
        """End a call, at whatever stage it is. False if no such call runs."""
        running = self._running.get(call_id)
        if running is not None:
            running.cancel()
        return running is not None

    async def _see_through(self, story: Story, call: CodeCall, running: RunningCall) -> None:
        try:
            await story.tell(call, running)
        except asyncio.CancelledError:
            running.fail(RuntimeError("the event loop ended while the call ran"))
            raise
        except Exception as error:  # noqa: BLE001 - whoever waits for the answer is told
            running.fail(error)
        finally:
            del self._running[running.call_id]
            running.settled.set()
