"""Sandboxes that wait for their call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from sandbox.isolation.client import KillReason, Launcher
from sandbox.isolation.plan import MIB
from sandbox.isolation.pool import MAX_PLANS, WarmPool
from tests.sandbox.isolation.conftest import Rig, finish, make_plan


@pytest.fixture
def launcher(rig: Rig) -> Iterator[Launcher]:
    launcher = rig.do(rig.start())
    yield launcher
    rig.do(launcher.close())


def sandboxes_of(launcher: Launcher) -> int:
    return sum(child.name() == "bwrap" for child in psutil.Process(launcher.pid).children())


async def settled(pool: WarmPool) -> None:
    while pool._tasks:
        await asyncio.wait(pool._tasks)


def test_the_next_call_takes_a_sandbox_that_was_waiting_and_another_takes_its_place(
    rig: Rig, launcher: Launcher
) -> None:
    async def scenario() -> tuple[list[int], list[str]]:
        pool, counts, outputs = WarmPool(launcher, 1), [], []
        for text in ("one", "two", "three"):
            sandbox = await pool.launch(make_plan(), code=f"print({text!r})".encode())
            await settled(pool)
            counts.append(sandboxes_of(launcher))
            outputs.append((await finish(sandbox)).stdout)
            await sandbox.close()
        await pool.close()
        return counts, outputs

    counts, outputs = rig.do(scenario())
    assert outputs == ["one\n", "two\n", "three\n"]
    assert counts == [2, 2, 2]  # the one in use and the one that waits


def test_what_a_call_gives_reaches_only_its_own_sandbox(rig: Rig, launcher: Launcher) -> None:
    code = b"import os, sys; print(os.environ.get('SECRET'), sys.argv[1:], os.environ['SLUICEGATE_CALL_ID'])"

    async def scenario() -> list[str]:
        pool, outputs = WarmPool(launcher, 1), []
        for changes in (
            {"call_environment": {"SECRET": "first", "SLUICEGATE_CALL_ID": "a"}, "arguments": ("x",)},
            {"call_environment": {"SLUICEGATE_CALL_ID": "b"}, "arguments": ()},
        ):
            sandbox = await pool.launch(make_plan(**changes), code=code)
            await settled(pool)
            outputs.append((await finish(sandbox)).stdout)
            await sandbox.close()
        await pool.close()
        return outputs

    assert rig.do(scenario()) == ["first ['x'] a\n", "None [] b\n"]


def test_a_sandbox_that_waits_is_used_once_only_for_its_own_plan(rig: Rig, launcher: Launcher) -> None:
    """One with another memory limit does not pass for the one that is wanted."""
    code = b"print(len(bytearray(300 << 20)))"

    async def scenario() -> tuple[int | None, KillReason | None, int]:
        pool = WarmPool(launcher, 1)
        small = await pool.launch(make_plan(memory_bytes=128 * MIB), code=b"pass")
        await settled(pool)  # one of 128 MiB waits now
        large = await pool.launch(make_plan(memory_bytes=512 * MIB), code=code)
        outcome = await finish(large)
        for sandbox in (small, large):
            await sandbox.close()
        await pool.close()
        return outcome.ending.exit_code, outcome.ending.killed_by_us, sandboxes_of(launcher)

    assert rig.do(scenario()) == (0, None, 0)


def test_each_of_the_plans_last_asked_for_keeps_its_own_and_an_older_one_loses_it(rig: Rig, launcher: Launcher) -> None:
    """Two languages, or two memory limits, in turn do not cost each other what waits; and there is a bound."""
    plans = [make_plan(memory_bytes=(200 + number) * MIB) for number in range(MAX_PLANS + 1)]

    async def scenario() -> tuple[list[bool], int]:
        pool = WarmPool(launcher, 1)

        async def call(number: int) -> bool:
            """Whether it found one waiting."""
            before = pool.waiting
            sandbox = await pool.launch(plans[number], code=b"pass")
            await sandbox.close()
            await settled(pool)
            return sandbox in before

        for number in range(MAX_PLANS):
            await call(number)
        found = [await call(0), await call(1), await call(MAX_PLANS), await call(0), await call(2)]
        waiting = len(pool.waiting)
        await pool.close()
        return found, waiting

    assert rig.do(scenario()) == ([True, True, False, True, False], MAX_PLANS)
    assert sandboxes_of(launcher) == 0


def test_one_that_died_while_it_waited_is_not_handed_out(rig: Rig, launcher: Launcher) -> None:
    async def scenario() -> str:
        pool = WarmPool(launcher, 1)
        first = await pool.launch(make_plan(), code=b"pass")
        await settled(pool)
        waiting = pool.waiting[0]
        await waiting.kill(KillReason.CANCELLED)
        await waiting.ended()
        second = await pool.launch(make_plan(), code=b"print('fresh')")
        output = (await finish(second)).stdout
        for sandbox in (first, second):
            await sandbox.close()
        await pool.close()
        return output

    assert rig.do(scenario()) == "fresh\n"


def test_nothing_waits_once_the_pool_is_closed_or_where_it_may_not(rig: Rig, launcher: Launcher) -> None:
    async def scenario() -> list[int]:
        counts = []
        for size in (0, 2):
            pool = WarmPool(launcher, size)
            for _ in range(2):
                sandbox = await pool.launch(make_plan(), code=b"pass")
                await sandbox.close()
                await settled(pool)
            counts.append(sandboxes_of(launcher))
            await pool.close()
            counts.append(sandboxes_of(launcher))
        return counts

    assert rig.do(scenario()) == [0, 0, 2, 0]


def test_a_lost_launcher_leaves_nothing_waiting(rig: Rig) -> None:
    launcher = rig.do(rig.start())

    async def scenario() -> bool:
        pool = WarmPool(launcher, 1)
        sandbox = await pool.launch(make_plan(), code=b"pass")
        await settled(pool)
        psutil.Process(launcher.pid).kill()
        await launcher.lost.wait()
        alive = [waiting.alive for waiting in pool.waiting]
        assert alive
        await sandbox.close()
        await pool.close()
        await launcher.close()
        return any(alive)

    assert rig.do(scenario()) is False
