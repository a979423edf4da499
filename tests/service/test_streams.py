"""The life of a call as events: as it happens, from where a reader left off, and for no longer than somebody reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.service.model import FeedEvent
from sandbox.service.streams import EventStream, encode_event
from tests.remote_executor import until
from tests.service.serving import Service, detach, ended

STEPS = "import time\nfor n in range(3):\n    print(n, flush=True)\n    time.sleep(0.3)\n"
type Event = tuple[int, str, Any]


def events(lines: Iterator[str]) -> Iterator[Event]:
    """What a stream says, without its comments."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def follow(client: httpx.Client, call_id: str, **headers: str) -> list[Event]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    with client.stream("GET", f"/v1/calls/{call_id}/events", headers=given) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events(answer.iter_lines()))


def test_a_call_can_be_followed_as_it_happens(client: httpx.Client) -> None:
    """Its output comes while it runs, and its result last, which is that of the record."""
    call_id = detach(client, STEPS)
    seen: list[tuple[float, Event]] = []
    with client.stream("GET", f"/v1/calls/{call_id}/events") as answer:
        seen = [(time.monotonic(), event) for event in events(answer.iter_lines())]
    numbers = [number for _, (number, _, _) in seen]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "".join(data["text"] for _, (_, kind, data) in seen if kind == "stdout") == "0\n1\n2\n"
    (_, (_, kind, data)) = seen[-1]
    assert (kind, data["state"], data["result"]) == ("result", "finished", ended(client, call_id)["result"])
    first, *_, last = (at for at, (_, kind, _) in seen if kind == "stdout")
    assert last - first > 0.3, "not all at once"


@pytest.mark.parametrize("way", ["header", "query"])
def test_a_reader_goes_on_where_it_left_off(client: httpx.Client, way: str) -> None:
    call_id = detach(client, STEPS)
    with client.stream("GET", f"/v1/calls/{call_id}/events") as answer:
        begun = []
        for event in events(answer.iter_lines()):
            begun.append(event)
            if event[1] == "stdout":
                break
    last = begun[-1][0]
    if way == "header":
        rest = follow(client, call_id, last_event_id=str(last))
    else:
        with client.stream("GET", f"/v1/calls/{call_id}/events", params={"after": last}) as answer:
            rest = list(events(answer.iter_lines()))
    both = begun + rest
    assert [number for number, _, _ in both] == list(range(1, len(both) + 1))
    assert "".join(data["text"] for _, kind, data in both if kind == "stdout") == "0\n1\n2\n"


def test_of_a_call_that_has_ended_the_result_is_left(client: httpx.Client) -> None:
    call_id = detach(client, "print(1)")
    record = ended(client, call_id)
    ((_, kind, data),) = follow(client, call_id)
    assert (kind, data["result"]) == ("result", record["result"])


def test_a_number_that_is_none_is_refused(client: httpx.Client) -> None:
    call_id = detach(client, "print(1)")
    answer = client.get(f"/v1/calls/{call_id}/events", headers={"last-event-id": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")


def test_a_reader_that_leaves_leaves_the_call_alone(client: httpx.Client) -> None:
    call_id = detach(client, STEPS)
    with client.stream("GET", f"/v1/calls/{call_id}/events") as answer:
        next(answer.iter_lines())
    assert ended(client, call_id)["result"]["stdout"] == "0\n1\n2\n"


def test_a_reader_that_is_too_slow_holds_nobody_up_and_is_told_how_much_it_missed(single: Service) -> None:
    """The program ends while nothing of its flood has been read; what is kept of that is bounded."""
    flood = "print('begun', flush=True)\nfor n in range(200): print(str(n) * 20_000)"
    with single.client(sluicegate_user="flood") as client, single.connect() as wire:
        call_id = detach(client, flood)
        wire.sendall(
            f"GET /v1/calls/{call_id}/events HTTP/1.1\r\nHost: a\r\nSluicegate-User: flood\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        record = ended(client, call_id)
        said = b""
        while part := wire.recv(1 << 20):
            said += part
    assert record["result"]["status"] == "success"
    kinds = [line.removeprefix(b"event: ") for line in said.split(b"\n") if line.startswith(b"event: ")]
    assert kinds[-1] == b"result"
    assert b"gap" in kinds
    assert len(said) < 4_000_000 + record["result"]["output_chars"]["stdout"] // 2


@given(st.integers(1), st.dictionaries(st.text(), st.text()))
def test_an_event_is_three_lines_whatever_is_in_it(number: int, data: dict[str, str]) -> None:
    """No output of a program's can forge an event, or end a stream."""
    text = encode_event(FeedEvent(id=number, kind="stdout", data=data)).decode()
    assert text.endswith("\n\n")
    first, second, third = text[:-2].split("\n")
    assert (first, second) == (f"id: {number}", "event: stdout")
    assert "\r" not in text
    assert json.loads(third.removeprefix("data: ")) == data


class Wire:
    """The other side of an ASGI response."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.news = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    async def until(self, text: bytes) -> None:
        while text not in b"".join(message.get("body", b"") for message in self.sent):
            self.news.clear()
            await self.news.wait()


def test_a_silent_call_keeps_its_stream_alive_and_nobody_holds_one_whose_reader_has_left() -> None:
    async def never() -> AsyncIterator[FeedEvent]:
        await asyncio.Event().wait()
        yield FeedEvent(id=1, kind="state", data={})

    async def scenario() -> None:
        wire = Wire()
        async with asyncio.timeout(30):
            stream = asyncio.create_task(EventStream(never(), 0.01)({}, wire.receive, wire.send))
            await wire.until(b": still here\n\n: still here\n\n")
            wire.left.set()
            await stream

    asyncio.run(scenario())


def test_events_that_fail_end_the_stream_with_their_error() -> None:
    """And not with what a reader would take for the end of a call."""

    async def broken() -> AsyncIterator[FeedEvent]:
        yield FeedEvent(id=1, kind="state", data={})
        raise OSError("gone")

    async def scenario() -> None:
        wire = Wire()
        with pytest.raises(OSError, match="gone"):
            await EventStream(broken())({}, wire.receive, wire.send)
        assert wire.sent[-1]["more_body"] is True

    asyncio.run(scenario())


def test_a_call_that_was_ended_says_so_in_its_last_event(client: httpx.Client) -> None:
    call_id = detach(client, "import time; print('begun', flush=True); time.sleep(30)")
    with client.stream("GET", f"/v1/calls/{call_id}/events") as answer:
        lines = events(answer.iter_lines())
        until(lambda: next(lines)[1] == "stdout", "it has begun")
        client.delete(f"/v1/calls/{call_id}")
        *_, last = lines
    assert (last[1], last[2]["state"]) == ("result", "cancelled")
