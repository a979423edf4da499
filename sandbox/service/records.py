"""What the ledger has of a call, as its owner sees it. Pure.

Owns: the form of a code_exec call's details in the ledger, and the wording of notes. Must not: know which calls run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox import results
from sandbox.code_exec import CodeExecResult, Note, WorkingDirReport, output_text, result_of, shown
from sandbox.contract import Cause, Status, ToolResult
from sandbox.ledger import Entry, State
from sandbox.service.model import CallRecord, CallState, CallSummary, Kind

MAX_NOTE_CHARS = 10_000


class Details(BaseModel):
    """What a code_exec call's answer is made from, beside what was observed."""

    model_config = ConfigDict(frozen=True)

    timeout_seconds: float = 0.0
    working_dir: WorkingDirReport = WorkingDirReport()


def code_exec_answer(details: Details, result: ToolResult, *, background: bool) -> CodeExecResult:
    """The answer in that contract's form."""
    return result_of(result, seconds=details.timeout_seconds, place=details.working_dir, background=background)


def record_of(entry: Entry, keep_seconds: float) -> CallRecord:
    """A call that is not one of this process's running ones."""
    assert entry.recording is not None
    kind = _kind(entry)
    answer = answer_of(entry)
    return CallRecord(
        call_id=entry.call_id,
        kind=kind,
        state=state_of(entry),
        background=entry.recording.background,
        submitted_at=entry.started_at,
        ended_at=entry.ended_at,
        expires_at=None if entry.ended_at is None else entry.ended_at + keep_seconds,
        result=answer,
        code_exec=_code_exec(entry, answer) if kind == "code_exec" and answer is not None else None,
    )


def summary_of(entry: Entry) -> CallSummary:
    """The same in a list, where answers are not looked at."""
    assert entry.recording is not None
    return CallSummary(
        call_id=entry.call_id,
        kind=_kind(entry),
        state=state_of(entry),
        background=entry.recording.background,
        submitted_at=entry.started_at,
        ended_at=entry.ended_at,
        success=None if entry.state is State.RUNNING else entry.status == Status.SUCCESS,
    )


def state_of(entry: Entry) -> CallState:
    if entry.state is State.RUNNING:
        return "running"
    if entry.state is State.LOST:
        return "lost"
    return "cancelled" if entry.cause == Cause.CANCELLED else "finished"


def note_of(entry: Entry) -> Note:
    """The news that a detached call has ended, with as much of its answer as a note holds."""
    state = state_of(entry)
    answer = answer_of(entry)
    text = "its answer cannot be read any more" if answer is None else _told(entry, answer)
    return Note(
        task_id=entry.call_id,
        state="cancelled" if state == "cancelled" else "lost" if state == "lost" else "finished",
        success=answer is not None and answer.status is Status.SUCCESS,
        text=bounded(text, MAX_NOTE_CHARS, entry.call_id),
    )


def bounded(text: str, limit: int, call_id: str) -> str:
    """The head and the tail of a text, and between them how much is left out, and where it can be read."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    left_out = len(text) - head - tail
    middle = f"\n[… {left_out} characters left out: the record of `{call_id}` has them …]\n"
    return text[:head] + middle + text[-tail:]


def answer_of(entry: Entry) -> ToolResult | None:
    """The answer; that of a call which was lost says so."""
    if entry.state is State.LOST:
        return results.lost(entry.call_id, "")
    return entry.result


def details_of(entry: Entry) -> Details:
    assert entry.recording is not None
    try:
        return Details.model_validate_json(entry.recording.details)
    except ValidationError:
        return Details()


def _code_exec(entry: Entry, answer: ToolResult) -> CodeExecResult:
    assert entry.recording is not None
    return code_exec_answer(details_of(entry), answer, background=entry.recording.background)


def _told(entry: Entry, answer: ToolResult) -> str:
    """An answer as a text, in the form of its own contract."""
    if _kind(entry) == "code_exec":
        return shown(_code_exec(entry, answer))
    lines = [output_text(answer.stdout, answer.stderr)] if answer.attempts else []
    if answer.truncated.stdout or answer.truncated.stderr:
        lines.append("[truncated] the output was longer than what is kept")
    if answer.error is not None:
        code = "" if answer.exit_code is None else f", exit code {answer.exit_code}"
        lines.append(f"[error] {answer.error.code}{code}: {answer.error.message}")
    return "\n".join(lines)


def _kind(entry: Entry) -> Kind:
    assert entry.recording is not None
    kinds: dict[str, Literal["code_execution", "code_exec"]] = {"code_exec": "code_exec"}
    return kinds.get(entry.recording.kind, "code_execution")
