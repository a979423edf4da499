"""`sluicegate mcp` as a process: what is on its wire, what it needs to start, and that nothing of it outlives its client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp_types import INVALID_REQUEST, PARSE_ERROR

from sandbox.service.mcp_local import LocalService, NotStarted
from sandbox.service.mcp_stdio import MAX_LINE_BYTES
from sandbox.state import InvalidSettings
from tests.remote_executor import until
from tests.servers import PATIENCE
from tests.service.mcp_peers import (
    GONE_SECONDS,
    Place,
    all_ended,
    check_agreement,
    fields_of,
    over_stdio,
    place,
    stdio_parameters,
    text_of,
)
from tests.unprivileged import UID, unprivileged_command

pytestmark = pytest.mark.slow  # each test starts a service, or programs that go on for a while

INITIALIZE = {
    "jsonrpc": "2.0", "id": 0, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}  # fmt: skip
READY = {"jsonrpc": "2.0", "method": "notifications/initialized"}
FOREVER = "import subprocess\nprint('up', flush=True)\nsubprocess.run(['/bin/sleep', '9999'])"


@pytest.fixture
def at() -> Iterator[Place]:
    with place() as found:
        yield found


class Wire:
    """A server, and the lines of its two pipes, with nothing between."""

    def __init__(self, at: Place, *arguments: str, prefix: Sequence[str] = (), cwd: Path | None = None) -> None:
        started = stdio_parameters(at, *arguments)
        self.process = subprocess.Popen(
            [*prefix, started.command, *started.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **at.environment}, cwd=cwd,
        )  # fmt: skip

    def send(self, *messages: Any) -> None:
        assert self.process.stdin is not None
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode()
            self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        return message

    def greet(self) -> dict[str, Any]:
        self.send(INITIALIZE)
        answer = self.read()
        self.send(READY)
        return answer

    def start_call(self, number: int, code: str) -> None:
        """Begin a call, and return once its program has said something."""
        params = {
            "name": "code_execution", "arguments": {"language": "python", "code": code}, "_meta": {"progressToken": number}
        }  # fmt: skip
        self.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
        while "1 lines" not in (told := self.read()).get("params", {}).get("message", ""):
            assert told["method"] == "notifications/progress"

    def close(self) -> None:
        """End it as clients do, if it has not ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll() is None:
            with all_ended(self.process.pid):
                self.process.wait(PATIENCE)
        self.process.stdout.close()


@pytest.fixture
def wire(at: Place) -> Iterator[Wire]:
    wire = Wire(at)
    try:
        yield wire
    finally:
        wire.close()


# What is on the wire


def test_standard_output_has_messages_and_nothing_else(at: Place, wire: Wire) -> None:
    answer = wire.greet()
    assert answer["result"]["serverInfo"]["name"] == "sluicegate"
    call = {"name": "code_exec", "arguments": {"code": "print('out')"}}
    wire.send({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    assert wire.read()["result"]["structuredContent"]["output"] == "out\n"
    assert wire.process.stdin is not None
    assert wire.process.stdout is not None
    wire.process.stdin.close()
    assert wire.process.stdout.read() == b""
    assert wire.process.wait(GONE_SECONDS) == 0


def test_a_line_that_is_no_message_is_answered_with_an_error_and_the_next_one_is_read(wire: Wire) -> None:
    wire.greet()
    for line, number in (
        (b"nonsense", None),
        (b"[]", None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": 5}', 7),
        (b'{"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": {"name": "\\ud800"}}', "x"),
        (b'{"jsonrpc": "2.0", "id": 8, "method": "\xff"}', None),
        (b"[" * 100_000, None),
    ):
        wire.send(line, b"")
        answer = wire.read()
        assert (answer["id"], "error" in answer) == (number, True), line[:80]
        wire.send({"jsonrpc": "2.0", "id": 9, "method": "ping"})
        assert wire.read()["id"] == 9


@pytest.mark.parametrize("fault", ['"code": "print(1)", "code": "print(2)"', '"code": "print(1)", "background": NaN'])
def test_what_readers_of_json_disagree_on_is_refused_and_nothing_runs(wire: Wire, fault: str) -> None:
    wire.greet()
    call = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "code_exec", "arguments": {%s}}}'
    wire.send((call % fault).encode())
    answer = wire.read()
    assert (answer["id"], answer["error"]["code"]) == (None, PARSE_ERROR)
    wire.send((call % '"code": "print(3)", "timeout": NaN').encode())
    assert wire.read()["result"]["structuredContent"]["output"] == "3\n"


def test_an_id_that_is_in_use_is_refused_and_the_first_request_has_its_answer(wire: Wire, at: Place) -> None:
    wire.greet()
    code = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('first')"
    params = {"name": "code_exec", "arguments": {"code": code}, "_meta": {"progressToken": 7}}
    wire.send({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params})
    while "1 lines" not in wire.read().get("params", {}).get("message", ""):
        pass
    other = {"name": "code_exec", "arguments": {"code": "print('second')"}}
    for number in (7, "7"):
        wire.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": other})
        while "method" in (answer := wire.read()):
            assert answer["method"] == "notifications/progress"
        assert (answer["id"], answer["error"]["code"]) == (None, INVALID_REQUEST)
        assert "has not ended" in answer["error"]["message"]
    (at.work / "go").touch()
    while "method" in (answer := wire.read()):
        pass
    assert (answer["id"], answer["result"]["structuredContent"]["output"]) == (7, "up\nfirst\n")
    wire.send({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": other})
    assert wire.read()["result"]["structuredContent"]["output"] == "second\n"


def test_the_id_of_a_request_that_was_cancelled_can_be_used_again(wire: Wire) -> None:
    wire.greet()
    wire.start_call(5, FOREVER)
    wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}})

    def answered() -> bool:
        wire.send({"jsonrpc": "2.0", "id": 5, "method": "ping"})
        while "method" in (answer := wire.read()):
            pass
        return "result" in answer

    until(answered, "the cancelled request has ended")


def test_a_message_that_is_too_long_is_not_kept(wire: Wire) -> None:
    wire.greet()
    wire.send(b'{"jsonrpc": "2.0", "id": 1, "method": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}')
    assert f"more than {MAX_LINE_BYTES} bytes" in wire.read()["error"]["message"]
    wire.send({"jsonrpc": "2.0", "id": 9, "method": "ping"})
    assert wire.read()["id"] == 9


def test_files_serve_as_its_input_and_output(at: Place) -> None:
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    (at.root / "in").write_text("".join(json.dumps(one) + "\n" for one in (INITIALIZE, READY, listing)))
    started = stdio_parameters(at)
    with (at.root / "in").open() as source, (at.root / "out").open("w") as target:
        done = subprocess.run(
            [started.command, *started.args], stdin=source, stdout=target, env=os.environ | at.environment,
            timeout=PATIENCE, check=True,
        )  # fmt: skip
    assert done.returncode == 0
    answers = [json.loads(line) for line in (at.root / "out").read_text().splitlines()]
    assert answers[0]["result"]["serverInfo"]["name"] == "sluicegate"


# Its start


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tenant", "acme"), "the policy has no tenant `acme`"),
        (("--working-dir", "/nowhere/at/all"), "is no directory"),
        (("--policy", "/nowhere/policy.yaml"), "/nowhere/policy.yaml"),
    ],
)
def test_arguments_that_are_none_are_refused_at_once(at: Place, arguments: tuple[str, ...], said: str) -> None:
    done = _run_to_its_end(at, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "hint:" in done.stderr


def test_where_the_policy_has_tenants_one_must_be_named() -> None:
    with place(tenants=[{"name": "acme"}, {"name": "globex"}]) as at:
        done = _run_to_its_end(at)
    assert done.returncode == 2
    assert "`--tenant` with `acme`, `globex`" in done.stderr


def _run_to_its_end(at: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    started = stdio_parameters(at, *arguments)
    return subprocess.run(
        [started.command, *started.args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=os.environ | at.environment, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_a_tenants_calls_have_its_narrower_policy() -> None:
    async def ask(at: Place) -> None:
        async with over_stdio(at, "2026", "--tenant", "acme") as client:
            arguments = {"language": "python", "code": "1", "timeout": 9}
            result = await client.call_tool("code_execution", arguments)
            check_agreement(result)
            assert result.is_error
            assert fields_of(result)["error"]["rule"] == "tenants.acme.limits.timeout_seconds.max"
            assert "ask for at most 5s" in text_of(result)
            arguments["timeout"] = 5
            assert not (await client.call_tool("code_execution", arguments)).is_error

    with place(tenants=[{"name": "acme", "limits": {"timeout_seconds": {"default": 5, "max": 5}}}]) as at:
        asyncio.run(ask(at))


def test_a_service_that_cannot_start_is_told_by_each_call_until_it_can(at: Place) -> None:
    async def ask() -> None:
        async with over_stdio(at, "2025") as client:
            assert len((await client.list_tools()).tools) == 5
            for name, arguments in (
                ("code_exec", {"code": "1"}),
                ("code_execution", {"language": "python", "code": "1"}),
                ("tasks", {"operation": "list"}),
            ):
                result = await client.call_tool(name, arguments)
                check_agreement(result)
                assert result.is_error
                assert "the service cannot start" in text_of(result)
                assert "sluicegate doctor" in text_of(result)
            ledger.unlink()
            assert fields_of(await client.call_tool("code_exec", {"code": "print(1)"}))["output"] == "1\n"

    at.state.mkdir(mode=0o700)
    ledger = at.state / "calls"
    ledger.write_text("in the way")
    asyncio.run(ask())


def test_calls_wait_for_a_start_that_takes_long_and_its_end_does_not() -> None:
    entered: list[bool] = []
    told: list[str] = []

    @contextlib.asynccontextmanager
    async def opened() -> Any:
        entered.append(True)
        await asyncio.Event().wait()
        yield

    async def check() -> None:
        async with LocalService(opened, told.append) as local:
            waiting = asyncio.create_task(local.get())
            await asyncio.wait({waiting}, timeout=0.05)
            assert not waiting.done()
        with pytest.raises(NotStarted):
            await waiting

    asyncio.run(check())
    assert (entered, told) == ([True], [])


def test_a_start_that_fails_is_told_once_for_each_try() -> None:
    told: list[str] = []

    @contextlib.asynccontextmanager
    async def opened() -> Any:
        if len(told) < 10:
            raise InvalidSettings(f"try {len(told)}")
        yield

    async def check() -> None:
        async with LocalService(opened, told.append) as local:
            for _ in range(2):
                with pytest.raises(NotStarted) as caught:
                    await local.get()
                assert caught.value.code == "invalid_settings"

    asyncio.run(check())
    assert told == ["the service cannot start: try 0", "the service cannot start: try 1"]


def test_a_directory_that_code_may_not_have_is_replaced_and_told_unless_it_was_chosen(at: Place) -> None:
    at.state.mkdir(mode=0o700)

    async def ask(*, chosen: bool) -> Any:
        parameters = stdio_parameters(at)
        place_words = ["--working-dir", str(at.work)]
        words = [word for word in parameters.args if word not in place_words]
        words += ["--working-dir", str(at.root)] if chosen else []
        from mcp import Client
        from mcp.client.stdio import stdio_client

        changed = parameters.model_copy(update={"args": words, "cwd": at.root})
        changed.env = {**at.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
        with (at.root / "errors").open("w") as errors:
            async with Client(stdio_client(changed, errlog=errors)) as client:
                return await client.call_tool("code_exec", {"code": "import os; print(os.listdir())"})

    result = asyncio.run(ask(chosen=False))
    check_agreement(result)
    assert fields_of(result)["working_dir"]["replaced"]
    assert "policy.yaml" not in fields_of(result)["output"]
    assert "cannot be a working directory" in (at.root / "errors").read_text()
    refused = asyncio.run(ask(chosen=True))
    assert refused.is_error
    assert "cannot be a working directory" in text_of(refused)


def test_the_clients_directory_is_where_code_works(at: Place) -> None:
    async def ask() -> None:
        (at.work / "below").mkdir()
        (at.work / "data.txt").write_text("the client's own")
        async with over_stdio(at, "2026") as client:
            result = await client.call_tool("code_exec", {"code": "print(open('data.txt').read()); open('new', 'w')"})
            assert fields_of(result)["output"] == "the client's own\n"
            result = await client.call_tool("code_exec", {"code": "open('x', 'w')", "working_dir": "below"})
            assert fields_of(result)["working_dir"] == {
                "requested": "below", "used": "below", "replaced": False, "reason": None
            }  # fmt: skip

    asyncio.run(ask())
    assert sorted(path.name for path in at.work.rglob("*")) == ["below", "data.txt", "new", "x"]


# Its end


@pytest.fixture(params=["as-we-are", "unprivileged"])
def busy(request: pytest.FixtureRequest, at: Place) -> Iterator[Wire]:
    """A server whose program runs, once as each user."""
    with contextlib.ExitStack() as stack:
        prefix: Sequence[str] = ()
        if request.param == "unprivileged":
            if os.getuid() != 0:
                pytest.skip("the tests already run as an unprivileged user")
            prefix = stack.enter_context(unprivileged_command())
            for path in (at.root, at.work, at.policy):
                shutil.chown(path, UID, UID)
        wire = Wire(at, prefix=prefix, cwd=Path(__file__).parents[2])
        stack.callback(wire.close)
        wire.greet()
        wire.start_call(1, FOREVER)
        assert len(psutil.Process(wire.process.pid).children(recursive=True)) >= 4, "proxy, launcher, sandbox, program"
        yield wire


def test_the_end_of_its_input_ends_everything(busy: Wire) -> None:
    assert busy.process.stdin is not None
    with all_ended(busy.process.pid):
        busy.process.stdin.close()
        assert busy.process.wait(GONE_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_though_its_input_stays_open(wire: Wire, number: signal.Signals) -> None:
    wire.greet()
    wire.start_call(1, FOREVER)
    with all_ended(wire.process.pid):
        wire.process.send_signal(number)
        assert wire.process.wait(GONE_SECONDS) == 0


def test_kill_9_leaves_nothing(busy: Wire) -> None:
    with all_ended(busy.process.pid):
        busy.process.kill()
        busy.process.wait(GONE_SECONDS)


def test_a_client_that_reads_nothing_does_not_keep_it(wire: Wire) -> None:
    wire.greet()
    for number in range(200):  # the answers are far more than a pipe holds
        wire.send({"jsonrpc": "2.0", "id": number, "method": "tools/list"})
    with all_ended(wire.process.pid):
        wire.process.terminate()
        assert wire.process.wait(GONE_SECONDS) == 0


def test_a_client_that_is_gone_ends_it(wire: Wire) -> None:
    wire.greet()
    assert wire.process.stdout is not None
    with all_ended(wire.process.pid):
        wire.process.stdout.close()
        wire.send({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        assert wire.process.wait(GONE_SECONDS) == 0


PARENT = """
import json, os, subprocess, sys
words, environment = json.loads(sys.argv[1])
child = subprocess.Popen(words, env=environment)
print(child.pid, file=sys.stderr, flush=True)
child.wait()
"""


def test_it_ends_with_its_parent_though_others_hold_its_input(at: Place) -> None:
    started = stdio_parameters(at)
    given = json.dumps([[started.command, *started.args], {**os.environ, **at.environment}])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stderr is not None
    child = psutil.Process(int(parent.stderr.readline()))
    parent.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
    parent.stdin.flush()
    assert json.loads(parent.stdout.readline())["id"] == 0
    with all_ended(child.pid):
        parent.kill()
        parent.wait(PATIENCE)
    for stream in (parent.stdin, parent.stdout, parent.stderr):
        stream.close()


def test_two_servers_in_one_state_directory_do_not_disturb_one_another(at: Place, wire: Wire) -> None:
    other = Wire(at)
    answers: list[Any] = []

    def ask(peer: Wire) -> None:
        peer.greet()
        for number in range(1, 6):
            call = {"name": "code_exec", "arguments": {"code": f"print({number})"}}
            peer.send({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": call})
            answers.append((number, peer.read()["result"]["structuredContent"]["output"]))

    threads = [threading.Thread(target=ask, args=(peer,)) for peer in (wire, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    other.close()
    assert sorted(answers) == sorted((number, f"{number}\n") for number in range(1, 6) for _ in range(2))
