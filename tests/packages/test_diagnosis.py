"""What a resolver says is looked up: a refusal is told as one, and the registry's state as the registry's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from proxy.packages.data_files import load_policy_data
from proxy.packages.model import Ecosystem, FileFacts, FileKind, PackageFacts, parse_name, parse_version
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Registry, parse_base
from sandbox.packages.closure import Rules
from sandbox.packages.diagnosis import Page, diagnose, from_words, mentions
from tests.packages.conftest import wanted_specifiers

NOW = datetime(2026, 11, 29, tzinfo=UTC)
PYPI = Registry(id="r", ecosystem=Ecosystem.PYPI, index=parse_base("https://index.test/simple/"))
NPM = Registry(id="r", ecosystem=Ecosystem.NPM, index=parse_base("https://npm.test/"))
POLICY = PackagePolicy(prepare=True)
RULES = Rules(POLICY, load_policy_data(POLICY), NOW)
NAME = parse_name(Ecosystem.PYPI, "thing-x")
URL = "https://files.test/packages/4c/thing_x-1.1-cp313-cp313-linux_x86_64.whl.metadata"
REFUSED = f"error: Failed to fetch: {URL}\n  cause: HTTP status client error (403 Blocked) for url ({URL})\n"
BROKEN = REFUSED.replace("403 Blocked", "502 Bad Gateway")


def file(tag: str, days: int) -> FileFacts:
    name = f"thing_x-1.1-{tag}.whl"
    version = parse_version(Ecosystem.PYPI, "1.1")
    return FileFacts(NAME, version, name, FileKind.WHEEL, uploaded_at=NOW - timedelta(days=days))


PAGE = Page(
    PackageFacts(NAME, NOW - timedelta(days=400)), (file("py3-none-any", 400), file("cp313-cp313-linux_x86_64", 0))
)
TAGS = ("cp313-cp313-linux_x86_64", "py3-none-any")


def reasons(said: str, tags: Sequence[str] = TAGS) -> list[str]:
    asked = wanted_specifiers(Ecosystem.PYPI, "thing-x==1.1")
    return [str(one.reason) for one in diagnose(RULES, asked, {"thing-x": PAGE}, tags=tags, requested=True, said=said)]


def test_a_file_that_was_refused_to_the_resolver_is_judged_even_beside_an_allowed_one() -> None:
    """The fault: the release had an old wheel too, so its refusal was told as a conflict of versions."""
    assert reasons(REFUSED) == ["version_too_new"]
    assert reasons(BROKEN) == []


@pytest.mark.parametrize(
    ("registry", "url", "expected"),
    [
        (PYPI, URL, "thing-x 1.1"),
        (NPM, "https://npm.test/foo/-/foo-1.0.0.tgz", "foo 1.0.0"),
        (NPM, "https://npm.test/@a%2fb/-/b-1.0.0.tgz", "@a/b 1.0.0"),
        (NPM, "https://npm.test/@a/b/-/b-1.0.0.tgz", "@a/b 1.0.0"),
        (NPM, "https://elsewhere.test/x.tgz", None),
        (PYPI, "https://files.test/whatever", None),
        (PYPI, "https://[", None),
    ],
)
def test_whose_a_refused_file_is_is_seen_by_its_address(registry: Registry, url: str, expected: str | None) -> None:
    found = [f"{one.name} {one.selector.version}" for one in mentions(registry, f"npm error 403 Blocked - GET {url}\n")]
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("npm error code ENOSPC", "closure_too_large"),
        ("error: failed to write: No space left on device (os error 28)", "closure_too_large"),
        ("error: Received some unexpected JSON from `https://index.test/`", "registry_unavailable"),
        ("error: No solution found", "resolution_conflict"),
    ],
)
def test_what_is_left_is_told_by_the_resolvers_words(said: str, reason: str) -> None:
    """The fault: limits and garbage were told as versions that do not go together."""
    assert str(from_words(["x"], said).reason) == reason
