"""MCP over streamable HTTP, for a path of the service.

The SDK keeps a session for clients of the revisions that have a handshake, and answers each request by itself for later
ones. A session belongs to the tenant and user that made it; to anybody else its id does not exist. Whoever calls is
looked at anew with every request: the middleware before this one has put the `Caller` into the request's state.

Closing a response stream cancels what it waits for. The SDK does that for the later revision; for the earlier ones it
is done here, since without an event store nothing of such an answer could be had again.

Owns: the sessions, their number and their end. Must not: judge who may call, or look at `Host` and `Origin`; what
stands before it does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import Message, Receive, Scope, Send

from sandbox.owners import Caller
from sandbox.service.mcp_server import GONE, Context, make_server
from sandbox.service.service import Service

MAX_SESSIONS = 256
IDLE_SECONDS = 600.0
MAX_BODY_BYTES = 4 * 1024 * 1024


def mcp_asgi(service: Service) -> McpApp:
    """The application that serves a service's tools. Enter its `run()` for as long as it is called."""
    return McpApp(service)


class McpApp:
    """An ASGI application. A tenant has at most `max_sessions` sessions; one that idles for `idle_seconds` ends."""

    def __init__(
        self, service: Service, *, max_sessions: int = MAX_SESSIONS, idle_seconds: float = IDLE_SECONDS,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:  # fmt: skip
        async def find_service() -> Service:
            return service

        self._server = make_server(find_service, _caller)
        self._max_sessions, self._idle_seconds, self._max_body_bytes = max_sessions, idle_seconds, max_body_bytes
        self._managers: dict[str, asyncio.Future[StreamableHTTPSessionManager]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._over = asyncio.Event()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve while this is open. At its end every session ends, and cancels what it waits for."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                self._over.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises `RuntimeError` outside `run()`."""
        caller: Caller = scope["state"]["caller"]
        gone = asyncio.Event()

        async def listen() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            return message

        state = {**scope["state"], GONE: gone}
        token = AccessToken(token="", client_id=caller.tenant or "-", scopes=[], subject=caller.user)
        manager = await self._manager(caller.tenant)
        await manager.handle_request({**scope, "state": state, "user": AuthenticatedUser(token)}, listen, send)

    async def _manager(self, tenant: str) -> StreamableHTTPSessionManager:
        """The sessions of a tenant: it has a number of its own, so that it cannot take those of others."""
        if self._tasks is None:
            raise RuntimeError("an `McpApp` answers inside its `run()` only")
        if tenant not in self._managers:
            self._managers[tenant] = asyncio.get_running_loop().create_future()
            self._tasks.create_task(self._keep(self._managers[tenant]))
        return await asyncio.shield(self._managers[tenant])

    async def _keep(self, ready: asyncio.Future[StreamableHTTPSessionManager]) -> None:
        manager = StreamableHTTPSessionManager(
            self._server,
            # The middleware before this one knows the names; the SDK would answer 421 to all of them.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=self._idle_seconds,
            max_request_body_size=self._max_body_bytes,
            max_sessions=self._max_sessions,
        )
        async with manager.run():
            ready.set_result(manager)
            await self._over.wait()


def _caller(context: Context) -> Caller:
    assert context.request is not None
    caller: Caller = context.request.scope["state"]["caller"]
    return caller
