"""The policies that come with the program do what the cases beside them say, and the cases cover what a policy promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.network import Mode
from sandbox.policy_cases import check_cases, parse_cases
from sandbox.policy_file import load_policy, parse_policy, to_yaml
from sandbox.state import shipped_policies

POLICIES = sorted(path for path in shipped_policies().glob("*.yaml") if not path.name.endswith(".cases.yaml"))

MODES = {
    "default": {Mode.BLOCK_ALL, Mode.REGISTRY_DEFAULT},
    "research": {Mode.BLOCK_ALL, Mode.REGISTRY_DEFAULT, Mode.NAMED},
    "tenants": {Mode.BLOCK_ALL, Mode.REGISTRY_DEFAULT, Mode.NAMED},
    "open": {Mode.BLOCK_ALL, Mode.REGISTRY_DEFAULT, Mode.NAMED, Mode.UNRESTRICTED},
}


def test_these_policies_are_shipped() -> None:
    assert {path.stem for path in POLICIES} == set(MODES)


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_shipped_policy_bears_its_name_and_surprises_nobody(path: Path) -> None:
    loaded = load_policy(path)
    assert loaded.policy.name == path.stem
    assert loaded.warnings == ()
    assert set(loaded.policy.network.modes) == MODES[path.stem]
    assert parse_policy(to_yaml(loaded.policy)).digest == loaded.digest


def test_the_shipped_tenants_have_tokens_that_nobody_has() -> None:
    """Their hashes are numbers that nobody knows a text for."""
    tenants = load_policy(shipped_policies() / "tenants.yaml").policy.tenants
    hashes = [token.sha256 for tenant in tenants for token in tenant.tokens]
    assert hashes == [f"{number:064x}" for number in range(1, len(hashes) + 1)]


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_cases_beside_a_shipped_policy_hold(path: Path) -> None:
    cases_path = path.with_name(f"{path.stem}.cases.yaml")
    cases = parse_cases(cases_path.read_text(), cases_path.name)
    failed = [(c.place, c.title, c.differences) for c in check_cases(load_policy(path), cases) if c.differences]
    assert failed == []


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_cases_reach_every_mode_that_the_policy_lists_and_every_denied_rule(path: Path) -> None:
    cases_path = path.with_name(f"{path.stem}.cases.yaml")
    cases = parse_cases(cases_path.read_text(), cases_path.name).cases
    loaded = load_policy(path)
    assert {case.call.mode for case in cases} >= set(Mode)
    named = {case.rule for case in cases}
    denied = {f"network.deny[{place}]" for place in range(len(loaded.policy.network.deny))}
    for tenant in loaded.policy.tenants:
        denied |= {f"tenants.{tenant.name}.network.deny[{place}]" for place in range(len(tenant.network.deny))}
        assert {case.call.mode for case in cases if case.tenant == tenant.name} == set(Mode)
    assert denied <= named
    assert {"allow", "deny"} <= {case.verdict for case in cases}
