"""`/mcp` of the service: whose a request is, whose a session is, and what becomes of calls whose client has left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from mcp import Client
from mcp_types import CallToolResult
from starlette.types import Receive, Scope, Send

from sandbox import Executor, Settings
from sandbox.owners import Caller
from sandbox.service.mcp_http import McpApp
from sandbox.service.service import Service
from tests.lab import Outside
from tests.remote_executor import until
from tests.servers import PATIENCE
from tests.service.mcp_peers import Place, Served, check_agreement, fields_of, over_http, place, served, text_of
from tests.service.test_mcp_tools import processes_with

ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
INITIALIZE = {
    "jsonrpc": "2.0", "id": 0, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def service(outside: Outside) -> Iterator[Served]:
    with served(outside, concurrency=2, queue=1) as service:
        yield service


def post(service: Served, body: Any, tenant: str | None = "acme", **headers: str) -> httpx.Response:
    given = ACCEPT | {name.replace("_", "-"): value for name, value in headers.items()}
    if tenant is not None:
        given["authorization"] = f"Bearer {service.tokens[tenant]}"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(service.url, content=data, headers=given, timeout=60)


def test_without_a_token_nothing_is_answered(service: Served) -> None:
    assert post(service, INITIALIZE, None).status_code == 401
    assert post(service, INITIALIZE, None, authorization="Bearer sgt_wrong").status_code == 401


def test_a_body_that_is_too_large_is_refused(service: Served) -> None:
    assert post(service, b" " * (4 * 1024 * 1024 + 1)).status_code == 413


def test_a_body_that_is_no_message_is_refused(service: Served) -> None:
    session = post(service, INITIALIZE).headers["mcp-session-id"]
    for body in (b"nonsense", b"[]", b"{}", b"\xff"):
        assert post(service, body, mcp_session_id=session).status_code == 400


def test_a_session_is_nobodys_but_the_user_who_made_it(service: Served) -> None:
    session = post(service, INITIALIZE, sluicegate_user="alice").headers["mcp-session-id"]
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert post(service, ping, mcp_session_id=session, sluicegate_user="alice").status_code == 200
    for tenant, user in (("acme", "bob"), ("acme", "default"), ("globex", "alice")):
        stolen = post(service, ping, tenant, mcp_session_id=session, sluicegate_user=user)
        unknown = post(service, ping, tenant, mcp_session_id="0" * 32, sluicegate_user=user)
        assert (stolen.status_code, stolen.text) == (unknown.status_code, unknown.text)
        assert stolen.status_code == 404


async def call(client: Client, name: str, **arguments: Any) -> CallToolResult:
    result = await client.call_tool(name, arguments)
    check_agreement(result)
    return result


@pytest.mark.parametrize("era", ["2026", "2025"])
def test_tenants_and_users_see_nothing_of_one_another(service: Served, era: str) -> None:
    async def ask() -> None:
        async with contextlib.AsyncExitStack() as stack:

            async def connect(tenant: str, user: str) -> Client:
                connecting = over_http(service.url, service.tokens[tenant], era, sluicegate_user=user)
                return await stack.enter_async_context(connecting)

            alice = await connect("acme", "alice")
            others = [await connect("acme", "bob"), await connect("globex", "alice")]
            code = "open('secret.txt', 'w').write('s3cret'); print('s3cret')"
            task = fields_of(await call(alice, "code_exec", code=code, background=True))["task_id"]
            await call(alice, "tasks", operation="wait", task_id=task)
            for other in others:
                for operation in ("show", "wait", "cancel"):
                    answer = await call(other, "tasks", operation=operation, task_id=task)
                    assert fields_of(answer)["error"]["code"] == "not_found"
                assert fields_of(await call(other, "read_output", call_id=task))["error"]["code"] == "not_found"
                assert fields_of(await call(other, "tasks", operation="list"))["tasks"] == []
                assert fields_of(await call(other, "tasks", operation="notes"))["notes"] == []
                listed = await call(other, "code_exec", code="import os; print(os.listdir('.'))")
                assert "secret.txt" not in text_of(listed)
            shown = await call(alice, "tasks", operation="show", task_id=task)
            assert "s3cret" in text_of(shown)

    asyncio.run(ask())


@pytest.mark.parametrize("era", ["2026", "2025"])
def test_the_same_idempotency_key_of_two_users_is_two_calls(service: Served, era: str) -> None:
    async def ask() -> None:
        answers = []
        for tenant, user in (("acme", "carol"), ("acme", "dave"), ("globex", "carol")):
            async with over_http(service.url, service.tokens[tenant], era, sluicegate_user=user) as client:
                code = f"print({user + tenant!r})"
                result = await call(client, "code_execution", language="python", code=code, idempotency_key=f"k{era}")
                answers.append(fields_of(result)["stdout"])
        assert answers == ["carolacme\n", "daveacme\n", "carolglobex\n"]

    asyncio.run(ask())


def test_more_than_a_tenant_may_have_open_is_told_with_when_to_try_again(service: Served) -> None:
    async def ask() -> None:
        async with over_http(service.url, service.tokens["globex"], "2026") as client:
            code = {"language": "python", "code": "import time; time.sleep(1)"}
            calls = [client.call_tool("code_execution", code) for _ in range(6)]
            results = list(await asyncio.gather(*calls))
            for result in results:
                check_agreement(result)
            busy = [result for result in results if result.is_error]
            assert (len(busy), len(results) - len(busy)) == (3, 3)
            for result in busy:
                error = fields_of(result)["error"]
                assert error["code"] == "busy"
                assert error["retry_after_seconds"] > 0
                assert "nothing was begun: try again in" in text_of(result)

    asyncio.run(ask())


SLEEP = (
    "import subprocess\nsleep = subprocess.Popen(['/bin/sleep', '{seconds}'])\nprint('up', flush=True)\nsleep.wait()"
)


@pytest.mark.parametrize(("era", "seconds"), [("2026-07-28", "81001"), ("2025-11-25", "81002")])
def test_closing_the_response_stream_ends_the_program(service: Served, era: str, seconds: str) -> None:
    headers = ACCEPT | {"authorization": f"Bearer {service.tokens['acme']}", "mcp-protocol-version": era}
    meta: dict[str, Any] = {"progressToken": 1}
    if era.startswith("2026"):
        meta |= {
            "io.modelcontextprotocol/protocolVersion": era,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        headers |= {"mcp-method": "tools/call", "mcp-name": "code_execution"}
    else:
        headers["mcp-session-id"] = post(service, INITIALIZE).headers["mcp-session-id"]
    params = {
        "name": "code_execution", "arguments": {"language": "python", "code": SLEEP.format(seconds=seconds)},
        "_meta": meta,
    }  # fmt: skip
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    with httpx.stream("POST", service.url, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()  # kept: with it the connection would end
        next(line for line in lines if "1 lines of stdout" in line)
        assert processes_with(seconds)
    until(lambda: not processes_with(seconds), "the program has ended")


def test_a_request_with_a_key_that_comes_again_has_the_answer_of_the_first(service: Served) -> None:
    headers = ACCEPT | {
        "authorization": f"Bearer {service.tokens['acme']}", "mcp-protocol-version": "2025-11-25",
        "mcp-session-id": post(service, INITIALIZE).headers["mcp-session-id"],
    }  # fmt: skip
    code = "import os, time\nprint(os.urandom(8).hex(), flush=True)\ntime.sleep(3)"
    params = {
        "name": "code_execution", "arguments": {"language": "python", "code": code, "idempotency_key": "lost"},
        "_meta": {"progressToken": 1},
    }  # fmt: skip
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    with httpx.stream("POST", service.url, json=body, headers=headers, timeout=60) as response:
        next(line for line in response.iter_lines() if "1 lines of stdout" in line)
    again = httpx.post(service.url, json=body | {"id": 2}, headers=headers, timeout=60)
    answer = json.loads(again.text.rpartition("data: ")[2])["result"]["structuredContent"]
    assert (answer["status"], answer["error"]) == ("success", None)
    assert len(answer["stdout"]) == 17


# Sessions


@contextlib.asynccontextmanager
async def app_alone(at: Place, app_of: Any) -> AsyncIterator[str]:
    """The application by itself on a real server; who calls is said by a header."""
    settings = Settings(state_dir=at.state, warm_sandboxes=0)
    async with Executor(at.policy, settings=settings) as executor, Service(executor) as service:
        app: McpApp = app_of(service)

        async def gate(scope: Scope, receive: Receive, send: Send) -> None:
            tenant = dict(scope["headers"]).get(b"x-tenant", b"").decode()
            await app({**scope, "state": {"caller": Caller(tenant, "default")}}, receive, send)

        config = uvicorn.Config(gate, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with app.run():
                serving = asyncio.create_task(server.serve([listening]))
                try:
                    yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
                finally:
                    server.should_exit = True
                    await serving


def test_sessions_are_few_and_end_when_they_idle_and_a_tenant_has_its_own() -> None:
    async def check() -> None:
        tenants = [{"name": "acme"}, {"name": "globex"}]
        with place(tenants=tenants) as at:
            few = app_alone(at, lambda service: McpApp(service, max_sessions=2, idle_seconds=2.0))
            async with few as url, httpx.AsyncClient(timeout=30) as http:

                async def open_session(tenant: str) -> httpx.Response:
                    return await http.post(url, json=INITIALIZE, headers=ACCEPT | {"x-tenant": tenant})

                first, second = await open_session("acme"), await open_session("acme")
                assert (first.status_code, second.status_code) == (200, 200)
                assert (await open_session("acme")).status_code == 503
                assert (await open_session("globex")).status_code == 200
                headers = ACCEPT | {"x-tenant": "acme", "mcp-session-id": first.headers["mcp-session-id"]}
                assert (await http.delete(url, headers=headers)).status_code == 200
                assert (await open_session("acme")).status_code == 200
                ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
                headers["mcp-session-id"] = second.headers["mcp-session-id"]
                assert (await http.post(url, json=ping, headers=headers)).status_code == 200
                anew = 0
                async with asyncio.timeout(PATIENCE):
                    while anew < 2:  # it is not a request of a session's, which would keep that
                        anew += (await open_session("acme")).status_code == 200
                assert (await http.post(url, json=ping, headers=headers)).status_code == 404

    asyncio.run(check())


def test_the_end_of_the_application_ends_sessions_and_what_they_wait_for() -> None:
    seconds = "81003"

    async def check() -> None:
        with place() as at:
            async with app_alone(at, McpApp) as url, httpx.AsyncClient(timeout=30) as http:
                session = (await http.post(url, json=INITIALIZE, headers=ACCEPT)).headers["mcp-session-id"]
                params = {
                    "name": "code_execution",
                    "arguments": {"language": "python", "code": SLEEP.format(seconds=seconds)},
                    "_meta": {"progressToken": 1},
                }
                body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
                headers = ACCEPT | {"mcp-session-id": session}
                async with http.stream("POST", url, json=body, headers=headers) as response:
                    lines = response.aiter_lines()
                    while "1 lines of stdout" not in await anext(lines):
                        pass
                    assert processes_with(seconds)
        assert not processes_with(seconds)

    asyncio.run(check())


def test_outside_its_run_the_application_answers_nothing() -> None:
    app = McpApp(None)  # type: ignore[arg-type]  # it is not asked for anything

    async def nothing() -> Any:
        raise AssertionError

    async def send(_: Any) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match="inside its `run"):
        asyncio.run(app({"type": "http", "state": {"caller": Caller()}, "headers": []}, nothing, send))
