"""The closed world, and the fixtures that the black-box tests share."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import world

if TYPE_CHECKING:  # the product is imported by the tests that need it, after the world is closed
    from tests.lab import Lab, Outside, Run
    from tests.registry.server import NpmRegistry, PypiRegistry
    from tests.remote import RemoteLab


def pytest_configure() -> None:
    try:
        world.enter()
    except OSError as error:
        pytest.exit(f"the tests need a network namespace of their own, and cannot have one: {error}", returncode=3)


@pytest.fixture(scope="session")
def packages() -> Path:
    """The packages that the tests' attempts can import: those of the environment that runs the tests."""
    return Path(sysconfig.get_paths()["purelib"])


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The command line tool, as a list of arguments."""
    return [sys.executable, "-m", "sandbox.cli"]


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """Every peer that the tests speak to, and the world's DNS."""
    from tests.lab import Outside
    from tests.servers import Loop

    with Loop() as loop:
        outside = Outside(loop, tmp_path_factory.mktemp("outside"))
        try:
            yield outside
        finally:
            outside.close()


type MakeLab = Callable[[str], contextlib.AbstractContextManager[Lab]]


@pytest.fixture(scope="session")
def open_lab(outside: Outside, packages: Path) -> MakeLab:
    """Starts an executor under a policy, given as text, with directories and a log of its own."""
    from sandbox import Settings, SyncExecutor
    from tests.lab import Lab

    @contextlib.contextmanager
    def start(text: str) -> Iterator[Lab]:
        root = Path(tempfile.mkdtemp(prefix="sg-"))
        try:
            policy, log = root / "policy.yaml", root / "audit.jsonl"
            policy.write_text(text)
            settings = Settings(state_dir=root / "state", audit_log=log, python_packages=packages)
            with SyncExecutor(policy, settings=settings) as executor:
                yield Lab(executor, policy, log, outside)
        finally:
            shutil.rmtree(root)

    return start


@pytest.fixture(scope="session")
def lab(open_lab: MakeLab, outside: Outside) -> Iterator[Lab]:
    """The executor that most tests share."""
    from tests.lab import main_policy, unrestricted_policy

    with open_lab(main_policy(outside)) as lab, open_lab(unrestricted_policy(outside)) as unrestricted:
        lab.unrestricted = unrestricted
        yield lab


@pytest.fixture(scope="session")
def _pypi(outside: Outside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PypiRegistry]:
    from tests.registry.server import PypiRegistry

    with PypiRegistry(outside.dns.loop, outside.authority, tmp_path_factory.mktemp("pypi")) as registry:
        outside.dns.zone.update(registry.zone)
        yield registry


@pytest.fixture(scope="session")
def _npm(outside: Outside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NpmRegistry]:
    from tests.registry.server import NpmRegistry

    with NpmRegistry(outside.dns.loop, outside.authority, tmp_path_factory.mktemp("npm")) as registry:
        outside.dns.zone.update(registry.zone)
        yield registry


@pytest.fixture
def pypi_registry(_pypi: PypiRegistry) -> PypiRegistry:
    """The Python index with the hostile packages, which has seen nothing yet. Its names are in the tests' DNS."""
    _pypi.forget()
    return _pypi


@pytest.fixture
def npm_registry(_npm: NpmRegistry) -> NpmRegistry:
    """The npm registry with the hostile packages, which has seen nothing yet. Its names are in the tests' DNS."""
    _npm.forget()
    return _npm


@pytest.fixture(scope="session")
def unprivileged_lab(outside: Outside, packages: Path) -> Iterator[RemoteLab]:
    """The same, of a user who is nobody."""
    from tests.remote import RemoteLab
    from tests.unprivileged import unprivileged_command

    with unprivileged_command() as prefix, RemoteLab(prefix, outside, packages) as lab:
        yield lab


@pytest.fixture(params=["as-we-are", "unprivileged"])
def confined(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Runs a probe in a sandbox, once as each user."""
    if request.param == "unprivileged":
        if os.getuid() != 0:
            pytest.skip("the tests already run as an unprivileged user")
        remote: RemoteLab = request.getfixturevalue("unprivileged_lab")
        return remote.run
    lab: Lab = request.getfixturevalue("lab")
    return lab.run
