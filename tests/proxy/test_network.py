"""`decide` as tables: request → verdict, reason, rule."""

from __future__ import annotations

import json
from ipaddress import ip_address
from typing import Any

import pytest
from pydantic import ValidationError

from proxy.destinations import AddressClass, Host, Unparsed, observe_host, parse_host
from proxy.network import (
    NEVER_DIALLED,
    PROXY_STATUS,
    Decision,
    Grant,
    Mode,
    PrivateAddress,
    Protocol,
    Reason,
    Request,
    RequestLayer,
    Rule,
    RuleLayer,
    StaticHost,
    decide,
    inspects,
)

DNS, CONNECT, TLS, HTTP, PACKAGE, TCP, DIAL = RequestLayer


def grant(mode: Mode = Mode.NAMED, *, allow: list[dict[str, Any]] | None = None, **fields: Any) -> Grant:
    layers = () if allow is None else (layer("allow", *allow),)
    names: dict[str, Any] = {"call_id": "c", "attempt_id": "c.1", "policy_name": "p", "policy_digest": "d"}
    deny = tuple(Rule(id=f"deny[{place}]", **rule) for place, rule in enumerate(fields.pop("deny", [])))
    return Grant(mode=mode, deny=deny, **(names | {"layers": layers} | fields))


def layer(name: str, *rules: dict[str, Any], names_only: bool = False) -> RuleLayer:
    made = tuple(Rule(id=f"{name}[{place}]", **rule) for place, rule in enumerate(rules))
    return RuleLayer(name=name, rules=made, names_only=names_only)


def ask(at: RequestLayer, host: str, port: int | None = 443, **fields: Any) -> Request:
    """A request of a well-behaved client, and what `fields` change of it."""
    seen = observe_host(host)
    named = isinstance(seen, Host) and seen.address is None
    if at in (TLS, HTTP):
        fields = {"tls": port == 443, "sni": seen if named and port == 443 else None} | fields
    if at is HTTP:
        fields = {"claims": ((seen, None),), "method": "GET", "path": "/"} | fields
    if at is TCP:
        fields = {"protocol": Protocol.TCP} | fields
    for key in ("sni", "address"):
        if isinstance(fields.get(key), str):
            fields[key] = observe_host(fields[key]) if key == "sni" else ip_address(fields[key])
    return Request(at, seen, port, **fields)


def answer(decision: Decision) -> tuple[str, str, str | None]:
    return decision.verdict.value, decision.reason.value, decision.rule


def claims(*texts: str, port: int | None = None) -> tuple[tuple[Host | Unparsed, int | None], ...]:
    return tuple((observe_host(text), port) for text in texts)


A = grant(allow=[{"host": "a.test"}])
READER = grant(allow=[{"host": "a.test", "methods": ["GET", "HEAD"], "paths": ["/public/**"]}])
RAW = grant(allow=[{"host": "db.test", "ports": [5432], "protocol": "tcp"}, {"host": "a.test"}])
OPEN = grant(Mode.UNRESTRICTED, deny=[{"host": "b.test"}, {"cidr": "9.9.9.0/24"}, {"host": "c.test", "ports": [8975]}])

ALLOWED = [
    (A, ask(DNS, "a.test", None), "allow[0]"),
    (A, ask(DNS, "x.a.test", None), "allow[0]"),
    (A, ask(CONNECT, "A.TEST.", 443), "allow[0]"),
    (A, ask(TLS, "a.test"), "allow[0]"),
    (A, ask(HTTP, "a.test", 80), "allow[0]"),
    (A, ask(HTTP, "a.test", claims=claims("a.test", port=443)), "allow[0]"),
    (A, ask(HTTP, "a.test", method="POST", has_body=True), "allow[0]"),
    (A, ask(DIAL, "a.test", address="93.184.216.34"), "allow[0]"),
    (READER, ask(HTTP, "a.test", path="/public/x"), "allow[0]"),
    (READER, ask(HTTP, "a.test", method="HEAD", path="/public/%78"), "allow[0]"),
    (READER, ask(CONNECT, "a.test"), "allow[0]"),
    (RAW, ask(TCP, "db.test", 5432), "allow[0]"),
    (RAW, ask(DNS, "db.test", None), "allow[0]"),
    (RAW, ask(TLS, "db.test", 5432, tls=True, sni="db.test", protocol=Protocol.TCP), "allow[0]"),
    (OPEN, ask(HTTP, "any.test"), "mode:unrestricted"),
    (OPEN, ask(HTTP, "any.test", 8080), "mode:unrestricted"),
    (OPEN, ask(HTTP, "1.1.1.1"), "mode:unrestricted"),
    (OPEN, ask(TCP, "any.test", 5432), "mode:unrestricted"),
    (OPEN, ask(CONNECT, "c.test", 443), "mode:unrestricted"),
    (OPEN, ask(DNS, "c.test", None), "mode:unrestricted"),
    (OPEN, ask(TLS, "1.1.1.1", tls=True, sni="named.test"), "mode:unrestricted"),
]


@pytest.mark.parametrize(("granted", "request_", "rule"), ALLOWED)
def test_what_a_rule_allows_is_allowed_in_its_name(granted: Grant, request_: Request, rule: str) -> None:
    assert answer(decide(granted, request_)) == ("allow", "allowed", rule)


DENIED = [
    # Nothing is open by omission.
    (grant(Mode.BLOCK_ALL), ask(DNS, "a.test", None), "network_off", "mode:block-all"),
    (grant(Mode.BLOCK_ALL, allow=[{"host": "a.test"}]), ask(CONNECT, "a.test"), "network_off", "mode:block-all"),
    (grant(), ask(CONNECT, "a.test"), "host_not_allowed", None),
    (grant(allow=[]), ask(CONNECT, "a.test"), "host_not_allowed", "allow"),
    (grant(Mode.REGISTRY_DEFAULT), ask(CONNECT, "a.test"), "host_not_allowed", None),
    # Hosts
    (A, ask(DNS, "b.test", None), "host_not_allowed", "allow"),
    (A, ask(CONNECT, "test"), "host_not_allowed", "allow"),
    (A, ask(CONNECT, "nota.test"), "host_not_allowed", "allow"),
    (A, ask(CONNECT, "a.test.evil.test"), "host_not_allowed", "allow"),
    (A, ask(CONNECT, "1.1.1.1"), "host_not_allowed", "allow"),
    (A, ask(CONNECT, "a.test@evil.test"), "malformed_request", None),
    (A, ask(CONNECT, ""), "malformed_request", None),
    (grant(allow=[{"host": "a.test", "subdomains": False}]), ask(CONNECT, "x.a.test"), "host_not_allowed", "allow"),
    # Ports
    (A, ask(CONNECT, "a.test", 22), "port_not_allowed", "allow[0]"),
    (A, ask(CONNECT, "a.test", 8080), "port_not_allowed", "allow[0]"),
    (A, ask(CONNECT, "a.test", None), "malformed_request", None),
    (A, ask(HTTP, "a.test", None), "malformed_request", None),
    (A, ask(CONNECT, "a.test", 0), "malformed_request", None),
    (A, ask(CONNECT, "a.test", 65536), "malformed_request", None),
    # Protocols
    (A, ask(TCP, "a.test"), "protocol_not_allowed", "allow[0]"),
    (A, ask(CONNECT, "a.test", protocol=Protocol.TCP), "protocol_not_allowed", "allow[0]"),
    (RAW, ask(HTTP, "db.test", 5432), "protocol_not_allowed", "allow[0]"),
    (RAW, ask(TCP, "db.test", 5433), "port_not_allowed", "allow[0]"),
    (OPEN, ask(TCP, "any.test", 443), "protocol_not_allowed", "mode:unrestricted"),
    # Methods, paths, bodies
    (READER, ask(HTTP, "a.test", method="POST", path="/public/x"), "method_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", method="get", path="/public/x"), "method_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", method=None, path="/public/x"), "method_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", path="/public/x", has_body=True), "body_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", path="/public/x", upgrade=True), "method_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", path="/public/x", overrides=True), "method_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", path="/private"), "path_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", path="/public/../private"), "path_not_allowed", "allow[0]"),
    (READER, ask(HTTP, "a.test", path=None), "path_not_allowed", "allow[0]"),
    # Destination, server name and claims are one name.
    (A, ask(TLS, "a.test", sni=None), "sni_missing", None),
    (A, ask(TLS, "a.test", tls=False, sni=None), "sni_missing", None),
    (A, ask(TLS, "a.test", sni="b.test"), "sni_mismatch", None),
    (A, ask(TLS, "a.test", sni="x.a.test"), "sni_mismatch", None),
    (A, ask(TLS, "a.test", sni="a b"), "sni_mismatch", None),
    (A, ask(HTTP, "a.test", sni="b.test"), "sni_mismatch", None),
    (A, ask(HTTP, "a.test", claims=claims("b.test")), "host_mismatch", None),
    (A, ask(HTTP, "a.test", 80, claims=claims("b.test")), "host_mismatch", None),
    (A, ask(HTTP, "a.test", 80, claims=claims("a.test", "b.test")), "host_mismatch", None),
    (A, ask(HTTP, "a.test", 80, claims=claims("a.test:x@b.test")), "malformed_request", None),
    (A, ask(HTTP, "a.test", 80, claims=claims("a.test", port=443)), "host_mismatch", None),
    (OPEN, ask(HTTP, "1.1.1.1", tls=True, sni="x.test", claims=claims("y.test")), "host_mismatch", None),
    (OPEN, ask(HTTP, "1.1.1.1", tls=True, sni=None, claims=claims("y.test")), "host_mismatch", None),
    (OPEN, ask(HTTP, "1.1.1.1", 80, claims=claims("x.test", "y.test")), "host_mismatch", None),
    # A deny wins over every allow, in every mode, for every name that the request carries.
    (grant(allow=[{"host": "a.test"}], deny=[{"host": "a.test"}]), ask(DNS, "a.test", None), "host_denied", "deny[0]"),
    (grant(allow=[{"host": "a.test"}], deny=[{"host": "x.a.test"}]), ask(CONNECT, "X.a.test."), "host_denied", "deny[0]"),
    (OPEN, ask(DNS, "b.test", None), "host_denied", "deny[0]"),
    (OPEN, ask(CONNECT, "B.TEST."), "host_denied", "deny[0]"),
    (OPEN, ask(CONNECT, "[b.test]"), "malformed_request", None),
    (OPEN, ask(TCP, "b.test", 5432), "host_denied", "deny[0]"),
    (OPEN, ask(TLS, "1.1.1.1", tls=True, sni="b.test"), "host_denied", "deny[0]"),
    (OPEN, ask(HTTP, "1.1.1.1", 80, claims=claims("b.test")), "host_denied", "deny[0]"),
    (OPEN, ask(CONNECT, "9.9.9.9"), "host_denied", "deny[1]"),
    (OPEN, ask(CONNECT, "0x09090909"), "host_denied", "deny[1]"),
    (OPEN, ask(CONNECT, "[::ffff:9.9.9.9]"), "host_denied", "deny[1]"),
    (OPEN, ask(CONNECT, "[64:ff9b::909:909]"), "host_denied", "deny[1]"),
    (OPEN, ask(DIAL, "any.test", address="9.9.9.9"), "host_denied", "deny[1]"),
    (OPEN, ask(DIAL, "any.test", address="2002:909:909::1"), "host_denied", "deny[1]"),
    (OPEN, ask(CONNECT, "c.test", 8975), "host_denied", "deny[2]"),
]  # fmt: skip


@pytest.mark.parametrize(("granted", "request_", "reason", "rule"), DENIED)
def test_what_no_rule_allows_is_denied_with_the_reason(
    granted: Grant, request_: Request, reason: str, rule: str | None
) -> None:
    assert answer(decide(granted, request_)) == ("deny", reason, rule)


NARROW_DENY = grant(
    allow=[{"host": "a.test"}],
    deny=[{"host": "a.test", "methods": ["POST"]}, {"host": "a.test", "paths": ["/admin/**"]}],
)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "allowed"),
        ({"path": "/user"}, "allowed"),
        ({"method": "POST"}, "host_denied"),
        ({"method": "post"}, "host_denied"),
        ({"method": None}, "host_denied"),
        ({"path": "/admin/x"}, "host_denied"),
        ({"path": "/Admin/x"}, "host_denied"),
        ({"path": "/admin;a/x"}, "host_denied"),
        ({"path": "/x/../y"}, "host_denied"),
        ({"overrides": True}, "host_denied"),
        ({"path": None}, "host_denied"),
    ],
)
def test_a_deny_of_methods_or_paths_holds_for_whatever_could_be_one_of_them(
    fields: dict[str, Any], reason: str
) -> None:
    assert decide(NARROW_DENY, ask(HTTP, "a.test", **fields)).reason == reason


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({}, "allowed"),
        ({"methods": ["GET", "POST"]}, "method_not_allowed"),
        ({"paths": ["/**"]}, "path_not_allowed"),
        ({"methods": ["GET"], "paths": ["/**"]}, "method_not_allowed"),
    ],
)
def test_under_a_rule_with_methods_or_paths_no_header_may_name_others(rule: dict[str, Any], reason: str) -> None:
    granted = grant(allow=[{"host": "a.test"} | rule])
    assert decide(granted, ask(HTTP, "a.test")).reason == "allowed"
    assert decide(granted, ask(HTTP, "a.test", overrides=True)).reason == reason


def test_a_deny_of_methods_or_paths_waits_for_the_layer_that_sees_them() -> None:
    for at in (DNS, CONNECT, TLS):
        assert decide(NARROW_DENY, ask(at, "a.test")).allowed
    assert decide(NARROW_DENY, ask(DIAL, "a.test", address="93.184.216.34")).allowed


def test_raw_tcp_shows_neither_method_nor_path_so_there_the_deny_holds_for_everything() -> None:
    rules = [{"host": "a.test", "ports": [5432], "protocol": "tcp"}]
    raw = grant(allow=rules, deny=[{"host": "a.test", "paths": ["/admin/**"]}])
    assert decide(raw, ask(TCP, "a.test", 5432)).reason is Reason.HOST_DENIED
    assert decide(grant(allow=rules), ask(TCP, "a.test", 5432)).allowed


# Layers


OPERATOR = layer(
    "operator", {"host": "a.test", "ports": [8080]}, {"host": "db.test", "ports": [5432], "protocol": "tcp"}
)
CALL = layer("call", {"host": "x.a.test"}, {"host": "db.test"}, {"host": "z.test"}, names_only=True)
BOTH = grant(layers=(OPERATOR, CALL))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ask(CONNECT, "x.a.test", 8080), ("allow", "allowed", "operator[0]")),
        (ask(TCP, "db.test", 5432), ("allow", "allowed", "operator[1]")),
        (ask(CONNECT, "x.a.test", 443), ("deny", "port_not_allowed", "operator[0]")),
        (ask(CONNECT, "a.test", 8080), ("deny", "host_not_allowed", "call")),
        (ask(CONNECT, "z.test", 443), ("deny", "host_not_allowed", "operator")),
        (ask(TCP, "x.a.test", 8080), ("deny", "protocol_not_allowed", "operator[0]")),
    ],
)
def test_every_layer_must_allow_and_names_alone_leave_the_rest_to_the_operator(
    request_: Request, expected: tuple[str, str, str | None]
) -> None:
    assert answer(decide(BOTH, request_)) == expected


def test_a_lone_list_of_names_opens_the_policy_s_ports_for_http_alone() -> None:
    alone = grant(layers=(CALL,))
    assert decide(alone, ask(CONNECT, "z.test", 443)).rule == "call[2]"
    assert decide(alone, ask(CONNECT, "z.test", 22)).reason is Reason.PORT_NOT_ALLOWED
    assert decide(alone, ask(TCP, "z.test", 443)).reason is Reason.PROTOCOL_NOT_ALLOWED


# Addresses


def entry(**fields: Any) -> PrivateAddress:
    return PrivateAddress(id="private", **fields)


BOX = grant(
    allow=[{"host": "box.test", "ports": [443, 8443]}, {"cidr": "10.0.0.0/8"}],
    private_addresses=(
        entry(host="box.test", cidr="10.1.0.0/16", ports=[8443]),
        entry(host="10.9.9.9", cidr="10.9.9.9/32"),
    ),
)
EVERYWHERE = grant(
    Mode.UNRESTRICTED,
    private_addresses=tuple(entry(host="a.test", cidr=cidr) for cidr in ("0.0.0.0/0", "::/0")),
)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ask(DIAL, "box.test", 8443, address="10.1.2.3"), ("allow", "allowed", "private")),
        (ask(DIAL, "x.box.test", 8443, address="10.1.2.3"), ("allow", "allowed", "private")),
        (ask(DIAL, "box.test", 8443, address="93.184.216.34"), ("allow", "allowed", "allow[0]")),
        (ask(DIAL, "box.test", 443, address="10.1.2.3"), ("deny", "address_not_public", "private")),
        (ask(DIAL, "box.test", 8443, address="10.2.0.1"), ("deny", "address_not_public", None)),
        (ask(DIAL, "box.test", 8443, address="::ffff:10.1.2.3"), ("deny", "address_not_public", None)),
        (ask(CONNECT, "10.9.9.9"), ("allow", "allowed", "private")),
        (ask(CONNECT, "10.9.9.8"), ("deny", "address_not_public", None)),
        (ask(DIAL, "box.test", 8443), ("deny", "internal_error", None)),
        (ask(DIAL, "10.9.9.9", address="10.9.9.8"), ("deny", "internal_error", None)),
    ],
)
def test_an_address_that_is_not_public_needs_an_entry_for_that_host_network_and_port(
    request_: Request, expected: tuple[str, str, str | None]
) -> None:
    assert answer(decide(BOX, request_)) == expected


def test_an_entry_for_another_port_is_named_in_the_denial() -> None:
    """An operator who wrote one looks for why it does not hold."""
    detail = decide(BOX, ask(DIAL, "box.test", 443, address="10.1.2.3")).detail
    assert detail.endswith("which is a private address, and `private` permits it at port 8443, not at 443")


@pytest.mark.parametrize(
    "text", ["169.254.169.254", "169.254.0.1", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "100.100.100.200", "fd00:ec2::254"]
)  # fmt: skip
def test_no_entry_opens_what_is_never_dialled(text: str) -> None:
    assert decide(EVERYWHERE, ask(DIAL, "a.test", address="10.0.0.1")).allowed
    assert decide(EVERYWHERE, ask(DIAL, "a.test", address=text)).reason is Reason.ADDRESS_NOT_PUBLIC


def test_an_effect_may_call_an_address_worse_than_it_looks_but_not_better() -> None:
    for told, seen in ((AddressClass.OWN, "93.184.216.34"), (AddressClass.PUBLIC, "10.0.0.1"), (None, "10.0.0.1")):
        request = ask(DIAL, "a.test", address=seen, address_class=told)
        assert decide(A, request).reason is Reason.ADDRESS_NOT_PUBLIC


def test_an_entry_for_registries_holds_in_their_mode_alone() -> None:
    private = (entry(registries=True, cidr="203.0.113.0/24", ports=[443]),)
    request = ask(DIAL, "a.test", address="203.0.113.7")
    registry = grant(Mode.REGISTRY_DEFAULT, allow=[{"host": "a.test"}], private_addresses=private)
    assert answer(decide(registry, request)) == ("allow", "allowed", "private")
    assert (
        decide(grant(allow=[{"host": "a.test"}], private_addresses=private), request).reason
        is Reason.ADDRESS_NOT_PUBLIC
    )


# Inspection


@pytest.mark.parametrize(
    ("fields", "opened"),
    [
        ({}, False),
        ({"allow": [{"host": "pin.test"}, {"host": "b.test", "methods": ["GET"]}]}, False),
        ({"allow": [{"host": "pin.test", "methods": ["GET"]}]}, True),
        ({"allow": [{"host": "test", "paths": ["/a"]}]}, True),
        ({"deny": [{"host": "pin.test", "paths": ["/a"]}]}, True),
        ({"passthrough": ()}, True),
        ({"passthrough": (parse_host("x.pin.test"),)}, True),
    ],
)
def test_tls_is_opened_unless_the_host_is_passed_through_and_no_rule_judges_requests(
    fields: dict[str, Any], opened: bool
) -> None:
    granted = grant(**({"allow": [{"host": "pin.test"}], "passthrough": (parse_host("pin.test"),)} | fields))
    assert inspects(granted, parse_host("pin.test"), 443) is opened


# Values


def test_every_denial_has_a_proxy_status_and_every_answer_a_sentence() -> None:
    assert set(PROXY_STATUS) == set(Reason) - {Reason.ALLOWED}
    pairs = [(granted, request) for granted, request, _rule in ALLOWED] + [row[:2] for row in DENIED]
    for granted, request in pairs:
        detail = decide(granted, request).detail
        assert detail
        assert detail.isprintable()


def test_a_denial_quotes_nothing_that_could_break_a_line() -> None:
    decision = decide(READER, ask(HTTP, "a.test", method="G\r\nX: y" * 50, path="/public/x"))
    assert decision.detail.isprintable()
    assert len(decision.detail) < 200


def test_a_grant_survives_the_way_to_the_proxy() -> None:
    full = grant(
        allow=[{"host": "bücher.example", "methods": ["GET"], "paths": ["/a/**"]}, {"cidr": "::/0"}],
        deny=[{"host": "b.test", "ports": [1]}],
        hosts=(StaticHost(host=parse_host("a.test"), addresses=(ip_address("::1"), ip_address("127.0.0.1"))),),
        private_addresses=(entry(registries=True, cidr="10.0.0.0/8"), entry(host="b.test", cidr="fd00::/8", ports=[1])),
        passthrough=(parse_host("p.test"),),
    )
    assert Grant.model_validate_json(full.model_dump_json()) == full
    assert Grant.model_validate(json.loads(full.model_dump_json())) == full


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"host": "a.test", "cidr": "10.0.0.0/8"},
        {"host": "a b"},
        {"host": "a.test", "ports": [0]},
        {"host": "a.test", "methods": ["get"]},
        {"host": "a.test", "port": 1},
        {"cidr": "10.0.0.1/8"},
    ],
)
def test_a_rule_that_is_none_cannot_be_made(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Rule(id="x", **rule)


def test_the_classes_never_dialled_leave_out_what_an_operator_may_open() -> None:
    assert NEVER_DIALLED.isdisjoint(
        {AddressClass.PRIVATE, AddressClass.LOOPBACK, AddressClass.SHARED, AddressClass.OWN}
    )
