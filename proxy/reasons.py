"""Why a decision fell as it did, as codes, and what each is to HTTP. Pure.

Owns: the codes of requests. Those of packages are in `proxy.packages.reasons`. Must not: decide.
"""

from __future__ import annotations

from enum import StrEnum

from proxy.packages.reasons import PackageReason


class Reason(StrEnum):
    """Why a decision fell as it did. Each denial maps to an RFC 9209 `Proxy-Status` error type in `PROXY_STATUS`."""

    ALLOWED = "allowed"
    NETWORK_OFF = "network_off"
    HOST_DENIED = "host_denied"
    HOST_NOT_ALLOWED = "host_not_allowed"
    PORT_NOT_ALLOWED = "port_not_allowed"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PATH_NOT_ALLOWED = "path_not_allowed"
    BODY_NOT_ALLOWED = "body_not_allowed"
    PROTOCOL_NOT_ALLOWED = "protocol_not_allowed"
    ADDRESS_NOT_PUBLIC = "address_not_public"
    SNI_MISSING = "sni_missing"
    SNI_MISMATCH = "sni_mismatch"
    HOST_MISMATCH = "host_mismatch"
    MALFORMED_REQUEST = "malformed_request"
    REGISTRY_REQUEST_UNKNOWN = "registry_request_unknown"
    ARTIFACT_NOT_LISTED = "artifact_not_listed"
    PACKAGE_FACTS_UNAVAILABLE = "package_facts_unavailable"
    LIMIT_EXCEEDED = "limit_exceeded"
    POLICY_REVOKED = "policy_revoked"
    ATTEMPT_OVER = "attempt_over"
    AUDIT_UNAVAILABLE = "audit_unavailable"
    INTERNAL_ERROR = "internal_error"


PROXY_STATUS: dict[Reason, str] = {
    Reason.NETWORK_OFF: "http_request_denied",
    Reason.HOST_DENIED: "http_request_denied",
    Reason.HOST_NOT_ALLOWED: "http_request_denied",
    Reason.PORT_NOT_ALLOWED: "http_request_denied",
    Reason.METHOD_NOT_ALLOWED: "http_request_denied",
    Reason.PATH_NOT_ALLOWED: "http_request_denied",
    Reason.BODY_NOT_ALLOWED: "http_request_denied",
    Reason.PROTOCOL_NOT_ALLOWED: "http_request_denied",
    Reason.ADDRESS_NOT_PUBLIC: "destination_ip_prohibited",
    Reason.SNI_MISSING: "http_request_denied",
    Reason.SNI_MISMATCH: "http_request_denied",
    Reason.HOST_MISMATCH: "http_request_denied",
    Reason.MALFORMED_REQUEST: "http_request_error",
    Reason.REGISTRY_REQUEST_UNKNOWN: "http_request_denied",
    Reason.ARTIFACT_NOT_LISTED: "http_request_denied",
    Reason.PACKAGE_FACTS_UNAVAILABLE: "http_request_denied",
    Reason.LIMIT_EXCEEDED: "connection_limit_reached",
    Reason.POLICY_REVOKED: "http_request_denied",
    Reason.ATTEMPT_OVER: "proxy_internal_response",
    Reason.AUDIT_UNAVAILABLE: "proxy_internal_error",
    Reason.INTERNAL_ERROR: "proxy_internal_error",
}


def proxy_status(reason: Reason | PackageReason) -> str:
    """The RFC 9209 error type of a denial. What is refused of packages is refused of requests for them."""
    return "http_request_denied" if isinstance(reason, PackageReason) else PROXY_STATUS[reason]
