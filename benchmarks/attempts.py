"""What an attempt costs beside a plain `python -I` or `node`, in one run: latency, with a request or none, and rate.

Compare within the table only: the numbers of another run, or another machine, differ by more than what is compared.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trustme

from benchmarks import peers
from sandbox import CodeCall, Executor, Settings, Status
from sandbox.interpreters import this_node

ROUNDS = 60
CONCURRENCY = (1, 4, 16)
PYTHON, NODE = "plain python -I", "plain node"
HOST = "bench.test"

POLICY = """\
version: 1
name: benchmark
network:
  modes: [block-all, named]
  hosts: {{{host}: 127.0.0.1}}
  allow: [{{host: {host}, ports: [{port}]}}]
  private_addresses: [{{host: {host}, cidr: 127.0.0.1/32, ports: [{port}]}}]
  upstream: {{ca_file: {ca_file}}}
"""
JS_ONE_REQUEST = "const a = await fetch('https://{host}:{port}/1k'); console.log((await a.arrayBuffer()).byteLength)"
ONE_REQUEST = "import urllib.request\nprint(len(urllib.request.urlopen('https://{host}:{port}/1k').read()))"


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds, median and 95th percentile. `floor` is the row of what the runtime takes by itself."""

    name: str
    floor: str
    median_ms: float
    p95_ms: float


async def measure(rounds: int = ROUNDS) -> tuple[list[Row], dict[int, float]]:
    """The rows in order, and attempts per second by how many run at once."""
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        directory = Path(name)
        authority = trustme.CA()
        ca_file = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        async with peers.https_server(authority, HOST) as port:
            policy = directory / "policy.yaml"
            policy.write_text(POLICY.format(host=HOST, port=port, ca_file=ca_file))
            settings = Settings(state_dir=directory / "state", max_concurrency=max(CONCURRENCY))
            async with Executor(policy, settings=settings) as executor:
                return await _measure(executor, port, rounds)


async def _measure(executor: Executor, port: int, rounds: int) -> tuple[list[Row], dict[int, float]]:
    request = ONE_REQUEST.format(host=HOST, port=port)

    async def blocked() -> None:
        await _expect_success(executor, CodeCall(language="python", code="print(1)"))

    async def one_request() -> None:
        await _expect_success(executor, CodeCall(language="python", code=request, allow_network=True, domains=[HOST]))

    async def js_blocked() -> None:
        await _expect_success(executor, CodeCall(language="javascript", code="console.log(1)"))

    async def js_one_request() -> None:
        code = JS_ONE_REQUEST.format(host=HOST, port=port)
        await _expect_success(executor, CodeCall(language="javascript", code=code, allow_network=True, domains=[HOST]))

    kinds: dict[str, Callable[[], Awaitable[None]]] = {
        PYTHON: plain,
        "python, block-all": blocked,
        "python, one HTTPS request": one_request,
        NODE: plain_node,
        "javascript, block-all": js_blocked,
        "javascript, one HTTPS request": js_one_request,
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for kind in kinds.values():
        await kind()
    for _ in range(rounds):  # in turn, so that a slow moment of the machine falls on all alike
        for name, kind in kinds.items():
            started = time.perf_counter()
            await kind()
            times[name].append((time.perf_counter() - started) * 1000)
    rows = [
        Row(name, _floor(name), statistics.median(values), statistics.quantiles(values, n=20)[18])
        for name, values in times.items()
    ]
    rates = {}
    for at_once in CONCURRENCY:
        started = time.perf_counter()
        await _in_parallel(blocked, rounds, at_once)
        rates[at_once] = rounds / (time.perf_counter() - started)
    return rows, rates


def _floor(name: str) -> str:
    return NODE if name == NODE or name.startswith("javascript") else PYTHON


async def plain() -> None:
    """A new interpreter with nothing around it: the floor."""
    process = await asyncio.create_subprocess_exec(
        f"{sys.base_prefix}/bin/python3", "-I", "-c", "print(1)", stdout=asyncio.subprocess.PIPE
    )
    await process.communicate()


async def plain_node() -> None:
    """The same of Node.js."""
    process = await asyncio.create_subprocess_exec(
        f"{this_node().directory}/bin/node", "-e", "console.log(1)", stdout=asyncio.subprocess.PIPE
    )
    await process.communicate()


async def _expect_success(executor: Executor, call: CodeCall) -> None:
    result = await executor.run(call)
    if result.status is not Status.SUCCESS:
        raise RuntimeError(f"an attempt failed, so its time means nothing: {result.error} {result.stderr[-500:]}")


async def _in_parallel(work: Callable[[], Awaitable[None]], times: int, at_once: int) -> None:
    left = iter(range(times))

    async def worker() -> None:
        for _ in left:
            await work()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(worker())


def main() -> None:
    rows, rates = asyncio.run(measure())
    floors = {row.name: row.median_ms for row in rows}
    print(f"{'ms, n=' + str(ROUNDS):32} {'median':>8} {'p95':>8} {'x plain':>8}")
    for row in rows:
        print(f"{row.name:32} {row.median_ms:8.1f} {row.p95_ms:8.1f} {row.median_ms / floors[row.floor]:8.2f}")
    print()
    for at_once, rate in rates.items():
        print(f"attempts per second, {at_once:2} at once {rate:8.1f}")


if __name__ == "__main__":
    main()
