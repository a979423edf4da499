"""Preparing packages beside plain `uv pip install --target` and `npm install`; importing from a snapshot and a venv.

Needs the registries of the clients' own configuration, and measures their answers too: compare within one run only.
In each round everything is from nothing but once more from what was kept: the clients' caches, the store's artifacts.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from uv import find_uv_bin

from proxy.control import Proxy, ProxyConfig
from proxy.network import Grant, Mode, PrivateAddress, Rule, RuleLayer
from proxy.packages.data_files import load_policy_data
from proxy.packages.model import Ecosystem, Specifier
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Purpose, Registry, RegistryGrant, parse_base
from sandbox.interpreters import this_interpreter
from sandbox.isolation.client import Launcher, LauncherConfig
from sandbox.isolation.plan import MIB
from sandbox.packages.chamber import Chamber
from sandbox.packages.platforms import this_platform
from sandbox.packages.preparation import Preparer, Wanted
from sandbox.packages.specifiers import parse_specifier
from sandbox.packages.store import Lease, Store
from sandbox.registries import python_client_facts
from sandbox.runtimes import python

ROUNDS = 3
HITS = 20  # in each round
SETS = {
    Ecosystem.PYPI: (("requests",), ("requests", "numpy", "pandas")),
    Ecosystem.NPM: (("lodash", "axios"),),
}
IMPORTED = ("requests", "numpy", "pandas")
IMPORT = "import time; t = time.perf_counter(); import pandas, requests; print(time.perf_counter() - t)"
_REACH_SECONDS = 3.0


def registry(ecosystem: Ecosystem) -> Registry:
    """The one that the language's own client is configured for."""
    if ecosystem is Ecosystem.PYPI:
        facts = python_client_facts()
        built_in = facts.index.rstrip("/") == facts.default_index.rstrip("/")
        files = (parse_base(f"https://{facts.default_files_host}/"),) if built_in else ()
        return Registry(id="registries.python[0]", ecosystem=ecosystem, index=parse_base(facts.index), files=files)
    asked = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, check=True, cwd="/")
    return Registry(id="registries.javascript[0]", ecosystem=ecosystem, index=parse_base(asked.stdout.strip()))


def unreachable() -> str | None:
    """Why the registries cannot be had, if they cannot."""
    for ecosystem in SETS:
        try:
            index = registry(ecosystem).index
            socket.create_connection((index.host.text, index.port), _REACH_SECONDS).close()
        except (OSError, subprocess.CalledProcessError):
            return f"the {ecosystem.language} registry, or its client, cannot be reached"
    return None


def wanted(registry: Registry, names: tuple[str, ...], number: int = 0) -> Wanted:
    """With another number nothing is shared that the proxy has read."""
    policy = PackagePolicy(prepare=True)
    delimiter = "==" if registry.ecosystem is Ecosystem.PYPI else "@"
    specifiers = [parse_specifier(registry.ecosystem, name + delimiter) for name in names]
    bases = dict.fromkeys((registry.index, *registry.files))
    rules = tuple(
        Rule(id=f"registries[{n}]", host=base.host, subdomains=False, ports=(base.port,), methods=("GET", "HEAD"))
        for n, base in enumerate(bases)
    )
    grant = Grant(
        call_id="call-bench", attempt_id="call-bench", policy_name="bench", policy_digest=str(number),
        mode=Mode.REGISTRY_DEFAULT,
        layers=(RuleLayer(name="registries", rules=rules),),
        private_addresses=addresses(registry),
        packages=RegistryGrant(registries=(registry,), policy=policy, purpose=Purpose.PREPARATION),
    )  # fmt: skip
    return Wanted(
        registry,
        tuple(one for one in specifiers if isinstance(one, Specifier)),
        grant,
        policy,
        load_policy_data(policy),
    )


def addresses(registry: Registry) -> tuple[PrivateAddress, ...]:
    """Where a registry is reached at an address that is not public (a mirror of one's own), that has to be allowed."""
    found: list[PrivateAddress] = []
    for base in dict.fromkeys((registry.index, *registry.files)):
        for address in {info[4][0] for info in socket.getaddrinfo(base.host.text, base.port, type=socket.SOCK_STREAM)}:
            if not ipaddress.ip_address(address).is_global:
                found.append(PrivateAddress(id=f"p{len(found)}", host=base.host, cidr=ipaddress.ip_network(address)))
    return tuple(found)


def plain_uv(names: tuple[str, ...], cache: Path, target: Path, *, compiled: bool = False) -> None:
    subprocess.run(
        [find_uv_bin(), "pip", "install", "--quiet", "--no-config", "--only-binary", ":all:", "--cache-dir", str(cache),
         "--python", sys.executable, "--target", str(target), *(["--compile-bytecode"] if compiled else []), *names],
        check=True, cwd="/",
    )  # fmt: skip


def plain_npm(names: tuple[str, ...], cache: Path, target: Path) -> None:
    target.mkdir()
    subprocess.run(
        ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", str(cache), *names],
        check=True, cwd=target, stdout=subprocess.DEVNULL,
    )  # fmt: skip


@dataclass
class Times:
    """Seconds, round by round, of one thing done plainly and by a preparation."""

    plain: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def text(self, name: str) -> str:
        columns = [*_median_and_p95(self.plain), *_median_and_p95(self.ours)]
        ratio = statistics.median(self.ours) / statistics.median(self.plain)
        return f"  {name:30}{''.join(f'{value:8.2f}' for value in columns)} {ratio:8.2f}"


@dataclass
class Rows:
    """Of one set. `cold` leaves bytecode out on both sides; `hits` are of a snapshot that is in the store."""

    cold: Times = field(default_factory=Times)
    compiled: Times = field(default_factory=Times)
    known: Times = field(default_factory=Times)
    hits: list[float] = field(default_factory=list)

    def show(self, names: tuple[str, ...]) -> None:
        print(" ".join(names))
        print(self.cold.text("cold"))
        if self.compiled.plain:
            print(self.compiled.text("cold, with bytecode"))
        print(self.known.text("files known, nothing fetched"))
        median, p95 = _median_and_p95(self.hits)
        print(f"  {'snapshot known, ms':46}{median * 1000:8.2f}{p95 * 1000:8.2f}", flush=True)


def _median_and_p95(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[18]


class Bench:
    """A launcher and a proxy, with room for stores that the launcher can show."""

    def __init__(self, root: Path, launcher: Launcher, proxy: Proxy) -> None:
        self.root, self.launcher = root, launcher
        self.platform = this_platform()
        self._proxy = proxy
        self._number = 0

    async def round(self, source: Registry, names: tuple[str, ...], rows: Rows) -> Lease:
        """One round of a set, plain and prepared. The lease is of the snapshot."""
        self._number += 1
        place = self.root / "mounted" / str(self._number)
        place.mkdir()
        is_python = source.ecosystem is Ecosystem.PYPI
        plain = plain_uv if is_python else plain_npm
        rows.cold.plain.append(await _seconds(asyncio.to_thread(plain, names, place / "cache", place / "cold")))
        rows.known.plain.append(await _seconds(asyncio.to_thread(plain, names, place / "cache", place / "warm")))
        if is_python:
            work = asyncio.to_thread(plain_uv, names, place / "cache2", place / "compiled", compiled=True)
            rows.compiled.plain.append(await _seconds(work))
            bare, want = self._preparer(place / "bare", bytecode=False), wanted(source, names, 2 * self._number)
            rows.cold.ours.append(await _seconds(_prepare(bare, want)))
        preparer, want = self._preparer(place / "store"), wanted(source, names, 2 * self._number + 1)
        (rows.compiled if is_python else rows.cold).ours.append(await _seconds(_prepare(preparer, want)))
        rows.hits += [await _seconds(_prepare(preparer, want)) for _ in range(HITS)]
        for path in (preparer.store.root / "requests").iterdir():
            path.unlink()
        rows.known.ours.append(await _seconds(_prepare(preparer, want)))
        return await preparer.prepare(want)

    def _preparer(self, directory: Path, *, bytecode: bool = True) -> Preparer:
        store = Store(directory)
        store.root.chmod(0o755)  # all stores are below the one directory that the launcher shows

        async def chamber() -> Chamber:
            mounts = self.platform.mounts
            return Chamber(self.launcher, self._proxy, this_interpreter(), mounts, bytecode=bytecode)

        return Preparer(store, self.platform, chamber)


async def _prepare(preparer: Preparer, want: Wanted) -> None:
    (await preparer.prepare(want)).close()


async def _seconds(work: Awaitable[None]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def measure(rounds: int) -> None:
    """Measure and show, set by set."""
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        root.chmod(0o755)
        (root / "mounted").mkdir()
        proxy = await Proxy.start(ProxyConfig(root / "authority", root / "audit.jsonl"))
        readable = (root / "mounted", *this_platform().readable())
        launcher = await Launcher.start(
            LauncherConfig(await proxy.certificate(), state_dir=root / "launcher", readable=readable)
        )
        await proxy.ready()
        bench = Bench(root, launcher, proxy)
        try:
            print(f"{f's, n={rounds}':30}{'plain':>10}{'p95':>8}{'prepared':>10}{'p95':>6} {'x plain':>8}")
            for ecosystem, sets in SETS.items():
                source = registry(ecosystem)
                (await bench.round(source, sets[0], Rows())).close()  # the first of all finds nothing warm anywhere
                for names in sets:
                    rows = Rows()
                    for number in range(rounds):
                        with await bench.round(source, names, rows) as lease:
                            if number + 1 == rounds:
                                rows.show(names)
                                if names == IMPORTED:
                                    await imports(launcher, lease, root, rounds)
        finally:
            await launcher.close()
            await proxy.close()


def plain_venv(directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python_ = str(directory / "bin" / "python")
    subprocess.run(
        [find_uv_bin(), "pip", "install", "--quiet", "--no-config", "--compile-bytecode", "--python", python_,
         *IMPORTED], check=True, cwd="/",
    )  # fmt: skip


def plain_import(directory: Path) -> float:
    done = subprocess.run([str(directory / "bin" / "python"), "-c", IMPORT], capture_output=True, check=True)
    return float(done.stdout)


async def imports(launcher: Launcher, lease: Lease, root: Path, rounds: int) -> None:
    """Importing pandas and requests: in an attempt from a snapshot, and in a virtual environment beside it."""
    await asyncio.to_thread(plain_venv, root / "venv")
    plan = python.plan(
        this_interpreter(), call_id="call-bench", attempt=1, memory_bytes=1024 * MIB, packages=str(lease.tree)
    )
    times = Times()
    for _ in range(max(rounds, 5)):
        sandbox = await launcher.launch(plan, code=IMPORT.encode())
        sandbox.close_listeners()
        await sandbox.release()
        await sandbox.ended()
        times.ours.append(float(os.read(sandbox.stdout, 1000)))
        await sandbox.close()
        times.plain.append(await asyncio.to_thread(plain_import, root / "venv"))
    print(times.text("import pandas, requests"), flush=True)


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asyncio.run(measure(parser.parse_args(argv).rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
