"""What refused and failed requests are answered with is for people, on one line where it must be, and says no secrets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import responses
from proxy.destinations import Unparsed, parse_host
from proxy.network import PROXY_STATUS, Reason, Request, RequestLayer, deny
from tests.proxy.rig import grant

REQUEST = Request(RequestLayer.HTTP, parse_host("x.test"), 443)
DENIALS = [reason for reason in Reason if reason is not Reason.ALLOWED]


@pytest.mark.parametrize("reason", DENIALS)
def test_a_refusal_names_reason_host_policy_and_what_to_do(reason: Reason) -> None:
    response = responses.refusal(deny(reason, "because", "rule[0]"), REQUEST, grant())
    body = json.loads(response.content or b"")
    assert response.status_code == 403
    assert body["code"] == reason.value
    assert (body["host"], body["port"], body["policy"], body["rule"]) == ("x.test", 443, "tests", "rule[0]")
    assert body["reason"] == "because"
    assert body["hint"]
    assert response.headers["x-sluicegate-reason"] == reason.value
    assert f"error={PROXY_STATUS[reason]}" in response.headers["proxy-status"]
    assert response.headers["cache-control"] == "no-store"
    assert reason.value in response.reason
    assert response.headers["connection"] == "close"


@given(st.text(max_size=500), st.text(max_size=500))
def test_whatever_the_code_sent_a_refusal_is_well_formed(host: str, detail: str) -> None:
    request = Request(RequestLayer.HTTP, Unparsed(host, "why"), None)
    response = responses.refusal(deny(Reason.MALFORMED_REQUEST, detail), request, grant())
    assert response.reason.isascii()
    assert response.reason.isprintable()
    assert len(response.reason) <= 200
    assert json.loads(response.content or b"")["host"] == host[:300]
    for _, value in response.headers.fields:
        assert b"\r" not in value
        assert b"\n" not in value


@pytest.mark.parametrize(
    ("code", "status_type"),
    [
        ("dns_failed", "dns_error"),
        ("connect_failed", "connection_refused"),
        ("tls_failed", "tls_protocol_error"),
        ("new", "destination_unavailable"),
    ],
)
def test_a_failure_is_told_from_a_denial(code: str, status_type: str) -> None:
    response = responses.failure(code, "why", REQUEST)
    body = json.loads(response.content or b"")
    assert (response.status_code, body["code"], body["reason"]) == (502, code, "why")
    assert f"error={status_type}" in response.headers["proxy-status"]
    assert "x-sluicegate-reason" not in response.headers
    assert response.reason == f"Allowed by sluicegate, but failed: {code}: why"
    assert response.headers["connection"] == "close"


def test_after_a_malformed_request_the_connection_ends() -> None:
    response = responses.malformed("why", grant())
    assert response.status_code == 400
    assert response.headers["connection"] == "close"
    assert json.loads(response.content or b"")["code"] == "malformed_request"
