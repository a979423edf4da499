"""What a refused or failed request is answered with. Pure, but for mitmproxy's response type.

People and models read these: they name the host, the reason, the rule, and say that another route will not help.
"""

from __future__ import annotations

import json

from mitmproxy import http

from proxy.network import PROXY_STATUS, Decision, Grant, Reason, Request

_HINTS: dict[Reason, str] = {
    Reason.NETWORK_OFF: "this call has no network; ask for it with `allow_network`, if the policy permits",
    Reason.METHOD_NOT_ALLOWED: "the rule allows other methods only",
    Reason.LIMIT_EXCEEDED: "this attempt has used up what one attempt may",
    Reason.AUDIT_UNAVAILABLE: "tell the operator: without its audit log nothing passes",
    Reason.INTERNAL_ERROR: "tell the operator: the proxy's own log has the details",
    Reason.MALFORMED_REQUEST: "send a well-formed request that names its host once",
}
# RFC 9209 section 2.3
_STATUS_TYPES = {
    "dns_failed": "dns_error",
    "connect_failed": "connection_refused",
    "tls_failed": "tls_protocol_error",
    "upstream_failed": "http_protocol_error",
}
_DEFAULT_HINT = "the policy decides this at every layer, so do not retry by another route; ask the operator for a rule"


def refusal(decision: Decision, request: Request, grant: Grant) -> http.Response:
    """403 with a JSON body and, for clients that show no body, the reason in the reason phrase."""
    host = str(request.host)[:300]
    body: dict[str, object] = {
        "code": decision.reason.value,
        "reason": decision.detail,
        "host": host,
        "port": request.port,
        "layer": request.layer.value,
        "policy": grant.policy_name,
        "rule": decision.rule,
        "hint": _HINTS.get(decision.reason, _DEFAULT_HINT),
    }
    response = _make(403, body, _denial_headers(decision.reason))
    response.reason = _phrase(f"Blocked by sluicegate: {decision.reason.value}: {decision.detail}")
    return response


def malformed(why: str, grant: Grant) -> http.Response:
    """400 for bytes that are no request, or that two readers could take for different ones. The connection ends."""
    reason = Reason.MALFORMED_REQUEST
    body: dict[str, object] = {
        "code": reason.value,
        "reason": why[:300],
        "policy": grant.policy_name,
        "hint": _HINTS[reason],
    }
    return _make(400, body, {"Connection": "close", **_denial_headers(reason)})


def failure(code: str, message: str, request: Request) -> http.Response:
    """502 for what failed upstream: no denial, and said so. The connection ends, as its server's may have."""
    body: dict[str, object] = {
        "code": code,
        "reason": message[:500],
        "host": str(request.host)[:300],
        "port": request.port,
        "hint": "the policy allowed this; the destination could not be reached",
    }
    status = f"sluicegate; error={_STATUS_TYPES.get(code, 'destination_unavailable')}"
    return _make(502, body, {"Connection": "close", "Proxy-Status": status})


def _denial_headers(reason: Reason) -> dict[str, str]:
    return {
        "Proxy-Status": f"sluicegate; error={PROXY_STATUS[reason]}; details={reason.value}",
        "X-Sluicegate-Reason": reason.value,
    }


def _make(status: int, body: dict[str, object], headers: dict[str, str]) -> http.Response:
    content = json.dumps(body) + "\n"
    return http.Response.make(
        status, content, {"Content-Type": "application/json", "Cache-Control": "no-store", **headers}
    )


def _phrase(text: str) -> str:
    """A reason phrase that is one line of visible ASCII (RFC 9112 section 4)."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:200]
