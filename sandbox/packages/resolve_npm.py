"""How npm is asked, inside the preparation sandbox, which tarballs a set of packages needs. Pure.

Owns: the command, its environment (from nothing) and the `package.json` it reads. Must not: run it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sandbox.isolation.plan import WORKSPACE

HOME = f"{WORKSPACE}/home"
PROJECT = f"{WORKSPACE}/project"  # the working directory, with the `package.json` and nothing else


REMOTE_OFF = "EALLOWREMOTE"  # what npm says when it needs a tarball by its URL, and may not


def npm_argv(*, registry: str, node: str, npm: str, by_url: bool = False) -> tuple[str, ...]:
    """`node` and `npm` are paths in the sandbox: the program, and npm's own `npm-cli.js`.

    `by_url`: tarballs that are named by their URL are followed. npm counts those of the registry among them, when it
    needs to look into one: for what it bundles, or for its shrinkwrap. The proxy lets it reach none but the registry's.
    """
    return (
        node, npm, "install",
        "--package-lock-only", "--lockfile-version=3",
        "--ignore-scripts",
        "--allow-git=none", "--allow-file=none", "--allow-directory=none",
        f"--allow-remote={'all' if by_url else 'none'}",
        f"--registry={registry}",
        "--no-audit", "--no-fund", "--no-update-notifier", "--no-progress", "--no-color",
        "--omit=dev",
        "--fetch-retries=1", "--loglevel=error", "--logs-max=0",
        f"--cache={WORKSPACE}/cache",
        f"--userconfig={WORKSPACE}/none-user", f"--globalconfig={WORKSPACE}/none-global",
    )  # fmt: skip


def npm_environment(runtime: Mapping[str, str], *, authority: str) -> dict[str, str]:
    """All that npm has. `runtime` is an attempt's environment, which leads to the proxy.

    `authority` is what npm trusts: the proxy's own, which opens every connection of a preparation, and no other.
    """
    taken = ("HTTP_PROXY", "HTTPS_PROXY", "LANG")
    return {
        **{name: runtime[name] for name in taken if name in runtime},
        "NPM_CONFIG_CAFILE": authority,
        "HOME": HOME,
        "PATH": "/usr/bin:/bin",
        "NO_PROXY": "",
    }


def npm_project(dependencies: Sequence[tuple[str, str]]) -> str:
    """The `package.json`: names and ranges, rebuilt from their parsed form."""
    return json.dumps({"name": "sluicegate-preparation", "private": True, "dependencies": dict(dependencies)}, indent=1)
