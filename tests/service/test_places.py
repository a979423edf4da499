"""Who has shown nothing holds a part of the places, and none that a newer one needs; nobody's idling shuts others out."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from sandbox.service.places import MOMENT_SECONDS, Place, Places
from tests.service.conftest import tls_options
from tests.service.listening import Peer, listening
from tests.service.serving import Service, Token, policy_text
from tests.service.test_connections import App


class Ends:
    """Takes places, and says which were ended."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.ended: list[int] = []
        self.taken: list[Place | None] = []

    def take(self, holder: str | None = None, *, idle: bool = True) -> Place:
        number = len(self.taken)
        place = self.places.take(lambda: self.ended.append(number))
        self.taken.append(place)
        assert place is not None
        place.open(lambda: self.ended.append(number), lambda: idle)
        if holder is not None:
            place.show(holder)
        return place


@pytest.mark.parametrize(("most", "part"), [(256, 64), (64, 16), (40, 16), (8, 8)])
def test_those_of_nobody_have_a_part_and_the_oldest_makes_room(most: int, part: int) -> None:
    ends = Ends(Places(most, trusting=False))
    for _ in range(part + 3):
        ends.take()
    assert (ends.ended, ends.places.taken, ends.places.displaced) == ([0, 1, 2], part, 3)


def test_however_many_nobodys_come_the_others_keep_what_they_ask() -> None:
    ends = Ends(Places(64, trusting=False))
    for _ in range(48):
        ends.take("acme", idle=False)
    for _ in range(1000):
        ends.take()
    assert min(ends.ended) >= 48
    ends.take("globex", idle=False)
    assert ends.places.taken <= 64


def test_one_of_nobodys_that_rests_makes_room_before_one_that_asks() -> None:
    ends = Ends(Places(64, trusting=False))
    ends.take(idle=False)
    for _ in range(16):
        ends.take()
    assert ends.ended == [1]


def test_where_all_are_taken_an_idle_one_of_who_has_most_makes_room() -> None:
    ends = Ends(Places(6, trusting=False))
    ends.take("few")
    ends.take("many", idle=False)
    for _ in range(4):
        ends.take("many")
    ends.take("few")
    assert ends.ended == [2]


def test_what_gives_way_makes_room_whatever_happens_on_it() -> None:
    ends = Ends(Places(1, trusting=False))
    place = ends.take("acme", idle=False)
    assert ends.places.take(lambda: None) is None
    place.give_way()
    ends.take()
    assert ends.ended == [0]


def test_where_who_connects_is_known_there_is_no_part() -> None:
    ends = Ends(Places(100))
    for _ in range(100):
        ends.take(idle=False)
    assert ends.places.take(lambda: None) is None
    assert (ends.ended, ends.places.refused) == ([], 1)


@given(st.lists(st.sampled_from(["nobody", "a", "b", "a asks", "b asks", "leaves"]), max_size=100), st.integers(1, 40))
def test_there_are_never_more_than_there_may_be(steps: list[str], most: int) -> None:
    """And each that was taken is given back once, or ended once."""
    places = Places(most, trusting=False)
    ended: list[int] = []
    held: dict[int, Place] = {}
    for number, step in enumerate(steps):
        if step == "leaves":
            if held:
                held.pop(min(held)).give_back()
        elif (place := places.take(lambda number=number: ended.append(number))) is not None:  # type: ignore[misc]
            held[number] = place
            place.open(place.end, lambda step=step: "asks" not in step)  # type: ignore[misc]
            if step != "nobody":
                place.show(step[0])
        for number_ended in ended:
            held.pop(number_ended, None)
        assert places.taken == len(held) <= most
    assert len(set(ended)) == len(ended)


def test_a_crowd_of_nobodys_waits_for_a_moment_to_be_accepted() -> None:
    """And for no longer, once one has shown whose it is."""
    ends = Ends(Places(64, trusting=False))
    for _ in range(16):
        assert ends.places.wait_seconds() == 0
        place = ends.take()
    assert 0 < ends.places.wait_seconds() <= MOMENT_SECONDS
    place.show("acme")
    assert ends.places.wait_seconds() == 0


def test_a_crowd_that_comes_at_once_is_served(root: Path) -> None:
    """More than have a place before they have shown whose they are: none of them is displaced."""
    token = Token("ci")
    policy = policy_text(service={"max_connections": 64}, tenants=[{"name": "acme", "tokens": [token.entry]}])
    with Service(root, policy, "--host", "127.0.0.1") as service, ExitStack() as stack:
        wires = [stack.enter_context(service.connect()) for _ in range(60)]
        asked = f"GET /v1/calls HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token.headers['authorization']}\r\n\r\n"
        for wire in wires:
            wire.sendall(asked.encode())
        for wire in wires:
            assert wire.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_rests_makes_room(root: Path) -> None:
    """Its client sees it closed, as after any time of rest."""

    async def scenario() -> None:
        async with listening(App(), root / "s", Places(1)):
            with Peer(root / "s") as first, Peer(root / "s") as second:
                await second.say(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                await second.until(b"HTTP/1.1 200 OK")
                assert await first.rest() == b""

    asyncio.run(scenario())


def test_who_says_nothing_does_not_shut_out_who_has_a_token(root: Path) -> None:
    """As many connections as there may be, and more, in the clear and in the middle of a handshake."""
    authority, token = trustme.CA(), Token("ci")
    policy = policy_text(service={"max_connections": 32}, tenants=[{"name": "acme", "tokens": [token.entry]}])
    options = tls_options(root, authority)
    with (
        Service(root, policy, "--host", "127.0.0.1", *options) as service,
        service.client(token, ca=authority) as known,
    ):
        assert known.get("/v1/calls").status_code == 200
        silent = [service.connect() for _ in range(60)]
        try:
            with service.client(token, ca=authority) as newcomer:
                assert newcomer.get("/v1/calls").status_code == 200
            assert known.get("/v1/calls").status_code == 200
        finally:
            for wire in silent:
                wire.close()
