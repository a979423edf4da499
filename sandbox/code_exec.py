"""The code_exec contract: a simpler tool over the same executor, with a working directory and runs that detach. Pure.

Its parameters are forgiving where the published contract says so (a timeout is clamped, never refused) and strict
elsewhere: an unknown parameter or a wrong type is a fault of the call, and all faults are told together.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox.call_parsing import check_entries, invalid_call, path_step
from sandbox.contract import MAX_CODE_CHARS, Cause, Status, ToolResult

DEFAULT_TIMEOUT_SECONDS = 30
DETACHED_TIMEOUT_SECONDS = 300
MIN_TIMEOUT_SECONDS = 1
MAX_TIMEOUT_SECONDS = 300
STDERR_PREFIX = "[stderr] "
NO_OUTPUT = "(no output)"

_FIELDS = ("code", "working_dir", "timeout", "background")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*\Z", re.ASCII)
_MAX_NUMBER_CHARS = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class CodeExecCall:
    """One call. `timeout` is in seconds, clamped already. `working_dir` None is the root of the caller's directory."""

    code: str
    working_dir: str | None = None
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    background: bool = False


def default_timeout(*, background: bool) -> float:
    """The seconds of a call that names no `timeout`."""
    return DETACHED_TIMEOUT_SECONDS if background else DEFAULT_TIMEOUT_SECONDS


def clamp_timeout(value: object) -> float:
    """The seconds that a given `timeout` means: 1 to 300, and 30 for what is no number.

    A numeric text counts as its number. Booleans, NaN and null are no numbers; one without bound is clamped as any.
    """
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS and _NUMBER.match(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # only NaN is not itself
        return DEFAULT_TIMEOUT_SECONDS
    seconds = min(max(value, MIN_TIMEOUT_SECONDS), MAX_TIMEOUT_SECONDS)
    return int(seconds) if seconds == int(seconds) else float(seconds)


def parse_code_exec(data: object) -> CodeExecCall:
    """A call from a JSON object. Raises `InvalidCall` with every fault, each with its parameter."""
    if not isinstance(data, dict):
        raise invalid_call({"call": f"it is not a JSON object, but {_kind(data)}"})
    check_entries(data)
    known = ", ".join(_FIELDS)
    problems = {
        path_step(str(name)): f"it is not a field of a code_exec call; the fields are {known}"
        for name in data
        if name not in _FIELDS
    }
    code, working_dir, background = data.get("code"), data.get("working_dir"), data.get("background")
    faults = {
        "code": "it is required" if code is None else _code_fault(code),
        "working_dir": None if working_dir is None else _text_fault(working_dir),
        "background": None if background is None or isinstance(background, bool) else "it is not true or false",
    }
    problems |= {name: fault for name, fault in faults.items() if fault is not None}
    if problems:
        raise invalid_call(problems)
    assert isinstance(code, str)
    detached = background is True
    seconds = clamp_timeout(data["timeout"]) if "timeout" in data else default_timeout(background=detached)
    return CodeExecCall(code, working_dir, seconds, detached)


def code_exec_schema() -> dict[str, Any]:
    """JSON Schema of the parameters. `timeout` says what is meant; what else is given there is clamped."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["code"],
        "properties": {
            "code": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_CODE_CHARS,
                "description": "Python. Every call starts clean: import all that it needs, print what is wanted.",
            },
            "working_dir": {
                "type": ["string", "null"],
                "default": None,
                "description": "Where it runs: a directory inside your own, which is also what it falls back to.",
            },
            "timeout": {
                "type": ["number", "string", "null"],
                "description": "Seconds, clamped to 1 to 300. Left out: 30, or 300 with `background`.",
            },
            "background": {
                "type": ["boolean", "null"],
                "default": False,
                "description": "Answer at once with a `task_id`; the result comes as a note, or through `tasks`.",
            },
        },
    }


def _code_fault(code: object) -> str | None:
    if (fault := _text_fault(code)) is not None or not isinstance(code, str):
        return fault
    if not code:
        return "it has fewer than 1 characters"
    return f"it has more than {MAX_CODE_CHARS} characters" if len(code) > MAX_CODE_CHARS else None


def _text_fault(value: object) -> str | None:
    if not isinstance(value, str):
        return "it is not a string"
    if "\0" in value:
        return "it contains a NUL character"
    return "it has a lone surrogate, which is no character" if _SURROGATE.search(value) else None


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    kinds = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkingDirReport(_Result):
    """Where the code ran. `used` is relative to the caller's own directory, `.` for that itself.

    `replaced`: it is not what was asked for, for the `reason` given. Another `reason` is that the directory is full.
    """

    requested: str | None = None
    used: str = "."
    replaced: bool = False
    reason: str | None = None


class Note(_Result):
    """A detached call that has ended, told once."""

    task_id: str
    state: Literal["finished", "cancelled", "lost"]
    success: bool
    text: str


class CodeExecResult(_Result):
    """The answer to a call. `output` is the text that the contract promises; the rest says it in fields.

    `error` is None on success, else `timeout`, `exit` (the program's own doing, see `exit_code`) or one of the codes
    in `docs/results.md`; `message` explains it. `task_id` is set where the call was detached: `success` is then None
    until it has ended. `notes` are detached calls of the same user that have ended since the last answer.
    """

    success: bool | None
    output: str
    exit_code: int | None = None
    error: str | None = None
    message: str | None = None
    call_id: str = ""
    task_id: str | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    duration_seconds: float = 0.0
    truncated: bool = False
    working_dir: WorkingDirReport = Field(default_factory=WorkingDirReport)
    notes: list[Note] = Field(default_factory=list)


def output_text(stdout: str, stderr: str) -> str:
    """What a program wrote, as one text: standard output, then standard error behind its prefix."""
    if not stderr:
        return stdout or NO_OUTPUT
    between = "" if not stdout or stdout.endswith("\n") else "\n"
    return f"{stdout}{between}{STDERR_PREFIX}{stderr}"


def timed_out_text(seconds: float) -> str:
    """A timeout is not a partial result: nothing of the run is in it."""
    return f"Code execution timed out after {seconds:g}s"


def result_of(
    result: ToolResult, *, seconds: float, place: WorkingDirReport, background: bool = False
) -> CodeExecResult:
    """The answer, from what was observed. `seconds` is the timeout that was in force."""
    common = CodeExecResult(
        success=result.status is Status.SUCCESS,
        output="",
        exit_code=result.exit_code,
        call_id=result.call_id,
        task_id=result.call_id if background else None,
        timeout_seconds=seconds,
        duration_seconds=result.usage.wall_seconds,
        working_dir=place,
    )
    if result.cause is Cause.WALL_CLOCK:
        text = timed_out_text(seconds)
        message = f"the program was ended after {seconds:g} s: raise `timeout`, or detach it with `background`"
        return common.model_copy(update={"output": text, "error": "timeout", "message": message, "exit_code": None})
    output = output_text(result.stdout, result.stderr)
    if result.error is None:
        found = {"output": output}
    elif not result.attempts or (result.cause is Cause.INFRASTRUCTURE and not result.stdout and not result.stderr):
        # It never ran, as far as is known: there is no output but the reason.
        found = {"output": result.error.message, "error": result.error.code, "message": result.error.message}
    else:
        found = {"output": output, "error": result.error.code, "message": result.error.message}
    return common.model_copy(update=found | {"truncated": result.truncated.stdout or result.truncated.stderr})


def shown(result: CodeExecResult) -> str:
    """All of a result as a text, for who is shown no fields: the same facts."""
    lines = [f"[note] task `{note.task_id}` {note.state}: {note.text}" for note in result.notes]
    if result.working_dir.reason is not None:
        lines.append(f"[working_dir] ran in `{result.working_dir.used}`: {result.working_dir.reason}")
    lines.append(result.output)
    if result.truncated:
        lines.append("[truncated] the output was longer than what is kept")
    if result.error is not None:
        code = "" if result.exit_code is None else f", exit code {result.exit_code}"
        message = "" if result.output == result.message else f": {result.message}"
        lines.append(f"[error] {result.error}{code}{message}")
    return "\n".join(lines)
