"""Names that look like much used ones are found, each of them, and others are not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.packages.data_files import read_list, shipped_list, stdlib_names
from proxy.packages.model import Ecosystem
from proxy.packages.popular import PopularNames, one_edit_apart

SMALL = PopularNames(("requests", "numpy", "lodash", "six", "Django"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("requestss", "requests"),  # one more
        ("reqests", "requests"),  # one less
        ("requezts", "requests"),  # another
        ("reqeusts", "requests"),  # swapped
        ("loadsh", "lodash"),
        ("djang0", "django"),
        ("requests", None),  # itself
        ("requestsss", None),  # two
        ("sxi", None),  # too short to mean anything
        ("pandas", None),
    ],
)
def test_one_letter_is_seen_and_two_are_not(name: str, near: str | None) -> None:
    assert SMALL.lookalike(name, 5) == near


def test_only_the_top_is_imitated() -> None:
    assert SMALL.lookalike("loadsh", 2) is None
    assert SMALL.is_among("lodash", 3)
    assert not SMALL.is_among("lodash", 2)


def test_of_two_the_more_used_is_named() -> None:
    assert PopularNames(("abcd1", "abcd2")).lookalike("abcd3", 2) == "abcd1"


def every_edit(text: str) -> set[str]:
    letters = "ab-"
    splits = [(text[:at], text[at:]) for at in range(len(text) + 1)]
    return (
        {a + b[1:] for a, b in splits if b}
        | {a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1}
        | {a + c + b[1:] for a, b in splits if b for c in letters}
        | {a + c + b for a, b in splits for c in letters}
    ) - {text}


SHORT = st.text(alphabet="ab-", min_size=0, max_size=6)


@settings(deadline=None)  # on a busy machine one example may wait
@given(SHORT, SHORT)
def test_an_edit_is_what_trying_them_all_finds(one: str, other: str) -> None:
    assert one_edit_apart(one, other) == (other in every_edit(one))


@settings(deadline=None)  # on a busy machine one example may wait
@given(
    st.lists(st.text(alphabet="ab-", min_size=4, max_size=6), max_size=6),
    st.text(alphabet="ab-", min_size=4, max_size=6),
)
def test_the_index_finds_what_comparing_with_every_name_finds(names: list[str], name: str) -> None:
    popular = PopularNames(tuple(names))
    nearby = [other for other in popular.names if one_edit_apart(name, other)]
    assert popular.lookalike(name, 10) == (nearby[0] if nearby else None)


@pytest.mark.parametrize("ecosystem", list(Ecosystem))
def test_the_shipped_lists_say_where_they_are_from_and_are_long_enough(ecosystem: Ecosystem) -> None:
    found = read_list(shipped_list(ecosystem), ecosystem)
    assert found.header["ecosystem"] == ecosystem
    assert found.header["date"]
    assert found.header["source"]
    assert 14_900 <= len(found.names) <= 15_000
    assert {Ecosystem.PYPI: "requests", Ecosystem.NPM: "lodash"}[ecosystem] in found.names[:200]


@pytest.mark.parametrize("ecosystem", list(Ecosystem))
def test_few_of_the_shipped_names_look_like_a_popular_one(ecosystem: Ecosystem) -> None:
    """What the rule costs: of real, much used names under one in fifty would be suspected, were they not on the list."""
    popular = PopularNames(read_list(shipped_list(ecosystem), ecosystem).names)
    rest = popular.names[1000:]
    assert 0 < sum(popular.lookalike(name, 1000) is not None for name in rest) < len(rest) / 50


def test_the_standard_libraries_are_listed() -> None:
    assert {"json", "os", "sys", "asyncio", "xml"} <= stdlib_names(Ecosystem.PYPI)
    assert {"fs", "http", "path", "worker_threads"} <= stdlib_names(Ecosystem.NPM)
    assert "requests" not in stdlib_names(Ecosystem.PYPI)
    import sys

    assert {name for name in sys.stdlib_module_names if not name.startswith("_")} <= stdlib_names(Ecosystem.PYPI)
