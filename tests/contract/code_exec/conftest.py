"""The tool, reached in three ways; and users who have not done anything yet."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.code_exec.driver import SINGLE_USER, Driver, Who
from tests.contract.code_exec.library import LibraryDriver
from tests.contract.code_exec.over_http import HttpDriver
from tests.contract.code_exec.over_mcp import TENANTS, McpDriver
from tests.unprivileged import GID, UID, unprivileged_command

WAYS: dict[str, type[Driver]] = {"library": LibraryDriver, "http": HttpDriver, "mcp": McpDriver}

_numbers = itertools.count(1)


def policy(root: Path, **more: Any) -> str:
    """No network, and nothing about limits: what holds then is the tool's own."""
    document = {
        "version": 1,
        "name": "tests-code-exec",
        "network": {"modes": ["block-all"]},
        "code_exec": {"working_directories": [str(root / "projects")]},
        **more,
    }
    return json.dumps(document, indent=1)  # JSON is YAML


@contextlib.contextmanager
def installed(way: str) -> Iterator[Driver]:
    """The tool with a policy and a state of its own, not started. `unprivileged` is HTTP to a service of nobody's."""
    root = Path(tempfile.mkdtemp(prefix="sg-"))
    try:
        with contextlib.ExitStack() as stack:
            prefix = stack.enter_context(unprivileged_command()) if way == "unprivileged" else []
            tenants = {"tenants": TENANTS} if way == "mcp" else {}
            (root / "policy.yaml").write_text(policy(root, **tenants))
            (root / "single-user.yaml").write_text(policy(root))
            driver = WAYS["http" if way == "unprivileged" else way](root, prefix)
            if prefix:
                root.chmod(0o777)
                os.chown(driver.client_directory, UID, GID)
            if isinstance(driver, HttpDriver | McpDriver):
                stack.callback(driver.end)
            yield driver
    finally:
        shutil.rmtree(root)


@pytest.fixture(scope="session", params=[*WAYS, pytest.param("unprivileged", marks=pytest.mark.slow)])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Each way to the tool in turn. Its tests share one installation."""
    if request.param == "unprivileged" and os.getuid() != 0:
        pytest.skip("the tests already run as an unprivileged user")
    with installed(request.param) as driver:
        driver.start()
        try:
            yield driver
        finally:
            driver.close()


type MakeUser = Callable[[], Who]


@pytest.fixture
def new_user(request: pytest.FixtureRequest) -> Iterator[MakeUser]:
    """Makes ordinary users who have done nothing yet."""
    made: list[Who] = []

    def make() -> Who:
        made.append(Who(f"user-{next(_numbers)}"))
        return made[-1]

    yield make
    if "driver" in request.fixturenames:
        for who in made:
            request.getfixturevalue("driver").forget(who)


@pytest.fixture
def user(new_user: MakeUser) -> Who:
    """An ordinary user."""
    return new_user()


@pytest.fixture
def other(new_user: MakeUser) -> Who:
    """Another one."""
    return new_user()


@pytest.fixture
def single_user(driver: Driver) -> Who:
    """A single-user run, whose client's directory is empty."""
    empty(driver.client_directory)
    return SINGLE_USER


@pytest.fixture(params=["ordinary", "single-user"])
def who(request: pytest.FixtureRequest) -> Who:
    """Each kind of caller in turn."""
    found: Who = request.getfixturevalue("user" if request.param == "ordinary" else "single_user")
    return found


@pytest.fixture(params=["ordinary", pytest.param("single-user", marks=pytest.mark.slow)])
def anyone(request: pytest.FixtureRequest) -> Who:
    """The same, where the rule is one and the ways around it are many."""
    found: Who = request.getfixturevalue("user" if request.param == "ordinary" else "single_user")
    return found


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
