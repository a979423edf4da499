"""`/v1/calls` and `/v1/code_exec`: calls begun, followed, read and ended.

Bodies are decoded by the contracts themselves, not by the framework, so that every fault is told with its path.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from sandbox.call_parsing import parse_call
from sandbox.code_exec import CodeExecCall, CodeExecResult, code_exec_schema, parse_code_exec
from sandbox.contract import MAX_KEY_CHARS, CallError, CodeCall, InvalidCall, ToolResult
from sandbox.service.bodies import read_json_object
from sandbox.service.desk import Desk, answers, caller_of, refusals, said
from sandbox.service.errors import HttpError
from sandbox.service.model import Accepted, CallList, CallRecord, OutputSlice, StreamName
from sandbox.service.service import MAX_LISTED, MAX_OUTPUT_CHARS
from sandbox.service.streams import EventStream

type CallId = Annotated[str, Path(description="as it was given with the answer", max_length=64)]
type Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
type Before = Annotated[
    float | None, Query(allow_inf_nan=False, description="`next_before` of the list before, for what follows it")
]
type Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", max_length=MAX_KEY_CHARS, description="with the same key and request: the first answer"
    ),
]
type LastEventId = Annotated[
    int | None, Header(alias="Last-Event-ID", ge=0, le=2**53, description="of the last event that was read")
]

_BOTH_KEYS = "idempotency_key: it differs from the `Idempotency-Key` header; give one of them"


def calls_router(desk: Desk) -> APIRouter:
    """The routes of calls."""
    router = APIRouter(tags=["calls"])
    service = desk.service

    @router.post(
        "/v1/calls", responses=answers(ToolResult, 413, 415, 429, accepted=Accepted),
        openapi_extra=_body("CodeCall"), summary="Run code, or begin to",
    )  # fmt: skip
    async def run_call(request: Request, idempotency_key: Key = None) -> Response:
        """The answer is the result, also of a call that the policy refuses or whose program fails.

        With `background`, the call is answered at once, and its result is a task's. A client that leaves ends its
        call; one that gave an idempotency key has a few seconds to come back.
        """
        caller = caller_of(request)
        call, background = _code_call(await read_json_object(request, desk.max_body_bytes), idempotency_key)
        live = await service.submit_call(caller, call, background=background)
        if background:
            return said(live.accepted(), 202, _place(live.call_id))
        result = await desk.attendance.answer(
            request.receive, live, live.result(), caller.owner, call.idempotency_key
        )  # fmt: skip
        _check_queue(result.error)
        return said(result)

    @router.post(
        "/v1/code_exec", responses=answers(CodeExecResult, 413, 415, 429, accepted=CodeExecResult),
        openapi_extra=_body("CodeExecCall"), summary="Run Python in the caller's directory",
    )  # fmt: skip
    async def run_code_exec(request: Request) -> Response:
        """The answer has `success`, also where that is false. With `background`, it has a `task_id` at once."""
        caller = caller_of(request)
        call = _code_exec_call(request, await read_json_object(request, desk.max_body_bytes, constants=True))
        live = await service.submit_code_exec(caller, call)
        if call.background:
            return said(await live.code_exec_accepted(), 202, _place(live.call_id))
        result = await desk.attendance.answer(request.receive, live, live.code_exec_result(), caller.owner, None)
        if result.error == "queue_full":
            _check_queue(CallError(code="queue_full", message=result.message or ""))
        return said(result)

    @router.get("/v1/calls", responses=answers(CallList), summary="List one's calls, newest first")
    async def list_calls(request: Request, limit: Limit = 50, before: Before = None) -> Response:
        return said(await service.calls(caller_of(request), limit=limit, before=before))

    @router.get("/v1/calls/{call_id}", responses=answers(CallRecord, 404), summary="What is known of a call")
    async def get_call(request: Request, call_id: CallId) -> Response:
        return said(await service.record(caller_of(request), call_id))

    @router.delete("/v1/calls/{call_id}", responses=answers(CallRecord, 404), summary="End a call")
    async def cancel_call(request: Request, call_id: CallId) -> Response:
        """A call that has ended stays as it is."""
        return said(await service.cancel(caller_of(request), call_id))

    @router.get("/v1/calls/{call_id}/output", responses=answers(OutputSlice, 404), summary="What its program wrote")
    async def read_output(
        request: Request, call_id: CallId, stream: StreamName = "stdout",
        offset: Annotated[int, Query(ge=0, le=2**53, description="in characters")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_OUTPUT_CHARS)] = 30_000,
    ) -> Response:  # fmt: skip
        return said(await service.output(caller_of(request), call_id, stream, offset, limit))

    @router.get(
        "/v1/calls/{call_id}/events", responses=_EVENTS | refusals(404, 429), response_class=Response,
        summary="The life of a call, as server-sent events",
    )  # fmt: skip
    async def follow_call(
        request: Request, call_id: CallId, last_event_id: LastEventId = None,
        after: Annotated[int, Query(ge=0, le=2**53, description="the same, for who sends no headers")] = 0,
    ) -> Response:  # fmt: skip
        caller = caller_of(request)
        await service.record(caller, call_id)  # there is no such call: to be said before the stream begins
        begin = after if last_event_id is None else last_event_id
        return EventStream(service.events(caller, call_id, begin))

    return router


def _code_call(data: dict[str, object], header: str | None) -> tuple[CodeCall, bool]:
    """The call, and whether it is to run in the background. Raises `InvalidCall` with the faults of both."""
    background = data.pop("background", None)
    problems = []
    if background is not None and not isinstance(background, bool):
        problems.append("background: it is not true or false")
    if header is not None:
        given = data.get("idempotency_key")
        if given is not None and given != header:
            problems.append(_BOTH_KEYS)
        data["idempotency_key"] = header
    try:
        call = parse_call(data)
    except InvalidCall as error:
        raise InvalidCall(error.problems + problems) from error
    if problems:
        raise InvalidCall(problems)
    return call, background is True


def _code_exec_call(request: Request, data: dict[str, object]) -> CodeExecCall:
    if "idempotency-key" in request.headers:
        raise InvalidCall(["idempotency_key: code_exec calls have none; `POST /v1/calls` takes one"])
    return parse_code_exec(data)


def _check_queue(error: CallError | None) -> None:
    """What waits for nothing and was not begun is no result. Raises `HttpError`."""
    if error is not None and error.code == "queue_full":
        raise HttpError(503, "queue_full", error.message, retry_after_seconds=error.retry_after_seconds or 1.0)


def _place(call_id: str) -> dict[str, str]:
    return {"location": f"/v1/tasks/{call_id}"}


# --- for the published description


def _body(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"requestBody": {"required": True, "content": content}}


def body_schemas() -> dict[str, Any]:
    """The schemas of what the routes here read themselves."""
    call = CodeCall.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = call.pop("$defs", {})
    call["properties"] = {
        **call["properties"],
        "background": {
            "type": ["boolean", "null"],
            "default": False,
            "description": "answer at once; the result is then that of the task",
        },
    }
    return {**inner, "CodeCall": call, "CodeExecCall": code_exec_schema()}


_EVENTS: dict[int | str, Any] = {
    200: {
        "description": "Events, each with `id`, `event` (`state`, `progress`, `stdout`, `stderr`, `gap`, `result`) and "
        "`data`, which is JSON. The last one is `result`.",
        "content": {"text/event-stream": {}},
    }
}
