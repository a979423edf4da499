"""A URL is explained as the requests that the layers would see of it."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.destinations import Host, Unparsed, parse_host
from proxy.explain import InvalidTarget, Target, explain, parse_target, requests_for, verdict
from proxy.network import Grant, Mode, Protocol, Reason, RequestLayer, Rule, RuleLayer, StaticHost, decide


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port", "path"),
    [
        ("https://a.test", "https", "a.test", 443, "/"),
        ("HTTPS://A.Test./x?y=z#f", "https", "a.test", 443, "/x"),
        ("http://a.test:8080/a%2Fb/../c", "http", "a.test", 8080, "/a%2Fb/../c"),
        ("http://a.test/café x".replace(" ", "%20"), "http", "a.test", 80, "/caf%C3%A9%20x"),
        ("ws://a.test/", "ws", "a.test", 80, "/"),
        ("wss://a.test/", "wss", "a.test", 443, "/"),
        ("tcp://a.test:22", "tcp", "a.test", 22, "/"),
        ("a.test:443", "https", "a.test", 443, "/"),
        ("a.test:80", "http", "a.test", 80, "/"),
        ("a.test:22", "tcp", "a.test", 22, "/"),
        ("[::1]:22", "tcp", "::1", 22, "/"),
        ("http://2852039166/", "http", "169.254.169.254", 80, "/"),
        ("https://good.test@evil.test/", "https", "evil.test", 443, "/"),
        ("https://good.test:443@evil.test/", "https", "evil.test", 443, "/"),
    ],
)
def test_a_target_is_read_as_clients_read_it(text: str, scheme: str, host: str, port: int, path: str) -> None:
    assert parse_target(text) == Target(scheme, parse_host(host), port, path, has_query="?" in text)


@pytest.mark.parametrize(
    "text",
    ["", "a.test", "a.test:", "a.test:x", "a.test/x", "ftp://a.test/", "file:///etc/passwd", "tcp://a.test", "http://[::1", "a b:80",
     "http://a.test\\@b.test/", "http://a.test/\n", "x" * 20_000],
)  # fmt: skip
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(InvalidTarget):
        parse_target(text)


@given(st.text(max_size=40) | st.text(alphabet="htps:/.@[]a1%?#", max_size=30))
def test_reading_a_target_gives_one_or_says_why_not(text: str) -> None:
    try:
        target = parse_target(text)
    except InvalidTarget:
        return
    assert isinstance(target.host, (Host, Unparsed))
    assert target.path.startswith("/") or not target.path.isspace()
    assert requests_for(target)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("https://a.test/", ["dns", "connect", "tls", "http"]),
        ("http://a.test/", ["dns", "connect", "http"]),
        ("a.test:22", ["dns", "connect"]),
        ("https://1.1.1.1/", ["connect", "tls", "http", "dial"]),
        ("1.1.1.1:22", ["connect", "dial"]),
    ],
)
def test_the_layers_come_in_the_order_of_the_traffic(text: str, layers: list[str]) -> None:
    assert [request.layer.value for request in requests_for(parse_target(text))] == layers


def test_what_a_layer_cannot_see_it_is_not_told() -> None:
    dns, connect, tls, http, dial = requests_for(parse_target("wss://a.test:8443/x?y"), "GET", [ip_address("1.1.1.1")])
    a = parse_host("a.test")
    assert (dns.port, dns.method, dns.sni) == (None, None, None)
    assert (connect.port, connect.sni, connect.path) == (8443, None, None)
    assert (tls.sni, tls.tls, tls.claims) == (a, True, ())
    assert (http.method, http.path, http.claims, http.upgrade, http.sni) == ("GET", "/x", ((a, 8443),), True, a)
    assert (dial.address, dial.method) == (ip_address("1.1.1.1"), None)
    raw = requests_for(parse_target("a.test:22"))
    assert {request.protocol for request in raw if request.layer is RequestLayer.CONNECT} == {Protocol.TCP}


def _grant(**fields: object) -> Grant:
    rules = (Rule(id="r", host=parse_host("a.test"), methods=("GET",)), Rule(id="p", host=parse_host("pin.test")))
    base: dict[str, object] = {
        "call_id": "c", "attempt_id": "c.1", "policy_name": "p", "policy_digest": "d", "mode": Mode.NAMED,
        "layers": (RuleLayer(name="allow", rules=rules),), "passthrough": (parse_host("pin.test"),),
        "hosts": (StaticHost(host=parse_host("a.test"), addresses=(ip_address("10.0.0.1"), ip_address("1.1.1.1"))),),
    }  # fmt: skip
    return Grant.model_validate(base | fields)


def test_the_first_denial_is_the_answer_and_later_layers_are_not_reached() -> None:
    steps = explain(_grant(), parse_target("https://b.test/"))
    assert verdict(steps).reason is Reason.HOST_NOT_ALLOWED
    assert [step.note for step in steps] == [None, "not reached", "not reached", "not reached"]


def test_of_the_static_addresses_of_a_name_one_that_may_be_dialled_is_enough() -> None:
    steps = explain(_grant(), parse_target("https://a.test/"))
    assert verdict(steps).allowed
    assert [step.note for step in steps if step.request.layer is RequestLayer.DIAL] == ["not dialled", None]
    only = _grant(hosts=(StaticHost(host=parse_host("a.test"), addresses=(ip_address("10.0.0.1"),)),))
    assert verdict(explain(only, parse_target("https://a.test/"))).reason is Reason.ADDRESS_NOT_PUBLIC


def test_a_layer_that_sees_nothing_of_tls_passed_through_says_so() -> None:
    steps = explain(_grant(), parse_target("https://pin.test/"), "POST")
    assert [step.decision is None for step in steps if step.request.layer is RequestLayer.HTTP] == [True]
    assert verdict(steps).allowed
    assert verdict(explain(_grant(), parse_target("http://pin.test/"), "POST")).allowed


@given(st.sampled_from(["https", "http", "wss", "tcp"]), st.sampled_from(["a.test", "x.a.test", "b.test", "1.1.1.1", "10.0.0.1"]),
       st.sampled_from([22, 80, 443]), st.sampled_from(["GET", "POST"]))  # fmt: skip
def test_an_explanation_is_what_decide_says_of_each_request(scheme: str, host: str, port: int, method: str) -> None:
    target = Target(scheme, parse_host(host), port)
    granted = _grant(hosts=())
    said = verdict(explain(granted, target, method))
    decisions = [decide(granted, request) for request in requests_for(target, method)]
    first = next((decision for decision in decisions if not decision.allowed), None)
    assert said.allowed is (first is None)
    if first is not None:
        assert said == first
