"""What is decided of requests to registries before a registry is asked, and what `explain` says of them."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

import pytest

from proxy.destinations import Host, parse_host
from proxy.explain import explain, parse_target, verdict
from proxy.network import (
    Grant,
    Mode,
    Protocol,
    Reason,
    Request,
    RequestLayer,
    Rule,
    RuleLayer,
    decide,
    inspects,
    registry_host,
)
from proxy.packages.data_files import load_policy_data
from proxy.packages.judging import JudgedBy
from proxy.packages.model import Ecosystem
from proxy.packages.policy import Names, NamesPolicy, PackagePolicy
from proxy.packages.reasons import PackageReason
from proxy.packages.requests import Registry, RegistryGrant, parse_base
from proxy.reasons import proxy_status

POLICY = PackagePolicy(names=NamesPolicy(deny=Names(pypi=("evil",))))
PACKAGES = RegistryGrant(
    registries=(
        Registry(
            id="registries.python[0]", ecosystem=Ecosystem.PYPI, index=parse_base("https://index.test/simple/"),
            files=(parse_base("https://files.test/"),),
        ),
    ),
    policy=POLICY,
)  # fmt: skip
ADDRESS = ip_address("20.1.2.3")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def granted(mode: Mode = Mode.REGISTRY_DEFAULT, *rules: Rule, **more: Any) -> Grant:
    listed = rules or tuple(
        Rule(id=f"rule:{name}", host=parse_host(name), subdomains=False, ports=(443,), methods=("GET", "HEAD"))
        for name in ("index.test", "files.test")
    )
    return Grant(
        call_id="c", attempt_id="a", policy_name="p", policy_digest="d", mode=mode,
        layers=(RuleLayer(name="list", rules=listed),), packages=PACKAGES, **more,
    )  # fmt: skip


def host(name: str) -> Host:
    return parse_host(name)


def raw(layer: RequestLayer, name: str, port: int = 443, **more: Any) -> Request:
    return Request(layer, host(name), port, Protocol.TCP, **more)


@pytest.mark.parametrize("layer", [RequestLayer.CONNECT, RequestLayer.TLS, RequestLayer.TCP])
@pytest.mark.parametrize("mode", [Mode.REGISTRY_DEFAULT, Mode.NAMED, Mode.UNRESTRICTED])
def test_raw_tcp_never_reaches_a_registry(layer: RequestLayer, mode: Mode) -> None:
    """Whatever rule allows it: nobody would see which package is asked for. Beside the registry it may."""
    rules = [Rule(id=name, host=host(name), ports=(8443,), protocol=Protocol.TCP) for name in ("index.test", "b.test")]
    grant = granted(mode, *rules)
    sni = {"tls": True, "sni": host("b.test")} if layer is RequestLayer.TLS else {}
    assert decide(grant, raw(layer, "b.test", 8443, **sni)).allowed
    if layer is RequestLayer.TLS:
        sni = {"tls": True, "sni": host("index.test")}
    denied = decide(grant, raw(layer, "index.test", 8443, **sni))
    assert (denied.reason, denied.rule) == (Reason.PROTOCOL_NOT_ALLOWED, "packages")
    assert decide(grant.model_copy(update={"packages": None}), raw(layer, "index.test", 8443, **sni)).allowed


def test_a_registry_by_its_address_is_known_by_its_name() -> None:
    """Without restrictions a program can dial an address; the name that it then gives is the registry's."""
    grant = granted(Mode.UNRESTRICTED)
    by_address = Request(RequestLayer.HTTP, host("20.1.2.3"), 443, tls=True, sni=host("index.test"), method="GET")
    assert registry_host(grant, by_address) == host("index.test")
    denied = decide(
        grant, Request(RequestLayer.TLS, host("20.1.2.3"), 8443, Protocol.TCP, tls=True, sni=host("index.test"))
    )
    assert denied.reason is Reason.PROTOCOL_NOT_ALLOWED
    assert registry_host(grant, Request(RequestLayer.HTTP, host("sub.index.test"), 443)) is None


def test_a_registry_is_opened_though_it_is_passed_through() -> None:
    names = tuple(host(name) for name in ("index.test", "b.test"))
    grant = granted(passthrough=names)
    assert [inspects(grant, name, 443) for name in names] == [True, False]


@pytest.mark.parametrize("reason", list(PackageReason))
def test_every_refusal_of_a_package_is_a_refusal_of_its_request(reason: PackageReason) -> None:
    assert proxy_status(reason) == "http_request_denied"


# Explaining


def said(url: str, method: str = "GET", grant: Grant | None = None, **more: Any) -> tuple[bool, str, str | None]:
    steps = explain(grant or granted(), parse_target(url), method, [ADDRESS], **more)
    answer = verdict(steps)
    return answer.allowed, answer.reason.value, answer.rule


@pytest.mark.parametrize(
    ("url", "method", "expected"),
    [
        ("https://index.test/simple/good/", "GET", (True, "allowed", "registries.python[0]")),
        ("https://index.test/simple/Evil/", "GET", (False, "name_denied", "packages.names.deny.pypi[0]")),
        ("https://files.test/a/evil-1.0-py3-none-any.whl", "HEAD", (False, "name_denied", "packages.names.deny.pypi[0]")),
        ("https://files.test/a/good-1.0-py3-none-any.whl", "GET", (True, "allowed", "registries.python[0]")),
        ("https://index.test/simple/", "GET", (False, "registry_request_unknown", "packages")),
        ("https://index.test/simple/good/?x=y", "GET", (False, "registry_request_unknown", "packages")),
        ("https://index.test/simple/good/", "POST", (False, "method_not_allowed", "rule:index.test")),
    ],
)  # fmt: skip
def test_explain_says_of_a_registry_what_the_proxy_would(
    url: str, method: str, expected: tuple[bool, str, str]
) -> None:
    judged_by = JudgedBy(load_policy_data(POLICY), NOW)
    assert said(url, method, judged_by=judged_by) == expected


def test_explain_names_the_package_at_a_layer_of_its_own() -> None:
    steps = explain(granted(), parse_target("https://files.test/a/good-1.0-py3-none-any.whl"), "GET", [ADDRESS])
    (package,) = [step for step in steps if step.request.layer is RequestLayer.PACKAGE]
    assert (package.request.package, package.request.version) == ("pkg:pypi/good", "1.0")
    assert package.decision is None
    assert package.note == "judged by the package policy: the name, and each file when it is fetched"
    assert said("https://index.test/simple/")[1] == "registry_request_unknown"  # no data is needed for that
    without = granted().model_copy(update={"packages": None})
    assert all(
        step.request.layer is not RequestLayer.PACKAGE for step in explain(without, parse_target("https://index.test/"))
    )


def test_explain_stops_at_a_denied_package() -> None:
    steps = explain(granted(), parse_target("https://index.test/"), "GET", [ADDRESS])
    assert [step.note for step in steps if step.request.layer is RequestLayer.DIAL] == ["not reached"]
