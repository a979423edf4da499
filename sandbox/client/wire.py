"""httpx, as both clients use it: what is sent for an operation, and which of its exceptions means what.

Owns: the meeting with httpx. Must not: know what the service can be asked.
"""

from __future__ import annotations

import ssl
import uuid
from typing import Any, TypedDict

import httpx

from sandbox.client.operations import Failure, Operation, Reply
from sandbox.client.place import Place

CONNECT_SECONDS = 5.0
_SEND_SECONDS = 30.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class _Options(TypedDict):
    verify: ssl.SSLContext
    trust_env: bool
    uds: str | None
    limits: httpx.Limits


def transport_options(place: Place) -> _Options:
    """Nothing of the environment's: a proxy that is meant for others would see the token, and the code.

    There is no bound on connections: each call that waits for its answer has one.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return {"verify": place.tls(), "trust_env": False, "uds": place.socket, "limits": limits}


def request_options(place: Place, operation: Operation[Any]) -> dict[str, Any]:
    """The arguments of `httpx.Client.build_request`."""
    headers = {"accept": "application/json", **place.headers, **operation.headers}
    if operation.body is not None:
        headers["content-type"] = "application/json"
    return {
        "method": operation.method,
        "url": place.base_url + operation.path,
        "params": operation.query or None,
        "content": operation.body,
        "headers": headers,
        "timeout": httpx.Timeout(
            operation.seconds, connect=CONNECT_SECONDS, write=_SEND_SECONDS, pool=CONNECT_SECONDS
        ),
    }  # fmt: skip


def reply_of(response: httpx.Response) -> Reply:
    """A response that was read to its end."""
    return Reply(response.status_code, response.content, dict(response.headers))


def failure_of(error: httpx.TransportError, place: Place) -> Failure:
    """Why there is no answer, in words that name the place."""
    where = f"`{place.socket or place.base_url}`"
    timed_out = isinstance(error, httpx.TimeoutException)
    if isinstance(error, _NOT_SENT):
        why = "no answer to the connection in time" if timed_out else str(error) or type(error).__name__
        hint = "is `sluicegate serve` running, and is this its address?"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            hint = "give the authority that signed its certificate as `ca`; the certificate has to name this host"
        return Failure(False, f"the service at {where} cannot be reached: {why}\nhint: {hint}", timed_out)
    why = "it took too long" if timed_out else str(error) or type(error).__name__
    if not timed_out and place.base_url.startswith("http://") and place.socket is None:
        why += "\nhint: if the service has TLS, write `https://`"
    return Failure(True, f"the service at {where} gave no answer: {why}", timed_out)


def with_key(fields: dict[str, Any], once_only: bool) -> dict[str, Any]:
    """A call's fields, with an idempotency key of its own where it has none and is to run once at most."""
    if once_only and fields.get("idempotency_key") is None:
        return fields | {"idempotency_key": f"client-{uuid.uuid4()}"}
    return fields
