"""The service as a process: it says where it listens, takes new policies, drains, ends, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.remote_executor import PATIENCE, groups, until
from tests.service.serving import TOP, Service, Token, detach, ended, policy_text, run
from tests.service.test_auth import code
from tests.unprivileged import unprivileged_command

SLEEP = "import time\nprint('begun', flush=True)\ntime.sleep(50)\n"


def begun(client: httpx.Client, call_id: str) -> None:
    """Return once its program runs."""
    until(lambda: client.get(f"/v1/calls/{call_id}/output").json()["text"] == "begun\n", "it runs")


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, PATIENCE)
    assert alive == []


# From start to end


def test_it_says_where_it_listens_and_leaves_nothing_behind(root: Path) -> None:
    with Service(root, policy_text()) as service:
        assert service.said == f"listening on unix:{root}/s.sock\n"
        with service.client() as client:
            assert run(client, "print(1)").json()["stdout"] == "1\n"
        started = service.children()
        assert len(started) >= 2
        (launcher,) = {process.pid for process in started if list(groups(process.pid))} or {0}
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    gone(started)
    assert sorted(path.name for path in root.iterdir()) == ["policy.yaml", "state"]
    assert list(groups(launcher)) == []


def test_over_tcp_it_says_which_port_it_got(root: Path) -> None:
    token = Token("ci")
    policy = policy_text(tenants=[{"name": "acme", "tokens": [token.entry]}])
    with Service(root, policy, "--host", "127.0.0.1", "--port", "0") as service:
        assert service.place == f"http://127.0.0.1:{service.port}"
        with service.client(token) as client:
            assert run(client, "print(1)").json()["stdout"] == "1\n"


def test_without_an_address_it_listens_where_clients_look(root: Path) -> None:
    """In the runtime directory of its user."""
    runtime = root / "run"
    runtime.mkdir(mode=0o700)
    environment = {**os.environ, "SLUICEGATE_STATE_DIR": str(root / "state"), "XDG_RUNTIME_DIR": str(runtime)}
    with subprocess.Popen(
        [sys.executable, "-m", "sandbox.cli", "serve"], cwd=TOP, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = process.stdout.readline()
        process.terminate()
    assert said == f"listening on unix:{runtime}/sluicegate/sluicegate.sock\n"
    assert process.returncode == 0


def starting(
    root: Path, *options: str, policy: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    (root / "policy.yaml").write_text(policy or policy_text())
    return subprocess.run(
        [sys.executable, "-m", "sandbox.cli", "serve", "--policy", str(root / "policy.yaml"), *options],
        cwd=TOP, env={**os.environ, "SLUICEGATE_STATE_DIR": str(root / "state"), **environment},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


REFUSED = [
    (["--uds", "/x", "--port", "1"], "`--uds` and `--host` or `--port`"),
    (["--port", "0"], "the policy has no `tenants`"),
    (["--port", "99999"], "`--port` is `99999`"),
    (["--tls-cert", "/x"], "TLS needs `--tls-cert` and `--tls-key`"),
    (["--tls-cert", "/x", "--tls-key", "/y"], "TLS is for TCP"),
    (["--drain-seconds", "-1"], "`--drain-seconds`"),
    (["--drain-seconds", "nan"], "`--drain-seconds`"),
    (["--max-concurrency", "0"], "`max_concurrency` is `0`"),
    (["--warm", "-1"], "`warm_sandboxes` is `-1`"),
    (["--uds", "/" + "x" * 200], "more than 107 bytes"),
    (["--uds", "/x", "--allowed-host", "a b"], "`--allowed-host`"),
]
MANY_STARTS = """
import json, sys
from typer.testing import CliRunner
from sandbox.cli import app
for options in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, ["serve", *options])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


def test_options_that_cannot_be_are_refused_before_anything_starts(root: Path) -> None:
    """One process tries them all, since to start takes longer than to refuse."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_STARTS, json.dumps([options for options, _ in REFUSED])],
        cwd=TOP, env={**os.environ, "SLUICEGATE_STATE_DIR": str(root / "state")}, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(REFUSED), done.stderr
    for (options, said), (status, out, errors) in zip(REFUSED, told, strict=True):
        assert (status, out) == (2, ""), options
        assert said in errors
        assert "hint: " in errors
    assert not (root / "state").exists()


def test_a_policy_that_is_none_is_refused_with_all_its_faults(root: Path) -> None:
    done = starting(root, policy='{"version": 2, "nam": 1}')
    assert (done.returncode, done.stdout) == (2, "")
    assert "version" in done.stderr
    assert "nam" in done.stderr


def test_a_second_service_at_one_socket_is_told_so(root: Path) -> None:
    with Service(root, policy_text()) as service:
        done = starting(root, "--uds", service.socket_path)
        assert (done.returncode, done.stdout) == (3, "")
        assert "another server listens" in done.stderr
        with service.client() as client:
            assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_starts_ends_it_as_one_later_would(root: Path, number: signal.Signals) -> None:
    """Whatever has been started by then ends, too."""
    (root / "policy.yaml").write_text(policy_text())
    process = subprocess.Popen(
        [sys.executable, "-m", "sandbox.cli", "serve", "--policy", str(root / "policy.yaml"), "--uds", str(root / "s")],
        cwd=TOP, env={**os.environ, "SLUICEGATE_STATE_DIR": str(root / "state")}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        started: list[psutil.Process] = until(lambda: psutil.Process(process.pid).children(), "something was started")
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    gone(started)
    assert not (root / "s").exists()


# Draining


def test_at_a_signal_it_begins_nothing_more_and_lets_what_runs_end(root: Path) -> None:
    """Who waits has the answer; who asks for more is told that the service is about to end; questions are answered."""
    with Service(root, policy_text()) as service, service.client() as client, service.client() as other:
        answers: list[httpx.Response] = []
        program = "import time\nprint('begun', flush=True)\ntime.sleep(4)\nprint('whole')"
        waiting = threading.Thread(target=lambda: answers.append(run(other, program)))
        waiting.start()
        task_id = detach(client, program)
        begun(client, task_id)
        service.signal(signal.SIGTERM)
        service.logs("nothing more is begun")
        for answer in (run(client, "print(1)"), client.post("/v1/code_exec", json={"code": "1"})):
            assert (answer.status_code, code(answer)) == (503, "draining")
            assert int(answer.headers["retry-after"]) >= 1
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["state"]) == (503, "draining")
        assert client.get("/healthz").status_code == 200
        assert ended(client, task_id)["result"]["stdout"] == "begun\nwhole\n"
        assert service.wait() == 0
        waiting.join(PATIENCE)
        assert answers[0].json()["stdout"] == "begun\nwhole\n"


def test_what_does_not_end_in_its_time_is_cancelled_and_told_so_later(root: Path) -> None:
    with Service(root, policy_text(), "--drain-seconds", "0.5") as service, service.client() as client:
        task_id = detach(client, SLEEP)
        begun(client, task_id)
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    with Service(root, policy_text()) as service, service.client() as client:
        record = client.get(f"/v1/tasks/{task_id}").json()
        assert (record["state"], record["result"]["stdout"]) == ("cancelled", "begun\n")
        (note,) = client.post("/v1/notes").json()["notes"]
        assert (note["task_id"], note["state"], note["success"]) == (task_id, "cancelled", False)


def test_a_second_signal_does_not_wait(root: Path) -> None:
    with Service(root, policy_text(), "--drain-seconds", "3000") as service, service.client() as client:
        task_id = detach(client, SLEEP)
        begun(client, task_id)
        started = service.children()
        service.signal(signal.SIGTERM)
        service.logs("nothing more is begun")
        service.signal(signal.SIGINT)
        assert service.wait() == 0
    gone(started)


def test_killed_it_leaves_nothing_running_and_says_what_was_lost_at_its_next_start(root: Path) -> None:
    with Service(root, policy_text()) as service, service.client() as client:
        task_id = detach(client, SLEEP)
        begun(client, task_id)
        done = detach(client, "print('kept')")
        ended(client, done)
        started = service.children()
        service.signal(signal.SIGKILL)
        service.wait()
    gone(started)
    with Service(root, policy_text()) as service, service.client() as client:
        service.logs("lost with the service before this one: 1")
        assert client.get(f"/v1/tasks/{task_id}").json()["state"] == "lost"
        assert client.get(f"/v1/tasks/{done}").json()["result"]["stdout"] == "kept\n"
        notes = {note["task_id"]: note["state"] for note in client.post("/v1/notes").json()["notes"]}
        assert notes == {task_id: "lost", done: "finished"}


# Policies


def test_a_new_policy_is_in_force_for_the_next_call_and_a_broken_one_never(root: Path) -> None:
    def mode(client: httpx.Client) -> str:
        answer = client.get(
            "/v1/policy/explain", params={"url": "https://a.test/", "allow_network": True, "domains": ""}
        )
        return str(answer.json()["verdict"])

    with Service(root, policy_text()) as service, service.client() as client:
        assert mode(client) == "refused"
        service.policy.write_text(policy_text(network={"modes": ["unrestricted"]}))
        until(lambda: mode(client) == "allow", "the new policy is in force")
        service.policy.write_text("version: 1\nnetwork: {modes: [nonesuch]}\nmore: 1\n")
        service.logs("the policy in force stays")
        service.logs("nonesuch")
        service.logs("`more`")
        assert mode(client) == "allow"
        counted = client.get("/metrics").text
        assert 'sluicegate_policy_reloads_total{outcome="rejected"} 1.0' in counted
        assert "sluicegate_policy_file_broken 1.0" in counted


def test_a_hangup_looks_at_the_file_at_once(root: Path) -> None:
    with Service(root, policy_text()) as service, service.client() as client:
        service.signal(signal.SIGHUP)
        service.logs("is in force")
        assert 'sluicegate_policy_reloads_total{outcome="loaded"} 1.0' in client.get("/metrics").text


def test_what_takes_a_restart_is_not_taken_silently(root: Path) -> None:
    with Service(root, policy_text()) as service, service.client() as client:
        service.policy.write_text(policy_text(audit={"path": "elsewhere.jsonl"}))
        service.logs("restart to put it in force")
        assert run(client, "print(1)").status_code == 200
        assert not (root / "state" / "elsewhere.jsonl").exists()


def test_the_number_of_connections_follows_the_policy(root: Path) -> None:
    with Service(root, policy_text()) as service, service.connect() as busy:
        with service.client() as client:
            task_id = detach(client, SLEEP)
        busy.sendall(b"POST /v1/tasks/%s/wait?timeout=100 HTTP/1.1\r\nHost: a\r\n\r\n" % task_id.encode())
        service.policy.write_text(policy_text(service={"max_connections": 1}))

        def refused() -> bool:
            with service.connect() as wire:
                with contextlib.suppress(BrokenPipeError):
                    wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                return b"too_many_connections" in wire.recv(4096)

        until(refused, "one is too many")


# What watches over it


@pytest.fixture
def manager(root: Path) -> Iterator[socket.socket]:
    """A socket at which a service manager listens."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listening:
        listening.bind(str(root / "notify"))
        listening.settimeout(PATIENCE)
        yield listening


def test_the_service_manager_is_told_how_things_stand(root: Path, manager: socket.socket) -> None:
    with Service(root, policy_text(), environment={"NOTIFY_SOCKET": str(root / "notify")}) as service:
        assert manager.recv(4096) == b"READY=1"
        service.signal(signal.SIGHUP)
        assert manager.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert manager.recv(4096) == b"READY=1"
        service.signal(signal.SIGTERM)
        assert manager.recv(4096) == b"STOPPING=1"
        assert service.wait() == 0


def test_its_log_can_be_json_and_has_neither_tokens_nor_code_nor_output(root: Path) -> None:
    token = Token("ci")
    secret, printed = "s3cr3t-in-the-code", "s3cr3t-printed"
    policy = policy_text(tenants=[{"name": "acme", "tokens": [token.entry]}])
    with Service(root, policy, "--port", "0", "--log-json") as service, service.client(token) as client:
        run(client, f"'{secret}'; import sys; print('{printed}'); sys.exit(1)")
        run(client, f"'{secret}'", timeout="never")
        client.get("/v1/calls", params={"limit": secret})
        client.post("/v1/calls", headers={"authorization": f"Bearer {token.text}x"})
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
        lines: list[dict[str, Any]] = [json.loads(line) for line in service.log.splitlines()]
    assert {"time", "level", "logger", "message"} == set().union(*lines)
    for hidden in (token.text, secret, printed):
        assert hidden not in service.log


def test_an_ordinary_user_can_serve_too(root: Path) -> None:
    """With the same answers, a socket of their own, and nothing left behind."""
    root.chmod(0o1777)
    with unprivileged_command() as prefix, Service(root, policy_text(), prefix=prefix) as service:
        with service.client() as client:
            assert run(client, "print(1)").json()["stdout"] == "1\n"
            assert client.post("/v1/code_exec", json={"code": "open('kept', 'w').write('1')"}).json()["success"]
            until(lambda: client.get("/readyz").status_code == 200, "doctor has come to its verdict")
        started = service.children()
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    gone(started)
    assert not (root / "s.sock").exists()


def test_a_client_of_mcp_that_listens_does_not_hold_up_the_end(root: Path) -> None:
    """Its stream would never end by itself."""
    hello = {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }  # fmt: skip
    accept = {"accept": "application/json, text/event-stream"}
    with Service(root, policy_text()) as service, service.client() as client:
        session = client.post("/mcp", json=hello, headers=accept).headers["mcp-session-id"]
        with client.stream("GET", "/mcp", headers={**accept, "mcp-session-id": session}) as stream:
            assert stream.status_code == 200
            service.signal(signal.SIGTERM)
            begun_at = time.monotonic()
            assert service.wait() == 0
            assert time.monotonic() - begun_at < 4, "not until the connections were given up"
        assert "Traceback" not in service.log
