"""The audit log and the words of a denial: every layer gives the same reason, and one well-formed line a decision."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from proxy.network import Reason
from sandbox import Executor, Settings
from sandbox.contract import CodeCall
from tests.lab import BLOCK, NAMED, OPEN, PRELUDE, Lab, Outside, main_policy, named, parse_seen, read_events

DENIAL_KEYS = {"code", "reason", "host", "rule", "hint"}


def test_every_layer_gives_the_same_reason(lab: Lab, outside: Outside) -> None:
    """DNS, CONNECT, SOCKS5, captured TCP and HTTP deny one host with one reason code."""
    with outside.silence():
        run = lab.run(
            """
report(dns=dns("denied.test"))
report(connect=connect("denied.test:8080")[0])
report(socks5=socks5("denied.test", 8080)[0])
report(http=through_proxy("GET http://denied.test/secret?token=1 HTTP/1.1\\r\\nHost: denied.test\\r\\n\\r\\n"))
answer, sock = connect("denied.test:443")
with tls(sock, "denied.test") as inner:
    report(outer=answer["status"], inner=ask(inner, "GET / HTTP/1.1\\r\\nHost: denied.test\\r\\n\\r\\n"))
report(urllib=fetch("https://denied.test/"))
""",
            OPEN,
        )
    assert len(run.seen) == 6, run.result.stderr
    assert run.reasons == {Reason.HOST_DENIED}
    rules = {event["rule"] for event in run.denials}
    assert len(rules) == 1, "one rule decided everywhere"
    assert "deny" in rules.pop()
    assert {event["layer"] for event in run.denials} >= {"dns", "connect", "http"}
    connect, http, inner = run.seen[1]["connect"], run.seen[3]["http"], run.seen[4]
    assert connect["status"] == 403
    assert "denied.test" in connect["phrase"] or "denied" in connect["phrase"]
    assert run.seen[2]["socks5"] != 0
    assert inner["outer"] == 200
    for body in (http["json"], inner["inner"]["json"], run.seen[5]["urllib"]["json"]):
        assert body.keys() >= DENIAL_KEYS
        assert body["code"] == Reason.HOST_DENIED
        assert body["host"] == "denied.test"
        assert "deny" in body["rule"]
        assert body["hint"]


@pytest.mark.parametrize(
    ("call", "probe", "reason"),
    [
        (BLOCK, 'fetch("http://allowed.test/")', Reason.NETWORK_OFF),
        (BLOCK, 'fetch("https://allowed.test/")', Reason.NETWORK_OFF),
        (NAMED, 'fetch("https://other.test/")', Reason.HOST_NOT_ALLOWED),
        (NAMED, 'fetch("http://allowed.test:8081/")', Reason.PORT_NOT_ALLOWED),
        (named("readonly.test"), 'fetch("https://readonly.test/", "DELETE")', Reason.METHOD_NOT_ALLOWED),
        (named("paths.test"), 'fetch("https://paths.test/private")', Reason.PATH_NOT_ALLOWED),
        (named("loop.test"), 'fetch("http://loop.test/")', Reason.ADDRESS_NOT_PUBLIC),
        (named("loop.test"), 'fetch("https://loop.test/")', Reason.ADDRESS_NOT_PUBLIC),
        (OPEN, 'fetch("http://169.254.169.254/latest/meta-data/")', Reason.ADDRESS_NOT_PUBLIC),
    ],
)  # fmt: skip
def test_a_denial_says_why_and_what_to_do(lab: Lab, call: dict[str, object], probe: str, reason: Reason) -> None:
    """A program that prints the answer shows the code, the host, the rule and a hint, over HTTP and TLS."""
    run = lab.run(f"report(seen={probe})", call)
    seen = run.only["seen"]
    assert seen["status"] == 403, seen
    assert seen["json"]["code"] == reason
    assert seen["json"].keys() >= DENIAL_KEYS
    assert seen["json"]["host"] in probe
    assert isinstance(seen["json"]["reason"], str)
    assert len(seen["json"]["hint"]) > 10
    assert run.reasons == {reason}
    assert {d.reason for d in run.result.network.destinations if d.decision == "deny"} == {reason}


def test_requests_shows_the_body_of_a_denied_https_request(lab: Lab) -> None:
    """The most used client shows the whole denial, not only that a tunnel failed."""
    run = lab.run(
        'import requests\nanswer = requests.get("https://other.test/")\nreport(status=answer.status_code, seen=answer.json())',
        NAMED,
    )
    assert run.only["status"] == 403
    assert run.only["seen"]["code"] == Reason.HOST_NOT_ALLOWED


FIELDS = {
    "decision": {
        "time", "call_id", "attempt_id", "layer", "protocol", "host", "port", "sni", "method", "path", "address",
        "decision", "reason", "rule", "policy_name", "policy_digest",
    },
    "connection": {
        "time", "call_id", "attempt_id", "protocol", "host", "port", "sni", "address", "status", "bytes_in", "bytes_out",
        "duration_seconds", "policy_name", "policy_digest",
    },
    "attempt": {"time", "call_id", "attempt_id", "policy_name", "policy_digest"},
}  # fmt: skip


def test_a_call_is_in_the_log_from_start_to_end(lab: Lab, outside: Outside) -> None:
    """Start, each decision in the order in which the layers met it, each connection's end, end: with all their fields."""
    run = lab.run('fetch("https://allowed.test/echo?secret=canary")\nfetch("http://other.test/")', NAMED)
    kinds = [event["event"] for event in run.events]
    assert kinds[0] == "attempt"
    assert kinds[-1] == "attempt"
    assert run.events[0]["phase"] == "start"
    assert run.events[-1]["phase"] == "end"
    assert set(kinds) == {"attempt", "decision", "connection"}
    for event in run.events:
        assert event.keys() >= FIELDS[event["event"]], event["event"]
        assert event["call_id"] == run.result.call_id
        assert event["policy_name"] == "tests-main"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", event["time"])
    assert [event["time"] for event in run.events] == sorted(event["time"] for event in run.events)
    assert len({event["policy_digest"] for event in run.events}) == 1
    (dial,) = [e for e in run.events if e.get("layer") == "dial"]
    assert dial["address"] == outside.allowed.address
    (ended,) = [e for e in run.events if e["event"] == "connection" and e.get("path") == "/echo"]
    assert (ended["status"], ended["method"], ended["sni"]) == (200, "GET", "allowed.test")
    assert ended["bytes_in"] > 0
    assert ended["duration_seconds"] > 0


def test_a_query_is_never_in_the_log(lab: Lab) -> None:
    """Queries, credentials and bodies hold secrets: none of them is in the log or the result's report."""
    run = lab.run(
        """
fetch("https://allowed.test/echo?token=CANARY-1#CANARY-2", "POST", b"CANARY-3", Authorization="Bearer CANARY-4", Cookie="CANARY-5")
fetch("http://other.test/x?token=CANARY-6")
through_proxy("GET http://user:CANARY-7@other.test/?CANARY-8 HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n")
""",
        NAMED,
    )
    assert run.denials
    assert "CANARY" not in json.dumps(run.events)
    assert "CANARY" not in run.result.network.model_dump_json()


def test_whatever_the_code_sends_a_line_stays_a_line(lab: Lab) -> None:
    """Line ends, escape sequences, quotes and huge names in any place make one JSON object a line. (forged lines)"""
    before = len(lab.log.read_bytes().split(b"\n")) if lab.log.exists() else 0
    run = lab.run(
        r"""
nasty = 'a\x1b[2J"}\\n{"event": "decision", "decision": "allow"}\u2028' + "x" * 5000
for target in ("http://other.test/" + nasty.replace(" ", "\t"), "http://" + nasty[:60].replace(" ", "") + ".test/"):
    through_proxy((f"GET {target} HTTP/1.1\r\nHost: other.test\r\n\r\n").encode("utf-8"))
through_proxy(b"GET http://other.test/\xff\xfe\x80%0a%0d HTTP/1.1\r\nHost: other.test\xff\r\n\r\n")
through_proxy(b"G\xffT\x01 http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n")
connect("other.test\x1b:443")
dns('evil"\\\x1b\x00\x0a.other.test')
socks5("x" * 255, 443)
with socket.create_connection(("8.8.8.8", 443)) as raw:
    try:
        tls(raw, "a" * 60 + ".other.test", verify=False)
    except OSError:
        pass
report(done=True)
""",
        NAMED,
    )
    assert run.only["done"], run.result.stderr
    lines = lab.log.read_bytes().split(b"\n")[before - 1 if before else 0 :]
    assert lines[-1] == b"", "the log ends with a line's end"
    for line in lines[:-1]:
        assert isinstance(json.loads(line), dict)
        assert all(32 <= byte < 127 for byte in line)
        assert len(line) < 16_384
    assert all(event["decision"] != "allow" for event in run.events if event["event"] == "decision")


def test_the_result_counts_what_was_asked(lab: Lab) -> None:
    """The result's report has each destination with its verdict, its reason and its count."""
    run = lab.run('for _ in range(3):\n    fetch("http://allowed.test/echo")\n    fetch("http://other.test/")', NAMED)
    report = run.result.network
    assert report.mode == "named"
    assert report.allowed > 0
    assert report.denied == 3
    listed = {(d.host, d.port, d.decision, d.reason): d.count for d in report.destinations}
    assert listed["other.test", 80, "deny", "host_not_allowed"] == 3
    assert listed["allowed.test", 80, "allow", "allowed"] >= 3


def test_attempts_at_once_do_not_mix(outside: Outside, open_lab: Callable[[str], AbstractContextManager[Lab]]) -> None:
    """20 attempts at once, each with another grant: each reaches its own host only, each line bears its attempt."""
    hosts = ["allowed.test", "other.test", "six.test", "nothing"]
    code = PRELUDE + "\n".join(
        f'report(host="{host}", status=fetch("http://{host}/echo/{{}}".format(os.environ["N"]))["status"])'
        for host in hosts[:3]
    )

    async def main(lab: Lab) -> list[tuple[str, str, list[dict[str, object]]]]:
        settings = Settings(state_dir=lab.log.parent / "second", audit_log=lab.log.parent / "second.jsonl")
        async with Executor(lab.policy, settings=settings) as executor:

            async def one(number: int) -> tuple[str, str, list[dict[str, object]]]:
                host = hosts[number % 4]
                call = CodeCall(
                    language="python",
                    code=code,
                    env={"N": str(number)},
                    allow_network=host != "nothing",
                    domains=None if host == "nothing" else [host],
                    timeout=120,
                )
                result = await executor.run(call)
                assert result.status == "success", result.stderr
                return host, result.attempts[0].attempt_id, list(parse_seen(result.stdout))

            return await asyncio.gather(*(one(number) for number in range(20)))

    with open_lab(main_policy(outside)) as lab:
        outside.forget()
        outcomes = asyncio.run(main(lab))
        events = read_events(lab.log.parent / "second.jsonl")
    assert len({attempt for _, attempt, _ in outcomes}) == 20
    for number, (host, attempt, seen) in enumerate(outcomes):
        assert {one["host"] for one in seen if one["status"] == 200} == {host} - {"nothing"}
        own = [event for event in events if event.get("attempt_id") == attempt]
        allowed = {event["host"] for event in own if event.get("decision") == "allow"}
        assert {name for name in allowed if name.endswith(".test")} == {host} - {"nothing"}
        paths = {event["path"] for event in own if event.get("path")}
        assert paths <= {f"/echo/{number}"}, "a line bears another attempt's request"


@pytest.mark.parametrize("call", [BLOCK, NAMED, OPEN], ids=["block-all", "named", "unrestricted"])
def test_nothing_in_the_attempt_steers_the_proxy(lab: Lab, outside: Outside, call: dict[str, object]) -> None:
    """Files, variables and configuration that the code makes do not change a verdict."""
    with outside.silence():
        run = lab.run(
            """
for name in ("MITMPROXY_HOME", "SLUICEGATE_POLICY", "PYTHONPATH", "SSLKEYLOGFILE", "MITMPROXY_SSLKEYLOGFILE"):
    os.environ[name] = "/workspace/x"
for path in ("/workspace/.mitmproxy/config.yaml", os.path.expanduser("~/.mitmproxy/config.yaml"), "/tmp/policy.yaml"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write("allow_hosts: ['.*']\\nrawtcp: true\\nignore_hosts: ['.*']\\n")
report(seen=[fetch("http://denied.test/"), fetch("https://denied.test/")])
""",
            call,
        )
    assert run.only["seen"][0]["status"] == 403
    assert run.denials
