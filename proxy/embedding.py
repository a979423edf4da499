"""mitmproxy, embedded: one master, its options, and the servers of each attempt.

Owns: what of mitmproxy is used and how it is set. Must not: know the control channel.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Mapping
from typing import Any

from mitmproxy import certs, options
from mitmproxy.addons import core, proxyserver, tlsconfig
from mitmproxy.master import Master

from proxy.addon import PolicyAddon
from proxy.amending import amend, revoke
from proxy.attempts import Attempt
from proxy.audit import AuditLog
from proxy.control import ProxyConfig
from proxy.listeners import AttemptServer, DnsDatagrams, Hook, make_mode
from proxy.network import Grant
from proxy.packages.registry import Registries
from proxy.resolver import Resolver
from proxy.roots import host_ca_bundle

_CONNECTION_IDLE_SECONDS = 600


class Embedding:
    """One mitmproxy master without listeners of its own. A process has one at most: mitmproxy's `ctx` is global."""

    def __init__(self, config: ProxyConfig, resolver: Resolver, certificates_kept: int) -> None:
        logging.getLogger("mitmproxy").setLevel(logging.ERROR)
        certs.CertStore.STORE_CAP = certificates_kept
        roots = config.upstream_ca_file or host_ca_bundle()
        self._master = Master(options.Options(mode=[]))
        self._tls = tlsconfig.TlsConfig()
        self._master.addons.add(core.Core(), proxyserver.Proxyserver(), self._tls)
        self._master.options.update(
            confdir=str(config.authority_dir),
            server=False,
            connection_strategy="lazy",  # eager dials before it is known what is asked
            upstream_cert=False,  # reading the upstream's certificate would mean dialling first
            rawtcp=False,
            http2=True,
            websocket=True,
            validate_inbound_headers=True,
            ssl_insecure=False,
            ssl_verify_upstream_trusted_ca=None if roots is None else str(roots),  # None: mitmproxy's own bundle
            tcp_timeout=_CONNECTION_IDLE_SECONDS,
        )
        self._registries = Registries(resolver, roots)
        self._addon = PolicyAddon(resolver, self._registries)
        self._hooks = _hooks(self._addon, self._tls)

    def close(self) -> None:
        self._registries.close()

    def facts(self, grant: Grant, registry: str, wanted: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
        """By project: what was read just now of these files of it."""
        return self._registries.known(grant, registry, wanted)

    async def amend(self, attempt: Attempt, grant: Grant | None) -> None:
        """Let an attempt do what this grant allows too, and no more; None: nothing. Returns when all else is cut."""
        if await amend(attempt, grant):
            if grant is not None:
                self._registries.expect(grant)
            await self._registries.recall(attempt)

    def revoke(self, attempt: Attempt) -> None:
        """Let an attempt do nothing any more, at once."""
        revoke(attempt)

    async def serve(
        self, grant: Grant, audit: AuditLog, listeners: list[tuple[str, socket.socket]]
    ) -> tuple[Attempt, list[AttemptServer], list[DnsDatagrams]]:
        """Accept on an attempt's listeners. On an error nothing of them is left running."""
        attempt = Attempt(grant, audit)
        self._registries.expect(grant)
        servers: list[AttemptServer] = []
        datagrams: list[DnsDatagrams] = []
        try:
            for kind, sock in listeners:
                if kind.startswith("dns-udp"):
                    datagrams.append(DnsDatagrams(sock, attempt))
                    continue
                server = AttemptServer(self._master, sock, make_mode(attempt, kind), self._hooks, self._addon.top_layer)
                await server._start()  # `start` would log every listener
                servers.append(server)
        except BaseException:
            for datagram in datagrams:
                datagram.close()
            for server in servers:
                await server._stop()
            raise
        return attempt, servers, datagrams


def _hooks(addon: PolicyAddon, tls: tlsconfig.TlsConfig) -> dict[str, list[Hook]]:
    """The hooks that are dispatched, by mitmproxy's names, each with its functions in order."""
    ours: dict[str, list[Hook]] = {
        name: [getattr(addon, name)]
        for name in (
            "next_layer",
            "http_connect",
            "tls_clienthello",
            "tls_start_client",
            "tls_start_server",
            "tls_failed_server",
            "requestheaders",
            "request",
            "responseheaders",
            "response",
            "error",
            "server_connect",
            "server_connected",
            "server_connect_error",
            "server_disconnected",
            "client_disconnected",
            "tcp_start",
        )
    }
    ours["tls_start_client"].append(tls.tls_start_client)
    ours["tls_start_server"].append(tls.tls_start_server)
    return ours
