"""A runtime other than Python is started before its call, waits at its gate, and is then the program."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox.isolation.client import Ending, Launcher, Sandbox
from sandbox.isolation.plan import GATE, LaunchPlan
from tests.sandbox.isolation.conftest import PATIENCE_SECONDS, Outcome, Rig, finish, make_js_plan


def run(rig: Rig, code: str, **changes: Any) -> Outcome:
    async def scenario() -> Outcome:
        sandbox = await rig.launcher.launch(make_js_plan(**changes), code=code.encode())
        try:
            return await finish(sandbox)
        finally:
            await sandbox.close()

    return rig.do(scenario())


def runtimes(launcher: Launcher) -> list[psutil.Process]:
    """Those that are Node.js, however it calls its main thread."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            if GATE in process.cmdline() and process.exe().endswith("/node"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def started(launcher: Launcher) -> psutil.Process:
    """The runtime of the one sandbox that waits."""
    async with asyncio.timeout(PATIENCE_SECONDS / 2):
        while not (found := runtimes(launcher)):  # noqa: ASYNC110 - nothing tells of another's child
            await asyncio.sleep(0.005)
    return found[0]


def test_it_runs_before_there_is_a_call_under_every_limit(rig: Rig) -> None:
    """It is in the group of pid 1, and has its limits and its filter; then it is the program, as the same process."""

    async def scenario() -> tuple[dict[str, Any], Outcome]:
        sandbox = await rig.launcher.prepare(make_js_plan())
        try:
            node = await started(rig.launcher)
            parent = node.parent()
            assert parent is not None
            seen = {
                what: [Path(f"/proc/{pid}/{what}").read_text() for pid in (node.pid, parent.pid)]
                for what in ("cgroup", "limits")
            }
            seen["seccomp"] = [
                line
                for line in Path(f"/proc/{node.pid}/status").read_text().splitlines()
                if line.startswith("Seccomp:")
            ]
            sandbox.load(make_js_plan(), b"console.log(process.uptime() > 0.05 || process.uptime())")
            return seen, await finish(sandbox)
        finally:
            await sandbox.close()

    seen, outcome = rig.do(scenario())
    for what in ("cgroup", "limits"):
        assert seen[what][0] == seen[what][1]
    assert seen["seccomp"] == ["Seccomp:\t2"]
    assert outcome.ending.exit_code == 0


def test_what_a_call_gives_reaches_the_program_whole(rig: Rig) -> None:
    """Arguments, and an environment that is larger than any pipe."""
    environment = {f"LARGE_{number}": f"{number}=😀\n" * 8_000 for number in range(50)} | {"EMPTY": ""}
    code = """
const sizes = Object.entries(process.env).filter(([name]) => name.startsWith('LARGE_')).map(([name, value]) => value.length);
console.log(JSON.stringify([process.argv.slice(2), process.env.EMPTY, sizes.length, sizes[0], process.env.LARGE_7.slice(-5)]));
"""
    outcome = run(rig, code, arguments=("--help", "", "a b", "é"), call_environment=environment)
    assert json.loads(outcome.stdout) == [["--help", "", "a b", "é"], "", 50, 8_000 * 5, "7=😀\n"]


@pytest.mark.parametrize("program", [("/opt/node/bin/none",), ("/bin/false",), ("/bin/sh", "-c", "kill -9 $$")])
def test_one_that_cannot_start_is_our_failure(rig: Rig, program: tuple[str, ...]) -> None:
    """It names what did not start; the call's program never ran."""
    ending = run(rig, "console.log(1)", program=program).ending
    assert (ending.exit_code, ending.signal, ending.released) == (None, None, False)
    assert f"`{program[0]}` did not start" in (ending.failure or "")


def test_one_that_was_killed_while_it_waited_is_our_failure(rig: Rig) -> None:
    """As a host that is short of memory may do."""

    async def scenario() -> Ending:
        sandbox = await rig.launcher.launch(make_js_plan(), code=b"console.log(1)")
        try:
            (await started(rig.launcher)).kill()
            return (await finish(sandbox)).ending
        finally:
            await sandbox.close()

    ending = rig.do(scenario())
    assert (ending.exit_code, ending.signal) in ((None, None), (None, 9))
    assert ending.failure is None or "did not start" in ending.failure


def test_nothing_is_left_of_a_sandbox_that_waited_when_the_launcher_is_killed(rig: Rig) -> None:
    """The runtime ends with its pid 1."""

    async def scenario() -> list[psutil.Process]:
        async with rig.another() as launcher:
            sandbox: Sandbox = await launcher.prepare(make_js_plan())
            await started(launcher)
            below = psutil.Process(launcher.pid).children(recursive=True)
            psutil.Process(launcher.pid).kill()
            await sandbox.ended()
            await sandbox.close()
            return below

    below = rig.do(scenario())
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []


def test_a_plan_with_a_runtime_survives_its_message() -> None:
    """What the launcher gets is what was planned."""
    from sandbox.isolation.plan import plan_from_message, without_call

    plan: LaunchPlan = make_js_plan()
    assert plan_from_message(json.loads(json.dumps(plan.as_message()))) == plan
    assert without_call(plan).program == plan.program
    assert "SLUICEGATE_CALL_ID" not in without_call(plan).start_environment
