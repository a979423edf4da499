"""The answers of tools as texts: every fact that is in the fields. Pure.

Owns: how an answer reads. Must not: leave out, or add, what the fields don't have.

The first block is what the program wrote, and nothing else, or why it did not run. The second has one fact a line, each
behind its name in brackets. Each note that comes with them has a block of its own after these. A program can write
whatever looks like a fact or a note, but not into another block than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sandbox.code_exec import NO_OUTPUT, Note, output_text
from sandbox.contract import OutputChars
from sandbox.service.mcp_views import (
    CodeExecAnswer,
    CodeExecutionAnswer,
    Denied,
    ExplanationAnswer,
    Fault,
    LeftOut,
    OutputAnswer,
    TasksAnswer,
    TaskView,
)
from sandbox.service.model import CallState, NetworkExplanation, OutputSlice

_MIB = 1024 * 1024
_MAX_ALLOWED = 20
_ADVICE = (
    "another route to a denied destination (another tool, a proxy, an IP address, a mirror) is denied by the same "
    "policy: do without it, or name it to the user. `explain_network` says what would be allowed"
)


def of_execution(answer: CodeExecutionAnswer) -> list[str]:
    """The texts of an answer of `code_execution`."""
    error = answer.error
    ran = bool(answer.attempts or answer.stdout or answer.stderr)
    if error is not None and not ran:
        first = error.message
    elif answer.status is None:
        first = _detached(answer.task_id, answer.state)
    else:
        first = output_text(answer.stdout, answer.stderr)
    facts = []
    if answer.status is not None:
        code = "" if answer.exit_code is None else f", exit code {answer.exit_code}"
        facts.append(f"[result] {answer.status} ({answer.cause}){code}, call `{answer.call_id}`{_usage(answer)}")
    facts += _task(answer.task_id, answer.state, answer.queue_position)
    if error is not None:
        facts.append(f"[error] {error.code}: {error.message}" if ran else f"[error] {error.code}")
        facts += [
            f"[{name}] {value}"
            for name, value in (
                ("reason", error.reason),
                ("rule", error.rule),
                ("retry_after_seconds", error.retry_after_seconds),
            )
            if value is not None
        ]
        for one in error.packages:
            version = "" if one.version is None else f" {one.version}"
            rule = "" if one.rule is None else f" (rule `{one.rule}`)"
            hint = "" if one.hint is None else f"; {one.hint}"
            facts.append(f"[package] {one.package}{version}: {one.reason}: {one.message}{rule}{hint}")
    facts += [f"[problem] {problem}" for problem in answer.problems]
    if len(answer.attempts) > 1:
        codes = ", ".join(attempt.code for attempt in answer.attempts)
        facts.append(f"[attempts] {len(answer.attempts)}, which ended so: {codes}")
    facts += [
        f"[replaced] {stream} had bytes that are no UTF-8, each shown as U+FFFD"
        for stream in ("stdout", "stderr")
        if getattr(answer.replaced, stream)
    ]
    facts += _left_out(answer.left_out, answer.output_chars)
    if answer.network is not None and (answer.network.mode or answer.network.denied):
        report = answer.network
        facts.append(f"[network] mode {report.mode}: {report.allowed} requests allowed, {report.denied} denied")
        allowed = [row for row in report.destinations if row.decision == "allow"]
        if allowed:
            more = f", and {len(allowed) - _MAX_ALLOWED} more" if len(allowed) > _MAX_ALLOWED else ""
            places = ", ".join(f"{_place(row.host, row.port)} ({row.count} times)" for row in allowed[:_MAX_ALLOWED])
            facts.append(f"[allowed] {places}{more}")
    facts += _denied(answer.denied, answer.denied_more)
    return _blocks(first, facts, answer.notes)


def of_exec(answer: CodeExecAnswer) -> list[str]:
    """The texts of an answer of `code_exec`. The first is what its contract promises."""
    facts = []
    if answer.success is not None:
        code = "" if answer.exit_code is None else f", exit code {answer.exit_code}"
        error = "" if answer.error is None else f" ({answer.error})"
        facts.append(f"[result] {'success' if answer.success else 'no success'}{error}{code}")
    if answer.call_id:
        used = f"at most {answer.timeout_seconds:g} s, in `{answer.working_dir.used}`"
        ran = "" if answer.success is None else f"{answer.duration_seconds:g} s of "
        facts.append(f"[call] `{answer.call_id}`, {ran}{used}")
    if answer.working_dir.reason is not None:
        facts.append(f"[working_dir] ran in `{answer.working_dir.used}`: {answer.working_dir.reason}")
    if answer.error is not None:
        message = "" if answer.message in (None, answer.output) else f": {answer.message}"
        facts.append(f"[error] {answer.error}{message}")
    facts += _task(answer.task_id, answer.state, answer.queue_position)
    if answer.retry_after_seconds is not None:
        facts.append(f"[retry_after_seconds] {answer.retry_after_seconds}")
    facts += [f"[problem] {problem}" for problem in answer.problems]
    facts += _left_out(answer.left_out, answer.output_chars)
    facts += _denied(answer.denied, answer.denied_more)
    return _blocks(answer.output, facts, answer.notes)


def of_tasks(answer: TasksAnswer) -> list[str]:
    """The texts of an answer of `tasks`."""
    if answer.error is not None:
        return _blocks(answer.error.message, _fault(answer.error), answer.notes)
    if answer.task is not None:
        inner: list[str] = []
        if answer.task.code_execution is not None:
            inner = of_execution(answer.task.code_execution)
        elif answer.task.code_exec is not None:
            inner = of_exec(answer.task.code_exec)
        return [_task_view(answer.task), *inner, *_notes(answer.notes)]
    lines = []
    if answer.operation == "list":
        lines += [
            f"[task] `{row.task_id}` {row.kind} {row.state}{_success(row.success)}, submitted {_time(row.submitted_at)}"
            + ("" if row.ended_at is None else f", ended {_time(row.ended_at)}")
            for row in answer.tasks
        ]
        if not answer.tasks:
            lines.append("there are no tasks")
        if answer.more:
            lines.append("[more] older tasks are not listed")
    elif answer.operation == "notes" and not answer.notes:
        lines.append("no task has ended since the last answer")
    return [*(["\n".join(lines)] if lines else []), *_notes(answer.notes)]


def of_output(answer: OutputAnswer) -> list[str]:
    """The texts of an answer of `read_output`: the part itself, and where it stands."""
    if answer.error is not None:
        return _blocks(answer.error.message, _fault(answer.error))
    part = answer.output
    assert isinstance(part, OutputSlice)
    end = part.offset + len(part.text)
    more = "this is its end" if part.next_offset is None else f"go on with offset={part.next_offset}"
    where = f"characters {part.offset} to {end} of {part.kept_chars} kept, call `{part.call_id}` ({part.state})"
    facts = [f"[{part.stream}] {where}: {more}"]
    if part.total_chars > part.kept_chars:
        facts.append(
            f"[truncated] the program wrote {part.total_chars} characters, of which {part.kept_chars} are kept"
        )
    return _blocks(part.text or NO_OUTPUT, facts)


def of_explanation(answer: ExplanationAnswer) -> list[str]:
    """The texts of an answer of `explain_network`."""
    if answer.error is not None:
        return _blocks(answer.error.message, _fault(answer.error))
    found = answer.explanation
    assert isinstance(found, NetworkExplanation)
    rule = "" if found.rule is None else f", rule `{found.rule}`"
    lines = [
        f"{found.verdict}: {found.message}",
        f"[target] {found.target}",
        f"[policy] `{found.policy}`, mode {found.mode}, reason {found.reason}{rule}",
    ]
    if found.hint is not None:
        lines.append(f"[hint] {found.hint}")
    for step in found.steps:
        step_rule = "" if step.rule is None else f", rule `{step.rule}`"
        detail = f": {step.detail}" if step.detail else ""
        lines.append(f"[step] {step.layer}: {step.verdict} ({step.reason}{step_rule}){detail}")
    return ["\n".join(lines)]


def _blocks(first: str, facts: Sequence[str], notes: Sequence[Note] = ()) -> list[str]:
    return [first, *(["\n".join(facts)] if facts else []), *_notes(notes)]


def _notes(notes: Sequence[Note]) -> list[str]:
    """Each by itself, since its text is what a program wrote: what looks like another note in it is none."""
    return [f"[note] task `{note.task_id}` {note.state}{_success(note.success)}:\n{note.text}" for note in notes]


def _success(success: bool | None) -> str:
    return "" if success is None else ", success" if success else ", no success"


def _detached(task_id: str | None, state: CallState | None) -> str:
    return (
        f"task `{task_id}` is {state}. Its result comes as a note with a later answer; `tasks` shows it, waits for it, "
        "or cancels it"
    )


def _task(task_id: str | None, state: CallState | None, position: int | None) -> list[str]:
    if task_id is None:
        return []
    before = "" if position is None else f", {position} calls before it"
    return [f"[task] `{task_id}` {state}{before}"]


def _task_view(task: TaskView) -> str:
    head = f"[task] `{task.task_id}` {task.kind} {task.state}, submitted {_time(task.submitted_at)}"
    for name, value in (("ended", task.ended_at), ("kept until", task.expires_at)):
        head += "" if value is None else f", {name} {_time(value)}"
    head += "" if task.queue_position is None else f", {task.queue_position} calls before it"
    lines = [head]
    if task.stage is not None:
        lines.append(f"[stage] {task.stage}")
    if task.state == "lost":
        lines.append("[lost] the service ended while it ran: whether its code ran, and how far, is not known")
    return "\n".join(lines)


def _usage(answer: CodeExecutionAnswer) -> str:
    usage = answer.usage
    text = f", {usage.wall_seconds:g} s"
    text += "" if usage.cpu_seconds is None else f", {usage.cpu_seconds:g} s of CPU"
    return text + ("" if usage.peak_memory_bytes is None else f", {usage.peak_memory_bytes / _MIB:.1f} MiB at most")


def _left_out(rows: Sequence[LeftOut], wrote: OutputChars) -> list[str]:
    """What can be read elsewhere is marked where it is missing, too."""
    facts = []
    for row in rows:
        total = getattr(wrote, row.stream)
        how = "`read_output` has them" if row.readable else "the program wrote more than is kept: they are lost"
        facts.append(f"[truncated] {row.stream}: {row.chars} of {total} characters, from {row.offset} on; {how}")
    return facts


def _denied(rows: Sequence[Denied], more: int) -> list[str]:
    facts = []
    for row in rows:
        where = _place(row.host, row.port)
        rule = "" if row.rule is None else f", rule `{row.rule}`"
        facts.append(f"[denied] {where} ({row.reason}, {row.count} times) by policy `{row.policy}`{rule}")
    if more:
        facts.append(f"[denied] {more} destinations more")
    return [*facts, f"[hint] {_ADVICE}"] if facts else []


def _place(host: str, port: int | None) -> str:
    return host if port is None else f"{host}:{port}"


def _fault(fault: Fault) -> list[str]:
    facts = [f"[error] {fault.code}", *(f"[problem] {problem}" for problem in fault.problems)]
    if fault.retry_after_seconds is not None:
        facts.append(f"[retry_after_seconds] {fault.retry_after_seconds}")
    return facts


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
