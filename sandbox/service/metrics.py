"""What is counted, in Prometheus' words. Every label has few values: no user, no call, no path as it was asked for.

Owns: the names of metrics and their labels. Must not: know more of a call than its ending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sandbox.contract import ToolResult
from sandbox.owners import Caller
from sandbox.policy_file import LoadedPolicy
from sandbox.service.model import Kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 420.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})


class Ended(Protocol):
    """What is looked at of a call that has ended."""

    @property
    def caller(self) -> Caller: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def submitted_at(self) -> float: ...
    @property
    def begun_at(self) -> float | None: ...


class Metrics:
    """The counts of one service, in a registry of their own. It is the service's observer."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "sluicegate_calls", "Calls that were answered; `cause` as in results, `none` where there was no answer.",
            ("tenant", "kind", "status", "cause"), registry=registry,
        )  # fmt: skip
        self._call_seconds = Histogram(
            "sluicegate_call_seconds", "From a call's arrival until nothing of it was left.", ("kind",),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._wait_seconds = Histogram(
            "sluicegate_call_wait_seconds", "From a call's arrival until its turn.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._retried = Counter(
            "sluicegate_attempts_retried", "Attempts that failed on this side and were made anew.", registry=registry
        )
        self._network = Counter(
            "sluicegate_network_requests", "What attempts asked of the network, by the proxy's decision.",
            ("decision",), registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "sluicegate_calls_refused", "Calls that were not begun, by the code of the error.", ("tenant", "code"),
            registry=registry,
        )  # fmt: skip
        self._requests = Counter(
            "sluicegate_http_requests", "HTTP requests; `status` 499 is a client that left.",
            ("route", "method", "status"), registry=registry,
        )  # fmt: skip
        self._reloads = Counter(
            "sluicegate_policy_reloads", "Policies that were read while the service ran.", ("outcome",),
            registry=registry,
        )  # fmt: skip
        self._policy_broken = Gauge(
            "sluicegate_policy_file_broken", "1 while the policy file is not the policy in force.", registry=registry
        )
        for outcome in ("loaded", "rejected"):
            self._reloads.labels(outcome)
        for decision in ("allow", "deny"):
            self._network.labels(decision)
        ProcessCollector(registry=registry)

    def watch(self, gauges: Callable[[], Iterable[tuple[str, str, float]]], policy: Callable[[], LoadedPolicy]) -> None:
        """Have these looked at whenever somebody asks: name, help and value of each; and the policy in force."""
        self._registry.register(_Now(gauges, policy))

    def text(self) -> bytes:
        return generate_latest(_WithoutBirthdays(self._registry))

    # --- as the service's observer

    def ended(self, live: Ended, answer: ToolResult | None) -> None:
        """A call has its answer; None where this side has none."""
        status, cause = ("none", "none") if answer is None else (answer.status.value, answer.cause.value)
        self._calls.labels(live.caller.tenant, live.kind, status, cause).inc()
        self._call_seconds.labels(live.kind).observe(max(0.0, time.time() - live.submitted_at))
        if live.begun_at is not None:
            self._wait_seconds.observe(max(0.0, live.begun_at - live.submitted_at))
        if answer is not None:
            self._retried.inc(max(0, len(answer.attempts) - 1))
            self._network.labels("allow").inc(answer.network.allowed)
            self._network.labels("deny").inc(answer.network.denied)

    def refused(self, tenant: str, code: str) -> None:
        self._refused.labels(tenant, code).inc()

    # --- of the edge

    def request(self, route: str, method: str, status: int) -> None:
        self._requests.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def reloaded(self, *, loaded: bool) -> None:
        """`loaded` False: the file is no policy, or one that takes a restart, and the one before stays."""
        self._reloads.labels("loaded" if loaded else "rejected").inc()
        self._policy_broken.set(0 if loaded else 1)


class _WithoutBirthdays(CollectorRegistry):
    """When each series was first counted is of no use to anybody, and doubles what is sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._all = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._all.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _Now(Collector):
    """What is so at the moment of asking."""

    def __init__(
        self, gauges: Callable[[], Iterable[tuple[str, str, float]]], policy: Callable[[], LoadedPolicy]
    ) -> None:
        self._gauges, self._policy = gauges, policy

    def collect(self) -> Iterator[Metric]:
        for name, what, value in self._gauges():
            family = GaugeMetricFamily(f"sluicegate_{name}", what)
            family.add_metric([], value)
            yield family
        loaded = self._policy()
        info = GaugeMetricFamily("sluicegate_policy_info", "The policy in force.", labels=("name", "digest"))
        info.add_metric([loaded.policy.name, loaded.digest], 1)
        yield info

    def describe(self) -> Iterator[Metric]:
        return iter(())
