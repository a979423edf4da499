"""MCP over streamable HTTP, for a path of the service.

The SDK keeps a session for clients of the revisions that have a handshake, and answers each request by itself for later
ones. A session belongs to the tenant and user that made it; to anybody else its id does not exist. Whoever calls is
looked at anew with every request: the middleware before this one has put the `Caller` into the request's state, and
beside it how to ask later whether that is still so.

Closing a response stream cancels what it waits for. The SDK does that for the later revision; for the earlier ones it
is done here, since without an event store nothing of such an answer could be had again.

Owns: what becomes of each request, and the end of sessions. Must not: judge who may call, or look at `Host` and
`Origin`; what stands before it does, and ends the requests of those who may not call any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sandbox.owners import Caller, Owner
from sandbox.service.bodies import read_body
from sandbox.service.errors import HttpError, unauthorized
from sandbox.service.mcp_server import GONE, Context, make_server
from sandbox.service.mcp_sessions import Session, SessionBounds, Sessions, TooManySessions
from sandbox.service.mcp_wire import error_line, in_use, read_message, request_key
from sandbox.service.model import Draining
from sandbox.service.service import Service
from sandbox.strict_json import NotJson

MAX_BODY_BYTES = 4 * 1024 * 1024
_RETRY_SECONDS = 60
_LISTENER_KEY = "_GET_stream"  # the SDK has the stream that a session listens to under this id
_log = logging.getLogger("sluicegate.service")


def mcp_asgi(service: Service) -> McpApp:
    """The application that serves a service's tools. Enter its `run()` for as long as it is called."""
    return McpApp(service)


class McpApp:
    """An ASGI application."""

    def __init__(
        self, service: Service, *, bounds: SessionBounds | None = None, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:  # fmt: skip
        async def find_service() -> Service:
            return service

        self._server = make_server(find_service, _caller)
        self._bounds = bounds or SessionBounds()
        self._max_body_bytes = max_body_bytes
        self._sessions = Sessions(self._bounds)
        self._manager: StreamableHTTPSessionManager | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve while this is open. At its end every session ends, and cancels what it waits for."""
        over = asyncio.Event()
        ready: asyncio.Future[StreamableHTTPSessionManager] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep(ready, over))
            self._manager, self._tasks = await ready, tasks
            try:
                yield
            finally:
                self._manager = self._tasks = None
                over.set()

    def recheck(self) -> None:
        """End the sessions of those who may not call any more. To be called whenever another policy is in force."""
        if self._tasks is not None:
            for session in self._sessions.withdrawn():
                self._tasks.create_task(self._end(session))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises `RuntimeError` outside `run()`, `HttpError`, `ClientGone`."""
        if self._manager is None:
            raise RuntimeError("an `McpApp` answers inside its `run()` only")
        exchange = _Exchange(scope, receive, send)
        message: object = None
        if exchange.method == "POST":
            await exchange.read(self._max_body_bytes)
            try:
                message = read_message(exchange.body)
            except NotJson as error:
                await exchange.refuse(400, error_line(None, PARSE_ERROR, f"the body is not JSON: {error}"))
                return
        headers = Headers(scope=exchange.scope)
        if headers.get("mcp-protocol-version", HANDSHAKE_PROTOCOL_VERSIONS[0]) not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._pass_on(exchange)
            return
        session_id = headers.get("mcp-session-id")
        if session_id is not None:
            session = self._sessions.find(session_id, exchange.caller.owner)
            if session is None:
                await exchange.refuse(404, error_line(None, INVALID_REQUEST, "there is no such session"))
        elif isinstance(message, dict) and message.get("method") == "initialize":
            session = await self._opened(exchange)
        else:
            session = None
            await self._pass_on(exchange)  # to be told that it needs one
        if session is not None:
            await self._answer_in(session, exchange, request_key(message))

    async def _opened(self, exchange: _Exchange) -> Session | None:
        """Room for a session. None, and that is answered, where there is none."""
        try:
            session, last = self._sessions.admit(exchange.caller.owner, exchange.known)
        except TooManySessions:
            line = error_line(None, INTERNAL_ERROR, "too many sessions are open, and none of yours is idle")
            await exchange.refuse(503, line, {"retry-after": str(_RETRY_SECONDS)})
            return None
        if last is not None:
            await self._end(last)
        return session

    async def _answer_in(self, session: Session, exchange: _Exchange, key: str | None) -> None:
        if key is not None and (key == _LISTENER_KEY or not session.claim(key)):
            await exchange.refuse(400, in_use(key))
            return
        session.known = exchange.known
        try:
            with session.used(listens=exchange.method == "GET"):
                opened = None if session.session_id else lambda name: self._sessions.name(session, name)
                await self._pass_on(exchange, opened)
        finally:
            if key is not None:
                session.release(key, abandoned=not exchange.whole)
            ended = exchange.method == "DELETE" and exchange.status == 200
            if ended or exchange.status == 404 or not session.session_id:
                self._sessions.forget(session)

    async def _pass_on(self, exchange: _Exchange, opened: Callable[[str], None] | None = None) -> None:
        """To the SDK. `opened` is told the id of a session that it opens."""
        if not exchange.known():
            raise unauthorized()  # a policy came into force while the body was read
        if self._manager is None:
            raise Draining("the service is about to end", retry_after_seconds=1.0)
        exchange.opened = opened
        state = {**exchange.scope["state"], GONE: exchange.gone}
        scope = {**exchange.scope, "state": state, "user": _user(exchange.caller.owner)}
        await self._manager.handle_request(scope, exchange.receive, exchange.send)

    async def _end(self, session: Session) -> None:
        """End a session as its client would."""
        self._sessions.forget(session)
        if self._manager is None or not session.session_id:
            return
        scope: Scope = {
            "type": "http", "method": "DELETE", "path": "/", "query_string": b"", "state": {},
            "headers": [(b"mcp-session-id", session.session_id.encode())], "user": _user(session.owner),
        }  # fmt: skip

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def unread(_: Message) -> None:
            pass

        try:
            await self._manager.handle_request(scope, nothing, unread)
        except Exception:  # noqa: BLE001 - it is forgotten, and idles to its end; the others must go on
            _log.exception("a session could not be ended")

    async def _keep(self, ready: asyncio.Future[StreamableHTTPSessionManager], over: asyncio.Event) -> None:
        manager = StreamableHTTPSessionManager(
            self._server,
            # The middleware before this one knows the names; the SDK would answer 421 to all of them.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=self._bounds.idle_seconds,
            max_request_body_size=self._max_body_bytes,
            max_sessions=None,
        )
        async with manager.run():
            ready.set_result(manager)
            await over.wait()


class _Exchange:
    """One request and its answer. `gone` is set when nobody reads that any more, `whole` when all of it is sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.caller: Caller = scope["state"]["caller"]
        self.known: Callable[[], bool] = scope["state"].get("known", lambda: True)
        self.gone = asyncio.Event()
        self.status = 0
        self.whole = False
        self.body = b""
        self.opened: Callable[[str], None] | None = None
        self._receive, self._send = receive, send
        self._unread = False

    async def read(self, max_bytes: int) -> None:
        """Read its body, which `receive` then gives once more. Raises `HttpError` 413, `ClientGone`."""
        try:
            self.body = await read_body(Request(self.scope, self._receive), max_bytes)
        except HttpError as error:
            raise HttpError(413, "too_large", f"a message of MCP has at most {max_bytes} bytes") from error
        self._unread = True

    async def receive(self) -> Message:
        if self._unread:
            self._unread = False
            return {"type": "http.request", "body": self.body, "more_body": False}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            name = Headers(raw=message["headers"]).get("mcp-session-id")
            if self.opened is not None and name is not None and self.status < 400:
                self.opened(name)
        else:
            self.whole = not message.get("more_body", False)
        await self._send(message)

    async def refuse(self, status: int, line: bytes, headers: dict[str, str] | None = None) -> None:
        response = Response(line, status, headers, "application/json")
        await response(self.scope, self.receive, self.send)


def _user(owner: Owner) -> AuthenticatedUser:
    """Whose a session is, to the SDK."""
    return AuthenticatedUser(AccessToken(token="", client_id=owner.tenant or "-", scopes=[], subject=owner.user))


def _caller(context: Context) -> Caller:
    assert context.request is not None
    caller: Caller = context.request.scope["state"]["caller"]
    return caller
