"""Answers as they are made: bounded, saying what can be done, and the same in text and fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel

from proxy.control import ProxyUnavailable
from sandbox.code_exec import CodeExecResult, Note, WorkingDirReport, output_text, result_of
from sandbox.contract import (
    CallError,
    Cause,
    DestinationCount,
    InvalidCall,
    NetworkReport,
    OutputChars,
    PackageFault,
    PerStream,
    Status,
    ToolResult,
    Usage,
)
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.service import mcp_answers, mcp_text
from sandbox.service.mcp_bounds import MAX_SHOWN_CHARS, MIN_OUTPUT_CHARS, bound_streams, bound_text
from sandbox.service.mcp_tools import (
    MAX_WAIT_SECONDS,
    TOOLS,
    ExplainCall,
    OutputCall,
    TasksCall,
    parse_arguments,
    parse_execution,
)
from sandbox.service.mcp_views import CodeExecAnswer, CodeExecutionAnswer, Denied, Fault, LeftOut
from sandbox.service.model import Busy, Draining, NotFound, PlaceRefused, QueueIsFull, ServiceError, Unavailable
from sandbox.tenants import UnknownTenant
from tests.service.mcp_peers import check_agreement

CALL = "call-0123456789abcdef"
lengths = st.integers(0, 120_000)


def stream(length: int, mark: str) -> str:
    """A text in which every place is known."""
    return "".join(f"{mark}{number:07d}" for number in range(length // 8 + 1))[:length]


# How much is shown


@given(lengths, lengths, st.integers(0, 60_000))
def test_what_is_shown_is_bounded_and_its_gaps_are_exactly_what_is_missing(out: int, err: int, limit: int) -> None:
    streams = {"stdout": stream(out, "o"), "stderr": stream(err, "e")}
    shown = bound_streams(streams["stdout"], streams["stderr"], CALL, limit)
    assert len(shown.stdout) + len(shown.stderr) <= max(limit, MIN_OUTPUT_CHARS)
    gaps = {gap.stream: gap for gap in shown.gaps}
    for name, whole in streams.items():
        text = getattr(shown, name)
        if name not in gaps:
            assert text == whole
            continue
        gap = gaps[name]
        mark = re.search(r"\n\[… (\d+) characters left out; read them with read_output\((.*?)\)\]\n", text)
        assert mark is not None
        assert int(mark[1]) == gap.chars
        assert mark[2] == f'call_id="{CALL}", stream="{name}", offset={gap.offset}'
        restored = text[: mark.start()] + whole[gap.offset : gap.offset + gap.chars] + text[mark.end() :]
        assert restored == whole


@given(lengths, lengths)
def test_nothing_is_left_out_of_what_fits(out: int, err: int) -> None:
    shown = bound_streams(stream(out, "o"), stream(err, "e"), CALL, out + err)
    assert shown.gaps == ()


def test_a_message_is_cut_in_its_middle_with_the_number_of_what_is_missing() -> None:
    cut = bound_text("a" * 100 + "z" * 100, 90, "; there is more")
    assert cut.startswith("a" * 60)
    assert cut.endswith("z" * 30)
    assert "[… 110 characters left out; there is more]" in cut
    assert bound_text("short", 90) == "short"


def test_every_note_is_shown_however_many_there_are() -> None:
    notes = [
        Note(task_id=f"call-{number:016x}", state="finished", success=True, text="x" * 10_000) for number in range(200)
    ]
    shown = mcp_answers.bound_notes(notes)
    assert [note.task_id for note in shown] == [note.task_id for note in notes]
    assert sum(len(note.text) for note in shown) < MAX_SHOWN_CHARS + 200 * 80
    assert len(mcp_answers.bound_notes(notes[:1])[0].text) < 2_100


# What is said in both


def results() -> st.SearchStrategy[ToolResult]:
    text = st.text(max_size=200) | st.integers(1, 60_000).map(lambda length: stream(length, "x"))
    rows = st.builds(
        DestinationCount, host=st.sampled_from(["a.test", "2600:1::1"]), port=st.sampled_from([None, 443]),
        decision=st.just("allow"), reason=st.just("allowed"), count=st.integers(1, 99),
    )  # fmt: skip
    packages = st.builds(
        PackageFault, package=st.just("evil"), version=st.sampled_from([None, "1.0"]), reason=st.just("name_denied"),
        rule=st.sampled_from([None, "packages.deny[0]"]), message=st.just("it is denied"), hint=st.just("do without"),
    )  # fmt: skip
    errors = st.builds(
        CallError, code=st.sampled_from(["exit", "policy_refused", "queue_full"]), message=st.just("why not"),
        reason=st.sampled_from([None, "mode_not_allowed"]), rule=st.sampled_from([None, "network.modes"]),
        retry_after_seconds=st.sampled_from([None, 2.0]), packages=st.lists(packages, max_size=2),
    )  # fmt: skip
    return st.builds(
        ToolResult, call_id=st.just(CALL), status=st.sampled_from(Status), cause=st.sampled_from(Cause),
        exit_code=st.sampled_from([None, 0, 1, 137]), stdout=text, stderr=text,
        truncated=st.builds(PerStream, stdout=st.booleans(), stderr=st.booleans()),
        replaced=st.builds(PerStream, stdout=st.booleans(), stderr=st.booleans()),
        output_chars=st.builds(OutputChars, stdout=st.integers(60_000, 10**7), stderr=st.integers(60_000, 10**7)),
        error=st.none() | errors,
        usage=st.builds(
            Usage, wall_seconds=st.sampled_from([0.25, 31.5]), cpu_seconds=st.sampled_from([None, 0.125]),
            peak_memory_bytes=st.sampled_from([None, 5 * 2**20]),
        ),
        network=st.builds(
            NetworkReport, mode=st.just("named"), allowed=st.integers(0, 9), denied=st.integers(0, 9),
            destinations=st.lists(rows, max_size=4),
        ),
    )  # fmt: skip


notes = st.lists(
    st.builds(
        Note, task_id=st.just("call-feedfeedfeedfeed"), state=st.sampled_from(["finished", "cancelled", "lost"]),
        success=st.booleans(), text=st.sampled_from(["done", "y" * 9_000]),
    ),
    max_size=3,
)  # fmt: skip
denied = st.lists(
    st.builds(
        Denied, host=st.just("bad.test"), port=st.sampled_from([None, 22]), reason=st.just("host_denied"),
        policy=st.just("tests"), rule=st.sampled_from([None, "network.deny[0]"]), count=st.integers(1, 9),
    ),
    max_size=2,
)  # fmt: skip


def told(answer: BaseModel, texts: list[str]) -> CallToolResult:
    blocks = [TextContent(type="text", text=text) for text in texts]
    return CallToolResult(content=list(blocks), structured_content=answer.model_dump(mode="json"))


@given(results(), notes, denied, st.sampled_from([None, CALL]))
def test_the_text_of_code_execution_has_every_field(
    result: ToolResult, news: list[Note], refused: list[Denied], task: str | None
) -> None:
    answer = mcp_answers.execution_answer(result, task_id=task, denied=refused, notes=news)
    texts = mcp_text.of_execution(answer)
    check_agreement(told(answer, texts))
    if result.error is None or len(result.error.message) < 100:
        assert sum(map(len, texts)) <= MAX_SHOWN_CHARS


@given(results(), notes, denied, st.booleans(), st.booleans())
def test_the_text_of_code_exec_has_every_field(
    result: ToolResult, news: list[Note], refused: list[Denied], replaced: bool, background: bool
) -> None:
    place = WorkingDirReport(requested="/etc", used=".", replaced=replaced, reason="outside" if replaced else None)
    place = place if replaced else WorkingDirReport()
    answered = result_of(result, seconds=30, place=place, background=background).model_copy(update={"notes": news})
    answer = mcp_answers.exec_answer(answered, result, denied=refused)
    texts = mcp_text.of_exec(answer)
    if replaced:
        texts.append("/etc")  # what was asked for is known to whoever asked
    check_agreement(told(answer, texts))
    assert sum(map(len, texts)) <= MAX_SHOWN_CHARS


def test_more_denied_destinations_than_are_listed_are_counted() -> None:
    rows = [
        DestinationCount(host=f"h{number}.test", port=443, decision="deny", reason="host_denied", count=1)
        for number in range(12)
    ]
    listed = [
        Denied(host=row.host, port=443, reason="host_denied", policy="tests", rule=None, count=1) for row in rows[:10]
    ]
    result = ToolResult(
        call_id=CALL, status=Status.SUCCESS, cause=Cause.EXIT,
        network=NetworkReport(mode="named", denied=12, destinations=rows),
    )  # fmt: skip
    answered = result_of(result, seconds=30, place=WorkingDirReport())
    execution = mcp_answers.execution_answer(result, denied=listed)
    exec_ = mcp_answers.exec_answer(answered, result, denied=listed)
    assert execution.denied_more == exec_.denied_more == 2
    for texts in (mcp_text.of_execution(execution), mcp_text.of_exec(exec_)):
        assert "[denied] 2 destinations more" in "\n".join(texts)


def test_a_result_that_fits_is_told_as_it_is() -> None:
    result = ToolResult(
        call_id=CALL, status=Status.SUCCESS, cause=Cause.EXIT, exit_code=0, stdout="out\n", stderr="err\n",
        output_chars=OutputChars(stdout=4, stderr=4), network=NetworkReport(mode="block-all"),
    )  # fmt: skip
    answer = mcp_answers.execution_answer(result)
    assert (answer.stdout, answer.stderr, answer.left_out) == ("out\n", "err\n", [])
    assert mcp_text.of_execution(answer)[0] == output_text("out\n", "err\n")


def test_every_field_that_no_contract_has_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()
    own = set(CodeExecutionAnswer.model_fields) - set(ToolResult.model_fields)
    own |= set(CodeExecAnswer.model_fields) - set(CodeExecResult.model_fields)
    own |= set(LeftOut.model_fields) | set(Fault.model_fields)
    assert {name for name in own if f"`{name}`" not in page} == set()
    assert {name for name in TOOLS if f"| `{name}` |" not in page} == set()


# What can be done about it


@pytest.mark.parametrize(
    ("cause", "wrong"),
    [
        (Cause.EXIT, False), (Cause.SIGNAL, False), (Cause.MEMORY, False), (Cause.PIDS, False), (Cause.DISK, False),
        (Cause.WALL_CLOCK, False), (Cause.CANCELLED, False), (Cause.OUTPUT_FLOOD, False), (Cause.NO_REPORT, True),
        (Cause.POLICY_REFUSED, True), (Cause.INVALID_CALL, True), (Cause.PACKAGE_UNAVAILABLE, True),
        (Cause.INFRASTRUCTURE, True),
    ],
)  # fmt: skip
def test_what_the_program_did_is_no_error_of_the_tool_and_all_else_is(cause: Cause, wrong: bool) -> None:
    assert mcp_answers.is_error(cause) is wrong


def refusal(cause: Cause, **error: object) -> str:
    result = ToolResult(
        call_id=CALL, status=Status.ERROR, cause=cause, network=NetworkReport(mode="named"),
        error=CallError(code="x", message="why", **error),  # type: ignore[arg-type]
    )  # fmt: skip
    answer = mcp_answers.execution_answer(result)
    assert answer.error is not None
    assert answer.error.message in "\n".join(mcp_text.of_execution(answer))
    return answer.error.message


def test_the_advice_fits_what_went_wrong() -> None:
    assert "an IP address or a mirror is refused alike" in refusal(Cause.POLICY_REFUSED, reason="mode_not_allowed")
    assert refusal(Cause.POLICY_REFUSED, reason="timeout_not_allowed") == "why"
    assert "try again in 2 s" in refusal(Cause.INFRASTRUCTURE, retry_after_seconds=2.0)
    assert "sluicegate doctor" in refusal(Cause.INFRASTRUCTURE)
    assert "that exist" in refusal(Cause.PACKAGE_UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (InvalidCall(["code: it is required"]), "invalid_call", "correct the call"),
        (Busy("rate_limited", "too fast", 3.0), "rate_limited", "try again in 3 s"),
        (QueueIsFull("full", retry_after_seconds=1.5), "queue_full", "try again in 1.5 s"),
        (Draining("ends", retry_after_seconds=1.0), "draining", "try again in 1 s"),
        (NotFound("no such call"), "not_found", "`list` shows"),
        (Unavailable("no ledger"), "ledger_unavailable", "sluicegate doctor"),
        (PlaceRefused("refused\nhint: another"), "working_directory_refused", "hint: another"),
        (IsolationUnavailable("no bwrap"), "isolation_unavailable", "sluicegate doctor"),
        (ProxyUnavailable("no proxy"), "proxy_unavailable", "sluicegate doctor"),
        (LedgerUnavailable("no ledger"), "ledger_unavailable", "sluicegate doctor"),
        (UnknownTenant("gone"), "unknown_tenant", "sluicegate doctor"),
    ],
)
def test_every_error_of_the_service_is_told_with_what_to_do(error: Exception, code: str, advice: str) -> None:
    assert isinstance(error, mcp_answers.ANSWERED_ERRORS)
    fault = mcp_answers.fault_of(error)
    assert fault.code == code
    assert advice in fault.message
    for answer, texts in (
        (mcp_answers.execution_fault(fault), mcp_text.of_execution(mcp_answers.execution_fault(fault))),
        (mcp_answers.exec_fault(fault), mcp_text.of_exec(mcp_answers.exec_fault(fault))),
    ):
        check_agreement(told(answer, texts))


def test_every_error_that_a_service_has_is_answered() -> None:
    def kinds(one: type[Exception]) -> list[type[Exception]]:
        return [one, *(inner for below in one.__subclasses__() for inner in kinds(below))]

    assert all(issubclass(kind, mcp_answers.ANSWERED_ERRORS) for kind in kinds(ServiceError))


def test_a_fault_is_never_larger_than_what_is_shown() -> None:
    fault = mcp_answers.fault_of(InvalidCall([f"x{number}: {'y' * 5_000}" for number in range(500)]))
    assert len(fault.message) + sum(map(len, fault.problems)) < MAX_SHOWN_CHARS
    assert isinstance(mcp_answers.exec_fault(fault), CodeExecResult)


# Arguments


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip
NAMES = ["operation", "task_id", "timeout", "call_id", "stream", "offset", "limit", "url", "language", "domains",
         "allow_network", "method", "code", "background", "packages"]  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), json_values, max_size=8))
def test_any_arguments_are_a_call_or_every_fault_of_it(arguments: dict[str, object]) -> None:
    for read in (
        lambda: parse_arguments(TasksCall, arguments),
        lambda: parse_arguments(OutputCall, arguments),
        lambda: parse_arguments(ExplainCall, arguments),
        lambda: parse_execution(arguments),
    ):
        assert read_or_told(read)


def read_or_told(read: Callable[[], object]) -> bool:
    try:
        return read() is not None
    except InvalidCall as error:
        return bool(error.problems) and all(": " in problem for problem in error.problems)


def test_what_is_left_out_and_what_is_null_is_the_same() -> None:
    assert parse_arguments(OutputCall, {"call_id": "c", "stream": None, "offset": None, "limit": None}) == (
        parse_arguments(OutputCall, {"call_id": "c"})
    )
    assert parse_execution({"language": "python", "code": "1", "background": None})[1] is False


@pytest.mark.parametrize(
    ("timeout", "said"),
    [(float("nan"), "it is no number"), (-1, "it is below 0"), ("soon", "input should be a valid number")],
)
def test_a_wait_of_no_length_is_told_as_what_it_is(timeout: object, said: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        parse_arguments(TasksCall, {"operation": "wait", "task_id": "c", "timeout": timeout})
    assert caught.value.problems == [f"timeout: {said}"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, 30.0), (0, 0.0), (7, 7.0), (50, 50.0), (300, MAX_WAIT_SECONDS), (float("inf"), MAX_WAIT_SECONDS)],
)
def test_a_wait_is_shorter_than_clients_are_patient(given: float | None, seconds: float) -> None:
    call = parse_arguments(TasksCall, {"operation": "wait", "task_id": "c", "timeout": given})
    assert call.wait_seconds == seconds
