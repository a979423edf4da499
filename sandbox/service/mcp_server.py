"""The tools over MCP, on the official SDK's low-level server, whatever the transport.

The SDK's server is given arguments as they came: the contracts read them, and tell every fault at once. What a client
gets is made by `mcp_answers` and `mcp_text`; this module asks the service, reports progress, and cancels.

A request that ends early cancels its call: by `notifications/cancelled`, by the end of its response stream (`GONE`), or
with its connection. The SDK then cancels the task that answers it.

Owns: which call belongs to which request. Must not: know the transport, or judge who may call.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import anyio
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from pydantic import BaseModel
from starlette.types import Message

from sandbox.code_exec import parse_code_exec
from sandbox.contract import InvalidCall, ToolResult
from sandbox.owners import Caller
from sandbox.service import mcp_answers, mcp_text
from sandbox.service.attendance import Attendance
from sandbox.service.live import LiveCall
from sandbox.service.mcp_bounds import MAX_SHOWN_CHARS
from sandbox.service.mcp_denials import denied_of
from sandbox.service.mcp_progress import tell
from sandbox.service.mcp_tools import (
    INSTRUCTIONS,
    TOOLS,
    ExplainCall,
    OutputCall,
    TasksCall,
    parse_arguments,
    parse_execution,
)
from sandbox.service.mcp_views import (
    CodeExecAnswer,
    CodeExecutionAnswer,
    ExplanationAnswer,
    Fault,
    OutputAnswer,
    TaskRow,
    TasksAnswer,
    TaskView,
)
from sandbox.service.model import CallRecord
from sandbox.service.service import Service

GONE = "sluicegate.gone"  # in the state of a request's scope: an `asyncio.Event`, set when its response is read no more
_SETTLE_SECONDS = 10.0
_LISTED = 50
_log = logging.getLogger("sluicegate")

type Context = ServerRequestContext[Any, Any]
type FindService = Callable[[], Awaitable[Service]]
type CallerOf = Callable[[Context], Caller]


def make_server(find_service: FindService, caller_of: CallerOf) -> Server[Any]:
    """A server of the five tools.

    `find_service` is awaited by each call, and raises `ServiceError` where there is none; `caller_of` says who asks.
    """
    tools = _Tools(find_service, caller_of)
    return Server(
        "sluicegate",
        version=version("sluicegate"),
        title="Sluicegate",
        description="Runs programs in fresh sandboxes, with the network that a policy allows and no other",
        instructions=INSTRUCTIONS,
        get_tool_input_schema=lambda name: TOOLS[name].input_schema if name in TOOLS else None,
        on_list_tools=_list_tools,
        on_call_tool=tools.call,
    )


async def _list_tools(_context: Context, _params: PaginatedRequestParams | None) -> ListToolsResult:
    return ListToolsResult(tools=list(TOOLS.values()))


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request for a tool."""

    context: Context
    service: Service
    caller: Caller
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Answered[A: BaseModel]:
    answer: A
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class _Tool[A: BaseModel]:
    """How a tool is answered, what it says when it cannot be, and how that reads."""

    answer: Callable[[_Asked], Awaitable[_Answered[A]]]
    fault: Callable[[Fault], A]
    text: Callable[[A], list[str]]

    async def result(self, ask: Callable[[], Awaitable[_Asked]]) -> CallToolResult:
        try:
            found = await self.answer(await ask())
        except mcp_answers.ANSWERED_ERRORS as error:
            found = _Answered(self.fault(mcp_answers.fault_of(error)), is_error=True)
        except Exception:  # noqa: BLE001 - the edge: what is nobody else's fault is ours
            reference = secrets.token_hex(4)
            _log.exception("internal error %s", reference)
            fault = Fault(code="internal_error", message=f"internal error: the service's log has it as `{reference}`")
            found = _Answered(self.fault(fault), is_error=True)
        return CallToolResult(
            content=[TextContent(type="text", text=text) for text in self.text(found.answer)],
            structured_content=found.answer.model_dump(mode="json"),
            is_error=found.is_error,
        )


class _Tools:
    """The tools, over one service."""

    def __init__(self, find_service: FindService, caller_of: CallerOf) -> None:
        self._find_service, self._caller_of = find_service, caller_of
        self._attendance = Attendance()
        self._tools: Mapping[str, _Tool[Any]] = {
            "code_execution": _Tool(self._code_execution, mcp_answers.execution_fault, mcp_text.of_execution),
            "code_exec": _Tool(self._code_exec, mcp_answers.exec_fault, mcp_text.of_exec),
            "tasks": _Tool(self._tasks, lambda fault: TasksAnswer(error=fault), mcp_text.of_tasks),
            "read_output": _Tool(self._read_output, lambda fault: OutputAnswer(error=fault), mcp_text.of_output),
            "explain_network": _Tool(
                self._explain_network, lambda fault: ExplanationAnswer(error=fault), mcp_text.of_explanation
            ),
        }

    async def call(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        """Answer one request. Raises `MCPError` for a tool that there is not."""
        tool = self._tools.get(params.name)
        if tool is None:
            known = ", ".join(self._tools)
            raise MCPError(INVALID_PARAMS, f"there is no tool `{params.name[:80]!a}`; the tools are {known}")

        async def ask() -> _Asked:
            return _Asked(context, await self._find_service(), self._caller_of(context), params.arguments or {})

        with anyio.CancelScope() as scope:
            watch = asyncio.create_task(_cancel_when_gone(context, scope))
            try:
                return await tool.result(ask)
            finally:
                watch.cancel()
        raise MCPError(CONNECTION_CLOSED, "the request was cancelled")  # nobody reads it

    async def _code_execution(self, asked: _Asked) -> _Answered[CodeExecutionAnswer]:
        call, background = parse_execution(asked.arguments)
        live = await _begun(asked.service.submit_call(asked.caller, call, background=background))
        if background and live.answer is None:
            accepted = live.accepted()
            return _Answered(mcp_answers.execution_accepted(accepted, await asked.service.take_notes(asked.caller)))
        result = await self._answer(asked, live, call.idempotency_key)
        denied = await denied_of(asked.service, asked.caller, result, call.language, call.domains)
        notes = await asked.service.take_notes(asked.caller)
        answer = mcp_answers.execution_answer(
            result, task_id=live.call_id if background else None, denied=denied, notes=notes
        )
        return _Answered(answer, mcp_answers.is_error(result.cause))

    async def _code_exec(self, asked: _Asked) -> _Answered[CodeExecAnswer]:
        call = parse_code_exec(asked.arguments)
        live = await _begun(asked.service.submit_code_exec(asked.caller, call))
        if call.background and live.answer is None:
            answered = await live.code_exec_accepted()
            return _Answered(mcp_answers.exec_answer(answered, None, accepted=live.accepted()))
        result = await self._answer(asked, live, None)
        denied = await denied_of(asked.service, asked.caller, result, "python", _domains_of_code_exec(asked))
        answer = mcp_answers.exec_answer(await live.code_exec_result(), result, denied=denied)
        return _Answered(answer, mcp_answers.is_error(result.cause))

    async def _tasks(self, asked: _Asked) -> _Answered[TasksAnswer]:
        call = parse_arguments(TasksCall, asked.arguments)
        service, caller = asked.service, asked.caller
        if call.operation in ("list", "notes"):
            rows = await service.calls(caller, background=True, limit=_LISTED) if call.operation == "list" else None
            notes = mcp_answers.bound_notes(await service.take_notes(caller))
            return _Answered(
                TasksAnswer(
                    operation=call.operation,
                    tasks=[] if rows is None else [
                        TaskRow(
                            task_id=row.call_id, kind=row.kind, state=row.state, submitted_at=row.submitted_at,
                            ended_at=row.ended_at, success=row.success,
                        )
                        for row in rows.calls
                    ],
                    more=rows is not None and rows.next_before is not None,
                    notes=notes,
                )
            )  # fmt: skip
        if call.task_id is None:
            raise InvalidCall([f"task_id: it is required for `{call.operation}`"])
        if call.operation == "cancel":
            record = await service.cancel(caller, call.task_id)
        elif call.operation == "wait":
            record = await _following(asked, call.task_id, service.wait(caller, call.task_id, call.wait_seconds))
        else:
            record = await service.record(caller, call.task_id)
        notes = mcp_answers.bound_notes(await service.take_notes(caller))
        return _Answered(TasksAnswer(operation=call.operation, task=await _task_view(asked, record), notes=notes))

    async def _read_output(self, asked: _Asked) -> _Answered[OutputAnswer]:
        call = parse_arguments(OutputCall, asked.arguments)
        part = await asked.service.output(asked.caller, call.call_id, call.stream, call.offset, call.limit)
        return _Answered(OutputAnswer(output=part))

    async def _explain_network(self, asked: _Asked) -> _Answered[ExplanationAnswer]:
        call = parse_arguments(ExplainCall, asked.arguments)
        found = await asked.service.explain(
            asked.caller, call.url, language=call.language, allow_network=call.allow_network, domains=call.domains,
            method=call.method,
        )  # fmt: skip
        return _Answered(ExplanationAnswer(explanation=found))

    async def _answer(self, asked: _Asked, live: LiveCall, key: str | None) -> ToolResult:
        """The answer to a call that this request began. The call ends with the request.

        With a key it is given a moment, in which the request may come again.
        """
        try:
            waiting = self._attendance.answer(_silence, live, live.result(), asked.caller.owner, key)
            return await _following(asked, live.call_id, waiting)
        except asyncio.CancelledError:
            if key is None:
                with anyio.CancelScope(shield=True):
                    await live.settle(_SETTLE_SECONDS)  # a request that was cancelled leaves nothing that runs
            raise


async def _silence() -> Message:
    """A client of which nothing more is heard: the SDK listens, and cancels."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def _cancel_when_gone(context: Context, scope: anyio.CancelScope) -> None:
    state = {} if context.request is None else context.request.scope.get("state", {})
    gone = state.get(GONE)
    if gone is not None:
        await gone.wait()
        scope.cancel()


async def _begun(submitting: Awaitable[LiveCall]) -> LiveCall:
    """A call that was begun, or not: a cancellation does not come between."""
    with anyio.CancelScope(shield=True):
        live = await submitting
    return live  # noqa: RET504 - to the type checker the scope above may swallow its end


async def _following[T](asked: _Asked, call_id: str, work: Awaitable[T]) -> T:
    """What `work` gives, with progress told meanwhile to a client that asked for it."""
    if "progress_token" not in (asked.context.meta or {}):
        return await work
    session = asked.context.session

    async def report(seconds: float, text: str) -> None:
        await session.report_progress(round(seconds, 3), message=text)

    telling = asyncio.create_task(tell(asked.service.events(asked.caller, call_id), report))
    try:
        return await work
    finally:
        telling.cancel()
        await asyncio.wait({telling})
        if not telling.cancelled() and (error := telling.exception()) is not None:
            _log.warning("progress of %s could not be told: %s", call_id, error)


def _domains_of_code_exec(asked: _Asked) -> list[str]:
    return [str(name) for name in asked.service.executor.policy_of(asked.caller.tenant).policy.code_exec.domains]


async def _task_view(asked: _Asked, record: CallRecord) -> TaskView:
    """A task with its result, bounded."""
    result = record.result
    limit = MAX_SHOWN_CHARS * 3 // 4  # notes may come with it
    as_execution: CodeExecutionAnswer | None = None
    as_exec: CodeExecAnswer | None = None
    if result is not None and record.code_exec is not None:
        denied = await denied_of(asked.service, asked.caller, result, "python", _domains_of_code_exec(asked))
        as_exec = mcp_answers.exec_answer(record.code_exec, result, state=record.state, denied=denied, limit=limit)
    elif result is not None:
        denied = await denied_of(asked.service, asked.caller, result, "python", None)
        as_execution = mcp_answers.execution_answer(
            result, task_id=record.call_id, state=record.state, denied=denied, limit=limit
        )
    return TaskView(
        task_id=record.call_id, kind=record.kind, state=record.state, submitted_at=record.submitted_at,
        ended_at=record.ended_at, expires_at=record.expires_at, queue_position=record.queue_position,
        stage=record.stage or None, code_execution=as_execution, code_exec=as_exec,
    )  # fmt: skip
