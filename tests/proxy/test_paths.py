"""A path that servers could read in two ways is never allowed by a rule with paths, and always denied by one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.paths import normalise_path, path_allowed, path_denied


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("/", "/"),
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b/"),
        ("/%61/b", "/a/b"),
        ("/caf%C3%A9", "/café"),
        ("/a%20b;v=1", "/a b;v=1"),
        ("/a.b/..c/d..", "/a.b/..c/d.."),
        ("/~a/$b/*", "/~a/$b/*"),
        ("/a%3Fb%23c", "/a?b#c"),
    ],
)
def test_a_plain_path_is_decoded_once(path: str, normal: str) -> None:
    assert normalise_path(path) == normal
    assert normalise_path(normal) == normal


AMBIGUOUS = [
    None, "", "a", "*", "http://a.test/", "//a", "/a//b", "/a/../b", "/..", "/a/..", "/./a", "/a/.", "/%2e%2e/a", "/.%2E/a",
    "/a%2fb", "/a%2Fb", "/a%5cb", "/a\\b", "/a%00b", "/a%0ab", "/a\tb", "/%252e", "/%25", "/%", "/%zz", "/%u002e", "/%4",
    "/..;/a", "/..;x=1/a", "/.;/a", "/;/a", "/;x/a", "/.. /a", "/... /a", "/.../a", "/%c0%ae%c0%ae/a", "/%ff", "/%ed%a0%80",
    "/\udc80", "/a\x7f", "/a%C2%85", "/．．/a", "/%EF%BC%8E%EF%BC%8E/a", "/a／b", "/a%EF%BC%8Fb", "/a＼b", "/‥/a", "/a％2e",
    "/" + "a" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("path", AMBIGUOUS)
def test_a_path_that_reads_in_two_ways_has_no_normal_form(path: str | None) -> None:
    assert normalise_path(path) is None
    assert not path_allowed(("/**",), path)
    assert path_denied(("/nothing/like/it",), path)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/a", "/a", True),
        ("/a", "/a/", False),
        ("/a", "/ab", False),
        ("/a/*", "/a/b", True),
        ("/a/*", "/a/", True),
        ("/a/*", "/a/b/c", False),
        ("/a/**", "/a/b/c", True),
        ("/a/**", "/a/", True),
        ("/a/**", "/a", False),
        ("/a/**", "/abc", False),
        ("/**/c", "/a/b/c", True),
        ("/**/c", "/c", False),
        ("/*.json", "/x.json", True),
        ("/*.json", "/x/y.json", False),
        ("/*a*b*", "/xxaxxbxx", True),
        ("/*a*b*", "/xxbxxaxx", False),
        ("/**a*b", "/x/a/ab", True),
        ("/**a*b", "/x/a/b", False),
        ("/a.c", "/abc", False),
        ("/(a|b)", "/a", False),
        ("/a", "/a\n", False),
        ("/public/**", "/public/%2e%2e/secret", False),
        ("/public/**", "/public/..;/secret", False),
        ("/Public", "/public", False),
        ("/**.json", "/secret%3F.json", False),
        ("/**.json", "/secret%23.json", False),
        ("/**.json", "/secret;.json", False),
        ("/*/a.json", "/secret;x/a.json", True),
        ("/*x/a.json", "/secret;x/a.json", False),
        ("/public/**", "/public/a%3Fb%23c;d", True),
        ("/a;v=*", "/a;v=1", True),
        ("/wiki/C#", "/wiki/C%23", True),
    ],
)
def test_an_allow_pattern_matches_the_whole_path_and_nothing_else(pattern: str, path: str, matches: bool) -> None:
    assert path_allowed((pattern,), path) is matches


@pytest.mark.parametrize(
    "path",
    [
        "/admin/x",
        "/ADMIN/x",
        "/%61dmin/x",
        "/admin;a=b/x",
        "/admin./x",
        "/admin%20/x",
        "/ａdmin/x",
        "/x/../admin/x",
        "/admin/",
        "/admin/x%3Fy",
    ],
)
def test_a_deny_pattern_matches_what_some_server_reads_as_it(path: str) -> None:
    assert path_denied(("/admin/**",), path)


@pytest.mark.parametrize("path", ["/admin%3Fx", "/admin%23x", "/admin;y%3Fx", "/admin.%23"])
def test_a_deny_pattern_matches_what_a_server_cuts_to_it(path: str) -> None:
    assert path_denied(("/admin",), path)


@pytest.mark.parametrize("path", ["/", "/administer", "/user/admin/x", "/admin"])
def test_a_deny_pattern_leaves_other_paths_alone(path: str) -> None:
    assert not path_denied(("/admin/**",), path)


@given(st.text(max_size=60) | st.text(alphabet="/.%2eE5cf;*a ", max_size=30))
def test_normal_forms_are_total_and_idempotent(text: str) -> None:
    normal = normalise_path("/" + text)
    if normal is not None:
        assert normalise_path(normal) == normal


@given(st.text(alphabet="/ab*", max_size=8), st.text(alphabet="/ab", max_size=10))
def test_what_a_pattern_allows_the_same_pattern_denies(pattern: str, path: str) -> None:
    """So that no path slips between an allow and a deny of the same words."""
    if path_allowed(("/" + pattern,), "/" + path):
        assert path_denied(("/" + pattern,), "/" + path)


def test_no_path_makes_a_pattern_slow() -> None:
    """A backtracking matcher would need longer than the age of the universe for this one."""
    pattern = "/" + "**a" * 100 + "b"
    started = time.monotonic()
    assert not path_allowed((pattern,), "/" + "a" * 8000)
    assert time.monotonic() - started < 1
