"""MCP: the official client, over HTTP to a service with a tenant for ordinary users, over stdio for a single user."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
import psutil
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.contract.code_exec.driver import TENANT, Answer, Driver, Pending, Refused, Task, Who
from tests.contract.code_exec.library import TOP
from tests.contract.code_exec.over_http import Server
from tests.remote_executor import PATIENCE
from tests.servers import Loop

TOKEN, ADMIN_TOKEN = "sgt_" + "t" * 43, "sgt_" + "a" * 43


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = [
    {
        "name": TENANT,
        "tokens": [
            {"name": "host", "sha256": _digest(TOKEN)},
            {"name": "operator", "sha256": _digest(ADMIN_TOKEN), "admin": True},
        ],
    }
]


type MakeHttpClient = Callable[[Mapping[str, str]], httpx2.AsyncClient]
type Connect = Callable[[MakeHttpClient], Any]


class McpDriver(Driver):
    can_send_infinity = False  # the client sends `null` for it

    def __init__(self, root: Path, prefix: Sequence[str] = ()) -> None:
        super().__init__(root, prefix)
        self._loop = Loop()
        self._sessions: dict[Who, _Session] = {}
        self._server: Server | None = None
        self._address = ""

    @property
    def user_data(self) -> Path:
        return self.root / "state" / "tenants" / TENANT / "user_data"

    def start(self) -> None:
        """Nothing is started before it is needed: few tests need both."""

    def close(self) -> None:
        for who in list(self._sessions):
            self.forget(who)
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None
        for session in self._sessions.values():
            session.kill()
        for who in list(self._sessions):
            self.forget(who)

    def end(self) -> None:
        self._loop.close()

    def forget(self, who: Who) -> None:
        session = self._sessions.pop(who, None)
        if session is not None:
            session.close()

    def begin(self, who: Who, arguments: Mapping[str, Any]) -> Pending:
        session = self._session(who)

        async def call() -> Answer:
            structured, text = await session.call("code_exec", arguments)
            answer = Answer.of(structured, f"{structured} {text}")
            assert answer.output in text, "the text has not what the fields have"
            assert all(note["task_id"] in text for note in answer.notes), "a note is not in the text"
            return answer

        return Pending(asyncio.run_coroutine_threadsafe(call(), self._loop.loop))

    def list_tasks(self, who: Who) -> list[Task]:
        return [Task.of(one) for one in self._tasks(who, operation="list")["tasks"]]

    def show_task(self, who: Who, task_id: str) -> Task:
        return self._task(who, operation="show", task_id=task_id)

    def wait_for_task(self, who: Who, task_id: str, seconds: float) -> Task:
        return self._task(who, operation="wait", task_id=task_id, timeout=seconds)

    def cancel_task(self, who: Who, task_id: str) -> Task:
        return self._task(who, operation="cancel", task_id=task_id)

    def take_notes(self, who: Who) -> list[Mapping[str, Any]]:
        notes: list[Mapping[str, Any]] = self._tasks(who, operation="notes")["notes"]
        return notes

    def state(self, who: Who, call_id: str) -> str:
        return str(self._ask(who, "read_output", call_id=call_id, stream="stdout")["output"]["state"])

    def written(self, who: Who, call_id: str, stream: str) -> str:
        text = ""
        offset: int | None = 0
        while offset is not None:
            part = self._ask(who, "read_output", call_id=call_id, stream=stream, offset=offset)["output"]
            text, offset = text + part["text"], part["next_offset"]
        return text

    def parameters(self) -> dict[str, Any]:
        session = self._session(Who("reader"))
        tools = self._loop.call(session.client.list_tools()).tools
        (tool,) = (tool for tool in tools if tool.name == "code_exec")
        schema: dict[str, Any] = tool.input_schema
        return schema

    def _tasks(self, who: Who, **arguments: Any) -> dict[str, Any]:
        return self._ask(who, "tasks", **arguments)

    def _task(self, who: Who, **arguments: Any) -> Task:
        said = self._tasks(who, **arguments)
        return Task.of(said["task"], notes=said.get("notes", []))

    def _ask(self, who: Who, tool: str, **arguments: Any) -> dict[str, Any]:
        return self._loop.call(self._session(who).call(tool, arguments))[0]

    def _session(self, who: Who) -> _Session:
        if who not in self._sessions:
            self._sessions[who] = _Session(self._loop, self._connect(who))
        return self._sessions[who]

    def _connect(self, who: Who) -> Connect:
        if not who.user:
            return lambda _: stdio_client(
                StdioServerParameters(
                    command=[*self.prefix, sys.executable][0],
                    args=[
                        *[*self.prefix, sys.executable][1:], "-m", "sandbox.cli", "mcp",
                        "--policy", str(self.root / "single-user.yaml"), "--working-dir", str(self.client_directory),
                    ],
                    env=self.environment("single-user-state"), cwd=TOP,
                )
            )  # fmt: skip
        if self._server is None:
            self._server = Server(self, "--host", "127.0.0.1", "--port", "0")
            found = re.search(r":(\d+)", self._server.said)
            assert found, self._server.said
            self._address = f"http://127.0.0.1:{found[1]}/mcp"
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN if who.admin else TOKEN}", "Sluicegate-User": who.user}
        if who.tells_directory:
            headers["Sluicegate-Working-Directory"] = str(self.client_directory)
        return lambda http_client: streamable_http_client(self._address, http_client=http_client(headers))


class _Session:
    """One client, held open by a task of its own: it must be left in the task that entered it."""

    def __init__(self, loop: Loop, connect: Connect) -> None:
        self._loop = loop
        self._connect = connect
        before = {child.pid for child in psutil.Process().children()}
        opened: Future[Client] = Future()
        self._closing = asyncio.Event()
        self._held = asyncio.run_coroutine_threadsafe(self._hold(opened), loop.loop)
        self.client = opened.result(PATIENCE)
        self._processes = [child for child in psutil.Process().children() if child.pid not in before]

    async def _hold(self, opened: Future[Client]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                clients: list[httpx2.AsyncClient] = []

                def http_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
                    clients.append(httpx2.AsyncClient(headers=dict(headers), timeout=PATIENCE, trust_env=False))
                    return clients[0]

                transport = self._connect(http_client)
                for one in clients:
                    await stack.enter_async_context(one)
                opened.set_result(await stack.enter_async_context(Client(transport, read_timeout_seconds=PATIENCE)))
                await self._closing.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Structured content and text of a tool's result."""
        result = await self.client.call_tool(tool, dict(arguments))
        text = "".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise Refused(text)
        assert result.structured_content is not None
        return result.structured_content, text

    def kill(self) -> None:
        """SIGKILL for the process at the other end of the pipes, where that is ours."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._closing.set)
        try:
            self._held.result(PATIENCE)
        except (OSError, ExceptionGroup, httpx2.HTTPError):
            pass  # the other end was killed
