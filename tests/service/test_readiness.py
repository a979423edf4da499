"""Ready is what doctor says of this host, and what the two processes behind the executor are."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from proxy.control import ProxyUnavailable
from sandbox import Executor, Settings
from sandbox.isolation.client import IsolationUnavailable
from sandbox.policy_file import parse_policy
from sandbox.service import readiness
from sandbox.service.readiness import Inspection, Readiness
from sandbox.service.service import Service as Application
from tests.remote_executor import until
from tests.service.serving import Service, policy_text

FAILED = {"name": "user namespaces", "ok": False, "detail": "there are none", "remedy": "allow them"}
PASSED = {"name": "bubblewrap", "ok": True, "detail": "0.8", "remedy": ""}


def doctor(directory: Path, *checks: Any, first: str = "pass") -> list[str]:
    """A doctor that says this, and counts how often it was asked."""
    said = json.dumps({"ok": all(check["ok"] for check in checks), "checks": checks, "facts": []})
    program = f"open({str(directory / 'asked')!r}, 'a').write('.'); {first}; print({said!r})"
    return [sys.executable, "-c", program]


def asked(directory: Path) -> int:
    path = directory / "asked"
    return len(path.read_text()) if path.exists() else 0


@asynccontextmanager
async def inspecting(directory: Path, command: list[str]) -> AsyncIterator[tuple[Application, Inspection]]:
    settings = Settings(state_dir=directory / "state", warm_sandboxes=0)
    async with (
        asyncio.timeout(100),
        Executor(parse_policy("version: 1\nname: ready\n"), settings=settings) as executor,
        Application(executor) as service,
        Inspection(service, directory / "policy.yaml", command) as inspection,
    ):
        yield service, inspection


def test_a_real_service_becomes_ready(single: Service, client: httpx.Client) -> None:
    until(lambda: client.get("/readyz").status_code == 200, "doctor has come to its verdict")
    assert client.get("/readyz").json() == {"ready": True, "state": "ready", "failed": []}


def test_until_doctor_has_come_to_its_verdict_it_is_not_ready(tmp_path: Path) -> None:
    """And calls do not wait for it."""

    async def scenario() -> None:
        waits = doctor(tmp_path, PASSED, first="import sys; sys.stdin.read(); import time; time.sleep(1000)")
        async with inspecting(tmp_path, waits) as (_, inspection):
            assert await inspection.readiness() == Readiness(ready=False, state="checking")

    asyncio.run(scenario())


def test_the_verdict_is_remembered_and_says_what_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inspecting(tmp_path, doctor(tmp_path, PASSED, FAILED)) as (_, inspection):
            await inspection.settled()
            for _ in range(5):
                ready = await inspection.readiness()
                assert (ready.ready, ready.state) == (False, "failed")
                assert [one.model_dump() for one in ready.failed] == [
                    {"name": FAILED["name"], "detail": FAILED["detail"], "remedy": FAILED["remedy"]}
                ]
                others = ready.for_others()
                assert (others.failed[0].name, others.failed[0].detail, others.failed[0].remedy) == (
                    FAILED["name"],
                    "",
                    "",
                )

    asyncio.run(scenario())
    assert asked(tmp_path) == 1


def test_what_failed_is_looked_at_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a host that was put right would stay unready."""

    async def scenario() -> None:
        command = doctor(tmp_path, FAILED)
        async with inspecting(tmp_path, command) as (_, inspection):
            await inspection.settled()
            assert not (await inspection.readiness()).ready
            command[:] = doctor(tmp_path, PASSED)
            monkeypatch.setattr(readiness, "RETRY_SECONDS", 0.0)
            assert not (await inspection.readiness()).ready, "it is not waited for"
            await inspection.settled()
            assert (await inspection.readiness()).ready
            assert (await inspection.readiness()).ready

    asyncio.run(scenario())
    assert asked(tmp_path) == 2


@pytest.mark.parametrize(
    "command", [["/nonexistent"], [sys.executable, "-c", "print('no JSON')"], [sys.executable, "-c", "print('{}')"]]
)
def test_a_doctor_without_a_verdict_is_a_failure(tmp_path: Path, command: list[str]) -> None:
    async def scenario() -> Readiness:
        async with inspecting(tmp_path, command) as (_, inspection):
            await inspection.settled()
            return await inspection.readiness()

    ready = asyncio.run(scenario())
    assert (ready.ready, [one.name for one in ready.failed]) == (False, ["doctor"])


def test_a_process_that_was_lost_is_started_again_and_the_host_examined_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inspecting(tmp_path, doctor(tmp_path, PASSED)) as (service, inspection):
            await inspection.settled()
            assert (await inspection.readiness()).ready
            lost = service.executor.proxy_pid
            assert lost is not None
            os.kill(lost, signal.SIGKILL)
            while service.executor.proxy_pid == lost:
                await inspection.readiness()
                await asyncio.sleep(0.01)
            await inspection.settled()
            assert (await inspection.readiness()).ready

    asyncio.run(scenario())
    assert asked(tmp_path) == 2


@pytest.mark.parametrize(("error", "name"), [(IsolationUnavailable, "launcher"), (ProxyUnavailable, "proxy")])
def test_what_cannot_be_had_makes_it_unready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], name: str
) -> None:
    async def scenario() -> Readiness:
        async with inspecting(tmp_path, doctor(tmp_path, PASSED)) as (service, inspection):

            async def fail() -> None:
                raise error("there is none")

            monkeypatch.setattr(service.executor, "ready", fail)
            return await inspection.readiness()

    ready = asyncio.run(scenario())
    assert (ready.ready, [(one.name, one.detail) for one in ready.failed]) == (False, [(name, "there is none")])


@pytest.mark.parametrize("how", ["moved", "another"])
def test_a_ledger_that_is_not_where_the_next_service_looks_makes_it_unready(tmp_path: Path, how: str) -> None:
    """Its file is still written to, and nobody would find what is in it. Once it is back, all is well."""

    async def scenario() -> None:
        async with inspecting(tmp_path, doctor(tmp_path, PASSED)) as (_, inspection):
            await inspection.settled()
            assert (await inspection.readiness()).ready
            calls = tmp_path / "state" / "calls"
            calls.rename(tmp_path / "elsewhere")
            if how == "another":
                calls.mkdir()
                (calls / "calls.sqlite").touch()
            ready = await inspection.readiness()
            assert (ready.ready, ready.state, [one.name for one in ready.failed]) == (False, "failed", ["ledger"])
            assert "restart" in ready.failed[0].remedy
            if how == "another":
                shutil.rmtree(calls)
            (tmp_path / "elsewhere").rename(calls)
            assert (await inspection.readiness()).ready

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["signal", "drain"])
def test_a_doctor_that_was_cut_short_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:  # fmt: skip
    """Such as by a signal that a manager sends to every process of a service, or because the service ends."""
    end = "import os; os.kill(os.getpid(), 15)" if how == "signal" else "import sys; sys.exit(1)"

    async def scenario() -> Readiness:
        async with inspecting(tmp_path, doctor(tmp_path, PASSED, first=end)) as (service, inspection):
            if how == "drain":
                await service.drain(0)
            await inspection.settled()
            return await inspection.readiness()

    ready = asyncio.run(scenario())
    assert ready == Readiness(ready=False, state="checking" if how == "signal" else "draining")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_service_that_drains_is_not_ready(tmp_path: Path) -> None:
    async def scenario() -> Readiness:
        async with inspecting(tmp_path, doctor(tmp_path, PASSED)) as (service, inspection):
            await service.drain(0)
            return await inspection.readiness()

    assert asyncio.run(scenario()) == Readiness(ready=False, state="draining")


def test_a_doctor_that_is_still_at_it_ends_with_the_service(tmp_path: Path) -> None:
    """However the service ends: its launcher's state is not another's to clean up."""
    slow = tmp_path / "slow"
    slow.mkdir()
    with Service(slow, policy_text()) as service:

        def at_work() -> list[psutil.Process]:
            return [one for one in service.children() if "doctor" in one.cmdline()]

        found = until(at_work, "doctor is at work")
        service.signal(signal.SIGKILL)
        service.wait()
    _, alive = psutil.wait_procs(found, 100)
    assert alive == []
