"""How JavaScript programs are run: Node.js, its environment, its mounts. Pure: facts in, values out.

Pid 1 is Python in every sandbox, so that one program is trusted there, whatever the language.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.isolation.plan import GATE, MIB, NODE_COMMANDS, NODE_MODULES, WORKSPACE, LaunchPlan, ReadOnly
from sandbox.runtimes import python
from sandbox.runtimes.environment import environment as common_environment
from sandbox.runtimes.python import Interpreter

RUNTIME = "/opt/node"
EXECUTABLE = f"{RUNTIME}/bin/node"
NPM = f"{RUNTIME}/lib/node_modules/npm/bin/npm-cli.js"
MAIN = f"{WORKSPACE}/main.js"  # of no declared kind, so that Node tells by the code whether it is an ES module
_YOUNG_SHARE = 32  # of the memory limit, for each of V8's three young spaces
# Below it V8 saves memory at the cost of speed, and counts what lies outside its heap. A program that lives on 32 MiB
# and leaves many buffers then peaks lower. Where V8 gets too little processor, it is killed at 128 MiB all the same.
_SMALL_BYTES = 256 * MIB
_SAVING = ("--optimize-for-size", "--external-memory-accounted-in-global-limit")


@dataclass(frozen=True, slots=True)
class Node:
    """Of the host: a directory with `bin/node` in it and `lib/node_modules/npm`."""

    directory: str
    version: str


def options(memory_bytes: int) -> str:
    """What every Node.js of the attempt is told, children too.

    V8 would size its heap by the memory of the machine, and collect too late. The old space may be as large as the
    attempt's whole memory, since the limit on the tree is what ends a program that is too large, as the contract has
    it; a heap limit below it would end it with an abort. Young spaces of V8's usual 16 MiB would be a third of the
    smallest attempt. And no signal opens a debugger.
    """
    limit = memory_bytes // MIB
    young = min(max(limit // _YOUNG_SHARE, 1), 16)
    return f"--max-old-space-size={limit} --max-semi-space-size={young} --disable-sigusr1"


def program(memory_bytes: int) -> tuple[str, ...]:
    """What pid 1 starts. The options are some that Node.js takes from no environment."""
    return (EXECUTABLE, *(_SAVING if memory_bytes < _SMALL_BYTES else ()), GATE)


def environment(*, memory_bytes: int, threads: int = 1) -> dict[str, str]:
    """The environment that every call has, from nothing; a call's own is added in its program's process."""
    return {**common_environment(NODE_COMMANDS, threads=threads), "NODE_OPTIONS": options(memory_bytes)}


def plan(
    node: Node,
    interpreter: Interpreter,
    *,
    call_id: str,
    attempt: int | str,
    memory_bytes: int,
    pids: int = 128,
    call_environment: Mapping[str, str] | None = None,
    packages: str | None = None,
    threads: int = 1,
) -> LaunchPlan:
    """The sandbox of one attempt at a JavaScript call. `interpreter` is pid 1's; `packages` is a tree of modules."""
    return LaunchPlan(
        argv=python.argv(interpreter),
        environment=python.loader_environment(interpreter),
        main=MAIN,
        program=program(memory_bytes),
        start_environment=environment(memory_bytes=memory_bytes, threads=threads),
        read_only=(
            *python.mounts(interpreter),
            ReadOnly(node.directory, RUNTIME),
            *(() if packages is None else (ReadOnly(packages, NODE_MODULES),)),
        ),
        memory_bytes=memory_bytes,
        pids=pids,
        call_environment={
            **(call_environment or {}),
            "SLUICEGATE_CALL_ID": call_id,
            "SLUICEGATE_ATTEMPT": str(attempt),
        },
    )
