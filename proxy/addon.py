"""The mitmproxy addon: hooks in, requests judged, verdicts applied.

Theory of operation. A connection comes from a listener inside one attempt's network namespace, so its attempt is known
before its first byte. It then meets these hooks, each of which judges what it can see before anything is sent upstream:

    captured / SOCKS5   `judge_destination`  host and port       deny: reset, a SOCKS refusal, or a 403 to come
    CONNECT             `http_connect`       host and port       deny: 403, or on a TLS port a 403 to come
    first bytes         `next_layer`         is it TLS or HTTP?  deny: closed
    ClientHello         `tls_clienthello`    SNI                 deny: a 403 to come
    request headers     `requestheaders`     all of the request  deny: 403 with a JSON body
      to a registry     `packages.registry`  which package       deny: 403; a page is answered here, a file forwarded
    dial                `UpstreamHooks`      resolved addresses  deny: 502 or reset; reached by nothing denied before

"A 403 to come": where the client speaks TLS only a response inside TLS is shown to people, so the denial is kept in the
connection and the TLS handshake is finished with it. Nothing is dialled for such a connection: the dial's hook, which
every upstream connection passes, refuses it again. The connection strategy is lazy, so no hook runs after a dial.

A hook that raises ends its connection (`listeners.Handler`). Owns: the translation. Must not: decide by itself.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, cast

from mitmproxy import connection, http, tcp, tls
from mitmproxy.net.tls import starts_like_tls_record
from mitmproxy.proxy import layer, layers
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import Layer
from mitmproxy.proxy.layers import modes
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.proxy.layers.tls import ServerTLSLayer

from proxy import responses
from proxy.attempts import Attempt, Connection, Exchange
from proxy.destinations import Host, Unparsed, observe_host
from proxy.dialling import vet
from proxy.headers import find_fault, remove_headers_for_us
from proxy.http_layers import CLIENT_GAVE_UP, Advice, GuardedHttp
from proxy.layers import FirstBytes, GuardedClientTls, GuardedSocks5, GuardedTunnel, Refuse, starts_like_http
from proxy.listeners import attempt_of, connection_of, is_silent
from proxy.network import Decision, Protocol, Reason, Request, RequestLayer, deny
from proxy.observed import destination_of, http_request, server_name, sni_of
from proxy.packages.registry import Failed, Forwarded, Registries
from proxy.resolver import ResolutionFailed, Resolved, Resolver
from proxy.upstreams import UpstreamHooks

_TLS_PORT = 443
_HTTP_ALPN = (b"http/1.1", b"h2")
_EXCHANGE = "sluicegate"


class PolicyAddon(UpstreamHooks):
    """All hooks. One instance serves every attempt; what is an attempt's lives in `Attempt` and `Connection`."""

    def __init__(self, resolver: Resolver, registries: Registries) -> None:
        super().__init__(resolver)
        self._registries = registries
        self._advice = Advice(
            tunnel=self.tunnel,
            malformed=self.refuse_malformed,
            failed=self.answer_failure,
            relayed=self.count_relayed,
            unfinished=self._note_unfinished,
        )

    # -- which layers a connection gets

    def top_layer(self, context: Context, protocol: str, captured: tuple[str, int] | None) -> Layer | None:
        """The first layer of an accepted connection; None when it is to be reset."""
        if captured is None:
            return layer.NextLayer(context)
        context.client.sockname = captured
        name = attempt_of(context.client).name_behind(captured[0])
        context.server.address = (name, captured[1])
        if not self.judgedestination_of(context, protocol):
            return None
        return GuardedTunnel(context, self.tunnel)

    def judgedestination_of(self, context: Context, protocol: str) -> bool:
        """Judge a connection whose host and port are known. False: refuse it at once, there is no readable way."""
        attempt, state = attempt_of(context.client), connection_of(context.client)
        assert context.server.address is not None
        host_text, port = context.server.address[:2]
        host = observe_host(host_text)
        state.protocol, state.destination, state.port = protocol, host, port
        raw = attempt.judge_silently(Request(RequestLayer.CONNECT, host, port, Protocol.TCP))
        if raw.allowed:
            state.carried = Protocol.TCP
            state.unfinished_since = None  # there the server may be the first to speak
        judged_as = state.carried if _is_taken_for_http(attempt, raw, host, port) else Protocol.TCP
        decision = attempt.judge(Request(RequestLayer.CONNECT, host, port, judged_as), state)
        if isinstance(host, Host):
            context.server.address = (host.text, port)
        if decision.allowed:
            return True
        state.denied = decision
        return port in (_TLS_PORT, 80) and isinstance(host, Host)

    def tunnel(self, context: Context) -> Layer:
        """What runs inside a connection whose destination is known and was judged."""
        state = connection_of(context.client)
        if state.denied is not None or state.carried is not Protocol.TCP:
            return layer.NextLayer(context)
        if attempt_of(context.client).standing.asks_what_is_spoken:
            return FirstBytes(context)
        return self._raw(context, state)

    def next_layer(self, pending: layer.NextLayer) -> None:
        context, data = pending.context, pending.data_client()
        state = connection_of(context.client)
        if not context.layers:
            pending.layer = self._explicit(context, data)
        elif isinstance(context.layers[-1], modes.HttpProxy):
            pending.layer = self._http(context, HTTPMode.regular)
        elif is_silent(pending):
            pending.layer = self._raw(context, state)
        elif context.client.tls:
            pending.layer = self._http_or_refuse(context, state, data, inside_tls=True)
        elif data and starts_like_tls_record(data):
            server_tls = ServerTLSLayer(context)
            server_tls.child_layer = GuardedClientTls(context, self._note_no_hello, self._note_unfinished)
            pending.layer = server_tls
        elif data and data[0] == 0x16 and len(data) < 3:
            return
        else:
            pending.layer = self._http_or_refuse(context, state, data, inside_tls=False)

    def _explicit(self, context: Context, data: bytes) -> Layer:
        if data[:1] == b"\x05":
            return GuardedSocks5(
                context, lambda inner: self.judgedestination_of(inner, "socks5"), self._note_malformed, self.tunnel
            )
        return modes.HttpProxy(context)

    def _http(self, context: Context, mode: HTTPMode) -> Layer:
        http_layer = GuardedHttp(context, mode, self._advice)
        state = connection_of(context.client)
        state.unsent, state.ahead = http_layer.unsent, http_layer.ahead
        return http_layer

    def _http_or_refuse(self, context: Context, state: Connection, data: bytes, *, inside_tls: bool) -> Layer | None:
        if inside_tls and context.client.alpn == b"h2":
            return self._http(context, HTTPMode.transparent)
        looks = starts_like_http(data)
        if looks is None:
            return None
        if looks:
            return self._http(context, HTTPMode.transparent)
        if not inside_tls and state.denied is None and state.carried is Protocol.TCP:
            return self._raw(context, state)
        if state.denied is None:
            request = Request(
                RequestLayer.TCP,
                destination_of(state),
                state.port,
                Protocol.TCP,
                tls=inside_tls,
                sni=sni_of(context.client),
            )
            attempt = attempt_of(context.client)
            decision = attempt.judge_silently(request)
            if decision.allowed:  # as raw TCP; but this came inside TLS that was opened because HTTP was agreed on
                decision = deny(Reason.PROTOCOL_NOT_ALLOWED, "the bytes are neither TLS nor HTTP")
            state.denied = attempt.refuse(request, decision, state)
        return Refuse(context)

    def _raw(self, context: Context, state: Connection) -> Layer:
        """Bytes pass as they are. `ignore` keeps mitmproxy from storing every one of them."""
        state.opaque = True
        state.carried = Protocol.TCP
        state.unfinished_since = None
        return layers.TCPLayer(context, ignore=True)

    # -- CONNECT

    def http_connect(self, flow: http.HTTPFlow) -> None:
        attempt, state = attempt_of(flow.client_conn), connection_of(flow.client_conn)
        host, port = observe_host(flow.request.host), flow.request.port
        raw = attempt.judge_silently(Request(RequestLayer.CONNECT, host, port, Protocol.TCP))
        carried = Protocol.HTTP if _is_taken_for_http(attempt, raw, host, port) else Protocol.TCP
        request = Request(RequestLayer.CONNECT, host, port, carried, method="CONNECT")
        state.protocol = "connect"
        decision = attempt.judge(request, state)
        if not decision.allowed and (port != _TLS_PORT or isinstance(host, Unparsed)):
            flow.response = responses.refusal(decision, request, attempt.standing.told)
            return
        state.destination, state.port, state.carried = host, port, carried
        self._note_unfinished_since(state, not decision.allowed or carried is Protocol.HTTP)
        if isinstance(host, Host):
            flow.request.data.host = host.text
        if not decision.allowed:
            state.denied = decision

    # -- TLS

    def tls_clienthello(self, data: tls.ClientHelloData) -> None:
        client = data.context.client
        attempt, state = attempt_of(client), connection_of(client)
        data.establish_server_tls_first = False
        state.sni = data.client_hello.sni
        if state.denied is not None:
            return
        host, port = destination_of(state), state.port
        speaks_http = any(offer in _HTTP_ALPN for offer in data.client_hello.alpn_protocols)
        raw = state.carried is Protocol.TCP and not speaks_http
        passes = raw or (isinstance(host, Host) and port is not None and not attempt.standing.inspects(host, port))
        request = Request(
            RequestLayer.TLS,
            host,
            port,
            Protocol.TCP if raw else Protocol.HTTP,
            tls=True,
            sni=server_name(data.client_hello),
        )
        decision = attempt.judge(request, state, quiet=not passes)
        if not decision.allowed:
            state.denied = decision
        elif passes:
            state.opaque = True
            data.ignore_connection = True
        else:
            state.carried = Protocol.HTTP

    def tls_start_client(self, data: tls.TlsData) -> None:
        """HTTP/1.1 where the client offers it: through the proxy it is several times as fast as HTTP/2."""
        if isinstance(sni_of(data.context.client), Unparsed):
            data.context.client.sni = None  # it was denied, and no certificate can be made for it
        offers = data.context.client.alpn_offers
        for protocol in _HTTP_ALPN:
            if protocol in offers:
                data.context.client.alpn = protocol
                return

    def tls_start_server(self, data: tls.TlsData) -> None:
        """Offer upstream what the client speaks, and verify the name that was judged, not the one the client wrote."""
        server = cast(connection.Server, data.conn)
        server.alpn_offers = (b"h2",) if data.context.client.alpn == b"h2" else (b"http/1.1",)
        if server.address is not None:
            host = observe_host(server.address[0])
            if isinstance(host, Host) and host.address is None:
                server.sni = host.text

    def tls_failed_server(self, data: tls.TlsData) -> None:
        state = connection_of(data.context.client)
        state.error = f"tls_failed: {data.conn.error}"

    # -- HTTP

    def requestheaders(self, flow: http.HTTPFlow) -> Coroutine[Any, Any, None] | None:
        """Judge a request. What is returned is to be awaited: its host has to be looked up."""
        attempt, state = attempt_of(flow.client_conn), connection_of(flow.client_conn)
        request = http_request(flow, state)
        exchange = flow.metadata[_EXCHANGE] = Exchange(request)
        flow.request.stream = False
        state.error = state.refused_dial = None
        if (fault := flow.error.msg if flow.error is not None else find_fault(flow.request)) is not None:
            decision = attempt.refuse(request, deny(Reason.MALFORMED_REQUEST, fault), state)
        elif state.denied is not None:
            written = attempt.repeat(request, state.denied, state)
            decision = state.denied if written.allowed else written
        else:
            of_registry = bool(attempt.standing.registries(request))
            decision = attempt.judge(request, state, quiet=of_registry)
            if decision.allowed and of_registry:
                return self._ask_registry(flow, exchange)
        if not decision.allowed:
            _refuse(flow, exchange, decision, attempt)
            return None
        return self._pass_on(flow, exchange, decision)

    async def _ask_registry(self, flow: http.HTTPFlow, exchange: Exchange) -> None:
        """Of a registry nothing passes but what is asked for in a way that is known, and allowed."""
        attempt, state = attempt_of(flow.client_conn), connection_of(flow.client_conn)
        state.open.add(exchange)  # from now on: the client may go away meanwhile
        exchange.request, outcome = await self._registries.answer(attempt, state, exchange.request, flow.request)
        if isinstance(outcome, Decision):
            _refuse(flow, exchange, outcome, attempt)
            return
        if isinstance(outcome, Forwarded):
            if (waiting := self._pass_on(flow, exchange, outcome.decision)) is not None:
                await waiting
            return
        if isinstance(outcome, Failed):
            exchange.failed = f"{outcome.code}: {outcome.message}"
            flow.response = responses.failure(outcome.code, outcome.message, exchange.request)
        else:
            if (limit := await attempt.reserve(exchange, len(outcome.response.raw_content or b""))) is not None:
                _refuse(flow, exchange, attempt.refuse(exchange.request, limit, state), attempt)
                return
            exchange.served = True
            attempt.rest(state)
            exchange.traffic.received = exchange.reserved
            flow.response = outcome.response
            attempt.count(exchange.request, outcome.decision)
        flow.request.headers.pop("expect", None)

    def _pass_on(self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision) -> Coroutine[Any, Any, None] | None:
        attempt, request = attempt_of(flow.client_conn), exchange.request
        assert isinstance(request.host, Host)
        flow.request.data.host = request.host.text
        resolved = self._resolver.known(request.host, attempt.standing.hosts)
        if resolved is None:
            connection_of(flow.client_conn).open.add(exchange)  # meanwhile it may be that it is not allowed any more
            return self._look_up_and_forward(flow, exchange, decision)
        self._forward(flow, exchange, decision, resolved)
        return None

    async def _look_up_and_forward(self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision) -> None:
        attempt, host = attempt_of(flow.client_conn), exchange.request.host
        assert isinstance(host, Host)
        try:
            resolved = await self._resolver.resolve(host, attempt.standing.hosts, attempt.lookups)
        except ResolutionFailed as error:
            exchange.failed = f"dns_failed: {error}"
            flow.request.headers.pop("expect", None)
            flow.response = responses.failure("dns_failed", str(error), exchange.request)
            return
        self._forward(flow, exchange, decision, resolved)

    def _forward(
        self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision, resolved: tuple[Resolved, ...]
    ) -> None:
        """Vet the addresses, so that a private one gets a readable answer, and let the request pass."""
        attempt, state, request = attempt_of(flow.client_conn), connection_of(flow.client_conn), exchange.request
        assert isinstance(request.host, Host)
        vetted = vet(attempt, state, request.host, request.port, Protocol.HTTP, resolved)
        if isinstance(vetted, Decision):
            _refuse(flow, exchange, vetted, attempt)
            return
        attempt.count(request, decision)
        state.open.add(exchange)
        state.sending.add(exchange)
        remove_headers_for_us(flow.request.headers)
        flow.request.stream = exchange.count_sent

    def request(self, flow: http.HTTPFlow) -> None:
        """All of it has been sent, or it was answered here."""
        connection_of(flow.client_conn).sending.discard(flow.metadata.get(_EXCHANGE))

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        exchange = flow.metadata[_EXCHANGE]
        if flow.response is not None and flow.response.status_code != 101 and not exchange.answered_here:
            flow.response.stream = exchange.count_received

    def response(self, flow: http.HTTPFlow) -> None:
        if flow.websocket is None:
            self._end_exchange(flow)
        else:  # it ends with its connection
            flow.metadata[_EXCHANGE].status = 101

    def error(self, flow: http.HTTPFlow) -> None:
        exchange, state = flow.metadata.get(_EXCHANGE), connection_of(flow.client_conn)
        if exchange is None:
            return
        state.sending.discard(exchange)
        if state.refused_dial is not None:
            exchange.refused = state.refused_dial
        elif flow.error is not None and exchange.failed is None:
            exchange.given_up = CLIENT_GAVE_UP in flow.metadata
            what = "client_closed" if exchange.given_up else "upstream_failed"
            exchange.failed = state.error or f"{what}: {flow.error.msg}"
        self._end_exchange(flow)

    def count_relayed(self, flow: http.HTTPFlow, sent: bool, size: int) -> None:
        """Count what crosses a WebSocket. It ends with its connection."""
        traffic = flow.metadata[_EXCHANGE].traffic
        if sent:
            traffic.sent += size
        else:
            traffic.received += size

    def _end_exchange(self, flow: http.HTTPFlow) -> None:
        exchange, state = flow.metadata.get(_EXCHANGE), connection_of(flow.client_conn)
        if exchange not in state.open:
            return
        state.open.discard(exchange)
        attempt_of(flow.client_conn).release(exchange)
        if exchange.refused is not None:
            return
        exchange.status = flow.response.status_code if flow.response is not None else None
        peer = flow.server_conn.peername
        attempt_of(flow.client_conn).write_end(
            state,
            exchange,
            error=exchange.failed,
            address=peer[0] if peer else None,
        )

    # -- what ends without a response from upstream

    def _note_unfinished(self, context: Context, unfinished: bool) -> None:
        """From when on the connection is waiting for the rest of something; `Handler` does not wait for ever."""
        self._note_unfinished_since(connection_of(context.client), unfinished)

    @staticmethod
    def _note_unfinished_since(state: Connection, unfinished: bool) -> None:
        if not unfinished:
            state.unfinished_since = None
        elif state.unfinished_since is None:
            state.unfinished_since = time.monotonic()

    def _note_no_hello(self, context: Context, why: str) -> None:
        self._note_malformed(context, why, RequestLayer.TLS)

    def _note_malformed(self, context: Context, why: str, where: RequestLayer = RequestLayer.HTTP) -> None:
        """Write that bytes were refused of which no request could be made."""
        attempt, state = attempt_of(context.client), connection_of(context.client)
        tls = where is RequestLayer.TLS
        request = Request(where, destination_of(state), state.port, tls=tls, sni=sni_of(context.client))
        attempt.refuse(request, deny(Reason.MALFORMED_REQUEST, why), state)

    def refuse_malformed(self, context: Context, why: str) -> http.Response:
        self._note_malformed(context, why)
        return responses.malformed(why, attempt_of(context.client).standing.told)

    def answer_failure(self, flow: http.HTTPFlow, message: str) -> http.Response:
        """The response to a request that was not forwarded, or that no response has come to. `error` ran before."""
        attempt, exchange = attempt_of(flow.client_conn), flow.metadata.get(_EXCHANGE)
        if exchange is None:
            state = connection_of(flow.client_conn)
            attempt.refuse(http_request(flow, state), deny(Reason.MALFORMED_REQUEST, message), state)
            return responses.malformed(message, attempt.standing.told)
        if exchange.refused is not None:
            if exchange.refused.reason is Reason.MALFORMED_REQUEST:
                return responses.malformed(exchange.refused.detail, attempt.standing.told)
            return responses.refusal(exchange.refused, exchange.request, attempt.standing.told)
        code, _, why = (exchange.failed or f"upstream_failed: {message}").partition(": ")
        return responses.failure(code, why, exchange.request)

    # -- the end

    def client_disconnected(self, client: connection.Client) -> None:
        """The end of a connection that was passed through unread, and of exchanges that had none of their own."""
        attempt, state = attempt_of(client), connection_of(client)
        for exchange in list(state.open):
            state.open.discard(exchange)
            attempt.release(exchange)
            if exchange.refused is None:
                exchange.given_up |= exchange.status is None
                attempt.write_end(state, exchange, error=exchange.failed)
        if state.opaque:
            attempt.write_end(state, error=state.error)

    def tcp_start(self, flow: tcp.TCPFlow) -> None:
        raise AssertionError("no layer that stores what it relays is ever chosen")


def _is_taken_for_http(attempt: Attempt, raw: Decision, host: Host | Unparsed, port: int) -> bool:
    """Whether a connection that is not opened as raw TCP is judged as one of HTTP.

    Not where a change of policy took raw TCP away, and HTTP was never allowed: then that is why it is denied.
    """
    if raw.allowed:
        return False
    taken = Request(RequestLayer.CONNECT, host, port, Protocol.HTTP)
    return raw.reason is not Reason.POLICY_REVOKED or attempt.judge_silently(taken).allowed


def _refuse(flow: http.HTTPFlow, exchange: Exchange, decision: Decision, attempt: Attempt) -> None:
    exchange.refused = decision
    attempt.rest(connection_of(flow.client_conn))
    flow.request.headers.pop("expect", None)  # or a client that asks first would be told to go on
    flow.response = responses.refusal(decision, exchange.request, attempt.standing.told)


__all__ = ["PolicyAddon"]
