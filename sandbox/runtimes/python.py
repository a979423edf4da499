"""How Python programs are run: interpreter, environment, mounts. Pure: facts in, values out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.isolation.plan import INIT, PYTHON_COMMANDS, WORKSPACE, LaunchPlan, ReadOnly
from sandbox.runtimes.environment import environment as common_environment

RUNTIME = "/opt/python"
MAIN = f"{WORKSPACE}/main.py"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Of the host: where it is installed, its version, and whether its library is a shared object beside it."""

    base_prefix: str
    version: tuple[int, int]
    shared: bool = False

    @property
    def in_usr(self) -> bool:
        return self.base_prefix == "/usr" or self.base_prefix.startswith("/usr/")

    @property
    def prefix(self) -> str:
        """Where it stands in the sandbox."""
        return self.base_prefix if self.in_usr else RUNTIME

    @property
    def executable(self) -> str:
        major, minor = self.version
        return f"{self.prefix}/bin/python{major}.{minor}"


def mounts(interpreter: Interpreter) -> tuple[ReadOnly, ...]:
    """/usr is mounted in any case. Another prefix gets a fixed place, so that no path of the host is in messages."""
    return () if interpreter.in_usr else (ReadOnly(interpreter.base_prefix, RUNTIME),)


def argv(interpreter: Interpreter) -> tuple[str, ...]:
    """Isolated, no site-packages of the host's interpreter, no bytecode written, output unbuffered.

    Unbuffered, so that what was printed before a kill is not lost.
    """
    return (interpreter.executable, "-I", "-S", "-B", "-u", INIT)


def loader_environment(interpreter: Interpreter) -> dict[str, str]:
    """What its executable needs to find its library: the run path that it may have is that of the host."""
    if interpreter.shared and not interpreter.in_usr:
        return {"LD_LIBRARY_PATH": f"{interpreter.prefix}/lib"}
    return {}


def environment(interpreter: Interpreter, *, threads: int = 1) -> dict[str, str]:
    """The environment that every call has, from nothing; a call's own is added in its program's process."""
    common = common_environment(PYTHON_COMMANDS, f"{interpreter.prefix}/bin", threads=threads)
    return {**common, **loader_environment(interpreter)}


def plan(
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
    """The sandbox of one attempt at a Python call."""
    return LaunchPlan(
        argv=argv(interpreter),
        environment=environment(interpreter, threads=threads),
        main=MAIN,
        read_only=mounts(interpreter),
        memory_bytes=memory_bytes,
        pids=pids,
        call_environment={
            **(call_environment or {}),
            "SLUICEGATE_CALL_ID": call_id,
            "SLUICEGATE_ATTEMPT": str(attempt),
        },
        packages=packages,
    )
