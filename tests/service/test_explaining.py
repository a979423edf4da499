"""What would become of a request: said so that whoever asks can act on it, with nothing looked up or sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.contract import InvalidCall
from sandbox.owners import Caller
from sandbox.service.model import NetworkExplanation
from sandbox.tenants import UnknownTenant
from tests.service.in_process import ALICE, Site, policy, site

ME = Caller(admin=True)
NETWORK = {
    "modes": ["block-all", "named"],
    "allow": [{"host": "allowed.test"}, {"host": "readonly.test", "methods": ["GET"]}],
    "deny": [{"host": "denied.test"}],
}
TENANT = {"name": "acme", "network": {"modes": ["named"], "allow": [{"host": "allowed.test"}]}}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), policy(TENANT, network=NETWORK)) as here:
        yield here


def explain(here: Site, target: str, caller: Caller = ME, **asked: Any) -> NetworkExplanation:
    return here.run(here.service.explain(caller, target, **asked))


def named(*domains: str) -> dict[str, Any]:
    return {"allow_network": True, "domains": list(domains)}


def test_what_is_allowed_says_by_which_rule(here: Site) -> None:
    found = explain(here, "https://allowed.test/a", **named("allowed.test"))
    assert (found.verdict, found.mode, found.policy, found.hint) == ("allow", "named", "tests-service", None)
    assert "`https://allowed.test/a`" in found.message
    assert [step.verdict for step in found.steps] == ["allow"] * len(found.steps)
    assert {"dns", "http"} <= {step.layer for step in found.steps}
    assert found.rule is None or f"(rule `{found.rule}`)" in found.message


def test_what_is_denied_says_the_rule_and_that_no_other_route_helps(here: Site) -> None:
    """The first layer that denies decides."""
    for asked, verdict, reason in (
        ({}, "deny", "network_off"),
        (named("readonly.test"), "deny", "method_not_allowed"),
        (named("allowed.test"), "deny", "host_not_allowed"),
    ):
        found = explain(here, "https://readonly.test/", method="POST", **asked)
        assert (found.verdict, found.reason) == (verdict, reason), found
        assert "policy `tests-service` denies `https://readonly.test/`" in found.message
        assert found.hint
        assert found.steps[-1].verdict == "deny"
    assert "another route will not help" in (explain(here, "https://readonly.test/").hint or "")


@pytest.mark.parametrize(
    ("asked", "reason", "rule"),
    [
        (named("denied.test"), "domain_denied", "network.deny[0]"),
        (named("other.test"), "domain_not_allowed", "network.allow"),
        ({"allow_network": True}, "mode_not_allowed", "network.modes"),
        ({"allow_network": True, "domains": []}, "mode_not_allowed", "network.modes"),
        (named("http://x"), "invalid_domain", "call.domains[0]"),
        (named("\ud800"), "invalid_domain", "call.domains[0]"),
    ],
)
def test_a_call_that_would_be_refused_says_so_and_why(
    here: Site, asked: dict[str, Any], reason: str, rule: str
) -> None:
    found = explain(here, "https://denied.test/", **asked)
    assert (found.verdict, found.reason, found.rule) == ("refused", reason, rule)
    assert "refuses the whole call, before any code runs" in found.message
    assert found.hint


def test_a_tenants_rule_is_named_as_its_own(here: Site) -> None:
    """What the operator allows and the tenant does not."""
    found = explain(here, "https://readonly.test/", ALICE, **named("readonly.test"))
    assert (found.verdict, found.rule) == ("refused", "tenants.acme.network.allow")
    assert explain(here, "https://readonly.test/", **named("readonly.test")).verdict == "allow"
    blocked = explain(here, "https://allowed.test/", ALICE)
    assert (blocked.verdict, blocked.rule) == ("refused", "tenants.acme.network.modes")


@pytest.mark.parametrize(
    ("target", "asked", "problem"),
    [
        ("", {}, "url: "),
        ("ftp://x", {}, "url: "),
        ("https://a b/", {}, "url: "),
        ("\ud800", {}, "url: "),
        ("https://x.test/\0", {}, "url: "),
        ("https://x.test/", {"language": "ruby"}, "language: it is none of"),
        ("https://x.test/", {"method": "get"}, "method: "),
        ("https://x.test/", {"method": "G T"}, "method: "),
        ("https://x.test/", {"method": ""}, "method: "),
        ("https://x.test/", {"domains": []}, "domains: it is given without"),
    ],
)
def test_what_is_no_question_is_refused_with_every_fault(
    here: Site, target: str, asked: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidCall) as refused:
        explain(here, target, **asked)
    assert any(one.startswith(problem) for one in refused.value.problems)
    with pytest.raises(InvalidCall) as refused:
        explain(here, "", language="ruby", method="", domains=[])
    assert len(refused.value.problems) == 4


def test_a_tenant_that_is_not_there_has_no_policy(here: Site) -> None:
    with pytest.raises(UnknownTenant):
        explain(here, "https://x.test/", Caller("nobody", "x"))


@pytest.mark.parametrize("target", ["https://user:secret@x.test/", "https://" + "x" * 10_000 + "/"])
def test_a_target_that_nothing_can_reach_is_denied_in_few_words(here: Site, target: str) -> None:
    """What a password is in it, too, is not said again."""
    found = explain(here, target, **named("allowed.test"))
    assert found.verdict == "deny"
    assert "secret" not in found.model_dump_json()
    assert len(found.model_dump_json()) < 4000


def test_a_raw_port_is_explained_too(here: Site) -> None:
    found = explain(here, "allowed.test:5432", **named("allowed.test"))
    assert (found.verdict, found.target) == ("deny", "allowed.test:5432")
