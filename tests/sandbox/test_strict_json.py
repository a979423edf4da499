"""JSON means one thing to every reader, or is refused with words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.strict_json import NotJson, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_json_can_write_is_read_as_it_was(value: Any) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json("\ufeff" + json.dumps(value)) == value


@given(st.text())
def test_any_text_is_a_value_or_is_refused_in_few_words(text: str) -> None:
    said = ""
    try:
        read_json(text)
    except NotJson as error:
        said = str(error)
    assert len(said) < 300


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1, "a": 2}', "the key `a` stands twice in one object"),
        ('[{"b": {"a": 1, "a": 1}}]', "the key `a` stands twice in one object"),
        ('{"\\n": 1, "\\n": 2}', r"the key `\\n` stands twice"),
        ("NaN", "`NaN` is not JSON"),
        ("[-Infinity]", "`-Infinity` is not JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("", "it is not JSON: Expecting value"),
        ("1 2", "Extra data"),
    ],
)
def test_what_is_wrong_is_said(text: str, fault: str) -> None:
    with pytest.raises(NotJson, match=fault):
        read_json(text)


def test_constants_are_numbers_where_they_may_be() -> None:
    found = read_json("[NaN, Infinity, -Infinity]", constants=True)
    assert isinstance(found, list)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def test_a_number_of_very_many_digits_is_no_way_to_fail() -> None:
    assert read_json("9" * 100_000) == int("9" * 400)
