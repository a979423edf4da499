"""The published description is that of the routes: clients that are made from it find what they expect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.contract import CodeCall, InvalidCall
from sandbox.service.errors import ErrorBody
from tests.service.serving import Service, Token, policy_text

TOP = Path(__file__).parents[2]
DOCS = (TOP / "docs" / "service.md").read_text()


def description(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def operations(client: httpx.Client) -> dict[str, dict[str, Any]]:
    paths = description(client)["paths"]
    return {f"{method.upper()} {path}": one for path, item in paths.items() for method, one in item.items()}


def test_it_is_of_version_3_1(client: httpx.Client) -> None:
    assert description(client)["openapi"].startswith("3.1.")


def test_every_route_is_in_the_documentation_and_no_other(client: httpx.Client) -> None:
    written = set(re.findall(r"^\| `((?:GET|POST|DELETE) /[^`]*)`", DOCS, re.MULTILINE))
    names = {re.sub(r"\{\w+\}", "{id}", name) for name in operations(client)}
    assert written == names | {"GET /openapi.json", "POST /mcp"}


def test_every_parameter_is_in_the_documentation(client: httpx.Client) -> None:
    for name, operation in operations(client).items():
        for parameter in operation.get("parameters", []):
            if "name" in parameter and parameter["in"] == "query":
                assert f"`{parameter['name']}`" in DOCS, (name, parameter["name"])


def test_a_calls_schema_is_the_published_one_and_what_detaches_it(client: httpx.Client) -> None:
    published = CodeCall.model_json_schema(ref_template="#/components/schemas/{model}")
    described = description(client)["components"]["schemas"]["CodeCall"]
    background = described["properties"].pop("background")
    assert background["type"] == ["boolean", "null"]
    assert described == {key: value for key, value in published.items() if key != "$defs"}


def test_every_error_has_the_same_form(client: httpx.Client) -> None:
    for name, operation in operations(client).items():
        for status, answer in operation["responses"].items():
            if int(status) >= 400 and name != "GET /readyz":
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (name, status)
    for answer in (
        client.get("/nowhere"),
        client.put("/v1/calls"),
        client.get("/v1/calls/x"),
        client.post("/v1/calls"),
    ):
        assert ErrorBody.model_validate_json(answer.content).error.code


def codes_in_the_code() -> set[str]:
    """Every code of an error, from where they are made."""
    found = set()
    for path in (TOP / "sandbox" / "service").glob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'HttpError\(\s*[^,]+?, "(\w+)"', text))
        found |= set(re.findall(r'_unavailable\("(\w+)"', text))
        if path.name == "model.py":
            found |= set(re.findall(r'    code = "(\w+)"', text))
            for choices in re.findall(r"code: Literal\[(.*?)\]", text):
                found |= set(re.findall(r'"(\w+)"', choices))
    return found - {"error"} | {InvalidCall.code}


def test_every_code_of_an_error_is_in_the_documentation_and_no_other() -> None:
    made = codes_in_the_code()
    assert len(made) > 20
    rows = re.findall(r"^\| \d{3} \| (.*?) \|", DOCS, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == made


# What schemathesis is told beside the description: a call has rules that no JSON Schema can say (which texts are hosts
# and packages, which fields go together); headers are looked at before the route; and a call that was ended is still there to be looked at.
HINTS = """
[checks]
use_after_free.enabled = false
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 413, 415, 422, 431]

[[operations]]
include-name = ["POST /v1/calls", "POST /v1/code_exec", "GET /v1/policy/explain"]
checks.positive_data_acceptance.enabled = false

[[operations]]
include-name = "POST /v1/code_exec"
checks.unsupported_method.enabled = false
"""


def probe(root: Path, examples: int) -> None:
    """Have schemathesis ask what the description allows, and what it does not, of a service of its own."""
    token = Token("ci", admin=True)
    policy = policy_text(tenants=[{"name": "acme", "tokens": [token.entry]}], limits={"timeout_seconds": {"max": 5}})
    (root / "schemathesis.toml").write_text(HINTS)
    with Service(root, policy, "--port", "0") as service:
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "schemathesis"), "run", f"{service.place}/openapi.json",
                "--header", f"Authorization: Bearer {token.text}", "--phases", "examples,coverage,fuzzing,stateful",
                "--max-examples", str(examples), "--seed", "1", "--suppress-health-check", "all", "--no-color",
                "--continue-on-failure",
            ],
            cwd=root, env={**os.environ, "HOME": str(root)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert "internal error" not in service.log
        with service.client(token) as client:
            assert client.get("/v1/calls").json()["calls"], "some of it was run"


@pytest.mark.timeout(300)
def test_whatever_is_asked_the_answer_is_one_that_is_described(root: Path) -> None:
    probe(root, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_much_more_is_asked(root: Path) -> None:
    probe(root, 150)
