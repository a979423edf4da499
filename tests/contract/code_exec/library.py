"""The library: `Service` in a process that can be killed, which takes orders as JSON lines.

`python -m tests.contract.code_exec.library DIRECTORY` serves; `LibraryDriver` is the test's side of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandbox import Executor, Settings
from sandbox.code_exec import code_exec_schema, parse_code_exec
from sandbox.contract import InvalidCall
from sandbox.owners import DEFAULT_USER, Caller
from sandbox.service.live import LiveCall
from sandbox.service.model import CallRecord, ServiceError
from sandbox.service.service import Service
from tests.contract.code_exec.driver import Answer, Driver, Pending, Refused, Task, Who
from tests.remote_executor import PATIENCE

TOP = Path(__file__).parents[3]


class LibraryDriver(Driver):
    """Speaks to a process that does no more than call the library."""

    def __init__(self, root: Path, prefix: Sequence[str] = ()) -> None:
        super().__init__(root, prefix)
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "tests.contract.code_exec.library", str(self.root)],
            cwd=TOP, env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self._ask("ready")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._gone()

    def kill(self) -> None:
        self._process.kill()
        self._gone()

    def _gone(self) -> None:
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(PATIENCE)
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):
                    stream.close()

    def forget(self, who: Who) -> None:
        """There are no connections."""

    def begin(self, who: Who, arguments: Mapping[str, Any]) -> Pending:
        number, future = self._order("code_exec", who, arguments=dict(arguments))
        return _PendingOrder(self, number, future)

    def list_tasks(self, who: Who) -> list[Task]:
        return [Task.of(one) for one in self._ask("list", who)["calls"]]

    def show_task(self, who: Who, task_id: str) -> Task:
        return Task.of(self._ask("record", who, call_id=task_id))

    def wait_for_task(self, who: Who, task_id: str, seconds: float) -> Task:
        return Task.of(self._ask("wait", who, call_id=task_id, seconds=seconds))

    def cancel_task(self, who: Who, task_id: str) -> Task:
        return Task.of(self._ask("cancel", who, call_id=task_id))

    def take_notes(self, who: Who) -> list[Mapping[str, Any]]:
        notes: list[Mapping[str, Any]] = self._ask("notes", who)
        return notes

    def state(self, who: Who, call_id: str) -> str:
        return str(self._ask("record", who, call_id=call_id)["state"])

    def written(self, who: Who, call_id: str, stream: str) -> str:
        text = ""
        offset: int | None = 0
        while offset is not None:
            part = self._ask("output", who, call_id=call_id, stream=stream, offset=offset)
            text, offset = text + part["text"], part["next_offset"]
        return text

    def parameters(self) -> dict[str, Any]:
        return code_exec_schema()

    def _ask(self, kind: str, who: Who | None = None, **fields: Any) -> Any:
        return self._order(kind, who, **fields)[1].result(PATIENCE)

    def _order(self, kind: str, who: Who | None = None, **fields: Any) -> tuple[int, Future[Any]]:
        number = next(self._numbers)
        self._open[number] = future = Future[Any]()
        self.say({"n": number, "kind": kind, "who": who and asdict(who), **fields})
        return number, future

    def say(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            future = self._open.pop(message["n"])
            if "refused" in message:
                future.set_exception(Refused(message["refused"]))
            elif "broken" in message:
                future.set_exception(AssertionError(message["broken"]))
            else:
                answer = message["answer"]
                future.set_result(Answer.of(answer) if message["kind"] == "code_exec" else answer)
        while self._open:
            self._open.popitem()[1].set_exception(ConnectionError("the process has ended"))


class _PendingOrder(Pending):
    def __init__(self, driver: LibraryDriver, number: int, future: Future[Any]) -> None:
        super().__init__(future)
        self._driver = driver
        self._number = number

    def leave(self) -> None:
        self._driver.say({"leave": self._number})


async def serve(root: Path) -> None:
    """Answer orders until their end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    settings = Settings(state_dir=root / "state", audit_log=root / "audit.jsonl")
    async with (
        Executor(root / "policy.yaml", settings=settings) as executor,
        Service(executor) as service,
    ):
        desk = _Desk(service, root / "projects" / "client")
        working: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            order = json.loads(line)
            if "leave" in order:
                desk.leave(order["leave"])
                continue
            task = asyncio.create_task(desk.answer(order))
            working.add(task)
            task.add_done_callback(working.discard)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


class _Desk:
    """Does what an order says, by the library."""

    def __init__(self, service: Service, client_directory: Path) -> None:
        self._service = service
        self._client_directory = client_directory
        self._live: dict[int, tuple[LiveCall, asyncio.Task[Any]]] = {}

    def leave(self, number: int) -> None:
        """End a call that nobody waits for any more."""
        if number in self._live:
            call, waiting = self._live[number]
            call.cancel()
            waiting.cancel()

    async def answer(self, order: dict[str, Any]) -> None:
        try:
            said = {"answer": await self._do(order)}
        except (InvalidCall, ServiceError) as error:
            said = {"refused": f"{error.code}: {error}"}
        except asyncio.CancelledError:
            said = {"refused": "given up"}
        except Exception as error:  # noqa: BLE001 - the test is told, wherever it waits
            said = {"broken": repr(error)}
        print(json.dumps({"n": order["n"], "kind": order["kind"], **said}), flush=True)

    async def _do(self, order: dict[str, Any]) -> Any:
        if order["kind"] == "ready":
            return True
        caller = self._caller(Who(**order["who"]))
        if order["kind"] == "code_exec":
            return await self._code_exec(caller, order)
        if order["kind"] == "notes":
            return [note.model_dump(mode="json") for note in await self._service.take_notes(caller)]
        asked: Mapping[str, Callable[[], Awaitable[Any]]] = {
            "list": lambda: self._service.calls(caller, background=True),
            "record": lambda: self._service.record(caller, order["call_id"]),
            "wait": lambda: self._service.wait(caller, order["call_id"], order["seconds"]),
            "cancel": lambda: self._service.cancel(caller, order["call_id"]),
            "output": lambda: self._service.output(caller, order["call_id"], order["stream"], order["offset"]),
        }
        view = await asked[order["kind"]]()
        assert isinstance(view, CallRecord) or order["kind"] in ("list", "output")
        return view.model_dump(mode="json")

    async def _code_exec(self, caller: Caller, order: dict[str, Any]) -> Any:
        call = parse_code_exec(order["arguments"])
        live = await self._service.submit_code_exec(caller, call)
        if call.background:
            return (await live.code_exec_accepted()).model_dump(mode="json")
        waiting = asyncio.current_task()
        assert waiting is not None
        self._live[order["n"]] = (live, waiting)
        try:
            return (await live.code_exec_result()).model_dump(mode="json")
        finally:
            del self._live[order["n"]]

    def _caller(self, who: Who) -> Caller:
        directory = self._client_directory if who.tells_directory else None
        return Caller(user=who.user or DEFAULT_USER, admin=not who.ordinary, directory=directory)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
