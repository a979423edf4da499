"""Network policy as values, and `decide`, the one function that judges an egress request. Pure.

Every hook that can precede traffic builds a `Request` from what it sees and calls `decide(grant, request)`.
`decide` is total: it takes values, returns a value, reads no clock, logs nothing and never raises on odd input.

A grant is the policy narrowed to one attempt. In it an allow is a stack of *layers* (operator, tenant, call …); a
request needs a matching rule in every layer, and no match in `deny`. A grant without layers allows nothing, except in
the mode `unrestricted`, which is allowed by name only and has its own rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from proxy.destinations import (
    AddressClass,
    Host,
    InvalidHost,
    IPAddress,
    IPNetwork,
    Unparsed,
    classify_address,
    embedded_ipv4,
    parse_host,
)
from proxy.packages.reasons import PackageReason
from proxy.packages.requests import RegistryGrant
from proxy.paths import path_allowed, path_denied
from proxy.reasons import PROXY_STATUS as PROXY_STATUS  # noqa: PLC0414 - this is where others look for it
from proxy.reasons import Reason as Reason  # noqa: PLC0414 - the same

SAFE_METHODS = frozenset({"GET", "HEAD"})
DEFAULT_PORTS = (80, 443)

# Classes that no `private_addresses` entry opens, whatever network it names: credentials of the machine itself, and
# addresses at which no service can stand.
NEVER_DIALLED = frozenset(
    {AddressClass.METADATA, AddressClass.LINK_LOCAL, AddressClass.MULTICAST, AddressClass.UNSPECIFIED}
)


def _to_host(value: object) -> object:
    if isinstance(value, str):
        try:
            return parse_host(value)
        except InvalidHost as error:
            raise ValueError(f"`{value[:80]}` is not a host: {error}") from error
    return value


HostField = Annotated[Host, BeforeValidator(_to_host), PlainSerializer(lambda host: host.text, return_type=str)]
Port = Annotated[int, Field(ge=1, le=65535)]
Method = Annotated[str, Field(pattern=r"^[A-Z0-9!#$%&'*+.^_`|~-]+$")]  # an RFC 9110 token without lower case


class Mode(StrEnum):
    """What a call's network setting asks for; the names are those of the policy file."""

    BLOCK_ALL = "block-all"
    REGISTRY_DEFAULT = "registry-default"
    NAMED = "named"
    UNRESTRICTED = "unrestricted"


class Verdict(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


class RequestLayer(StrEnum):
    """Where a request is judged, in the order in which traffic meets the layers."""

    DNS = "dns"
    CONNECT = "connect"  # CONNECT, SOCKS5, or a captured TCP connection: host and port are known
    TLS = "tls"
    HTTP = "http"
    PACKAGE = "package"  # what a request to a registry asks for; judged by `proxy.packages`, after HTTP
    TCP = "tcp"
    DIAL = "dial"


_SEEING_REQUESTS = (RequestLayer.HTTP, RequestLayer.PACKAGE)  # method, path and what else a request has


class Protocol(StrEnum):
    HTTP = "http"
    TCP = "tcp"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Rule(_Frozen):
    """Hosts that something is said about. Whether it allows or denies follows from where it stands.

    `id` is the place it was read from, such as `network.allow[0]` or `call.domains[1]`; it is what the log names.
    `None` for `ports` means the policy's `ports` in an allow and every port in a deny; for `methods` or `paths`, any.
    `protocol: tcp` allows raw TCP instead of HTTP; in a deny it is ignored: a denied host is denied in every protocol.
    """

    id: str
    host: HostField | None = None
    cidr: IPNetwork | None = None
    subdomains: bool = True
    ports: tuple[Port, ...] | None = None
    methods: tuple[Method, ...] | None = None
    paths: tuple[str, ...] | None = None
    protocol: Protocol = Protocol.HTTP

    @model_validator(mode="after")
    def _one_target(self) -> Rule:
        if (self.host is None) == (self.cidr is None):
            raise ValueError("a rule has either a `host` or a `cidr`")
        return self

    def covers(self, host: Host) -> bool:
        """Whether the rule speaks of this host, whatever the port."""
        if self.cidr is not None:
            return host.address is not None and host.address.version == self.cidr.version and host.address in self.cidr
        assert self.host is not None
        return self.host.covers(host) if self.subdomains else self.host == host


class RuleLayer(_Frozen):
    """One authority's allow list: the operator's, a tenant's, the call's own, or the registries'.

    A layer of `names_only` restricts hosts and leaves ports, protocols, methods and paths to the layers beside it, as a
    call's domain list does under an operator's allow list. Beside no layer of the full kind it counts as one itself, so
    that a lone list of names never opens every port.
    """

    name: str
    rules: tuple[Rule, ...]
    names_only: bool = False


class PrivateAddress(_Frozen):
    """Permission to dial addresses of one network that are not public. The only way to one.

    For the names at and below `host`, or, with `registries`, for the hosts of the registry layer.
    """

    id: str
    host: HostField | None = None
    registries: bool = False
    cidr: IPNetwork
    ports: tuple[Port, ...] | None = None

    @model_validator(mode="after")
    def _one_subject(self) -> PrivateAddress:
        if (self.host is None) != self.registries:
            raise ValueError("an entry has either a `host` or `registries: true`")
        return self


class StaticHost(_Frozen):
    """An answer that stands before DNS."""

    host: HostField
    addresses: tuple[IPAddress, ...]


class Grant(_Frozen):
    """The policy narrowed to one attempt: all that the proxy knows about it."""

    call_id: str
    attempt_id: str
    tenant: str = ""  # whose the call is; empty where the policy names no tenants
    policy_name: str
    policy_digest: str
    mode: Mode
    layers: tuple[RuleLayer, ...] = ()
    deny: tuple[Rule, ...] = ()
    ports: tuple[Port, ...] = DEFAULT_PORTS
    hosts: tuple[StaticHost, ...] = ()
    private_addresses: tuple[PrivateAddress, ...] = ()
    passthrough: tuple[HostField, ...] = ()
    max_connections: Annotated[int, Field(ge=1)] = 256
    packages: RegistryGrant | None = None  # of registries' hosts nothing passes that it doesn't allow, in any mode


@dataclass(frozen=True, slots=True)
class Request:
    """What one layer saw of one request. Fields that a layer cannot see are None.

    `host` is the destination: the name or address asked for, never what the payload claims. `claims` are the names
    that the payload carries (Host, `:authority`, absolute request target), each with the port it states, if any.
    `path` is the raw path, without the query. `overrides`: a header asks the server to take the request for one of
    another method or path. `address` is set at the dial: one resolved address. `package`, as a package URL, and
    `version` are what a request to a registry is about.
    """

    layer: RequestLayer
    host: Host | Unparsed
    port: int | None = None
    protocol: Protocol = Protocol.HTTP
    tls: bool = False
    sni: Host | Unparsed | None = None
    claims: tuple[tuple[Host | Unparsed, int | None], ...] = ()
    method: str | None = None
    path: str | None = None
    has_body: bool = False
    upgrade: bool = False
    overrides: bool = False
    address: IPAddress | None = None
    address_class: AddressClass | None = None  # as an effect sees it (`own`); None: classify here
    package: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with its reason, the rule that decided (None: no rule matched), and a sentence for people.

    `hint` says what to do, where more is known than the reason tells.
    """

    verdict: Verdict
    reason: Reason | PackageReason
    rule: str | None
    detail: str
    hint: str | None = None

    @property
    def allowed(self) -> bool:
        return self.verdict is Verdict.ALLOW


def deny(reason: Reason | PackageReason, detail: str, rule: str | None = None, hint: str | None = None) -> Decision:
    return Decision(Verdict.DENY, reason, rule, detail, hint)


def allow(detail: str, rule: str | None = None) -> Decision:
    return Decision(Verdict.ALLOW, Reason.ALLOWED, rule, detail)


def decide(grant: Grant, request: Request) -> Decision:
    """Judge one request against one grant.

    Order: the mode `block-all`; what cannot be read; deny rules and allow layers (for `unrestricted`, its own rule);
    agreement of SNI and claims with the destination; at the dial, the address. The first denial is the answer. Of deny
    rules and layers, what can be judged by the name comes before what needs the port, and that before what needs the
    request: so every hook gives the reason and the rule that an earlier one gave, or would have given.
    """
    if grant.mode is Mode.BLOCK_ALL:
        return deny(Reason.NETWORK_OFF, "this attempt has no network", "mode:block-all")
    host = request.host
    if isinstance(host, Unparsed):
        return deny(Reason.MALFORMED_REQUEST, f"the destination is not a host: {host.why}")
    if request.port is None and request.layer is not RequestLayer.DNS:
        return deny(Reason.MALFORMED_REQUEST, "the destination has no port")
    if request.port is not None and not 1 <= request.port <= 65535:
        return deny(Reason.MALFORMED_REQUEST, "the port is not a number from 1 to 65535")
    denials = [
        _host_denied(rule, name) for name in _names(host, request) for rule in _denials(grant.deny, name, request)
    ]
    if grant.mode is Mode.UNRESTRICTED:
        decision = _decide_unrestricted(grant, request)
    else:
        decision = _decide_layers(grant, host, request)
    if not decision.allowed:
        denials.append((_STAGES[decision.reason], decision))
    if request.protocol is Protocol.TCP and (registry := registry_host(grant, request)) is not None:
        detail = f"`{registry}` is a package registry, and is read over HTTP only"
        denials.append((_PORT, deny(Reason.PROTOCOL_NOT_ALLOWED, detail, "packages")))
    if denials:
        return min(denials, key=lambda denial: denial[0])[1]
    if (mismatch := _disagreement(grant, host, request)) is not None:
        return mismatch
    if request.layer is RequestLayer.DIAL or host.address is not None:
        address = request.address if request.address is not None else host.address
        if address is None:
            return deny(Reason.INTERNAL_ERROR, "nothing to dial: no address was given")
        if host.address is not None and address != host.address:
            return deny(Reason.INTERNAL_ERROR, f"the address to dial, {address}, is not the destination `{host}`")
        return _vet(grant, host, request, address, decision)
    return decision


def registry_host(grant: Grant, request: Request) -> Host | None:
    """The registry that a request is to, by its destination or by any name that it carries; None when it is to none."""
    if grant.packages is None or isinstance(request.host, Unparsed):
        return None
    return next((name for name in _names(request.host, request) if grant.packages.covers(name)), None)


def inspects(grant: Grant, host: Host, port: int) -> bool:
    """Whether TLS to this destination is opened. False only for passthrough hosts of which no rule judges requests."""
    if grant.packages is not None and grant.packages.covers(host):
        return True
    if not any(entry.covers(host) for entry in grant.passthrough):
        return True
    rules = [rule for layer in grant.layers for rule in layer.rules if _matches_port(grant, rule, host, port)]
    rules += [rule for rule in grant.deny if rule.covers(host)]
    return any(rule.methods is not None or rule.paths is not None for rule in rules)


def _names(host: Host, request: Request) -> Iterable[Host]:
    """The destination and every other host the request names: a deny rule is held against all of them."""
    yield host
    if isinstance(request.sni, Host) and request.sni != host:
        yield request.sni
    for claim, _port in request.claims:
        if isinstance(claim, Host) and claim != host:
            yield claim
    for address in (host.address, request.address):
        if address is None:
            continue
        yield Host(str(address), address)
        if isinstance(address, IPv6Address) and (inner := embedded_ipv4(address)) is not None:
            yield Host(str(inner), inner)


def _host_denied(rule: Rule, name: Host) -> tuple[int, Decision]:
    """The denial by a rule, before which stands what can be judged earlier."""
    stage = _REQUEST if _judges_requests(rule) else _NAME if rule.ports is None else _PORT
    return stage, deny(Reason.HOST_DENIED, f"`{name}` is denied by the policy", rule.id)


def _denials(rules: tuple[Rule, ...], host: Host, request: Request) -> Iterable[Rule]:
    """The deny rules that hold. A rule narrower than what the layer can see waits for a layer that sees it.

    At the raw TCP layer there is none after it, so there a rule narrowed by method or path holds for everything.
    """
    for rule in rules:
        if not rule.covers(host):
            continue
        if rule.ports is not None and (request.port is None or request.port not in rule.ports):
            continue
        if _judges_requests(rule) and request.protocol is not Protocol.TCP:
            if request.layer not in _SEEING_REQUESTS:
                continue
            if not request.overrides and not _could_be(rule, request):
                continue
        yield rule


def _judges_requests(rule: Rule) -> bool:
    return rule.methods is not None or rule.paths is not None


def _could_be(rule: Rule, request: Request) -> bool:
    """Whether some server could take the request for one that the deny rule names by method and path."""
    # Some servers read `post` as POST, and a method that is not known could be any.
    if rule.methods is not None and request.method is not None and request.method.upper() not in rule.methods:
        return False
    return rule.paths is None or path_denied(rule.paths, request.path)


def _decide_unrestricted(grant: Grant, request: Request) -> Decision:
    rule = "mode:unrestricted"
    if request.protocol is Protocol.TCP and request.port in grant.ports:
        return deny(
            Reason.PROTOCOL_NOT_ALLOWED,
            f"port {request.port} carries HTTP or TLS with HTTP inside, and this is neither",
            rule,
        )
    return Decision(Verdict.ALLOW, Reason.ALLOWED, rule, "any public destination is allowed")


def _decide_layers(grant: Grant, host: Host, request: Request) -> Decision:
    """Every layer must allow. The rule named for an allow is that of the first layer that judged all of the request."""
    if not grant.layers:
        return deny(Reason.HOST_NOT_ALLOWED, "the grant allows nothing")
    all_names_only = all(layer.names_only for layer in grant.layers)
    answer: Decision | None = None
    denials: list[Decision] = []
    for layer in grant.layers:
        names_only = layer.names_only and not all_names_only
        decision = _decide_layer(grant, layer, host, request, names_only=names_only)
        if not decision.allowed:
            denials.append(decision)
        elif answer is None and not names_only:
            answer = decision
    if denials:
        return min(denials, key=lambda denial: _ORDER.index(denial.reason))
    return answer if answer is not None else deny(Reason.HOST_NOT_ALLOWED, "the grant allows nothing")


_NAME, _PORT, _REQUEST = range(3)  # what a denial needs to be seen
_STAGES: dict[Reason | PackageReason, int] = {
    Reason.HOST_NOT_ALLOWED: _NAME,
    Reason.PORT_NOT_ALLOWED: _PORT,
    Reason.PROTOCOL_NOT_ALLOWED: _PORT,
    Reason.METHOD_NOT_ALLOWED: _REQUEST,
    Reason.BODY_NOT_ALLOWED: _REQUEST,
    Reason.PATH_NOT_ALLOWED: _REQUEST,
}
_ORDER = tuple(_STAGES)  # the order in which a rule is held against a request


def _decide_layer(grant: Grant, layer: RuleLayer, host: Host, request: Request, *, names_only: bool) -> Decision:
    """The first rule that allows, or the denial of the rule that came furthest."""
    best = deny(Reason.HOST_NOT_ALLOWED, f"`{host}` is not on the allow list `{layer.name}`", layer.name)
    for rule in layer.rules:
        if names_only and rule.covers(host):
            return Decision(Verdict.ALLOW, Reason.ALLOWED, rule.id, f"`{host}` is allowed")
        refusal = _refusal(grant, rule, host, request)
        if refusal is None:
            return Decision(Verdict.ALLOW, Reason.ALLOWED, rule.id, f"`{host}` is allowed")
        if _ORDER.index(refusal.reason) > _ORDER.index(best.reason):
            best = refusal
    return best


def _refusal(grant: Grant, rule: Rule, host: Host, request: Request) -> Decision | None:
    """Why this one allow rule does not allow the request; None when it does."""
    if not rule.covers(host):
        return deny(Reason.HOST_NOT_ALLOWED, f"`{host}` is not covered", rule.id)
    ports = rule.ports if rule.ports is not None else grant.ports
    if request.port is not None and request.port not in ports:
        allowed = ", ".join(str(port) for port in ports)
        return deny(Reason.PORT_NOT_ALLOWED, f"port {request.port} of `{host}` is not allowed, only {allowed}", rule.id)
    if request.layer is not RequestLayer.DNS and request.protocol is not rule.protocol:
        if request.protocol is Protocol.TCP:
            return deny(Reason.PROTOCOL_NOT_ALLOWED, f"raw TCP to `{host}` is not allowed, only HTTP", rule.id)
        return deny(Reason.PROTOCOL_NOT_ALLOWED, f"`{host}` is allowed for raw TCP, not for HTTP", rule.id)
    if request.layer not in _SEEING_REQUESTS:
        return None
    if rule.methods is not None:
        allowed = ", ".join(rule.methods)
        if request.method not in rule.methods:
            detail = f"only {allowed} are allowed at `{host}`, not {_shown(request.method)}"
            return deny(Reason.METHOD_NOT_ALLOWED, detail, rule.id)
        if request.overrides:
            detail = f"a rule with methods for `{host}` allows no header that names another method or path"
            return deny(Reason.METHOD_NOT_ALLOWED, detail, rule.id)
        if SAFE_METHODS.issuperset(rule.methods):
            if request.upgrade:
                return deny(Reason.METHOD_NOT_ALLOWED, f"a read-only rule for `{host}` allows no upgrade", rule.id)
            if request.has_body:
                return deny(Reason.BODY_NOT_ALLOWED, f"a read-only rule for `{host}` allows no request body", rule.id)
    if rule.paths is not None and not path_allowed(rule.paths, request.path):
        allowed = ", ".join(rule.paths)
        return deny(Reason.PATH_NOT_ALLOWED, f"this path of `{host}` is not allowed, only {allowed}", rule.id)
    if rule.paths is not None and request.overrides:
        detail = f"a rule with paths for `{host}` allows no header that names another method or path"
        return deny(Reason.PATH_NOT_ALLOWED, detail, rule.id)
    return None


def _matches_port(grant: Grant, rule: Rule, host: Host, port: int) -> bool:
    return rule.covers(host) and port in (rule.ports if rule.ports is not None else grant.ports)


def _disagreement(grant: Grant, host: Host, request: Request) -> Decision | None:
    """Destination, SNI and claims must be the same name; a destination that is an address takes the SNI's name instead.

    A dialled address has no name of its own, so there the SNI, if any, and the claims must agree with one another.
    """
    expected = host
    over_tls = request.tls or request.layer is RequestLayer.TLS
    if over_tls:
        if isinstance(request.sni, Unparsed):
            return deny(Reason.SNI_MISMATCH, f"the TLS server name is not a host: {request.sni.why}")
        if request.sni is None and host.address is None:
            return deny(Reason.SNI_MISSING, f"TLS to `{host}` without a server name")
        if request.sni is not None and request.sni != host:
            if host.address is None:
                return deny(Reason.SNI_MISMATCH, f"the TLS server name `{request.sni}` is not the destination `{host}`")
            expected = request.sni
    for place, (claim, port) in enumerate(request.claims):
        if isinstance(claim, Unparsed):
            return deny(Reason.MALFORMED_REQUEST, f"the request's host is not a host: {claim.why}")
        if place == 0 and host.address is not None and not over_tls:
            expected = claim
        if claim not in (expected, host):
            return deny(Reason.HOST_MISMATCH, f"the request names `{claim}`, but its destination is `{expected}`")
        if port is not None and port != request.port:
            return deny(
                Reason.HOST_MISMATCH, f"the request names port {port}, but its destination is port {request.port}"
            )
    return None


def _vet(grant: Grant, host: Host, request: Request, address: IPAddress, allowed: Decision) -> Decision:
    kind = classify_address(address)
    if kind is AddressClass.PUBLIC and request.address_class is not None:
        kind = request.address_class
    if kind is AddressClass.PUBLIC:
        return allowed
    near: PrivateAddress | None = None
    for entry in grant.private_addresses if kind not in NEVER_DIALLED else ():
        if address.version != entry.cidr.version or address not in entry.cidr:
            continue
        if entry.registries:
            if grant.mode is not Mode.REGISTRY_DEFAULT:
                continue
        elif entry.host is None or not entry.host.covers(host):
            continue
        if entry.ports is not None and request.port not in entry.ports:
            near = near or entry
            continue
        return Decision(Verdict.ALLOW, Reason.ALLOWED, entry.id, f"{address} is allowed for `{host}`")
    where = f"{address} is" if host.address is not None else f"`{host}` is at {address}, which is"
    detail = f"{where} {_article(kind.value)} {kind.value} address"
    if near is not None and near.ports is not None:
        ports = ", ".join(map(str, near.ports))
        detail += f", and `{near.id}` permits it at port {ports}, not at {request.port}"
    return deny(Reason.ADDRESS_NOT_PUBLIC, detail, None if near is None else near.id)


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _shown(text: str | None) -> str:
    return "none" if text is None else "".join(c if c.isprintable() else "?" for c in text[:40])
