"""A stream of events is read as the standard says, however it was cut into pieces."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.client import ServiceError
from sandbox.client.events import EventReader
from sandbox.service.model import FeedEvent

STREAM = (
    b": hello\n\n"
    b'id: 1\nevent: state\ndata: {"state": "running"}\n\n'
    b'id: 2\r\nevent: stdout\r\ndata: {"text":\r\ndata: "\xc3\xa9\xe2\x82\xac"}\r\n\r\n'
    b':\rid:3\revent:gap\rdata:{"missed_events": 4}\rretry: 10\r\r'
    b"event: stdout\n\n"
    b'id: 4\nevent: result\ndata: {}\n\n'
)  # fmt: skip
EVENTS = [
    FeedEvent(id=1, kind="state", data={"state": "running"}),
    FeedEvent(id=2, kind="stdout", data={"text": "é€"}),
    FeedEvent(id=3, kind="gap", data={"missed_events": 4}),
    FeedEvent(id=4, kind="result", data={}),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_pieces_make_no_difference(cuts: list[int]) -> None:
    reader, edges = EventReader(), [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_a_large_event_takes_no_longer_than_its_size() -> None:
    """An answer may have a million characters, and comes in pieces."""
    event = FeedEvent(id=1, kind="result", data={"text": "é" * 4_000_000})
    stream = f"id: 1\nevent: result\ndata: {json.dumps(event.data, ensure_ascii=False)}\n\n".encode()
    reader, began = EventReader(), time.process_time()
    found = [one for start in range(0, len(stream), 65_536) for one in reader.feed(stream[start : start + 65_536])]
    assert found == [event]
    assert time.process_time() - began < 10  # a hundredth of it, unless the beginning is read again for every piece


def test_an_event_that_is_not_whole_is_none() -> None:
    assert EventReader().feed(b"id: 1\nevent: state\ndata: {}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        b"id: x\nevent: state\ndata: {}", b"event: state\ndata: {}", b"id: 1\nevent: colour\ndata: {}",
        b"id: 1\nevent: state\ndata: {", b"id: 1\nevent: state\ndata: []", b"id: 1\ndata: {}",
    ],
)  # fmt: skip
def test_an_event_that_the_service_never_sends_is_told(text: bytes) -> None:
    with pytest.raises(ServiceError) as caught:
        EventReader().feed(text + b"\n\n")
    assert caught.value.code == "unreadable_answer"
