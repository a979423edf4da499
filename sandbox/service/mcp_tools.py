"""The tools as models are told of them: names, arguments, answers, and what to expect of each. Pure.

Owns: the descriptions, the schemas, and reading the arguments that no contract describes. Must not: run anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from mcp_types import Tool, ToolAnnotations
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox.call_parsing import invalid_call, parse_call, path_step
from sandbox.code_exec import code_exec_schema
from sandbox.contract import CodeCall, InvalidCall, Language
from sandbox.service.mcp_bounds import MAX_SHOWN_CHARS
from sandbox.service.mcp_views import (
    CodeExecAnswer,
    CodeExecutionAnswer,
    ExplanationAnswer,
    Operation,
    OutputAnswer,
    TasksAnswer,
    schema_of,
)
from sandbox.service.model import StreamName

MAX_WAIT_SECONDS: Final = 50.0
_WAIT_SECONDS: Final = 30.0
_MAX_ID_CHARS = 100
_FIELDS = ", ".join(CodeCall.model_fields)

INSTRUCTIONS = (
    "Runs programs in fresh sandboxes. No state persists between calls, except the files that `code_exec` writes in "
    "its working directory. The network is closed unless a call asks for it and the operator's policy allows it; what "
    "the policy denies cannot be reached by any other route. Use `background` for what takes longer than 45 seconds, "
    "and `tasks` to follow it. Output that is left out of an answer is read with `read_output`."
)


class _Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TasksCall(_Arguments):
    """The arguments of `tasks`."""

    operation: Annotated[
        Operation, Field(description="`list`, `show`, `wait`, `cancel`, or `notes`: those that have ended, told once")
    ]
    task_id: Annotated[
        str | None, Field(max_length=_MAX_ID_CHARS, description="for `show`, `wait` and `cancel`: which task")
    ] = None
    timeout: Annotated[
        float | None, Field(ge=0, description="for `wait`: seconds, 30 if left out; more than 50 counts as 50")
    ] = None

    @property
    def wait_seconds(self) -> float:
        return min(_WAIT_SECONDS if self.timeout is None else self.timeout, MAX_WAIT_SECONDS)


class OutputCall(_Arguments):
    """The arguments of `read_output`."""

    call_id: Annotated[str, Field(max_length=_MAX_ID_CHARS, description="the call, as its answer names it")]
    stream: Annotated[StreamName, Field(description="`stdout` or `stderr`")] = "stdout"
    offset: Annotated[int, Field(ge=0, description="the first character, from 0")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_SHOWN_CHARS, description="characters")] = MAX_SHOWN_CHARS


class ExplainCall(_Arguments):
    """The arguments of `explain_network`: a destination, and the call that would ask for it."""

    url: Annotated[str, Field(min_length=1, max_length=8192, description="a URL, or `HOST:PORT`")]
    language: Annotated[Language, Field(description="the call's language")] = "python"
    allow_network: Annotated[bool, Field(description="the call's `allow_network`")] = False
    domains: Annotated[list[str] | None, Field(max_length=256, description="the call's `domains`")] = None
    method: Annotated[str, Field(min_length=1, max_length=32, description="the request's method, in capitals")] = "GET"


def parse_execution(arguments: Mapping[str, Any]) -> tuple[CodeCall, bool]:
    """A call of `code_execution`, and whether it is detached. Raises `InvalidCall` with every fault."""
    data = dict(arguments)
    background = data.pop("background", None)
    wrong = [] if background is None or isinstance(background, bool) else ["background: it is not true or false"]
    try:
        call = parse_call(data)
    except InvalidCall as error:
        problems = [problem.replace(_FIELDS, f"{_FIELDS}, background") for problem in error.problems]
        raise InvalidCall([*problems, *wrong], error.code) from error
    if wrong:
        raise InvalidCall(wrong)
    return call, background is True


def parse_arguments[T: _Arguments](model: type[T], arguments: Mapping[str, Any]) -> T:
    """The arguments of one of the tools above. Raises `InvalidCall` with every fault, each with its path."""
    given = {name: value for name, value in arguments.items() if value is not None or name not in model.model_fields}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for problem in error.errors(include_url=False):
            path = ".".join(path_step(step) for step in problem["loc"]) or "call"
            nan = isinstance(problem["input"], float) and math.isnan(problem["input"])  # it compares with nothing
            said = _said(model, problem["type"], problem["msg"], problem.get("ctx") or {})
            problems.setdefault(path, "it is no number" if nan else said)
        raise invalid_call(problems) from error


def _said(model: type[BaseModel], kind: str, message: str, limits: Mapping[str, Any]) -> str:
    """What is wrong with an argument. `kind` and `limits` are pydantic's."""
    match kind:
        case "missing":
            return "it is required"
        case "extra_forbidden":
            return f"it is not an argument of this tool; the arguments are {', '.join(model.model_fields)}"
        case "literal_error":
            return f"it is none of {limits['expected']}"
        case "greater_than_equal":
            return f"it is below {limits['ge']:g}"
        case "less_than_equal":
            return f"it is above {limits['le']:g}"
    return message[:1].lower() + message[1:]


def _tool(
    name: str, title: str, description: str, arguments: dict[str, Any], answer: type[BaseModel], hints: ToolAnnotations
) -> Tool:
    return Tool(
        name=name, title=title, description=description, input_schema=arguments, output_schema=schema_of(answer),
        annotations=hints,
    )  # fmt: skip


def _hints(*, reads: bool, destroys: bool = False, open_world: bool = False) -> ToolAnnotations:
    return ToolAnnotations(
        read_only_hint=reads, destructive_hint=destroys, idempotent_hint=reads, open_world_hint=open_world
    )


_BACKGROUND: Final = {
    "type": ["boolean", "null"],
    "default": False,
    "description": "answer at once with a `task_id`; the result comes as a note, or through `tasks`",
}
_CALL_FIELDS: Final = {
    "language": "`python` or `javascript`",
    "code": "the program; it prints what is wanted",
    "packages": "packages to import, with versions: `requests==2.32.3`, `lodash@4.17.21`",
    "timeout": "seconds, 1 to 300; the operator's default if left out",
    "memory_mib": "MiB, 128 to 2048; the operator's default if left out",
    "env": "variables of its environment",
    "allow_network": "false: no network. True without `domains`: the language's package registry, read-only",
    "domains": "with `allow_network`: these hosts and their subdomains; an empty list asks for any public host",
    "idempotency_key": "the same key with the same call gets the first answer, and runs nothing again",
}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema without references, which some clients cannot follow in arguments, and without made-up titles."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined(definitions[reference.rpartition("/")[2]], definitions) | _inlined(rest, definitions)
    plain = {
        name: {field: _inlined(one, definitions) for field, one in value.items()}
        if name == "properties"
        else _inlined(value, definitions)
        for name, value in schema.items()
        if name != "$defs"
    }
    if isinstance(plain.get("title"), str):
        del plain["title"]
    return plain


def arguments_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a tool's arguments."""
    schema = model.model_json_schema()
    plain: dict[str, Any] = _inlined(schema, schema.get("$defs", {}))
    plain.pop("description", None)
    return plain


def execution_schema() -> dict[str, Any]:
    """The JSON Schema of the arguments of `code_execution`: the contract's, and `background`."""
    schema = arguments_schema(CodeCall)
    properties = {name: {**one, "description": _CALL_FIELDS[name]} for name, one in schema["properties"].items()}
    return schema | {"properties": properties | {"background": _BACKGROUND}}


type ToolName = Literal["code_execution", "code_exec", "tasks", "read_output", "explain_network"]

TOOLS: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        _tool(
            "code_execution",
            "Run a program in a fresh sandbox",
            "Runs Python or JavaScript in a fresh sandbox and returns its output, exit code and what it asked of the "
            "network. Nothing persists: no files, variables or installed packages outlive the call. No network unless "
            "`allow_network` is true and the operator's policy allows it. A non-zero exit, a timeout or a kill is an "
            "ordinary result; an error means that nothing ran. At most 300 s; pass `background` for more than 45 s, "
            "since clients give up at 60. Long output is shown by its beginning and end; `read_output` has the rest.",
            execution_schema(),
            CodeExecutionAnswer,
            _hints(reads=False, destroys=True, open_world=True),
        ),
        _tool(
            "code_exec",
            "Run Python in a working directory",
            "Runs Python in a fresh interpreter and returns stdout, then stderr behind `[stderr]`. State does not "
            "persist between calls; files that it writes in its working directory do. Success is exit code 0; a "
            "traceback in the output is the program's own. `timeout` is clamped to 1 to 300 s, 30 if left out; a "
            "timeout returns nothing of the run. Pass `background` for more than 45 s. The network is what the "
            "operator's policy gives this tool: none unless it says so.",
            code_exec_schema(),
            CodeExecAnswer,
            _hints(reads=False, destroys=True, open_world=True),
        ),
        _tool(
            "tasks",
            "Follow detached calls",
            "Lists calls that were made with `background`, shows one with its result, waits up to 50 s for one, "
            "cancels one, or returns notes of those that have ended. Each note comes once; the result stays readable.",
            arguments_schema(TasksCall),
            TasksAnswer,
            _hints(reads=False, destroys=True),
        ),
        _tool(
            "read_output",
            "Read the output of a call",
            f"Reads a part of what a call's program wrote, at most {MAX_SHOWN_CHARS} characters at once. An answer "
            "that left something out names the call, the stream and the offset.",
            arguments_schema(OutputCall),
            OutputAnswer,
            _hints(reads=True),
        ),
        _tool(
            "explain_network",
            "Explain what the network policy would decide",
            "Says whether a request to a URL would be allowed for a call with the given network setting, by which "
            "rule, and what would have to change. Nothing is sent.",
            arguments_schema(ExplainCall),
            ExplanationAnswer,
            _hints(reads=True),
        ),
    )
}
