"""What a call over HTTP costs beside the same call through the library, in one run; and many clients at once.

The service is a process of its own, as it is in use; the library's executor is in this one. They are asked in turn, so
that a slow moment of the machine falls on all alike. `plain HTTP` is a client that does no more than it must, so that
what is above the library is the service's; `httpx` is what clients are made of.

Compare within the table only: the numbers of another run, or another machine, differ by more than what is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from sandbox import CodeCall, Executor, Settings

ROUNDS = 100
CLIENTS, CALLS_EACH = 50, 20
POLICY = "version: 1\nname: benchmark\n"
CALL = {"language": "python", "code": "print(1)"}
_BODY = json.dumps(CALL).encode()
_LIBRARY = "library"


@contextlib.asynccontextmanager
async def service(directory: Path) -> AsyncIterator[tuple[Path, int]]:
    """A service that is ready: its socket, and its process."""
    policy, path = directory / "policy.yaml", directory / "s"
    policy.write_text(POLICY)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sandbox.cli", "serve", "--policy", str(policy), "--uds", str(path),
        env={**os.environ, "SLUICEGATE_STATE_DIR": str(directory / "state")}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://s") as client:
            # Else the probes of its readiness would run beside what is measured.
            while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - it is all there is to see
                await asyncio.sleep(0.1)
        yield path, process.pid
    finally:
        process.terminate()
        await process.wait()


class PlainClient:
    """One connection, and requests on it, one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, path: Path) -> PlainClient:
        return cls(*await asyncio.open_unix_connection(path))

    async def post(self) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        self._writer.write(b"POST /v1/calls HTTP/1.1\r\nHost: s\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        return int(head[9:12]), await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


async def measure(rounds: int = ROUNDS) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of each way, and what many clients at once came to."""
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        directory = Path(name)
        policy = directory / "library.yaml"
        policy.write_text(POLICY)
        settings = Settings(state_dir=directory / "library")
        async with Executor(policy, settings=settings) as executor, service(directory) as (path, pid):
            plain = await PlainClient.connect(path)
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://s", timeout=60) as client:

                async def library() -> None:
                    _expect((await executor.run(CodeCall(**CALL))).stdout)  # type: ignore[arg-type]  # fields as JSON has them

                async def over_http() -> None:
                    _expect(json.loads((await plain.post())[1])["stdout"])

                async def over_httpx() -> None:
                    _expect((await client.post("/v1/calls", json=CALL)).json()["stdout"])

                async def nothing() -> None:
                    await client.get("/healthz")

                times = await _in_turn(
                    {_LIBRARY: library, "plain HTTP": over_http, "httpx": over_httpx, "httpx, /healthz": nothing},
                    rounds,
                )
            plain.close()
            return times, await _many(path, pid)


async def _in_turn(ways: dict[str, Callable[[], Awaitable[None]]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(3):
            await way()
    for _ in range(rounds):
        for name, way in ways.items():
            await asyncio.sleep(0.05)  # the next sandbox is made meanwhile, in each process alike
            started = time.perf_counter()
            await way()
            times[name].append((time.perf_counter() - started) * 1000)
    return times


async def _many(path: Path, pid: int) -> dict[str, float]:
    """Many clients at once, each with calls of its own."""
    statuses: list[int] = []
    seconds: list[float] = []
    process = psutil.Process(pid)

    async def one() -> None:
        client = await PlainClient.connect(path)
        for _ in range(CALLS_EACH):
            started = time.perf_counter()
            status, body = await client.post()
            seconds.append(time.perf_counter() - started)
            statuses.append(status)
            if status == 200:
                _expect(json.loads(body)["stdout"])
        client.close()

    before = process.memory_info().rss
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(one())
    took = time.perf_counter() - started
    first = process.memory_info().rss
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(one())
    return {
        "answers 200": statuses.count(200),
        "answers 503": statuses.count(503),
        "other answers": len(statuses) - statuses.count(200) - statuses.count(503),
        "calls per second": CLIENTS * CALLS_EACH / took,
        "p50, seconds": statistics.median(seconds),
        "p95, seconds": statistics.quantiles(seconds, n=20)[18],
        "memory before, MiB": before / 2**20,
        "memory after once, MiB": first / 2**20,
        "memory after twice, MiB": process.memory_info().rss / 2**20,
    }


def _expect(stdout: Any) -> None:
    if stdout != "1\n":
        raise RuntimeError(f"a call failed, so its time means nothing: {stdout!r}")


def main() -> None:
    times, many = asyncio.run(measure())
    floor = statistics.median(times[_LIBRARY])
    print(f"{'ms, n=' + str(ROUNDS):24} {'p50':>8} {'p95':>8} {'above the library':>18}")
    for name, values in times.items():
        p50, p95 = statistics.median(values), statistics.quantiles(values, n=20)[18]
        above = "" if name == _LIBRARY or "healthz" in name else f"{p50 - floor:18.1f}"
        print(f"{name:24} {p50:8.1f} {p95:8.1f} {above:>18}")
    print()
    print(f"{CLIENTS} clients at once, {CALLS_EACH} calls each, twice")
    for name, value in many.items():
        print(f"{name:24} {value:8.1f}")


if __name__ == "__main__":
    main()
