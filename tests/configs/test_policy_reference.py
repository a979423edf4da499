"""`docs/policy.md` has every key, reason and refusal, and its examples are policies without surprises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from proxy.network import Mode, Reason
from sandbox import narrowing
from sandbox.policy.schema import Policy
from sandbox.policy.tenants import Tenant
from sandbox.policy_cases import check_cases, parse_cases
from sandbox.policy_file import parse_policy

REFERENCE = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(version: 1\n.*?)```", REFERENCE, re.DOTALL)


WRITTEN_AS_ONE = ("timeout_seconds", "memory_mib", "registries", "rate")
PER_ECOSYSTEM = (
    "packages.names.allow", "packages.names.deny", "packages.names.internal_prefixes", "packages.versions.deny",
    "packages.similarity.list_files", "packages.exemptions",
)  # fmt: skip


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        inner = [part for part in [info.annotation] if isinstance(part, type) and issubclass(part, BaseModel)]
        if inner and name not in WRITTEN_AS_ONE and f"{prefix}{name}" not in PER_ECOSYSTEM:
            yield from keys(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("key", list(keys(Policy)))
def test_every_key_has_its_line(key: str) -> None:
    assert f"| `{key}` |" in REFERENCE


@pytest.mark.parametrize("key", ["tokens[].name", "tokens[].sha256", "tokens[].admin", "tokens[].user", *keys(Tenant)])
def test_every_key_of_a_tenant_has_its_line(key: str) -> None:
    lines = [line for line in REFERENCE.partition("| key of a tenant |")[2].splitlines() if line.startswith("|")]
    assert any(f"`{key}`" in line.split("|")[1] for line in lines)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_line(reason: Reason) -> None:
    assert f"| `{reason}` |" in REFERENCE


def test_every_refusal_and_every_mode_is_there() -> None:
    codes = set(re.findall(r'"([a-z]+_[a-z_]+)"', inspect.getsource(narrowing)))
    assert {"mode_not_allowed", "domain_denied", "timeout_not_allowed"} <= codes
    for word in codes | set(Mode):
        assert f"`{word}`" in REFERENCE


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.split("name: ")[1].split()[0])
def test_the_examples_are_policies_without_surprises(text: str) -> None:
    assert parse_policy(text).warnings == ()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 4


def test_the_example_of_cases_holds_for_a_policy_that_allows_the_shop() -> None:
    (text,) = re.findall(r"```yaml\n(# shop\.cases\.yaml.*?)```", REFERENCE, re.DOTALL)
    shop = parse_policy("version: 1\nnetwork: {modes: [block-all, named], allow: [{host: shop.example}]}")
    assert [case.differences for case in check_cases(shop, parse_cases(text, "shop.cases.yaml"))] == [()] * 4
