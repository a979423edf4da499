"""The executor: what answers calls under one policy, from its start to its end.

Owns: the processes and the ledger behind it, and which calls run. Must not: know how a call is answered; that is
`execute`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from proxy.control import Proxy
from proxy.network import Grant
from sandbox.admission import Admission
from sandbox.answers import Answers
from sandbox.attempt import Sink
from sandbox.backend import Backend
from sandbox.call_log import report_lost, report_policy
from sandbox.calls import RunningCall, Terms
from sandbox.contract import CodeCall, ToolResult
from sandbox.execute import Story
from sandbox.isolation.plan import MIB
from sandbox.isolation.pool import WarmPool
from sandbox.languages import Languages
from sandbox.ledger import Entry, Ledger, LedgerUnavailable
from sandbox.narrowing import Refused
from sandbox.packages.supply import Supply
from sandbox.permits import Permits
from sandbox.policy.tenants import Tenant
from sandbox.policy_file import LoadedPolicy, load_policy
from sandbox.registries import RegistryRules
from sandbox.settings import Settings
from sandbox.tenants import UnknownTenant, of_tenant
from sandbox.workdir import remove_stale

_TRIM_SECONDS = 600.0  # what has expired is not seen any more, and by then not on the disk either
_OUTSIDE = "an `Executor` runs calls inside its `async with` statement only"


async def _keep_trimmed(ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        with contextlib.suppress(LedgerUnavailable):  # each call that needs it says so
            await ledger.trim()


async def _remove_scripts(ledger: Ledger) -> None:
    """What executors that were killed left in working directories."""
    for call_id, script in (await ledger.stale_scripts()).items():
        await asyncio.to_thread(remove_stale, Path(script.root), script.directory, script.name)
        await ledger.forget_script(call_id)


class ReloadRefused(Exception):
    """A policy that this executor can't take while it runs; the one before stays in force. The message says why."""


class Executor:
    """Runs calls under one policy. Use it as an asynchronous context manager; calls may run concurrently.

    Raises `InvalidPolicy` when it is made from a file that is none.
    """

    def __init__(self, policy: Path | LoadedPolicy, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.policy = policy if isinstance(policy, LoadedPolicy) else load_policy(policy)
        self.audit_path = self._audit_path_of(self.policy)
        self.lost: list[Entry] = []
        self._languages = Languages(self.settings)
        self._supply = Supply(self.policy, self.settings.state_dir, self._ready)
        self._backend = Backend(
            self.settings, audit_path=self.audit_path, upstream_ca_file=self.policy.policy.network.upstream.ca_file,
            readable=lambda: self.readable,
        )  # fmt: skip
        self.admission = Admission(self.settings.max_concurrency, self.settings.max_waiting)
        self._places: dict[str, Admission] = {}
        self._ledger: Ledger | None = None
        self._stories: dict[str, Story] = {}
        self._running: dict[str, RunningCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self._trimming: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the proxy and the launcher. `lost` has then the calls that an executor before this one left open.

        Raises `IsolationUnavailable`, `ProxyUnavailable`, `LedgerUnavailable`.
        """
        keep = self.policy.policy.calls
        opening = asyncio.create_task(
            Ledger.open(
                self.settings.state_dir / "calls", keep_seconds=keep.keep_hours * 3600, keep_bytes=keep.keep_mib * MIB
            )
        )
        self._supply.open()
        try:
            await self._backend.ready()
            ledger = await opening
            await self._retain(ledger, self.policy)
            self.lost = await ledger.take_lost()
            await report_lost(self.audit_path, self.lost)
            await _remove_scripts(ledger)
        except BaseException:
            await asyncio.shield(self._end(opening))
            raise
        self._ledger = ledger
        self._trimming = asyncio.create_task(_keep_trimmed(ledger))
        self._stories = self._stories_of(self.policy, ledger, self._supply)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every call that still runs, and both processes."""
        ledger, self._ledger, self._stories = self._ledger, None, {}
        if self._trimming is not None:
            self._trimming.cancel()
        await asyncio.shield(self._end(None, ledger))

    async def _end(self, opening: asyncio.Task[Ledger] | None, ledger: Ledger | None = None) -> None:
        for running in list(self._running.values()):
            running.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._backend.close()
        if opening is not None:
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()
        if ledger is not None:
            await ledger.close()

    @property
    def readable(self) -> tuple[Path, ...]:
        """What of the host sandboxes are shown, besides Python and its packages."""
        return (*self._languages.readable(), *self._supply.readable())

    @property
    def ledger(self) -> Ledger:
        """What is kept of calls. Raises `RuntimeError` outside the executor's `async with`."""
        if self._ledger is None:
            raise RuntimeError(_OUTSIDE)
        return self._ledger

    @property
    def launcher_pid(self) -> int | None:
        return self._backend.launcher_pid

    @property
    def proxy_pid(self) -> int | None:
        return self._backend.proxy_pid

    async def run(
        self, call: CodeCall, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None,
        terms: Terms | None = None,
    ) -> ToolResult:  # fmt: skip
        """Answer one call. Whatever happens inside is in the result; the sinks see the output's bytes as they come.

        Raises only what is this side's fault and no attempt's: `InvalidPolicy` when the registries that the policy
        leaves to the language's client cannot be found out, `RuntimeError` outside the executor's `async with`. When
        the task that waits here is cancelled, so is the call, and nothing of it is left when this raises.
        """
        running = self.submit(call, stdout_sink, stderr_sink, terms=terms)
        try:
            return await running.result()
        except asyncio.CancelledError:
            running.cancel()
            await running.settled.wait()
            raise

    def submit(
        self, call: CodeCall, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None,
        progress: Callable[[str], None] | None = None, terms: Terms | None = None,
    ) -> RunningCall:  # fmt: skip
        """Start a call and return its handle at once: its id, its answer, and the way to cancel it. Raises as `run`.

        `progress` is told in a few words what the preparation of the call's packages is at. `terms` say whose the call
        is; without them it is the operator's own. Raises `UnknownTenant` for a tenant that the policy does not have.
        """
        if self._ledger is None:
            raise RuntimeError(_OUTSIDE)
        running = RunningCall(f"call-{secrets.token_hex(8)}", call, stdout_sink, stderr_sink, progress, terms)
        story = self._story_of(running.terms.owner.tenant)
        self._running[running.call_id] = running
        task = asyncio.create_task(self._see_through(story, call, running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    def policy_of(self, tenant: str) -> LoadedPolicy:
        """The policy in force for a tenant's calls. Raises `UnknownTenant`."""
        return self._story_of(tenant).policy

    async def registries_of(self, tenant: str, language: str) -> RegistryRules:
        """The registries of a language, under a tenant's policy. Raises `UnknownTenant`, `InvalidPolicy`."""
        return await self._story_of(tenant).permits.registries_of(language)

    def position(self, call_id: str) -> int | None:
        """How many calls are before this one, which waits for its turn; None for one that does not."""
        running = self._running.get(call_id)
        if running is None:
            return None
        own = self._places.get(running.terms.owner.tenant)
        places = [one.position(call_id) for one in (own, self.admission) if one is not None]
        return next((place for place in places if place is not None), None)

    async def reload(self, policy: LoadedPolicy) -> None:
        """Put another policy in force, all at once: for every call from now on.

        Calls that run keep what they have, and lose what the new policy takes from them: what they ask of the network
        next is judged under both. Raises `ReloadRefused`, and then nothing has changed.
        """
        async with self._reloading:
            ledger = self.ledger
            supply = Supply(policy, self.settings.state_dir, self._ready)
            supply.open()
            try:
                self._check_reload(policy, supply)
                stories = self._stories_of(policy, ledger, supply)
                await self._retain(ledger, policy)
            except (ReloadRefused, LedgerUnavailable) as error:
                await report_policy(self.audit_path, self.policy, policy, str(error))
                raise ReloadRefused(str(error)) from error
            before, self.policy, self._supply, self._stories = self.policy, policy, supply, stories
            self._set_places(policy)
            if policy.digest != before.digest:
                await asyncio.gather(*(self._amend(running) for running in list(self._running.values())))
            await report_policy(self.audit_path, before, policy)

    async def report_rejected(self, why: str) -> None:
        """Write to the audit log that a new policy was none, and that the one before stays in force."""
        await report_policy(self.audit_path, self.policy, None, why)

    def _check_reload(self, policy: LoadedPolicy, supply: Supply) -> None:
        why = None
        if self._audit_path_of(policy) != self.audit_path:
            why = "`audit.path` is another: the log that is being written would end without a word"
        elif policy.policy.network.upstream != self.policy.policy.network.upstream:
            why = "`network.upstream` is another, which the proxy reads at its start"
        elif not set(supply.readable()) <= set(self._supply.readable()):
            why = "`packages.prepare` is on where it was off, which the launcher must know at its start"
        if why is not None:
            raise ReloadRefused(f"{why}\nhint: restart to put it in force")

    async def _amend(self, running: RunningCall) -> None:
        """Hold a call that has no answer against the policy now in force. Whatever fails takes all from it."""
        grant: Grant | None = None
        try:
            story = self._story_of(running.terms.owner.tenant)
            with contextlib.suppress(Refused):  # its limits, say, are no matter of what an attempt that runs may reach
                grant = await story.permits.grant(running.call, running.call_id)
            permit = await story.permits.narrow(running.call, running.call_id)
        except Refused as refused:
            await running.withdraw(refused, grant)
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here may leave it with what it had
            why = Refused(
                "policy_changed", f"the policy was changed, and the call cannot be held against it: {error}",
                layer="operator", rule="reload", hint="try again",
            )  # fmt: skip
            await running.withdraw(why, None)
        else:
            await running.revise(permit)

    def _places_of(self, tenant: Tenant) -> Admission:
        """The places of a tenant, which go on over reloads, as do the calls that hold them."""
        if tenant.name not in self._places:
            self._places[tenant.name] = Admission(tenant.concurrency, self.settings.max_waiting)
        return self._places[tenant.name]

    def _set_places(self, policy: LoadedPolicy) -> None:
        """As many places for each tenant as the policy now has."""
        for tenant in policy.policy.tenants:
            self._places_of(tenant).resize(tenant.concurrency)

    async def _retain(self, ledger: Ledger, policy: LoadedPolicy) -> None:
        calls = policy.policy.calls
        await ledger.retain(
            keep_seconds=calls.keep_hours * 3600, keep_bytes=calls.keep_mib * MIB, tenants=len(policy.policy.tenants)
        )

    def _stories_of(self, policy: LoadedPolicy, ledger: Ledger, supply: Supply) -> dict[str, Story]:
        """How calls are answered: the operator's own under an empty name, and each tenant's."""
        registries: dict[str, RegistryRules] = {}
        common = self._story(policy, ledger, supply, registries, (self.admission,))
        stories = {"": common}
        for tenant in policy.policy.tenants:
            narrowed = of_tenant(policy, tenant.name)
            own = Supply(narrowed, self.settings.state_dir, self._ready)
            own.open()
            places = (self._places_of(tenant), self.admission)
            stories[tenant.name] = self._story(narrowed, ledger, own, registries, places)
        return stories

    def _story(
        self, policy: LoadedPolicy, ledger: Ledger, supply: Supply, registries: dict[str, RegistryRules],
        admissions: tuple[Admission, ...],
    ) -> Story:  # fmt: skip
        return Story(
            policy=policy,
            audit_path=self.audit_path,
            permits=Permits(policy, supply, registries),
            answers=Answers(ledger, self._running),
            admissions=admissions,
            supply=supply,
            backend=self._backend,
            languages=self._languages,
        )

    def _story_of(self, tenant: str) -> Story:
        try:
            return self._stories[tenant]
        except KeyError:
            raise UnknownTenant(f"the policy has no tenant `{tenant}`") from None

    def _audit_path_of(self, policy: LoadedPolicy) -> Path:
        return self.settings.audit_log or self.settings.state_dir / policy.policy.audit.path

    async def ready(self) -> None:
        """Have both processes up, started again where one was lost. Raises as the start of the executor does."""
        await self._backend.ready()

    async def _ready(self) -> tuple[WarmPool, Proxy]:
        return await self._backend.ready()

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
