"""Every method of the clients is one request, in the form that the service documents, and its answer a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sandbox.client import ServiceError
from sandbox.client import operations as ask
from sandbox.contract import CodeCall, ToolResult
from tests.client.conftest import Connect
from tests.client.scripted import Scripted, answer

ID = "call-0123456789abcdef"
RECORD = {"call_id": ID, "kind": "code_execution", "state": "finished", "background": True, "submitted_at": 1.0}
RESULT = {
    "call_id": ID, "status": "success", "cause": "exit", "exit_code": 0, "stdout": "42\n",
    "network": {"mode": "block-all"},
}  # fmt: skip
CALLS = {"calls": [RECORD | {"success": True}], "next_before": None}
SLICE = {
    "call_id": ID, "stream": "stdout", "offset": 0, "text": "ab", "next_offset": None, "kept_chars": 2,
    "total_chars": 2, "state": "finished",
}  # fmt: skip
EXPLANATION = {
    "target": "https://example.com/", "policy": "p", "mode": "block-all", "verdict": "deny", "reason": "network_off",
    "message": "no network",
}  # fmt: skip

REQUESTS: list[tuple[str, Callable[[Any], Any], str, object]] = [
    ("calls", lambda c: c.calls(10, 5.5), "GET /v1/calls?limit=10&before=5.5", CALLS),
    ("calls from the newest on", lambda c: c.calls(), "GET /v1/calls?limit=50", CALLS),
    ("record", lambda c: c.record(ID), f"GET /v1/calls/{ID}", RECORD),
    ("an id that is none", lambda c: c.record("../a b"), "GET /v1/calls/..%2Fa%20b", RECORD),
    ("cancel", lambda c: c.cancel(ID), f"DELETE /v1/calls/{ID}", RECORD),
    ("output", lambda c: c.output(ID, "stderr", 3, 9), f"GET /v1/calls/{ID}/output?stream=stderr&offset=3&limit=9", SLICE),
    ("tasks", lambda c: c.tasks(), "GET /v1/tasks?limit=50", CALLS),
    ("task", lambda c: c.task(ID), f"GET /v1/tasks/{ID}", RECORD),
    ("wait", lambda c: c.wait(ID), f"POST /v1/tasks/{ID}/wait?timeout=50", RECORD),
    ("notes", lambda c: c.notes(), "POST /v1/notes", {"notes": [{"task_id": ID, "state": "lost", "success": False, "text": "t"}]}),
    ("explain", lambda c: c.explain("https://example.com/"), "GET /v1/policy/explain?url=https%3A%2F%2Fexample.com%2F&language=python&method=GET&allow_network=false", EXPLANATION),
    ("ready", lambda c: c.ready(), "GET /readyz", {"ready": True}),
]  # fmt: skip


@pytest.mark.parametrize(("ask_", "line", "said"), [row[1:] for row in REQUESTS], ids=[row[0] for row in REQUESTS])
def test_each_method_is_one_request(
    connect: Connect, place: Path, ask_: Callable[[Any], Any], line: str, said: object
) -> None:
    with Scripted(place / "s", answer(200, said)) as service:
        assert ask_(connect(uds=place / "s")) is not None
        [asked] = service.asked
    target, wanted = urlsplit(asked.target), urlsplit(line.split(" ")[1])
    assert (asked.method, target.path) == (line.split(" ")[0], wanted.path)
    assert parse_qs(target.query) == parse_qs(wanted.query)
    assert asked.body == b""


def test_a_call_goes_out_as_it_was_given_and_comes_back_as_a_result(connect: Connect, place: Path) -> None:
    """Whichever way it is given. Fields that are left out stay out: the policy's defaults are the service's to know."""
    fields: dict[str, Any] = {"language": "python", "code": "print(6 * 7)", "idempotency_key": "turn-17"}
    with Scripted(place / "s", *[answer(200, RESULT)] * 3) as service:
        client = connect(uds=place / "s")
        for result in (client.run(**fields), client.run(fields), client.run(CodeCall(**fields))):
            assert isinstance(result, ToolResult)
            assert result.stdout == "42\n"
        assert [one.json for one in service.asked] == [fields] * 3
        assert {(one.method, one.target) for one in service.asked} == {("POST", "/v1/calls")}
        assert service.asked[0].headers["content-type"] == "application/json"


def test_a_call_is_given_one_way(connect: Connect, place: Path) -> None:
    with pytest.raises(TypeError, match="not both"):
        connect(uds=place / "s").run({"language": "python"}, code="1")


def test_a_faulty_call_is_for_the_service_to_refuse(connect: Connect, place: Path) -> None:
    """What is no text arrives as it is, so that its place is told."""
    with Scripted(place / "s", answer(200, RESULT)) as service:
        connect(uds=place / "s").run(language="ruby", code="\ud800", colour=float("nan"))
        assert service.asked[0].json["code"] == "\ud800"
        assert service.asked[0].json["language"] == "ruby"


@pytest.mark.parametrize("said", [(202, {"call_id": ID, "task_id": ID, "state": "waiting"}), (200, RESULT)])
def test_a_detached_call_gives_a_handle(connect: Connect, place: Path, said: tuple[int, object]) -> None:
    """Also where its key had an answer already."""
    with Scripted(place / "s", answer(*said), answer(200, RECORD)) as service:
        handle = connect(uds=place / "s").submit(language="python", code="1")
        assert handle.task_id == ID
        assert handle.wait(1).state == "finished"
        assert service.asked[0].json["background"] is True


def test_code_exec_sends_its_four_parameters_and_no_others(connect: Connect, place: Path) -> None:
    said = {"success": True, "output": "1\n"}
    with Scripted(place / "s", *[answer(200, said)] * 2) as service:
        client = connect(uds=place / "s")
        assert client.code_exec("print(1)").output == "1\n"
        client.code_exec("print(1)", "sub", "90", True)
        first, second = service.asked
    assert first.json == {"code": "print(1)"}
    assert second.json == {"code": "print(1)", "working_dir": "sub", "timeout": "90", "background": True}
    assert (first.method, first.target) == ("POST", "/v1/code_exec")


def test_all_of_an_output_is_read_slice_by_slice(connect: Connect, place: Path) -> None:
    parts = [SLICE | {"text": "ab", "next_offset": 2}, SLICE | {"text": "cd", "offset": 2, "next_offset": 4}]
    parts.append(SLICE | {"text": "e", "offset": 4})
    with Scripted(place / "s", *[answer(200, part) for part in parts]) as service:
        assert connect(uds=place / "s").read_all(ID, "stdout") == "abcde"
        assert ["offset=0" in service.asked[0].target, "offset=4" in service.asked[2].target] == [True, True]


def test_waiting_goes_on_until_the_task_has_ended(connect: Connect, place: Path) -> None:
    running = RECORD | {"state": "running"}
    with Scripted(place / "s", *[answer(200, one) for one in (running, running, RECORD)]) as service:
        assert connect(uds=place / "s").wait(ID).state == "finished"
        assert len(service.asked) == 3


def test_waiting_ends_with_its_time(connect: Connect, place: Path) -> None:
    """The record then says that the task still runs."""
    with Scripted(place / "s", answer(200, RECORD | {"state": "running"})) as service:
        assert connect(uds=place / "s").wait(ID, timeout=0).state == "running"
        assert service.asked[0].target.endswith("timeout=0")


def test_readiness_is_an_answer_whatever_it_is(connect: Connect, place: Path) -> None:
    with Scripted(place / "s", answer(503, {"ready": False, "checks": [{"name": "namespaces"}]})):
        readiness = connect(uds=place / "s").ready()
        assert not readiness.ready
        assert readiness.details["checks"][0]["name"] == "namespaces"


def test_fields_that_a_newer_service_has_do_no_harm(connect: Connect, place: Path) -> None:
    newer = {**RESULT, "colour": "blue", "usage": {"wall_seconds": 1.0, "joules": 3}}
    with Scripted(place / "s", answer(200, newer)):
        assert connect(uds=place / "s").run(language="python", code="1").usage.wall_seconds == 1.0


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b"\xff"])
def test_an_answer_that_is_none_of_the_service_s_is_told_as_that(connect: Connect, place: Path, body: bytes) -> None:
    with Scripted(place / "s", answer(200, body)), pytest.raises(ServiceError) as caught:
        connect(uds=place / "s").record(ID)
    assert caught.value.code == "unreadable_answer"


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        ({"timeout": 10}, 10 + 7), ({"timeout": 2.5}, 2.5 + 7), ({}, 300 + 7), ({"timeout": "10"}, 300 + 7),
        ({"timeout": None}, 300 + 7), ({"timeout": 10**9}, 300 + 7), ({"timeout": float("nan")}, 300 + 7),
    ],
)  # fmt: skip
def test_an_answer_is_waited_for_as_long_as_the_call_may_take(call: dict[str, Any], seconds: float) -> None:
    assert ask.run(call, 7).seconds == seconds


def test_a_timeout_of_code_exec_counts_as_the_contract_clamps_it() -> None:
    assert ask.code_exec("1", None, "10000", False, 7).seconds == 307
    assert ask.code_exec("1", None, "soon", False, 7).seconds == 37
    assert ask.code_exec("1", None, 300, True, 7).seconds == ask.SHORT_SECONDS


def test_no_answer_is_read_as_json_with_surprises() -> None:
    """What is sent is JSON in ASCII, so that any text goes through."""
    body = ask.run({"code": "é\ud83d"}, 1).body
    assert body is not None
    assert body.isascii()
    assert json.loads(body)["code"] == "é\ud83d"
