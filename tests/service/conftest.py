"""Services that the tests of this directory share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from tests.service.serving import Service, Token, policy_text


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short path: a unix socket's has 107 bytes at most."""
    made = Path(tempfile.mkdtemp(prefix="sg-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="package")
def _root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="sg-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="package")
def single(_root: Path) -> Iterator[Service]:
    """Without tenants, on a unix socket."""
    place = _root / "single"
    place.mkdir()
    policy = policy_text(
        limits={"timeout_seconds": {"default": 20, "max": 60}, "memory_mib": {"default": 256, "max": 512}},
        service={"max_body_mib": 1},
        code_exec={"working_directories": [str(_root / "projects")]},
    )
    (_root / "projects").mkdir()
    with Service(place, policy) as service:
        yield service


@pytest.fixture
def client(single: Service) -> Iterator[httpx.Client]:
    with single.client() as client:
        yield client


@dataclass
class Tenants:
    """A service for two tenants over TCP and TLS, and their tokens."""

    service: Service
    authority: trustme.CA
    acme: Token
    acme_alice: Token
    acme_admin: Token
    globex: Token

    def client(self, token: Token | None, **headers: str) -> httpx.Client:
        return self.service.client(token, ca=self.authority, **headers)


def tls_options(root: Path, authority: trustme.CA) -> list[str]:
    """The files of a certificate for loopback, as options."""
    issued = authority.issue_cert("127.0.0.1", "localhost", "runner.test")
    issued.cert_chain_pems[0].write_to_path(str(root / "cert.pem"))
    issued.private_key_pem.write_to_path(str(root / "key.pem"))
    return ["--tls-cert", str(root / "cert.pem"), "--tls-key", str(root / "key.pem")]


@pytest.fixture(scope="package")
def tenants(_root: Path) -> Iterator[Tenants]:
    place = _root / "tenants"
    place.mkdir()
    authority = trustme.CA()
    acme, alice, globex = Token("ci"), Token("alice", user="alice"), Token("ci")
    admin = Token("admin", admin=True)
    policy = policy_text(
        tenants=[
            {"name": "acme", "tokens": [acme.entry, alice.entry, admin.entry], "concurrency": 2, "queue": 1},
            {"name": "globex", "tokens": [globex.entry], "rate": {"per_minute": 1, "burst": 2}},
        ]
    )
    options = [*tls_options(place, authority), "--allowed-host", "runner.test"]
    with Service(place, policy, "--host", "127.0.0.1", "--port", "0", *options) as service:
        yield Tenants(service, authority, acme, alice, admin, globex)
