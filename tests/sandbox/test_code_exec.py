"""The code_exec contract: what is a call, how long it may take, and its answer as fields and as a text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.call_parsing import parse_call
from sandbox.code_exec import (
    CodeExecCall,
    CodeExecResult,
    Note,
    WorkingDirReport,
    clamp_timeout,
    code_exec_schema,
    output_text,
    parse_code_exec,
    result_of,
    shown,
)
from sandbox.contract import (
    MAX_CODE_CHARS,
    AttemptRecord,
    CallError,
    Cause,
    Evidence,
    InvalidCall,
    NetworkReport,
    PerStream,
    Status,
    ToolResult,
    Usage,
)

# --- the call

KINDS: dict[str, Any] = {
    "null": None, "true": True, "false": False, "number": 7, "fraction": 1.5, "text": "text", "list": ["a"],
    "object": {"a": 1},
}  # fmt: skip
ACCEPTED = {
    "code": {"text"},
    "working_dir": {"null", "text"},
    "timeout": set(KINDS),
    "background": {"null", "true", "false"},
}


@pytest.mark.parametrize("field", ACCEPTED)
@pytest.mark.parametrize("kind", KINDS)
def test_each_field_takes_its_kinds_of_json_and_no_other(field: str, kind: str) -> None:
    """The refusal names the field, and nothing else is refused with it."""
    data = {"code": "print(1)"} | {field: KINDS[kind]}
    if kind in ACCEPTED[field]:
        call = parse_code_exec(data)
        assert call.code == data["code"]
        assert call.background is (data.get("background") is True)
        assert call.working_dir == data.get("working_dir")
        return
    with pytest.raises(InvalidCall) as refused:
        parse_code_exec(data)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{field}: ")


@pytest.mark.parametrize("data", [None, True, 1, 1.5, "print(1)", [], [{"code": "1"}]])
def test_what_is_no_object_is_no_call(data: object) -> None:
    with pytest.raises(InvalidCall, match="call: it is not a JSON object, but"):
        parse_code_exec(data)


def test_what_is_left_out_has_its_default() -> None:
    assert parse_code_exec({"code": "1"}) == CodeExecCall("1", None, 30, background=False)
    assert parse_code_exec({"code": "1", "background": True}) == CodeExecCall("1", None, 300, background=True)
    assert parse_code_exec({"code": "1", "background": None, "working_dir": None, "timeout": None}) == CodeExecCall("1")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("code", "", "fewer than 1"),
        ("code", "x" * (MAX_CODE_CHARS + 1), f"more than {MAX_CODE_CHARS}"),
        ("code", "a\0b", "NUL"),
        ("code", "a\ud800", "surrogate"),
        ("working_dir", "a\0b", "NUL"),
        ("working_dir", "\udfff", "surrogate"),
    ],
)
def test_texts_have_bounds(field: str, value: str, problem: str) -> None:
    with pytest.raises(InvalidCall, match=rf"\A{field}: it .*{problem}"):
        parse_code_exec({"code": "1"} | {field: value})


def test_the_longest_code_is_one() -> None:
    assert len(parse_code_exec({"code": "é" * MAX_CODE_CHARS}).code) == MAX_CODE_CHARS


def test_all_faults_are_told_together_and_names_cannot_break_the_message() -> None:
    """One for each; what a caller wrote as a name is shown as plain text, cut."""
    with pytest.raises(InvalidCall) as refused:
        parse_code_exec({"working_dir": 1, "background": "yes", "\x1b[31m\n": 1, "tim" + "e" * 500: 1, "\ud800": 2})
    problems = refused.value.problems
    assert [problem.partition(":")[0] for problem in problems] == [
        r"\x1b[31m\n", "tim" + "e" * 77, r"\ud800", "code", "working_dir", "background",
    ]  # fmt: skip
    assert all(problem.isascii() and problem.isprintable() and len(problem) < 200 for problem in problems)
    assert "the fields are code, working_dir, timeout, background" in problems[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
ALMOST_CALLS = st.fixed_dictionaries(
    {}, optional={"code": st.text(max_size=20) | JSON, "working_dir": JSON, "timeout": JSON, "background": JSON}
)


@given(JSON | ALMOST_CALLS)
def test_any_json_is_a_call_or_invalid(data: object) -> None:
    """A call is then within its bounds, and can be written as UTF-8."""
    try:
        call = parse_code_exec(data)
    except InvalidCall:
        return
    assert 1 <= call.timeout <= 300
    assert call.code.encode()
    assert call.working_dir is None or call.working_dir.encode() is not None


def test_the_schema_names_the_same_fields_and_forbids_others() -> None:
    schema = code_exec_schema()
    assert list(schema["properties"]) == ["code", "working_dir", "timeout", "background"]
    assert (schema["required"], schema["additionalProperties"]) == (["code"], False)
    assert json.loads(json.dumps(schema)) == schema


# --- the timeout


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 1), (-5, 1), (0.5, 1), (1, 1), (1.5, 1.5), (30, 30), (30.0, 30), (120, 120), (299.9, 299.9), (300, 300),
        (300.1, 300), (10000, 300), (10**400, 300), (-(10**400), 1), (math.inf, 300), (-math.inf, 1), ("0", 1),
        ("60", 60), (" 60 ", 60), ("60.5", 60.5), ("1e2", 100), ("+7", 7), ("-7", 1), (".5", 1), ("5.", 5),
        ("10000", 300), ("9" * 60, 300), ("1e999", 300),
        ("", 30), ("abc", 30), ("60s", 30), ("0x10", 30), ("1_0", 30), ("NaN", 30), ("inf", 30), ("٦٠", 30),
        ("6 0", 30), ("9" * 65, 30), ("1" + " " * 64, 30), ("1e", 30), (".", 30), ("--1", 30),
        (math.nan, 30), (True, 30), (False, 30), (None, 30), ([60], 30), ({"seconds": 60}, 30),
    ],
)  # fmt: skip
def test_a_timeout_is_clamped_and_what_is_no_number_is_the_default(given: object, seconds: float) -> None:
    """Whole seconds are whole, so that the text of a timeout says `30s` and not `30.0s`."""
    assert clamp_timeout(given) == seconds
    assert f"{clamp_timeout(given):g}" == f"{seconds:g}"
    assert isinstance(clamp_timeout(given), int) == (seconds == int(seconds))
    assert parse_code_exec({"code": "1", "timeout": given, "background": True}).timeout == seconds


@pytest.mark.parametrize(("background", "seconds"), [(False, 30), (None, 30), (True, 300)])
def test_what_is_left_out_is_not_what_is_no_number(background: bool | None, seconds: int) -> None:
    """A detached call without an explicit timeout has 300 seconds; null is explicit, and no number."""
    call = {"code": "1", "background": background}
    assert parse_code_exec(call).timeout == seconds
    assert parse_code_exec(call | {"timeout": None}).timeout == 30


@given(JSON)
def test_any_json_gives_a_timeout_in_bounds(value: object) -> None:
    assert 1 <= clamp_timeout(value) <= 300


# --- the answer


@pytest.mark.parametrize(
    ("stdout", "stderr", "text"),
    [
        ("", "", "(no output)"),
        ("a\n", "", "a\n"),
        ("a", "", "a"),
        ("", "b\n", "[stderr] b\n"),
        ("a\n", "b", "a\n[stderr] b"),
        ("a", "b", "a\n[stderr] b"),
        ("\n", "b", "\n[stderr] b"),
        (" ", "", " "),
    ],
)
def test_the_text_is_stdout_then_stderr_with_its_prefix(stdout: str, stderr: str, text: str) -> None:
    assert output_text(stdout, stderr) == text


@given(st.text(), st.text())
def test_nothing_that_was_written_is_left_out_of_the_text(stdout: str, stderr: str) -> None:
    text = output_text(stdout, stderr)
    assert text.startswith(stdout)
    assert text.endswith(stderr)
    assert ("[stderr] " in text.removeprefix(stdout)) == bool(stderr)


PLACE = WorkingDirReport(requested="/etc", used=".", replaced=True, reason="`/etc` is not inside it")


def tool_result(status: Status, cause: Cause, *, code: str | None = None, ran: bool = True, **more: Any) -> ToolResult:
    """An answer as the executor gives it: every ending but success has an error."""
    attempt = AttemptRecord(
        attempt_id="call-1.1", started_at=1.0, ended_at=2.0, status=status, cause=cause, code=code or cause.value,
        evidence=Evidence(wall_limit_seconds=9, memory_limit_bytes=1, output_limit_bytes=1),
    )  # fmt: skip
    error = None if status is Status.SUCCESS else CallError(code=code or cause.value, message="what went wrong")
    return ToolResult(
        call_id="call-1", status=status, cause=cause, error=error, attempts=[attempt] if ran else [],
        network=NetworkReport(mode="block-all"), **more,
    )  # fmt: skip


def answer(result: ToolResult, *, background: bool = False) -> CodeExecResult:
    return result_of(result, seconds=9, place=PLACE, background=background)


@pytest.mark.parametrize("background", [False, True])
def test_success_is_the_exit_code_0(background: bool) -> None:
    """All that the fields say comes from what was observed."""
    result = tool_result(
        Status.SUCCESS, Cause.EXIT, exit_code=0, stdout="out\n", stderr="err\n", usage=Usage(wall_seconds=1.25)
    )
    assert answer(result, background=background) == CodeExecResult(
        success=True, output="out\n[stderr] err\n", exit_code=0, call_id="call-1",
        task_id="call-1" if background else None, timeout_seconds=9, duration_seconds=1.25, working_dir=PLACE,
    )  # fmt: skip


def test_another_exit_code_is_no_success_and_keeps_the_whole_output() -> None:
    result = tool_result(Status.ERROR, Cause.EXIT, exit_code=3, stdout="out", stderr="Traceback")
    said = answer(result)
    assert (said.success, said.exit_code, said.error) == (False, 3, "exit")
    assert (said.output, said.message) == ("out\n[stderr] Traceback", "what went wrong")


@pytest.mark.parametrize("code", ["wall_clock", "deadline"])
@pytest.mark.parametrize("ran", [True, False])
def test_a_timeout_has_nothing_of_the_run_in_it(code: str, ran: bool) -> None:
    """Whether it was the program's own time, or the call's."""
    said = answer(tool_result(Status.TIMEOUT, Cause.WALL_CLOCK, code=code, ran=ran, stdout="secret", stderr="secret"))
    assert said.output == "Code execution timed out after 9s"
    assert (said.success, said.error, said.exit_code, said.truncated) == (False, "timeout", None, False)
    assert "secret" not in said.model_dump_json()


ENDINGS = [
    (Status.ERROR, Cause.SIGNAL, "signal", True),
    (Status.KILLED, Cause.MEMORY, "memory", True),
    (Status.ERROR, Cause.PIDS, "pids", True),
    (Status.KILLED, Cause.DISK, "disk", True),
    (Status.KILLED, Cause.CANCELLED, "cancelled", True),
    (Status.KILLED, Cause.CANCELLED, "cancelled", False),
    (Status.KILLED, Cause.OUTPUT_FLOOD, "output_flood", True),
    (Status.KILLED, Cause.NO_REPORT, "no_report", True),
    (Status.ERROR, Cause.POLICY_REFUSED, "policy_refused", False),
    (Status.ERROR, Cause.INVALID_CALL, "idempotency_conflict", False),
    (Status.ERROR, Cause.PACKAGE_UNAVAILABLE, "package_unavailable", False),
    (Status.ERROR, Cause.INFRASTRUCTURE, "executor_lost", False),
    (Status.ERROR, Cause.INFRASTRUCTURE, "launcher_lost", True),
]


@pytest.mark.parametrize(("status", "cause", "code", "ran"), ENDINGS)
def test_every_other_ending_says_what_it_was(status: Status, cause: Cause, code: str, ran: bool) -> None:
    """With the output that there was; a call that never ran has its reason as its output."""
    said = answer(tool_result(status, cause, code=code, ran=ran, stdout="out" if ran else ""))
    assert (said.success, said.error, said.message) == (False, code, "what went wrong")
    assert said.output == ("out" if ran else "what went wrong")
    assert said.exit_code is None


def test_the_endings_here_are_all_that_there_are() -> None:
    assert {cause for _, cause, _, _ in ENDINGS} | {Cause.EXIT, Cause.WALL_CLOCK} == set(Cause)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_was_cut_is_said_to_be(stream: str) -> None:
    cut = tool_result(Status.SUCCESS, Cause.EXIT, exit_code=0, truncated=PerStream(**{stream: True}))
    assert answer(cut).truncated
    assert not answer(tool_result(Status.SUCCESS, Cause.EXIT, exit_code=0)).truncated


# --- the same facts as a text


def test_the_text_alone_tells_what_the_fields_tell() -> None:
    """Notes first, each with its task and how it ended; where the code ran if not where it was asked to; the rest."""
    result = tool_result(Status.ERROR, Cause.EXIT, exit_code=3, stdout="the output\n", truncated=PerStream(stdout=True))
    notes = [
        Note(task_id="call-7", state="finished", success=True, text="seven\n"),
        Note(task_id="call-8", state="lost", success=False, text="eight"),
    ]
    assert shown(answer(result).model_copy(update={"notes": notes})).splitlines() == [
        "[note] task `call-7` finished: seven",
        "",
        "[note] task `call-8` lost: eight",
        "[working_dir] ran in `.`: `/etc` is not inside it",
        "the output",
        "",
        "[truncated] the output was longer than what is kept",
        "[error] exit, exit code 3: what went wrong",
    ]


def test_the_text_of_a_plain_success_is_its_output() -> None:
    result = tool_result(Status.SUCCESS, Cause.EXIT, exit_code=0, stdout="1\n")
    assert shown(result_of(result, seconds=9, place=WorkingDirReport())) == "1\n"


@pytest.mark.parametrize(("status", "cause", "code", "ran"), ENDINGS)
def test_the_text_of_a_failure_has_its_code_and_why_once(status: Status, cause: Cause, code: str, ran: bool) -> None:
    text = shown(answer(tool_result(status, cause, code=code, ran=ran, stdout="out" if ran else "")))
    assert f"[error] {code}" in text
    assert text.count("what went wrong") == 1


def test_the_text_of_a_timeout_says_so_and_what_to_do() -> None:
    text = shown(answer(tool_result(Status.TIMEOUT, Cause.WALL_CLOCK)))
    assert "Code execution timed out after 9s" in text
    assert "[error] timeout: the program was ended after 9 s: raise `timeout`" in text


@pytest.mark.parametrize("parse", [parse_call, parse_code_exec])
@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({f"key{number}": 1 for number in range(100_000)}, "call"),
        ({"env": {f"E{number}": "" for number in range(100_000)}}, "env"),
        ({"packages": ["a"] * 100_000}, "packages"),
    ],
)
def test_what_has_too_many_entries_is_refused_before_each_is_looked_at(
    parse: Callable[[object], object], data: dict[str, object], where: str
) -> None:
    """With one fault, and not with one for each."""
    with pytest.raises(InvalidCall) as refused:
        parse(data)
    assert refused.value.problems == [f"{where}: it has more than 1024 entries"]
