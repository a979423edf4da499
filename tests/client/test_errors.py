"""Each kind of refusal is an exception of its own, with all that the service said."""

from __future__ import annotations

from pathlib import Path

import pytest

import sandbox
from sandbox.client import (
    Busy,
    ConnectionLost,
    InvalidCall,
    NotFound,
    ServiceError,
    Unauthorised,
    Unavailable,
)
from sandbox.client.errors import refusal as error_of
from sandbox.client.operations import Reply
from tests.client.conftest import Connect
from tests.client.scripted import CLOSE, Scripted, answer, refusal


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "bad_request", InvalidCall), (413, "too_large", InvalidCall), (415, "media_type", InvalidCall),
        (422, "invalid_call", InvalidCall), (401, "unauthorised", Unauthorised), (403, "forbidden", Unauthorised),
        (404, "not_found", NotFound), (429, "rate_limited", Busy), (503, "queue_full", Busy),
        (503, "draining", Unavailable), (500, "internal", ServiceError), (408, "request_timeout", ServiceError),
    ],
)  # fmt: skip
def test_each_status_is_its_exception(
    connect: Connect, place: Path, status: int, code: str, kind: type[ServiceError]
) -> None:
    with Scripted(place / "s", refusal(status, code, "because of that")), pytest.raises(ServiceError) as caught:
        connect(uds=place / "s").run(language="python", code="1")
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.code, error.message, str(error)) == (status, code, "because of that", "because of that")
    assert (error.problems, error.retry_after_seconds, error.reference) == ([], None, None)


def test_every_fault_of_a_call_is_in_the_exception(connect: Connect, place: Path) -> None:
    """Which is the library's too: what handles a call's faults handles either."""
    problems = ["timeout: it is below 1", "colour: it is not a field of a call"]
    said = refusal(422, "invalid_call", "two faults", problems=problems)
    with Scripted(place / "s", said), pytest.raises(sandbox.InvalidCall) as caught:
        connect(uds=place / "s").run(language="python", code="1", timeout=0, colour=1)
    assert isinstance(caught.value, InvalidCall)
    assert caught.value.problems == problems


def test_when_to_come_again_is_in_the_exception() -> None:
    """From the body, where it is exact, else from the header."""
    body = b'{"error": {"code": "busy", "message": "m", "retry_after_seconds": 0.25}}'
    assert error_of(Reply(429, body, {"retry-after": "1"})).retry_after_seconds == 0.25
    assert error_of(Reply(429, b"", {"retry-after": "7"})).retry_after_seconds == 7
    for text in ("soon", "nan", "inf", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"):
        assert error_of(Reply(429, b"", {"retry-after": text})).retry_after_seconds is None


@pytest.mark.parametrize(
    "body", [b"", b"<h1>Bad gateway</h1>", b"[1]", b'{"error": "text"}', b'{"error": {}}', b"\xff\x00"]
)
def test_what_a_gateway_says_is_an_error_too(body: bytes) -> None:
    error = error_of(Reply(502, body))
    assert type(error) is ServiceError
    assert error.code == "http_502"
    assert "502" in error.message
    assert error.message.isprintable()


def test_a_fault_of_the_service_names_its_place_in_the_log() -> None:
    error = error_of(Reply(500, b'{"error": {"code": "internal", "message": "m", "reference": "f-17"}}'))
    assert error.reference == "f-17"


def test_a_service_that_is_not_there_is_named_with_a_hint(connect: Connect, place: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        connect(uds=place / "none").run(language="python", code="1")
    assert caught.value.code == "unreachable"
    assert f"`{place / 'none'}`" in caught.value.message
    assert "\nhint: " in caught.value.message


def test_a_lost_answer_is_not_taken_for_a_refusal(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", CLOSE), pytest.raises(ConnectionLost) as caught:
        connect(uds=place / "s").code_exec("print(1)")
    assert (caught.value.code, caught.value.status) == ("connection_lost", None)


def test_a_status_without_a_body_that_can_be_read_is_no_crash(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", answer(404, b"nothing here")), pytest.raises(NotFound, match="nothing here"):
        connect(uds=place / "s").record("call-1")
