"""Headers by which a server is told another method or target, and headers that end at the proxy."""

from __future__ import annotations

import pytest
from mitmproxy import http

from proxy.headers import names_another_target, remove_headers_for_us


def headers(*fields: tuple[str, str]) -> http.Headers:
    return http.Headers([(name.encode(), value.encode()) for name, value in fields])


@pytest.mark.parametrize(
    "name",
    ["X-HTTP-Method", "X-HTTP-Method-Override", "X-Method-Override", "X-METHOD-OVERRIDE", "x_http_method_override",
     "X-Original-Method", "X-Forwarded-Method", "X-Original-URL", "X-Original-URI", "X-Rewrite-URL", "X-Override-URL",
     "X-Forwarded-Uri", "X-Forwarded-Path", "X-Forwarded-Prefix", "X-Envoy-Original-Path", "X-Request-URI",
     "X_Original_Url", "Request-Uri", "Destination"],
)  # fmt: skip
def test_a_header_that_names_another_target(name: str) -> None:
    assert names_another_target(headers(("Host", "a.test"), (name, "")))


@pytest.mark.parametrize(
    "name",
    ["Host", "Accept", "Authorization", "Content-Type", "X-Requested-With", "X-Real-IP", "X-Forwarded-For", "X-Request-ID",
     "X-Method-Count", "Access-Control-Request-Method", "X-API-Key", "Content-Location", "Referer"],
)  # fmt: skip
def test_a_header_that_names_none(name: str) -> None:
    assert not names_another_target(headers((name, "/x")))


def test_several_connection_headers_are_one_list() -> None:
    fields = headers(("Connection", "X-A"), ("connection", " x-b , CLOSE"), ("X-A", "1"), ("x-b", "2"), ("X-C", "3"))
    remove_headers_for_us(fields)
    assert list(fields.items()) == [("X-C", "3"), ("connection", "close")]


def test_a_websocket_keeps_its_upgrade() -> None:
    fields = headers(("Connection", "Upgrade, X-A, Host"), ("Upgrade", "websocket"), ("X-A", "1"), ("Host", "a.test"))
    remove_headers_for_us(fields)
    assert dict(fields.items()) == {"Upgrade": "websocket", "Host": "a.test", "connection": "upgrade"}
