"""The registries as real servers, over TLS, with names of their own.

In a test, by fixture (session-wide; each forgets what it saw before every test that takes it):

    def test_x(pypi_registry: PypiRegistry, npm_registry: NpmRegistry) -> None:
        pypi_registry.url            # https://pypi.test:41234/simple/ : what a policy's `network.registries` names
        pypi_registry.hosts          # {"pypi.test": "127.0.0.1", ...} : a policy's `network.hosts`
        pypi_registry.private        # a policy's `network.private_addresses`, for those hosts and ports
        pypi_registry.paths          # every raw path that reached any of its sites, as "GET /simple/x/"
        pypi_registry.index.journal.requests        # whole requests: method, target, headers, body
        pypi_registry.packages.add(wheel(...))      # more packages, beside the cast's
        pypi_registry.markers.ran("setup-py")       # whether code of a hostile package has run

Without fixtures: `with Loop() as loop, PypiRegistry(loop, trustme.CA(), directory) as registry: ...`.

Each listens at 127.0.0.1 and a free port, or at the address and port given. The names lead there by the policy's
`hosts`, and by the tests' DNS (`registry.zone`). What packages refer to outside of any registry is at `rogue.test`.

Owns: the sites and their names. Must not: know the product.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import traceback
from asyncio import StreamWriter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import trustme

from tests.registry.answers import NOT_FOUND, Answer
from tests.registry.build import Markers, npm_tarball, wheel
from tests.registry.cast import fill_npm, fill_pypi
from tests.registry.npm import NpmIndex
from tests.registry.pypi import PypiIndex
from tests.servers import Https, Loop, SeenRequest

PYPI, FILES, NPM, ROGUE = "pypi.test", "files.test", "npm.test", "rogue.test"


class Site(Https):
    """An HTTPS server whose answers are made by a function."""

    def __init__(
        self,
        loop: Loop,
        address: str,
        port: int,
        authority: trustme.CA,
        name: str,
        respond: Callable[[SeenRequest], Answer],
    ) -> None:
        self.name = name
        self._respond = respond
        super().__init__(loop, address, port, authority, [name, address])

    @property
    def url(self) -> str:
        return f"https://{self.name}" + ("" if self.port == 443 else f":{self.port}")

    async def _answer(self, seen: SeenRequest, writer: StreamWriter) -> None:
        try:
            answer = self._respond(seen)
        except Exception:  # noqa: BLE001 - a fault of the registry's is for the client's output, not for the loop's log
            answer = Answer(500, traceback.format_exc().encode(), "text/plain")
        writer.write(answer.wire(seen))


class _Registry:
    """What both have: sites, names, journals, and the traces of code that ran."""

    def __init__(self, loop: Loop, authority: trustme.CA, directory: Path, address: str) -> None:
        self.nonce = secrets.token_hex(6)
        self.now = datetime.now(UTC)
        self.address = address
        self.ca_file = directory / "ca.pem"
        self.ca_file.write_bytes(authority.cert_pem.bytes())
        (directory / "markers").mkdir()
        self.markers = Markers(directory / "markers", self.nonce)
        self.outside_files: dict[str, bytes] = {}
        self.rogue = Site(loop, address, 0, authority, ROGUE, self._answer_rogue)
        self.sites: list[Site] = [self.rogue]

    def _answer_rogue(self, seen: SeenRequest) -> Answer:
        data = self.outside_files.get(seen.target)
        return NOT_FOUND if data is None else Answer(200, data)

    @property
    def hosts(self) -> dict[str, str]:
        return {site.name: site.address for site in self.sites}

    @property
    def zone(self) -> dict[str, list[str]]:
        """The same for the tests' DNS, whose clients may ask for it without a policy."""
        return {site.name: [site.address] for site in self.sites}

    @property
    def private(self) -> list[dict[str, Any]]:
        return [{"host": one.name, "cidr": f"{one.address}/32", "ports": [one.port]} for one in self.sites]

    @property
    def paths(self) -> list[str]:
        """Every request's method and raw path, site by site."""
        return [f"{seen.method} {seen.target}" for site in self.sites for seen in site.journal.requests]

    @property
    def untouched(self) -> bool:
        return all(site.untouched for site in self.sites)

    def forget(self) -> None:
        for site in self.sites:
            site.forget()
        self.markers.forget()

    def close(self) -> None:
        for site in self.sites:
            site.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PypiRegistry(_Registry):
    """The Python index and its files, at two hosts."""

    def __init__(
        self, loop: Loop, authority: trustme.CA, directory: Path, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(loop, authority, directory, address)
        self.packages = PypiIndex(self.now)
        self.index = Site(loop, address, port, authority, PYPI, self.packages.answer_index)
        self.files = Site(loop, address, 0, authority, FILES, self.packages.answer_file)
        self.sites += [self.index, self.files]
        self.packages.index_url, self.packages.files_url = self.index.url, self.files.url
        for one in (wheel("libx", "6.6"), wheel("offsite", "1.0")):
            self.outside_files[f"/{one.filename}"] = one.data
            self.outside_files[f"/{one.filename}.metadata"] = one.metadata or b""
        fill_pypi(self.packages, self.markers, self.rogue.url)

    @property
    def url(self) -> str:
        return f"{self.index.url}/simple/"


class NpmRegistry(_Registry):
    """The npm registry."""

    def __init__(
        self, loop: Loop, authority: trustme.CA, directory: Path, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(loop, authority, directory, address)
        self.packages = NpmIndex(self.now)
        self.index = Site(loop, address, port, authority, NPM, self.packages.answer)
        self.sites += [self.index]
        self.packages.url = self.index.url
        self.outside_files["/nlib-6.6.6.tgz"] = npm_tarball({"name": "nlib", "version": "6.6.6"})
        fill_npm(self.packages, self.markers, self.rogue.url)
        self.outside_files["/noffsite-1.0.0.tgz"] = self.packages.tarball("noffsite", "1.0.0")

    @property
    def url(self) -> str:
        return f"{self.index.url}/"


def npm_command() -> list[str]:
    """How npm is started: the one beside the interpreter, or else the one on the PATH."""
    return [_program("npm")]


def node_command() -> list[str]:
    return [_program("node")]


def pip_command() -> list[str]:
    return [sys.executable, "-m", "pip"]


def uv_command() -> list[str]:
    return [_program("uv")]


def _program(name: str) -> str:
    found = shutil.which(name, path=_search_path())
    assert found is not None, f"these tests need `{name}`, beside the interpreter or on the PATH"
    return found


def _search_path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def client_environment(home: Path, registry: PypiRegistry | NpmRegistry, **more: str) -> Mapping[str, str]:
    """What a package client needs to trust a registry and to find it, made from nothing: empty home, empty caches."""
    for name in ("tmp", "cache"):
        (home / name).mkdir(parents=True, exist_ok=True)
    authority = str(registry.ca_file)
    return {
        "PATH": _search_path(),
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "SSL_CERT_FILE": authority,
        "PIP_CERT": authority,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "NPM_CONFIG_CAFILE": authority,
        "NPM_CONFIG_UPDATE_NOTIFIER": "false",
        "NPM_CONFIG_FUND": "false",
        "NPM_CONFIG_FETCH_RETRIES": "0",
        "GIT_SSL_CAINFO": authority,
        **({"NPM_CONFIG_REGISTRY": registry.url} if isinstance(registry, NpmRegistry) else _index(registry)),
        **more,
    }


def _index(registry: PypiRegistry) -> dict[str, str]:
    return {"PIP_INDEX_URL": registry.url, "UV_DEFAULT_INDEX": registry.url}


def arguments(*parts: str | Path | Sequence[str]) -> list[str]:
    """One argument vector of many parts."""
    return [text for part in parts for text in ([str(part)] if isinstance(part, str | Path) else part)]
