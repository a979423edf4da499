"""`sluicegate policy`: its exit status and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sandbox.policy_commands import app
from sandbox.policy_file import default_policy_path

POLICY = """\
version: 1
name: shop
network:
  modes: [block-all, registry-default, named]
  allow:
    - host: shop.test
      methods: [GET]
      paths: ["/public/**"]
    - {host: db.test, ports: [5432], protocol: tcp}
    - host: pin.test
    - host: box.test
  deny:
    - host: bad.shop.test
  hosts: {box.test: 10.0.0.1}
  private_addresses:
    - {host: box.test, cidr: 10.0.0.0/8, ports: [443]}
  inspect: {passthrough: [pin.test]}
  registries: {python: [https://index.test/simple/]}
"""
CASES = """\
cases:
  - {call: [shop.test], request: GET https://shop.test/public/x, verdict: allow, rule: "network.allow[0]"}
  - {call: [shop.test], request: GET https://shop.test/x, verdict: deny, reason: path_not_allowed}
  - {call: registry-default, request: https://index.test/simple/six/, verdict: allow}
  - {call: unrestricted, request: https://shop.test/, verdict: refused, reason: mode_not_allowed, rule: network.modes}
"""

type Run = Callable[..., Any]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "shop.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


# check


def test_a_valid_policy_is_said_to_be_one(run: Run, policy: Path) -> None:
    result = run("check", policy)
    assert result.exit_code == 0
    assert "policy `shop` is valid; it allows block-all, registry-default, named" in result.stdout
    assert "sha256:" in result.stdout
    assert result.stderr == ""


def test_what_may_surprise_is_printed_and_is_no_failure(run: Run, policy: Path) -> None:
    policy.write_text("version: 1\nnetwork: {modes: [named], allow: [{host: github.io}]}\n")
    result = run("check", policy)
    assert result.exit_code == 0
    assert f"warning: {policy}:2:36: `network.allow[0].host`: `github.io` is shared hosting" in result.stderr


def test_an_invalid_policy_exits_with_2_and_every_fault(run: Run, policy: Path) -> None:
    policy.write_text("version: 1\nnetwork: {modes: [], ports: [0]}\n")
    result = run("check", policy)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [line.split("`")[1] for line in result.stderr.splitlines() if line.startswith(str(policy))] == [
        "network.modes", "network.ports[0]",
    ]  # fmt: skip


def test_a_file_that_is_not_there_exits_with_2(run: Run, tmp_path: Path) -> None:
    result = run("check", tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "no such file" in result.stderr


# explain


EXPLAINED = [
    (["https://shop.test/public/x"], 1, "network_off", "mode:block-all"),
    (["--domain", "shop.test", "https://shop.test/public/x"], 0, "allowed", "network.allow[0]"),
    (["--domain", "SHOP.test.", "HTTPS://Shop.Test./public/x"], 0, "allowed", "network.allow[0]"),
    (["--domain", "shop.test", "https://shop.test/x"], 1, "path_not_allowed", "network.allow[0]"),
    (["--domain", "shop.test", "--method", "POST", "https://shop.test/public/x"], 1, "method_not_allowed", "network.allow[0]"),
    (["--domain", "shop.test", "https://bad.shop.test/"], 1, "host_denied", "network.deny[0]"),
    (["--domain", "shop.test", "https://db.test/"], 1, "host_not_allowed", "call.domains"),
    (["--domain", "db.test", "db.test:5432"], 0, "allowed", "network.allow[1]"),
    (["--domain", "db.test", "db.test:5433"], 1, "port_not_allowed", "network.allow[1]"),
    (["--domain", "shop.test", "shop.test:22"], 1, "port_not_allowed", "network.allow[0]"),
    (["--domain", "box.test", "https://box.test/"], 0, "allowed", "network.allow[3]"),
    (["--domain", "box.test", "http://box.test/"], 1, "address_not_public", "network.private_addresses[0]"),
    (["--domain", "pin.test", "https://pin.test/"], 0, "allowed", "network.allow[2]"),
    (["--allow-network", "https://index.test/simple/six/"], 0, "allowed", "registries.python[0]"),
    (["--allow-network", "https://shop.test/"], 1, "host_not_allowed", "registries.python"),
    (["--allow-network", "--domain", "shop.test", "https://index.test/"], 1, "host_not_allowed", "network.allow"),
    (["--unrestricted", "https://shop.test/"], 1, "mode_not_allowed", "network.modes"),
    (["--domain", "other.test", "https://other.test/"], 1, "domain_not_allowed", "network.allow"),
    (["--domain", "bad.shop.test", "https://bad.shop.test/"], 1, "domain_denied", "network.deny[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "status", "reason", "rule"), EXPLAINED)
def test_an_explanation_has_verdict_reason_and_rule(
    run: Run, policy: Path, arguments: list[str], status: int, reason: str, rule: str | None
) -> None:
    plain, as_json = (
        run("explain", "--policy", policy, *arguments),
        run("explain", "--policy", policy, "--json", *arguments),
    )
    assert (plain.exit_code, as_json.exit_code) == (status, status)
    answer = json.loads(as_json.stdout)
    assert (answer["reason"], answer["rule"]) == (reason, rule)
    assert (answer["verdict"] == "allow") is (status == 0)
    assert f"reason {reason}, rule {rule or '-'}" in plain.stdout
    assert plain.stdout.startswith(answer["verdict"])


def test_the_layers_are_shown_in_order_up_to_the_denial(run: Run, policy: Path) -> None:
    result = run("explain", "--policy", policy, "--domain", "shop.test", "--json", "https://shop.test/x")
    layers = json.loads(result.stdout)["layers"]
    assert [(layer["layer"], layer["verdict"]) for layer in layers] == [
        ("dns", "allow"), ("connect", "allow"), ("tls", "allow"), ("http", "deny"),
    ]  # fmt: skip


def test_an_allowed_name_is_said_to_be_vetted_at_the_dial(run: Run, policy: Path) -> None:
    result = run("explain", "--policy", policy, "--domain", "shop.test", "https://shop.test/public/x")
    assert "not looked up here; each address the name resolves to is vetted" in result.stdout
    static = run("explain", "--policy", policy, "--domain", "box.test", "https://box.test/")
    assert "allow 10.0.0.1 (allowed, network.private_addresses[0])" in static.stdout


def test_a_host_passed_through_is_said_not_to_be_seen(run: Run, policy: Path) -> None:
    result = run("explain", "--policy", policy, "--domain", "pin.test", "--method", "POST", "https://pin.test/")
    assert "http    not seen: TLS to this host is passed through unopened" in result.stdout


def test_registries_are_shown_with_where_they_come_from(run: Run, policy: Path) -> None:
    result = run("explain", "--policy", policy, "--allow-network", "https://index.test/simple/six/")
    assert "registries.python[0]: index.test:443 - `network.registries.python[0]` of the policy" in result.stdout


def test_what_pip_is_configured_for_is_shown_for_auto(run: Run, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.write_text("version: 1\nnetwork: {modes: [registry-default]}\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.test/simple/")
    result = run("explain", "--policy", policy, "--allow-network", "--json", "https://mirror.test/simple/six/")
    registries = json.loads(result.stdout)["registries"]
    assert [(entry["host"], entry["port"]) for entry in registries] == [("mirror.test", 443)]
    assert "`index-url` that pip" in registries[0]["source"]


def test_a_registry_that_cannot_be_found_out_exits_with_2(
    run: Run, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy.write_text("version: 1\nnetwork: {modes: [registry-default]}\n")
    monkeypatch.setenv("PIP_INDEX_URL", "/srv/index")
    result = run("explain", "--policy", policy, "--allow-network", "https://mirror.test/")
    assert result.exit_code == 2
    assert "registries: {python:" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shop.test"], "cannot be explained"),
        (["ftp://shop.test/"], "cannot be explained"),
        (["--unrestricted", "--domain", "a.test", "https://a.test/"], "exclude one another"),
        (["--domain", "1.2.3.4", "https://a.test/"], "an address where a host name belongs"),
        (["--domain", "a b", "https://a.test/"], "not a host name"),
        (["--language", "cobol", "https://a.test/"], "language"),
        (["--policy", "/nonexistent", "https://a.test/"], "no such file"),
    ],
)
def test_arguments_that_are_none_exit_with_2(run: Run, arguments: list[str], message: str) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_without_a_policy_the_shipped_default_is_in_force(run: Run) -> None:
    answer = json.loads(run("explain", "--json", "https://a.test/").stdout)
    assert (answer["policy"]["name"], answer["policy"]["path"]) == ("default", str(default_policy_path()))
    assert answer["reason"] == "network_off"


# test


def test_cases_that_hold_exit_with_0(run: Run, policy: Path) -> None:
    cases = policy.with_name("shop.cases.yaml")
    cases.write_text(CASES)
    result = run("test", cases)
    assert result.exit_code == 0
    assert "4 of 4 cases hold for policy `shop`" in result.stdout


def test_a_case_that_fails_exits_with_1_and_says_what_came_instead(run: Run, policy: Path) -> None:
    cases = policy.with_name("shop.cases.yaml")
    cases.write_text(CASES + "  - {name: wish, call: [shop.test], request: https://shop.test/x, verdict: allow}\n")
    result = run("test", cases)
    assert result.exit_code == 1
    assert "FAILED cases[4] wish" in result.stdout
    assert "verdict is `deny`, not `allow`" in result.stdout
    assert "4 of 5 cases hold" in result.stdout


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("{call: open, request: 'https://a.test/', verdict: allow}", "cases[0].call"),
        ("{call: [], request: 'https://a.test/', verdict: allow}", "cases[0].call"),
        ("{call: block-all, request: a.test, verdict: allow}", "cases[0].request"),
        ("{call: block-all, request: 'https://a.test/', verdict: maybe}", "cases[0].verdict"),
        ("{call: block-all, request: 'https://a.test/', verdict: deny}", "cases[0]"),
        ("{call: block-all, request: 'https://a.test/', verdict: deny, reason: because}", "cases[0]"),
        ("{call: block-all, request: 'https://a.test/', verdict: allow, adress: 1.1.1.1}", "cases[0].adress"),
        ("{call: block-all, verdict: allow}", "cases[0].request"),
    ],
)
def test_a_case_that_is_none_exits_with_2(run: Run, policy: Path, line: str, key: str) -> None:
    cases = policy.with_name("shop.cases.yaml")
    cases.write_text(f"cases:\n  - {line}\n")
    result = run("test", cases)
    assert result.exit_code == 2
    assert f"`{key}`" in result.stderr


@pytest.mark.parametrize("text", ["", "cases: []", "cases:", "[]", "cases: [&a {}]"])
def test_a_file_without_cases_exits_with_2(run: Run, policy: Path, text: str) -> None:
    cases = policy.with_name("shop.cases.yaml")
    cases.write_text(text)
    assert run("test", cases).exit_code == 2


def test_cases_name_their_policy_or_bear_its_name(run: Run, policy: Path) -> None:
    cases = policy.with_name("other.yaml")
    cases.write_text(CASES)
    assert "does not say which policy" in run("test", cases).stderr
    cases.write_text("policy: shop.yaml\n" + CASES)
    assert run("test", cases).exit_code == 0
    cases.write_text("policy: none.yaml\n" + CASES)
    assert run("test", cases).exit_code == 2


# schema


def test_the_schema_is_json_and_bears_its_dialect(run: Run) -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


# Tenants


TENANTS = f"""\
tenants:
  - name: acme
    tokens: [{{name: ci, sha256: "{1:064x}"}}]
    network: {{modes: [block-all, named], allow: [{{host: shop.test, paths: ["/public/a/**"]}}]}}
"""


@pytest.fixture
def shared(policy: Path) -> Path:
    policy.write_text(POLICY + TENANTS)
    return policy


@pytest.mark.parametrize(
    ("arguments", "status", "reason", "rule"),
    [
        (["--domain", "shop.test", "https://shop.test/public/a/x"], 0, "allowed", "network.allow[0]"),
        (["--domain", "shop.test", "https://shop.test/public/x"], 1, "path_not_allowed", "tenants.acme.network.allow[0]"),
        (["--domain", "shop.test", "https://shop.test/x"], 1, "path_not_allowed", "network.allow[0]"),
        (["--domain", "db.test", "db.test:5432"], 1, "domain_not_allowed", "tenants.acme.network.allow"),
        (["--allow-network", "https://index.test/simple/six/"], 1, "mode_not_allowed", "tenants.acme.network.modes"),
        (["--unrestricted", "https://shop.test/"], 1, "mode_not_allowed", "network.modes"),
    ],
)  # fmt: skip
def test_a_request_of_a_tenants_is_explained_under_its_own_policy(
    run: Run, shared: Path, arguments: list[str], status: int, reason: str, rule: str
) -> None:
    result = run("explain", "--policy", shared, "--tenant", "acme", *arguments)
    assert result.exit_code == status
    assert f"reason {reason}, rule {rule}" in result.stdout
    assert f"policy shop ({shared}), tenant acme, mode" in result.stdout
    found = json.loads(run("explain", "--policy", shared, "--tenant", "acme", "--json", *arguments).stdout)
    assert (found["tenant"], found["reason"], found["rule"]) == ("acme", reason, rule)


def test_without_a_tenant_the_operators_policy_is_explained(run: Run, shared: Path) -> None:
    arguments = ["--policy", shared, "--domain", "shop.test", "https://shop.test/public/x"]
    assert run("explain", *arguments).exit_code == 0
    assert json.loads(run("explain", "--json", *arguments).stdout)["tenant"] is None


def test_a_tenant_that_there_is_not_exits_with_2_and_says_which_there_are(run: Run, policy: Path) -> None:
    arguments = ["--policy", policy, "--tenant", "nobody", "https://shop.test/"]
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert "has no tenant `nobody`\nhint: it has none" in result.stderr
    policy.write_text(POLICY + TENANTS)
    assert "hint: it has `acme`" in run("explain", *arguments).stderr


def test_check_says_which_tenants_there_are(run: Run, shared: Path) -> None:
    assert "registry-default, named; tenants: acme\n" in run("check", shared).stdout


def test_a_case_may_be_of_a_tenant(run: Run, shared: Path) -> None:
    cases = shared.with_name("shop.cases.yaml")
    cases.write_text(
        """\
cases:
  - {call: [shop.test], request: https://shop.test/public/x, verdict: allow}
  - {tenant: acme, call: [shop.test], request: https://shop.test/public/x, verdict: deny, reason: path_not_allowed, rule: "tenants.acme.network.allow[0]"}
  - {tenant: acme, call: [shop.test], request: https://shop.test/public/a/x, verdict: deny, reason: path_not_allowed}
  - {tenant: nobody, call: [shop.test], request: https://shop.test/public/x, verdict: allow}
"""
    )  # fmt: skip
    result = run("test", cases)
    assert result.exit_code == 1
    assert "FAILED cases[2] acme, shop.test: GET https://shop.test/public/a/x" in result.stdout
    assert "the policy `shop` has no tenant `nobody`" in result.stdout
    assert "2 of 4 cases hold" in result.stdout
