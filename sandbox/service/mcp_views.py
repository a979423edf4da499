"""The objects that the tools answer with, in `structuredContent`. Pure.

Owns: what is in an answer beside the contracts' own results. Must not: know how it reads as a text, or how it is made.

Each has everything that the text has: some clients pass a model the one, some the other. They are bounded alike.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox.code_exec import CodeExecResult, Note
from sandbox.contract import (
    AttemptRecord,
    CallError,
    Cause,
    NetworkReport,
    OutputChars,
    PerStream,
    Status,
    Usage,
)
from sandbox.service.model import CallState, Kind, NetworkExplanation, OutputSlice, StreamName

type Operation = Literal["list", "show", "wait", "cancel", "notes"]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LeftOut(_Answer):
    """`chars` characters of a stream, from `offset` on, that are not in this answer.

    `readable`: `read_output` has them. Else the program wrote more than is kept, and they are gone.
    """

    stream: StreamName
    offset: int
    chars: int
    readable: bool


class Denied(_Answer):
    """A destination that the program asked for and the policy refused, `count` times. `rule` is None if not known."""

    host: str
    port: int | None
    reason: str
    policy: str
    rule: str | None
    count: int


class Fault(_Answer):
    """Why there is no answer. `problems` has every fault of the arguments, each with its path."""

    code: str
    message: str
    problems: list[str] = Field(default_factory=list)
    retry_after_seconds: float | None = None


class CodeExecutionAnswer(_Answer):
    """A result of the *Code Execution* contract, field by field, with its output bounded.

    A call that was detached has `task_id` and `state`, and no `status` until it has ended. `denied_more` is how many
    denied destinations there are beside those listed.
    """

    call_id: str = ""
    task_id: str | None = None
    state: CallState | None = None
    queue_position: int | None = None
    status: Status | None = None
    cause: Cause | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    truncated: PerStream = Field(default_factory=PerStream)
    replaced: PerStream = Field(default_factory=PerStream)
    output_chars: OutputChars = Field(default_factory=OutputChars)
    error: CallError | None = None
    return_value: None = None
    attempts: list[AttemptRecord] = Field(default_factory=list)
    usage: Usage = Field(default_factory=Usage)
    network: NetworkReport | None = None
    problems: list[str] = Field(default_factory=list)
    left_out: list[LeftOut] = Field(default_factory=list)
    denied: list[Denied] = Field(default_factory=list)
    denied_more: int = 0
    notes: list[Note] = Field(default_factory=list)


class CodeExecAnswer(CodeExecResult):
    """A result of the code_exec contract, with its output bounded."""

    state: CallState | None = None
    queue_position: int | None = None
    retry_after_seconds: float | None = None
    problems: list[str] = Field(default_factory=list)
    output_chars: OutputChars = Field(default_factory=OutputChars)
    left_out: list[LeftOut] = Field(default_factory=list)
    denied: list[Denied] = Field(default_factory=list)
    denied_more: int = 0


class TaskRow(_Answer):
    """A task in a list. Times are seconds since the epoch."""

    task_id: str
    kind: Kind
    state: CallState
    submitted_at: float
    ended_at: float | None = None
    success: bool | None = None


class TaskView(_Answer):
    """A task. Once it has ended, one of the two last has its result. A task that is `lost` ended with its service."""

    task_id: str
    kind: Kind
    state: CallState
    submitted_at: float
    ended_at: float | None = None
    expires_at: float | None = None
    queue_position: int | None = None
    stage: str | None = None
    code_execution: CodeExecutionAnswer | None = None
    code_exec: CodeExecAnswer | None = None


class TasksAnswer(_Answer):
    """What `tasks` did. `more`: there are older tasks than those listed."""

    operation: Operation | None = None
    tasks: list[TaskRow] = Field(default_factory=list)
    more: bool = False
    task: TaskView | None = None
    notes: list[Note] = Field(default_factory=list)
    error: Fault | None = None


class OutputAnswer(_Answer):
    """A part of what a program wrote, or why there is none."""

    output: OutputSlice | None = None
    error: Fault | None = None


class ExplanationAnswer(_Answer):
    """What would become of a request, or why that cannot be told."""

    explanation: NetworkExplanation | None = None
    error: Fault | None = None


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema that is published for an answer."""
    return model.model_json_schema(mode="serialization")
