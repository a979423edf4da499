"""Nobody has all places with what lasts; and what lasts ends when who asked may not ask any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from sandbox.service.attendance import unless_gone
from sandbox.service.bodies import ClientGone
from sandbox.service.errors import HttpError
from sandbox.service.model import Busy
from sandbox.service.visits import Visits
from tests.remote_executor import until
from tests.service.serving import Service, Token, detach, policy_text

type App = Callable[[Scope, Receive, Send], Any]


class Server:
    """Visits whose clients send nothing, and what they were answered."""

    def __init__(self, most: int) -> None:
        self.visits = Visits(lambda: most)
        self.sent: list[Message] = []
        self.known = True

    async def ask(
        self, app: App, holder: str = "acme", *, method: str = "POST", path: str = "/v1/calls"
    ) -> None:  # fmt: skip
        async def send(message: Message) -> None:
            self.sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        scope: Scope = {"type": "http", "method": method, "path": path}
        await self.visits.receive(app, scope, receive, send, holder=holder, known=lambda: self.known)

    async def begin(self, many: int, holder: str, **what: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.ask(waits, holder, **what)) for _ in range(many)]
        await asyncio.sleep(0)
        return tasks


async def waits(scope: Scope, receive: Receive, send: Send) -> None:
    await unless_gone(receive, asyncio.Event().wait())


def refused(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() and isinstance(task.exception(), Busy) for task in tasks)


@pytest.mark.parametrize(
    ("most", "admitted"), [(1, [1]), (3, [2, 1]), (256, [128]), (256, [128, 64, 32]), (9, [5, 2, 1])]
)
def test_nobody_has_more_than_are_left_for_all(most: int, admitted: list[int]) -> None:
    """So that whoever comes next has some, as many as come."""

    async def scenario() -> None:
        server = Server(most)
        for number, expected in enumerate(admitted):
            tasks = await server.begin(most, f"tenant{number}")
            assert len(tasks) - refused(tasks) == expected

    asyncio.run(scenario())


def test_who_is_greedy_at_once_gets_as_much_as_others() -> None:
    async def scenario() -> None:
        server = Server(256)
        got = {"a": 0, "b": 0}
        for _ in range(256):
            for holder in got:
                got[holder] += 1 - refused(await server.begin(1, holder))
        assert 80 <= got["a"] <= 90
        assert 80 <= got["b"] <= 90

    asyncio.run(scenario())


def test_what_ends_leaves_room() -> None:
    async def scenario() -> None:
        server = Server(4)
        first, second = await server.begin(2, "acme")
        assert refused(await server.begin(1, "acme")) == 1
        first.cancel()
        await asyncio.wait({first})
        assert refused(await server.begin(1, "acme")) == 0
        assert not second.done()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "lasts"),
    [
        ("POST", "/v1/calls", True), ("POST", "/v1/code_exec", True), ("POST", "/v1/tasks/x/wait", True),
        ("GET", "/v1/calls/x/events", True), ("GET", "/mcp", True), ("POST", "/mcp", True), ("PUT", "/", True),
        ("GET", "/v1/calls", False), ("DELETE", "/v1/tasks/x", False), ("GET", "/readyz", False),
    ],
)  # fmt: skip
def test_what_is_answered_at_once_is_not_counted(method: str, path: str, lasts: bool) -> None:
    """Who has its share may still look, and end what it waits for."""

    async def scenario() -> int:
        server = Server(4)
        await server.begin(2, "acme")
        return refused(await server.begin(1, "acme", method=method, path=path))

    assert asyncio.run(scenario()) == lasts


def test_a_recheck_ends_what_waits_with_401_and_lets_others_be() -> None:
    async def scenario() -> None:
        server, other = Server(8), Server(8)
        other.visits = server.visits
        (gone,), (stays,) = await server.begin(1, "acme"), await other.begin(1, "acme")
        server.known = False
        server.visits.recheck()
        with pytest.raises(HttpError) as raised:
            await gone
        assert raised.value.status == 401
        await asyncio.sleep(0)
        assert not stays.done()

    asyncio.run(scenario())


def test_a_recheck_ends_a_stream_that_has_begun() -> None:
    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await waits(scope, receive, send)

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def scenario() -> None:
        server = Server(8)
        tasks = [asyncio.create_task(server.ask(app)) for app in (streams, told)]
        await asyncio.sleep(0.01)
        server.known = False
        server.visits.recheck()
        with pytest.raises(ClientGone):  # as of a client that left
            await tasks[0]
        await tasks[1]
        assert server.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(scenario())


def test_who_is_cancelled_is_cancelled() -> None:
    """Ended here or not: the server's own end comes first."""

    async def scenario() -> None:
        server = Server(8)
        (task,) = await server.begin(1, "acme")
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_tenants_waits_do_not_shut_out_another(root: Path) -> None:
    """It is told when to come again, and may still end its task."""
    acme, globex = Token("acme"), Token("globex")
    tenants = [{"name": "acme", "tokens": [acme.entry]}, {"name": "globex", "tokens": [globex.entry]}]
    with (
        Service(root, policy_text(service={"max_connections": 24}, tenants=tenants), "--host", "127.0.0.1") as service,
        service.client(acme) as one, service.client(globex) as other, ExitStack() as stack,
    ):  # fmt: skip
        task_id = detach(one, "import time; time.sleep(100)", timeout=100)

        def wait() -> None:
            wire = stack.enter_context(service.connect())
            wire.sendall(
                f"POST /v1/tasks/{task_id}/wait?timeout=300 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
                f"Authorization: {acme.headers['authorization']}\r\n\r\n".encode()
            )

        def is_full() -> bool:
            wait()
            return one.post(f"/v1/tasks/{task_id}/wait", params={"timeout": 0.01}).status_code == 429

        until(is_full, "its share is taken")
        for _ in range(30):
            wait()
        for _ in range(5):
            assert other.get("/v1/calls").status_code == 200
            assert other.post("/v1/calls", json={"language": "python", "code": "print(1)"}).status_code == 200
        answer = one.post("/v1/calls", json={"language": "python", "code": "print(1)"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "busy")
        assert int(answer.headers["retry-after"]) >= 1
        assert one.delete(f"/v1/tasks/{task_id}").json()["state"] == "cancelled"
        until(lambda: one.post("/v1/notes").status_code == 200, "what waited for it has ended")
