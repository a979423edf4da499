"""Requests per second and CPU per request through the proxy, beside stock `mitmdump`, in one run on this machine.

One HTTPS server and one client, each a process of its own, and between them in turn: nothing, stock mitmdump as an
explicit proxy, our proxy opening TLS, our proxy passing TLS through after its check. Rounds of all of them are
interleaved, so that what else the machine does meets all alike. Compare within the table only.

    python -m benchmarks.proxy [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import IO, Any, Self

import trustme

from benchmarks import peers
from proxy.control import AttemptEnd, AttemptStart, Proxy, ProxyConfig
from proxy.destinations import parse_host
from proxy.network import Grant, Mode, PrivateAddress, Rule, RuleLayer, StaticHost

ROUNDS = 50
CONCURRENCY = 16
REQUESTS = {"keep-alive": 320, "new connections": 48}  # per round
HOST = "bench.test"
_LOOPBACK = ip_address("127.0.0.1")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Result:
    """One way through one subject."""

    subject: str
    way: str
    rates: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    requests: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def p95(self) -> float:
        """The rate that 95 % of the rounds reach."""
        return sorted(self.rates)[len(self.rates) // 20]

    @property
    def cpu_ms(self) -> float:
        return self.cpu_seconds / self.requests * 1000

    def summary(self) -> dict[str, object]:
        fields = {name: value for name, value in asdict(self).items() if name in ("subject", "way", "requests")}
        rates = {"requests_per_second": round(self.median, 1), "requests_per_second_p95": round(self.p95, 1)}
        return {**fields, **rates, "cpu_ms_per_request": round(self.cpu_ms, 3), "rounds": len(self.rates)}


@dataclass(frozen=True, slots=True)
class Subject:
    """What stands between client and server: where it listens and whose CPU time counts."""

    name: str
    port: int | None = None
    pid: int | None = None
    passthrough: bool = False


async def measure(rounds: int = ROUNDS) -> list[Result]:
    """All results, in the order of the table."""
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        directory = Path(name)
        authority = trustme.CA()
        ca_file = directory / "upstream.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        async with contextlib.AsyncExitStack() as stack:
            port = stack.enter_context(_server_process(directory, authority))
            ours = await stack.enter_async_context(_our_proxy(directory, ca_file))
            stock = stack.enter_context(_mitmdump(directory, ca_file))
            bundle = directory / "trusted.pem"
            own = await ours.certificate()
            _wait_for(stock_certificate := directory / "mitmdump" / "mitmproxy-ca-cert.pem")
            bundle.write_text(ca_file.read_text() + own.read_text() + stock_certificate.read_text())
            client = stack.enter_context(_client_process(bundle, port))
            subjects = [
                Subject("nothing"),
                stock,
                Subject("ours, TLS opened", pid=ours.pid),
                Subject("ours, passed through", pid=ours.pid, passthrough=True),
            ]
            return await _measure(subjects, ours, client, port, rounds)


async def _measure(subjects: Sequence[Subject], ours: Proxy, client: Client, port: int, rounds: int) -> list[Result]:
    results = [Result(subject.name, way) for way in REQUESTS for subject in subjects]
    for number in range(-1, rounds):  # the first one warms everything up
        for result in results:
            subject = next(subject for subject in subjects if subject.name == result.subject)
            async with _listening(subject, ours, port) as proxy_port:
                before = _cpu_seconds(subject.pid)
                seconds = client.run(result.way, proxy_port)
                used = _cpu_seconds(subject.pid) - before
            if number >= 0:
                result.rates.append(REQUESTS[result.way] / seconds)
                result.requests += REQUESTS[result.way]
                result.cpu_seconds += used
    return results


@contextlib.asynccontextmanager
async def _listening(subject: Subject, ours: Proxy, port: int) -> AsyncIterator[int | None]:
    """The port of the subject's proxy; for ours an attempt of its own, as every round of code is one."""
    if subject.pid != ours.pid:
        yield subject.port
        return
    host = parse_host(HOST)
    grant = Grant(
        call_id="benchmark",
        attempt_id=secrets.token_hex(8),
        policy_name="benchmark",
        policy_digest="none",
        mode=Mode.NAMED,
        layers=(RuleLayer(name="call", rules=(Rule(id="rule", host=host, ports=(port,)),)),),
        hosts=(StaticHost(host=host, addresses=(_LOOPBACK,)),),
        private_addresses=(PrivateAddress(id="loopback", host=host, cidr=ip_network(_LOOPBACK), ports=(port,)),),
        passthrough=(host,) if subject.passthrough else (),
    )
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.setblocking(False)
        await ours.attach(grant, [("explicit", listener)], AttemptStart("python", None))
        proxy_port = listener.getsockname()[1]
    yield proxy_port
    await ours.detach(grant.attempt_id, AttemptEnd("success", "exit", 0, 1.0))


def _cpu_seconds(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.asynccontextmanager
async def _our_proxy(directory: Path, ca_file: Path) -> AsyncIterator[Proxy]:
    proxy = await Proxy.start(ProxyConfig(directory / "authority", directory / "audit.jsonl", ca_file))
    await proxy.ready()
    try:
        yield proxy
    finally:
        await proxy.close()


class _Process:
    """A child that ends with the block."""

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(argv, text=True, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def read_line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def _mitmdump(directory: Path, ca_file: Path) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).parent / "mitmdump"
    options = [
        f"confdir={directory / 'mitmdump'}",
        f"ssl_verify_upstream_trusted_ca={ca_file}",
    ]
    argv = [str(program), "--quiet", "--listen-host", "127.0.0.1", "--listen-port", str(port)]
    hosts = directory / "hosts.py"  # stock resolves names itself, and this one has no DNS
    hosts.write_text(
        "def server_connect(data):\n"
        f"    if data.server.address[0] == {HOST!r}: data.server.address = ('127.0.0.1', data.server.address[1])\n"
    )
    argv += ["--script", str(hosts)]
    with _Process([*argv, *(part for option in options for part in ("--set", option))]) as started:
        for _ in range(3000):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        yield Subject("stock mitmdump", port, started.process.pid)


def _wait_for(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(f"`{path}` was not made")


@contextlib.contextmanager
def _server_process(directory: Path, authority: trustme.CA) -> Any:
    chain = directory / "server.pem"
    authority.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(str(chain))
    argv = [sys.executable, "-m", "benchmarks.proxy", "--serve", str(chain)]
    with _Process(argv, stdout=subprocess.PIPE) as started:
        yield started.read_line()


async def _serve(chain: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server = await asyncio.start_server(peers.answer_requests, "127.0.0.1", 0, ssl=context, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Client(_Process):
    """The load generator's handle."""

    def run(self, way: str, proxy_port: int | None) -> float:
        """The seconds that one round took."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([way, proxy_port]) + "\n")
        self.process.stdin.flush()
        return float(self.read_line())


def _client_process(bundle: Path, port: int) -> Client:
    argv = [sys.executable, "-m", "benchmarks.proxy", "--load", str(bundle), str(port)]
    return Client(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _load(bundle: str, port: int, orders: IO[str]) -> None:
    """Do rounds as they are ordered: a line each, answered with its seconds."""
    context = ssl.create_default_context(cafile=bundle)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, orders.readline):
        way, proxy_port = json.loads(line)
        share = REQUESTS[way] // CONCURRENCY
        if way == "keep-alive":
            connections = [await _connect(context, port, proxy_port) for _ in range(CONCURRENCY)]
            for connection in connections:  # the server's side is connected with the first request
                await _request(*connection, port)
            started = time.perf_counter()
            await asyncio.gather(*(_requests(*connection, port, share) for connection in connections))
            seconds = time.perf_counter() - started
            for _reader, writer in connections:
                writer.transport.abort()
        else:
            started = time.perf_counter()
            await asyncio.gather(*(_connections(context, port, proxy_port, share) for _ in range(CONCURRENCY)))
            seconds = time.perf_counter() - started
        print(seconds, flush=True)


async def _connect(
    context: ssl.SSLContext, port: int, proxy_port: int | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if proxy_port is None:
        return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy_port)
    writer.write(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head, head
    await writer.start_tls(context, server_hostname=HOST)
    return reader, writer


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    writer.write(f"GET /1k HTTP/1.1\r\nHost: {HOST}:{port}\r\nUser-Agent: benchmark\r\nAccept: */*\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readexactly(1024)


async def _requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, count: int) -> None:
    for _ in range(count):
        await _request(reader, writer, port)


async def _connections(context: ssl.SSLContext, port: int, proxy_port: int | None, count: int) -> None:
    for _ in range(count):
        reader, writer = await _connect(context, port, proxy_port)
        await _request(reader, writer, port)
        writer.transport.abort()


def show(results: Sequence[Result]) -> None:
    """Print the table. The ratio is that of the median rate to stock mitmdump's."""
    heading = f"{'through':24}{'way':18}{'req/s':>8}{'p95':>8}{'CPU ms/req':>12}{'× stock':>9}"
    print(f"HTTPS on loopback, {CONCURRENCY} at once, 1 KiB: the median of {len(results[0].rates)} rounds\n\n{heading}")
    stock = {result.way: result.median for result in results if result.subject == "stock mitmdump"}
    for result in results:
        cpu = f"{result.cpu_ms:.2f}" if result.cpu_seconds else "–"
        ratio = result.median / stock[result.way]
        print(f"{result.subject:24}{result.way:18}{result.median:8.0f}{result.p95:8.0f}{cpu:>12}{ratio:9.2f}")


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--serve", metavar="CHAIN", help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=2, metavar=("BUNDLE", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        asyncio.run(_serve(options.serve))
    elif options.load:
        asyncio.run(_load(options.load[0], int(options.load[1]), sys.stdin))
    else:
        results = asyncio.run(measure(options.rounds))
        if options.json:
            print(json.dumps([result.summary() for result in results], indent=1))
        else:
            show(results)


if __name__ == "__main__":
    main(sys.argv[1:])
