"""Amended grants, question by question: each is answered by all of the grants together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from proxy.destinations import parse_host
from proxy.network import Grant, Mode, PrivateAddress, Protocol, Reason, Request, RequestLayer, StaticHost
from proxy.packages.model import Ecosystem
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Registry, RegistryGrant, parse_base
from proxy.standing import Standing, group_of
from tests.proxy.rig import grant, rule, tcp_rule

NAME = parse_host("a.test")
PUBLIC, PRIVATE = ip_address("20.0.0.1"), ip_address("10.0.0.1")


def ask(layer: RequestLayer, **more: Any) -> Request:
    fields: dict[str, Any] = {"host": NAME, "port": None if layer is RequestLayer.DNS else 443}
    if layer is RequestLayer.HTTP:
        fields |= {"claims": ((NAME, None),), "method": "GET", "path": "/a"}
    if layer is RequestLayer.DIAL:
        fields["address"] = PUBLIC
    return Request(layer, **{**fields, **more})


@dataclass(frozen=True)
class Case:
    own: Grant
    now: Grant
    request: Request
    why: Reason
    rule: str | None


PRIVATE_ENTRY = PrivateAddress(id="private", host=NAME, cidr=ip_network("10.0.0.0/8"))
OPEN = grant(rule("a.test"))
CASES = {
    "dns: the name": Case(OPEN, grant(rule("b.test")), ask(RequestLayer.DNS), Reason.HOST_NOT_ALLOWED, "call"),
    "connect: the host": Case(
        OPEN, grant(rule("a.test"), deny=(rule("a.test"),)), ask(RequestLayer.CONNECT), Reason.HOST_DENIED, "rule:a.test"
    ),
    "connect: the port": Case(
        OPEN, grant(rule("a.test", 80)), ask(RequestLayer.CONNECT), Reason.PORT_NOT_ALLOWED, "rule:a.test"
    ),
    "connect: the mode": Case(
        OPEN, grant(mode=Mode.BLOCK_ALL), ask(RequestLayer.CONNECT), Reason.NETWORK_OFF, "mode:block-all"
    ),
    "tls: the server name": Case(
        grant(mode=Mode.UNRESTRICTED), grant(mode=Mode.UNRESTRICTED, deny=(rule("a.test"),)),
        ask(RequestLayer.TLS, tls=True, sni=NAME), Reason.HOST_DENIED, "rule:a.test",
    ),
    "http: the method": Case(
        OPEN, grant(rule("a.test", methods=("HEAD",))), ask(RequestLayer.HTTP), Reason.METHOD_NOT_ALLOWED, "rule:a.test"
    ),
    "http: the path": Case(
        OPEN, grant(rule("a.test", paths=("/b",))), ask(RequestLayer.HTTP), Reason.PATH_NOT_ALLOWED, "rule:a.test"
    ),
    "raw tcp": Case(
        grant(tcp_rule("a.test", 443)), grant(rule("a.test")), ask(RequestLayer.TCP, protocol=Protocol.TCP),
        Reason.PROTOCOL_NOT_ALLOWED, "rule:a.test",
    ),
    "dial: a private address": Case(
        grant(rule("a.test"), private_addresses=(PRIVATE_ENTRY,)), OPEN, ask(RequestLayer.DIAL, address=PRIVATE),
        Reason.ADDRESS_NOT_PUBLIC, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_only_the_old_policy_allows_is_revoked_with_the_new_ones_reason_and_rule(case: Case) -> None:
    before = Standing(case.own)
    assert before.decide(case.request).allowed
    decision = before.amended(case.now).decide(case.request)
    assert (decision.reason, decision.rule) == (Reason.POLICY_REVOKED, case.rule)
    assert case.why.value in decision.detail
    assert case.rule is None or f"`{case.rule}`" in decision.detail


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_only_the_new_policy_allows_stays_denied_for_the_old_reason(case: Case) -> None:
    decision = Standing(case.now).amended(case.own).decide(case.request)
    assert decision.reason is case.why


@pytest.mark.parametrize("layer", [RequestLayer.DNS, RequestLayer.CONNECT, RequestLayer.HTTP, RequestLayer.DIAL])
def test_none_revokes_everything_and_for_good(layer: RequestLayer) -> None:
    standing = Standing(OPEN).amended(None).amended(OPEN)
    assert standing.decide(ask(layer)).reason is Reason.POLICY_REVOKED


def test_amendments_add_up() -> None:
    both = Standing(grant(rule("a.test"), rule("b.test")))
    standing = both.amended(grant(rule("a.test"))).amended(grant(rule("b.test")))
    for name in ("a.test", "b.test"):
        assert standing.decide(Request(RequestLayer.DNS, parse_host(name))).reason is Reason.POLICY_REVOKED


def test_a_policy_that_says_the_same_is_told_and_not_kept() -> None:
    """Policies are loaded anew often; what a decision costs must not grow with it."""
    again = OPEN.model_copy(update={"policy_digest": "new", "call_id": "c2", "attempt_id": "a2"})
    standing = Standing(OPEN).amended(again)
    assert (standing.grants, standing.told.policy_digest) == ((OPEN,), "new")
    assert standing.allows_as_much_as(Standing(OPEN))
    assert standing.group == Standing(OPEN).group


def test_an_amendment_takes_nothing_of_whose_the_attempt_is() -> None:
    own = OPEN.model_copy(update={"tenant": "acme"})
    told = Standing(own).amended(grant(rule("b.test"))).told
    assert (told.call_id, told.attempt_id, told.tenant) == (own.call_id, own.attempt_id, "acme")


def static(**answers: list[str]) -> Grant:
    return grant(rule("a.test"), rule("b.test")).model_copy(
        update={
            "hosts": tuple(
                StaticHost(host=parse_host(f"{name}.test"), addresses=tuple(map(ip_address, addresses)))
                for name, addresses in answers.items()
            )
        }
    )


@pytest.mark.parametrize(
    ("own", "now", "left"),
    [
        (static(a=["20.0.0.1"]), static(), {"a.test": ["20.0.0.1"]}),
        (static(), static(a=["20.0.0.1"]), {"a.test": ["20.0.0.1"]}),
        (static(a=["20.0.0.1", "20.0.0.2"]), static(a=["20.0.0.2"]), {"a.test": ["20.0.0.2"]}),
        (static(a=["20.0.0.1"]), static(a=["20.0.0.2"]), {"a.test": []}),
        (static(a=["20.0.0.1"]), static(b=["20.0.0.2"]), {"a.test": ["20.0.0.1"], "b.test": ["20.0.0.2"]}),
    ],
)
def test_of_static_answers_what_is_agreed_on_stands(own: Grant, now: Grant, left: dict[str, list[str]]) -> None:
    hosts = Standing(own).amended(now).hosts
    assert {entry.host.text: [str(address) for address in entry.addresses] for entry in hosts} == left


def test_tls_is_opened_where_any_of_the_policies_opens_it() -> None:
    through = grant(rule("a.test"), passthrough=(NAME,))
    assert not Standing(through).inspects(NAME, 443)
    assert Standing(through).amended(grant(rule("a.test"))).inspects(NAME, 443)
    assert Standing(grant(rule("a.test"))).amended(through).inspects(NAME, 443)


def test_the_smaller_limit_of_connections_holds() -> None:
    few, many = grant(max_connections=3), grant(max_connections=30)
    assert Standing(many).amended(few).max_connections == 3
    assert Standing(few).amended(many).max_connections == 3


def test_raw_bytes_are_looked_at_where_any_of_the_policies_does() -> None:
    open_, named = grant(mode=Mode.UNRESTRICTED), grant(tcp_rule("a.test", 22))
    assert Standing(named).amended(open_).asks_what_is_spoken
    assert Standing(open_).amended(named).asks_what_is_spoken
    assert not Standing(named).asks_what_is_spoken


def registry(policy: PackagePolicy, name: str = "a.test") -> RegistryGrant:
    index = parse_base(f"https://{name}/simple/")
    return RegistryGrant(registries=(Registry(id="r", ecosystem=Ecosystem.PYPI, index=index),), policy=policy)


def test_each_grant_that_knows_a_registry_judges_what_is_asked_of_it() -> None:
    request = ask(RequestLayer.HTTP)
    none = grant(rule("a.test"))
    loose = none.model_copy(update={"packages": registry(PackagePolicy())})
    strict = none.model_copy(update={"packages": registry(PackagePolicy(prepare=True))})
    elsewhere = none.model_copy(update={"packages": registry(PackagePolicy(), "b.test")})
    table: list[tuple[Standing, list[tuple[RegistryGrant | None, bool]]]] = [
        (Standing(none), []),
        (Standing(loose), [(loose.packages, False)]),
        (Standing(loose).amended(strict), [(loose.packages, False), (strict.packages, True)]),
        (Standing(none).amended(strict), [(strict.packages, True)]),
        (Standing(loose).amended(elsewhere), [(loose.packages, False)]),
    ]
    for standing, views in table:
        assert [(view.grant, view.amended) for view in standing.registries(request)] == views


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda one: one.model_copy(update={"call_id": "x", "attempt_id": "y"}), True),
        (lambda one: one.model_copy(update={"tenant": "acme"}), False),
        (lambda one: one.model_copy(update={"ports": (443,)}), False),
    ],
)
def test_what_is_read_for_one_attempt_does_for_others_of_the_same_tenant_and_grant(
    change: Callable[[Grant], Grant], same: bool
) -> None:
    assert (group_of(OPEN) == group_of(change(OPEN))) is same
    assert Standing(OPEN).amended(change(OPEN).model_copy(update={"ports": (80,)})).group != group_of(OPEN)
