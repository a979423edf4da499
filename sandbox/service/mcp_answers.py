"""Results of calls as the answers of tools: bounded, and with what a model can do about a refusal.

Owns: what of a result is shown, and the advice. Must not: ask the service for anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.control import ProxyUnavailable
from sandbox.code_exec import CodeExecResult, Note, output_text
from sandbox.contract import CallError, Cause, InvalidCall, PerStream, ToolResult
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.policy_file import InvalidPolicy
from sandbox.service import mcp_text
from sandbox.service.mcp_bounds import (
    MAX_MESSAGE_CHARS,
    MAX_NOTE_CHARS,
    MAX_SHOWN_CHARS,
    Gap,
    bound_streams,
    bound_text,
)
from sandbox.service.mcp_views import CodeExecAnswer, CodeExecutionAnswer, Denied, Fault, LeftOut
from sandbox.service.model import Accepted, CallState, PlaceRefused, ServiceError, StreamName
from sandbox.tenants import UnknownTenant

MAX_DENIED = 10
_MAX_PROBLEMS = 50
_MAX_PACKAGES = 50
_GAP_CHARS = 500  # of the lines that say what is left out

_ROUTES = (
    "the policy decides this, not the tool: another tool, a proxy, an IP address or a mirror is refused alike. Do "
    "without it, or tell the user which rule the operator would have to change"
)
_OURS = (
    "this is no fault of the program: try once more, and if it stays so, the operator should run `sluicegate doctor`"
)
_ADVICE = {
    Cause.POLICY_REFUSED: _ROUTES,
    Cause.INVALID_CALL: "nothing was run: correct the call, and make it again",
    Cause.PACKAGE_UNAVAILABLE: "nothing was run: ask for a package and a version that exist, or do without",
    Cause.INFRASTRUCTURE: _OURS,
    Cause.NO_REPORT: _OURS,
}
_OWN_ADVICE = frozenset({"timeout_not_allowed", "memory_not_allowed"})  # they say what may be asked for
_OTHER_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (IsolationUnavailable, "isolation_unavailable"),
    (ProxyUnavailable, "proxy_unavailable"),
    (LedgerUnavailable, "ledger_unavailable"),
    (InvalidPolicy, "invalid_policy"),
    (UnknownTenant, "unknown_tenant"),
)
ANSWERED_ERRORS: tuple[type[Exception], ...] = (InvalidCall, ServiceError, *(kind for kind, _ in _OTHER_ERRORS))


def is_error(cause: Cause | None) -> bool:
    """Whether a call came to nothing for another reason than what its program did."""
    return cause in _ADVICE


def fault_of(error: Exception) -> Fault:
    """What a caller is told instead of an answer, with what to do about it. `error` is one of `ANSWERED_ERRORS`."""
    retry = error.retry_after_seconds if isinstance(error, ServiceError) else None
    problems: list[str] = []
    hint: str | None = _OURS
    if isinstance(error, InvalidCall):
        code, hint = error.code, _ADVICE[Cause.INVALID_CALL]
        problems = [bound_text(problem, MAX_MESSAGE_CHARS // 10) for problem in error.problems[:_MAX_PROBLEMS]]
    elif isinstance(error, ServiceError):
        code = error.code
        if code == "not_found":
            hint = "`tasks` with the operation `list` shows the tasks that there are"
        elif isinstance(error, PlaceRefused):
            hint = None
    else:
        code = next(code for kind, code in _OTHER_ERRORS if isinstance(error, kind))
    if retry is not None:
        hint = f"nothing was begun: try again in {retry:g} s"
    message = bound_text(str(error), MAX_MESSAGE_CHARS)
    return Fault(
        code=code, message=message if hint is None else f"{message}\nhint: {hint}", problems=problems,
        retry_after_seconds=retry,
    )  # fmt: skip


def execution_fault(fault: Fault) -> CodeExecutionAnswer:
    """The answer to a call of `code_execution` that was not begun."""
    error = CallError(code=fault.code, message=fault.message, retry_after_seconds=fault.retry_after_seconds)
    return CodeExecutionAnswer(error=error, problems=fault.problems)


def exec_fault(fault: Fault) -> CodeExecAnswer:
    """The answer to a call of `code_exec` that was not begun."""
    return CodeExecAnswer(
        success=False, output=fault.message, error=fault.code, message=fault.message,
        retry_after_seconds=fault.retry_after_seconds, problems=fault.problems,
    )  # fmt: skip


def execution_accepted(accepted: Accepted, notes: Sequence[Note] = ()) -> CodeExecutionAnswer:
    return CodeExecutionAnswer(
        call_id=accepted.call_id, task_id=accepted.task_id, state=accepted.state,
        queue_position=accepted.queue_position, notes=bound_notes(notes),
    )  # fmt: skip


def execution_answer(
    result: ToolResult,
    *,
    task_id: str | None = None,
    state: CallState | None = None,
    denied: Sequence[Denied] = (),
    notes: Sequence[Note] = (),
    limit: int = MAX_SHOWN_CHARS,
) -> CodeExecutionAnswer:
    """A result, with its output bounded so that the whole text has about `limit` characters.

    `state` is a task's, where it is known to be another than what the result says.
    """
    error = result.error
    if error is not None:
        message = _advised(error.message, result)
        error = error.model_copy(update={"message": message, "packages": error.packages[:_MAX_PACKAGES]})
    fields = {name: getattr(result, name) for name in ToolResult.model_fields} | {"error": error}
    answer = CodeExecutionAnswer(
        **fields | {"stdout": "", "stderr": ""}, task_id=task_id,
        state=(state or _state(result)) if task_id else None, denied=list(denied),
        denied_more=_more(result, denied), notes=bound_notes(notes),
    )  # fmt: skip
    spare = limit - _GAP_CHARS - len("\n".join(mcp_text.of_execution(answer)))
    shown = bound_streams(result.stdout, result.stderr, result.call_id, spare)
    left_out = _left_out(shown.gaps, result)
    truncated = {stream.stream for stream in left_out}
    return answer.model_copy(
        update={
            "stdout": shown.stdout,
            "stderr": shown.stderr,
            "left_out": left_out,
            "truncated": PerStream(stdout="stdout" in truncated, stderr="stderr" in truncated),
        }
    )


def exec_answer(
    answered: CodeExecResult,
    result: ToolResult | None,
    *,
    accepted: Accepted | None = None,
    state: CallState | None = None,
    denied: Sequence[Denied] = (),
    limit: int = MAX_SHOWN_CHARS,
) -> CodeExecAnswer:
    """A result of code_exec, bounded alike. `result` is what it was made from; None while it runs."""
    retry = None if result is None or result.error is None else result.error.retry_after_seconds
    fields = {name: getattr(answered, name) for name in CodeExecResult.model_fields}
    message = None if answered.message is None else _advised(answered.message, result)
    fields |= {"message": message, "notes": bound_notes(answered.notes)}
    if answered.output == answered.message and message is not None:
        fields["output"] = message
    answer = CodeExecAnswer(
        **fields,
        state=_state_of_task(answered, result, accepted, state),
        queue_position=None if accepted is None else accepted.queue_position,
        retry_after_seconds=retry,
        denied=list(denied),
        denied_more=_more(result, denied),
    )
    if result is None or answered.output != output_text(result.stdout, result.stderr):
        return answer.model_copy(update={"truncated": False})  # it is a message, or what a timeout is promised to say
    spare = limit - _GAP_CHARS - len("\n".join(mcp_text.of_exec(answer.model_copy(update={"output": ""}))))
    shown = bound_streams(result.stdout, result.stderr, result.call_id, spare)
    left_out = _left_out(shown.gaps, result)
    return answer.model_copy(
        update={
            "output": output_text(shown.stdout, shown.stderr),
            "output_chars": result.output_chars,
            "left_out": left_out,
            "truncated": bool(left_out),
        }
    )


def bound_notes(notes: Sequence[Note]) -> list[Note]:
    """Notes as they are shown: all of them, each with the beginning and the end of its text."""
    share = max(min(MAX_NOTE_CHARS, MAX_SHOWN_CHARS // 4 // max(len(notes), 1)), 80)
    return [
        note.model_copy(update={"text": bound_text(note.text, share, "; `tasks` with `show` has the result")})
        for note in notes
    ]


def _advised(message: str, result: ToolResult | None) -> str:
    """An error's message, with what to do about it where nothing ran."""
    message = bound_text(message, MAX_MESSAGE_CHARS)
    if result is None or result.error is None or result.error.reason in _OWN_ADVICE:
        return message
    if (retry := result.error.retry_after_seconds) is not None:
        return f"{message}\nhint: nothing was begun: try again in {retry:g} s"
    hint = _ADVICE.get(result.cause)
    return message if hint is None else f"{message}\nhint: {hint}"


def _state(result: ToolResult) -> CallState:
    return "cancelled" if result.cause is Cause.CANCELLED else "finished"


def _state_of_task(
    answered: CodeExecResult, result: ToolResult | None, accepted: Accepted | None, state: CallState | None
) -> CallState | None:
    if accepted is not None:
        return accepted.state
    return None if answered.task_id is None or result is None else state or _state(result)


def _more(result: ToolResult | None, listed: Sequence[Denied]) -> int:
    """How many destinations were denied beside those listed."""
    rows = [] if result is None else [row for row in result.network.destinations if row.decision == "deny"]
    return max(len(rows) - len(listed), 0)


def _left_out(gaps: Sequence[Gap], result: ToolResult) -> list[LeftOut]:
    """What is not in an answer: what it has no room for, and what the program wrote beyond what is kept."""
    found = [LeftOut(stream=gap.stream, offset=gap.offset, chars=gap.chars, readable=True) for gap in gaps]
    wrote, cut = result.output_chars, result.truncated
    kept: list[tuple[StreamName, int, int, bool]] = [
        ("stdout", len(result.stdout), wrote.stdout, cut.stdout),
        ("stderr", len(result.stderr), wrote.stderr, cut.stderr),
    ]
    return found + [
        LeftOut(stream=stream, offset=chars, chars=max(total - chars, 0), readable=False)
        for stream, chars, total, was_cut in kept
        if was_cut
    ]
