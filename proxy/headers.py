"""What a request must not have, and what of it is not passed on. Pure, but for the request that is changed.

Owns: faults by which two readers see different requests, headers that name another target, headers that end here.
Must not: know policies: whether another target matters is `decide`'s to say.
"""

from __future__ import annotations

import re

from mitmproxy import http

_HEADERS_FOR_US = ("proxy-connection", "proxy-authorization", "http2-settings")
# RFC 9110 section 7.6.1: what `Connection` names is for us. Without these the next hop would read another request.
_NEVER_FOR_US = frozenset({"host", "content-length", "transfer-encoding"})

# RFC 9110 section 9.1: a method is a token. RFC 9112 section 3: a request line has no white space but its separators;
# over HTTP/2 the parts come one by one, and any could have some. A fragment is no part of a target: some servers cut it
# off, for others what is behind it is of the path.
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}\Z")
_NOT_IN_TARGET = re.compile(rb"[\x00-\x20#\x7f]")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

# Headers by which frameworks and proxies in front of them are told another method or target than the request line's.
# CGI makes underscores of hyphens, so there a name with underscores is the same one.
_OVERRIDES = re.compile(
    r"(?:x-)?(?:http-)?method(?:-override)?"
    r"|x-(?:[a-z]+-)*?(?:original|rewrite|rewritten|forwarded|override|overridden|real|request|requested)"
    r"-(?:http-)?(?:method|url|uri|path|pathinfo|path-info|query|prefix|target)"
    r"|x-(?:http-)?(?:url|uri|path|path-info|target)(?:-override)?|x-http-destinationurl|x-proxy-url"
    r"|(?:request|redirect)-(?:uri|url|method)|base-url|destination"
)


def find_fault(request: http.Request) -> str | None:
    """Why a request must not be passed on though it could be parsed: another reader could see another one in it."""
    if not _METHOD.match(request.data.method):
        return "the method is not a token"
    path = request.data.path
    if _NOT_IN_TARGET.search(path) or not (path.startswith(b"/") or path == b"*"):
        return "the target is not a path"
    for _name, value in request.headers.fields:
        if _NOT_IN_VALUE.search(value):
            return "a header's value has a control character"
    return None


def names_another_target(headers: http.Headers) -> bool:
    """Whether a header asks the server, or what stands before it, to act on another method or target."""
    return any(_OVERRIDES.fullmatch(name.lower().replace("_", "-")) for name in headers)


def remove_headers_for_us(headers: http.Headers) -> None:
    """Remove what a proxy is told and must not pass on, RFC 9110 section 7.6.1. Of upgrades only WebSocket's passes."""
    named = {token.strip().lower() for value in headers.get_all("connection") for token in value.split(",")}
    kept = named & {"close", "keep-alive"}
    if headers.get("upgrade", "").strip().lower() == "websocket":
        kept |= named & {"upgrade"}
    else:
        named |= {"upgrade"}
    for name in ("connection", *_HEADERS_FOR_US, *(named - kept - _NEVER_FOR_US)):
        headers.pop(name, None)
    if kept:
        headers["connection"] = ", ".join(sorted(kept))


__all__ = ["find_fault", "names_another_target", "remove_headers_for_us"]
