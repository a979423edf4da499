"""Effective = operator AND call: a call gets what both allow, or is refused with the layer and the rule that refuse."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.destinations import Host, parse_host
from proxy.explain import explain, parse_target
from proxy.network import Grant, Mode, Protocol, Reason, Request, RequestLayer, decide
from sandbox.narrowing import Limits, Refused, mode_of, narrow, narrow_limits
from sandbox.policy.index_url import parse_index
from sandbox.policy_file import LoadedPolicy, parse_policy
from sandbox.registries import RegistryRules, rules_from_policy

ALL_MODES = ["block-all", "registry-default", "named"]
REGISTRY = rules_from_policy("python", [parse_index("https://index.test/simple/")])


def policy(network: dict[str, Any] | None = None, **top: Any) -> LoadedPolicy:
    return parse_policy(
        json.dumps({"version": 1, "name": "team", "network": {"modes": ALL_MODES} | (network or {})} | top)
    )


def call(
    loaded: LoadedPolicy, domains: list[str] | None = None, *, allow_network: bool = True,
    registries: RegistryRules | None = REGISTRY,
) -> Grant:  # fmt: skip
    return narrow(
        loaded,
        registries,
        call_id="c",
        attempt_id="c.1",
        language="python",
        allow_network=allow_network,
        domains=domains,
    )


def refusal(loaded: LoadedPolicy, domains: list[str] | None = None, *, allow_network: bool = True) -> Refused:
    with pytest.raises(Refused) as caught:
        call(loaded, domains, allow_network=allow_network)
    return caught.value


def connect(grant: Grant, host: str, port: int = 443, protocol: Protocol = Protocol.HTTP) -> tuple[str, str | None]:
    decision = decide(grant, Request(RequestLayer.CONNECT, parse_host(host), port, protocol))
    return decision.reason.value, decision.rule


# Modes


@pytest.mark.parametrize(
    ("allow_network", "domains", "mode"),
    [
        (False, None, Mode.BLOCK_ALL),
        (True, None, Mode.REGISTRY_DEFAULT),
        (True, ["a.test"], Mode.NAMED),
        (True, [], Mode.UNRESTRICTED),
        (False, [], Mode.BLOCK_ALL),
        (False, ["a.test"], Mode.BLOCK_ALL),
    ],
)
def test_the_call_s_network_setting_is_one_of_four_modes(
    allow_network: bool, domains: list[str] | None, mode: Mode
) -> None:
    assert mode_of(allow_network=allow_network, domains=domains) is mode


@pytest.mark.parametrize(
    ("modes", "allow_network", "domains"),
    [
        (["block-all"], True, None),
        (["block-all", "named"], True, None),
        (["block-all", "registry-default"], True, ["a.test"]),
        (ALL_MODES, True, []),
        (["registry-default"], False, None),
    ],
)
def test_a_mode_that_the_policy_does_not_list_is_refused(
    modes: list[str], allow_network: bool, domains: list[str] | None
) -> None:
    refused = refusal(policy({"modes": modes}), domains, allow_network=allow_network)
    assert (refused.layer, refused.rule, refused.code) == ("operator", "network.modes", "mode_not_allowed")
    assert mode_of(allow_network=allow_network, domains=domains).value in refused.message
    assert "`team`" in refused.message
    assert refused.hint


def test_the_grant_carries_who_and_what_it_is_for() -> None:
    loaded = policy(
        {"deny": [{"host": "b.test", "ports": [1]}, {"cidr": "9.0.0.0/8"}], "ports": [443], "hosts": {"a.test": "10.0.0.1"},
         "private_addresses": [{"host": "a.test", "cidr": "10.0.0.0/8", "ports": [443]}, {"registries": True, "cidr": "10.0.0.0/8"}],
         "inspect": {"passthrough": ["p.test"]}},
        limits={"max_connections": 7},
    )  # fmt: skip
    for grant in (call(loaded, allow_network=False), call(loaded), call(loaded, ["a.test"])):
        assert (grant.call_id, grant.attempt_id, grant.policy_name) == ("c", "c.1", "team")
        assert grant.policy_digest == loaded.digest
        assert [rule.id for rule in grant.deny] == ["network.deny[0]", "network.deny[1]"]
        assert [entry.id for entry in grant.private_addresses] == [
            "network.private_addresses[0]", "network.private_addresses[1]",
        ]  # fmt: skip
        assert [entry.host.text for entry in grant.hosts] == ["a.test"]
        assert grant.passthrough == (Host("p.test"),)
        assert (grant.ports, grant.max_connections) == ((443,), 7)
        assert Grant.model_validate_json(grant.model_dump_json()) == grant


def test_without_a_network_the_grant_has_no_layer_and_no_registry_is_needed() -> None:
    grant = call(policy(), allow_network=False, registries=None)
    assert (grant.mode, grant.layers) == (Mode.BLOCK_ALL, ())
    assert connect(grant, "index.test") == ("network_off", "mode:block-all")


def test_registry_default_allows_the_registry_alone() -> None:
    grant = call(policy({"allow": [{"host": "a.test"}]}))
    assert [layer.name for layer in grant.layers] == ["registries.python"]
    assert connect(grant, "index.test") == ("allowed", "registries.python[0]")
    assert connect(grant, "a.test") == ("host_not_allowed", "registries.python")
    assert connect(grant, "x.index.test") == ("host_not_allowed", "registries.python")


def test_registry_default_needs_the_registries_of_the_language() -> None:
    with pytest.raises(ValueError, match="python"):
        call(policy(), registries=None)
    with pytest.raises(ValueError, match="python"):
        call(policy(), registries=RegistryRules("ruby", (), ()))


def test_unrestricted_has_no_layer_and_keeps_the_denials() -> None:
    grant = call(policy({"modes": ["unrestricted"], "deny": [{"host": "b.test"}]}), [])
    assert grant.layers == ()
    assert connect(grant, "any.test") == ("allowed", "mode:unrestricted")
    assert connect(grant, "b.test") == ("host_denied", "network.deny[0]")


# Named


def test_without_an_allow_list_the_call_s_names_are_the_whole_list() -> None:
    grant = call(policy(), ["a.test", "b.test"])
    assert connect(grant, "x.a.test") == ("allowed", "call.domains[0]")
    assert connect(grant, "b.test") == ("allowed", "call.domains[1]")
    assert connect(grant, "c.test") == ("host_not_allowed", "call.domains")
    assert connect(grant, "a.test", 22) == ("port_not_allowed", "call.domains[0]")
    assert connect(grant, "a.test", 443, Protocol.TCP) == ("protocol_not_allowed", "call.domains[0]")


OPERATOR = policy(
    {"allow": [{"host": "a.test", "ports": [8080], "methods": ["GET"]}, {"host": "db.test", "ports": [5432], "protocol": "tcp"},
               {"host": "exact.test", "subdomains": False}, {"host": "deep.b.test"}]}
)  # fmt: skip


@pytest.mark.parametrize(
    ("domains", "host", "port", "protocol", "expected"),
    [
        (["a.test"], "a.test", 8080, Protocol.HTTP, ("allowed", "network.allow[0]")),
        (["x.a.test"], "x.a.test", 8080, Protocol.HTTP, ("allowed", "network.allow[0]")),
        (["x.a.test"], "a.test", 8080, Protocol.HTTP, ("host_not_allowed", "call.domains")),
        (["a.test"], "a.test", 443, Protocol.HTTP, ("port_not_allowed", "network.allow[0]")),
        (["db.test"], "db.test", 5432, Protocol.TCP, ("allowed", "network.allow[1]")),
        (["db.test"], "db.test", 443, Protocol.HTTP, ("port_not_allowed", "network.allow[1]")),
        (["exact.test"], "exact.test", 443, Protocol.HTTP, ("allowed", "network.allow[2]")),
        (["exact.test"], "x.exact.test", 443, Protocol.HTTP, ("host_not_allowed", "network.allow")),
        (["a.test"], "db.test", 5432, Protocol.TCP, ("host_not_allowed", "call.domains")),
        (["a.test"], "other.test", 443, Protocol.HTTP, ("host_not_allowed", "network.allow")),
    ],
)
def test_with_an_allow_list_both_must_hold_and_the_operator_says_which_ports(
    domains: list[str], host: str, port: int, protocol: Protocol, expected: tuple[str, str]
) -> None:
    assert connect(call(OPERATOR, domains), host, port, protocol) == expected


def test_the_operator_s_methods_hold_for_what_the_call_names() -> None:
    a = parse_host("a.test")
    request = Request(RequestLayer.HTTP, a, 8080, claims=((a, 8080),), method="POST", path="/")
    assert decide(call(OPERATOR, ["a.test"]), request).reason is Reason.METHOD_NOT_ALLOWED


def test_a_host_is_named_once_however_often_it_is_spelled() -> None:
    grant = call(policy(), ["b.test", "A.test", "a.TEST.", "a。test", "b.test"])
    assert [(rule.id, rule.host and rule.host.text) for rule in grant.layers[0].rules] == [
        ("call.domains[0]", "b.test"), ("call.domains[1]", "a.test"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("network", "domains", "layer", "rule", "code", "hint"),
    [
        ({"allow": []}, ["a.test"], "operator", "network.allow", "domain_not_allowed", "leave it out"),
        ({"allow": [{"host": "a.test"}]}, ["a.test", "b.test"], "operator", "network.allow", "domain_not_allowed", ""),
        (
            {"allow": [{"host": "x.a.test"}]},
            ["a.test"],
            "operator",
            "network.allow",
            "domain_not_allowed",
            "`x.a.test`",
        ),
        (
            {"allow": [{"host": "a.test", "subdomains": False}]},
            ["x.a.test"],
            "operator",
            "network.allow",
            "domain_not_allowed",
            "",
        ),
        (
            {"deny": [{"host": "z.test"}, {"host": "a.test"}]},
            ["x.A.test."],
            "operator",
            "network.deny[1]",
            "domain_denied",
            "",
        ),
        (
            {"allow": [{"host": "a.test"}], "deny": [{"host": "a.test"}]},
            ["a.test"],
            "operator",
            "network.deny[0]",
            "domain_denied",
            "",
        ),
        ({}, ["a.test", "co.uk"], "call", "call.domains[1]", "domain_too_broad", "example.co.uk"),
        ({}, ["COM."], "call", "call.domains[0]", "domain_too_broad", "example.com"),
        ({}, ["*.a.test"], "call", "call.domains[0]", "invalid_domain", ""),
        ({}, ["127.1"], "call", "call.domains[0]", "invalid_domain", ""),
        ({}, [""], "call", "call.domains[0]", "invalid_domain", ""),
        ({}, ["a.test`\n"], "call", "call.domains[0]", "invalid_domain", ""),
    ],
)
def test_a_name_beyond_the_ceiling_is_refused_by_the_rule_that_sets_it(
    network: dict[str, Any], domains: list[str], layer: str, rule: str, code: str, hint: str
) -> None:
    refused = refusal(policy(network), domains)
    assert (refused.layer, refused.rule, refused.code) == (layer, rule, code)
    assert hint in (refused.hint or "")
    assert f"`{rule}`" in str(refused)
    assert refused.message.isprintable()


@pytest.mark.parametrize("deny", [{"ports": [22]}, {"methods": ["POST"]}, {"paths": ["/x"]}, {"host": "y.a.test"}])
def test_a_denial_that_leaves_something_of_the_host_is_decided_request_by_request(deny: dict[str, Any]) -> None:
    grant = call(policy({"deny": [{"host": "a.test"} | deny]}), ["a.test"])
    assert connect(grant, "a.test") == ("allowed", "call.domains[0]")


def test_shared_hosting_may_be_named_when_no_list_forbids_it() -> None:
    assert call(policy(), ["github.io"]).mode is Mode.NAMED


@given(
    st.lists(st.sampled_from(["a.test", "x.a.test", "b.test", "db.test", "exact.test"]), min_size=1, max_size=3),
    st.sampled_from(["a.test", "x.a.test", "b.test", "db.test", "exact.test", "z.test"]),
    st.sampled_from([22, 80, 443, 5432, 8080]),
    st.sampled_from(Protocol),
)
def test_a_call_never_gets_more_than_the_operator_allows_nor_than_it_named(
    domains: list[str], host: str, port: int, protocol: Protocol
) -> None:
    try:
        grant = call(OPERATOR, domains)
    except Refused:
        return
    request = Request(RequestLayer.CONNECT, parse_host(host), port, protocol)
    if decide(grant, request).allowed:
        operator = grant.model_copy(update={"layers": grant.layers[:1]})
        assert decide(operator, request).allowed
        assert any(parse_host(domain).covers(parse_host(host)) for domain in domains)


# Limits


LIMITED = policy(limits={"timeout_seconds": {"default": 20, "max": 60}, "memory_mib": {"default": 256, "max": 1024}})


@pytest.mark.parametrize(
    ("timeout", "memory_mib", "limits"),
    [
        (None, None, Limits(20, 256, 256)),
        (60, 1024, Limits(60, 1024, 256)),
        (1, 128, Limits(1, 128, 256)),
        (2.5, None, Limits(2.5, 256, 256)),
    ],
)
def test_omitted_limits_are_the_policy_s_defaults(
    timeout: float | None, memory_mib: int | None, limits: Limits
) -> None:
    assert narrow_limits(LIMITED, timeout=timeout, memory_mib=memory_mib) == limits


@pytest.mark.parametrize(
    ("timeout", "memory_mib", "rule", "code", "number"),
    [
        (60.5, None, "limits.timeout_seconds.max", "timeout_not_allowed", "60s"),
        (300, 4096, "limits.timeout_seconds.max", "timeout_not_allowed", "60s"),
        (0, None, "limits.timeout_seconds.max", "timeout_not_allowed", "60s"),
        (math.nan, None, "limits.timeout_seconds.max", "timeout_not_allowed", "60s"),
        (math.inf, None, "limits.timeout_seconds.max", "timeout_not_allowed", "60s"),
        (None, 1025, "limits.memory_mib.max", "memory_not_allowed", "1024 MiB"),
        (None, -1, "limits.memory_mib.max", "memory_not_allowed", "1024 MiB"),
    ],
)
def test_more_than_the_maximum_is_refused_with_the_number(
    timeout: float | None, memory_mib: int | None, rule: str, code: str, number: str
) -> None:
    with pytest.raises(Refused) as caught:
        narrow_limits(LIMITED, timeout=timeout, memory_mib=memory_mib)
    assert (caught.value.layer, caught.value.rule, caught.value.code) == ("operator", rule, code)
    assert number in str(caught.value)


def test_limits_are_in_the_units_that_their_names_say() -> None:
    assert Limits(1, 128, 256).memory_bytes == 128 * 1024 * 1024


def test_every_address_that_is_named_as_a_registry_is_judged_as_one() -> None:
    """npm keeps its files below its packuments: a second address serves nothing, and is no way round the judgement."""
    named = [parse_index("https://npm.test/"), parse_index("https://second.test/")]
    found = narrow(
        parse_policy("version: 1\nnetwork: {modes: [registry-default]}\n"),
        rules_from_policy("javascript", named),
        call_id="call", attempt_id="attempt", language="javascript", allow_network=True, domains=None,
    )  # fmt: skip
    assert found.packages is not None
    for index in named:
        assert found.packages.covers(index.host)
    steps = explain(found, parse_target("https://second.test/six"), "GET")
    denied = [step.decision.reason for step in steps if step.decision is not None and not step.decision.allowed]
    assert denied == [Reason.REGISTRY_REQUEST_UNKNOWN]
