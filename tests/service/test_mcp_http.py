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
from mcp_types import INVALID_REQUEST, PARSE_ERROR, CallToolResult
from starlette.types import Receive, Scope, Send

from sandbox import Executor, Settings
from sandbox.owners import Caller
from sandbox.service.mcp_http import McpApp
from sandbox.service.mcp_sessions import SessionBounds
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


ERAS = ["2026-07-28", "2025-11-25"]


def headers_of(service: Served, tenant: str, era: str) -> dict[str, str]:
    """Those of a call of `code_execution`, in a session of its own where the era has any."""
    headers = ACCEPT | {"authorization": f"Bearer {service.tokens[tenant]}", "mcp-protocol-version": era}
    if era.startswith("2026"):
        return headers | {"mcp-method": "tools/call", "mcp-name": "code_execution"}
    return headers | {"mcp-session-id": post(service, INITIALIZE, tenant).headers["mcp-session-id"]}


def call_of(code: str, era: str = "", number: int | str = 1, **arguments: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"progressToken": 1}
    if era.startswith("2026"):
        meta |= {
            "io.modelcontextprotocol/protocolVersion": era,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
    arguments = {"language": "python", "code": code, **arguments}
    params = {"name": "code_execution", "arguments": arguments, "_meta": meta}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


@contextlib.contextmanager
def running(service: Served, tenant: str, era: str, seconds: str) -> Iterator[Iterator[str]]:
    """The lines that are still to come of the answer to a call that sleeps."""
    headers, body = headers_of(service, tenant, era), call_of(SLEEP.format(seconds=seconds), era)
    with httpx.stream("POST", service.url, json=body, headers=headers, timeout=PATIENCE) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()  # kept: with it the connection would end
        next(line for line in lines if "1 lines of stdout" in line)
        assert processes_with(seconds)
        yield lines


@pytest.mark.parametrize(("era", "seconds"), [("2026-07-28", "81001"), ("2025-11-25", "81002")])
def test_closing_the_response_stream_ends_the_program(service: Served, era: str, seconds: str) -> None:
    with running(service, "acme", era, seconds):
        pass
    until(lambda: not processes_with(seconds), "the program has ended")


# What is sent


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    "fault", [b'"code": "print(1)", "code": "print(2)"', b'"code": "print(1)", "memory_mib": NaN', b'"code": "\xff"']
)
def test_what_readers_of_json_disagree_on_is_refused(service: Served, era: str, fault: bytes) -> None:
    body = json.dumps(call_of("CODE", era)).encode().replace(b'"code": "CODE"', fault)
    answer = httpx.post(service.url, content=body, headers=headers_of(service, "acme", era), timeout=PATIENCE)
    assert (answer.status_code, answer.json()["id"], answer.json()["error"]["code"]) == (400, None, PARSE_ERROR)


@pytest.mark.parametrize("era", ERAS)
def test_a_timeout_that_is_no_number_is_told_by_the_tool(service: Served, era: str) -> None:
    body = json.dumps(call_of("print(1)", era, timeout=float("nan"))).encode()
    answer = httpx.post(service.url, content=body, headers=headers_of(service, "acme", era), timeout=PATIENCE)
    assert answer.status_code == 200
    assert "timeout: " in answer.text


def test_an_id_that_is_in_use_is_refused_and_the_first_request_has_its_answer(service: Served) -> None:
    async def check() -> None:
        headers = headers_of(service, "acme", "2025-11-25")
        wait = (
            "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('first')"
        )
        async with httpx.AsyncClient(headers=headers, timeout=PATIENCE) as http:
            async with http.stream("POST", service.url, json=exec_of(wait, 7)) as response:
                lines = response.aiter_lines()
                while "1 lines of stdout" not in await anext(lines):
                    pass
                for number in (7, "7", "_GET_stream"):
                    refused = await http.post(service.url, json=exec_of("print('second')", number))
                    assert (refused.status_code, refused.json()["id"]) == (400, None)
                    assert refused.json()["error"]["code"] == INVALID_REQUEST
                assert (await http.post(service.url, json=exec_of("open('go', 'w')", 8))).status_code == 200
                last = [line async for line in lines if line.startswith("data: {")][-1]
            answer = json.loads(last.removeprefix("data: "))
            assert (answer["id"], answer["result"]["structuredContent"]["output"]) == (7, "up\nfirst\n")
            again = await http.post(service.url, json=exec_of("print('second')", 7))
            assert '"output":"second\\n"' in again.text

    asyncio.run(check())


def exec_of(code: str, number: int | str) -> dict[str, Any]:
    params = {"name": "code_exec", "arguments": {"code": code}, "_meta": {"progressToken": 1}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


# Tokens that are withdrawn


def test_a_token_that_is_withdrawn_ends_its_streams_its_sessions_and_what_they_wait_for(service: Served) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(service, "globex", "2025-11-25", "81014"))
        streams = [
            stack.enter_context(running(service, "acme", era, seconds))
            for era, seconds in (("2026-07-28", "81011"), ("2025-11-25", "81012"))
        ]
        session = post(service, INITIALIZE).headers["mcp-session-id"]
        headers = ACCEPT | {"authorization": f"Bearer {service.tokens['acme']}", "mcp-session-id": session}
        listening = stack.enter_context(httpx.stream("GET", service.url, headers=headers, timeout=PATIENCE))
        assert listening.status_code == 200
        before = service.withdraw("acme")
        try:
            for lines in (*streams, listening.iter_lines()):
                assert not any("structuredContent" in line for line in lines), "it ends, and without an answer"
            until(lambda: not processes_with("81011") and not processes_with("81012"), "the programs have ended")
            assert post(service, INITIALIZE).status_code == 401
        finally:
            service.put_in_force(before)
            until(lambda: post(service, INITIALIZE).status_code == 200, "the token is there again")
        assert post(service, {"jsonrpc": "2.0", "id": 1, "method": "ping"}, mcp_session_id=session).status_code == 404
        assert processes_with("81014"), "what another tenant waits for goes on"


def test_a_request_with_a_key_that_comes_again_has_the_answer_of_the_first(service: Served) -> None:
    headers = headers_of(service, "acme", "2025-11-25")
    code = "import os, time\nprint(os.urandom(8).hex(), flush=True)\ntime.sleep(3)"
    body = call_of(code, idempotency_key="lost")
    with httpx.stream("POST", service.url, json=body, headers=headers, timeout=60) as response:
        next(line for line in response.iter_lines() if "1 lines of stdout" in line)
    same = httpx.post(service.url, json=body, headers=headers, timeout=60)
    assert same.status_code == 400, "what the first is answered, if it is, comes under its id"
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


def test_a_user_has_few_sessions_and_a_new_one_ends_the_one_that_idles_longest() -> None:
    async def check() -> None:
        with place(tenants=[{"name": "acme"}, {"name": "globex"}]) as at:
            few = app_alone(at, lambda service: McpApp(service, bounds=SessionBounds(of_user=2)))
            async with few as url, httpx.AsyncClient(timeout=PATIENCE) as http:

                async def open_session(tenant: str) -> dict[str, str]:
                    given = ACCEPT | {"x-tenant": tenant}
                    answer = await http.post(url, json=INITIALIZE, headers=given)
                    assert answer.status_code == 200
                    return given | {"mcp-session-id": answer.headers["mcp-session-id"]}

                async def status(session: dict[str, str]) -> int:
                    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
                    return (await http.post(url, json=ping, headers=session)).status_code

                other = await open_session("globex")
                first, second = await open_session("acme"), await open_session("acme")
                assert await status(first) == 200
                third = await open_session("acme")
                assert [await status(one) for one in (first, second, third, other)] == [200, 404, 200, 200]

    asyncio.run(check())


def test_the_stream_of_a_session_that_ends_for_another_ends() -> None:
    async def check() -> None:
        with place() as at:
            one = app_alone(at, lambda service: McpApp(service, bounds=SessionBounds(of_user=1)))
            async with one as url, httpx.AsyncClient(timeout=PATIENCE, headers=ACCEPT) as http:
                headers = {"mcp-session-id": (await http.post(url, json=INITIALIZE)).headers["mcp-session-id"]}
                async with http.stream("GET", url, headers=headers) as listening:
                    assert listening.status_code == 200
                    assert (await http.post(url, json=INITIALIZE)).status_code == 200
                    async with asyncio.timeout(10):  # less than it takes until the SDK says that it is still there
                        assert not [line async for line in listening.aiter_lines() if line]

    asyncio.run(check())


def test_a_session_that_idles_ends() -> None:
    async def check() -> None:
        with place() as at:
            brief = app_alone(at, lambda service: McpApp(service, bounds=SessionBounds(idle_seconds=0.2)))
            async with brief as url, httpx.AsyncClient(timeout=PATIENCE, headers=ACCEPT) as http:
                session = (await http.post(url, json=INITIALIZE)).headers["mcp-session-id"]
                ping, pause = {"jsonrpc": "2.0", "id": 1, "method": "ping"}, 0.3
                while (answer := await http.post(url, json=ping, headers={"mcp-session-id": session})).is_success:
                    pause *= 2  # each of these is a use of it
                    await asyncio.sleep(pause)
                assert answer.status_code == 404

    asyncio.run(check())


def test_where_something_is_asked_in_each_session_a_new_one_is_told_when_to_come_again() -> None:
    async def check() -> None:
        with place() as at:
            one = app_alone(at, lambda service: McpApp(service, bounds=SessionBounds(of_user=1)))
            async with one as url, httpx.AsyncClient(timeout=PATIENCE, headers=ACCEPT) as http:
                session = (await http.post(url, json=INITIALIZE)).headers["mcp-session-id"]
                body, headers = call_of(SLEEP.format(seconds="81004")), {"mcp-session-id": session}
                async with http.stream("POST", url, json=body, headers=headers) as response:
                    lines = response.aiter_lines()
                    while "1 lines of stdout" not in await anext(lines):
                        pass
                    refused = await http.post(url, json=INITIALIZE)
                    assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
                    assert "too many sessions" in refused.json()["error"]["message"]
                    assert processes_with("81004")

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
