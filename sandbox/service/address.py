"""Where a service listens, by the operator's choice, and whether it may under a policy.

Owns: what is refused there. Must not: accept connections.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.destinations import Host, InvalidHost, parse_host
from sandbox.policy_file import LoadedPolicy
from sandbox.service.auth import Door
from sandbox.service.listening import UnixSocket, tcp_socket, tls_context
from sandbox.state import InvalidSettings


@dataclass(frozen=True, slots=True)
class Address:
    """`uds`, else `host` and `port`. `tls` are the files of a certificate and of its key.

    `allowed_hosts` are names that clients use, beside those of loopback and the address itself.
    """

    uds: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    tls: tuple[Path, Path] | None = None
    allowed_hosts: tuple[str, ...] = ()
    accept_tokens_in_plaintext: bool = False

    def check(self, loaded: LoadedPolicy) -> None:
        """Raises `InvalidSettings` where this may not be under a policy."""
        if self.uds is not None:
            return
        if not loaded.policy.tenants:
            raise InvalidSettings(
                "over TCP every request needs a token, and the policy has no `tenants`\nhint: write `tenants` into the "
                "policy, or serve a unix socket"
            )
        if self.tls is None and not self._is_loopback() and not self.accept_tokens_in_plaintext:
            raise InvalidSettings(
                f"`--host {self.host}` can be reached from elsewhere, and tokens could be read on the way\nhint: give "
                "`--tls-cert` and `--tls-key`; or, where something else encrypts, `--accept-tokens-in-plaintext`"
            )

    def door(self) -> Door:
        """What requests are asked for there. Raises `InvalidSettings` for a name that is none."""
        hosts = set()
        for name in self.allowed_hosts:
            try:
                hosts.add(parse_host(name))
            except InvalidHost as error:
                raise InvalidSettings(
                    f"`--allowed-host` is `{name!a}`, which is no host: {error}\nhint: write `runner.example`"
                ) from error
        if self.uds is None and (own := self._host()).address is not None and not own.address.is_unspecified:
            hosts.add(own)
        return Door(self.uds is not None, frozenset(hosts))

    @contextlib.contextmanager
    def bound(self) -> Iterator[Bound]:
        """Hold the socket. Raises `InvalidSettings`, `CannotListen`."""
        if self.uds is not None:
            with contextlib.closing(UnixSocket(self.uds)) as made:
                yield Bound(made.socket, f"unix:{self.uds}", None)
            return
        tls = None if self.tls is None else tls_context(*self.tls)
        with tcp_socket(self.host, self.port) as made:
            host, port = made.getsockname()[:2]
            place = f"[{host}]" if ":" in host else host
            yield Bound(made, f"{'http' if tls is None else 'https'}://{place}:{port}", tls)

    def _host(self) -> Host:
        try:
            return parse_host("127.0.0.1" if self.host == "localhost" else self.host)
        except InvalidHost as error:
            raise InvalidSettings(
                f"`--host` is `{self.host!a}`, which is no address\nhint: write `127.0.0.1`"
            ) from error

    def _is_loopback(self) -> bool:
        address = self._host().address
        return address is not None and address.is_loopback


@dataclass(frozen=True, slots=True)
class Bound:
    """A socket that is bound, and does not listen. `name` is how clients call it."""

    socket: socket.socket
    name: str
    tls: ssl.SSLContext | None
