"""The requests that are open and may stay so for long: those with a body, those that wait for a call, and streams.

Each has a connection's place for as long as it is open. So nobody may have more of them open than could still be opened
by all: one tenant alone gets half of the places, two get a third each, and some are always left. And each ends when who
asked may not ask any more, since another policy is in force: as if its client had left.

Owns: who has how many of them open. Must not: judge who may call; it is told how to ask.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox.service.bodies import ClientGone
from sandbox.service.errors import unauthorized
from sandbox.service.model import Busy

_RETRY_SECONDS = 1.0
_QUICK_METHODS = ("GET", "HEAD", "DELETE")
_STREAMS = ("/events", "/mcp")  # how the paths end of what goes on after it has been answered


class Visits:
    """Those of one server. `most` is how many connections it may have."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._open: set[_Visit] = set()
        self._of: Counter[str] = Counter()

    async def receive(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, holder: str, known: Callable[[], bool]
    ) -> None:
        """Let `app` answer. `known` says later whether who asks still may; `holder` is in whose name it counts.

        Raises `Busy`, and 401 where it ends before its answer has begun.
        """
        if not _lasts(scope):
            await app(scope, receive, send)
            return
        self._admit(holder)
        visit = _Visit(receive, send, known)
        self._open.add(visit)
        try:
            await app(scope, visit.receive, visit.send)
            await visit.finish()
        except ClientGone:
            if visit.over.is_set() and not visit.begun:
                raise unauthorized() from None
            raise
        finally:
            self._open.discard(visit)
            self._of[holder] -= 1
            if not self._of[holder]:
                del self._of[holder]

    def recheck(self) -> None:
        """End those of who may not ask any more. To be called whenever another policy is in force."""
        for visit in self._open:
            if not visit.known():
                visit.end()

    def _admit(self, holder: str) -> None:
        left = max(0, self._most() - self._of.total())
        own = self._of[holder]
        if own >= left:
            raise Busy(
                "busy", f"`{holder}` has {own} requests open that last, and no more than {left} are left for all",
                _RETRY_SECONDS,
            )  # fmt: skip
        self._of[holder] += 1


class _Visit:
    """One request. `over` is set when it is ended here."""

    def __init__(self, receive: Receive, send: Send, known: Callable[[], bool]) -> None:
        self._receive, self._send = receive, send
        self.known = known
        self.over = asyncio.Event()
        self.begun = False
        self._whole = False
        self._receiving: set[asyncio.Future[Message]] = set()

    async def receive(self) -> Message:
        if self.over.is_set():
            return {"type": "http.disconnect"}
        receiving = asyncio.ensure_future(self._next())
        self._receiving.add(receiving)
        try:
            return await receiving
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.over.is_set() or (task is not None and task.cancelling()):
                raise
            return {"type": "http.disconnect"}
        finally:
            self._receiving.discard(receiving)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
        else:
            self._whole = not message.get("more_body", False)
        await self._send(message)

    def end(self) -> None:
        self.over.set()
        for receiving in self._receiving:
            receiving.cancel()

    async def finish(self) -> None:
        """See that an answer that was ended here has an end. Raises 401 where it has no beginning."""
        if not self.over.is_set() or self._whole:
            return
        if not self.begun:
            raise unauthorized()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> Message:
        return await self._receive()


def _lasts(scope: Scope) -> bool:
    return scope["method"] not in _QUICK_METHODS or scope["path"].endswith(_STREAMS)
