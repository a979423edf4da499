"""Whatever a tenant's section says, nothing is allowed under it that the operator's policy alone does not allow."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from proxy.network import Grant, Mode, Request, decide
from sandbox.narrowing import Refused, narrow, narrow_limits
from sandbox.policy.index_url import parse_index
from sandbox.policy.tenants import Tenant
from sandbox.policy_file import InvalidPolicy, LoadedPolicy, parse_policy
from sandbox.registries import rules_from_policy
from sandbox.tenants import of_tenant
from tests.property.test_decide import requests

REGISTRY = rules_from_policy("python", [parse_index("https://a.test/simple/")])

hosts = st.sampled_from(["a.test", "x.a.test", "y.x.a.test", "b.test", "xa.test"])
ports = st.sampled_from([[443], [80, 443], [22, 8080], [22, 80, 443, 8080]])
judging = {
    "ports": ports, "methods": st.sampled_from([["GET"], ["GET", "HEAD"], ["POST"]]),
    "paths": st.sampled_from([["/**"], ["/a/*", "/b"]]),
}  # fmt: skip


def fields(required: dict[str, st.SearchStrategy[Any]], optional: dict[str, st.SearchStrategy[Any]]) -> Any:
    return st.fixed_dictionaries(required, optional=optional)


http_rules = fields({"host": hosts}, {"subdomains": st.booleans(), **judging})
tcp_rules = fields({"host": hosts, "ports": ports, "protocol": st.just("tcp")}, {"subdomains": st.booleans()})
allow = st.lists(http_rules | tcp_rules, max_size=4)
deny = st.lists(
    fields({"host": hosts}, {"subdomains": st.booleans(), **judging}) | fields({"cidr": st.just("10.0.0.0/8")}, {}),
    max_size=2,
)
modes = st.lists(st.sampled_from([str(mode) for mode in Mode]), min_size=1, unique=True)
numbers = st.sampled_from([1, 10, 30, 60, 200, 300])
sizes = st.sampled_from([128, 256, 512, 1024, 2048])


def limits(values: st.SearchStrategy[int]) -> Any:
    return st.lists(values, min_size=2, max_size=2).map(sorted).map(lambda two: {"default": two[0], "max": two[1]})


operators = fields(
    {"modes": st.just(["block-all", "registry-default", "named"]) | modes},
    {"allow": allow, "deny": deny, "ports": ports,
     "private_addresses": st.just([{"host": "a.test", "cidr": "10.0.0.0/8"}])},
)  # fmt: skip
# Where little is forbidden, much is allowed, and there is something to be narrowed.
generous_operators = fields(
    {"modes": st.just(["block-all", "registry-default", "named"])},
    {"allow": st.lists(http_rules | tcp_rules, min_size=1)},
)
generous_sections = fields({"name": st.just("acme"), "network": fields({"allow": allow}, {})}, {})
sections = fields(
    {"name": st.just("acme")},
    {
        "network": fields({}, {"modes": modes, "allow": allow, "deny": deny}),
        "limits": fields({}, {"timeout_seconds": limits(numbers), "memory_mib": limits(sizes)}),
        "packages": fields({}, {"prepare": st.booleans()}),
    },
)


@st.composite
def policies(draw: st.DrawFn) -> LoadedPolicy:
    """An operator's policy, with a tenant that lint has not seen: what it asks for may be more than there is."""
    top = {"timeout_seconds": draw(limits(numbers)), "memory_mib": draw(limits(sizes))}
    generous = draw(st.booleans())
    network = draw(generous_operators if generous else operators)
    document = {
        "version": 1, "network": network, "limits": top, "packages": {"prepare": draw(st.booleans())}
    }  # fmt: skip
    section = Tenant.model_validate(draw(generous_sections if generous else sections))
    try:
        loaded = parse_policy(json.dumps(document))
    except InvalidPolicy:  # such as a rule that says the same as another
        network = {"modes": ["named"], "allow": [{"host": "a.test", "ports": [22, 443]}]}
        loaded = parse_policy(json.dumps(document | {"network": network}))
    return LoadedPolicy(loaded.policy.model_copy(update={"tenants": (section,)}), (), loaded.digest, None)


calls: st.SearchStrategy[tuple[bool, list[str] | None]] = st.sampled_from(
    [(False, None), (True, None), (True, [])]
) | st.lists(hosts, min_size=1, max_size=3).map(lambda names: (True, names))


type Asked = tuple[bool, list[str] | None]


def grant_of(loaded: LoadedPolicy, asked: Asked) -> Grant:
    return narrow(
        loaded, REGISTRY, call_id="c", attempt_id="c.1", language="python", allow_network=asked[0], domains=asked[1]
    )


def granted(loaded: LoadedPolicy, asked: Asked) -> Grant | None:
    try:
        return grant_of(loaded, asked)
    except Refused as refused:
        event(f"refused by {refused.layer}")
        return None


def refusal(loaded: LoadedPolicy, asked: Asked) -> Refused | None:
    try:
        grant_of(loaded, asked)
    except Refused as refused:
        return refused
    return None


many = settings(max_examples=500, deadline=None)  # the first one loads the list of suffixes


@many
@given(policies(), calls, requests())
def test_what_is_allowed_a_tenant_is_allowed_by_the_operator_alone(
    loaded: LoadedPolicy, asked: Asked, request: Request
) -> None:
    narrower = granted(of_tenant(loaded, "acme"), asked)
    if narrower is None:
        return
    wider = granted(loaded, asked)
    assert wider is not None
    decision = decide(narrower, request)
    event(f"{narrower.mode} {decision.verdict}")
    assert decide(wider, request).allowed or not decision.allowed


@many
@given(policies(), calls)
def test_a_tenants_rule_refuses_a_call_where_the_operator_would_not_and_only_there(
    loaded: LoadedPolicy, asked: Asked
) -> None:
    refused = refusal(of_tenant(loaded, "acme"), asked)
    if refused is not None:
        assert (refused.layer == "tenant") is (refusal(loaded, asked) is None)
        assert (refused.layer == "tenant") is refused.rule.startswith("tenants.acme.")


@many
@given(policies(), st.none() | st.floats(), st.none() | st.integers())
def test_no_limit_of_a_tenant_is_above_the_operators(
    loaded: LoadedPolicy, timeout: float | None, memory_mib: int | None
) -> None:
    mine = of_tenant(loaded, "acme")
    for name in ("timeout_seconds", "memory_mib"):
        own, top = getattr(mine.policy.limits, name), getattr(loaded.policy.limits, name)
        assert own.default <= own.max <= top.max
    try:
        narrow_limits(mine, timeout=timeout, memory_mib=memory_mib)
    except Refused:
        return
    narrow_limits(loaded, timeout=timeout, memory_mib=memory_mib)


@many
@given(policies(), calls, requests(), st.data())
def test_adding_to_a_tenants_lists_never_widens_beyond_the_operator(
    loaded: LoadedPolicy, asked: Asked, request: Request, data: st.DataObject
) -> None:
    section = loaded.policy.tenants[0].model_dump(mode="json", exclude_none=True)
    network = section["network"]
    network["allow"] = [*network.get("allow", []), *data.draw(allow)]
    network["deny"] = [*network["deny"], *data.draw(deny)]
    more = loaded.policy.model_copy(update={"tenants": (Tenant.model_validate(section),)})
    changed = granted(of_tenant(LoadedPolicy(more, (), loaded.digest, None), "acme"), asked)
    wider = granted(loaded, asked)
    if changed is not None and decide(changed, request).allowed:
        assert wider is not None
        assert decide(wider, request).allowed
