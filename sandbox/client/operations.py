"""What can be asked of the service: each as the request that it is, and the reading of its answer. Pure.

Owns: paths, queries, bodies, and how long an answer may take. Must not: send anything, or judge an error's answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from sandbox.code_exec import MAX_TIMEOUT_SECONDS, CodeExecResult, Note, clamp_timeout
from sandbox.contract import CodeCall, ToolResult
from sandbox.service.model import Accepted, CallList, CallRecord, NetworkExplanation, Notes, OutputSlice, StreamName

SHORT_SECONDS = 30.0  # for what runs no code
# Of a call beyond its timeout: above the 120 that a policy leaves it for waiting and preparing when it says nothing.
MARGIN_SECONDS = 180.0
MAX_WAIT_SECONDS = 50.0  # of one request that waits for a task
SLICE_CHARS = 30_000
_QUIET_SECONDS = 60.0  # of an event stream, which says something every 15 seconds


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, whole. The names of `headers` are in small letters."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """No HTTP answer. `sent`: a part of the request may have arrived. `timed_out`: it was waited for long enough."""

    sent: bool
    message: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Operation[T]:
    """One request. `seconds` is how long nothing may come; `repeatable`: asking twice is as asking once.

    `answers` are the statuses above 399 that are answers of it all the same.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = SHORT_SECONDS
    repeatable: bool = False
    answers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the service can run calls now. `details` is all that it says of it."""

    ready: bool
    details: Mapping[str, Any]


def run(call: Mapping[str, Any], margin: float) -> Operation[ToolResult]:
    return Operation(
        "POST", "/v1/calls", _model(ToolResult), body=_json(call), seconds=_patience(call, margin),
        repeatable=bool(call.get("idempotency_key")),
    )  # fmt: skip


def submit(call: Mapping[str, Any]) -> Operation[str]:
    """The answer is the call's id, also where the key had an answer already."""
    return Operation(
        "POST", "/v1/calls", _call_id, body=_json({**call, "background": True}),
        repeatable=bool(call.get("idempotency_key")),
    )  # fmt: skip


def code_exec(
    code: str, working_dir: str | None, timeout: float | str | None, background: bool, margin: float
) -> Operation[CodeExecResult]:
    """A detached call is answered with its `task_id`, in the same form."""
    body = {"code": code, "working_dir": working_dir, "timeout": timeout, "background": background}
    seconds = SHORT_SECONDS if background else clamp_timeout(timeout) + margin
    given = {name: value for name, value in body.items() if value is not None and value is not False}
    return Operation("POST", "/v1/code_exec", _code_exec_result, body=_json(given), seconds=seconds)


def calls(limit: int, before: float | None) -> Operation[CallList]:
    return Operation("GET", "/v1/calls", _model(CallList), query=_given(limit=limit, before=before), repeatable=True)


def record(call_id: str) -> Operation[CallRecord]:
    return Operation("GET", _call(call_id), _model(CallRecord), repeatable=True)


def cancel(call_id: str) -> Operation[CallRecord]:
    return Operation("DELETE", _call(call_id), _model(CallRecord), repeatable=True)


def output(call_id: str, stream: StreamName, offset: int, limit: int) -> Operation[OutputSlice]:
    query = _given(stream=stream, offset=offset, limit=limit)
    return Operation("GET", f"{_call(call_id)}/output", _model(OutputSlice), query=query, repeatable=True)


def events(call_id: str, after: int) -> Operation[None]:
    headers = {"accept": "text/event-stream"} | ({"last-event-id": str(after)} if after else {})
    return Operation(
        "GET", f"{_call(call_id)}/events", lambda _: None, headers=headers, seconds=_QUIET_SECONDS, repeatable=True
    )


def tasks(limit: int, before: float | None) -> Operation[CallList]:
    return Operation("GET", "/v1/tasks", _model(CallList), query=_given(limit=limit, before=before), repeatable=True)


def task(task_id: str) -> Operation[CallRecord]:
    return Operation("GET", _task(task_id), _model(CallRecord), repeatable=True)


def wait(task_id: str, seconds: float) -> Operation[CallRecord]:
    """Wait for `seconds` at most, which the service may shorten: the record then says that the task still runs."""
    asked = max(0.0, min(seconds, MAX_WAIT_SECONDS))
    return Operation(
        "POST", f"{_task(task_id)}/wait", _model(CallRecord), query={"timeout": f"{asked:g}"},
        seconds=asked + SHORT_SECONDS, repeatable=True,
    )  # fmt: skip


def notes() -> Operation[list[Note]]:
    return Operation("POST", "/v1/notes", lambda reply: _model(Notes)(reply).notes)


def explain(
    url: str, *, language: str, method: str, allow_network: bool, domains: list[str] | None
) -> Operation[NetworkExplanation]:
    query = _given(url=url, language=language, method=method, allow_network="true" if allow_network else "false")
    if domains is not None:
        query["domains"] = ",".join(domains)
    return Operation("GET", "/v1/policy/explain", _model(NetworkExplanation), query=query, repeatable=True)


def ready() -> Operation[Readiness]:
    return Operation("GET", "/readyz", _readiness, repeatable=True, answers=frozenset({503}))


def _call(call_id: str) -> str:
    return f"/v1/calls/{quote(call_id, safe='')}"


def _task(task_id: str) -> str:
    return f"/v1/tasks/{quote(task_id, safe='')}"


def _given(**query: object) -> dict[str, str]:
    return {name: str(value) for name, value in query.items() if value is not None}


def _json(value: object) -> bytes:
    """In ASCII, so that a lone surrogate arrives as one and is told as a fault. Raises `TypeError` for other values."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _patience(call: Mapping[str, Any], margin: float) -> float:
    """How long the answer to a call may take. Without a timeout of its own it has the policy's, at most the largest."""
    timeout = call.get("timeout")
    if isinstance(timeout, int | float) and 0 < timeout < MAX_TIMEOUT_SECONDS:
        return timeout + margin
    return MAX_TIMEOUT_SECONDS + margin


def call_fields(call: CodeCall | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A call's fields as they go out: those that were given, whichever way. Raises `TypeError` for both ways at once.

    They are not judged here: the service tells every fault, and an older client must not refuse what is new.
    """
    if call is None:
        return dict(fields)
    if fields:
        raise TypeError("a call is given as a whole, or by its fields; not both")
    return call.model_dump(mode="json", exclude_unset=True) if isinstance(call, CodeCall) else dict(call)


def _model[M: BaseModel](model: type[M]) -> Callable[[Reply], M]:
    """Reads an answer. Fields that a newer service has, and this client does not know, are left out."""
    return lambda reply: model.model_validate_json(reply.body, extra="ignore")


def _call_id(reply: Reply) -> str:
    if reply.status == 202:
        return _model(Accepted)(reply).call_id
    return _model(ToolResult)(reply).call_id


def _code_exec_result(reply: Reply) -> CodeExecResult:
    return _model(CodeExecResult)(reply)


def _readiness(reply: Reply) -> Readiness:
    details = json.loads(reply.body)
    return Readiness(reply.status < 400, details if isinstance(details, dict) else {})
