"""What the layers would see of a request that has not been made yet. Pure.

Owns: turning a URL, or a host and port, into the `Request` of each layer in the order in which traffic meets them, as a
well-behaved client's request would be seen. Must not: decide: `decide` is given these, as it is given the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote, urlsplit

from proxy.destinations import Host, IPAddress, Unparsed, observe_authority
from proxy.network import (
    Decision,
    Grant,
    Mode,
    Protocol,
    Reason,
    Request,
    RequestLayer,
    decide,
    deny,
    inspects,
    registry_host,
)
from proxy.packages.judging import JudgedBy, explain_package

_SCHEMES = {"http": 80, "https": 443, "ws": 80, "wss": 443, "tcp": None}
_SCHEME_OF_PORT = {80: "http", 443: "https"}
_MAX_TEXT = 16 * 1024
# What clients leave as it is in a path: RFC 3986's `pchar`, the slash, and the escapes that are there already.
_PATH_CHARACTERS = "/%:@!$&'()*+,;=~-._"
_MAX_PATH = 32 * 1024  # encoded; with it a request's head is below what the proxy reads of one
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}")  # RFC 9110 section 9.1; longer ones the proxy takes for none
_METHOD_IN_TUNNEL = re.compile(r"(?!PRI\Z)[A-Z][A-Z-]{0,19}")  # by which the proxy tells HTTP/1 from other bytes


class InvalidTarget(ValueError):
    """The text is neither a URL nor HOST:PORT. The message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A request as a person writes it. `scheme` is one of http, https, ws, wss, tcp; `path` is without the query."""

    scheme: str
    host: Host | Unparsed
    port: int
    path: str = "/"
    has_query: bool = False

    @property
    def tls(self) -> bool:
        return self.scheme in ("https", "wss")

    @property
    def raw(self) -> bool:
        return self.scheme == "tcp"

    def __str__(self) -> str:
        address = isinstance(self.host, Host) and self.host.address is not None and self.host.address.version == 6
        name = f"[{self.host}]" if address else str(self.host)
        if self.raw:
            return f"{name}:{self.port}"
        port = "" if self.port == _SCHEMES[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{name}{port}{self.path}"


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's view and its answer. `decision` is None for a layer that is not reached, or that sees nothing."""

    request: Request
    decision: Decision | None
    note: str | None = None


def parse_target(text: str) -> Target:
    """Read a URL, or HOST:PORT: port 443 means https, port 80 http, every other one raw TCP. Raises `InvalidTarget`."""
    if not text or len(text) > _MAX_TEXT or not text.isprintable() or any(c.isspace() for c in text) or "\\" in text:
        raise InvalidTarget("it is empty, too long, or has a space, a backslash or a control character")
    if "://" not in text:
        if any(mark in text for mark in "/?#@"):
            raise InvalidTarget("it is neither a URL with its scheme nor HOST:PORT")
        host, port = observe_authority(text)
        if port is None:
            raise InvalidTarget("there is no port from 1 to 65535 after the host")
        return Target(_SCHEME_OF_PORT.get(port, "tcp"), host, port)
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        raise InvalidTarget("the scheme is none of http, https, ws, wss, tcp")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
    except ValueError as error:
        raise InvalidTarget(f"it is not a URL: {error}") from error
    authority = parts.netloc.rpartition("@")[2]  # clients send what stands before it elsewhere, or not at all
    host, port = observe_authority(authority)
    port = port if port is not None else _SCHEMES[scheme]
    if port is None:
        raise InvalidTarget("there is no port from 1 to 65535 after the host")
    path = quote(parts.path, safe=_PATH_CHARACTERS) or "/"
    if len(path) > _MAX_PATH:
        raise InvalidTarget("its path is too long")
    return Target(scheme, host, port, path, "?" in rest.partition("#")[0])


def requests_for(
    target: Target, method: str = "GET", addresses: Sequence[IPAddress] = (), *, unread: bool = False
) -> tuple[Request, ...]:
    """The requests that the layers see, in order. `addresses` are those the name is known to have, if any.

    A name whose addresses are not known has no request at the dial. `unread`: the connection is carried as raw TCP,
    whatever is spoken on it.
    """
    host, port = target.host, target.port
    protocol = Protocol.TCP if target.raw or unread else Protocol.HTTP
    named = not (isinstance(host, Host) and host.address is not None)
    requests = [Request(RequestLayer.DNS, host)] if named else []
    requests.append(Request(RequestLayer.CONNECT, host, port, protocol))
    sni = host if target.tls and named else None
    if target.tls:
        requests.append(Request(RequestLayer.TLS, host, port, protocol, tls=True, sni=sni))
    if not target.raw:
        claim = (host, None if port == _SCHEMES[target.scheme] else port)
        upgrade = target.scheme in ("ws", "wss")
        requests.append(
            Request(
                RequestLayer.HTTP, host, port, protocol, tls=target.tls, sni=sni, claims=(claim,), method=method,
                path=target.path, upgrade=upgrade,
            )
        )  # fmt: skip
    if isinstance(host, Host) and host.address is not None:
        addresses = (host.address,)
    requests += [Request(RequestLayer.DIAL, host, port, protocol, address=address) for address in addresses]
    return tuple(requests)


def explain(
    grant: Grant,
    target: Target,
    method: str = "GET",
    addresses: Sequence[IPAddress] = (),
    judged_by: JudgedBy | None = None,
) -> tuple[Step, ...]:
    """What each layer would say. A static answer of the grant stands before `addresses`.

    Of a request to a package registry, what is said before the registry is asked: with `judged_by`, of the name too.
    Of several addresses one that is allowed is enough: the proxy dials only those. Where raw TCP is allowed, a tunnel
    passes unread, with TLS or whatever else in it; only plain HTTP is still read, if the proxy itself is asked for it.
    """
    for entry in grant.hosts:
        if entry.host == target.host:
            addresses = entry.addresses
    opaque = not target.raw and _carries_anything(grant, target)
    steps: list[Step] = []
    denied = False
    dials: list[Step] = []
    for request in requests_for(target, method, addresses, unread=opaque and target.tls):
        if denied:
            steps.append(Step(request, None, "not reached"))
        elif opaque and target.tls and request.layer in (RequestLayer.TLS, RequestLayer.HTTP):
            steps.append(Step(request, None, "not seen: raw TCP is allowed there, so this passes unread"))
        elif request.layer is RequestLayer.HTTP and _passes(grant, target):
            steps.append(Step(request, None, "not seen: TLS to this host is passed through unopened"))
        elif request.layer is RequestLayer.DIAL:
            dials.append(Step(request, decide(grant, request)))
        else:
            judged = _judge(grant, request)
            denied = not all(step.decision is not None and step.decision.allowed for step in judged)
            steps += judged
            if request.layer is RequestLayer.HTTP and not denied and registry_host(grant, request) is not None:
                step = _package(grant, target, request, judged_by)
                denied = step.decision is not None and not step.decision.allowed
                steps.append(step)
    if opaque and not target.tls:
        raw = Request(RequestLayer.TCP, target.host, target.port, Protocol.TCP)
        steps.append(Step(raw, None, "over SOCKS or dialled directly it passes unread: raw TCP is allowed there"))
    if any(step.decision is not None and step.decision.allowed for step in dials):
        dials = [
            step if step.decision is None or step.decision.allowed else replace(step, decision=None, note="not dialled")
            for step in dials
        ]
    return (*steps, *dials)


def verdict(steps: Sequence[Step]) -> Decision:
    """The one answer to the request: the first denial, else the decision of the layer that saw the most of it.

    When none of several addresses may be dialled, the last one's is the answer, as it is the proxy's.
    """
    last: Decision | None = None
    undialled: Decision | None = None
    for step in steps:
        if step.decision is None:
            continue
        if step.request.layer is RequestLayer.DIAL and last is not None:
            undialled = None if step.decision.allowed else step.decision
        elif not step.decision.allowed:
            return step.decision
        else:
            last = step.decision
    assert last is not None, "the connection's own layer always answers"
    return undialled or last


def _judge(grant: Grant, request: Request) -> list[Step]:
    """One layer's answer.

    Where raw TCP is not allowed a connection is taken for HTTP, until its bytes are none. Inside TLS, neither are those
    of a request whose method is not written as methods are.
    """
    decision = decide(grant, request)
    if request.layer is RequestLayer.CONNECT and request.protocol is Protocol.TCP and not decision.allowed:
        taken = replace(request, protocol=Protocol.HTTP)
        if not (answer := decide(grant, taken)).allowed:
            return [Step(taken, answer)]
        return [Step(taken, answer), Step(replace(request, layer=RequestLayer.TCP), decision)]
    if request.layer is RequestLayer.HTTP and request.method is not None:
        if request.tls and not _METHOD_IN_TUNNEL.fullmatch(request.method):
            bytes_ = Request(RequestLayer.TCP, request.host, request.port, Protocol.TCP, tls=True, sni=request.sni)
            decision = decide(grant, bytes_)
            if decision.allowed:
                decision = deny(Reason.PROTOCOL_NOT_ALLOWED, "the bytes are neither TLS nor HTTP")
            return [Step(bytes_, decision)]
        if not _TOKEN.fullmatch(request.method):
            decision = deny(Reason.MALFORMED_REQUEST, "the method is not a token")
    return [Step(request, decision)]


def _package(grant: Grant, target: Target, request: Request, judged_by: JudgedBy | None) -> Step:
    assert grant.packages is not None
    text = target.path + ("?" if target.has_query else "")
    here, decision = explain_package(grant.packages, request, text, judged_by)
    if decision is None:
        return Step(here, None, "judged by the package policy: the name, and each file when it is fetched")
    return Step(here, decision)


def _passes(grant: Grant, target: Target) -> bool:
    return target.tls and isinstance(target.host, Host) and not inspects(grant, target.host, target.port)


def _carries_anything(grant: Grant, target: Target) -> bool:
    """Whether a tunnel to the target is raw TCP: then nobody asks what is spoken in it. `unrestricted` still asks."""
    request = Request(RequestLayer.CONNECT, target.host, target.port, Protocol.TCP)
    return grant.mode is not Mode.UNRESTRICTED and decide(grant, request).allowed
