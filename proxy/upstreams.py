"""The hooks of connections to servers: each is judged at its dial, remembered while it is there, and counted.

Owns: the translation, as `proxy.addon`, of which these are a part. Must not: decide by itself.
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

from mitmproxy.connection import TransportProtocol
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from proxy.attempts import Dial
from proxy.destinations import Host, IPAddress, Unparsed, observe_host
from proxy.dialling import vet
from proxy.listeners import attempt_of, connection_of
from proxy.network import Decision, Protocol, Request, RequestLayer
from proxy.resolver import ResolutionFailed, Resolver, pin


class UpstreamHooks:
    """From the dial to the disconnect."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """The one choke point: every upstream connection passes here, whatever led to it."""
        attempt, state = attempt_of(data.client), connection_of(data.client)
        server = data.server
        state.upstreams += 1
        transport: TransportProtocol = server.transport_protocol
        if state.denied is not None or server.address is None or transport != "tcp" or server.via is not None:
            server.error = "denied" if state.denied is not None else "only TCP to a known destination is forwarded"
            return
        host, port = observe_host(server.address[0]), server.address[1]
        protocol = Protocol.TCP if state.opaque and state.carried is Protocol.TCP else Protocol.HTTP
        vetted: tuple[IPAddress, ...] | Decision
        try:
            if isinstance(host, Unparsed):
                vetted = attempt.judge(Request(RequestLayer.DIAL, host, port, protocol), state)
            elif (limit := attempt.admit_upstream()) is not None:
                vetted = attempt.refuse(Request(RequestLayer.DIAL, host, port, protocol), limit, state)
            else:
                resolved = await self._resolver.resolve(host, attempt.standing.hosts, attempt.lookups)
                vetted = vet(attempt, state, host, port, protocol, resolved, log_allow=True)
        except ResolutionFailed as error:
            state.error = f"dns_failed: {error}"
            server.error = str(error)
            return
        if isinstance(vetted, Decision):
            state.refused_dial = vetted
            server.error = f"{vetted.reason.value}: {vetted.detail}"
            return
        assert isinstance(host, Host)
        pin(host, vetted)
        state.dials[server.id] = Dial(host, port, protocol, vetted)
        state.dialled = True

    def server_connected(self, data: ServerConnectionHookData) -> None:
        state, dial = connection_of(data.client), connection_of(data.client).dials[data.server.id]
        assert data.server.peername is not None
        state.address = data.server.peername[0]
        state.dials[data.server.id] = replace(dial, addresses=(ip_address(data.server.peername[0]),))

    def server_connect_error(self, data: ServerConnectionHookData) -> None:
        state = connection_of(data.client)
        state.upstreams -= 1
        state.dials.pop(data.server.id, None)
        if state.error is None and state.dialled:
            state.error = f"connect_failed: {data.server.error}"

    def server_disconnected(self, data: ServerConnectionHookData) -> None:
        state = connection_of(data.client)
        state.upstreams -= 1
        state.dials.pop(data.server.id, None)


__all__ = ["UpstreamHooks"]
