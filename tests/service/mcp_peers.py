"""Real MCP clients of real servers: the official client, over standard input and output and over HTTP.

Owns: connections that stay open over a module's tests, and the check that an answer's text and fields say the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import CallToolResult

from sandbox.tokens import hash_token, new_token
from tests.lab import Outside, main_policy
from tests.remote_executor import until
from tests.servers import PATIENCE, Loop

ERAS = {"2026": "auto", "2025": "legacy"}  # of the protocol: without and with a handshake
TENANTS = ("acme", "globex")
GONE_SECONDS = 20.0


@dataclass(frozen=True)
class Place:
    """A state directory, a working directory and a policy of its own."""

    root: Path
    policy: Path

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in os.environ if name.startswith("SLUICEGATE_TEST")}
        return kept | {"SLUICEGATE_STATE_DIR": str(self.state)}


@contextlib.contextmanager
def place(outside: Outside | None = None, **sections: Any) -> Iterator[Place]:
    """With the policy of most tests, or one without peers, and what is given besides."""
    root = Path(tempfile.mkdtemp(prefix="sg-"))
    try:
        (root / "work").mkdir()
        policy = root / "policy.yaml"
        common = {"version": 1, "name": "tests"} if outside is None else json.loads(main_policy(outside))
        policy.write_text(json.dumps(common | sections))
        yield Place(root, policy)
    finally:
        shutil.rmtree(root)


def stdio_parameters(at: Place, *arguments: str) -> StdioServerParameters:
    words = ["-m", "sandbox.cli", "mcp", "--policy", str(at.policy), "--working-dir", str(at.work), *arguments]
    return StdioServerParameters(command=sys.executable, args=words, env=at.environment)


@contextlib.asynccontextmanager
async def over_stdio(at: Place, era: str, *arguments: str) -> AsyncIterator[Client]:
    async with Client(stdio_client(stdio_parameters(at, *arguments)), mode=ERAS[era]) as client:
        yield client


@contextlib.asynccontextmanager
async def over_http(url: str, token: str, era: str, **headers: str) -> AsyncIterator[Client]:
    given = {"authorization": f"Bearer {token}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with create_mcp_http_client(headers=given) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=ERAS[era]) as client:
            yield client


@contextlib.contextmanager
def all_ended(pid: int) -> Iterator[None]:
    """Whatever happens in the block, soon after it a process and all that it started have ended."""
    whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    yield

    def running() -> list[psutil.Process]:
        return [one for one in whole if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    until(lambda: not running(), f"all {len(whole)} processes have ended", GONE_SECONDS)


@dataclass(frozen=True)
class Served:
    """A service that runs, and a token for each of its tenants."""

    at: Place
    url: str
    tokens: Mapping[str, str]
    process: subprocess.Popen[str]

    def put_in_force(self, policy: dict[str, Any]) -> None:
        """Another policy, of which the service is told."""
        new = self.at.policy.with_suffix(".new")
        new.write_text(json.dumps(policy))
        new.rename(self.at.policy)
        self.process.send_signal(signal.SIGHUP)

    def withdraw(self, tenant: str) -> dict[str, Any]:
        """Put a policy in force in which a tenant has another token; the one before is returned."""
        before: dict[str, Any] = json.loads(self.at.policy.read_text())
        tokens = [{"name": "test", "sha256": hash_token(new_token())}]
        tenants = [one | {"tokens": tokens} if one["name"] == tenant else one for one in before["tenants"]]
        self.put_in_force(before | {"tenants": tenants})
        return before


@contextlib.contextmanager
def served(outside: Outside, **tenant: Any) -> Iterator[Served]:
    """`sluicegate serve` over TCP, with two tenants."""
    tokens = {name: new_token() for name in TENANTS}
    tenants = [
        {"name": name, "tokens": [{"name": "test", "sha256": hash_token(token)}], **tenant}
        for name, token in tokens.items()
    ]
    with place(outside, tenants=tenants) as at:
        words = [sys.executable, "-m", "sandbox.cli", "serve", "--policy", str(at.policy), "--host", "127.0.0.1"]
        process = subprocess.Popen(
            [*words, "--port", "0", "--drain-seconds", "1"], stdout=subprocess.PIPE, text=True,
            env=os.environ | at.environment,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http" in line, f"it did not start: {line!r}"
            url = line.split()[-1].rstrip("/")
            yield Served(at, f"{url}/mcp", tokens, process)
        finally:
            with all_ended(process.pid):
                process.terminate()
                process.wait(PATIENCE)
            assert process.stdout is not None
            process.stdout.close()


class Held:
    """A client that stays connected, for tests that are not on its event loop."""

    def __init__(self, loop: Loop, connect: Callable[[], contextlib.AbstractAsyncContextManager[Client]]) -> None:
        self._loop, self._connect = loop, connect
        self._over = asyncio.Event()
        self.client: Client

    def __enter__(self) -> Self:
        self._loop.call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call(self._close())

    async def _open(self) -> None:
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            try:
                async with self._connect() as client:
                    ready.set_result(client)
                    await self._over.wait()
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        self._task = asyncio.create_task(hold())
        self.client = await ready

    async def _close(self) -> None:
        self._over.set()
        await self._task

    def do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.call(work)

    def call(self, name: str, **arguments: Any) -> CallToolResult:
        """Call a tool, and hold its answer against what every answer must be."""
        result = self.do(self.client.call_tool(name, arguments))
        check_agreement(result)
        return result


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content)  # type: ignore[union-attr]


def fields_of(result: CallToolResult) -> dict[str, Any]:
    assert isinstance(result.structured_content, dict)
    return result.structured_content


# Of attempts a text has what matters when there were several; a decision is the name of its line; and what was asked
# for is known to whoever asked.
_NOT_SAID = {"attempts", "decision", "operation"}
_SAID_OTHERWISE: dict[str, Callable[[Any], str]] = {
    "peak_memory_bytes": lambda value: f"{value / 2**20:.1f} MiB",
    "chars": str,
    "offset": str,
}
_FLAGS = {
    "truncated": "[truncated]", "replaced": "[", "more": "[more]", "readable": "read_output",
    "success": "success",
}  # fmt: skip


def check_agreement(result: CallToolResult) -> None:
    """Every field that says something is in the text, too."""
    text = text_of(result)
    for path, value in _leaves(fields_of(result)):
        name = next(step for step in reversed(path) if isinstance(step, str))
        if _NOT_SAID & set(path) or value is None or value == "" or _says_nothing(path, fields_of(result)):
            continue
        if isinstance(value, bool):
            outer = next((step for step in path if step in _FLAGS), None)
            if name == "success" and not value:
                assert "no success" in text, path
            elif value:
                assert outer is not None, f"a flag that the text may not have: {path}"
                assert _FLAGS[str(outer)] in text, (path, text)
        elif isinstance(value, int | float):
            if name.endswith("_at"):
                assert datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds") in text, (path, text)
            elif value or name == "exit_code":
                said = _SAID_OTHERWISE.get(name, lambda one: f"{one:g}" if isinstance(one, float) else str(one))
                assert said(value) in text, (path, value, text[-2000:])
        else:
            assert value.strip() in text, (path, value, text[-2000:])


def _says_nothing(path: tuple[str | int, ...], fields: dict[str, Any]) -> bool:
    """What says nothing where it stands: how much was written, where all of it is shown; the place of no call."""
    for step in path[:-1]:
        if isinstance(step, str) and isinstance(fields.get(step), dict) and step not in ("output_chars", "working_dir"):
            fields = fields[step]
    if "output_chars" in path:
        return path[-1] not in [row["stream"] for row in fields.get("left_out", [])]
    return ("working_dir" in path or path[-1] == "timeout_seconds") and not fields.get("call_id")


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _leaves(inner, (*path, place))
    else:
        yield path, value
