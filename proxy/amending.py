"""A policy that changes while an attempt runs: its grant is amended, and what may not go on is cut.

From the moment that `Attempt.standing` is replaced every decision is made under it. What was decided before goes on
without being asked again, so it is looked at here, in the same turn of the loop: between two turns there is no
connection that is judged by the one and cut by the other.

    passed unread (raw TCP, TLS that is not opened)   judged by where it goes: reset
    a request that is not over, a WebSocket           judged as it was: its client's connection is reset
    a request to a registry, and packages changed     reset: what is asked for can only be judged anew
    a server's connection that nothing needs now      reset; the client's stays, and hears why when it asks again
    a dial that is under way                          as what it is for
    a page that the proxy reads itself                begun again (`Registries.recall`)

Owns: that. Must not: judge; `Standing` does. Whatever fails here leaves the attempt with nothing that is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from proxy.attempts import Attempt, Connection, Dial, Exchange
from proxy.destinations import Host, observe_host
from proxy.network import Decision, Grant, Protocol, Reason, Request, RequestLayer, deny
from proxy.observed import destination_of
from proxy.resolver import observe_address
from proxy.standing import Standing

logger = logging.getLogger(__name__)

_CLOSED_SECONDS = 5.0  # in truth, two turns of the loop
_LOOK_SECONDS = 0.001

type Objection = tuple[Request, Decision]


async def amend(attempt: Attempt, grant: Grant | None) -> bool:
    """Let the attempt do from now on what its grants and this one allow; None: nothing. Returns when all is cut.

    False: nothing has changed by it. Where it raises, the attempt has nothing left that is allowed.
    """
    before = attempt.standing
    waiting: list[Callable[[], bool]] = []
    try:
        attempt.standing = before.amended(grant)
        if attempt.standing.allows_as_much_as(before):
            return False
        for key, state in list(attempt.connections.items()):
            if (found := _objection(attempt, before, state)) is not None:
                _cut(attempt, state, found)
                waiting.append(lambda key=key: key not in attempt.connections)  # type: ignore[misc]  # bound now
            else:
                waiting += [_hang_up(state, server) for server in _unwanted(attempt, state)]
    except BaseException:
        revoke(attempt)
        raise
    deadline = time.monotonic() + _CLOSED_SECONDS
    while not all(is_closed() for is_closed in waiting):
        if time.monotonic() > deadline:
            logger.error("connections that were cut have not ended after %g s", _CLOSED_SECONDS)
            break
        await asyncio.sleep(_LOOK_SECONDS)
    return True


def revoke(attempt: Attempt) -> None:
    """Allow nothing any more, and cut every connection, whatever it is at. For when an amendment has failed."""
    attempt.standing = attempt.standing.amended(None)
    for state in list(attempt.connections.values()):
        if state.abort is not None:
            with contextlib.suppress(Exception):  # the others are to be cut all the same
                state.abort()


def _cut(attempt: Attempt, state: Connection, found: Objection) -> None:
    if state.abort is not None:
        state.abort()
    attempt.refuse(*found, state)


def _hang_up(state: Connection, server: str) -> Callable[[], bool]:
    if state.hang_up is not None:
        state.hang_up(server)
    return lambda: server not in state.dials


def _objection(attempt: Attempt, before: Standing, state: Connection) -> Objection | None:
    """Why a client's connection is cut: the first denial of what is under way on it; None when all of it may go on."""
    found = _objection_to_bytes(attempt, state) if state.opaque else None
    under_way = [one for one in state.open | state.sending if one.refused is None and one.failed is None]
    for exchange in under_way:
        found = found or _objection_to_exchange(attempt, before, exchange)
    for dial in state.dials.values():
        if state.opaque or any(_is_for(dial, exchange) for exchange in under_way):
            found = found or _objection_to_dial(attempt, dial)
    return found


def _objection_to_bytes(attempt: Attempt, state: Connection) -> Objection | None:
    host, port = destination_of(state), state.port
    request = Request(RequestLayer.CONNECT, host, port, state.carried)
    if not (decision := attempt.judge_silently(request)).allowed:
        return request, decision
    if state.sni is None:
        return None
    request = Request(RequestLayer.TLS, host, port, state.carried, tls=True, sni=observe_host(state.sni))
    decision = attempt.judge_silently(request)
    if (
        decision.allowed
        and state.carried is Protocol.HTTP
        and isinstance(host, Host)
        and port is not None
        and attempt.standing.inspects(host, port)
    ):
        decision = deny(
            Reason.POLICY_REVOKED, f"the policy was changed while the code ran: TLS to `{host}` is opened now"
        )
    return None if decision.allowed else (request, decision)


def _objection_to_exchange(attempt: Attempt, before: Standing, exchange: Exchange) -> Objection | None:
    request = exchange.request
    decision = attempt.judge_silently(request)
    if decision.allowed:
        known = [view.grant for view in before.registries(request)]
        if any(view.grant not in known for view in attempt.standing.registries(request)):
            detail = "the policy of packages was changed while the code ran: what is asked for has to be asked for anew"
            decision = deny(Reason.POLICY_REVOKED, detail, "packages")
    return None if decision.allowed else (request, decision)


def _objection_to_dial(attempt: Attempt, dial: Dial) -> Objection | None:
    answer = next((entry.addresses for entry in attempt.standing.hosts if entry.host == dial.host), None)
    for address in dial.addresses:
        seen = observe_address(address)
        request = Request(
            RequestLayer.DIAL, dial.host, dial.port, dial.protocol, address=address, address_class=seen.address_class
        )
        decision = attempt.judge_silently(request)
        if decision.allowed and answer is not None and address not in answer:
            detail = f"the policy was changed while the code ran: `{dial.host}` is not at {address} any more"
            decision = deny(Reason.POLICY_REVOKED, detail)
        if not decision.allowed:
            return request, decision
    return None


def _unwanted(attempt: Attempt, state: Connection) -> list[str]:
    """The servers' connections that may not be there any more, and that nothing under way is for."""
    return [server for server, dial in state.dials.items() if _objection_to_dial(attempt, dial) is not None]


def _is_for(dial: Dial, exchange: Exchange) -> bool:
    return (dial.host, dial.port) == (exchange.request.host, exchange.request.port)


__all__ = ["amend", "revoke"]
