"""What holds of `decide` for every grant and every request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from proxy.destinations import AddressClass, Host, Unparsed, classify_address, observe_host, parse_host
from proxy.network import (
    NEVER_DIALLED,
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
    decide,
)

# Few values, so that rules and requests meet, and made once, so that drawing them is cheap.
NAMES = [parse_host(text) for text in ("a.test", "x.a.test", "y.x.a.test", "b.test", "xa.test")]
ADDRESSES = [
    ip_address(text)
    for text in (
        "93.184.216.34", "2606:4700::1111", "10.0.0.1", "127.0.0.1", "169.254.169.254", "203.0.113.7", "::1", "fd00::1"
    )
]  # fmt: skip
HOSTS = NAMES + [Host(str(address), address) for address in ADDRESSES]
ODD = [Unparsed("a b", "it is odd"), observe_host("1.2.3.4.5"), observe_host("zz.example")]
PORTS = [22, 80, 443, 8080]
_TARGETS: list[dict[str, Any]] = [
    {"host": "test"}, {"host": "a.test"}, {"host": "x.a.test"}, {"host": "b.test"}, {"host": "10.0.0.1"},
    {"cidr": "0.0.0.0/0"}, {"cidr": "10.0.0.0/8"}, {"cidr": "::/0"},
]  # fmt: skip
RULES = [
    Rule(id=f"r{place}", ports=ports, methods=methods, paths=paths, protocol=protocol, subdomains=subdomains, **target)
    for place, (target, ports, methods, paths, protocol, subdomains) in enumerate(
        product(
            _TARGETS,
            [None, (443,), (22, 80, 8080)],
            [None, ("GET", "HEAD"), ("POST",)],
            [None, ("/**",), ("/a/*", "/b")],
            Protocol,
            [True, False],
        )
    )
]
BROAD = [
    Rule(id="broad", host=parse_host("test"), ports=ports, protocol=protocol)
    for ports, protocol in product([None, tuple(PORTS)], Protocol)
]
_SUBJECTS: list[dict[str, Any]] = [{"host": "test"}, {"host": "a.test"}, {"host": "10.0.0.1"}, {"registries": True}]
PRIVATE = [
    PrivateAddress(id="private", cidr=ip_network(network), ports=ports, **subject)
    for subject, network, ports in product(
        _SUBJECTS,
        ["0.0.0.0/0", "::/0", "10.0.0.0/8", "127.0.0.0/8", "203.0.113.0/24", "169.254.0.0/16"],
        [None, (443,)],
    )
]

rules = st.sampled_from(RULES)
layers = st.builds(
    RuleLayer,
    name=st.sampled_from(["operator", "call"]),
    rules=st.lists(rules | st.sampled_from(BROAD), max_size=4).map(tuple),
    names_only=st.booleans(),
)
private_addresses = st.sampled_from(PRIVATE)
grants = st.builds(
    Grant,
    call_id=st.just("c"),
    attempt_id=st.just("c.1"),
    policy_name=st.just("p"),
    policy_digest=st.just("d"),
    mode=st.sampled_from([Mode.NAMED, Mode.UNRESTRICTED, Mode.REGISTRY_DEFAULT, Mode.BLOCK_ALL]),
    layers=st.lists(layers, max_size=3).map(tuple),
    deny=st.lists(rules, max_size=1).map(tuple),
    ports=st.sampled_from([(80, 443), (443,), (8080,)]),
    private_addresses=st.lists(private_addresses, max_size=2).map(tuple),
)
EMPTY = RuleLayer(name="operator", rules=())

# Grants under which much is allowed, for what is claimed of allowed requests.
generous = st.builds(
    lambda grant, mode, broad: grant.model_copy(
        update={
            "mode": mode,
            "deny": (),
            "layers": tuple(
                layer.model_copy(update={"rules": (*layer.rules, *broad)}) for layer in grant.layers or (EMPTY,)
            ),
        }
    ),
    grants,
    st.sampled_from([Mode.NAMED, Mode.REGISTRY_DEFAULT, Mode.UNRESTRICTED]),
    st.just(BROAD),
)

_CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "host": st.sampled_from(ODD),
    "port": st.none() | st.integers(),
    "tls": st.booleans(),
    "sni": st.none() | st.sampled_from(HOSTS + ODD),
    "claims": st.lists(st.tuples(st.sampled_from(HOSTS + ODD), st.none() | st.sampled_from(PORTS)), max_size=2).map(
        tuple
    ),
    "method": st.none() | st.text(max_size=4),
    "path": st.none() | st.text(max_size=8),
    "has_body": st.booleans(),
    "upgrade": st.booleans(),
    "overrides": st.booleans(),
    "address": st.none() | st.ip_addresses(),
    "address_class": st.sampled_from(AddressClass),
}


@st.composite
def requests(draw: st.DrawFn, /, layers_: tuple[RequestLayer, ...] = tuple(RequestLayer)) -> Request:
    """A request of a well-behaved client, with up to two of its parts made odd."""
    host = draw(st.sampled_from(HOSTS))
    layer = draw(st.sampled_from(layers_))
    port = draw(st.sampled_from(PORTS))
    tls = port in (443, 8080) and layer in (RequestLayer.TLS, RequestLayer.HTTP)
    request = Request(
        layer=layer,
        host=host,
        port=port,
        protocol=Protocol.TCP if layer is RequestLayer.TCP else draw(st.sampled_from(Protocol)),
        tls=tls,
        sni=host if tls and host.address is None else None,
        claims=((host, None),) if layer is RequestLayer.HTTP else (),
        method=draw(st.sampled_from(["GET", "HEAD", "POST"])) if layer is RequestLayer.HTTP else None,
        path=draw(st.sampled_from(["/", "/a", "/a/b", "/b", "/a/../b", "/%61"]))
        if layer is RequestLayer.HTTP
        else None,
        address=host.address or draw(st.sampled_from(ADDRESSES)) if layer is RequestLayer.DIAL else None,
    )
    changed = draw(st.sets(st.sampled_from(sorted(_CHANGES)), max_size=2))
    return replace(request, **{name: draw(_CHANGES[name]) for name in sorted(changed)})


many = settings(max_examples=400)


def with_layer(grant: Grant, place: int, rule: Rule) -> Grant:
    layer = grant.layers[place]
    wider = layer.model_copy(update={"rules": (*layer.rules, rule)})
    return grant.model_copy(update={"layers": (*grant.layers[:place], wider, *grant.layers[place + 1 :])})


@many
@given(grants, requests())
def test_decide_is_total(grant: Grant, request: Request) -> None:
    decision = decide(grant, request)
    assert isinstance(decision, Decision)
    assert decision.detail
    assert (decision.reason is Reason.ALLOWED) is decision.allowed
    assert decision == decide(grant, request)


@many
@given(grants, requests())
def test_a_policy_that_says_nothing_denies_everything(grant: Grant, request: Request) -> None:
    for layers_ in ((), (RuleLayer(name="empty", rules=()),), (RuleLayer(name="empty", rules=(), names_only=True),)):
        for mode in set(Mode) - {Mode.UNRESTRICTED}:
            assert not decide(grant.model_copy(update={"mode": mode, "layers": layers_}), request).allowed


@many
@given(grants, requests())
def test_block_all_denies_everything(grant: Grant, request: Request) -> None:
    decision = decide(grant.model_copy(update={"mode": Mode.BLOCK_ALL}), request)
    assert decision.reason is Reason.NETWORK_OFF


@many
@given(generous | grants, requests(), rules, st.data())
def test_adding_an_allow_never_turns_an_allow_into_a_deny(
    grant: Grant, request: Request, rule: Rule, data: st.DataObject
) -> None:
    assume(grant.layers)
    wider = with_layer(grant, data.draw(st.integers(0, len(grant.layers) - 1)), rule)
    assert decide(wider, request).allowed or not decide(grant, request).allowed


@many
@given(grants | generous, requests(), rules, st.integers(0, 2))
def test_adding_a_deny_never_turns_a_deny_into_an_allow(grant: Grant, request: Request, rule: Rule, place: int) -> None:
    narrower = grant.model_copy(update={"deny": (*grant.deny[:place], rule, *grant.deny[place:])})
    assert decide(grant, request).allowed or not decide(narrower, request).allowed


@many
@given(grants, requests(), layers, st.integers(0, 3))
def test_adding_a_layer_never_turns_a_deny_into_an_allow(
    grant: Grant, request: Request, layer: RuleLayer, place: int
) -> None:
    """A full layer. Beside one, a layer of names alone leaves ports to it, so adding one to a lone one may widen those."""
    assume(grant.layers and not all(present.names_only for present in grant.layers))
    more = grant.model_copy(update={"layers": (*grant.layers[:place], layer, *grant.layers[place:])})
    assert decide(grant, request).allowed or not decide(more, request).allowed


@many
@given(generous, requests(), private_addresses)
def test_adding_a_private_address_never_turns_an_allow_into_a_deny(
    grant: Grant, request: Request, entry: PrivateAddress
) -> None:
    more = grant.model_copy(update={"private_addresses": (*grant.private_addresses, entry)})
    assert not decide(grant, request).allowed or decide(more, request).allowed


@many
@given(generous, requests())
def test_a_denied_host_is_allowed_nowhere(grant: Grant, request: Request) -> None:
    """In no mode, at no layer, and not as one of several names."""
    for host in (request.host, request.sni, *(claim for claim, _port in request.claims)):
        if isinstance(host, Host):
            narrower = grant.model_copy(update={"deny": (Rule(id="no", host=host),)})
            assert not decide(narrower, request).allowed


@many
@given(generous, requests((RequestLayer.DIAL,)))
def test_what_is_allowed_at_the_dial_is_public_or_has_an_entry_for_it(grant: Grant, request: Request) -> None:
    decision = decide(grant, request)
    address = request.address or (request.host.address if isinstance(request.host, Host) else None)
    kind = None if address is None else classify_address(address)
    event(f"{decision.verdict} {kind}")
    if not decision.allowed:
        return
    assert kind not in NEVER_DIALLED | {None}
    if kind is not AddressClass.PUBLIC:
        assert decision.rule == "private"


@many
@given(generous, requests())
def test_what_cannot_be_read_is_never_allowed(grant: Grant, request: Request) -> None:
    unread = Unparsed("?", "it is odd")
    assert not decide(grant, replace(request, host=unread)).allowed
    assert not decide(grant, replace(request, claims=((unread, None),))).allowed
    assert not decide(grant, replace(request, layer=RequestLayer.TLS, sni=unread)).allowed


@many
@given(generous, requests((RequestLayer.HTTP, RequestLayer.TLS)))
def test_what_is_allowed_over_tls_has_one_name(grant: Grant, request: Request) -> None:
    decision = decide(grant, request)
    event(decision.verdict.value)
    if decision.allowed and request.tls and isinstance(request.host, Host) and request.host.address is None:
        assert request.sni == request.host
        assert {claim for claim, _port in request.claims} <= {request.host}


@many
@given(generous | grants, requests(), st.sampled_from([str.upper, str.title, "{}.".format]))
def test_the_spelling_of_a_name_changes_nothing(grant: Grant, request: Request, respell: Callable[[str], str]) -> None:
    if isinstance(request.host, Host) and request.host.address is None:
        assert decide(grant, replace(request, host=observe_host(respell(request.host.text)))) == decide(grant, request)
