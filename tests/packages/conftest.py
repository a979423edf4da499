"""A preparer against the loopback registries: the real launcher, the real proxy, a store of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.control import Proxy, ProxyConfig
from proxy.network import Grant, Mode, PrivateAddress, Rule, RuleLayer, StaticHost
from proxy.packages.data_files import load_policy_data
from proxy.packages.model import Ecosystem, Specifier
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Purpose, Registry, RegistryGrant, parse_base
from sandbox.interpreters import this_interpreter
from sandbox.isolation.client import Launcher, LauncherConfig
from sandbox.isolation.plan import LaunchPlan
from sandbox.output import Collector
from sandbox.packages.chamber import Chamber
from sandbox.packages.platforms import Platform, this_platform
from sandbox.packages.preparation import NotPrepared, Preparer, Progress, Wanted
from sandbox.packages.specifiers import parse_specifier
from sandbox.packages.store import Lease, Store

PATIENCE_SECONDS = 100


def wanted_specifiers(ecosystem: Ecosystem, *texts: str) -> tuple[Specifier, ...]:
    found = tuple(parse_specifier(ecosystem, text) for text in texts)
    assert all(isinstance(one, Specifier) for one in found), found
    return found  # type: ignore[return-value]


class Kitchen:
    """What prepares, in an event loop of a thread's own."""

    def __init__(
        self, directory: Path, ca_file: Path | None, hosts: dict[str, str], private: list[dict[str, Any]]
    ) -> None:
        self.directory = directory
        self.log = directory / "audit.jsonl"
        self.platform: Platform = this_platform()
        self.store = Store(directory / "store")
        self.chambers = 0
        self.told: list[Progress] = []
        self._hosts, self._private = hosts, private
        self._calls = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.do(self._start(ca_file))
        self.preparer = Preparer(self.store, self.platform, self.chamber)

    def do[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    async def _start(self, ca_file: Path | None) -> None:
        self.proxy = await Proxy.start(ProxyConfig(self.directory / "authority", self.log, ca_file))
        self.launcher = await Launcher.start(
            LauncherConfig(
                authority_certificate=await self.proxy.certificate(),
                state_dir=self.directory / "launcher",
                readable=(self.store.snapshots, *self.platform.readable()),
            )
        )
        await self.proxy.ready()

    async def chamber(self) -> Chamber:
        self.chambers += 1
        return Chamber(self.launcher, self.proxy, this_interpreter(), self.platform.mounts)

    def close(self) -> None:
        self.do(self.launcher.close())
        self.do(self.proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wanted(self, registry: Registry, *texts: str, **policy: Any) -> Wanted:
        rules = PackagePolicy(prepare=True, **policy)
        self._calls += 1
        call = f"call-{self._calls}"
        grant = Grant(
            call_id=call,
            attempt_id=call,
            policy_name="tests",
            policy_digest="sha256:0",
            mode=Mode.REGISTRY_DEFAULT,
            layers=(
                RuleLayer(
                    name=f"registries.{registry.ecosystem.language}",
                    rules=tuple(
                        Rule(id=f"r{n}", host=base.host, subdomains=False, ports=(base.port,), methods=("GET", "HEAD"))
                        for n, base in enumerate(dict.fromkeys((registry.index, *registry.files)))
                    ),
                ),
            ),
            hosts=tuple(StaticHost(host=name, addresses=(address,)) for name, address in self._hosts.items()),  # type: ignore[arg-type]
            private_addresses=tuple(
                PrivateAddress(id=f"p{n}", host=one["host"], cidr=one["cidr"], ports=tuple(one["ports"]))
                for n, one in enumerate(self._private)
            ),
            packages=RegistryGrant(registries=(registry,), policy=rules, purpose=Purpose.PREPARATION),
        )
        return Wanted(registry, wanted_specifiers(registry.ecosystem, *texts), grant, rules, load_policy_data(rules))

    def prepare(self, wanted: Wanted) -> Lease:
        self.told = []
        return self.do(self.preparer.prepare(wanted, progress=self.told.append))

    def refusals(self, wanted: Wanted) -> dict[str, str]:
        """Package -> reason, of a preparation that must not succeed."""
        with pytest.raises(NotPrepared) as caught:
            self.prepare(wanted).close()
        return {fault.package: str(fault.reason) for fault in caught.value.faults}

    def run(self, plan: LaunchPlan, code: str) -> tuple[int | None, str, str]:
        """Run code in a sandbox without network: exit code, output, errors."""
        return self.do(self._run(plan, code))

    async def _run(self, plan: LaunchPlan, code: str) -> tuple[int | None, str, str]:
        sandbox = await self.launcher.launch(plan, code=code.encode())
        try:
            sandbox.close_listeners()
            collector = Collector(100_000, 100_000)
            collecting = asyncio.create_task(collector.collect(sandbox.stdout, sandbox.stderr))
            await sandbox.release()
            ending = await sandbox.ended()
            await collecting
            output = collector.finish()
            return ending.exit_code, output.stdout.text, output.stderr.text
        finally:
            await sandbox.close()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


type OpenKitchen = Callable[..., contextlib.AbstractContextManager[Kitchen]]


@pytest.fixture(scope="session")
def kitchen(_pypi: Any, _npm: Any, outside: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    kitchen = Kitchen(
        tmp_path_factory.mktemp("kitchen"),
        outside.ca_file,
        {**_pypi.hosts, **_npm.hosts},
        [*_pypi.private, *_npm.private],
    )
    yield kitchen
    kitchen.close()


@pytest.fixture
def pypi(pypi_registry: Any) -> Registry:
    return Registry(
        id="registries.python[0]",
        ecosystem=Ecosystem.PYPI,
        index=parse_base(pypi_registry.url),
        files=(parse_base(f"{pypi_registry.files.url}/"),),
    )


@pytest.fixture
def npm(npm_registry: Any) -> Registry:
    return Registry(id="registries.javascript[0]", ecosystem=Ecosystem.NPM, index=parse_base(npm_registry.url))
