"""Whatever goes wrong with one policy, the next one is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.policy_file import InvalidPolicy, LoadedPolicy
from sandbox.policy_watch import PolicyWatch
from sandbox.service import reloads as module
from sandbox.service.metrics import Metrics
from sandbox.service.reloads import Reloads
from tests.service.in_process import policy, serving
from tests.service.serving import policy_text


class Broken(PolicyWatch):
    """Fails the first times that it is asked, and finds then what it is given."""

    def __init__(self, path: Path, current: LoadedPolicy, found: LoadedPolicy, failures: int) -> None:
        super().__init__(path, current)
        self._found, self._failures = found, failures

    async def changes(self) -> AsyncIterator[LoadedPolicy | InvalidPolicy]:
        if self._failures:
            self._failures -= 1
            raise RuntimeError("nobody thought of this")
        yield self._found
        await asyncio.Event().wait()


def counted(metrics: Metrics) -> dict[str, float]:
    lines = [line.split() for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if name.startswith("sluicegate_policy_")}


@pytest.mark.parametrize("where", ["watch", "check", "loaded"])
def test_what_nobody_thought_of_is_told_and_the_next_policy_is_put_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)
    limits = {"timeout_seconds": {"default": 7}}
    first, second = policy(), policy(limits=limits)
    failing = {where}
    in_force = asyncio.Event()

    def fail(at: str) -> None:
        if at in failing:
            failing.discard(at)
            watch.poke()
            raise RuntimeError("nobody thought of this")

    def loaded(_: LoadedPolicy) -> None:
        fail("loaded")
        in_force.set()

    (tmp_path / "policy.yaml").write_text(policy_text(limits=limits))
    watch: PolicyWatch = PolicyWatch(tmp_path / "policy.yaml", first, interval_seconds=0.01, settling_seconds=0.01)
    if where == "watch":
        watch = Broken(tmp_path / "policy.yaml", first, second, 2)

    async def scenario() -> dict[str, float]:
        metrics = Metrics()
        async with asyncio.timeout(100), serving(tmp_path, first, warm_sandboxes=0) as service:
            reloads = Reloads(watch, service, metrics, check=lambda _: fail("check"), loaded=loaded)
            following = asyncio.create_task(reloads.follow())
            await in_force.wait()
            assert not following.done()
            assert service.loaded.policy.limits.timeout_seconds.default == 7
            following.cancel()
            await asyncio.wait({following})
            return counted(metrics)

    told = asyncio.run(scenario())
    assert told['sluicegate_policy_reloads_total{outcome="rejected"}'] >= 1
    assert told['sluicegate_policy_reloads_total{outcome="loaded"}'] == 1
    assert told["sluicegate_policy_file_broken"] == 0
    assert "nobody thought of this" in caplog.text
