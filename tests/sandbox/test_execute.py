"""The executor as a library: what it may be asked, and when."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox import CodeCall, Executor, Settings, SyncExecutor
from sandbox.policy_file import parse_policy

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
