"""Whose a call is, and which texts may name a user: they become names of directories."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.owners import DEFAULT_USER, Caller, InvalidUser, Owner, check_user


@pytest.mark.parametrize(
    "name", ["a", "0", DEFAULT_USER, "alice", "Alice.Smith", "a@b.example", "x-y_z+1", "a..b", "a" * 128]
)
def test_names_of_users_are_taken_as_they_are(name: str) -> None:
    assert check_user(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "a/b", "/a", "a\\b", "-a", ".a", "@a", "a b", " a", "a ", "a\n", "a\0", "a" * 129, "é",
        "ａ", "١", "\ud800", "a:b", "~", "%2e%2e", "a\u202eb",
    ],
)  # fmt: skip
def test_what_could_be_another_path_is_no_name(name: str) -> None:
    """The message says which form to write, and is itself plain text whatever it was given."""
    with pytest.raises(InvalidUser, match="hint: write up to 128 letters") as refused:
        check_user(name)
    assert str(refused.value).isascii()
    assert len(str(refused.value)) < 300


@given(st.text(max_size=200))
def test_any_text_is_a_name_or_refused_and_a_name_is_one_step_of_a_path(name: str) -> None:
    try:
        check_user(name)
    except InvalidUser:
        return
    assert Path("/data", name).parent == Path("/data")
    assert Path("/data", name).name == name
    assert name.isascii()


def test_a_caller_owns_what_its_tenant_and_user_own_and_nothing_else_counts() -> None:
    """An admin of a tenant sees the same calls as anybody else with that user's name."""
    caller = Caller("acme", "alice")
    assert caller.owner == Owner("acme", "alice")
    assert dataclasses.replace(caller, admin=True, directory=Path("/srv")).owner == caller.owner
    assert {Owner("acme", "alice"), Owner("acme", "bob"), Owner("other", "alice"), Owner("", "alice")} - {
        caller.owner
    } == {Owner("acme", "bob"), Owner("other", "alice"), Owner("", "alice")}
    assert (Caller().owner, Owner()) == (Owner("", "default"), Owner("", ""))
