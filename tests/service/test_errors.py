"""Every error of the layers below has its status and code; what is nobody else's fault says nothing of what it was."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from starlette.types import Message, Receive, Scope, Send

from proxy.control import ProxyUnavailable
from sandbox.contract import InvalidCall
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.policy.problems import InvalidPolicy, Problem
from sandbox.service.bodies import ClientGone
from sandbox.service.edge import Edge
from sandbox.service.errors import HttpError, http_error
from sandbox.service.metrics import Metrics
from sandbox.service.model import Busy, Draining, NotFound, PlaceRefused, QueueIsFull, ServiceError, Unavailable
from sandbox.tenants import UnknownTenant
from tests.service.test_metrics import count, samples

SCOPE: Scope = {
    "type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "headers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (InvalidCall(["code: it is required"]), 422, "invalid_call", None),
        (NotFound("no"), 404, "not_found", None),
        (Busy("busy", "no", 0.2), 429, "busy", "1"),
        (Busy("rate_limited", "no", 1.01), 429, "rate_limited", "2"),
        (QueueIsFull("no", retry_after_seconds=7), 503, "queue_full", "7"),
        (Draining("no"), 503, "draining", "1"),
        (Unavailable("no"), 503, "ledger_unavailable", "1"),
        (Unavailable("no", "directory_unavailable"), 503, "directory_unavailable", "1"),
        (PlaceRefused("no"), 403, "working_directory_refused", None),
        (UnknownTenant("no"), 401, "unauthorized", None),
        (IsolationUnavailable("no"), 503, "isolation_unavailable", "1"),
        (ProxyUnavailable("no"), 503, "proxy_unavailable", "1"),
        (LedgerUnavailable("no"), 503, "ledger_unavailable", "1"),
        (InvalidPolicy([Problem("p", None, "", "no", None)]), 503, "invalid_policy", "1"),
        (HttpError(413, "too_large", "no"), 413, "too_large", None),
    ],
)
def test_an_error_has_its_status_its_code_and_when_to_come_again(
    error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    told = http_error(error)
    assert told is not None
    response = told.response()
    assert (response.status_code, json.loads(bytes(response.body))["error"]["code"]) == (status, code)
    assert response.headers.get("retry-after") == retry_after


def test_every_error_of_the_service_is_known() -> None:
    """One that is added must not become a 500. What other transports have of their own is not among them."""
    known = {NotFound, Busy, PlaceRefused, QueueIsFull, Draining, Unavailable}
    assert {one for one in ServiceError.__subclasses__() if one.__module__ == ServiceError.__module__} == known


PRINTED = "printed by a program"


class Secret(BaseModel):
    model_config = ConfigDict(strict=True)

    number: int


def exchange(app: Any) -> tuple[list[Message], Metrics]:
    """What goes out when an application is asked."""
    sent: list[Message] = []
    metrics = Metrics()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Edge(app, metrics=metrics)(dict(SCOPE), receive, send))
    return sent, metrics


def test_what_is_our_fault_is_told_by_a_reference_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("inside")

    sent, metrics = exchange(app)
    told = json.loads(b"".join(message.get("body", b"") for message in sent))["error"]
    assert (sent[0]["status"], told["code"]) == (500, "internal_error")
    assert told["reference"] in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "inside" not in json.dumps(told)
    assert count(samples(metrics.text().decode()), "sluicegate_http_requests_total", status="500") == 1


def test_a_value_that_does_not_fit_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It may be what a program printed."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        Secret.model_validate({"number": PRINTED})

    exchange(app)
    assert PRINTED not in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_failure_in_the_middle_of_an_answer_ends_the_connection_and_not_the_answer() -> None:
    """The server closes where an application raises; a client then knows that it has not all."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise OSError("gone")

    with pytest.raises(HttpError):
        exchange(app)


def test_a_client_that_left_is_counted_as_such() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientGone

    sent, metrics = exchange(app)
    assert sent == []
    assert count(samples(metrics.text().decode()), "sluicegate_http_requests_total", status="499") == 1
