"""What the black-box tests of packages share: policies that name the loopback registries, and what a call left behind.

Owns: the policy's text, the store's place, the lines of the log that belong to a preparation. Must not: look into the
product; only its library, its command, its log and the files of its state directory are used.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sandbox.contract import ToolResult
from tests.lab import Lab, Outside, read_events
from tests.registry.cast import write_advisories
from tests.registry.server import NpmRegistry, PypiRegistry

NAMES: dict[str, Any] = {
    "deny": {"pypi": ["denied"], "npm": ["ndenied"]},
    "allow": {"npm": ["nfresh"]},  # near a popular name by chance
    "internal_prefixes": {"pypi": ["acme-"], "npm": ["@acme/"]},
}


class Registries:
    """Both registries, with the advisories that speak of their packages, and policies under which calls use them."""

    def __init__(self, outside: Outside, pypi: PypiRegistry, npm: NpmRegistry, directory: Path) -> None:
        self.outside, self.pypi, self.npm = outside, pypi, npm
        self.advisories = write_advisories(directory, datetime.now(UTC).isoformat())

    def policy(self, *, attempts: dict[str, int] | None = None, ca_file: Path | None = None, **packages: Any) -> str:
        """A policy's text; `packages` are keys of its section, which then stand in place of the usual ones."""
        local = self.outside.local.port
        document = {
            "version": 1,
            "name": "tests-packages",
            "attempts": attempts or {"max": 1},
            "network": {
                "modes": ["block-all", "registry-default", "named"],
                "allow": [{"host": "local.test", "ports": [local]}],
                "registries": {"python": [self.pypi.url, f"{self.pypi.files.url}/"], "javascript": [self.npm.url]},
                "hosts": {**self.pypi.hosts, **self.npm.hosts, "local.test": "127.0.0.1"},
                "private_addresses": [
                    *self.pypi.private,
                    *self.npm.private,
                    {"host": "local.test", "cidr": "127.0.0.1/32", "ports": [local]},
                ],
                "upstream": {"ca_file": str(ca_file or self.outside.ca_file)},
            },
            "packages": {"prepare": True, "names": NAMES, "advisories": {"db_dir": str(self.advisories)}, **packages},
            "limits": {"timeout_seconds": {"default": 60, "max": 300}},
        }
        return json.dumps(document, indent=1)  # JSON is YAML

    def forget(self) -> None:
        self.pypi.forget()
        self.npm.forget()

    @property
    def paths(self) -> list[str]:
        return [*self.pypi.paths, *self.npm.paths]


def store_of(lab: Lab) -> Path:
    """Where the executor of a lab keeps what it has prepared."""
    return lab.policy.parent / "state" / "package-store"


def unfinished(store: Path) -> list[Path]:
    """What preparations that have ended, or were given up, must not leave."""
    return [*(store / "tmp").iterdir(), *(one for one in (store / "locks").iterdir() if one.name != "store")]


def preparation(log: Path, result: ToolResult) -> list[dict[str, Any]]:
    """The lines of the log that are of the sandboxes which prepared a call's packages."""
    return [one for one in read_events(log) if str(one.get("attempt_id")).startswith(f"{result.call_id}.prepare")]


def reasons(result: ToolResult) -> dict[str, str]:
    """Package -> reason, of a call whose packages were not had."""
    assert result.error is not None, result.stdout
    return {one.package: one.reason for one in result.error.packages}
