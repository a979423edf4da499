"""Who is let in, as whom, and what is said to who is not."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.remote_executor import until
from tests.service.conftest import Tenants
from tests.service.serving import Service, Token, detach, ended, policy_text, run


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


ROUTES = [
    ("GET", "/v1/calls"), ("POST", "/v1/calls"), ("GET", "/v1/calls/call-0000000000000000"), ("POST", "/v1/code_exec"),
    ("DELETE", "/v1/calls/call-0000000000000000"), ("GET", "/v1/calls/call-0000000000000000/events"),
    ("GET", "/v1/tasks"), ("POST", "/v1/notes"), ("GET", "/v1/policy/explain"), ("GET", "/readyz"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("POST", "/mcp"), ("GET", "/nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_token_nothing_is_answered_and_nothing_is_found_out(tenants: Tenants, method: str, path: str) -> None:
    """Also not whether there is such a path."""
    with tenants.client(None) as nobody:
        answer = nobody.request(method, path)
    assert (answer.status_code, code(answer)) == (401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_health_is_open_to_all_under_any_name(tenants: Tenants) -> None:
    with tenants.client(None) as nobody:
        answer = nobody.get("/healthz", headers={"host": "10.0.0.1:8080"})
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer sgt_nobodys"},
        {"authorization": "Basic c2d0Xzo="},
        {"authorization": "Bearer " + "x" * 5000},
        {"authorization": "Bearer \xff\xfe"},
    ],
)
def test_whatever_is_wrong_with_a_token_the_answer_is_the_same(tenants: Tenants, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    with tenants.client(None) as nobody:
        plain = nobody.get("/v1/calls")
        answer = nobody.get("/v1/calls", headers=raw)
    assert (answer.status_code, answer.content) == (401, plain.content)


def test_two_tokens_at_once_are_none(tenants: Tenants) -> None:
    pairs = [("authorization", tenants.acme.headers["authorization"])] * 2
    with tenants.client(None) as nobody:
        assert nobody.get("/v1/calls", headers=pairs).status_code == 401


def test_a_token_is_a_tenants_and_the_header_names_its_user(tenants: Tenants) -> None:
    """Each user sees their own calls alone; another tenant's user of the same name sees none of them."""
    with (
        tenants.client(tenants.acme, sluicegate_user="bob") as bob,
        tenants.client(tenants.acme, sluicegate_user="carol") as carol,
        tenants.client(tenants.globex, sluicegate_user="bob") as other,
    ):
        call_id = detach(bob, "print('bob')")
        assert ended(bob, call_id)["state"] == "finished"
        assert [one["call_id"] for one in bob.get("/v1/calls").json()["calls"]] == [call_id]
        for stranger in (carol, other):
            assert stranger.get("/v1/calls").json()["calls"] == []
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/output")):
                answer = stranger.request(method, f"/v1/calls/{call_id}{path}")
                unknown = stranger.request(method, f"/v1/calls/call-0000000000000000{path}")
                assert (answer.status_code, code(answer)) == (404, "not_found")
                assert answer.text.replace(call_id, "") == unknown.text.replace("call-0000000000000000", "")
            assert stranger.post("/v1/notes").json() == {"notes": []}
        assert [note["task_id"] for note in bob.post("/v1/notes").json()["notes"]] == [call_id]


def test_a_token_with_a_user_is_that_users_alone(tenants: Tenants) -> None:
    with tenants.client(tenants.acme_alice) as alice:
        assert alice.get("/v1/calls").status_code == 200
        assert alice.get("/v1/calls", headers={"sluicegate-user": "alice"}).status_code == 200
        answer = alice.get("/v1/calls", headers={"sluicegate-user": "bob"})
    assert (answer.status_code, code(answer)) == (403, "user_not_allowed")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-a", "a" * 129, "ä", "a b"])
def test_a_users_name_that_is_none_is_refused(client: httpx.Client, name: str) -> None:
    answer = client.get("/v1/calls", headers=[(b"sluicegate-user", name.encode())])
    assert (answer.status_code, code(answer)) == (422, "invalid_user")


def test_a_header_that_stands_twice_counts_for_nobody(client: httpx.Client) -> None:
    answer = client.get("/v1/calls", headers=[("sluicegate-user", "a"), ("sluicegate-user", "b")])
    assert (answer.status_code, code(answer)) == (422, "invalid_request")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost", ""])
def test_a_web_page_is_not_answered(single: Service, tenants: Tenants, origin: str) -> None:
    with single.client() as local, tenants.client(tenants.acme) as remote:
        for client in (local, remote):
            answer = client.get("/v1/calls", headers={"origin": origin})
            assert (answer.status_code, code(answer)) == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200), ("localhost", 200), ("LOCALHOST:1", 200), ("[::1]:443", 200), ("runner.test", 200),
        ("127.0.0.9", 200), ("runner.test.:8", 200),
        ("evil.test", 421), ("localhost.evil.test", 421), ("127.0.0.1.evil.test", 421), ("10.0.0.1", 421),
        ("user@localhost", 421), ("localhost:x", 421), ("0.0.0.0", 421),
    ],
)  # fmt: skip
def test_over_tcp_the_host_must_be_one_of_its_names(tenants: Tenants, host: str, status: int) -> None:
    """Else a web page under a name that leads here could be its own origin."""
    with tenants.client(tenants.acme) as client:
        assert client.get("/v1/calls", headers={"host": host}).status_code == status


def test_over_the_socket_any_host_will_do(client: httpx.Client) -> None:
    assert client.get("/v1/calls", headers={"host": "anything.test"}).status_code == 200


def test_without_tenants_who_names_no_user_is_the_one_who_runs_it(single: Service) -> None:
    """Only such a client works in its own directory; one with a user's name is in that user's, and is told so."""
    project = single.root.parent / "projects" / "mine"
    project.mkdir()
    (project / "here.txt").write_text("found")
    listed = {"code": "import os; print(sorted(os.listdir()))"}
    with single.client(sluicegate_working_directory=str(project)) as admin:
        told = admin.post("/v1/code_exec", json=listed).json()
        assert ("here.txt" in told["output"], told["working_dir"]["replaced"]) == (True, False)
        told = admin.post("/v1/code_exec", json=listed, headers={"sluicegate-user": "dora"}).json()
        assert ("here.txt" in told["output"], told["working_dir"]["replaced"]) == (False, True)


@pytest.mark.parametrize("directory", ["relative", "", "/" + "x" * 5000])
def test_a_working_directory_that_is_no_path_is_refused(client: httpx.Client, directory: str) -> None:
    answer = client.get("/v1/calls", headers={"sluicegate-working-directory": directory})
    assert (answer.status_code, code(answer)) == (422, "invalid_request")


@pytest.mark.parametrize("name", [b"sluicegate-working-directory", b"sluicegate-user"])
def test_a_header_that_is_no_text_is_refused(client: httpx.Client, name: bytes) -> None:
    for method, path in (("GET", "/v1/calls"), ("POST", "/v1/code_exec")):
        answer = client.request(method, path, headers=[(name, b"/tmp/\xff"), (b"content-type", b"application/json")])
        assert (answer.status_code, code(answer)) == (422, "invalid_request")


def test_counts_of_all_tenants_and_what_is_wrong_with_the_host_are_for_admins(tenants: Tenants) -> None:
    with tenants.client(tenants.acme) as ordinary, tenants.client(tenants.acme_admin) as admin:
        answer = ordinary.get("/metrics")
        assert (answer.status_code, code(answer)) == (403, "admin_needed")
        assert admin.get("/metrics").status_code == 200
        assert ordinary.get("/readyz").status_code in (200, 503)


def test_a_token_that_the_policy_loses_is_nobodys_at_once(root: Path) -> None:
    """And one that it gains is somebody's, on connections that were open before."""
    old, new = Token("old"), Token("new")

    def text(token: Token) -> str:
        return policy_text(tenants=[{"name": "acme", "tokens": [token.entry]}])

    with Service(root, text(old), "--host", "127.0.0.1") as service:
        with service.client(old) as before, service.client(new) as after:
            assert before.get("/v1/calls").status_code == 200
            assert after.get("/v1/calls").status_code == 401
            service.policy.write_text(text(new))
            until(lambda: before.get("/v1/calls").status_code == 401, "the old token is nobody's")
            assert after.get("/v1/calls").status_code == 200


def test_what_waits_for_a_token_that_the_policy_loses_ends(root: Path) -> None:
    """Streams, waits and calls, as if their client had left; those of another token go on."""
    gone, stays = Token("gone"), Token("stays")

    def text(*tokens: Token) -> str:
        return policy_text(tenants=[{"name": "acme", "tokens": [token.entry for token in tokens]}])

    sleep = "import time\nfor n in range(600): print(n, flush=True); time.sleep(0.1)"
    with Service(root, text(gone, stays), "--host", "127.0.0.1") as service, ThreadPoolExecutor() as threads:
        with service.client(gone) as client, service.client(stays) as other:
            task_id = detach(client, sleep)

            def stream(reader: httpx.Client) -> str:
                with reader.stream("GET", f"/v1/calls/{task_id}/events") as answer:
                    return "".join(answer.iter_text())

            streaming, kept = threads.submit(stream, client), threads.submit(stream, other)
            waiting = threads.submit(client.post, f"/v1/tasks/{task_id}/wait", params={"timeout": 300})
            calling = threads.submit(run, client, sleep)
            working = threads.submit(client.post, "/v1/code_exec", json={"code": sleep})
            until(lambda: len(running(other)) == 3, "all three calls run")
            service.policy.write_text(text(stays))
            said = streaming.result(60)
            assert "event: stdout" in said
            assert "event: result" not in said
            for answer in (waiting.result(60), calling.result(60), working.result(60)):
                assert (answer.status_code, code(answer)) == (401, "unauthorized")
            until(lambda: running(other) == [task_id], "the calls of who left are ended, but for what is detached")
            assert not kept.done()
            other.delete(f"/v1/tasks/{task_id}")
            assert "event: result" in kept.result(60)


def running(client: httpx.Client) -> list[str]:
    return [one["call_id"] for one in client.get("/v1/calls").json()["calls"] if one["state"] == "running"]


def test_a_policy_that_loses_its_tenants_is_not_put_in_force_over_tcp(root: Path) -> None:
    """Or everybody who can connect would be let in, or nobody."""
    token = Token("ci")
    with Service(root, policy_text(tenants=[{"name": "acme", "tokens": [token.entry]}]), "--port", "0") as service:
        service.policy.write_text(policy_text())
        service.logs("the policy in force stays")
        with service.client(token) as known, service.client() as nobody:
            assert known.get("/v1/calls").status_code == 200
            assert nobody.get("/v1/calls").status_code == 401


def test_a_body_is_not_read_before_it_is_known_whose_it_is(tenants: Tenants) -> None:
    """The answer comes while nothing of a large body has been sent, and the connection ends with it."""
    import ssl

    context = ssl.create_default_context(cadata=tenants.authority.cert_pem.bytes().decode())
    with context.wrap_socket(tenants.service.connect(), server_hostname="localhost") as wire:
        wire.sendall(
            b"POST /v1/calls HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
        )
        said = read_all(wire)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert b"100 Continue" not in said


def read_all(wire: socket.socket) -> bytes:
    said = b""
    while part := wire.recv(65536):
        said += part
    return said


def test_two_tenants_at_their_limits_do_not_touch_one_another(tenants: Tenants) -> None:
    """Two run and one waits: the fourth is refused, with a time to come again; of the other tenant each is begun."""
    with tenants.client(tenants.acme, sluicegate_user="busy") as acme, tenants.client(tenants.globex) as globex:
        sleepers = [detach(acme, "import time; time.sleep(30)") for _ in range(3)]
        try:
            answer = run(acme, "print(1)")
            assert (answer.status_code, code(answer)) == (429, "busy")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["retry_after_seconds"] > 0
        finally:
            for call_id in sleepers:
                acme.delete(f"/v1/calls/{call_id}")
        answers = [run(globex, "print(1)") for _ in range(4)]
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) <= 3, "two at once, and at most one more in the time that this takes"
    for answer in answers:
        if answer.status_code == 429:
            assert code(answer) == "rate_limited"
            assert int(answer.headers["retry-after"]) >= answer.json()["error"]["retry_after_seconds"] > 0
