"""Who calls over HTTP: settled before anything of a request is read beyond its head.

Owns: the rules of `Host`, `Origin`, `Authorization`, `Sluicegate-User` and `Sluicegate-Working-Directory`. Must not:
know routes, but for the one that is open to all.

On a unix socket, its mode says who may connect. Where the policy has tenants, a token says whose a request is, on every
transport. A web page can make its reader's browser send requests to a loopback address, and under a host name of its
own: hence `Origin` and `Host`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.destinations import Host, observe_authority
from sandbox.owners import DEFAULT_USER, Caller, InvalidUser, check_user
from sandbox.policy_file import LoadedPolicy
from sandbox.service.errors import HttpError, unauthorized
from sandbox.service.places import Place
from sandbox.service.service import Service
from sandbox.service.visits import Visits
from sandbox.tokens import Bearer, TokenTable, hash_token

OPEN_PATH = "/healthz"
_LOCAL_NAME = "localhost"
_SCHEME = b"bearer "
_MAX_TOKEN_BYTES = 512
_MAX_PATH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Door:
    """How requests come in. `hosts` are the names, beside loopback's, that the service is asked for under, over TCP."""

    is_socket: bool
    hosts: frozenset[Host] = frozenset()


class Gate:
    """Lets in who may, and puts two things in the request's state: `caller`, the `Caller`; and `known`, to ask later
    whether the same may still come in.
    """

    def __init__(self, app: ASGIApp, *, service: Service, door: Door, visits: Visits) -> None:
        self._app = app
        self._service = service
        self._door = door
        self._visits = visits
        self._table: tuple[LoadedPolicy, TokenTable] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == OPEN_PATH:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope["headers"])
        self._check_origin(headers)
        caller, known = self._admitted(headers)
        state = scope.setdefault("state", {})
        state.update(caller=caller, known=known)
        holder = caller.tenant or caller.user
        if isinstance(place := state.get("place"), Place):
            place.show(holder)
        await self._visits.receive(self._app, scope, receive, send, holder=holder, known=known)

    def _check_origin(self, headers: Headers) -> None:
        if headers.all(b"origin"):
            raise HttpError(403, "origin_not_allowed", "requests of web pages are not answered: `Origin` is set")
        if self._door.is_socket:
            return
        named = headers.all(b"host")
        host = observe_authority(named[0].decode("latin-1"))[0] if len(named) == 1 else None
        if not isinstance(host, Host) or not (_is_loopback(host) or host in self._door.hosts):
            raise HttpError(
                421, "host_not_allowed", "this service is not asked for under the name in `Host`\nhint: the operator "
                "names it by `sluicegate serve --allowed-host NAME`",
            )  # fmt: skip

    def _admitted(self, headers: Headers) -> tuple[Caller, Callable[[], bool]]:
        if not self._needs_token:
            return self._caller(headers, None), lambda: not self._needs_token
        sha256, bearer = self._bearer(headers)

        def known() -> bool:
            return self._needs_token and self._tokens.find_hash(sha256) == bearer

        return self._caller(headers, bearer), known

    @property
    def _needs_token(self) -> bool:
        return bool(self._service.loaded.policy.tenants) or not self._door.is_socket

    @property
    def _tokens(self) -> TokenTable:
        """Those of the policy in force now."""
        loaded = self._service.loaded
        if self._table is None or self._table[0] is not loaded:
            self._table = (loaded, TokenTable(loaded.policy))
        return self._table[1]

    def _caller(self, headers: Headers, bearer: Bearer | None) -> Caller:
        if bearer is not None:
            user = self._user(headers) or bearer.user or DEFAULT_USER
            if bearer.user and user != bearer.user:
                raise HttpError(403, "user_not_allowed", "this token is another user's than `Sluicegate-User` names")
            caller = Caller(bearer.tenant, user, bearer.admin)
        else:
            named = self._user(headers)
            caller = Caller("", named or DEFAULT_USER, admin=named is None)
        directory = headers.one(b"sluicegate-working-directory")
        if directory is None:
            return caller
        return Caller(caller.tenant, caller.user, caller.admin, _directory(directory))

    def _bearer(self, headers: Headers) -> tuple[str, Bearer]:
        """The hash of the token, and whose it is."""
        given = headers.all(b"authorization")
        if len(given) == 1 and given[0][: len(_SCHEME)].lower() == _SCHEME and len(given[0]) <= _MAX_TOKEN_BYTES:
            sha256 = hash_token(given[0][len(_SCHEME) :].strip().decode("latin-1"))
            bearer = self._tokens.find_hash(sha256)
            if bearer is not None:
                return sha256, bearer
        raise unauthorized()

    def _user(self, headers: Headers) -> str | None:
        name = headers.one(b"sluicegate-user")
        if name is None:
            return None
        try:
            return check_user(name)
        except InvalidUser as error:
            raise HttpError(422, "invalid_user", f"`Sluicegate-User`: {error}") from error


class Headers:
    """The headers of a request, as they came."""

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._pairs = list(pairs)

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._pairs if key == name]

    def one(self, name: bytes) -> str | None:
        """The one value of a header, None without it.

        Raises `HttpError` when it is no text in UTF-8, and when there are several: which would count?
        """
        values = self.all(name)
        if len(values) > 1:
            raise HttpError(422, "invalid_request", f"the header `{name.decode()}` stands there {len(values)} times")
        try:
            return values[0].decode() if values else None
        except UnicodeDecodeError as error:
            raise HttpError(422, "invalid_request", f"the header `{name.decode()}` is not UTF-8") from error


def _is_loopback(host: Host) -> bool:
    return host.text == _LOCAL_NAME or (host.address is not None and host.address.is_loopback)


def _directory(text: str) -> Path:
    """Whether the caller may work there is the service's to say, of each call."""
    if not text.startswith("/") or len(os.fsencode(text)) >= _MAX_PATH_BYTES:
        raise HttpError(422, "invalid_request", "`Sluicegate-Working-Directory` is not an absolute path")
    return Path(text)
