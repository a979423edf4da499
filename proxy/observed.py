"""What a connection and a request of it say, as the values that `decide` is asked about. Pure, of mitmproxy's values.

Owns: the translation. Must not: decide, or change what it reads.
"""

from __future__ import annotations

from mitmproxy import connection, http, tls

from proxy.attempts import Connection
from proxy.destinations import Host, Unparsed, observe_authority, observe_host
from proxy.headers import names_another_target
from proxy.network import Protocol, Request, RequestLayer

_SERVER_NAME = 0  # RFC 6066 section 3


def http_request(flow: http.HTTPFlow, state: Connection) -> Request:
    """What `decide` is asked about a request: its destination, and every name that the request itself carries."""
    request = flow.request
    claims = []
    for text in (request.headers.get_all("host"), [request.authority] if request.authority else []):
        claims += [observe_authority(claim) for claim in text]
    if not claims:
        claims = [(Unparsed("", "there is no Host header"), None)]
    host = state.destination if state.destination is not None else observe_host(request.host)
    tls_inside = flow.client_conn.tls and state.destination is not None
    return Request(
        RequestLayer.HTTP,
        host,
        state.port if state.port is not None else request.port,
        Protocol.HTTP,
        tls=tls_inside,
        sni=sni_of(flow.client_conn) if tls_inside else None,
        claims=tuple(claims),
        method=request.method,
        path=path_of(request),
        has_body=_has_body(request),
        upgrade="upgrade" in request.headers,
        overrides=names_another_target(request.headers),
    )


def path_of(request: http.Request) -> str:
    """What is judged, byte for byte as it is forwarded. A fragment is refused by `find_fault`."""
    return request.path.partition("?")[0]


def _has_body(request: http.Request) -> bool:
    """Whether a body follows. Over HTTP/2 it need not be announced: there the end of the stream says so."""
    length = request.headers.get("content-length", "0").strip()
    return bool(request.stream) or length != "0" or "transfer-encoding" in request.headers


def destination_of(state: Connection) -> Host | Unparsed:
    return state.destination if state.destination is not None else Unparsed("", "no destination is known")


def server_name(hello: tls.ClientHello) -> Host | Unparsed | None:
    """The name a ClientHello asks for. mitmproxy says None where there is none and also where it is no name."""
    if hello.sni:
        return observe_host(hello.sni)
    named = any(kind == _SERVER_NAME for kind, _ in hello.extensions)
    return Unparsed("", "it is not a host name") if named else None


def sni_of(client: connection.Client) -> Host | Unparsed | None:
    return observe_host(client.sni) if client.sni else None


__all__ = ["destination_of", "http_request", "path_of", "server_name", "sni_of"]
