"""What one tenant may have open, and how fast it may ask. Counted exactly, and refused before any work.

Owns: the counts of one tenant. Must not: know calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sandbox.policy.tenants import Rate, Tenant
from sandbox.service.model import Busy

_RETRY_SECONDS = 1.0  # a tenant's queue moves with each of its calls, whose length nobody knows


class Bounds:
    """The bounds of a tenant, or of nobody: then there are none."""

    def __init__(self, tenant: Tenant | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenant = tenant
        self._clock = clock
        self._tokens = 0.0 if tenant is None or tenant.rate is None else float(tenant.rate.burst)
        self._filled = clock()
        self.open = 0

    def take_over(self, before: Bounds) -> None:
        """Go on from what was counted under other bounds, such as those before a reload."""
        self.open = before.open
        if before._tenant is not None and before._tenant.rate is not None:
            before._fill(before._tenant.rate)
            self._tokens = min(self._tokens, before._tokens)

    def admit(self) -> None:
        """Count one more call. Raises `Busy`, and then nothing is counted."""
        tenant = self._tenant
        if tenant is not None:
            if self.open >= tenant.concurrency + tenant.queue:
                raise Busy(
                    "busy",
                    f"tenant `{tenant.name}` has {self.open} calls open, of which {tenant.concurrency} are worked on "
                    f"at once and {tenant.queue} may wait",
                    _RETRY_SECONDS,
                )
            self._spend(tenant)
        self.open += 1

    def release(self) -> None:
        """One call less."""
        self.open -= 1

    def _fill(self, rate: Rate) -> None:
        now = self._clock()
        self._tokens = min(rate.burst, self._tokens + (now - self._filled) * rate.per_minute / 60)
        self._filled = now

    def _spend(self, tenant: Tenant) -> None:
        if tenant.rate is None:
            return
        self._fill(tenant.rate)
        if self._tokens < 1:
            raise Busy(
                "rate_limited",
                f"tenant `{tenant.name}` may begin {tenant.rate.per_minute} calls a minute, and {tenant.rate.burst} at "
                "once",
                (1 - self._tokens) * 60 / tenant.rate.per_minute,
            )
        self._tokens -= 1
