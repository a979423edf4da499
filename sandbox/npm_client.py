"""Asking npm which registry it is configured for: the npm beside the Node.js that attempts run on.

Owns: the question, a subprocess of about 0.2 s. Must not: know any registry by name, or judge the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

from sandbox.runtimes.javascript import Node

_TIMEOUT_SECONDS = 30.0
_NPM = "lib/node_modules/npm/bin/npm-cli.js"
# Global: no file of a project is read, as npm would look for one in the working directory and above.
_QUESTION = ("config", "list", "--json", "--global", "--loglevel=silent", "--no-update-notifier")
_INJECTING = frozenset({"NODE_OPTIONS", "NODE_PATH", "NODE_DEBUG"})  # for programs of the caller's, not for this one


@dataclass(frozen=True, slots=True)
class NpmFacts:
    """What npm would do with no option given.

    `registry` is None where npm does not tell it: it has a user name or password in it. `scopes` have a registry of
    their own.
    """

    npm_version: str
    registry: str | None
    scopes: tuple[str, ...]


def ask_npm(node: Node) -> NpmFacts | str:
    """The facts, or why there are none."""
    environment = {name: value for name, value in os.environ.items() if name not in _INJECTING}
    try:
        done = subprocess.run(
            [f"{node.directory}/bin/node", f"{node.directory}/{_NPM}", *_QUESTION],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_SECONDS, cwd="/", env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or "it cannot be started").lower()
    if done.returncode != 0:
        return f"npm ended with status {done.returncode}"  # what it says may quote a password
    try:
        facts = json.loads(done.stdout)
        registry = facts.get("registry")
        return NpmFacts(
            npm_version=str(facts["npm-version"]),
            registry=registry if isinstance(registry, str) else None,
            scopes=tuple(
                sorted(key.removesuffix(":registry") for key in facts if key[:1] == "@" and key.endswith(":registry"))
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its answer was not understood"
