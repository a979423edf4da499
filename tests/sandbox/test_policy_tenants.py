"""The sections of a policy file that the service reads: what they may say, and how it is told when they may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.policy_file import InvalidPolicy, parse_policy, policy_schema, to_yaml
from sandbox.tokens import new_token

HASH = "0123456789abcdef" * 4
NAMED: dict[str, Any] = {"modes": ["block-all", "registry-default", "named"]}
TOKEN = {"name": "ci", "sha256": HASH}


def text(tenants: list[dict[str, Any]] | None = None, network: dict[str, Any] | None = None, **top: Any) -> str:
    own = {} if tenants is None else {"tenants": tenants}
    return json.dumps({"version": 1, "network": NAMED | (network or {})} | own | top)  # JSON is YAML


def faults(policy: str) -> dict[str, str]:
    """The faults by key, each with its hint; empty when the policy is valid."""
    try:
        parse_policy(policy, file="p.yaml")
    except InvalidPolicy as error:
        return {p.key: f"{p.message} | {p.hint}" for p in error.problems}
    return {}


def warnings(policy: str) -> dict[str, str]:
    return {p.key: f"{p.message} | {p.hint}" for p in parse_policy(policy, file="p.yaml").warnings}


def tenant(**own: Any) -> dict[str, Any]:
    return {"name": "acme", "tokens": [TOKEN]} | own


# What is valid


def test_what_is_left_out_is_bounded() -> None:
    policy = parse_policy(text([{"name": "acme", "tokens": [TOKEN]}])).policy
    (acme,) = policy.tenants
    assert (acme.concurrency, acme.queue, acme.rate) == (4, 32, None)
    assert (acme.network.modes, acme.network.allow, acme.network.deny) == (None, None, ())
    assert (acme.tokens[0].admin, acme.tokens[0].user) == (False, None)
    assert (policy.calls.keep_hours, policy.calls.keep_mib) == (24, 1024)
    assert (policy.service.max_body_mib, policy.service.max_connections) == (4, 256)
    assert (policy.code_exec.network.value, policy.code_exec.working_directories) == ("block-all", ())
    assert (policy.code_exec.user_data.max_mib, policy.code_exec.user_data.max_files) == (1024, 100_000)


def test_a_policy_without_tenants_has_none() -> None:
    assert parse_policy("version: 1").policy.tenants == ()
    assert parse_policy("version: 1\ntenants: []").policy.tenants == ()


def test_a_hash_is_the_same_in_capitals() -> None:
    assert parse_policy(text([tenant(tokens=[{"name": "ci", "sha256": HASH.upper()}])])).policy.tenants[0].tokens[
        0
    ].sha256 == HASH  # fmt: skip


FULL: dict[str, Any] = {
    "name": "acme",
    "tokens": [TOKEN, {"name": "root", "sha256": "f" * 64, "admin": True, "user": "alice@x"}],
    "network": {"modes": ["named"], "allow": [{"host": "x.a.test"}], "deny": [{"host": "y.x.a.test"}]},
    "limits": {"timeout_seconds": {"default": 5, "max": 60}, "memory_mib": {"max": 256}},
    "packages": {"prepare": False},
    "concurrency": 2, "queue": 0, "rate": {"per_minute": 60},
}  # fmt: skip


def test_everything_at_once_surprises_nobody_and_comes_back_from_its_text() -> None:
    whole = text(
        [FULL, {"name": "b", "tokens": [{"name": "ci", "sha256": "e" * 64}]}], {"allow": [{"host": "a.test"}]},
        packages={"prepare": True}, calls={"keep_mib": 10}, service={"max_body_mib": 1, "max_connections": 10},
        code_exec={"network": "named", "domains": ["x.a.test"], "user_data": {"max_mib": 10, "max_files": 100},
                   "working_directories": ["/srv/projects", "/home/alice"]},
    )  # fmt: skip
    loaded = parse_policy(whole)
    assert loaded.warnings == ()
    again = parse_policy(to_yaml(loaded.policy))
    assert again.policy == loaded.policy
    assert again.digest == loaded.digest
    assert again.policy.tenants[0].rate is not None
    assert again.policy.tenants[0].rate.burst == 20


def test_the_digest_is_of_the_tenants_too() -> None:
    digests = {parse_policy(text(own)).digest for own in ([], [tenant()], [tenant(queue=1)], [tenant(tokens=[])])}
    assert len(digests) == 4


tokens = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "1e5", "null", "b.c-d_e"]), "sha256": st.sampled_from(["a" * 64, "1" * 64, "1e" + "0" * 62])},
        optional={"admin": st.booleans(), "user": st.sampled_from(["alice", "7", "true", "a@b+c"])},
    ),
    max_size=2,
)  # fmt: skip
sections = st.fixed_dictionaries(
    {"name": st.sampled_from(["acme", "1", "null", "0x1", "x.y"])},
    optional={
        "tokens": tokens,
        "network": st.fixed_dictionaries(
            {}, optional={"modes": st.lists(st.sampled_from(NAMED["modes"]), min_size=1, unique=True),
                          "allow": st.lists(st.just({"host": "a.test", "ports": [443]}), max_size=2),
                          "deny": st.lists(st.just({"cidr": "10.0.0.0/8"}), max_size=1)},
        ),
        "limits": st.fixed_dictionaries({}, optional={"timeout_seconds": st.fixed_dictionaries(
            {}, optional={"default": st.floats(1, 30), "max": st.integers(30, 300)})}),
        "packages": st.fixed_dictionaries({}, optional={"prepare": st.booleans()}),
        "concurrency": st.integers(1, 9), "queue": st.integers(0, 9),
        "rate": st.fixed_dictionaries({"per_minute": st.integers(1, 9)}, optional={"burst": st.integers(1, 9)}),
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None)  # the first one loads the list of suffixes
@given(st.lists(sections, max_size=3))
def test_tenants_to_text_to_tenants_is_the_identity(tenants: list[dict[str, Any]]) -> None:
    try:
        loaded = parse_policy(text(tenants))
    except InvalidPolicy:
        return  # what is drawn may say something twice
    again = parse_policy(to_yaml(loaded.policy))
    assert again.policy == loaded.policy
    assert to_yaml(again.policy) == to_yaml(loaded.policy)


# What is not


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    # a tenant's keys, key, part of the message, part of the hint
    ({"name": "Acme"}, "name", "`Acme` is not a name", "small letters"),
    ({"name": ".."}, "name", "`..`", "a letter or a digit first"),
    ({"name": "a/b"}, "name", "`a/b`", "small letters"),
    ({"name": 5}, "name", "not a number", "quotation marks"),
    ({"name": "x" * 65}, "name", "is not a name", "up to 64"),
    ({"tokens": "x"}, "tokens", "a list is expected", "sha256"),
    ({"tokens": ["ci"]}, "tokens[0]", "a mapping is expected", "- {name: ci, sha256: …}"),
    ({"tokens": [{"name": "ci"}]}, "tokens[0].sha256", "missing", "sha256"),
    ({"tokens": [{"name": "ci", "sha256": "abc"}]}, "tokens[0].sha256", "64 hexadecimal digits", "sluicegate token"),
    ({"tokens": [{"name": "ci", "sha256": 5}]}, "tokens[0].sha256", "64 hexadecimal digits", "sluicegate token"),
    ({"tokens": [{"name": "ci", "sha256": "g" * 64}]}, "tokens[0].sha256", "64 hexadecimal", "sluicegate token"),
    ({"tokens": [{"name": "ci", "token": "x", "sha256": HASH}]}, "tokens[0].token", "no such key", "the hash alone"),
    ({"tokens": [TOKEN | {"user": "../x"}]}, "tokens[0].user", "not a user's name", "letters, digits"),
    ({"tokens": [TOKEN | {"user": 7}]}, "tokens[0].user", "not a number", "quotation marks"),
    ({"tokens": [TOKEN | {"admin": "yes"}]}, "tokens[0].admin", "`true` or `false`", "true"),
    ({"tokens": [TOKEN, TOKEN | {"sha256": "f" * 64}]}, "tokens[1].name", "`tenants[0].tokens[0]` has this name", "its own"),
    ({"tokens": [TOKEN, TOKEN | {"name": "b"}]}, "tokens[1].sha256", "`tenants[0].tokens[0]` is the same", "sluicegate token"),
    ({"modes": ["named"]}, "modes", "no such key", "`network`"),
    ({"network": {"modes": []}}, "network.modes", "empty", "block-all"),
    ({"network": {"modes": ["unrestricted"]}}, "network.modes[0]", "a tenant has no more", "drop it here"),
    ({"network": {"allow": [{"host": "*.a.test"}]}}, "network.allow[0].host", "*.a.test", "`a.test`"),
    ({"network": {"allow": [{"host": "co.uk"}]}}, "network.allow[0].host", "public suffix", "example.co.uk"),
    ({"network": {"allow": [{"host": "a.test"}, {"host": "A.test"}]}}, "network.allow[1]", "`tenants[0].network.allow[0]`", "drop"),
    ({"network": {"allow": [{"host": "a.test", "port": 1}]}}, "network.allow[0].port", "no such key", "ports: [443]"),
    ({"network": {"allow": ["a.test"]}}, "network.allow[0]", "a mapping is expected", "- host: a.test"),
    ({"network": {"deny": [{"cidr": "9.0.0.0/8"}] * 2}}, "network.deny[1]", "`tenants[0].network.deny[0]`", "drop"),
    ({"network": {"ports": [443]}}, "network.ports", "no such key", "`modes`, `allow`, `deny`"),
    ({"limits": {"timeout_seconds": {"max": 400}}}, "limits.timeout_seconds.max", "from 1 to 300", "seconds"),
    ({"limits": {"timeout_seconds": {"max": 200}}}, "limits.timeout_seconds.max", "above the operator's", "lower it"),
    ({"limits": {"timeout_seconds": {"default": 200}}}, "limits.timeout_seconds.default", "above the operator's", "lower it"),
    ({"limits": {"memory_mib": {"max": 2000}}}, "limits.memory_mib.max", "`limits.memory_mib.max`, 1024", "lower it"),
    ({"limits": {"memory_mib": {"default": 300, "max": 200}}}, "limits.memory_mib", "above `max`", "lower `default`"),
    ({"limits": {"output_mib": 1}}, "limits.output_mib", "no such key", "`timeout_seconds`"),
    ({"packages": {"prepare": True}}, "packages.prepare", "a tenant has no more", "for all"),
    ({"packages": {"names": {}}}, "packages.names", "no such key", "`prepare`"),
    ({"concurrency": 0}, "concurrency", "from 1", "calls"),
    ({"queue": -1}, "queue", "from 0", "calls"),
    ({"rate": {}}, "rate.per_minute", "missing", "per_minute"),
    ({"rate": 5}, "rate", "a mapping is expected", ""),
    ({"rate": {"per_minute": 0}}, "rate.per_minute", "from 1", "requests a minute"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "key", "message", "hint"), WRONG)
def test_what_cannot_be_meant_is_an_error_with_the_form_to_write(
    own: dict[str, Any], key: str, message: str, hint: str
) -> None:
    limits = {"timeout_seconds": {"max": 100}, "memory_mib": {"max": 1024}}
    found = faults(text([tenant(**own)], limits=limits))
    assert list(found) == [f"tenants[0].{key}"]
    told, _, advice = found[f"tenants[0].{key}"].partition(" | ")
    assert message in told
    assert hint in advice


TOP_WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tenants": ["acme"]}, "tenants[0]", "a mapping is expected", "- name: acme"),
    ({"tenants": {"acme": {}}}, "tenants", "a list is expected", "name: acme"),
    ({"tenants": [{}]}, "tenants[0].name", "missing", "name"),
    ({"tenants": [tenant(), {"name": "acme"}]}, "tenants[1].name", "`tenants[0]` has this name", "its own"),
    ({"tenants": [tenant(), {"name": "b", "tokens": [TOKEN]}]}, "tenants[1].tokens[0].sha256", "`tenants[0].tokens[0]`", "another"),
    ({"code_exec": {"network": "unrestricted"}}, "code_exec.network", "every call of the tool is refused", "add `unrestricted`"),
    ({"code_exec": {"network": "named"}}, "code_exec.domains", "there are none", "[example.com]"),
    ({"code_exec": {"domains": ["a.test"]}}, "code_exec.domains", "mode `block-all` name no hosts", "network: named"),
    ({"code_exec": {"network": "named", "domains": ["10.0.0.1"]}}, "code_exec.domains[0]", "an address", ""),
    ({"code_exec": {"network": "named", "domains": ["a.test", "A.test."]}}, "code_exec.domains", "twice", "keep one"),
    ({"code_exec": {"network": "named", "domains": ["com"]}}, "code_exec.domains[0]", "public suffix", "example.com"),
    ({"code_exec": {"packages": ["numpy>=2"]}}, "code_exec.packages[0]", "numpy>=2", ""),
    ({"code_exec": {"packages": [5]}}, "code_exec.packages[0]", "a package is text", "numpy=="),
    ({"code_exec": {"packages": ["numpy==2.1.3"]}}, "code_exec.packages", "`packages.prepare` is `false`", "prepare: true"),
    (
        {"code_exec": {"packages": ["numpy==2.1.3", "NumPy==2.1.2"]}, "packages": {"prepare": True}},
        "code_exec.packages[1]", "the same package", "keep one",
    ),
    (
        {"code_exec": {"packages": ["a==1", "b==1"]}, "packages": {"prepare": True, "max_specifiers": 1}},
        "code_exec.packages", "`packages.max_specifiers` is 1", "list fewer",
    ),
    ({"code_exec": {"working_directories": "/srv"}}, "code_exec.working_directories", "a list", "[/srv/projects]"),
    ({"code_exec": {"working_directories": ["srv"]}}, "code_exec.working_directories[0]", "not an absolute", "/srv/projects"),
    ({"code_exec": {"working_directories": ["~/x"]}}, "code_exec.working_directories[0]", "not an absolute", "/srv/projects"),
    ({"code_exec": {"working_directories": ["/"]}}, "code_exec.working_directories[0]", "the whole host", "/srv/projects"),
    ({"code_exec": {"working_directories": ["//"]}}, "code_exec.working_directories[0]", "the whole host", "/srv/projects"),
    ({"code_exec": {"working_directories": ["/srv/../etc"]}}, "code_exec.working_directories[0]", "`..`", "is meant"),
    ({"code_exec": {"working_directories": ["/srv/"]}}, "code_exec.working_directories[0]", "plain form", "`/srv`"),
    ({"code_exec": {"working_directories": ["//srv/./x"]}}, "code_exec.working_directories[0]", "plain form", "`/srv/x`"),
    ({"code_exec": {"working_directories": ["/a\nb"]}}, "code_exec.working_directories[0]", "a directory is expected", ""),
    ({"code_exec": {"working_directories": ["/a", "/a"]}}, "code_exec.working_directories", "twice", "keep one"),
    ({"code_exec": {"user_data": {"max_mib": 0}}}, "code_exec.user_data.max_mib", "from 1", "MiB"),
    ({"code_exec": {"user_data": {"max_files": 1.5}}}, "code_exec.user_data.max_files", "whole number", "files"),
    ({"code_exec": {"timeout": 5}}, "code_exec.timeout", "no such key", "`network`"),
    ({"service": {"max_body_mib": 0}}, "service.max_body_mib", "from 1", "MiB"),
    ({"service": {"max_connections": "x"}}, "service.max_connections", "a number is expected", "connections"),
    ({"calls": {"keep_mib": 0}}, "calls.keep_mib", "from 1", "MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("top", "key", "message", "hint"), TOP_WRONG)
def test_what_cannot_be_meant_of_the_service_is_an_error(
    top: dict[str, Any], key: str, message: str, hint: str
) -> None:
    found = faults(text(**top))
    assert list(found) == [key]
    told, _, advice = found[key].partition(" | ")
    assert message in told
    assert hint in advice


@pytest.mark.parametrize(
    "network",
    [
        {"allow": [{"host": "b.test"}]},
        {"deny": [{"host": "a.test"}]},
        {"allow": [{"host": "a.test", "subdomains": False}], "deny": [{"host": "test"}]},
    ],
)
def test_a_domain_of_the_tool_that_the_operator_refuses_is_an_error(network: dict[str, Any]) -> None:
    found = faults(text(None, network, code_exec={"network": "named", "domains": ["a.test"]}))
    assert "every call of the tool is refused" in found["code_exec.domains[0]"]
    assert faults(text(None, {}, code_exec={"network": "named", "domains": ["a.test"]})) == {}


def test_every_fault_of_every_tenant_is_reported_at_once_and_in_its_place() -> None:
    found = parse_fault_places(
        "version: 1\n"
        "network: {modes: [block-all]}\n"
        "tenants:\n"
        "  - name: Bad\n"
        "    network: {modes: [named]}\n"
        "  - name: acme\n"
        f"    tokens: [{{name: a, sha256: x}}, {{name: b, sha256: {HASH}}}, {{name: c, sha256: {HASH}}}]\n"
        "    network: {modes: [block-all, named], allow: [{host: 5}, {host: a.test}, {host: a.test}]}\n"
        "    rate: {burst: 3}\n"
        "    limits: {timeout_seconds: {max: 500}, memory_mib: {max: 2048}}\n"
        "limits: {memory_mib: {max: 1024}}\n"
    )
    assert found == [
        ("tenants[0].name", 4), ("tenants[1].tokens[0].sha256", 7), ("tenants[1].tokens[2].sha256", 7),
        ("tenants[1].network.modes[1]", 8), ("tenants[1].network.allow[0].host", 8), ("tenants[1].network.allow[2]", 8),
        ("tenants[1].rate.per_minute", 9), ("tenants[1].limits.timeout_seconds.max", 10),
        ("tenants[1].limits.memory_mib.max", 10),
    ]  # fmt: skip


def parse_fault_places(policy: str) -> list[tuple[str, int]]:
    with pytest.raises(InvalidPolicy) as caught:
        parse_policy(policy)
    return [(problem.key, problem.mark.line) for problem in caught.value.problems if problem.mark is not None]


@pytest.mark.parametrize(
    ("top", "own", "key"),
    [
        ("network: {modes: [all]}", "network: {modes: [named]}", "network.modes[0]"),
        ("network: {modes: }", "network: {modes: [named]}", "network.modes"),
        ("limits: {memory_mib: {max: 5000}}", "limits: {memory_mib: {max: 2048}}", "limits.memory_mib.max"),
        ("limits: {memory_mib: 5}", "limits: {memory_mib: {max: 2048}}", "limits.memory_mib"),
        ("packages: {prepare: maybe}", "packages: {prepare: true}", "packages.prepare"),
        ("packages: yes", "packages: {prepare: true}", "packages"),
    ],
)
def test_a_fault_of_the_operators_part_brings_none_of_the_tenants_along(top: str, own: str, key: str) -> None:
    """What cannot be told while another key is wrong is not told."""
    assert list(faults(f"version: 1\n{top}\ntenants:\n  - name: acme\n    {own}\n")) == [key]


def test_a_fault_of_the_tools_mode_brings_none_along() -> None:
    for own in ("network: none, domains: [a.test]", "network: named, domains: [5]"):
        assert len(faults(f"version: 1\nnetwork: {{modes: [block-all, named]}}\ncode_exec: {{{own}}}\n")) == 1


@pytest.mark.parametrize("place", ["sha256", "name", "user", "plain", "key"])
def test_a_token_that_stands_in_the_file_is_in_no_message(place: str) -> None:
    token = new_token()
    entry: Any = {
        "sha256": {"name": "ci", "sha256": token}, "name": TOKEN | {"name": token}, "user": TOKEN | {"user": f" {token}"},
        "plain": token, "key": TOKEN | {token: True},
    }[place]  # fmt: skip
    with pytest.raises(InvalidPolicy) as caught:
        parse_policy(text([tenant(tokens=[entry])]))
    assert token[4:] not in str(caught.value)


# What may surprise


WARNED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # the operator's network, a tenant's keys, key, part of the message
    ({}, {"tokens": []}, "", "nobody can call as it"),
    ({}, {"tokens": [TOKEN | {"admin": True}]}, "tokens[0].admin", "working_directories` is empty"),
    ({"allow": [{"host": "a.test"}]}, {"network": {"allow": [{"host": "b.test"}]}}, "network.allow[0]", "no rule of `network.allow` covers `b.test`"),
    ({"allow": [{"host": "a.test", "ports": [443]}]}, {"network": {"allow": [{"host": "a.test", "ports": [80]}]}}, "network.allow[0]", "at other ports"),
    ({"allow": [{"host": "a.test", "methods": ["GET"]}]}, {"network": {"allow": [{"host": "a.test", "methods": ["POST"]}]}}, "network.allow[0]", "other methods"),
    ({"allow": [{"host": "a.test"}]}, {"network": {"allow": [{"host": "a.test", "ports": [443], "protocol": "tcp"}]}}, "network.allow[0]", "protocols"),
    ({"allow": [{"host": "a.test", "subdomains": False}]}, {"network": {"allow": [{"host": "x.a.test"}]}}, "network.allow[0]", "covers `x.a.test`"),
    ({}, {"network": {"allow": [{"host": "a.test", "ports": [5432], "protocol": "tcp"}]}}, "network.allow[0]", "HTTP at 80, 443"),
    ({"deny": [{"host": "test"}]}, {"network": {"allow": [{"host": "a.test"}]}}, "network.allow[0]", "`network.deny[0]` denies all"),
    ({}, {"network": {"allow": [{"host": "a.test"}], "deny": [{"host": "test"}]}}, "network.allow[0]", "`tenants[0].network.deny[0]` denies all"),
    ({}, {"network": {"allow": []}}, "network.allow", "none is allowed"),
    ({}, {"network": {"modes": ["block-all"], "allow": [{"host": "a.test"}]}}, "network.allow", "never read"),
    ({}, {"network": {"modes": ["named"]}}, "network.modes", "`code_exec.network` is `block-all`"),
]  # fmt: skip


@pytest.mark.parametrize(("network", "own", "key", "message"), WARNED)
def test_what_is_legal_of_a_tenant_and_may_surprise_is_a_warning(
    network: dict[str, Any], own: dict[str, Any], key: str, message: str
) -> None:
    found = warnings(text([tenant(**own)], network))
    assert list(found) == [f"tenants[0].{key}".rstrip(".")]
    assert message in found[f"tenants[0].{key}".rstrip(".")]


@pytest.mark.parametrize(
    ("network", "own"),
    [
        ({"allow": [{"host": "x.a.test"}]}, [{"host": "a.test"}]),
        ({"allow": [{"host": "a.test"}]}, [{"host": "x.a.test"}]),
        ({"allow": [{"host": "b.test"}, {"host": "a.test", "ports": [8443]}]}, [{"host": "a.test", "ports": [8443]}]),
        ({"allow": [{"host": "a.test", "ports": [1], "protocol": "tcp"}]}, [{"host": "a.test", "ports": [1], "protocol": "tcp"}]),
        ({}, [{"host": "a.test", "methods": ["GET"]}]),
        ({"ports": [8080]}, [{"host": "a.test"}]),
    ],
)  # fmt: skip
def test_what_both_allow_is_not_warned_of(network: dict[str, Any], own: list[dict[str, Any]]) -> None:
    assert warnings(text([tenant(network={"allow": own})], network)) == {}


@pytest.mark.parametrize(
    ("own", "code_exec", "key"),
    [
        ({"network": {"modes": ["block-all"]}}, {"network": "registry-default"}, "network.modes"),
        ({"network": {"allow": [{"host": "b.test"}]}}, {"network": "named", "domains": ["a.test"]}, "network.allow"),
        ({"packages": {"prepare": False}}, {"packages": ["numpy==2.1.3"]}, "packages.prepare"),
    ],
)
def test_a_tenant_whose_calls_of_the_tool_are_all_refused_is_warned_of(
    own: dict[str, Any], code_exec: dict[str, Any], key: str
) -> None:
    found = warnings(text([tenant(**own)], code_exec=code_exec, packages={"prepare": True}))
    assert list(found) == [f"tenants[0].{key}"]
    assert "every call of the `code_exec` tool is refused this tenant" in found[f"tenants[0].{key}"]


def test_the_tool_without_its_usual_mode_is_warned_of_where_it_is_meant_to_be_used() -> None:
    """A policy of before the tool stays as it was."""
    only = {"modes": ["named"]}
    assert warnings(text(None, only)) == {}
    found = warnings(text(None, only, code_exec={"user_data": {"max_mib": 5}}))
    assert "every call of the tool is refused" in found["code_exec.network"]


def test_directories_within_one_another_are_warned_of() -> None:
    found = warnings(text(code_exec={"working_directories": ["/srv/projects/x", "/srv/projects", "/srv/projects-old"]}))
    assert list(found) == ["code_exec.working_directories[0]"]


def test_a_rule_of_a_tenants_that_judges_what_is_passed_through_is_an_error() -> None:
    own = tenant(network={"allow": [{"host": "a.test", "paths": ["/x"]}]})
    found = faults(text([own], {"inspect": {"passthrough": ["a.test"]}}))
    assert "`tenants[0].network.allow[0]` judges methods or paths" in found["network.inspect.passthrough[0]"]


def test_an_allow_list_of_a_tenants_beside_unrestricted_is_an_error_wherever_the_mode_is_from() -> None:
    network = {"modes": ["named", "block-all", "unrestricted"]}
    for own in ({}, {"modes": ["named", "unrestricted", "block-all"]}):
        found = faults(text([tenant(network=own | {"allow": [{"host": "a.test"}]})], network))
        assert "`unrestricted`, which no allow list limits" in found["tenants[0].network.allow"]
    assert (
        faults(text([tenant(network={"modes": ["named", "block-all"], "allow": [{"host": "a.test"}]})], network)) == {}
    )


def test_the_schema_has_the_keys_of_a_tenant_with_their_forms() -> None:
    definitions = policy_schema()["$defs"]
    assert set(definitions["Tenant"]["properties"]) == {
        "name", "tokens", "network", "limits", "packages", "concurrency", "queue", "rate",
    }  # fmt: skip
    assert definitions["Tenant"]["required"] == ["name"]
    assert set(definitions["Token"]["properties"]) == {"name", "sha256", "admin", "user"}
    assert set(definitions["CodeExecSection"]["properties"]) == {
        "network", "domains", "packages", "user_data", "working_directories",
    }  # fmt: skip
    assert definitions["Token"]["properties"]["sha256"]["pattern"] == "^[0-9A-Fa-f]{64}$"
    assert definitions["TenantNetwork"]["properties"]["allow"]["items"] == {"$ref": "#/$defs/AllowRule"}
