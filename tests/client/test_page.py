"""`docs/client.md` has every name, method and default of the clients, and both clients have the same."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

import sandbox.client
from sandbox.client import AsyncClient, AsyncTaskHandle, Client, Retries, ServiceError, TaskHandle
from sandbox.client.errors import _BY_STATUS
from sandbox.client.operations import MARGIN_SECONDS
from sandbox.client.place import Address
from tests.test_docs import PAGES, rows, section
from tests.test_reference import code_in

PAGE = PAGES["docs/client.md"]


def public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(kind).items()
        if not name.startswith("_") and callable(member)
    }


def parameters(signature: inspect.Signature) -> list[tuple[str, object]]:
    return [(one.name, one.default) for one in signature.parameters.values()]


@pytest.mark.parametrize(("sync", "other"), [(Client, AsyncClient), (TaskHandle, AsyncTaskHandle)])
def test_both_clients_have_the_same_methods(sync: type, other: type) -> None:
    ours, theirs = public(sync), public(other)
    assert len(ours) >= 5
    assert {name: parameters(one) for name, one in ours.items()} == {
        name: parameters(one) for name, one in theirs.items()
    }
    for name in ours:
        assert inspect.iscoroutinefunction(getattr(other, name)) or name == "events", name


def test_every_name_method_and_option_is_explained() -> None:
    assert set(sandbox.client.__all__) <= code_in(PAGE)
    assert public(Client).keys() | public(TaskHandle).keys() <= code_in(PAGE)
    options = {cells[0].strip("`") for cells in rows(section(PAGE, "## Where, and as whom"))[1:]}
    own = {"base_url", "retries", "margin_seconds"}
    assert options - {"---"} == {*get_type_hints(Address), *own}


def test_signatures_and_defaults_are_those_of_the_code() -> None:
    cells = " ".join(cells[0] for cells in rows(section(PAGE, "## Methods")))
    for name, signature in public(Client).items():
        if name in ("run", "submit", "close"):
            continue
        words = [
            one if default is inspect.Parameter.empty else f"{one}={default!r}"
            for one, default in parameters(signature)[1:]
        ]
        first = next(
            (n for n, one in enumerate(list(signature.parameters.values())[1:]) if one.kind is one.KEYWORD_ONLY), None
        )
        if first is not None:
            words.insert(first, "*")
        written = f"{name}({', '.join(words)})".replace("30000", "30_000").replace("'", '"')
        assert written in cells, written
    again = section(PAGE, "## What is sent again")
    assert f"`Retries.lost` times ({Retries().lost})" in again
    assert f"`Retries.max_pause_seconds` ({Retries().max_pause_seconds:g})" in again
    assert Retries().busy == 0
    assert f"timeout: {MARGIN_SECONDS:g}" in PAGE


def test_every_status_has_its_exception_in_the_table() -> None:
    table = {cells[0].strip("`"): cells[1] for cells in rows(section(PAGE, "## Errors"))[1:]}
    for status, kind in _BY_STATUS.items():
        assert str(status) in table[kind.__name__]
    kinds = {name for name in sandbox.client.__all__ if issubclass(getattr(sandbox.client, name), ServiceError)}
    assert kinds <= {*table, "ServiceError"}
