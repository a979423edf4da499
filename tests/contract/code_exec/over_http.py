"""HTTP: `sluicegate serve` on a unix socket, and httpx."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.contract.code_exec.driver import Answer, Driver, Pending, Refused, Task, Who, wire
from tests.contract.code_exec.library import TOP
from tests.remote_executor import PATIENCE
from tests.servers import Loop
from tests.unprivileged import GID, UID


class Server:
    """One `sluicegate serve` of a driver's, from its first word to its end."""

    def __init__(self, driver: Driver, *options: str) -> None:
        log = driver.root / "serve.log"
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    *driver.prefix, sys.executable, "-m", "sandbox.cli", "serve",
                    "--policy", str(driver.root / "policy.yaml"), "--drain-seconds", "1", *options,
                ],
                cwd=TOP, env=driver.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        if "listening on" not in self.said:
            self.kill()
            raise AssertionError(f"{self.said!r}, {log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


class HttpDriver(Driver):
    def __init__(self, root: Path, prefix: Sequence[str] = ()) -> None:
        super().__init__(root, prefix)
        self._socket = root / "run" / "service.sock"
        self._loop = Loop()
        self._clients: dict[Who, httpx.AsyncClient] = {}

    def start(self) -> None:
        self._socket.parent.mkdir(mode=0o700, exist_ok=True)
        if self.prefix:
            os.chown(self._socket.parent, UID, GID)
        self._server = Server(self, "--uds", str(self._socket))

    def _client(self, who: Who) -> httpx.AsyncClient:
        if who not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(self._socket))
            self._clients[who] = httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=PATIENCE, headers=self._headers(who)
            )
        return self._clients[who]

    def _headers(self, who: Who) -> dict[str, str]:
        """Without tenants, an admin is who comes without a user's name."""
        headers = {"Sluicegate-User": who.user} if who.ordinary else {}
        return headers | ({"Sluicegate-Working-Directory": str(self.client_directory)} if who.tells_directory else {})

    def close(self) -> None:
        self._forget_all()
        self._server.stop()

    def kill(self) -> None:
        self._server.kill()
        self._forget_all()

    def _forget_all(self) -> None:
        for who in list(self._clients):
            self.forget(who)

    def end(self) -> None:
        self._loop.close()

    def forget(self, who: Who) -> None:
        client = self._clients.pop(who, None)
        if client is not None:
            self._loop.call(client.aclose())

    def begin(self, who: Who, arguments: Mapping[str, Any]) -> Pending:
        async def post() -> Answer:
            said = await self._send(who, "POST", "/v1/code_exec", content=wire(arguments))
            return Answer.of(said)

        return Pending(asyncio.run_coroutine_threadsafe(post(), self._loop.loop))

    def list_tasks(self, who: Who) -> list[Task]:
        return [Task.of(one) for one in self._ask(who, "GET", "/v1/tasks")["calls"]]

    def show_task(self, who: Who, task_id: str) -> Task:
        return Task.of(self._ask(who, "GET", f"/v1/tasks/{task_id}"))

    def wait_for_task(self, who: Who, task_id: str, seconds: float) -> Task:
        return Task.of(self._ask(who, "POST", f"/v1/tasks/{task_id}/wait", params={"timeout": seconds}))

    def cancel_task(self, who: Who, task_id: str) -> Task:
        return Task.of(self._ask(who, "DELETE", f"/v1/tasks/{task_id}"))

    def take_notes(self, who: Who) -> list[Mapping[str, Any]]:
        notes: list[Mapping[str, Any]] = self._ask(who, "POST", "/v1/notes")["notes"]
        return notes

    def state(self, who: Who, call_id: str) -> str:
        return str(self._ask(who, "GET", f"/v1/calls/{call_id}")["state"])

    def written(self, who: Who, call_id: str, stream: str) -> str:
        text = ""
        offset: int | None = 0
        while offset is not None:
            part = self._ask(who, "GET", f"/v1/calls/{call_id}/output", params={"stream": stream, "offset": offset})
            text, offset = text + part["text"], part["next_offset"]
        return text

    def parameters(self) -> dict[str, Any]:
        document = self._ask(Who("reader"), "GET", "/openapi.json")
        content = document["paths"]["/v1/code_exec"]["post"]["requestBody"]["content"]
        schema: dict[str, Any] = content["application/json"]["schema"]
        while "$ref" in schema:
            place: Any = document
            for step in schema["$ref"].removeprefix("#/").split("/"):
                place = place[step]
            schema = place
        return schema

    def _ask(self, who: Who, method: str, path: str, **more: Any) -> Any:
        return self._loop.call(self._send(who, method, path, **more))

    async def _send(self, who: Who, method: str, path: str, **more: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        response = await self._client(who).request(method, path, headers=headers, **more)
        if response.status_code in (200, 202):
            return response.json()
        assert response.status_code in (404, 422), f"{response.status_code}: {response.text}"
        error = response.json()["error"]
        raise Refused(f"{error['code']}: {error['message']} {json.dumps(error.get('problems', []))}")
