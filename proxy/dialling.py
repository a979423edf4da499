"""Which of a name's addresses may be dialled for an attempt. Whoever dials asks here, and dials nothing else.

Owns: judging resolved addresses, and writing what was decided. Must not: resolve, or dial.
"""

from __future__ import annotations

from proxy.attempts import Attempt, Connection
from proxy.destinations import Host, IPAddress
from proxy.network import Decision, Protocol, Reason, Request, RequestLayer, deny
from proxy.resolver import Resolved


def vet(
    attempt: Attempt,
    state: Connection,
    host: Host,
    port: int | None,
    protocol: Protocol,
    resolved: tuple[Resolved, ...],
    *,
    log_allow: bool = False,
) -> tuple[IPAddress, ...] | Decision:
    """Those of the addresses that may be dialled, or the denial of the last one when none may."""
    requests = [
        Request(RequestLayer.DIAL, host, port, protocol, address=r.address, address_class=r.address_class)
        for r in resolved
    ]
    allowed = [request for request in requests if attempt.judge_silently(request).allowed]
    if not requests:
        detail = f"the policies that hold for this attempt have no answer for `{host}` that they agree on"
        return attempt.refuse(
            Request(RequestLayer.DIAL, host, port, protocol), deny(Reason.POLICY_REVOKED, detail), state
        )
    if not allowed:
        return attempt.judge(requests[-1], state)
    if log_allow:
        decision = attempt.judge(allowed[0], state, final=state.opaque)
        if not decision.allowed:
            return decision
    return tuple(request.address for request in allowed if request.address is not None)


__all__ = ["vet"]
