"""What is sent again is what cannot be done twice by it; everything else is told to the caller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.client import Busy, ConnectionLost, Retries, ServiceError
from sandbox.client.attempts import attempts
from sandbox.client.operations import Failure, Operation, Reply, run
from tests.client.conftest import Connect
from tests.client.scripted import CLOSE, Scripted, answer, refusal, stream
from tests.client.test_operations import ID, RECORD, RESULT

CALL: dict[str, Any] = {"language": "python", "code": "print(6 * 7)"}
CUT = answer(200, RESULT)[:-9]  # the connection breaks in the middle of the answer


@pytest.mark.parametrize("accident", [CLOSE, CUT], ids=["no answer", "half an answer"])
def test_a_call_whose_answer_is_lost_is_asked_for_again_under_its_key(
    connect: Connect, place: Path, accident: bytes
) -> None:
    """The client makes the key, so that nothing runs twice; each call gets another."""
    with Scripted(place / "s", accident, answer(200, RESULT), answer(200, RESULT)) as service:
        client = connect(uds=place / "s")
        assert client.run(**CALL).stdout == "42\n"
        client.run(**CALL)
        first, again, other = (one.json.pop("idempotency_key") for one in service.asked)
        assert first == again != other
        assert service.asked[0].json.keys() == service.asked[1].json.keys()


def test_a_call_without_a_key_is_not_sent_again_once_it_was_sent(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", CLOSE, answer(200, RESULT)) as service:
        with pytest.raises(ConnectionLost):
            connect(uds=place / "s").run(**CALL, once_only=False)
        [asked] = service.asked
        assert "idempotency_key" not in asked.json


@pytest.mark.parametrize(
    "ask", [lambda c: c.code_exec("print(1)"), lambda c: c.notes()], ids=["code_exec", "notes"]
)  # fmt: skip
def test_what_has_no_key_is_not_sent_again(connect: Connect, place: Path, ask: Callable[[Any], Any]) -> None:
    """Code would run twice; notes that were told would be told to nobody."""
    with Scripted(place / "s", CLOSE, CLOSE) as service:
        with pytest.raises(ConnectionLost):
            ask(connect(uds=place / "s"))
        assert len(service.asked) == 1


@pytest.mark.parametrize("ask", [lambda c: c.record(ID), lambda c: c.cancel(ID), lambda c: c.wait(ID)])
def test_what_reads_or_cancels_is_sent_again(connect: Connect, place: Path, ask: Callable[[Any], Any]) -> None:
    with Scripted(place / "s", CLOSE, CLOSE, answer(200, RECORD)) as service:
        assert ask(connect(uds=place / "s")).call_id == ID
        assert len(service.asked) == 3


def test_a_service_that_starts_a_moment_later_is_found(connect: Connect, place: Path) -> None:
    """Nothing was sent before, so that this holds of every request."""
    services = []

    def start() -> None:
        services.append(Scripted(place / "s", answer(200, {"success": True, "output": "1\n"})).__enter__())

    timer = threading.Timer(0.3, start)
    timer.start()
    try:
        assert connect(uds=place / "s", retries=Retries(lost=6)).code_exec("print(1)").output == "1\n"
    finally:
        timer.join()
        services[0].__exit__()


def test_lost_connections_come_to_an_end(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", *[CLOSE] * 9) as service:
        with pytest.raises(ConnectionLost):
            connect(uds=place / "s", retries=Retries(lost=3)).run(**CALL)
        assert len(service.asked) == 4


BUSY = refusal(429, "busy", retry_after_seconds=0.01)


def test_who_is_told_to_come_again_is_told_that_unless_they_chose_otherwise(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", BUSY, answer(200, RESULT)) as service:
        with pytest.raises(Busy) as caught:
            connect(uds=place / "s").run(**CALL)
        assert caught.value.retry_after_seconds == 0.01
        assert len(service.asked) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_coming_again_when_told_to_is_a_choice(connect: Connect, place: Path, status: int) -> None:
    """Of code_exec too: nothing was begun."""
    said = refusal(status, "busy", retry_after_seconds=0.01)
    with Scripted(place / "s", said, said, answer(200, {"success": True, "output": "1\n"})) as service:
        assert connect(uds=place / "s", retries=Retries(busy=2)).code_exec("print(1)").success
        assert len(service.asked) == 3


def test_coming_again_has_its_bounds(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", BUSY, BUSY, BUSY) as service:
        with pytest.raises(Busy):
            connect(uds=place / "s", retries=Retries(busy=1)).run(**CALL)
        assert len(service.asked) == 2
    for said in (refusal(429, "busy", retry_after_seconds=3600), refusal(503, "draining"), refusal(500, "internal")):
        with Scripted(place / "s", said, answer(200, RESULT)) as service:
            with pytest.raises(ServiceError):
                connect(uds=place / "s", retries=Retries(busy=5)).run(**CALL)
            assert len(service.asked) == 1


EVENTS = [(1, "state", {"state": "running"}), (2, "stdout", {"text": "4"}), (3, "stdout", {"text": "2\n"})]
LAST = (4, "result", {"call_id": ID})


def test_a_stream_that_breaks_is_taken_up_where_it_broke(connect: Connect, place: Path) -> None:
    """Nothing is missing, and nothing comes twice."""
    with Scripted(
        place / "s", stream(*EVENTS[:2], cut=True), stream(*EVENTS[1:2]), CLOSE, stream(*EVENTS, LAST)
    ) as service:
        seen = list(connect(uds=place / "s").events(ID))
        assert [(one.id, one.kind, one.data) for one in seen] == [*EVENTS, LAST]
        assert [one.headers.get("last-event-id") for one in service.asked] == [None, "1", "2", "2"]
        assert {one.target for one in service.asked} == {f"/v1/calls/{ID}/events"}


def test_a_stream_that_only_breaks_is_an_error_at_last(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", stream(EVENTS[0]), CLOSE, CLOSE, CLOSE):
        events = connect(uds=place / "s").events(ID)
        assert next(events).id == 1
        with pytest.raises(ConnectionLost):
            next(events)


def test_a_stream_can_be_left(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", stream(*EVENTS, LAST)):
        for event in connect(uds=place / "s").events(ID):
            assert event.id == 1
            break


def test_a_stream_of_no_such_call_is_refused(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", refusal(404, "not_found")), pytest.raises(ServiceError) as caught:
        list(connect(uds=place / "s").events(ID))
    assert caught.value.status == 404


ACCIDENTS = st.one_of(
    st.builds(Failure, st.booleans(), st.just("gone"), st.booleans()),
    st.sampled_from([429, 500, 503]).map(lambda status: Reply(status, b"", {"retry-after": "1"})),
)


@given(st.lists(ACCIDENTS, max_size=12), st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_the_story_ends_and_nothing_unsafe_is_repeated(
    accidents: list[Failure | Reply], lost: int, busy: int, keyed: bool
) -> None:
    """Whatever happens: at most as many requests as were allowed, and none after one that may have been done."""
    operation: Operation[Any] = run({"idempotency_key": "k"} if keyed else {}, 1)
    story = attempts(operation, Retries(lost=lost, busy=busy))
    sent, pause = 1, next(story)
    with contextlib.suppress(ServiceError):
        for accident in accidents:
            may_be_done = isinstance(accident, Failure) and accident.sent and not keyed
            pause = story.send(accident)
            assert not may_be_done
            assert 0 < pause <= 60
            sent += 1
    assert sent <= 1 + lost + busy
