"""Who waits for the answer to a call over HTTP: when nobody does any more, the call is cancelled.

A request with an idempotency key may come again when its connection was lost, and then waits for the same answer. Its
call is cancelled only when nobody has come for a while.

Owns: the watch over connections that wait. Must not: know what is asked or answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from starlette.types import Receive

from sandbox.owners import Owner
from sandbox.service.bodies import ClientGone

RETURN_SECONDS = 5.0


class Abandonable(Protocol):
    def abandon(self) -> None: ...


class _Party:
    """Those who wait for one answer, and the calls that were begun for them."""

    def __init__(self) -> None:
        self.waiting = 0
        self.calls: list[Abandonable] = []
        self.giving_up: asyncio.TimerHandle | None = None


class Attendance:
    """Keeps the answers of calls and those who wait for them together."""

    def __init__(self, return_seconds: float = RETURN_SECONDS) -> None:
        self._return_seconds = return_seconds
        self._parties: dict[tuple[Owner, str], _Party] = {}

    async def answer[T](
        self, receive: Receive, call: Abandonable, answer: Awaitable[T], owner: Owner, key: str | None
    ) -> T:
        """The answer of `call`. Raises `ClientGone` when the client leaves first: the call is then cancelled."""
        if key is None:
            try:
                return await unless_gone(receive, answer)
            except (ClientGone, asyncio.CancelledError):
                call.abandon()
                raise
        place = (owner, key)
        party = self._parties.setdefault(place, _Party())
        if party.giving_up is not None:
            party.giving_up.cancel()
            party.giving_up = None
        party.waiting += 1
        party.calls.append(call)
        left = False
        try:
            return await unless_gone(receive, answer)
        except (ClientGone, asyncio.CancelledError):
            left = True
            raise
        finally:
            party.waiting -= 1
            if not party.waiting:
                if left:
                    loop = asyncio.get_running_loop()
                    party.giving_up = loop.call_later(self._return_seconds, self._give_up, place, party)
                else:
                    self._parties.pop(place, None)

    def _give_up(self, place: tuple[Owner, str], party: _Party) -> None:
        self._parties.pop(place, None)
        for call in party.calls:
            call.abandon()


async def unless_gone[T](receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives. Raises `ClientGone` when the client leaves first; `work` is then not waited for any more."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        leaving.cancel()
        working.cancel()


async def gone(receive: Receive) -> None:
    """Return once the client has left. What is left of its body is not looked at."""
    while (await receive())["type"] != "http.disconnect":
        pass
