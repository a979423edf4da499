"""The executor as a library: what it may be asked, and when."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy.control import Proxy, ProxyUnavailable
from sandbox import CodeCall, Executor, Settings, SyncExecutor, ToolResult, results
from sandbox.contract import Cause
from sandbox.policy_file import parse_policy
from sandbox.state import InvalidSettings

POLICY = parse_policy("version: 1\nname: plain\n")
CALL = CodeCall(language="python", code="print(1)")


def test_a_call_outside_of_the_executors_statement_starts_nothing(tmp_path: Path) -> None:
    executor = Executor(POLICY, settings=Settings(state_dir=tmp_path))

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="inside its `async with`"):
            await executor.run(CALL)
        async with executor:
            assert (await executor.run(CALL)).stdout == "1\n"
        with pytest.raises(RuntimeError, match="inside its `async with`"):
            await executor.run(CALL)
        assert (executor.proxy_pid, executor.launcher_pid) == (None, None)

    asyncio.run(scenario())


def test_threads_may_share_a_synchronous_executor(tmp_path: Path) -> None:
    with SyncExecutor(POLICY, settings=Settings(state_dir=tmp_path)) as executor, ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda n: executor.run(CodeCall(language="python", code=f"print({n})")).stdout, range(8))
        )
    assert results == [f"{n}\n" for n in range(8)]


def test_a_sink_that_fails_costs_nobody_the_answer(tmp_path: Path) -> None:
    """The call ends as it would without; its key has the answer, for the next one too."""

    def sink(_data: bytes) -> None:
        raise ValueError("the listener has gone")

    call = CodeCall(language="python", code="print(1)", idempotency_key="key")

    async def scenario() -> list[str]:
        async with Executor(POLICY, settings=Settings(state_dir=tmp_path)) as executor:
            return [(await executor.run(call, sink)).stdout, (await executor.run(call)).stdout]

    assert asyncio.run(scenario()) == ["1\n", "1\n"]


def test_a_call_whose_end_cannot_be_told_is_lost_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of this side's after the code of a call with a key has run: raised to who waits; the key says `lost`."""
    call = CodeCall(language="python", code="print(1)", idempotency_key="key")

    def fail(*_: object) -> None:
        raise MemoryError("a fault of this side's")

    async def scenario() -> ToolResult:
        async with Executor(POLICY, settings=Settings(state_dir=tmp_path)) as executor:
            with monkeypatch.context() as patch:
                patch.setattr(results, "conclude", fail)
                with pytest.raises(MemoryError):
                    await executor.run(call)
            async with asyncio.timeout(60):
                return await executor.run(call)

    result = asyncio.run(scenario())
    assert result.error is not None
    assert (result.error.code, result.attempts) == ("executor_lost", [])


def test_a_sink_that_would_have_to_be_awaited_is_refused(tmp_path: Path) -> None:
    async def sink(_data: bytes) -> None:
        pytest.fail("it was called")

    async def scenario() -> None:
        async with Executor(POLICY, settings=Settings(state_dir=tmp_path)) as executor:
            with pytest.raises(TypeError, match="plain function"):
                executor.submit(CALL, sink)  # type: ignore[arg-type]  # that is the point

    asyncio.run(scenario())


def test_a_synchronous_executor_gives_a_handle_that_cancels(tmp_path: Path) -> None:
    """At once, with the call's id; waiting has a limit of its own."""
    endless = CodeCall(language="python", code="import time\nprint(1)\ntime.sleep(100)")
    with SyncExecutor(POLICY, settings=Settings(state_dir=tmp_path)) as executor:
        seen = threading.Event()
        running = executor.submit(endless, stdout_sink=lambda _: seen.set())
        assert seen.wait(60)
        with pytest.raises(TimeoutError):
            running.result(timeout=0.01)
        running.cancel()
        result = running.result(60)
    assert (result.call_id, result.cause, result.stdout) == (running.call_id, Cause.CANCELLED, "1\n")


@pytest.mark.parametrize(
    "wrong",
    [{"max_concurrency": 0}, {"max_waiting": -1}, {"threads": True}, {"warm_sandboxes": 1.5}, {"state_dir": "x"}],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidSettings, match=f"`{name}` is"):
        Settings(**wrong)


def test_a_sink_may_cancel_its_call_and_may_not_wait_for_another(tmp_path: Path) -> None:
    """It runs in the executor's own thread."""
    with SyncExecutor(POLICY, settings=Settings(state_dir=tmp_path)) as executor:
        errors: list[Exception] = []

        def sink(data: bytes) -> None:
            try:
                executor.run(CALL)
            except RuntimeError as error:
                errors.append(error)
            executor.cancel(data.decode().strip())

        code = "import os, time\nprint(os.environ['SLUICEGATE_CALL_ID'])\ntime.sleep(100)"
        result = executor.run(CodeCall(language="python", code=code), stdout_sink=sink)
    assert result.cause == Cause.CANCELLED
    assert "own thread" in str(errors[0])


def test_two_executors_of_one_process_share_a_ledger_that_others_can_read(tmp_path: Path) -> None:
    """To open a database's file and close it again would drop the locks of all who have it open in this process."""
    key = CodeCall(language="python", code="import time; print(time.time_ns())", idempotency_key="key")
    look = [sys.executable, "-m", "sandbox.cli", "calls", "--json"]

    async def scenario() -> tuple[str, str]:
        async with (
            Executor(POLICY, settings=Settings(state_dir=tmp_path)) as first,
            Executor(POLICY, settings=Settings(state_dir=tmp_path)) as second,
        ):
            environment = {**os.environ, "SLUICEGATE_STATE_DIR": str(tmp_path)}
            await asyncio.to_thread(subprocess.run, look, env=environment, check=True, capture_output=True)
            answers = (await first.run(key)).stdout, (await second.run(key)).stdout
            done = await asyncio.to_thread(subprocess.run, look, env=environment, check=True, capture_output=True)
            assert json.loads(done.stdout)["result"]["stdout"] == answers[0]
            return answers

    first, second = asyncio.run(scenario())
    assert first == second


def test_an_answer_whose_code_cannot_have_begun_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that the proxy did not take leaves its key to be used again."""
    call = CodeCall(language="python", code="print(1)", idempotency_key="key")

    async def refuse(*_: object) -> None:
        raise ProxyUnavailable("not now")

    async def scenario() -> tuple[ToolResult, ToolResult]:
        async with Executor(POLICY, settings=Settings(state_dir=tmp_path)) as executor:
            with monkeypatch.context() as patch:
                patch.setattr(Proxy, "attach", refuse)
                refused = await executor.run(call)
            return refused, await executor.run(call)

    refused, answered = asyncio.run(scenario())
    assert [attempt.code for attempt in refused.attempts] == ["proxy_unavailable"] * 2
    assert answered.stdout == "1\n"
