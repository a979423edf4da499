"""What the ledger has of a call, as its owner sees it: states, answers in their contract's form, notes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.code_exec import WorkingDirReport
from sandbox.contract import (
    AttemptRecord,
    CallError,
    Cause,
    Evidence,
    NetworkReport,
    PerStream,
    Status,
    ToolResult,
)
from sandbox.ledger import Entry, Recording, State
from sandbox.owners import Owner
from sandbox.service.records import (
    MAX_NOTE_CHARS,
    Details,
    answer_of,
    bounded,
    details_of,
    note_of,
    record_of,
    state_of,
    summary_of,
)

DETAILS = Details(timeout_seconds=7, working_dir=WorkingDirReport(requested="a", used="a"))
ENDINGS = [
    (Status.SUCCESS, Cause.EXIT), (Status.ERROR, Cause.EXIT), (Status.ERROR, Cause.SIGNAL),
    (Status.KILLED, Cause.MEMORY), (Status.KILLED, Cause.OUTPUT_FLOOD), (Status.KILLED, Cause.DISK),
    (Status.KILLED, Cause.NO_REPORT), (Status.TIMEOUT, Cause.WALL_CLOCK), (Status.KILLED, Cause.CANCELLED),
    (Status.ERROR, Cause.POLICY_REFUSED), (Status.ERROR, Cause.INFRASTRUCTURE),
]  # fmt: skip


def result(
    status: Status = Status.SUCCESS, cause: Cause = Cause.EXIT, *, stdout: str = "out\n", cut: bool = False,
    ran: bool = True,
) -> ToolResult:  # fmt: skip
    attempt = AttemptRecord(
        attempt_id="call-1.1", started_at=1.0, ended_at=2.0, status=status, cause=cause, code=cause.value,
        evidence=Evidence(wall_limit_seconds=9, memory_limit_bytes=1, output_limit_bytes=1),
    )  # fmt: skip
    error = None if status is Status.SUCCESS else CallError(code=cause.value, message="what went wrong")
    return ToolResult(
        call_id="call-1", status=status, cause=cause, stdout=stdout, error=error, truncated=PerStream(stdout=cut),
        attempts=[attempt] if ran else [], network=NetworkReport(mode="block-all"),
    )  # fmt: skip


def entry(answer: ToolResult | None = None, state: State = State.ANSWERED, kind: str = "code_exec") -> Entry:
    details = DETAILS.model_dump_json() if kind == "code_exec" else "{}"
    ended = None if state is State.RUNNING else 20.0
    return Entry(
        "call-1", "executor", None, "digest", state, 10.0, ended, answer, Owner("acme", "alice"),
        Recording(kind, background=True, details=details), None if answer is None else answer.status,
        None if answer is None else answer.cause,
    )  # fmt: skip


@pytest.mark.parametrize(("status", "cause"), ENDINGS)
@pytest.mark.parametrize("kind", ["code_exec", "code_execution"])
def test_an_ended_call_is_finished_unless_it_was_cancelled(status: Status, cause: Cause, kind: str) -> None:
    """In a list, where the answer is not looked at, as in its record and its note."""
    ended = entry(result(status, cause), kind=kind)
    state = "cancelled" if cause is Cause.CANCELLED else "finished"
    record, summary, note = record_of(ended, 100.0), summary_of(dataclasses.replace(ended, result=None)), note_of(ended)
    assert record.state == summary.state == note.state == state
    assert summary.success is note.success is (status is Status.SUCCESS)
    assert (record.call_id, record.kind, record.background) == ("call-1", kind, True)
    assert (record.submitted_at, record.ended_at, record.expires_at) == (10.0, 20.0, 120.0)
    assert (summary.submitted_at, summary.ended_at) == (10.0, 20.0)
    assert record.result == ended.result
    assert (record.code_exec is not None) == (kind == "code_exec")


def test_a_code_exec_call_is_answered_in_its_own_form() -> None:
    """With the timeout and the directory that it had, and as the task that it was."""
    record = record_of(entry(result(Status.TIMEOUT, Cause.WALL_CLOCK)), 100.0)
    assert record.code_exec is not None
    assert record.code_exec.output == "Code execution timed out after 7s"
    assert (record.code_exec.task_id, record.code_exec.working_dir) == ("call-1", DETAILS.working_dir)
    assert record.result is not None
    assert record.result.stdout == "out\n", "what had been printed stays in the record"


def test_a_call_that_runs_has_no_answer() -> None:
    running = entry(state=State.RUNNING)
    record, summary = record_of(running, 100.0), summary_of(running)
    assert (record.state, record.result, record.code_exec, record.expires_at) == ("running", None, None, None)
    assert (summary.state, summary.success) == ("running", None)


@pytest.mark.parametrize("kind", ["code_exec", "code_execution"])
def test_a_lost_call_says_so_everywhere(kind: str) -> None:
    """As its state, in its answer, in its note; it is no success."""
    lost = entry(state=State.LOST, kind=kind)
    record, note = record_of(lost, 100.0), note_of(lost)
    assert (record.state, state_of(lost), summary_of(lost).success) == ("lost", "lost", False)
    answer = answer_of(lost)
    assert answer is not None
    assert answer.error is not None
    assert (answer.error.code, record.result) == ("executor_lost", answer)
    assert (note.state, note.success) == ("lost", False)
    assert "whether its code ran, and how far, is not known" in note.text
    assert "[error] executor_lost" in note.text


def test_an_answer_that_cannot_be_read_any_more_is_said_to_be() -> None:
    unreadable = dataclasses.replace(entry(result(Status.ERROR)), result=None)
    record, note = record_of(unreadable, 100.0), note_of(unreadable)
    assert (record.state, record.result, record.code_exec) == ("finished", None, None)
    assert (note.success, note.text) == (False, "its answer cannot be read any more")


@pytest.mark.parametrize("details", ["", "null", "[]", '{"timeout_seconds": "x"}'])
def test_details_that_cannot_be_read_are_the_plain_ones(details: str) -> None:
    """The answer is there all the same."""
    broken = dataclasses.replace(entry(result()), recording=Recording("code_exec", background=True, details=details))
    assert details_of(broken) == Details()
    record = record_of(broken, 100.0)
    assert record.code_exec is not None
    assert record.code_exec.output == "out\n"


def test_a_kind_that_is_not_known_is_shown_as_the_plain_one() -> None:
    """Such as one that a later version wrote."""
    assert record_of(entry(result(), kind="later"), 100.0).kind == "code_execution"


def test_a_note_has_the_text_of_the_answer_in_its_own_contracts_form() -> None:
    """A code_exec call's timeout is not a partial result; a Code Execution call's has what was written."""
    timeout = result(Status.TIMEOUT, Cause.WALL_CLOCK)
    assert note_of(entry(timeout)).text.startswith("Code execution timed out after 7s\n[error] timeout: ")
    assert note_of(entry(timeout, kind="code_execution")).text == "out\n\n[error] wall_clock: what went wrong"
    assert note_of(entry(result(), kind="code_execution")).text == note_of(entry(result())).text == "out\n"
    refused = result(Status.ERROR, Cause.POLICY_REFUSED, ran=False, stdout="")
    assert note_of(entry(refused, kind="code_execution")).text == "[error] policy_refused: what went wrong"
    cut = note_of(entry(result(cut=True), kind="code_execution")).text
    assert "[truncated]" in cut


def test_a_note_is_short_and_says_where_the_rest_is() -> None:
    note = note_of(entry(result(stdout="a" * 50_000 + "b" * 50_000)))
    assert len(note.text) < MAX_NOTE_CHARS + 200
    assert note.text.startswith("a" * 100)
    assert note.text.endswith("b" * 100)
    assert "90001 characters left out: the record of `call-1` has them" in note.text


@given(st.text(max_size=60), st.integers(3, 30))
def test_a_bounded_text_is_the_text_or_its_head_and_tail_with_an_exact_count(text: str, limit: int) -> None:
    found = bounded(text, limit, "call-1")
    if len(text) <= limit:
        assert found == text
        return
    head, middle, tail = found[: limit * 2 // 3], found[limit * 2 // 3 : -(limit // 3)], found[-(limit // 3) :]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert f"[… {len(text) - len(head) - len(tail)} characters left out" in middle
