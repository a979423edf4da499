"""One executor for the contract's tests, whose policy says nothing about limits: what holds then is the contract's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import MakeLab
from tests.contract.programs import LANGUAGES, Pair
from tests.lab import Lab, Outside, Run


def contract_policy(outside: Outside, **more: Any) -> str:
    """Every mode, both registries, and nothing else that the contract has a word about."""
    document = {
        "version": 1,
        "name": "tests-contract",
        "network": {
            "modes": ["block-all", "registry-default", "named", "unrestricted"],
            "registries": {"python": ["https://index.test/simple/"], "javascript": ["https://modules.test/"]},
            "hosts": {"local.test": "127.0.0.1"},
            "private_addresses": [{"host": "local.test", "cidr": "127.0.0.1/32", "ports": [outside.local.port]}],
            "ports": [80, 443, outside.local.port],
            "upstream": {"ca_file": str(outside.ca_file)},
        },
        **more,
    }
    return json.dumps(document, indent=1)  # JSON is YAML


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    """Each language in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def contract(open_lab: MakeLab, outside: Outside) -> Iterator[Lab]:
    """The executor that the contract's tests share."""
    with open_lab(contract_policy(outside)) as lab:
        yield lab


type Runs = Callable[..., Run]


@pytest.fixture
def run(contract: Lab, language: str) -> Runs:
    """Runs one of a pair of programs: that of the language."""

    def start(program: Pair, **fields: Any) -> Run:
        return contract.run(program[language], prelude=False, language=language, **fields)

    return start


def said(run: Run) -> Any:
    """What the program said, as JSON. It must have ended well."""
    assert run.result.status == "success", run.result.model_dump_json()
    return json.loads(run.result.stdout)


@pytest.fixture(scope="session")
def schemas(command: list[str]) -> dict[str, Any]:
    """The published schemas, as the command prints them."""

    def printed(name: str) -> Any:
        return json.loads(subprocess.run([*command, "schema", name], capture_output=True, check=True).stdout)

    return {name: printed(name) for name in ("call", "result")}
