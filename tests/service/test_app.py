"""Calls over HTTP: what is asked, what is answered, and what is refused before any work."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.remote_executor import until
from tests.service.serving import JSON, Service, detach, ended, policy_text, run, sandboxed
from tests.service.test_auth import code

CALL = {"language": "python", "code": "print(1)"}


def post(client: httpx.Client, body: bytes, path: str = "/v1/calls", **headers: str) -> httpx.Response:
    return client.post(path, content=body, headers=JSON | {name.replace("_", "-"): v for name, v in headers.items()})


def problems(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 422, answer.text
    return list(answer.json()["error"]["problems"])


# Answers


def test_a_call_is_answered_with_its_result(client: httpx.Client) -> None:
    answer = run(client, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert answer.status_code == 200
    result = answer.json()
    assert (result["status"], result["exit_code"], result["stdout"], result["stderr"]) == ("error", 3, "out\n", "err\n")
    record = client.get(f"/v1/calls/{result['call_id']}").json()
    assert (record["state"], record["kind"], record["result"]) == ("finished", "code_execution", result)


def test_curl_gets_the_same(single: Service) -> None:
    """As a person would try it."""
    done = subprocess.run(
        ["curl", "-sS", "--unix-socket", single.socket_path, "http://localhost/v1/calls", "--json", json.dumps(CALL)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["stdout"] == "1\n"


def test_a_call_that_the_policy_refuses_has_a_result_all_the_same(client: httpx.Client) -> None:
    answer = run(client, "print(1)", allow_network=True, domains=[])
    assert (answer.status_code, answer.json()["error"]["code"]) == (200, "policy_refused")


def test_code_exec_is_answered_with_its_text_also_when_it_fails(client: httpx.Client) -> None:
    answer = client.post("/v1/code_exec", json={"code": "print(1); raise SystemExit(2)"})
    told = answer.json()
    assert answer.status_code == 200
    assert (told["success"], told["output"], told["exit_code"], told["error"]) == (False, "1\n", 2, "exit")


def test_a_detached_call_is_a_task_at_once(client: httpx.Client) -> None:
    """It can be listed, followed, waited for, and read in parts; its end is told once."""
    answer = run(client, "print('x' * 10)", background=True)
    accepted = answer.json()
    task_id = accepted["task_id"]
    assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/tasks/{task_id}")
    assert accepted["call_id"] == task_id
    assert ended(client, task_id)["result"]["stdout"] == "xxxxxxxxxx\n"
    assert client.get(f"/v1/tasks/{task_id}").json()["state"] == "finished"
    assert task_id in [one["call_id"] for one in client.get("/v1/tasks").json()["calls"]]
    parts: list[str] = []
    offset: int | None = 0
    while offset is not None:
        query: dict[str, Any] = {"offset": offset, "limit": 4}
        part = client.get(f"/v1/calls/{task_id}/output", params=query).json()
        parts.append(part["text"])
        offset = part["next_offset"]
    assert parts == ["xxxx", "xxxx", "xx\n"]
    assert [note["task_id"] for note in client.post("/v1/notes").json()["notes"]].count(task_id) == 1
    assert task_id not in client.post("/v1/notes").text


def test_lists_are_read_page_by_page(single: Service) -> None:
    with single.client(sluicegate_user="pages") as client:
        made = [run(client, f"print({n})").json()["call_id"] for n in range(3)]
        first = client.get("/v1/calls", params={"limit": 2}).json()
        rest = client.get("/v1/calls", params={"limit": 2, "before": first["next_before"]}).json()
    assert [one["call_id"] for one in first["calls"] + rest["calls"]] == made[::-1]
    assert rest["next_before"] is None


def test_to_wait_for_a_task_has_an_end_of_its_own(client: httpx.Client) -> None:
    task_id = detach(client, "import time; time.sleep(30)")
    assert client.post(f"/v1/tasks/{task_id}/wait", params={"timeout": 0.1}).json()["state"] in ("waiting", "running")
    cancelled = client.delete(f"/v1/tasks/{task_id}").json()
    assert (cancelled["state"], cancelled["result"]["cause"]) == ("cancelled", "cancelled")
    assert client.delete(f"/v1/tasks/{task_id}").json() == cancelled


def test_what_the_network_would_say_can_be_asked(client: httpx.Client) -> None:
    answer = client.get("/v1/policy/explain", params={"url": "https://example.com/"}).json()
    assert (answer["verdict"], answer["mode"]) == ("deny", "block-all")
    answer = client.get(
        "/v1/policy/explain", params={"url": "https://example.com/", "allow_network": "true", "domains": ""}
    ).json()
    assert (answer["verdict"], answer["mode"], answer["rule"]) == ("refused", "unrestricted", "network.modes")
    answer = client.get(
        "/v1/policy/explain", params={"url": "https://a.test/", "allow_network": "true", "domains": "a.test, b.test"}
    ).json()
    assert answer["mode"] == "named"


# What is refused


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"", "call: "),
        (b"{", "call: "),
        (b"[]", "call: it is not a JSON object"),
        (b"null", "call: it is not a JSON object"),
        (b'{"code": "\xff"}', "call: it is not UTF-8 at byte 10"),
        (b'{"code": "1", "code": "2"}', "call: the key `code` stands twice in one object"),
        (b'{"timeout": NaN}', "call: `NaN` is not JSON"),
        (b"[" * 100_000, "call: it is nested too deeply"),
        (b'{"a":' * 100_000, "call: it is nested too deeply"),
        (json.dumps({f"k{n}": 1 for n in range(5000)}).encode(), "call: it has more than 1024 entries"),
        (json.dumps({**CALL, "packages": [1] * 5000}).encode(), "packages: it has more than 1024 entries"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_call_is_refused_and_says_why(client: httpx.Client, body: bytes, fault: str) -> None:
    answer = post(client, body)
    assert any(one.startswith(fault) for one in problems(answer)), answer.text
    assert len(answer.content) < 4000


def test_all_faults_of_a_call_are_told_together_with_their_paths(client: httpx.Client) -> None:
    body = {"language": "ruby", "code": "", "env": {"PATH": "/"}, "more": 1, "background": "yes"}
    paths = {one.partition(":")[0] for one in problems(client.post("/v1/calls", json=body))}
    assert paths == {"language", "code", "env.PATH", "more", "background"}


def test_faults_of_a_query_are_told_with_their_place(client: httpx.Client) -> None:
    answer = client.get("/v1/calls", params={"limit": "many", "before": "nan"})
    assert [one.partition(":")[0] for one in problems(answer)] == ["query.limit", "query.before"]


def test_a_number_that_is_none_is_clamped_for_code_exec_alone(client: httpx.Client) -> None:
    answer = post(client, b'{"code": "print(1)", "timeout": NaN}', "/v1/code_exec")
    assert (answer.status_code, answer.json()["timeout_seconds"]) == (200, 30)
    assert problems(post(client, b'{"code": NaN}', "/v1/code_exec")) == ["code: it is not a string"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_body_of_another_kind_is_refused(client: httpx.Client, kind: str) -> None:
    """Of these a web page could send one without being asked."""
    answer = client.post("/v1/calls", content=json.dumps(CALL).encode(), headers={"content-type": kind})
    assert (answer.status_code, code(answer)) == (415, "unsupported_media_type")


def test_a_body_of_two_kinds_is_of_none(client: httpx.Client) -> None:
    """Whoever stands before the service may have looked at the other one. The refusal says what to send."""
    pairs = [("content-type", "application/json"), ("content-type", "text/plain")]
    for headers in (pairs, pairs[::-1], pairs[:1] * 2):
        answer = client.post("/v1/calls", content=json.dumps(CALL).encode(), headers=headers)
        assert (answer.status_code, code(answer)) == (415, "unsupported_media_type")
        assert "content-type: application/json" in answer.json()["error"]["message"]
        assert "--json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", None])
def test_json_may_be_called_so_or_not_at_all(client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert client.post("/v1/calls", content=json.dumps(CALL).encode(), headers=headers).status_code == 200


def test_a_body_that_is_too_large_is_refused_unread_when_it_says_so(client: httpx.Client) -> None:
    body = json.dumps({"language": "python", "code": "#" * (1 << 20)}).encode()
    answer = post(client, body)
    assert (answer.status_code, code(answer)) == (413, "too_large")
    assert answer.headers["connection"] == "close"
    assert post(client, json.dumps(CALL).encode()).status_code == 200, "the next one comes on a connection of its own"


def test_a_body_that_does_not_say_how_large_it_is_is_counted(client: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    answer = client.post("/v1/calls", content=parts(), headers=JSON)
    assert (answer.status_code, code(answer)) == (413, "too_large")


def test_a_compressed_body_is_no_json(client: httpx.Client) -> None:
    """Nothing is unpacked, so that nothing grows."""
    answer = post(client, gzip.compress(json.dumps(CALL).encode()), content_encoding="gzip")
    assert answer.status_code == 422


def test_a_head_that_is_too_large_is_refused_also_when_it_comes_in_one_piece(client: httpx.Client) -> None:
    answer = client.get("/v1/calls", headers={"x": "x" * 40_000})
    assert (answer.status_code, code(answer)) == (431, "head_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/calls/", 404, "not_found"),
        ("PUT", "/v1/calls", 405, "method_not_allowed"),
        ("GET", "/v1/code_exec", 405, "method_not_allowed"),
        ("GET", "/v1/calls/nonesuch", 404, "not_found"),
        ("GET", "/v1/calls/%00", 404, "not_found"),
        ("GET", "/v1/calls/%ff%fe", 404, "not_found"),
        ("GET", "/v1/calls/..%2f..%2fetc", 404, "not_found"),
        ("GET", "/v1/calls/nonesuch/events", 404, "not_found"),
        ("POST", "/v1/tasks/nonesuch/wait", 404, "not_found"),
        ("DELETE", "/v1/tasks/nonesuch", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
    ],
)
def test_what_is_not_there_is_said_in_the_form_of_every_error(
    client: httpx.Client, method: str, path: str, status: int, expected: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, code(answer)) == (status, expected)
    assert answer.headers["content-type"] == "application/json"


def test_an_answer_is_kept_by_nobody_on_the_way(client: httpx.Client) -> None:
    for answer in (client.get("/healthz"), client.get("/v1/calls"), client.get("/nowhere")):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


# Idempotency


def test_the_key_may_stand_in_a_header(client: httpx.Client) -> None:
    body = {"language": "python", "code": "import time; print(time.time_ns())"}
    answers = [client.post("/v1/calls", json=body, headers={"idempotency-key": "header-1"}).json() for _ in range(2)]
    answers.append(client.post("/v1/calls", json={**body, "idempotency_key": "header-1"}).json())
    assert answers[0]["stdout"] == answers[1]["stdout"] == answers[2]["stdout"]
    other = client.post("/v1/calls", json=body, headers={"idempotency-key": "header-2"}).json()
    assert other["stdout"] != answers[0]["stdout"]


def test_two_keys_that_differ_are_refused(client: httpx.Client) -> None:
    body = {**CALL, "idempotency_key": "one"}
    assert (
        "idempotency_key: it differs"
        in problems(client.post("/v1/calls", json=body, headers={"idempotency-key": "two"}))[0]
    )
    assert client.post("/v1/calls", json=body, headers={"idempotency-key": "one"}).status_code == 200


def test_code_exec_takes_no_key_and_says_so(client: httpx.Client) -> None:
    """To ignore it would have the caller believe that nothing runs twice."""
    answer = client.post("/v1/code_exec", json={"code": "print(1)"}, headers={"idempotency-key": "one"})
    assert "idempotency_key" in problems(answer)[0]


# Clients that leave


def leave_while_it_runs(service: Service, path: str, body: dict[str, Any], user: str) -> None:
    """Send a call, and close the connection once it runs."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nSluicegate-User: {user}\r\nContent-Length: {len(content)}\r\n\r\n"
    with service.connect() as wire, service.client(sluicegate_user=user) as client:
        wire.sendall(head.encode() + content)
        until(lambda: "running" in {one["state"] for one in client.get("/v1/calls").json()["calls"]}, "it runs")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/calls", {"language": "python", "code": "import time; print('begun', flush=True); time.sleep(19)"}),
        ("/v1/code_exec", {"code": "import time; print('begun', flush=True); time.sleep(19)"}),
    ],
)
def test_a_client_that_leaves_ends_its_call(single: Service, path: str, body: dict[str, Any]) -> None:
    """The record says so, and the sandbox is gone long before the program would have ended."""
    user, before = f"leaves-{path.rpartition('/')[2]}", sandboxed(single)
    leave_while_it_runs(single, path, body, user)
    with single.client(sluicegate_user=user) as client:
        (call,) = client.get("/v1/calls").json()["calls"]
        record = ended(client, call["call_id"])
    assert (record["state"], record["result"]["cause"]) == ("cancelled", "cancelled")
    assert record["ended_at"] - record["submitted_at"] < 15
    until(lambda: sandboxed(single) <= max(before, 1), "nothing but the warm sandbox is left")


def test_who_has_left_a_key_may_come_back_for_the_answer(single: Service) -> None:
    """The call goes on for a while, and the same request then waits for the same answer."""
    body = {"language": "python", "code": "import time; time.sleep(3); print('whole')", "idempotency_key": "back"}
    leave_while_it_runs(single, "/v1/calls", body, "back")
    with single.client(sluicegate_user="back") as client:
        answer = client.post("/v1/calls", json=body).json()
        assert (answer["status"], answer["stdout"]) == ("success", "whole\n")
        assert len([one for one in client.get("/v1/calls").json()["calls"] if one["success"]]) == 1


def test_who_has_left_a_key_and_does_not_come_back_ends_the_call(single: Service) -> None:
    body = {"language": "python", "code": "import time; time.sleep(19)", "idempotency_key": "gone"}
    leave_while_it_runs(single, "/v1/calls", body, "gone")
    with single.client(sluicegate_user="gone") as client:
        (call,) = client.get("/v1/calls").json()["calls"]
        record = ended(client, call["call_id"])
    assert (record["state"], record["result"]["cause"]) == ("cancelled", "cancelled")
    assert record["ended_at"] - record["submitted_at"] < 18


def test_who_stops_waiting_for_a_task_leaves_it_alone(single: Service) -> None:
    with single.client(sluicegate_user="patient") as client:
        task_id = detach(client, "import time; time.sleep(2); print('whole')")
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"/v1/tasks/{task_id}/wait", timeout=0.2)
        assert ended(client, task_id)["result"]["stdout"] == "whole\n"


# Many at once


def test_each_of_many_calls_at_once_has_its_own_answer(single: Service) -> None:
    def one(n: int) -> str:
        with single.client(sluicegate_user=f"many-{n % 5}") as client:
            answer = run(client, f"print({n})")
            assert answer.status_code == 200, answer.text
            return str(answer.json()["stdout"])

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(one, range(40))) == [f"{n}\n" for n in range(40)]


def test_a_full_queue_is_a_503_with_a_time_to_come_again(root: Path) -> None:
    """Nothing of such a call is begun, and nothing of it is kept."""
    with Service(root, policy_text(), "--max-concurrency", "1", "--max-waiting", "1", "--warm", "0") as service:
        with service.client() as client:
            sleepers = [detach(client, "import time; time.sleep(30)") for _ in range(2)]
            answers = [run(client, "print(1)"), client.post("/v1/code_exec", json={"code": "print(1)"})]
            for answer in answers:
                assert (answer.status_code, code(answer)) == (503, "queue_full")
                assert int(answer.headers["retry-after"]) >= 1
            assert len(client.get("/v1/calls").json()["calls"]) == 2
            for task_id in sleepers:
                client.delete(f"/v1/tasks/{task_id}")
            assert run(client, "print(1)").status_code == 200


def test_pipelined_requests_are_answered_in_order(single: Service) -> None:
    body = json.dumps(CALL).encode()
    request = b"POST /v1/calls HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with single.connect() as wire:
        wire.sendall(request + b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        said = b""
        while part := wire.recv(65536):
            said += part
    first, second = said.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert b'"stdout":"1\\n"' in first
    assert b'"status":"ok"' in second
