"""The places that there are for connections, and which one makes room where there is none.

Who connects has shown nothing yet, so that it costs nothing to hold a place in this way: those that nobody has shown to
be theirs have a part of the places. Among them the oldest makes room for a newer one, once it has had a moment to show
more: else a crowd that comes at once would displace itself. Of the others, one on which nothing is asked makes room.
What is asked is bounded elsewhere, for each tenant (`sandbox.service.visits`).

Owns: their number. Must not: know sockets, or tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

MOMENT_SECONDS = 0.5
_LEAST_OF_NOBODYS = 16
_PART_OF_NOBODYS = 4  # a quarter


class Place:
    """That of one connection. `holder`: whose it has shown to be; None for nobody's."""

    def __init__(self, places: Places, holder: str | None, end: Callable[[], None]) -> None:
        self.holder = holder
        self.end = end
        self.since = time.monotonic()
        self._places = places
        self._is_idle: Callable[[], bool] = lambda: True
        self._gives_way = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked on it that somebody waits for."""
        return self._gives_way or self._is_idle()

    def open(self, end: Callable[[], None], is_idle: Callable[[], bool]) -> None:
        """From now on this is how to end the connection at once, and whether it is idle."""
        self.end, self._is_idle = end, is_idle

    def show(self, holder: str) -> None:
        """Whose it is has been shown."""
        self._places.show(self, holder)

    def give_way(self) -> None:
        """It may make room from now on, whatever happens on it."""
        self._gives_way = True

    def give_back(self) -> None:
        """Once is enough, and more do no harm."""
        self._places.give_back(self)


class Places:
    """`most` of them. `trusting`: who can connect has shown by that whose it is, such as at a socket of its user's.

    Both may change while they are taken. `refused` and `displaced` count since the start.
    """

    def __init__(self, most: int, *, trusting: bool = True) -> None:
        self.most = most
        self.trusting = trusting
        self.refused = 0
        self.displaced = 0
        self._nobodys: dict[Place, None] = {}  # in the order of their arrival, both
        self._held: dict[Place, None] = {}

    @property
    def taken(self) -> int:
        return len(self._nobodys) + len(self._held)

    def wait_seconds(self) -> float:
        """For how long the next one should wait to be accepted. Less, if something changes meanwhile."""
        last = self._next_to_go()
        if last is None or last.holder is not None:
            return 0.0
        return max(0.0, last.since + MOMENT_SECONDS - time.monotonic())

    def take(self, end: Callable[[], None]) -> Place | None:
        """A place for one that is accepted, and which `end` ends. None: there is none, and none that makes room."""
        if (last := self._next_to_go()) is not None:
            self.displaced += 1
            self.give_back(last)
            last.end()
        if self.taken >= self.most:
            self.refused += 1
            return None
        place = Place(self, "" if self.trusting else None, end)
        (self._nobodys if place.holder is None else self._held)[place] = None
        return place

    def show(self, place: Place, holder: str) -> None:
        place.holder = holder
        if place in self._nobodys:
            del self._nobodys[place]
            self._held[place] = None

    def give_back(self, place: Place) -> None:
        self._nobodys.pop(place, None)
        self._held.pop(place, None)

    def _next_to_go(self) -> Place | None:
        """The one that makes room, where one has to."""
        if len(self._nobodys) >= max(_LEAST_OF_NOBODYS, self.most // _PART_OF_NOBODYS):
            return _oldest(self._nobodys)
        if self.taken < self.most:
            return None
        if idle := [place for place in self._held if place.is_idle]:
            many = Counter(place.holder for place in self._held)
            return max(idle, key=lambda place: many[place.holder])
        return _oldest(self._nobodys) if self._nobodys else None


def _oldest(places: Iterable[Place]) -> Place:
    """Of those that are idle, or else of all."""
    every = list(places)
    return next((place for place in every if place.is_idle), every[0])
