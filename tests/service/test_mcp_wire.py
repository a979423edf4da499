"""Messages as both transports take them: one meaning, and ids that the SDK tells apart."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.service.mcp_wire import id_key, in_use, read_message, request_key
from sandbox.strict_json import NotJson

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip


@given(values)
def test_json_is_read_as_it_is(value: object) -> None:
    assert read_message(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "data",
    [
        b'{"params": {"arguments": {"code": "1", "code": "2"}}}',
        b'{"id": 1, "id": 2, "method": "ping"}',
        b'{"params": {"arguments": {"memory_mib": NaN}}}',
        b'{"params": {"arguments": {"env": {"timeout": Infinity}}}}',
        b'{"params": {"timeout": NaN}}',
        b'{"params": {"arguments": {"timeout": NaN, "offset": -Infinity}}}',
        b"NaN",
        b"[[NaN]]",
        '{"id": 1}'.encode("utf-16"),
        b"[" * 100_000,
        b"nonsense",
    ],
)
def test_what_readers_disagree_on_is_no_message(data: bytes) -> None:
    with pytest.raises(NotJson):
        read_message(data)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "[NaN]"])
def test_a_tools_timeout_may_be_anything(text: str) -> None:
    message = read_message(b'{"params": {"arguments": {"timeout": %s}}}' % text.encode())
    assert isinstance(message, dict)
    timeout = message["params"]["arguments"]["timeout"]
    assert not math.isfinite(timeout[0] if isinstance(timeout, list) else timeout)


def test_a_deep_message_with_a_constant_is_refused_in_words() -> None:
    with pytest.raises(NotJson):
        read_message(b'{"a":' * 800 + b"NaN" + b"}" * 800)


def test_ids_that_the_sdk_takes_for_one_another_have_one_key() -> None:
    assert id_key(7) == id_key("7") == id_key("07")
    assert len({id_key(7), id_key(8), id_key("x"), id_key("")}) == 4


@pytest.mark.parametrize("message", [{"id": 1}, {"method": "x"}, {**PING, "id": None}, {**PING, "id": True}, [PING], 5])
def test_what_is_no_request_has_no_key(message: object) -> None:
    assert request_key(message) is None


def test_the_answer_about_an_id_is_nobodys_answer() -> None:
    answer = json.loads(in_use("x" * 500))
    assert answer["id"] is None
    assert len(answer["error"]["message"]) < 200
