"""A call's specifiers are all allowed, or everything that stands against them is said at once."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.packages.data_files import load_policy_data
from proxy.packages.model import Ecosystem
from proxy.packages.policy import Action, Names, NamesPolicy, PackagePolicy, Selectors
from sandbox.packages.screening import screen
from sandbox.packages.specifiers import specifier_text

PYPI, NPM = Ecosystem.PYPI, Ecosystem.NPM
NOW = datetime(2026, 11, 29, tzinfo=UTC)
POLICY = PackagePolicy(prepare=True, max_specifiers=5, names=NamesPolicy(deny=Names(pypi=("denied",))))
DATA = load_policy_data(POLICY, NOW)


def refused(*texts: str, policy: PackagePolicy = POLICY) -> list[tuple[str, str]]:
    return [(refusal.specifier, refusal.code) for refusal in screen(policy, PYPI, texts, NOW, DATA).refusals]


def test_a_call_without_packages_is_never_refused_for_them() -> None:
    assert screen(PackagePolicy(), PYPI, [], NOW, DATA).ok


def test_every_fault_of_every_specifier_is_said_at_once() -> None:
    assert refused("denied==1.0rc1", "six==", "a[b", "json==1") == [
        ("denied==1.0rc1", "name_denied"),
        ("denied==1.0rc1", "prerelease_denied"),
        ("a[b", "specifier_syntax/no_version_delimiter"),
        ("json==1", "stdlib_name"),
    ]


def test_what_is_wrong_with_the_call_is_said_besides_what_is_wrong_with_its_specifiers() -> None:
    assert refused("denied==1", *("six==",) * 5) == [("", "too_many_packages"), ("denied==1", "name_denied")]
    assert refused("six==", policy=PackagePolicy()) == [("", "packages_not_allowed")]


def test_no_more_is_looked_at_than_a_call_may_name() -> None:
    assert refused(*("six==",) * 5, "denied==1") == [("", "too_many_packages")]


def test_one_package_in_two_ways_is_a_conflict_and_twice_in_one_way_is_not() -> None:
    assert refused("Six==1.0", "six==1.0.0") == []
    assert refused("six==1.0", "six==1.1") == [("six==1.1", "conflicting_specifiers")]
    assert refused("six==1.0", "six==") == [("six==", "conflicting_specifiers")]
    assert refused("uvicorn==", "uvicorn[standard]==") == [("uvicorn[standard]==", "conflicting_specifiers")]
    names = ["JSONStream@1.0.0", "jsonstream@1.0.1"]
    assert screen(POLICY, NPM, names, NOW, DATA).ok, "npm has both"


def test_what_is_allowed_is_given_once_and_canonical() -> None:
    found = screen(POLICY, PYPI, ["Foo_Bar==v1.0", "foo.bar==01.0", "six==*"], NOW, DATA)
    assert [specifier_text(specifier) for specifier in found.allowed] == ["foo-bar==1.0", "six=="]


def test_warnings_are_handed_on() -> None:
    policy = POLICY.model_copy(update={"selectors": Selectors(prerelease=Action.WARN)})
    found = screen(policy, PYPI, ["six==2.0rc1"], NOW, DATA)
    assert found.ok
    assert [str(warning.reason) for warning in found.warnings] == ["prerelease_denied"]


@settings(deadline=None)  # on a busy machine one example may wait
@given(st.sampled_from(list(Ecosystem)), st.lists(st.text(max_size=30), max_size=7))
def test_any_texts_are_screened_and_what_is_said_can_be_printed(ecosystem: Ecosystem, texts: list[str]) -> None:
    found = screen(POLICY, ecosystem, texts, NOW, DATA)
    for refusal in found.refusals:
        assert all(text.isprintable() for text in (refusal.specifier, refusal.message, refusal.hint or ""))
        assert refusal.hint
