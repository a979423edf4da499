"""Another policy while calls run: new ones are under it, running ones keep what it does not take from them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sandbox.code_exec import CodeExecCall
from sandbox.contract import Cause, Status
from sandbox.executor import ReloadRefused
from sandbox.ledger import LedgerUnavailable
from sandbox.owners import Caller
from sandbox.policy_file import LoadedPolicy
from sandbox.service.live import LiveCall
from sandbox.service.model import Busy
from sandbox.service.service import Service
from sandbox.tenants import UnknownTenant
from tests.lab import Outside, read_events
from tests.service.in_process import (
    ALICE,
    HOLD,
    OTHER,
    cancelled,
    counts,
    ended,
    enters,
    nothing_open,
    plain,
    policy,
    says,
    serving,
    until,
)

ME = Caller(admin=True)
ALLOWED = [{"host": "allowed.test"}]
NAMED = {"allow_network": True, "domains": ["allowed.test"]}

# Asks once before and, when told to, once after; what it hears is in its output.
ASKS = """
import os, time, urllib.error, urllib.request

def ask(what):
    try:
        print(what, urllib.request.urlopen("http://allowed.test/", timeout=20).status, flush=True)
    except OSError as error:
        print(what, getattr(error, "code", type(error).__name__), flush=True)

"""
WHEN_TOLD = """
ask("before")
while not os.path.exists("go"):
    time.sleep(0.01)
ask("after")
"""


def networked(outside: Outside, *tenants: dict[str, Any], allow: Any = ALLOWED, **sections: Any) -> LoadedPolicy:
    """A policy that has `allowed.test` in it, for code_exec calls, too."""
    network = {"modes": ["block-all", "named"], "upstream": {"ca_file": str(outside.ca_file)}, "allow": allow}
    section = {"network": "named", "domains": ["allowed.test"]}
    return policy(*tenants, **{"network": network, "code_exec": section, **sections})


def blocked(outside: Outside, *tenants: dict[str, Any]) -> LoadedPolicy:
    """The same without any network."""
    network = {"modes": ["block-all"], "upstream": {"ca_file": str(outside.ca_file)}}
    return policy(*tenants, network=network)


async def asks_when_told(service: Service, caller: Caller) -> LiveCall:
    """A call that has had an answer from `allowed.test`, and asks again when told to."""
    live = await service.submit_code_exec(caller, CodeExecCall(ASKS + WHEN_TOLD, timeout=100))
    await says(live, "before 200")
    return live


async def told(service: Service, caller: Caller, live: LiveCall) -> str:
    """Tell it to ask again: what it heard."""
    state = service.executor.settings.state_dir
    tenant = Path("tenants", caller.tenant) if caller.tenant else Path()
    go = state / tenant / "user_data" / caller.user / "go"
    go.touch()
    result = await live.result()
    await ended(live)
    go.unlink()
    return result.stdout.rpartition("after ")[2].strip()


def denials(root: Path, call_id: str) -> list[dict[str, Any]]:
    events = read_events(root / "audit.jsonl")
    return [one for one in events if str(one.get("attempt_id")).startswith(call_id) and one.get("decision") == "deny"]


# --- new calls


def test_new_calls_are_under_the_new_policy_from_the_moment_that_it_is_in_force(tmp_path: Path) -> None:
    """Modes, limits, tenants and explanations, at once and both ways."""
    before = policy({"name": "acme"}, network={"modes": ["block-all"]})
    after = policy(
        {"name": "other"}, network={"modes": ["block-all", "unrestricted"]},
        limits={"timeout_seconds": {"default": 5, "max": 10}},
    )  # fmt: skip

    async def causes(service: Service) -> list[Cause]:
        calls = plain("1"), plain("1", timeout=30), plain("1", allow_network=True, domains=[])
        lives = [await service.submit_call(ME, call) for call in calls]
        found = [(await live.result()).cause for live in lives]
        await ended(*lives)
        return found

    async def scenario() -> None:
        async with serving(tmp_path, before) as service:
            for loaded in (before, after, before):
                await service.reload(loaded)
                assert service.loaded is loaded
                first, other = (ALICE, OTHER) if loaded is before else (OTHER, ALICE)
                live = await service.submit_call(first, plain("print(1)"))
                assert (await live.result()).stdout == "1\n"
                with pytest.raises(UnknownTenant):
                    await service.submit_call(other, plain("1"))
                with pytest.raises(UnknownTenant):
                    await service.submit_code_exec(other, CodeExecCall("1"))
                allowed = [Cause.EXIT, Cause.EXIT, Cause.POLICY_REFUSED]
                assert await causes(service) == (allowed if loaded is before else [Cause.EXIT, *reversed(allowed[1:])])
                explained = await service.explain(ME, "https://x.test/", allow_network=True, domains=[])
                assert explained.verdict == ("refused" if loaded is before else "allow")
            await nothing_open(service)

    asyncio.run(scenario())


def test_a_running_call_keeps_its_limits_and_its_network(outside: Outside, tmp_path: Path) -> None:
    """Lower limits are for new calls: what runs has its time, and what it may reach is no less for it."""

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside, {"name": "acme"})) as service:
            lives = [(caller, await asks_when_told(service, caller)) for caller in (ME, ALICE)]
            lower = {"timeout_seconds": {"default": 1, "max": 1}, "memory_mib": {"default": 128, "max": 128}}
            await service.reload(networked(outside, {"name": "acme"}, limits=lower))
            await asyncio.sleep(1.2)
            for caller, live in lives:
                assert await told(service, caller, live) == "200"

    asyncio.run(scenario())


# --- what is taken from running calls


@pytest.mark.parametrize("what", ["the mode", "the host", "a denial", "the tenant's mode", "the tenant's denial"])
def test_a_running_calls_next_request_is_denied_when_its_network_is_revoked(
    outside: Outside, tmp_path: Path, what: str
) -> None:
    """Whoever revokes it; nothing arrives outside; the log says why; another tenant's call goes on."""
    tenants: list[dict[str, Any]] = [{"name": "acme"}, {"name": "other"}]
    deny = [{"host": "allowed.test"}]
    after = {
        "the mode": blocked(outside, *tenants),
        "the host": networked(outside, *tenants, allow=[{"host": "other.test"}], code_exec={}),
        "a denial": networked(outside, *tenants, code_exec={}, network={
            "modes": ["block-all", "named"], "allow": [*ALLOWED, {"host": "other.test"}], "deny": deny,
            "upstream": {"ca_file": str(outside.ca_file)},
        }),
        "the tenant's mode": networked(outside, {"name": "acme", "network": {"modes": ["block-all"]}}, tenants[1]),
        "the tenant's denial": networked(outside, {"name": "acme", "network": {"deny": deny}}, tenants[1]),
    }[what]  # fmt: skip

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside, *tenants)) as service:
            mine, others = await asks_when_told(service, ALICE), await asks_when_told(service, OTHER)
            await service.reload(after)
            outside.forget()
            assert await told(service, ALICE, mine) != "200"
            assert outside.allowed.untouched
            denied = denials(tmp_path, mine.call_id)
            assert denied
            assert all(event["tenant"] == "acme" for event in denied)
            heard = await told(service, OTHER, others)
            assert (heard == "200") == what.startswith("the tenant's")

    asyncio.run(scenario())


def test_what_was_revoked_stays_revoked_for_what_runs(outside: Outside, tmp_path: Path) -> None:
    """A policy that allows it again is for new calls."""

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside)) as service:
            live = await asks_when_told(service, ME)
            await service.reload(blocked(outside))
            await service.reload(networked(outside))
            again = await service.submit_call(ME, plain(ASKS + "ask('new')", **NAMED))
            assert (await again.result()).stdout == "new 200\n"
            assert await told(service, ME, live) != "200"

    asyncio.run(scenario())


def test_a_policy_that_allows_more_gives_no_more_to_what_runs(outside: Outside, tmp_path: Path) -> None:
    """A call that named one host does not reach another for it, and one without network gets none."""

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside, code_exec={})) as service:
            live = await service.submit_code_exec(ME, CodeExecCall(ASKS + WHEN_TOLD))
            await says(live, "before ")
            await service.reload(networked(outside))
            assert await told(service, ME, live) != "200"

    asyncio.run(scenario())


def narrowed(outside: Outside) -> LoadedPolicy:
    """One that takes the call's request from it, and would accept the call all the same."""
    network = {
        "modes": ["block-all", "named"], "upstream": {"ca_file": str(outside.ca_file)}, "allow": ALLOWED,
        "deny": [{"host": "allowed.test", "methods": ["GET"]}],
    }  # fmt: skip
    return policy(network=network)


def test_a_call_that_waits_is_under_the_policy_that_is_in_force_when_it_begins(
    outside: Outside, tmp_path: Path
) -> None:
    """It was accepted under another: it has no more than the new one gives it, and is refused if that refuses it."""

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside), max_concurrency=1) as service:
            brief = networked(outside, limits={"timeout_seconds": {"default": 5, "max": 5}})
            for loaded, heard in (
                (networked(outside), "first 200\n"), (narrowed(outside), "first 403\n"), (blocked(outside), ""), (brief, ""),
            ):  # fmt: skip
                await service.reload(networked(outside))
                holder = await service.submit_call(ME, plain(HOLD))
                await says(holder, "running")
                waiting = await service.submit_call(ME, plain(ASKS + "ask('first')", timeout=20, **NAMED))
                await enters(waiting, "waiting")
                await service.reload(loaded)
                await cancelled(holder)
                result = await waiting.result()
                assert result.stdout == heard
                assert result.cause is (Cause.EXIT if heard else Cause.POLICY_REFUSED)
                assert len(result.attempts) == bool(heard)
                await ended(waiting)
                assert (await service.record(ME, waiting.call_id)).result == result

    asyncio.run(scenario())


def test_a_call_that_waits_is_begun_in_its_own_time_whatever_the_new_default_is(tmp_path: Path) -> None:
    """It named no timeout: it has the lower of both defaults, and its deadline stays."""

    def default(seconds: int) -> LoadedPolicy:
        return policy(limits={"timeout_seconds": {"default": seconds, "max": 300}}, attempts={"margin_seconds": 20})

    async def scenario() -> None:
        async with serving(tmp_path, default(10), max_concurrency=1) as service:
            for seconds, expected in ((300, 10), (2, 2)):
                await service.reload(default(10))
                holder = await service.submit_call(ME, plain(HOLD))
                await says(holder, "running")
                waiting = await service.submit_call(ME, plain("print(1)"))
                await enters(waiting, "waiting")
                await service.reload(default(seconds))
                await cancelled(holder)
                result = await waiting.result()
                assert [attempt.evidence.wall_limit_seconds for attempt in result.attempts] == [expected]
                await ended(waiting)

    asyncio.run(scenario())


def test_another_attempt_of_a_call_has_no_more_than_the_first_had_left(outside: Outside, tmp_path: Path) -> None:
    """The launcher is killed after the reload: the second attempt's request is denied, or there is no second."""
    code = ASKS + "n = os.environ['SLUICEGATE_ATTEMPT']\nask('attempt ' + n)\ntime.sleep(60 if n == '1' else 0)"

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside)) as service:
            for loaded, codes, heard in (
                (networked(outside), ["launcher_lost", "exit"], "attempt 2 200\n"),
                (narrowed(outside), ["launcher_lost", "exit"], "attempt 2 403\n"),
                (blocked(outside), ["launcher_lost"], "attempt 1 200\n"),
            ):
                await service.reload(networked(outside))
                live = await service.submit_call(ME, plain(code, timeout=60, **NAMED))
                await says(live, "attempt 1 200")
                await service.reload(loaded)
                launcher = service.executor.launcher_pid
                assert launcher is not None
                os.kill(launcher, signal.SIGKILL)
                result = await live.result()
                assert [attempt.code for attempt in result.attempts] == codes
                assert result.stdout == heard
                await ended(live)

    asyncio.run(scenario())


def test_a_tenant_that_is_gone_has_no_network_and_begins_nothing(outside: Outside, tmp_path: Path) -> None:
    """What runs comes to its end, is counted until then, and stays readable; when it is back all is as before."""
    acme = {"name": "acme", "concurrency": 1, "queue": 1}
    other = {"name": "other"}

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside, acme, other)) as service:
            live = await asks_when_told(service, ALICE)
            await service.reload(networked(outside, other))
            with pytest.raises(UnknownTenant):
                await service.submit_call(ALICE, plain("1"))
            assert counts(service) == {"acme": 1}
            assert (await service.record(ALICE, live.call_id)).state == "running"
            await service.reload(networked(outside, acme, other))
            waiting = await service.submit_call(ALICE, plain("print(1)"), background=True)
            assert waiting.accepted().queue_position == 0, "its one place is still taken"
            with pytest.raises(Busy):
                await service.submit_call(ALICE, plain("1"))
            outside.forget()
            assert await told(service, ALICE, live) != "200"
            assert outside.allowed.untouched
            assert (await service.record(ALICE, live.call_id)).state == "finished"
            assert (await waiting.result()).stdout == "1\n"
            await nothing_open(service)

    asyncio.run(scenario())


def test_a_call_that_waits_is_not_begun_for_a_tenant_that_is_gone(tmp_path: Path) -> None:
    """It is refused with why, and what was said of it stays for its owner."""

    async def scenario() -> None:
        both = policy({"name": "acme"}, {"name": "other"})
        async with serving(tmp_path, both, max_concurrency=1) as service:
            holder = await service.submit_call(OTHER, plain(HOLD))
            await says(holder, "running")
            waiting = await service.submit_call(ALICE, plain("print(1)"), background=True)
            await service.reload(policy({"name": "other"}))
            await cancelled(holder)
            result = await waiting.result()
            assert (result.cause, result.attempts) == (Cause.POLICY_REFUSED, [])
            assert result.error is not None
            assert "no tenant `acme`" in result.error.message
            await ended(waiting)
            assert [note.task_id for note in await service.take_notes(ALICE)] == [waiting.call_id]

    asyncio.run(scenario())


# --- bounds


def test_bounds_are_the_new_ones_and_what_is_open_counts(tmp_path: Path) -> None:
    """Fewer: nothing is begun until enough have ended. More: those who wait have their turn at once."""

    def acme(concurrency: int, queue: int) -> LoadedPolicy:
        return policy({"name": "acme", "concurrency": concurrency, "queue": queue})

    async def scenario() -> None:
        async with serving(tmp_path, acme(1, 3)) as service:
            lives = [await service.submit_call(ALICE, plain(HOLD)) for _ in range(4)]
            await says(lives[0], "running")
            await service.reload(acme(1, 1))
            with pytest.raises(Busy, match="has 4 calls open"):
                await service.submit_call(ALICE, plain("1"))
            assert [live.queue_position for live in lives] == [None, 0, 1, 2]
            await service.reload(acme(3, 1))
            for live in lives[:3]:
                await says(live, "running")
            assert lives[3].queue_position == 0
            await service.reload(acme(1, 0))
            await cancelled(lives[0])
            assert service.open_calls == (1, 2)
            with pytest.raises(Busy):
                await service.submit_call(ALICE, plain("1"))
            await cancelled(*lives)
            last = await service.submit_call(ALICE, plain(HOLD))
            with pytest.raises(Busy):
                await service.submit_call(ALICE, plain("1"))
            await cancelled(last)

    asyncio.run(scenario())


def test_a_new_tenants_first_call_can_come_while_running_calls_are_told(
    outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is in force, and the proxy has not yet answered for all that run."""
    released = asyncio.Event()

    async def scenario() -> None:
        async with serving(tmp_path, networked(outside, {"name": "other"})) as service:
            live = await service.submit_call(OTHER, plain(HOLD))
            await says(live, "running")
            amend = service.executor._amend

            async def slowly(running: Any) -> None:
                await released.wait()
                await amend(running)

            monkeypatch.setattr(service.executor, "_amend", slowly)
            both = networked(outside, {"name": "acme"}, {"name": "other"})
            reloading = asyncio.ensure_future(service.reload(both))
            await until(lambda: service.loaded is both)
            first = await service.submit_call(ALICE, plain("print(1)"))
            assert (await first.result()).stdout == "1\n"
            released.set()
            await reloading
            await cancelled(live)
            await nothing_open(service)

    asyncio.run(scenario())


# --- reloads that are refused


def test_a_reload_that_is_refused_changes_nothing(outside: Outside, tmp_path: Path) -> None:
    """What only a start can do: said with the key, and the policy before is in force in every respect."""
    before = networked(outside, {"name": "acme", "concurrency": 1, "queue": 0})
    other = tmp_path / "other.pem"
    other.write_bytes(outside.ca_file.read_bytes())
    elsewhere = {"modes": ["block-all"], "upstream": {"ca_file": str(other)}}
    refused = {
        "network.upstream": policy({"name": "other"}, network=elsewhere),
        "packages.prepare": networked(outside, {"name": "other"}, packages={"prepare": True}),
        "audit.path": networked(outside, {"name": "other"}, audit={"path": "elsewhere.jsonl"}),
    }

    async def scenario() -> None:
        async with serving(tmp_path, before, audit_log=None) as service:
            live = await asks_when_told(service, ALICE)
            for key, loaded in refused.items():
                with pytest.raises(ReloadRefused, match=f"`{key}`.*\nhint: restart"):
                    await service.reload(loaded)
                assert service.loaded is before
                with pytest.raises(UnknownTenant):
                    await service.submit_call(OTHER, plain("1"))
                with pytest.raises(Busy):
                    await service.submit_call(ALICE, plain("1"))
            assert await told(service, ALICE, live) == "200"
            again = await service.submit_call(ALICE, plain("print(1)"))
            assert (await again.result()).status is Status.SUCCESS
            await nothing_open(service)

    asyncio.run(scenario())


def test_a_reload_whose_retention_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is in use elsewhere, say."""

    def fail(*_: object, **__: object) -> None:
        raise LedgerUnavailable("the ledger is locked")

    async def scenario() -> None:
        before = policy({"name": "acme"})
        async with serving(tmp_path, before) as service:
            with monkeypatch.context() as patch:
                patch.setattr(type(service.executor.ledger), "retain", fail)
                with pytest.raises(ReloadRefused, match="locked"):
                    await service.reload(policy({"name": "other"}))
            assert service.loaded is before
            live = await service.submit_call(ALICE, plain("print(1)"))
            assert (await live.result()).stdout == "1\n"
            await nothing_open(service)

    asyncio.run(scenario())


def test_outside_of_the_executors_statement_there_is_no_reload(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, policy()) as service:
            pass
        with pytest.raises(RuntimeError, match="inside its `async with`"):
            await service.reload(policy())

    asyncio.run(scenario())


# --- many


def test_of_reloads_at_once_one_is_in_force_whole(tmp_path: Path) -> None:
    """The last one that was asked for: its tenants, its limits and its bounds, and nothing of another's."""
    many = [
        policy(
            {"name": f"tenant-{number}", "concurrency": 1, "queue": 0},
            limits={"timeout_seconds": {"default": 1, "max": 10 + number}},
        )
        for number in range(20)
    ]  # fmt: skip

    async def scenario() -> None:
        async with serving(tmp_path, many[0]) as service:
            await asyncio.gather(*(service.reload(loaded) for loaded in many))
            assert service.loaded is many[-1]
            for number in range(20):
                caller = Caller(f"tenant-{number}", "alice")
                if number < 19:
                    with pytest.raises(UnknownTenant):
                        await service.submit_call(caller, plain("1"))
                else:
                    live = await service.submit_call(caller, plain(HOLD, timeout=29))
                    await says(live, "running")
                    with pytest.raises(Busy):
                        await service.submit_call(caller, plain("1"))
                    await cancelled(live)

    asyncio.run(scenario())


def test_200_reloads_under_load_lose_no_call(tmp_path: Path) -> None:
    """Each call has its own answer, no tenant has more at work than it may, and all is given back."""
    loads = [
        policy(
            {"name": "acme", "concurrency": 2, "queue": 100}, {"name": f"comes-and-goes-{number}"},
            limits={"timeout_seconds": {"default": 20, "max": 30 + number}},
        )
        for number in range(2)
    ]  # fmt: skip

    async def scenario() -> None:
        async with serving(tmp_path, loads[0]) as service:
            over = asyncio.Event()
            lost: list[str] = []
            times: list[tuple[float, int]] = []

            async def client(name: int) -> None:
                number = 0
                while not over.is_set():
                    number += 1
                    background = number % 3 == 0
                    live = await service.submit_call(
                        ALICE, plain(f"print('{name} {number}')", timeout=20), background=background
                    )
                    result = await live.result()
                    if result.stdout != f"{name} {number}\n":
                        lost.append(f"{name} {number}: {result}")
                    (attempt,) = result.attempts
                    times.extend([(attempt.started_at, 1), (attempt.ended_at, -1)])

            clients = [asyncio.create_task(client(name)) for name in range(12)]
            for number in range(200):
                await service.reload(loads[number % 2])
                await asyncio.sleep(0.02)
            over.set()
            await asyncio.gather(*clients)
            assert lost == []
            assert len(times) > 100
            at_once = list(itertools.accumulate(change for _, change in sorted(times)))
            assert max(at_once) == 2
            await nothing_open(service)

    asyncio.run(scenario())
