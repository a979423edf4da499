"""An executor in a process of its own: several calls at once, as any user, to be measured and to be killed.

`python -m tests.remote_executor DIRECTORY SETTINGS` runs `DIRECTORY/policy.yaml` and reads a JSON order a line:
`{"n": 1, "call": {...}}`, `{"n": 1, "cancel": true}`, `{"pids": true}`, `{"reload": true}`. It answers with JSON lines: `{"n": 1, "call_id":
...}`, `{"n": 1, "stage": ...}`, `{"n": 1, "out": ...}` for what the program wrote, `{"n": 1, "result": {...}}`. At the end of its input it closes.
Owns: that conversation, and what there is to see of the process from outside.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from sandbox import Executor, Settings
from sandbox.calls import RunningCall
from sandbox.contract import CodeCall, ToolResult
from sandbox.policy_file import load_policy
from tests.lab import descriptors, read_events

_MAX_TOLD_BYTES = 64 * 1024  # of what a program writes, as it comes; the rest is in the result only
PATIENCE = 100.0  # a machine under load may take long for what takes a moment
GONE_SECONDS = 15.0


def until(what: Callable[[], Any], say: str, seconds: float = PATIENCE) -> Any:
    """What is true at last. For what nobody announces: the state of other processes."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {say}"
        time.sleep(0.005)
    return found


class RemoteCall:
    """One call of a remote executor, and what has been heard of it."""

    def __init__(self, executor: RemoteExecutor, number: int) -> None:
        self._executor = executor
        self.number = number
        self.output = ""
        self.stages: list[str] = []
        self.heard_at = 0.0
        self._call_id: str | None = None
        self._result: ToolResult | None = None
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    @property
    def call_id(self) -> str:
        self._hear(lambda: self._call_id is not None)
        assert self._call_id is not None
        return self._call_id

    def says(self, text: str, times: int = 1) -> None:
        """Return once the program has written it, so many times."""
        self._hear(lambda: self.output.count(text) >= times)

    def enters(self, stage: str) -> None:
        """Return once it is at that stage, or was."""
        self._hear(lambda: stage in self.stages)

    def result(self) -> ToolResult:
        self._hear(lambda: self._result is not None)
        assert self._result is not None
        return self._result

    @property
    def answered(self) -> bool:
        """Whether there is a result by now."""
        while not self._messages.empty():
            self._take(self._messages.get())
        return self._result is not None

    def cancel(self) -> None:
        self._executor.order({"n": self.number, "cancel": True})

    def _hear(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self._take(self._messages.get(timeout=PATIENCE))

    def _take(self, message: dict[str, Any]) -> None:
        assert "error" not in message, message["error"]
        self._call_id = message.get("call_id", self._call_id)
        self.output += message.get("out", "")
        self.stages += [message["stage"]] if "stage" in message else []
        if "result" in message:
            self._result = ToolResult.model_validate(message["result"])
            self.heard_at = message["heard_at"]


class RemoteExecutor:
    """The test's side of it. `lost` are the calls that an executor before it left open."""

    def __init__(self, root: Path, prefix: Sequence[str] = (), **settings: Any) -> None:
        self.root = root
        temporary = root / "tmp"
        temporary.mkdir(exist_ok=True)
        temporary.chmod(0o777)
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.remote_executor", str(root), json.dumps(settings)],
            cwd=Path(__file__).parent.parent, env={**os.environ, "HOME": str(root), "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._numbers = itertools.count(1)
        self._calls: dict[int, RemoteCall] = {}
        self._general: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.lost: list[str] = self._general.get(timeout=PATIENCE)["lost"]

    def start(self, code: str, **fields: Any) -> RemoteCall:
        call = RemoteCall(self, next(self._numbers))
        self._calls[call.number] = call
        self.order({"n": call.number, "call": {"language": "python", "code": code, **fields}})
        return call

    def run(self, code: str, **fields: Any) -> ToolResult:
        return self.start(code, **fields).result()

    def order(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def launcher(self) -> psutil.Process:
        return psutil.Process(self._pids()[0])

    @property
    def proxy(self) -> psutil.Process:
        return psutil.Process(self._pids()[1])

    def _pids(self) -> list[int]:
        self.order({"pids": True})
        pids: list[int] = self._general.get(timeout=PATIENCE)["pids"]
        return pids

    def events(self) -> list[dict[str, Any]]:
        """All lines of its audit log."""
        return read_events(self.root / "audit.jsonl")

    def reload(self, policy: str) -> None:
        """Put another policy in force, given as text. It is when this returns."""
        (self.root / "policy.yaml").write_text(policy)
        self.order({"reload": True})
        assert self._general.get(timeout=PATIENCE) == {"reloaded": True}

    def kill(self) -> list[psutil.Process]:
        """SIGKILL. What it had started by then."""
        started = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        self._process.wait(PATIENCE)
        return started

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(PATIENCE)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            call = self._calls[message["n"]] if "n" in message else None
            (self._general if call is None else call._messages).put(message)


@dataclass(frozen=True)
class Remains:
    """What there is of an executor, seen from outside, apart from what always is."""

    processes: int
    groups: int
    mounts: int
    files: int
    descriptors: tuple[int, ...]
    shared_memory_mib: int = field(compare=False)

    @classmethod
    def of(cls, executor: RemoteExecutor) -> Remains:
        launcher, proxy = executor.launcher, executor.proxy
        pids = (executor.pid, launcher.pid, proxy.pid)
        return cls(
            processes=len(launcher.children(recursive=True)),
            groups=len(list(groups(launcher.pid))),
            mounts=sum(Path(f"/proc/{pid}/mounts").read_text().count("\n") for pid in pids),
            files=sum(
                1 for path in executor.root.rglob("*") if path.name != "audit.jsonl" and "calls" not in path.parts
            ),
            descriptors=tuple(descriptors(pid) for pid in pids),
            shared_memory_mib=shared_memory_mib(),
        )


def groups(launcher_pid: int) -> Iterator[Path]:
    """The control groups of a launcher's sandboxes."""
    for top in Path("/sys/fs/cgroup").glob(f"**/sluicegate-{launcher_pid}-*"):
        yield from (path for path in top.iterdir() if path.is_dir() and path.name.isdigit())


def shared_memory_mib() -> int:
    """What all tmpfs of the machine hold."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) // 1024


def wait_for_nothing_left(executor: RemoteExecutor, before: Remains) -> None:
    """Return once there is no more of it than there was before."""
    deadline = time.monotonic() + GONE_SECONDS
    while not _no_more(now := Remains.of(executor), before):
        assert time.monotonic() < deadline, f"left behind: {now}, where there was {before}"
        time.sleep(0.05)


def _no_more(now: Remains, before: Remains) -> bool:
    return (
        now.processes <= before.processes
        and now.groups <= before.groups
        and now.mounts <= before.mounts
        and now.files <= before.files
        and all(one <= other + 1 for one, other in zip(now.descriptors, before.descriptors, strict=True))
        and now.shared_memory_mib < before.shared_memory_mib + 100  # other tests fill theirs meanwhile
    )


async def _serve(root: Path, settings: dict[str, Any]) -> None:
    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    chosen = Settings(state_dir=root / "state", audit_log=root / "audit.jsonl", **settings)
    async with Executor(root / "policy.yaml", settings=chosen) as executor:
        say({"lost": [entry.call_id for entry in executor.lost]})
        running: dict[int, RunningCall] = {}
        telling: set[asyncio.Task[None]] = set()

        async def tell(number: int, fields: dict[str, Any]) -> None:
            told = 0

            def sink(data: bytes) -> None:
                nonlocal told
                if told < _MAX_TOLD_BYTES:
                    say({"n": number, "out": data.decode(errors="replace")})
                told += len(data)

            try:
                handle = executor.submit(CodeCall(**fields), sink)
                running[number] = handle
                handle.on_stage = lambda stage: say({"n": number, "stage": stage})
                say({"n": number, "call_id": handle.call_id})
                result = await handle.result()
                say({"n": number, "heard_at": time.time(), "result": result.model_dump(mode="json")})
            except Exception as error:  # noqa: BLE001 - the test is told, wherever it waits
                say({"n": number, "error": repr(error)})

        while line := await reader.readline():
            order = json.loads(line)
            if "pids" in order:
                say({"pids": [executor.launcher_pid, executor.proxy_pid]})
            elif "reload" in order:
                await executor.reload(load_policy(root / "policy.yaml"))
                say({"reloaded": True})
            elif "cancel" in order:
                running[order["n"]].cancel()
            else:
                task = asyncio.create_task(tell(order["n"], order["call"]))
                telling.add(task)
                task.add_done_callback(telling.discard)
        if telling:
            for call in running.values():
                executor.cancel(call.call_id)
            await asyncio.wait(telling)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
