"""A policy that is loaded anew takes from the code that runs what it does not allow: nothing of that arrives any more.

Each program tries on, and its policy is exchanged under it. Each with its control: under a policy that still allows
what the program is at, it goes on undisturbed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab import PRELUDE, Outside, main_policy
from tests.remote_executor import RemoteCall, RemoteExecutor
from tests.servers import Peer
from tests.unprivileged import unprivileged_command

pytestmark = pytest.mark.slow  # each test starts a service, or programs that go on for a while

USERS = ("as we are", "unprivileged")
ENOUGH = 10  # tries after the policy was exchanged, all of them denied

REQUESTS = f"""
denied = 0
while denied < {ENOUGH}:
    answer = fetch("http://allowed.test/echo")
    denied = denied + 1 if answer["status"] == 403 else 0
    print("denied" if denied else "tried", flush=True)
report(last=answer["json"])
"""

KEPT_ALIVE = f"""
import http.client
denied = 0
connection = http.client.HTTPSConnection(*proxy_address(), context=ssl.create_default_context())
connection.set_tunnel("allowed.test", 443)
while denied < {ENOUGH}:
    try:
        connection.request("GET", "/echo")
        answer = connection.getresponse()
        body = answer.read()
        denied = denied + 1 if answer.status == 403 else 0
        report_ = json.loads(body)
    except (OSError, http.client.HTTPException):
        connection.close()  # it was cut in the midst of a request
        continue
    print("denied" if denied else "tried", flush=True)
report(last=report_)
"""

_LINES = f"""
def lines(sock):
    sock.recv(1000)
    while True:
        sock.sendall(b"NOOP\\r\\n")
        if not sock.recv(1000):
            raise ConnectionResetError
        print("tried", flush=True)

denied = 0
while denied < {ENOUGH}:
    try:
        lines(opened())
    except (OSError, AssertionError):
        denied += 1
        print("denied", flush=True)
report(last=None)
"""

RAW_TCP = """
def opened():
    return socket.create_connection(("mail.test", 2525), PATIENCE)
""" + _LINES  # fmt: skip

SYNTHETIC = """
address = socket.gethostbyname("mail.test")
def opened():
    return socket.create_connection((address, 2525), PATIENCE)
""" + _LINES  # fmt: skip

TUNNEL = """
def opened():
    answer, sock = connect("mail.test:2525")
    assert answer["status"] == 200
    return sock
""" + _LINES  # fmt: skip

# The proxy's refusal is inside TLS that this program does not take: its trust is the server's own authority.
PASSTHROUGH = """
def opened():
    answer, sock = connect("pinned.test:443")
    assert answer["status"] == 200
    context = ssl.create_default_context(cadata=AUTHORITY)
    inner = context.wrap_socket(sock, server_hostname="pinned.test")
    return inner
""" + _LINES.replace("    sock.recv(1000)\n", "").replace(
    'b"NOOP\\r\\n"', 'b"GET /echo HTTP/1.1\\r\\nHost: pinned.test\\r\\n\\r\\n"'
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    code: str
    domains: tuple[str, ...]
    peer: Callable[[Outside], Peer]
    readable: bool = False  # the program is told why


CASES = (
    Case("requests", REQUESTS, ("allowed.test",), lambda outside: outside.allowed, readable=True),
    Case("kept-alive", KEPT_ALIVE, ("allowed.test",), lambda outside: outside.allowed_tls, readable=True),
    Case("raw-tcp", RAW_TCP, ("mail.test",), lambda outside: outside.mail),
    Case("synthetic-address", SYNTHETIC, ("mail.test",), lambda outside: outside.mail),
    Case("connect-tunnel", TUNNEL, ("mail.test",), lambda outside: outside.mail),
    Case("passthrough-tls", PASSTHROUGH, ("pinned.test",), lambda outside: outside.pinned),
)


def policy_at(root: Path, outside: Outside) -> str:
    """The main policy, with the peers' authority where every user can read it."""
    return main_policy(outside).replace(str(outside.ca_file), str(root / "ca.pem"))


def without(policy: str, *hosts: str) -> str:
    document = json.loads(policy)
    network = document["network"]
    network["allow"] = [entry for entry in network["allow"] if entry["host"] not in hosts]
    network["inspect"]["passthrough"] = [host for host in network["inspect"]["passthrough"] if host not in hosts]
    return json.dumps(document)


def without_named(policy: str) -> str:
    document = json.loads(policy)
    document["network"]["modes"] = ["block-all", "registry-default"]
    return json.dumps(document)


@pytest.fixture(scope="module", params=USERS)
def executor(request: pytest.FixtureRequest, outside: Outside) -> Iterator[RemoteExecutor]:
    with ExitStack() as stack:
        prefix: list[str] = []
        if request.param == "unprivileged":
            if os.getuid() != 0:
                pytest.skip("the tests already run as an unprivileged user")
            prefix = stack.enter_context(unprivileged_command())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sg-", ignore_cleanup_errors=True)))
        root.chmod(0o777)
        (root / "ca.pem").write_bytes(outside.ca_file.read_bytes())
        (root / "ca.pem").chmod(0o644)
        (root / "policy.yaml").write_text(policy_at(root, outside))
        (root / "policy.yaml").chmod(0o644)
        yield stack.enter_context(RemoteExecutor(root, prefix, warm_sandboxes=0))


def start(executor: RemoteExecutor, outside: Outside, case: Case) -> RemoteCall:
    executor.reload(policy_at(executor.root, outside))
    outside.forget()
    authority = f"AUTHORITY = {outside.ca_file.read_text()!r}\n"
    code = f"{PRELUDE}\n{authority}{case.code}"
    call = executor.start(code, allow_network=True, domains=list(case.domains), timeout=120)
    call.says("tried", 3)
    return call


def denials(executor: RemoteExecutor, call: RemoteCall) -> set[str]:
    return {
        event["reason"]
        for event in executor.events()
        if event.get("call_id") == call.call_id and event.get("decision") == "deny"
    }


@pytest.mark.parametrize("how", ["a rule is gone", "the mode is gone"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_arrives_once_the_policy_is_in_force(
    executor: RemoteExecutor, outside: Outside, case: Case, how: str
) -> None:
    peer = case.peer(outside)
    call = start(executor, outside, case)
    policy = policy_at(executor.root, outside)
    executor.reload(without(policy, *case.domains) if how == "a rule is gone" else without_named(policy))
    peer.wait(lambda journal: journal.open == 0)  # whatever was on its way is read by then
    with outside.silence():
        result = call.result()
    assert result.status == "success", result.stderr
    if case.readable:
        last: dict[str, Any] = json.loads(result.stdout.splitlines()[-1].removeprefix("@@SEEN "))["last"]
        assert last["code"] == "policy_revoked"
        assert "changed while this code ran" in last["hint"]
    assert denials(executor, call) == {"policy_revoked"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_policy_allows_still_goes_on(executor: RemoteExecutor, outside: Outside, case: Case) -> None:
    """The control: the same exchange of policies, of which the new one takes away something else."""
    call = start(executor, outside, case)
    executor.reload(without(policy_at(executor.root, outside), "other.test", "h2.test"))
    call.says("tried", call.output.count("tried") + 20)
    assert "denied" not in call.output
    assert denials(executor, call) == set()
    executor.reload(without(policy_at(executor.root, outside), *case.domains))
    assert call.result().status == "success"
