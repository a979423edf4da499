"""Both clients against the service itself: over its socket, and over TCP with tokens and TLS."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from sandbox.client import (
    Client,
    ConnectionLost,
    InvalidCall,
    NotFound,
    Retries,
    ServiceError,
    Unauthorised,
    Unavailable,
)
from sandbox.contract import Cause, Status
from sandbox.tokens import hash_token, new_token
from tests.client.conftest import Connect
from tests.client.serving import Serving, serving

PYTHON = {"language": "python"}
ENDLESS = {**PYTHON, "code": "import time\nprint('begun', flush=True)\ntime.sleep(60)", "timeout": 70}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Serving]:
    with serving(home / "state", "--uds", str(home / "run" / "s")) as service:
        yield service


@pytest.fixture
def client(connect: Connect, service: Serving, request: pytest.FixtureRequest) -> Any:
    """A client of a user of this test's own, who has no calls yet."""
    user = f"u{abs(hash(request.node.name))}"
    return connect(uds=service.address.removeprefix("unix:"), user=user)


def test_a_call_is_answered(client: Any) -> None:
    result = client.run(**PYTHON, code="print(6 * 7)", timeout=10)
    assert (result.status, result.stdout) == (Status.SUCCESS, "42\n")
    assert client.record(result.call_id).result == result
    assert [one.call_id for one in client.calls().calls] == [result.call_id]


def test_what_the_policy_refuses_is_a_result(client: Any) -> None:
    result = client.run(**PYTHON, code="1", allow_network=True, domains=["example.com"])
    assert (result.cause, result.error.rule) == (Cause.POLICY_REFUSED, "network.modes")
    explained = client.explain("https://example.com/", allow_network=True, domains=["example.com"])
    assert (explained.verdict, explained.rule) == ("refused", "network.modes")
    assert client.explain("https://example.com/", allow_network=True, domains=[]).mode == "unrestricted"


def test_every_fault_of_a_call_comes_back(client: Any) -> None:
    with pytest.raises(InvalidCall) as caught:
        client.run(language="ruby", code="\ud800", timeout=0, colour=1)
    assert len(caught.value.problems) == 4
    with pytest.raises(InvalidCall) as caught:
        client.code_exec("")
    assert [one.partition(":")[0] for one in caught.value.problems] == ["code"]


def test_the_same_key_is_the_same_run(client: Any) -> None:
    call = {**PYTHON, "code": "import uuid; print(uuid.uuid4())", "idempotency_key": "k"}
    assert client.run(call) == client.run(call)
    assert client.run(**PYTHON, code=call["code"]).stdout != client.run(**PYTHON, code=call["code"]).stdout
    with pytest.raises(InvalidCall):
        client.run({**call, "idempotency_key": ""})


def test_output_comes_as_it_is_written_and_is_whole_in_the_end(client: Any) -> None:
    task = client.submit(**PYTHON, code="for n in range(3):\n    print(n, 'é€' * 20_000)", timeout=20)
    events = list(task.events())
    text = "".join(event.data["text"] for event in events if event.kind == "stdout")
    assert text == "".join(f"{n} {'é€' * 20_000}\n" for n in range(3))
    assert [events[0].kind, events[-1].kind] == ["state", "result"]
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert task.read_all("stdout") == text
    assert client.output(task.task_id, "stdout", 2, 3).text == "é€é"
    again = list(client.events(task.task_id, after=events[-2].id))
    assert [event.kind for event in again] == ["result"]


def test_a_task_is_stopped_where_it_is(client: Any) -> None:
    task = client.submit(ENDLESS)
    seen = ""
    for event in task.events():
        if event.kind == "stdout":
            seen += event.data["text"]
            if seen.endswith("\n"):
                task.cancel()
    record = task.wait(30)
    assert (record.state, record.result.cause, record.result.stdout) == ("cancelled", Cause.CANCELLED, "begun\n")


def test_waiting_for_a_task_leaves_it_alone(client: Any) -> None:
    task = client.submit(ENDLESS)
    assert task.wait(0).state in ("waiting", "running")
    assert task.record().ended_at is None
    assert [one.call_id for one in client.tasks().calls] == [task.task_id]
    task.cancel()


def test_files_and_notes_are_a_user_s_own(client: Any, connect: Connect, service: Serving) -> None:
    detached = client.code_exec("open('f', 'w').write('mine'); print('written')", background=True)
    assert detached.success is None
    assert client.wait(detached.task_id, 30).code_exec.output == "written\n"
    seen = client.code_exec("print(open('f').read())")
    assert seen.output == "mine\n"
    assert [(note.task_id, note.text) for note in seen.notes] == [(detached.task_id, "written\n")]
    assert client.notes() == []
    stranger = connect(uds=service.address.removeprefix("unix:"), user="stranger")
    assert "FileNotFoundError" in stranger.code_exec("open('f')").output
    with pytest.raises(NotFound):
        stranger.record(detached.task_id)


def test_an_administrator_works_where_the_client_is(connect: Connect, home: Path, tmp_path: Path) -> None:
    """Where the policy permits the directory; what is outside of it is replaced, and told."""
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o777)
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"version: 1\nname: p\ncode_exec: {{working_directories: [{tmp_path}]}}\n")
    with serving(tmp_path / "state", "--uds", str(home / "run" / "a"), "--policy", str(policy)):
        client = connect(uds=home / "run" / "a", working_directory=project)
        assert not client.code_exec("open('made', 'w').write('here')").working_dir.replaced
        assert (project / "made").read_text() == "here"
        other = connect(uds=home / "run" / "a", working_directory=home)
        assert other.code_exec("print(1)").working_dir.replaced


def test_a_client_that_leaves_ends_its_call(service: Serving) -> None:
    """One without a key: with one, the client might come back."""
    with Client(uds=service.address.removeprefix("unix:"), user="leaver", retries=Retries(lost=0)) as client:
        failed: list[ServiceError] = []

        def ask() -> None:
            try:
                client.run(ENDLESS, once_only=False)
            except ServiceError as error:
                failed.append(error)

        with Client(uds=service.address.removeprefix("unix:"), user="leaver") as other:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            while not (found := other.calls().calls):
                time.sleep(0.02)
            for event in other.events(found[0].call_id):
                if event.kind == "stdout":
                    _cut(client)
            assert other.record(found[0].call_id).state == "cancelled"
        thread.join(30)
        assert isinstance(failed[0], ConnectionLost)


def _cut(client: Client) -> None:
    """Break the connections under a client, as a network does."""
    for connection in client._http._transport._pool.connections:  # type: ignore[attr-defined]
        connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def test_a_service_that_was_killed_tells_the_truth_afterwards(connect: Connect, home: Path, tmp_path: Path) -> None:
    """What had ended is there; what ran is lost, and not run again under its key."""
    arguments = (tmp_path / "state", "--uds", str(home / "run" / "k"))
    call = {**ENDLESS, "idempotency_key": "turn-1"}
    with serving(*arguments) as first:
        client = connect(uds=home / "run" / "k")
        done, lost = client.submit(**PYTHON, code="print(1)"), client.submit(call)
        assert done.wait(30).state == "finished"
        for event in lost.events():
            if event.kind == "stdout":
                first.process.kill()
                break
        first.process.wait(30)
        with pytest.raises(Unavailable):
            client.record(lost.task_id)
    with serving(*arguments):
        assert done.record().result.stdout == "1\n"
        assert lost.record().state == "lost"
        assert client.run(call).error.code == "executor_lost"
        assert {note.task_id: note.state for note in client.notes()} == {
            done.task_id: "finished",
            lost.task_id: "lost",
        }


def test_tokens_over_tls_say_whose_calls_they_are(connect: Connect, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(tmp_path / "cert.pem", append=number > 0)
    tokens = {name: new_token() for name in ("acme", "other")}
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "version: 1\nname: p\ntenants:\n"
        + "".join(
            f"  - name: {name}\n    tokens: [{{name: t, sha256: {hash_token(token)}, user: alice}}]\n"
            for name, token in tokens.items()
        )
    )
    tls = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with serving(tmp_path / "state", "--host", "127.0.0.1", "--port", "0", *tls, "--policy", str(policy)) as service:
        assert service.address.startswith("https://127.0.0.1:")
        acme = connect(service.address, token=tokens["acme"], ca=tmp_path / "ca.pem")
        other = connect(service.address, token=tokens["other"], ca=tmp_path / "ca.pem", user="alice")
        mine = acme.run(**PYTHON, code="print(1)")
        assert [one.call_id for one in acme.calls().calls] == [mine.call_id]
        assert other.calls().calls == []
        with pytest.raises(NotFound):
            other.record(mine.call_id)
        with pytest.raises(Unauthorised):
            connect(service.address, token=new_token(), ca=tmp_path / "ca.pem").calls()
        with pytest.raises(Unauthorised):
            connect(service.address, token=tokens["acme"], ca=tmp_path / "ca.pem", user="bob").calls()
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            connect(service.address, token=tokens["acme"]).calls()


def test_readiness_comes(client: Any) -> None:
    deadline = time.monotonic() + 100
    while not (readiness := client.ready()).ready:
        assert readiness.details["state"] == "checking", readiness.details
        assert time.monotonic() < deadline
        time.sleep(0.2)
