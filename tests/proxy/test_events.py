"""Claims about audit events: whatever the code sends, an event is one bounded, well-formed line without secrets."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.destinations import observe_host
from proxy.events import (
    CUT_MARK,
    DEFAULT_LIMIT,
    LIMITS,
    MAX_DOMAINS,
    AttemptEvent,
    CallEvent,
    ConnectionEvent,
    DecisionEvent,
    Event,
    PolicyEvent,
    ProxyEvent,
    clean_host,
    clean_path,
    clean_text,
    decision_event,
    format_time,
)
from proxy.network import Grant, Mode, Reason, Request, RequestLayer, decide

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=1500)  # lone surrogates and control characters too


def decision(**fields: object) -> DecisionEvent:
    defaults = {
        "time": 1.0,
        "call_id": "call",
        "attempt_id": "attempt",
        "layer": "http",
        "protocol": "http",
        "host": "example.com",
        "decision": "deny",
        "reason": "host_not_allowed",
        "policy_name": "p",
        "policy_digest": "d",
    }
    return DecisionEvent(**{**defaults, **fields})  # type: ignore[arg-type]


def connection(**fields: object) -> ConnectionEvent:
    defaults = {
        "time": 1.0,
        "call_id": "call",
        "attempt_id": "attempt",
        "protocol": "http",
        "host": "example.com",
        "outcome": "completed",
        "policy_name": "p",
        "policy_digest": "d",
    }
    return ConnectionEvent(**{**defaults, **fields})  # type: ignore[arg-type]


def attempt(**fields: object) -> AttemptEvent:
    defaults = {
        "time": 1.0,
        "call_id": "call",
        "attempt_id": "attempt",
        "phase": "start",
        "mode": "named",
        "policy_name": "p",
        "policy_digest": "d",
    }
    return AttemptEvent(**{**defaults, **fields})  # type: ignore[arg-type]


def assert_one_line(event: Event) -> None:
    line = json.dumps(event.to_json(), ensure_ascii=True, allow_nan=False)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == event.to_json()
    for name, value in event.to_json().items():
        if isinstance(value, str):
            assert value.isprintable()
            assert len(value) <= LIMITS.get(name, DEFAULT_LIMIT) + len(CUT_MARK)


@given(ANY_TEXT, st.sampled_from([f.name for f in dataclasses.fields(DecisionEvent) if f.name not in ("time", "port")]))
def test_any_text_in_any_field_of_a_decision_makes_one_well_formed_line(text: str, name: str) -> None:
    assert_one_line(decision(**{name: text}))


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_any_text_in_the_other_events_makes_one_well_formed_line(one: str, two: str, three: str) -> None:
    assert_one_line(connection(host=one, path=two, error=three, sni=two, method=one))
    assert_one_line(attempt(domains=(one, two), cause=three, mode=one))
    assert_one_line(ProxyEvent(time=1.0, what=one, detail=two))
    assert_one_line(PolicyEvent(time=1.0, what="rejected", old_digest=one, new_digest=None, detail=two))
    assert_one_line(CallEvent(time=1.0, call_id=one, tenant=two, what="lost", started_at=1.0))


@given(ANY_TEXT)
def test_a_cleaned_text_prints_and_is_bounded(text: str) -> None:
    clean = clean_text(text)
    assert clean.isprintable()
    assert len(clean) <= DEFAULT_LIMIT + len(CUT_MARK)
    if len(text) > DEFAULT_LIMIT:
        assert clean.endswith(CUT_MARK)


@given(st.text(st.characters(exclude_categories=()), max_size=29), st.text(max_size=29))
def test_two_short_texts_never_look_the_same(one: str, two: str) -> None:
    assert (clean_text(one) == clean_text(two)) == (one == two)


def test_an_escape_cannot_be_imitated() -> None:
    """Four characters that spell an escape differ from the one that it stands for."""
    assert clean_text("\x1b[2J") == "\\x1b[2J"
    assert clean_text("\\x1b[2J") == "\\\\x1b[2J"
    assert clean_text("\u202e\u2028\udc80\U000e0041") == "\\u202e\\u2028\\udc80\\U000e0041"


def test_a_text_is_cut_between_characters_never_within_an_escape() -> None:
    assert clean_text("a\n" * 10, 8) == "a\\x0a" + "a" + CUT_MARK
    assert clean_text("abc", 3) == "abc"
    assert clean_text("abcd", 3) == "abc" + CUT_MARK


@given(st.text(st.characters(exclude_characters="?#")), st.sampled_from("?#"), ANY_TEXT)
def test_no_query_or_fragment_is_in_a_path(path: str, separator: str, secret: str) -> None:
    assert clean_path(path + separator + secret) == clean_path(path)
    assert decision(path=path + separator + secret).path == decision(path=path).path


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("/a/b?token=secret", "/a/b"),
        ("/a#secret", "/a"),
        ("http://user:secret@example.com/a?b", f"http://{CUT_MARK}@example.com/a"),
        ("//user:secret@example.com/a", "//user:secret@example.com/a"),  # origin form: a path, as it was sent
        ("/-/npm//@scope/name", "/-/npm//@scope/name"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_a_request_target_keeps_its_path_and_loses_its_secrets(target: str, shown: str) -> None:
    assert clean_path(target) == shown


def test_user_information_in_a_host_is_not_shown() -> None:
    assert clean_host("user:secret@example.com") == f"{CUT_MARK}@example.com"
    assert clean_host("example.com?secret") == "example.com"
    assert decision(sni="user:secret@example.com").sni == f"{CUT_MARK}@example.com"


def test_the_event_itself_is_clean_not_only_its_json() -> None:
    event = decision(host="a\x00b", path="/p?secret")
    assert (event.host, event.path) == ("a\\x00b", "/p")


def test_an_event_has_every_key_of_its_kind_and_null_where_nothing_was_seen() -> None:
    fields = decision().to_json()
    assert list(fields)[:2] == ["time", "event"]
    assert fields["event"] == "decision"
    assert fields["sni"] is None
    assert set(fields) == {f.name for f in dataclasses.fields(DecisionEvent)} | {"event"}


def test_the_domains_of_an_attempt_are_bounded_and_the_cut_is_visible() -> None:
    domains = attempt(domains=tuple(f"{n}.example" for n in range(MAX_DOMAINS + 50))).to_json()["domains"]
    assert isinstance(domains, list)
    assert len(domains) == MAX_DOMAINS + 1
    assert domains[-1] == CUT_MARK
    assert attempt(domains=("a.example",)).to_json()["domains"] == ["a.example"]
    assert attempt().to_json()["domains"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_has_not_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        connection(duration_seconds=value)
    with pytest.raises(ValueError, match="not a finite number"):
        decision(time=value)


def test_a_time_is_iso_8601_in_utc_with_microseconds() -> None:
    assert format_time(0) == "1970-01-01T00:00:00.000000Z"
    assert format_time(1_700_000_000.25) == "2023-11-14T22:13:20.250000Z"
    with pytest.raises(ValueError, match=r"is not a time|out of range"):
        format_time(1e300)


def test_a_decision_event_says_what_was_asked_and_what_was_decided() -> None:
    grant = Grant(
        call_id="c", attempt_id="a", tenant="acme", policy_name="team", policy_digest="abc", mode=Mode.BLOCK_ALL
    )
    request = Request(
        RequestLayer.HTTP,
        observe_host("Example.COM"),
        443,
        method="GET",
        path="/x?y",
        package="pkg:pypi/x",
        version="1",
    )
    fields = decision_event(
        grant, request, decide(grant, request), time=1.0, protocol="http", connection_id="7"
    ).to_json()
    assert fields == {
        "time": "1970-01-01T00:00:01.000000Z",
        "event": "decision",
        "call_id": "c",
        "attempt_id": "a",
        "tenant": "acme",
        "connection_id": "7",
        "layer": "http",
        "protocol": "http",
        "host": "example.com",
        "port": 443,
        "sni": None,
        "method": "GET",
        "path": "/x",
        "package": "pkg:pypi/x",
        "version": "1",
        "address": None,
        "decision": "deny",
        "reason": "network_off",
        "rule": "mode:block-all",
        "detail": "this attempt has no network",
        "policy_name": "team",
        "policy_digest": "abc",
    }


def test_an_enum_member_is_logged_as_its_plain_value() -> None:
    event = decision(reason=Reason.SNI_MISMATCH)
    assert type(event.reason) is str
    assert event.reason == "sni_mismatch"


def test_every_key_of_every_event_is_in_the_reference() -> None:
    """`docs/audit.md` explains each key, and in which kinds of event it is."""
    rows = [
        (set(re.findall(r"`(\w+)`", cells[1])), cells[2].strip())
        for line in (Path(__file__).parents[2] / "docs" / "audit.md").read_text().splitlines()
        if len(cells := line.split("|")) == 5
    ]
    kinds: list[type[Event]] = [DecisionEvent, ConnectionEvent, AttemptEvent, CallEvent, PolicyEvent, ProxyEvent]
    for kind in kinds:
        for key in [*(field.name for field in dataclasses.fields(kind)), "event", "seq", "prev"]:
            assert any(key in keys and (kind.kind in where or where == "all") for keys, where in rows), (kind.kind, key)
