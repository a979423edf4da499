"""Claims about `sluicegate audit`: one line an event, exit statuses, and nothing that a terminal would obey."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from proxy.audit import AuditLog
from proxy.events import AttemptEvent, CallEvent, ConnectionEvent, DecisionEvent, Event, PolicyEvent, ProxyEvent
from sandbox.audit_commands import app, format_line

RUNNER = CliRunner()
TOP = Path(__file__).parents[2]


IDS = {"call_id": "c1", "attempt_id": "attempt-one-two", "policy_name": "team", "policy_digest": "d"}
EVENTS: tuple[tuple[type[Event], dict[str, object]], ...] = (
    (AttemptEvent, {**IDS, "phase": "start", "mode": "named", "domains": ("a.example", "b.example")}),
    (
        DecisionEvent,
        {
            **IDS,
            "layer": "http",
            "protocol": "http",
            "host": "a.example",
            "port": 443,
            "method": "GET",
            "path": "/x",
            "decision": "allow",
            "reason": "allowed",
            "rule": "call.domains[0]",
        },
    ),
    (
        DecisionEvent,
        {
            **IDS,
            "call_id": "c2",
            "layer": "dial",
            "protocol": "tls",
            "host": "evil.example",
            "port": 443,
            "address": "10.0.0.1",
            "decision": "deny",
            "reason": "address_not_public",
        },
    ),
    (
        ConnectionEvent,
        {
            **IDS,
            "protocol": "http",
            "host": "::1",
            "port": 80,
            "status": 200,
            "outcome": "completed",
            "bytes_in": 5,
            "bytes_out": 7,
            "duration_seconds": 0.25,
        },
    ),
    (ProxyEvent, {"what": "stop"}),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        for second, (kind, fields) in enumerate(EVENTS, 1):
            log.write(kind(time=float(second), **fields))  # type: ignore[arg-type]  # the table's values fit its kinds
    return path


def show(*arguments: object) -> str:
    result = RUNNER.invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_event_is_one_line_with_what_it_was_about_and_why(path: Path) -> None:
    start = 'call_id=c1 mode=named domains=["a.example","b.example"]'
    assert show(path).splitlines() == [
        f"1970-01-01T00:00:01.000000Z attempt-one- attempt    start    {start}",
        "1970-01-01T00:00:02.000000Z attempt-one- http       allow    a.example:443 GET /x allowed [call.domains[0]]",
        "1970-01-01T00:00:03.000000Z attempt-one- dial       deny     evil.example:443 (10.0.0.1) address_not_public",
        "1970-01-01T00:00:04.000000Z attempt-one- connection completed [::1]:80 status=200 in=5 out=7 0.250s",
        "1970-01-01T00:00:05.000000Z -            proxy      stop     -",
    ]


def test_events_are_chosen_by_call_and_by_verdict(path: Path) -> None:
    assert len(show(path, "--call", "c1").splitlines()) == 3
    assert len(show(path, "--denied").splitlines()) == 1
    assert show(path, "--denied", "--call", "c1") == ""


def test_events_are_chosen_by_tenant_and_policies_have_a_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        log.write(
            PolicyEvent(time=1.0, what="reloaded", old_digest="sha256:a", new_digest="sha256:b", detail="3 calls")
        )
        log.write(PolicyEvent(time=2.0, what="rejected", old_digest="sha256:b", detail="policy.yaml:3: no"))
        log.write(CallEvent(time=3.0, call_id="c1", tenant="acme", what="lost", started_at=1.0))
        log.write(CallEvent(time=4.0, call_id="c2", what="lost", started_at=1.0))
    assert show(path).splitlines() == [
        "1970-01-01T00:00:01.000000Z -            policy     reloaded old_digest=sha256:a new_digest=sha256:b 3 calls",
        "1970-01-01T00:00:02.000000Z -            policy     rejected old_digest=sha256:b policy.yaml:3: no",
        "1970-01-01T00:00:03.000000Z -            call       lost     call_id=c1 tenant=acme started_at=1.0",
        "1970-01-01T00:00:04.000000Z -            call       lost     call_id=c2 started_at=1.0",
    ]
    assert show(path, "--tenant", "acme").splitlines() == show(path).splitlines()[2:3]


def test_json_shows_the_events_of_the_log(path: Path) -> None:
    shown = [json.loads(line) for line in show(path, "--json").splitlines()]
    assert shown == [json.loads(line) for line in path.read_bytes().splitlines()]


def test_the_default_log_is_that_of_the_state_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_STATE_DIR", str(path.parent))
    assert len(show().splitlines()) == 5
    assert RUNNER.invoke(app, ["verify"]).exit_code == 0


def test_verify_says_intact_and_exits_0(path: Path) -> None:
    result = RUNNER.invoke(app, ["verify", str(path)])
    assert (result.exit_code, result.stdout) == (0, "intact: 5 lines in 1 file\n")


def test_verify_names_the_first_broken_line_and_exits_1(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"evil.example", b"good.example"))
    result = RUNNER.invoke(app, ["verify", str(path)])
    assert result.exit_code == 1
    assert result.stdout.startswith(f"broken: {path}:4: its `prev` is not the hash of the line before")


def test_verify_tells_of_lines_that_a_crash_cut_short(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"seq":6')
    result = RUNNER.invoke(app, ["verify", str(path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith(f"incomplete: {path}:6: ")


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_cannot_be_read_exits_2(command: str, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, [command, str(tmp_path / "no\x1b[2Jne")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the audit log `")
    assert result.stderr.endswith("cannot be read: no such file or directory\n")
    assert "\x1b" not in result.stderr


def test_damaged_lines_go_to_the_error_output(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"damage\n")
    result = RUNNER.invoke(app, ["show", str(path), "--denied"])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == f"warning: {path}:6: it is not a whole event\n"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    "time", "event", "attempt_id", "call_id", "layer", "decision", "host", "port", "method", "path", "address",
    "reason", "rule", "outcome", "status", "error", "bytes_in", "bytes_out", "duration_seconds", "phase", "domains",
    "what", "detail",
]  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(KEYS), JSON),
    st.sampled_from(["decision", "connection", "attempt", "proxy", "other"]),
)
def test_an_event_of_any_content_is_one_line_of_printable_ascii(fields: dict[str, object], kind: str) -> None:
    line = format_line({**fields, "event": kind})
    assert line.isascii()
    assert line.isprintable()


@given(text=st.text(st.characters(exclude_categories=())), raw=st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_nothing_of_a_hostile_log_reaches_the_terminal_but_printable_ascii(
    tmp_path: Path, text: str, raw: bytes
) -> None:
    path = tmp_path / "hostile.jsonl"
    fields = {"seq": 1, "time": text, "event": "decision", "host": text, text: text, "decision": "deny\x9b\x7f"}
    loose = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    path.write_bytes(loose + b"\n" + json.dumps(fields).encode() + b"\n" + raw)
    for options in ([], ["--json"]):
        result = RUNNER.invoke(app, ["show", str(path), *options])
        assert result.exit_code == 0
        for line in (result.stdout + result.stderr).split("\n"):
            assert line.isascii()
            assert line.isprintable()


def test_a_reader_that_has_seen_enough_is_no_error(path: Path) -> None:
    with AuditLog(path) as log:
        for _ in range(3000):
            log.write(ProxyEvent(time=1.0, what="test", detail="x" * 100))
    command = f"{sys.executable} -c 'from sandbox.audit_commands import app; app()' show {path} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=TOP,
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_a_terminal_without_unicode_gets_the_same_lines(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from sandbox.audit_commands import app; app()", "show", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=TOP,
        env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "20"},
    )
    assert (done.returncode, done.stdout) == (0, show(path)), done.stderr
