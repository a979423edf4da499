"""The sessions of MCP over HTTP: whose each is, what is asked in it, and which one ends where there is no room.

Owns: their number, and the ids of the requests that are open in each. Must not: know the SDK, which has the sessions
themselves, or end one; whoever asks for room is told which.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sandbox.owners import Owner

_ABANDONED_SECONDS = 15.0  # longer than the call of a client that left is given to end


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """How many sessions there may be, and for how long one may idle."""

    of_user: int = 32
    of_tenant: int = 256
    in_all: int = 1024
    idle_seconds: float = 600.0


class TooManySessions(Exception):
    """There is no room, and nothing of the same user's that could end for it."""


@dataclass(eq=False, slots=True)
class Session:
    """One session. `known` says whether who made it may still call; `session_id` is empty while it is opened."""

    owner: Owner
    known: Callable[[], bool]
    used_at: float
    session_id: str = ""
    asked: int = 0
    streams: int = 0
    _keys: set[str] = field(default_factory=set)

    def claim(self, key: str) -> bool:
        """Take a request's id. False when it is that of a request that has not ended."""
        if key in self._keys:
            return False
        self._keys.add(key)
        return True

    def release(self, key: str, *, abandoned: bool) -> None:
        """Give it back. `abandoned`: nobody waits for the answer any more, which may still come, and under this id."""
        if abandoned:
            asyncio.get_running_loop().call_later(_ABANDONED_SECONDS, self._keys.discard, key)
        else:
            self._keys.discard(key)

    @contextlib.contextmanager
    def used(self, *, listens: bool) -> Iterator[None]:
        """While a request is open in it. `listens`: it asks for nothing, and waits for what the server may say."""
        self.asked += not listens
        self.streams += listens
        try:
            yield
        finally:
            self.asked -= not listens
            self.streams -= listens
            self.used_at = asyncio.get_running_loop().time()


class Sessions:
    """Those that are open. One that idles for too long is not counted any more: the SDK has ended it by itself."""

    def __init__(self, bounds: SessionBounds) -> None:
        self._bounds = bounds
        self._all: set[Session] = set()
        self._by_id: dict[str, Session] = {}

    def admit(self, owner: Owner, known: Callable[[], bool]) -> tuple[Session, Session | None]:
        """A new session of `owner`'s, which has no id yet, and one that has to end for it. Raises `TooManySessions`.

        Only who asks makes room: of the user's own sessions, that which was used least lately, and in which nothing is
        asked. One that nobody listens to goes first.
        """
        now = asyncio.get_running_loop().time()
        self._forget_idle(now)
        own = [session for session in self._all if session.owner == owner]
        of_tenant = sum(session.owner.tenant == owner.tenant for session in self._all)
        bounds, last = self._bounds, None
        if len(own) >= bounds.of_user or of_tenant >= bounds.of_tenant or len(self._all) >= bounds.in_all:
            idle = [session for session in own if session.session_id and not session.asked]
            if not idle:
                raise TooManySessions
            last = min(idle, key=lambda session: (session.streams > 0, session.used_at))
            self.forget(last)
        session = Session(owner, known, now)
        self._all.add(session)
        return session, last

    def name(self, session: Session, session_id: str) -> None:
        """It is open, under this id. One that was forgotten meanwhile stays so."""
        if session in self._all:
            session.session_id = session_id
            self._by_id[session_id] = session

    def find(self, session_id: str, owner: Owner) -> Session | None:
        """The session of an owner's under this id."""
        session = self._by_id.get(session_id)
        return session if session is not None and session.owner == owner else None

    def forget(self, session: Session) -> None:
        self._all.discard(session)
        self._by_id.pop(session.session_id, None)

    def withdrawn(self) -> list[Session]:
        """Those whose maker may not call any more."""
        return [session for session in self._all if not session.known()]

    def _forget_idle(self, now: float) -> None:
        for session in list(self._all):
            if not session.asked and not session.streams and now - session.used_at >= self._bounds.idle_seconds:
                self.forget(session)
