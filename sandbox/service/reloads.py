"""New policies while the service runs: on SIGHUP, and when the file changes.

Owns: what is said about it, and to whom. Must not: read the file; `sandbox.policy_watch` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sandbox.executor import ReloadRefused
from sandbox.policy_file import InvalidPolicy, LoadedPolicy
from sandbox.policy_watch import PolicyWatch
from sandbox.service.metrics import Metrics
from sandbox.service.service import Service
from sandbox.service.supervisor import READY, notify, reloading
from sandbox.state import InvalidSettings

_AGAIN_SECONDS = 1.0  # after what was not foreseen
_log = logging.getLogger("sluicegate.service")


class Reloads:
    """Puts each new policy in force, whole; what is none, or cannot be without a restart, leaves the one before."""

    def __init__(
        self, watch: PolicyWatch, service: Service, metrics: Metrics, *, check: Callable[[LoadedPolicy], None],
        loaded: Callable[[LoadedPolicy], None],
    ) -> None:  # fmt: skip
        """`check` raises `InvalidSettings` for one that this server can't have; `loaded` is told of one in force."""
        self._watch = watch
        self._service = service
        self._metrics = metrics
        self._check = check
        self._loaded = loaded

    def ask(self) -> None:
        """Look at the file now."""
        notify(reloading())
        self._watch.poke()

    async def follow(self) -> None:
        """Never ends: whatever happens, the next policy must be looked at."""
        while True:
            try:
                async for found in self._watch.changes():
                    await self._take(found)
            except Exception as error:  # noqa: BLE001 - of the watch itself
                self._stays(f"the file could not be looked at: {type(error).__name__}: {error}")
            notify(READY)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _take(self, found: LoadedPolicy | InvalidPolicy) -> None:
        try:
            await self._put_in_force(found)
        except (InvalidPolicy, InvalidSettings, ReloadRefused) as error:
            self._stays(str(error))
        except Exception as error:  # noqa: BLE001 - of what is done with it
            self._stays(f"it could not be put in force: {type(error).__name__}: {error}")
        notify(READY)

    async def _put_in_force(self, found: LoadedPolicy | InvalidPolicy) -> None:
        if isinstance(found, InvalidPolicy):
            raise found
        self._check(found)
        await self._service.reload(found)
        self._loaded(found)
        self._metrics.reloaded(loaded=True)
        _log.info("policy `%s` is in force, `%s`", found.policy.name, found.digest)
        for warning in found.warnings:
            _log.warning("%s", warning)

    def _stays(self, why: str) -> None:
        self._metrics.reloaded(loaded=False)
        _log.error("the policy in force stays, `%s`: %s", self._service.loaded.digest, why)
