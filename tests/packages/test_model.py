"""Names and versions are compared by what they mean, and what has no meaning is none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.packages.model import (
    Ecosystem,
    FileKind,
    InvalidName,
    InvalidVersion,
    PackageVersion,
    parse_name,
    parse_version,
    purl,
    wheel_or_sdist,
)
from proxy.packages.ranges import parse_range

PYPI, NPM = Ecosystem.PYPI, Ecosystem.NPM


@pytest.mark.parametrize("text", ["Foo_Bar", "foo.bar", "foo--bar", "FOO-_.BAR", "foo-bar"])
def test_a_name_on_pypi_has_one_form_in_every_spelling(text: str) -> None:
    name = parse_name(PYPI, text)
    assert name.normal == "foo-bar"
    assert name.display == text
    assert name == parse_name(PYPI, "foo-bar")


def test_npms_names_keep_their_case_and_are_folded_only_to_be_looked_for() -> None:
    assert parse_name(NPM, "JSONStream") != parse_name(NPM, "jsonstream")
    assert parse_name(NPM, "JSONStream").folded == "jsonstream"
    assert parse_name(NPM, "@scope/name").scope == "@scope"


def test_a_name_of_one_ecosystem_is_none_of_another() -> None:
    assert parse_name(PYPI, "six") != parse_name(NPM, "six")


@pytest.mark.parametrize(
    ("ecosystem", "text"),
    [
        (PYPI, ""), (PYPI, "-a"), (PYPI, "a-"), (PYPI, "a b"), (PYPI, "a/b"), (PYPI, "a\n"), (PYPI, "\u212aeras"),
        (PYPI, "ı"), (PYPI, "ſix"), (PYPI, "a" * 215), (PYPI, "@scope/name"), (PYPI, ".a"), (PYPI, "_a"),
        (NPM, ""), (NPM, ".x"), (NPM, "_x"), (NPM, "-g"), (NPM, "a/b"), (NPM, "@/x"), (NPM, "@a/"), (NPM, "@a/b/c"),
        (NPM, "node_modules"), (NPM, "Favicon.ico"), (NPM, "a%2fb"), (NPM, "a\n"), (NPM, "lodаsh"), (NPM, "@-/x"),
        (NPM, "a~b"), (NPM, "a b"), (NPM, "@a"), (NPM, "@a/node_modules"),
    ],
)  # fmt: skip
def test_what_no_registry_could_have_is_no_name(ecosystem: Ecosystem, text: str) -> None:
    with pytest.raises(InvalidName):
        parse_name(ecosystem, text)


@settings(deadline=None)  # on a busy machine one example may wait
@given(st.sampled_from(list(Ecosystem)), st.text())
def test_any_text_is_a_name_or_is_refused_and_normal_forms_are_idempotent(ecosystem: Ecosystem, text: str) -> None:
    try:
        name = parse_name(ecosystem, text)
    except InvalidName:
        return
    assert parse_name(ecosystem, name.normal).normal == name.normal


@settings(deadline=None)  # on a busy machine one example may wait
@given(st.sampled_from(list(Ecosystem)), st.text())
def test_any_text_is_a_version_or_is_refused(ecosystem: Ecosystem, text: str) -> None:
    try:
        version = parse_version(ecosystem, text)
    except InvalidVersion:
        return
    assert parse_version(ecosystem, version.text) == version


@pytest.mark.parametrize(
    ("ecosystem", "one", "other"),
    [
        (PYPI, "1.0", "1.0.0"), (PYPI, "v1.0", "1"), (PYPI, "1.0rc1", "1.0.RC.1"), (PYPI, "1.0-1", "1.0.post1"),
        (NPM, "1.0.0", "1.0.0+build"),
    ],
)  # fmt: skip
def test_versions_are_equal_by_meaning(ecosystem: Ecosystem, one: str, other: str) -> None:
    first, second = parse_version(ecosystem, one), parse_version(ecosystem, other)
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("ecosystem", "ordered"),
    [
        (PYPI, "0.9 1.0.dev1 1.0a1 1.0b2 1.0rc1 1.0 1.0+local 1.0.post1 1.1 1.10 1!0.1"),
        # SemVer 2, section 11
        (NPM, "0.0.1 1.0.0-0 1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11 1.0.0-rc.1 1.0.0 1.9.0 1.10.0"),
    ],
)  # fmt: skip
def test_versions_are_in_the_ecosystems_order(ecosystem: Ecosystem, ordered: str) -> None:
    versions = [parse_version(ecosystem, text) for text in ordered.split()]
    for lower, higher in itertools.combinations(versions, 2):
        assert lower < higher
        assert higher >= lower
        assert lower != higher


def test_versions_of_two_ecosystems_have_no_order_and_are_not_equal() -> None:
    one, other = parse_version(PYPI, "1.0.0"), parse_version(NPM, "1.0.0")
    assert one != other
    with pytest.raises(TypeError):
        assert one < other


def test_a_local_build_has_its_public_version() -> None:
    local = parse_version(PYPI, "2.1+cpu")
    assert local != parse_version(PYPI, "2.1")
    assert local.public == parse_version(PYPI, "2.1")
    assert local.local == "cpu"


@pytest.mark.parametrize(
    ("ecosystem", "text"),
    [(PYPI, "latest"), (PYPI, "1.0\n"), (PYPI, "٢.0"), (PYPI, "1" * 129), (PYPI, " 1.0"), (NPM, "1.0"), (NPM, "v1.0.0"),
     (NPM, "01.0.0"), (NPM, "1.0.0-01"), (NPM, "9007199254740993.0.0"), (NPM, "1.0.0\n"), (NPM, "")],
)  # fmt: skip
def test_what_is_no_version_is_refused(ecosystem: Ecosystem, text: str) -> None:
    with pytest.raises(InvalidVersion):
        parse_version(ecosystem, text)


def test_purls_are_those_of_the_specification() -> None:
    assert purl(parse_name(PYPI, "Foo_Bar"), parse_version(PYPI, "1.0+a")) == "pkg:pypi/foo-bar@1.0%2Ba"
    assert purl(parse_name(NPM, "@scope/name"), parse_version(NPM, "1.2.3")) == "pkg:npm/%40scope/name@1.2.3"
    assert purl(parse_name(NPM, "lodash")) == "pkg:npm/lodash"


def test_the_kind_of_a_file_is_told_by_its_name() -> None:
    assert wheel_or_sdist("a-1.0-py3-none-any.WHL") is FileKind.WHEEL
    assert wheel_or_sdist("a-1.0.tar.gz") is FileKind.SDIST
    assert wheel_or_sdist("a-1.0-py2.7.egg") is FileKind.OTHER
    assert wheel_or_sdist("a-1.0.win32.exe") is FileKind.OTHER


def version(text: str, ecosystem: Ecosystem = PYPI) -> PackageVersion:
    return parse_version(ecosystem, text)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("<2", "1.9 2.0rc1 0.1", "2 2.0.0 2.1"),
        ("==1.0", "1.0 1.0.0 1.0+local", "1.0.1"),
        (">=1.0,<1.5.2", "1.0 1.5.1 1.5.1+x", "0.9 1.5.2 2"),
        ("!=1.0", "1.1", "1.0 1.0+x"),
        ("==1.0+x", "1.0+x", "1.0 1.0+y"),
        (">1,<=2", "1.1 2.0", "1.0 2.0.1"),
        ("*", "0 1!1", ""),
    ],
)
def test_a_range_covers_what_it_says_and_local_builds_with_their_version(text: str, inside: str, outside: str) -> None:
    found = parse_range(PYPI, text)
    assert [v for v in inside.split() if not found.covers(version(v))] == []
    assert [v for v in outside.split() if found.covers(version(v))] == []
    assert parse_range(PYPI, str(found).partition(":")[2]) == found
    assert not found.covers(version("1.0.0", NPM))


def test_npms_short_versions_stand_for_whole_ones_in_a_range() -> None:
    assert parse_range(NPM, "<2").covers(version("1.99.0", NPM))
    assert not parse_range(NPM, "<2").covers(version("2.0.0", NPM))


@pytest.mark.parametrize("text", ["", "1.0", "^1", "~=1.0", "===1", "<2,", "<x", "< 2", ">=1 <2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidVersion):
        parse_range(PYPI, text)
