"""The sessions over HTTP: how many there may be, and which one makes room for which."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.owners import Owner
from sandbox.service.mcp_sessions import Session, SessionBounds, Sessions, TooManySessions

ALICE, BOB, EVE = Owner("acme", "alice"), Owner("acme", "bob"), Owner("globex", "alice")
BOUNDS = SessionBounds(of_user=3, of_tenant=5, in_all=7)


def open_one(sessions: Sessions, owner: Owner, name: str = "") -> tuple[Session, Session | None]:
    session, last = sessions.admit(owner, lambda: True)
    sessions.name(session, name or f"{owner}-{id(session)}")
    return session, last


async def used(session: Session) -> None:
    """Use it, later than whatever was used before."""
    await asyncio.sleep(0.001)
    with session.used(listens=False):
        pass


def test_one_user_does_not_take_the_sessions_of_others() -> None:
    async def check() -> None:
        sessions = Sessions(BOUNDS)
        for _ in range(20):
            open_one(sessions, ALICE)
        for owner in (BOB, EVE):
            assert open_one(sessions, owner)[1] is None

    asyncio.run(check())


def test_the_session_that_was_used_least_lately_makes_room_and_it_is_the_users_own() -> None:
    async def check() -> None:
        sessions = Sessions(BOUNDS)
        open_one(sessions, BOB)
        first, second, third = (open_one(sessions, ALICE, name)[0] for name in ("1", "2", "3"))
        for session in (second, first, third):
            await used(session)
        assert open_one(sessions, ALICE, "4")[1] is second
        assert sessions.find("2", ALICE) is None
        assert open_one(sessions, ALICE, "5")[1] is first

    asyncio.run(check())


def test_a_session_in_which_something_is_asked_stays_and_one_that_is_listened_to_goes_last() -> None:
    async def check() -> None:
        sessions = Sessions(BOUNDS)
        asked, heard, idle = (open_one(sessions, ALICE)[0] for _ in range(3))
        with asked.used(listens=False), heard.used(listens=True):
            await used(idle)
            new, last = open_one(sessions, ALICE)
            assert last is idle
            with new.used(listens=False):
                assert open_one(sessions, ALICE)[1] is heard

    asyncio.run(check())


def test_where_something_is_asked_in_each_there_is_no_room() -> None:
    async def check() -> None:
        sessions = Sessions(BOUNDS)
        opened = [open_one(sessions, ALICE)[0] for _ in range(3)]
        with opened[0].used(listens=False), opened[1].used(listens=False), opened[2].used(listens=False):
            with pytest.raises(TooManySessions):
                sessions.admit(ALICE, lambda: True)
            open_one(sessions, BOB)
        assert open_one(sessions, ALICE)[1] is not None

    asyncio.run(check())


def test_a_tenant_has_its_bound_and_all_have_theirs() -> None:
    async def check() -> None:
        sessions = Sessions(BOUNDS)
        for owner in [ALICE] * 3 + [BOB] * 2:
            assert open_one(sessions, owner)[1] is None
        with pytest.raises(TooManySessions):
            sessions.admit(Owner("acme", "carol"), lambda: True)
        last = open_one(sessions, BOB)[1]
        assert last is not None
        assert last.owner == BOB
        for _ in range(2):
            assert open_one(sessions, EVE)[1] is None
        with pytest.raises(TooManySessions):
            sessions.admit(Owner("initech", "dave"), lambda: True)

    asyncio.run(check())


def test_what_idles_for_too_long_is_not_counted() -> None:
    async def check() -> None:
        sessions = Sessions(SessionBounds(of_user=1, idle_seconds=0.0))
        first, _ = open_one(sessions, ALICE, "1")
        assert open_one(sessions, ALICE, "2")[1] is None
        assert sessions.find("1", ALICE) is None
        assert first.session_id == "1"

    asyncio.run(check())


def test_a_session_that_is_being_opened_makes_no_room_and_one_that_was_forgotten_meanwhile_is_not_opened() -> None:
    async def check() -> None:
        sessions = Sessions(SessionBounds(of_user=1))
        opening, _ = sessions.admit(ALICE, lambda: True)
        with pytest.raises(TooManySessions):
            sessions.admit(ALICE, lambda: True)
        sessions.forget(opening)
        sessions.name(opening, "x")
        assert sessions.find("x", ALICE) is None

    asyncio.run(check())


def test_a_session_is_found_by_its_owner_alone() -> None:
    async def check() -> None:
        sessions = Sessions(BOUNDS)
        session, _ = open_one(sessions, ALICE, "x")
        assert sessions.find("x", ALICE) is session
        assert [sessions.find("x", owner) for owner in (BOB, EVE)] == [None, None]

    asyncio.run(check())


def test_an_id_is_taken_until_its_answer_and_for_longer_where_nobody_waits_for_that() -> None:
    async def check() -> None:
        session, _ = open_one(Sessions(BOUNDS), ALICE)
        assert session.claim("1")
        assert not session.claim("1")
        assert session.claim("2")
        session.release("1", abandoned=False)
        session.release("2", abandoned=True)
        assert session.claim("1")
        assert not session.claim("2")

    asyncio.run(check())


def test_sessions_of_those_who_may_not_call_any_more_are_known() -> None:
    async def check() -> None:
        sessions, allowed = Sessions(BOUNDS), [True]
        session, _ = sessions.admit(ALICE, lambda: allowed[0])
        open_one(sessions, BOB)
        assert sessions.withdrawn() == []
        allowed[0] = False
        assert sessions.withdrawn() == [session]

    asyncio.run(check())
