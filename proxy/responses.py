"""What a refused or failed request is answered with. Pure, but for mitmproxy's response type.

People and models read these: they name the host, the reason, the rule, and say that another route will not help.
"""

from __future__ import annotations

import json

from mitmproxy import http

from proxy.network import Decision, Grant, Reason, Request, RequestLayer
from proxy.packages.reasons import PackageReason
from proxy.reasons import proxy_status

_HINTS: dict[Reason | PackageReason, str] = {
    Reason.NETWORK_OFF: "this call has no network; ask for it with `allow_network`, if the policy permits",
    Reason.METHOD_NOT_ALLOWED: "the rule allows other methods only",
    Reason.LIMIT_EXCEEDED: "this attempt has used up what one attempt may",
    Reason.POLICY_REVOKED: "the policy was changed while this code ran, and does not allow this any more: do not retry",
    Reason.AUDIT_UNAVAILABLE: "tell the operator: without its audit log nothing passes",
    Reason.INTERNAL_ERROR: "tell the operator: the proxy's own log has the details",
    Reason.MALFORMED_REQUEST: "send a well-formed request that names its host once",
    Reason.REGISTRY_REQUEST_UNKNOWN: "pages of packages and their files can be read here; nothing else of a registry",
    Reason.ARTIFACT_NOT_LISTED: "take the file that the project's own page lists",
    Reason.PACKAGE_FACTS_UNAVAILABLE: "try again later: what the file would be judged by could not be read",
}
# RFC 9209 section 2.3
_STATUS_TYPES = {
    "dns_failed": "dns_error",
    "connect_failed": "connection_refused",
    "tls_failed": "tls_protocol_error",
    "upstream_failed": "http_protocol_error",
}
_CLOSE = {"Connection": "close"}  # HTTP/2 has no such field; `GuardedStream` sees to that
_DEFAULT_HINT = "the policy decides this at every layer, so do not retry by another route; ask the operator for a rule"


def refusal(decision: Decision, request: Request, grant: Grant) -> http.Response:
    """403 with a JSON body and, for clients that show no body, the reason in the reason phrase. The connection ends.

    A client that does not read the body would else wait for the next one who asks on that connection.
    """
    host = str(request.host)[:300]
    body: dict[str, object] = {
        "code": decision.reason.value,
        "reason": decision.detail,
        "host": host,
        "port": request.port,
        "layer": request.layer.value,
        "policy": grant.policy_name,
        "rule": decision.rule,
        "hint": decision.hint or _HINTS.get(decision.reason, _DEFAULT_HINT),
    }
    phrase = f"Blocked by sluicegate: {decision.reason.value}: {decision.detail}"
    if request.layer is RequestLayer.PACKAGE:
        # npm prints `error`; pip and uv show no more than the reason phrase
        body |= {"package": request.package, "version": request.version, "error": phrase}
    return _make(403, body, {**_CLOSE, **_denial_headers(decision.reason)}, request, phrase)


def malformed(why: str, grant: Grant) -> http.Response:
    """400 for bytes that are no request, or that two readers could take for different ones. The connection ends."""
    reason = Reason.MALFORMED_REQUEST
    body: dict[str, object] = {
        "code": reason.value,
        "reason": why[:300],
        "policy": grant.policy_name,
        "hint": _HINTS[reason],
    }
    return _make(400, body, {**_CLOSE, **_denial_headers(reason)})


def failure(code: str, message: str, request: Request) -> http.Response:
    """502 for what failed upstream: no denial, and said so, in the reason phrase too. The connection ends."""
    body: dict[str, object] = {
        "code": code,
        "reason": message[:500],
        "host": str(request.host)[:300],
        "port": request.port,
        "hint": "the policy allowed this; the destination could not be reached",
    }
    status = f"sluicegate; error={_STATUS_TYPES.get(code, 'destination_unavailable')}"
    phrase = f"Allowed by sluicegate, but failed: {code}: {message}"
    return _make(502, body, {**_CLOSE, "Proxy-Status": status}, request, phrase)


def _denial_headers(reason: Reason | PackageReason) -> dict[str, str]:
    return {
        "Proxy-Status": f"sluicegate; error={proxy_status(reason)}; details={reason.value}",
        "X-Sluicegate-Reason": reason.value,
    }


def _make(
    status: int,
    body: dict[str, object],
    headers: dict[str, str],
    request: Request | None = None,
    phrase: str | None = None,
) -> http.Response:
    content = json.dumps(body) + "\n"
    response = http.Response.make(
        status, content, {"Content-Type": "application/json", "Cache-Control": "no-store", **headers}
    )
    if phrase is not None:
        response.reason = _phrase(phrase)
    return without_body(response) if request is not None and request.method == "HEAD" else response


def without_body(response: http.Response) -> http.Response:
    """As the answer to HEAD: a client would take a body for the next response. The length that it would have stays."""
    response.raw_content = b""
    return response


def _phrase(text: str) -> str:
    """A reason phrase that is one line of visible ASCII (RFC 9112 section 4)."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:200]
