"""A tenant's policy is the operator's, narrowed; what refuses a call says whose rule it is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.destinations import parse_host
from proxy.network import Grant, Mode, Protocol, Request, RequestLayer, decide
from proxy.packages.model import Ecosystem
from sandbox.narrowing import Refused, narrow, narrow_limits, narrow_preparation, preparing_rule
from sandbox.packages.supply import PackagesRefused, Supply
from sandbox.policy.index_url import parse_index
from sandbox.policy_file import LoadedPolicy, parse_policy
from sandbox.registries import rules_from_policy
from sandbox.tenants import UnknownTenant, of_tenant, tenant_named

MODES = ["block-all", "registry-default", "named"]
REGISTRY = rules_from_policy("python", [parse_index("https://index.test/simple/")])


def both(network: dict[str, Any] | None = None, own: dict[str, Any] | None = None, **top: Any) -> LoadedPolicy:
    """A policy with the tenants `acme`, which has `own`, and `other`."""
    return parse_policy(
        json.dumps(
            {"version": 1, "name": "team", "network": {"modes": MODES} | (network or {}),
             "tenants": [{"name": "acme"} | (own or {}), {"name": "other"}]} | top
        )
    )  # fmt: skip


def acme(network: dict[str, Any] | None = None, own: dict[str, Any] | None = None, **top: Any) -> LoadedPolicy:
    return of_tenant(both(network, {"network": own or {}}, **top), "acme")


def call(loaded: LoadedPolicy, domains: list[str] | None, *, allow_network: bool = True) -> Grant:
    return narrow(
        loaded, REGISTRY, call_id="c", attempt_id="c.1", language="python", allow_network=allow_network, domains=domains
    )


def refusal(loaded: LoadedPolicy, domains: list[str] | None, *, allow_network: bool = True) -> tuple[str, str, str]:
    with pytest.raises(Refused) as caught:
        call(loaded, domains, allow_network=allow_network)
    assert f"(refused by {caught.value.layer}: `{caught.value.rule}`)" in str(caught.value)
    return caught.value.code, caught.value.layer, caught.value.rule


def request(host: str, port: int = 443, protocol: Protocol = Protocol.HTTP, path: str = "/") -> Request:
    host_ = parse_host(host)
    return Request(
        RequestLayer.HTTP if protocol is Protocol.HTTP else RequestLayer.TCP, host_, port, protocol,
        method="GET", path=path, claims=((host_, None),),
    )  # fmt: skip


def judged(grant: Grant, *arguments: Any, **more: Any) -> tuple[str, str | None]:
    decision = decide(grant, request(*arguments, **more))
    return decision.reason.value, decision.rule


# Who


def test_the_empty_name_is_the_operator() -> None:
    loaded = both()
    assert of_tenant(loaded, "") is loaded
    assert not loaded.tenant
    assert call(loaded, None).tenant == ""


def test_a_tenant_that_the_policy_lacks_has_no_policy() -> None:
    loaded = both()
    assert tenant_named(loaded, "nobody") is None
    for name in ("nobody", "ACME", " acme", "acme\0", "x" * 1000):
        with pytest.raises(UnknownTenant, match="`team` has no tenant") as caught:
            of_tenant(loaded, name)
        assert len(str(caught.value)) < 200


def test_a_tenants_policy_knows_no_tenant() -> None:
    """Whoever holds one can make no other of it."""
    mine = of_tenant(both(), "acme")
    assert mine.policy.tenants == ()
    for name in ("other", "acme"):
        with pytest.raises(UnknownTenant):
            of_tenant(mine, name)


def test_the_grant_and_the_digest_say_whose_and_which_file() -> None:
    loaded = both()
    mine = of_tenant(loaded, "acme")
    grants = [call(mine, ["a.test"]), call(mine, None), narrow_preparation(mine, REGISTRY, call_id="c")]
    assert {(grant.tenant, grant.policy_digest, grant.policy_name) for grant in grants} == {
        ("acme", loaded.digest, "team")
    }
    assert Grant.model_validate_json(grants[0].model_dump_json()) == grants[0]


def test_a_tenant_that_says_nothing_has_what_the_operator_has() -> None:
    loaded = both({"allow": [{"host": "a.test"}], "deny": [{"host": "b.a.test"}]})
    mine = of_tenant(loaded, "acme")
    assert mine.policy == loaded.policy.model_copy(update={"tenants": ()})
    for domains in (["a.test"], None):
        assert call(mine, domains) == call(loaded, domains).model_copy(update={"tenant": "acme"})


# The network


@pytest.mark.parametrize(
    ("operators", "own", "domains", "refused"),
    [
        (MODES, ["block-all"], ["a.test"], ("tenant", "tenants.acme.network.modes")),
        (MODES, ["block-all"], None, ("tenant", "tenants.acme.network.modes")),
        (MODES, ["block-all", "named"], None, ("tenant", "tenants.acme.network.modes")),
        (MODES, ["block-all"], [], ("operator", "network.modes")),
        (["block-all"], ["block-all"], ["a.test"], ("operator", "network.modes")),
    ],
)
def test_a_mode_is_refused_by_whoever_lacks_it_the_operator_first(
    operators: list[str], own: list[str], domains: list[str] | None, refused: tuple[str, str]
) -> None:
    assert refusal(acme({"modes": operators}, {"modes": own}), domains) == ("mode_not_allowed", *refused)


def test_a_host_is_allowed_where_both_lists_and_the_call_have_it() -> None:
    loaded = acme(
        {"allow": [{"host": "a.test"}, {"host": "b.test"}]}, {"allow": [{"host": "x.a.test"}, {"host": "b.test"}]}
    )
    grant = call(loaded, ["x.a.test"])
    assert [layer.name for layer in grant.layers] == ["network.allow", "tenants.acme.network.allow", "call.domains"]
    assert judged(grant, "x.a.test") == ("allowed", "network.allow[0]")
    assert judged(grant, "y.x.a.test") == ("allowed", "network.allow[0]")
    assert judged(grant, "a.test") == ("host_not_allowed", "tenants.acme.network.allow")
    assert judged(grant, "b.test") == ("host_not_allowed", "call.domains")
    assert judged(grant, "c.test") == ("host_not_allowed", "network.allow")
    assert refusal(loaded, ["a.test"]) == ("domain_not_allowed", "tenant", "tenants.acme.network.allow")
    assert refusal(loaded, ["c.test"]) == ("domain_not_allowed", "operator", "network.allow")


def test_of_a_call_that_both_refuse_the_operators_rule_is_named() -> None:
    loaded = acme({"allow": [{"host": "a.test"}]}, {"allow": [{"host": "x.a.test"}]})
    assert refusal(loaded, ["a.test", "c.test"]) == ("domain_not_allowed", "operator", "network.allow")


def test_the_rules_of_both_judge_ports_methods_and_paths() -> None:
    loaded = acme(
        {"allow": [{"host": "a.test", "ports": [443, 8443], "methods": ["GET"]}]},
        {"allow": [{"host": "a.test", "paths": ["/public/**"]}]},
    )
    grant = call(loaded, ["a.test"])
    assert judged(grant, "a.test", path="/public/x") == ("allowed", "network.allow[0]")
    assert judged(grant, "a.test", path="/x") == ("path_not_allowed", "tenants.acme.network.allow[0]")
    assert judged(grant, "a.test", 8443, path="/public/x") == ("port_not_allowed", "tenants.acme.network.allow[0]")
    assert judged(grant, "a.test", 22) == ("port_not_allowed", "network.allow[0]")


def test_a_tenant_opens_no_port_and_no_protocol_where_the_operator_has_no_list() -> None:
    """The call's names alone allow HTTP on the usual ports; a tenant's rule cannot make more of them."""
    own = {"allow": [{"host": "db.test", "ports": [5432], "protocol": "tcp"}, {"host": "a.test", "ports": [443, 9999]}]}
    grant = call(acme(None, own), ["db.test", "a.test"])
    assert judged(grant, "a.test") == ("allowed", "tenants.acme.network.allow[1]")
    assert judged(grant, "a.test", 9999)[0] == "port_not_allowed"
    assert judged(grant, "db.test", 5432, Protocol.TCP)[0] != "allowed"
    assert refusal(acme(None, own), ["b.test"]) == ("domain_not_allowed", "tenant", "tenants.acme.network.allow")


def test_raw_tcp_needs_both() -> None:
    rule = {"host": "db.test", "ports": [5432], "protocol": "tcp"}
    grant = call(acme({"allow": [rule]}, {"allow": [rule]}), ["db.test"])
    assert judged(grant, "db.test", 5432, Protocol.TCP) == ("allowed", "network.allow[0]")
    grant = call(acme({"allow": [rule]}, {"allow": [{"host": "db.test"}]}), ["db.test"])
    assert judged(grant, "db.test", 5432, Protocol.TCP) == ("port_not_allowed", "tenants.acme.network.allow[0]")


def test_the_deny_rules_are_united_each_under_its_name() -> None:
    loaded = acme(
        {"deny": [{"host": "a.test"}]},
        {"deny": [{"host": "b.test"}, {"host": "p.test", "paths": ["/x"]}, {"cidr": "9.0.0.0/8"}]},
    )
    assert [rule.host.text if rule.host else "" for rule in loaded.policy.network.deny] == [
        "a.test",
        "b.test",
        "p.test",
        "",
    ]
    grant = call(loaded, ["test.test", "p.test"])
    assert [rule.id for rule in grant.deny] == [
        "network.deny[0]", "tenants.acme.network.deny[0]", "tenants.acme.network.deny[1]", "tenants.acme.network.deny[2]",
    ]  # fmt: skip
    assert judged(grant, "p.test", path="/x") == ("host_denied", "tenants.acme.network.deny[1]")
    assert judged(grant, "p.test", path="/y") == ("allowed", "call.domains[1]")
    assert refusal(loaded, ["x.b.test"]) == ("domain_denied", "tenant", "tenants.acme.network.deny[0]")
    assert refusal(loaded, ["a.test"]) == ("domain_denied", "operator", "network.deny[0]")


def test_a_tenants_deny_holds_in_every_mode() -> None:
    loaded = acme({"modes": [*MODES, "unrestricted"]}, {"deny": [{"host": "index.test"}]})
    rule = ("host_denied", "tenants.acme.network.deny[0]")
    assert judged(call(loaded, []), "index.test") == rule
    assert judged(call(loaded, None), "index.test") == rule
    assert judged(narrow_preparation(loaded, REGISTRY, call_id="c"), "index.test") == rule
    assert judged(call(loaded, []), "a.test")[0] == "allowed"


# Limits and packages


LIMITED: dict[str, Any] = {
    "limits": {"timeout_seconds": {"default": 50, "max": 200}, "memory_mib": {"default": 1024, "max": 2048}}
}


@pytest.mark.parametrize(
    ("own", "timeout", "memory"),
    [
        ({}, (50, 200), (1024, 2048)),
        ({"timeout_seconds": {"max": 60}}, (50, 60), (1024, 2048)),
        ({"timeout_seconds": {"max": 20}, "memory_mib": {"max": 256}}, (20, 20), (256, 256)),
        ({"timeout_seconds": {"default": 10}}, (10, 200), (1024, 2048)),
        ({"memory_mib": {"default": 1500, "max": 2000}}, (50, 200), (1500, 2000)),
    ],
)
def test_the_lower_maximum_counts_and_no_default_is_above_it(
    own: dict[str, Any], timeout: tuple[float, float], memory: tuple[int, int]
) -> None:
    limits = of_tenant(both(None, {"limits": own}, **LIMITED), "acme").policy.limits
    assert (limits.timeout_seconds.default, limits.timeout_seconds.max) == timeout
    assert (limits.memory_mib.default, limits.memory_mib.max) == memory


@pytest.mark.parametrize(
    ("timeout", "memory_mib", "refused"),
    [
        (61, None, ("timeout_not_allowed", "tenant", "tenants.acme.limits.timeout_seconds.max")),
        (201, None, ("timeout_not_allowed", "operator", "limits.timeout_seconds.max")),
        (0.5, None, ("timeout_not_allowed", "operator", "limits.timeout_seconds.max")),
        (float("nan"), None, ("timeout_not_allowed", "operator", "limits.timeout_seconds.max")),
        (None, 600, ("memory_not_allowed", "tenant", "tenants.acme.limits.memory_mib.max")),
        (None, 2049, ("memory_not_allowed", "operator", "limits.memory_mib.max")),
    ],
)
def test_a_limit_is_refused_by_whoever_is_exceeded_and_the_hint_is_what_may_be_had(
    timeout: float | None, memory_mib: int | None, refused: tuple[str, str, str]
) -> None:
    own = {"limits": {"timeout_seconds": {"max": 60}, "memory_mib": {"max": 512}}}
    loaded = of_tenant(both(None, own, **LIMITED), "acme")
    with pytest.raises(Refused) as caught:
        narrow_limits(loaded, timeout=timeout, memory_mib=memory_mib)
    assert (caught.value.code, caught.value.layer, caught.value.rule) == refused
    assert caught.value.hint in ("ask for at most 60s", "ask for at most 512 MiB")
    assert narrow_limits(loaded, timeout=60, memory_mib=512).timeout_seconds == 60


@pytest.mark.parametrize(
    ("operators", "own", "prepare", "rule"),
    [
        (True, None, True, None),
        (True, True, True, None),
        (True, False, False, ("tenant", "tenants.acme.packages.prepare")),
        (False, None, False, ("operator", "packages.prepare")),
        (False, False, False, ("operator", "packages.prepare")),
    ],
)
def test_packages_are_prepared_where_both_say_so(
    operators: bool, own: bool | None, prepare: bool, rule: tuple[str, str] | None
) -> None:
    packages = {} if own is None else {"packages": {"prepare": own}}
    loaded = of_tenant(both(None, packages, packages={"prepare": operators}), "acme")
    assert loaded.policy.packages.prepare is prepare
    if rule is not None:
        assert preparing_rule(loaded) == rule


@pytest.mark.parametrize(
    ("operators", "layer", "rule"),
    [(True, "tenant", "tenants.acme.packages.prepare"), (False, "operator", "packages.prepare")],
)
def test_packages_are_refused_by_whoever_prepares_none(tmp_path: Path, operators: bool, layer: str, rule: str) -> None:
    own = {"packages": {"prepare": False}}
    supply = Supply(of_tenant(both(None, own, packages={"prepare": operators}), "acme"), tmp_path, no_backend)
    with pytest.raises(PackagesRefused) as caught:
        asyncio.run(supply.screen("c", ["requests==2.32.3"], None, Ecosystem.PYPI))
    assert (caught.value.layer, caught.value.rule) == (layer, rule)
    assert [(str(one.reason), one.rule) for one in caught.value.refusals] == [("packages_not_allowed", rule)]


async def no_backend() -> Any:
    raise AssertionError("nothing is prepared")


def test_what_was_never_looked_over_is_no_more_than_the_operators() -> None:
    """A section that asks for more than there is cannot be loaded, and would not get it if it were made by hand."""
    loaded = both({"modes": ["block-all"]}, None, **LIMITED)
    greedy = {"name": "acme", "network": {"modes": MODES}, "packages": {"prepare": True},
              "limits": {"timeout_seconds": {"max": 300}, "memory_mib": {"default": 2048}}}  # fmt: skip
    wide = both({"modes": MODES}, greedy, packages={"prepare": True}).policy.tenants
    forged = LoadedPolicy(loaded.policy.model_copy(update={"tenants": wide}), (), loaded.digest, None)
    mine = of_tenant(forged, "acme").policy
    assert mine.network.modes == (Mode.BLOCK_ALL,)
    assert not mine.packages.prepare
    assert mine.limits.timeout_seconds.max == 200
