"""`make registries`: packages from the real registries, which the tests, in their closed world, cannot reach.

Prepares well known packages and imports them without a network, twice; lets code install packages by itself; and has
refused what the policy refuses. Prints a line for each case, and exits with 1 if one went otherwise than it should.
The registries are those that this host's own pip and npm are configured for. Everything else is in a directory that is
gone afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandbox import CodeCall, Executor, Settings, ToolResult

DENIED = {"pypi": ["colorama"], "npm": ["is-odd"]}
# Some networks answer the registries' names with addresses for documentation: as in the shipped policies.
DOCUMENTATION = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")
POLICY = {
    "version": 1,
    "name": "registries",
    "network": {
        "modes": ["block-all", "registry-default"],
        "registries": "auto",
        "private_addresses": [{"registries": True, "cidr": cidr, "ports": [443]} for cidr in DOCUMENTATION],
    },
    "packages": {"prepare": True, "names": {"deny": DENIED}},
    "limits": {"timeout_seconds": {"default": 120, "max": 300}, "memory_mib": {"default": 1024, "max": 2048}},
}
SNAPSHOT_SECONDS = 0.5  # what a call with a snapshot may take beside its attempt; a preparation takes longer


type Language = Literal["python", "javascript"]


class Missed(Exception):
    """A case went otherwise than it should."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Where calls are handed in, and the log that tells what was asked for."""

    executor: Executor
    log: Path

    async def call(
        self, language: Language, code: str, *packages: str, allow_network: bool = False
    ) -> tuple[ToolResult, float]:
        """The answer, and the seconds that it took beside the attempt."""
        began = time.monotonic()
        call = CodeCall(language=language, code=code, packages=list(packages), allow_network=allow_network)
        result = await self.executor.run(call)
        return result, time.monotonic() - began - result.usage.wall_seconds

    def requests(self, result: ToolResult) -> int:
        """How many requests were made for a call, by its preparation or by its code."""
        lines = map(json.loads, self.log.read_text(encoding="utf-8").splitlines())
        return sum(one.get("call_id") == result.call_id and one.get("layer") == "package" for one in lines)


type Case = Callable[[Desk], Awaitable[str]]


def prepared(language: Language, code: str, *packages: str) -> Case:
    """They are imported in an attempt without network; the second call asks for nothing."""

    async def case(desk: Desk) -> str:
        first, cold = await desk.call(language, code, *packages)
        expect_success(first)
        again, warm = await desk.call(language, code, *packages)
        expect_success(again)
        if desk.requests(first) == 0:
            raise Missed("the log has no request of the preparation")
        if (asked := desk.requests(again)) != 0:
            raise Missed(f"the second call made {asked} requests")
        if warm > SNAPSHOT_SECONDS:
            raise Missed(f"the second call took {warm:.2f} s beside its attempt")
        return f"{first.stdout.strip()}  (prepared in {cold:.1f} s, then {warm * 1000:.0f} ms)"

    return case


def installed(language: Language, code: str) -> Case:
    """The code installs a package by itself, from the registry that it may read."""

    async def case(desk: Desk) -> str:
        result, _ = await desk.call(language, code, allow_network=True)
        expect_success(result)
        if desk.requests(result) == 0:
            raise Missed("the log has no request")
        return result.stdout.strip().splitlines()[-1]

    return case


def not_installed(language: Language, code: str, reason: str) -> Case:
    """The code tries to, and the log says why it could not."""

    async def case(desk: Desk) -> str:
        result, _ = await desk.call(language, code, allow_network=True)
        denied = {row.reason for row in result.network.destinations if row.decision == "deny"}
        if result.exit_code == 0 or reason not in denied:
            raise Missed(f"exit code {result.exit_code}, denied: {denied or 'nothing'}: {result.stdout[-300:]}")
        return reason

    return case


def not_had(language: Language, package: str, code: str, reason: str) -> Case:
    """No attempt is made; the answer is a refusal, or that there is no such thing, and says why."""

    async def case(desk: Desk) -> str:
        result, _ = await desk.call(language, "1", package)
        found = None if result.error is None else (result.error.code, result.error.reason)
        if found != (code, reason) or result.attempts:
            raise Missed(f"it was {found}")
        return f"{code}, {reason}"

    return case


def expect_success(result: ToolResult) -> None:
    if result.status != "success":
        why = result.error.message if result.error is not None else ""
        raise Missed(f"{result.cause}: {why} {result.stderr.strip()[-500:]}".strip())


_PIP = (
    "import subprocess, sys\n"
    "if subprocess.run(['pip', 'install', '-q', {0!r}]).returncode: raise SystemExit(1)\n"
    "import {0} as it; print(it.__name__, it.__version__)\n"
)
_NPM = (
    "const done = require('child_process').spawnSync('npm install --silent {0}', {{shell: true, stdio: 'inherit'}});\n"
    "if (done.status) process.exit(1);\n"
    "console.log('{0}', require('{0}/package.json').version);\n"
)
_SCIENCE = "import matplotlib, numpy, pandas\nprint(numpy.__version__, pandas.__version__, matplotlib.__version__)"
_BOTH_KINDS = "import axios from 'axios'; console.log(require('lodash').VERSION, axios.VERSION)"
_BABEL = "const {parse} = require('@babel/parser'); console.log(parse('1 + 1').type)"

CASES: dict[str, Case] = {
    "requests": prepared("python", "import requests; print(requests.__version__)", "requests=="),
    "numpy, pandas, matplotlib": prepared("python", _SCIENCE, "numpy==", "pandas==", "matplotlib=="),
    "lodash, axios": prepared("javascript", _BOTH_KINDS, "lodash@", "axios@"),
    "@babel/parser": prepared("javascript", _BABEL, "@babel/parser@"),
    "pip install six": installed("python", _PIP.format("six")),
    "npm install is-number": installed("javascript", _NPM.format("is-number")),
    "pip install, of a denied name": not_installed("python", _PIP.format("colorama"), "name_denied"),
    "npm install, of a denied name": not_installed("javascript", _NPM.format("is-odd"), "name_denied"),
    "a version that is not there": not_had("python", "requests==0.0.1.2", "package_unavailable", "version_not_found"),
    "the same, of npm": not_had("javascript", "lodash@0.0.1", "package_unavailable", "version_not_found"),
    "a name that is not there": not_had(
        "python", "sluicegate-has-no-such-package==", "package_unavailable", "package_not_found"
    ),
    "source alone": not_had("python", "docopt==", "policy_refused", "no_wheel"),
    "an install script": not_had("javascript", "core-js@3.37.0", "policy_refused", "install_script_required"),
    "a denied name": not_had("python", "colorama==", "policy_refused", "name_denied"),
    "a denied name that is needed": not_had("javascript", "is-even@", "policy_refused", "name_denied"),
    "a name like a much used one": not_had("python", "requestss==", "policy_refused", "typosquat_suspect"),
}  # fmt: skip


async def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory(prefix="sluicegate-registries-") as directory:
        root = Path(directory)
        policy = root / "policy.yaml"
        policy.write_text(json.dumps(POLICY), encoding="utf-8")  # JSON is YAML
        log = root / "audit.jsonl"
        async with Executor(policy, settings=Settings(state_dir=root / "state", audit_log=log)) as executor:
            for name, case in CASES.items():
                began = time.monotonic()
                try:
                    mark, told = "ok", await case(Desk(executor, log))
                except Missed as error:
                    mark, told, missed = "MISSED", str(error), missed + 1
                print(f"{mark:6}  {time.monotonic() - began:5.1f} s  {name:30}  {told}", flush=True)
    print(f"{len(CASES) - missed} of {len(CASES)} as they should be")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
