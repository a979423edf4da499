"""The outermost frame of every HTTP request: whatever happens inside, one answer goes out, and is counted.

Owns: what becomes of exceptions, and the headers that every answer has. Must not: know routes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from pydantic import ValidationError
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox.service.bodies import ClientGone
from sandbox.service.connections import MAX_HEAD_BYTES
from sandbox.service.errors import HttpError, head_too_large, http_error, internal_error
from sandbox.service.metrics import Metrics
from sandbox.service.places import Place

CLIENT_LEFT = 499  # of nginx's making; there is no answer, and so no status
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 1 << 20
_log = logging.getLogger("sluicegate.service")


class Edge:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        try:
            if _head_bytes(scope) > MAX_HEAD_BYTES:
                raise head_too_large(MAX_HEAD_BYTES)
            await self._app(scope, exchange.receive, exchange.send)
        except (ClientGone, ClientDisconnect):
            exchange.status = CLIENT_LEFT
        except Exception as error:  # noqa: BLE001 - the edge: what is nobody else's fault is ours
            await exchange.end(http_error(error) or _ours(error, scope))
        finally:
            self._metrics.request(_route(scope), scope["method"], exchange.status or CLIENT_LEFT)


class _Exchange:
    """One request and its answer, as far as they have come."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._asked = False
        self._whole = not _has_body(scope)
        self.status = 0

    async def receive(self) -> Message:
        self._asked = True
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._whole = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["cache-control"] = "no-store"
            headers["x-content-type-options"] = "nosniff"
            if not self._whole:
                headers["connection"] = "close"
        await self._send(message)

    async def end(self, error: HttpError) -> None:
        """Answer with an error, where nothing else has been said; else break the connection off."""
        if self.status:
            raise error
        response = error.response()
        lingers = not self._whole and (self._asked or not _expects_continue(self._scope))
        await self.send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
        if lingers:
            await self._linger()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        """Who still sends while it is closed upon may never see the answer: let it end, for a moment."""
        place = self._scope.get("state", {}).get("place")
        if isinstance(place, Place):
            place.give_way()
        left = _LINGER_BYTES
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while not self._whole and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass


def _ours(error: Exception, scope: Scope) -> HttpError:
    reference = secrets.token_hex(4)
    # What a value was that does not fit a model may be what a program printed.
    shown = error if not isinstance(error, ValidationError) else ValueError("a value that does not fit its model")
    told = shown.with_traceback(error.__traceback__)
    _log.error("internal error %s at %s %s", reference, scope["method"], _route(scope), exc_info=told)
    return internal_error(reference)


def _route(scope: Scope) -> str:
    """The route as it is declared. A path that is none has no name of its own: anybody can ask for a new one."""
    return getattr(scope.get("route"), "path", None) or "none"


def _head_bytes(scope: Scope) -> int:
    """One that came in one piece was read whole, whatever its size."""
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(len(name) + len(value) for name, value in scope["headers"])


def _has_body(scope: Scope) -> bool:
    given = dict(scope["headers"])
    return given.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in given


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])
