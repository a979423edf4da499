"""What gives calls their packages, under one policy: screened before anything is done, prepared when it is their turn.

Owns: the store, the resolvers, the lists that packages are judged by. Must not: decide (`screening`, `preparation`).
Until a call names packages, nothing of it is loaded but where things lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from proxy.control import Proxy
from proxy.packages.data_files import InvalidData, load_policy_data
from proxy.packages.judge import PolicyData
from proxy.packages.model import Ecosystem
from proxy.packages.reasons import PackageReason
from sandbox.interpreters import this_interpreter
from sandbox.isolation.pool import WarmPool
from sandbox.narrowing import Refused, narrow_preparation, preparing_rule
from sandbox.packages.chamber import Chamber
from sandbox.packages.platforms import Platform, ResolverMissing, this_platform
from sandbox.packages.preparation import Preparer, Progress, SnapshotFailed, Wanted
from sandbox.packages.screening import Refusal, Screening, screen
from sandbox.packages.store import Store, store_directory
from sandbox.policy.packages import package_policy
from sandbox.policy_file import LoadedPolicy
from sandbox.registries import RegistryRules

_DATA_SECONDS = 600.0  # advisories and lists are read again after this

type Backend = Callable[[], Awaitable[tuple[WarmPool, Proxy]]]


class PackagesRefused(Refused):
    """The policy refuses packages of a call. `refusals` has every one."""

    def __init__(self, refusals: tuple[Refusal, ...], layer: str = "operator") -> None:
        first = refusals[0]
        text = "; ".join(f"`{one.specifier}`: {one.message}" if one.specifier else one.message for one in refusals)
        super().__init__(str(first.reason), text, layer=layer, rule=first.rule or "packages", hint=first.hint)
        self.refusals = refusals


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an attempt is given of packages: a tree, read-only; None if its call names none."""

    tree: Path | None


class Supply:
    """Made once for an executor. `open` makes what is missing on disk; before it nothing can be prepared."""

    def __init__(self, policy: LoadedPolicy, state_dir: Path, backend: Backend) -> None:
        self._loaded = policy
        self._policy = package_policy(policy.policy.packages)
        self._directory = store_directory(state_dir)
        self._backend = backend
        self._store: Store | None = None
        self._platform: Platform | None = None
        self._fault: Exception | None = None
        self._data: PolicyData | None = None
        self._data_read_at = 0.0

    def open(self) -> None:
        """What is wrong with the store or the resolvers is kept for the call that needs them."""
        if not self._policy.prepare or self._store is not None:
            return
        try:
            self._store, self._platform = Store(self._directory), this_platform()
        except (OSError, ResolverMissing) as error:
            self._fault = error

    def readable(self) -> tuple[Path, ...]:
        """Directories of the host that the launcher must be able to show."""
        if self._store is None or self._platform is None:
            return ()
        return (self._store.snapshots, *self._platform.readable())

    async def screen(
        self, call_id: str, texts: list[str], registries: RegistryRules | None, ecosystem: Ecosystem
    ) -> Wanted:
        """What a call's specifiers come to. Raises `PackagesRefused` with every refusal, `SnapshotFailed`."""
        data = await self._policy_data()
        screening: Screening = screen(self._policy, ecosystem, texts, datetime.now(UTC), data)
        if not screening.ok or registries is None or registries.registry is None:
            raise self._refused(screening.refusals)
        grant = narrow_preparation(self._loaded, registries, call_id=call_id)
        return Wanted(registries.registry, screening.allowed, grant, self._policy, data)

    def _refused(self, refusals: tuple[Refusal, ...]) -> PackagesRefused:
        """The refusals, the first under the name of the tenant's rule where it is the tenant who brings no packages."""
        first, *rest = refusals
        if first.reason is not PackageReason.PACKAGES_NOT_ALLOWED:
            return PackagesRefused(refusals)
        layer, rule = preparing_rule(self._loaded)
        return PackagesRefused((replace(first, rule=rule), *rest), layer)

    @contextlib.asynccontextmanager
    async def snapshot(
        self, wanted: Wanted | None, progress: Callable[[str], None] | None = None
    ) -> AsyncIterator[Snapshot]:
        """A snapshot of what is wanted, in use until this ends; one without a tree where nothing is.

        Raises `NotPrepared`, `SnapshotFailed`, `IsolationUnavailable`, `ProxyUnavailable`.
        """
        if wanted is None:
            yield Snapshot(None)
            return
        if self._store is None or self._platform is None:
            raise SnapshotFailed(f"no packages can be prepared: {self._fault}") from self._fault
        preparer = Preparer(self._store, self._platform, self._chamber)

        def tell(at: Progress) -> None:
            if progress is not None:
                progress(at.text)

        with await preparer.prepare(wanted, progress=tell) as lease:
            if progress is not None:
                progress("")  # it is done
            yield Snapshot(lease.tree)

    async def _chamber(self) -> Chamber:
        assert self._platform is not None
        pool, proxy = await self._backend()
        return Chamber(pool.launcher, proxy, this_interpreter(), self._platform.mounts)

    async def _policy_data(self) -> PolicyData:
        if self._data is None or time.monotonic() - self._data_read_at > _DATA_SECONDS:
            try:
                self._data = await asyncio.to_thread(load_policy_data, self._policy)
            except InvalidData as error:
                raise SnapshotFailed(f"packages cannot be judged: {error}") from error
            self._data_read_at = time.monotonic()
        return self._data
