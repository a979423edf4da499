"""`/v1/tasks` and `/v1/notes`: calls that were detached, and the news of their end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from sandbox.service.attendance import unless_gone
from sandbox.service.desk import Desk, answers, caller_of, said
from sandbox.service.model import CallList, CallRecord, Notes
from sandbox.service.routes_calls import Before, CallId, Limit

MAX_WAIT_SECONDS = 300.0
_WAIT_SECONDS = 30.0


def tasks_router(desk: Desk) -> APIRouter:
    """The routes of tasks. A task's id is its call's, which has the same routes."""
    router = APIRouter(tags=["tasks"])
    service = desk.service

    @router.get("/v1/tasks", responses=answers(CallList), summary="List one's tasks, newest first")
    async def list_tasks(request: Request, limit: Limit = 50, before: Before = None) -> Response:
        return said(await service.calls(caller_of(request), background=True, limit=limit, before=before))

    @router.get("/v1/tasks/{call_id}", responses=answers(CallRecord, 404), summary="What is known of a task")
    async def get_task(request: Request, call_id: CallId) -> Response:
        return said(await service.record(caller_of(request), call_id))

    @router.post(
        "/v1/tasks/{call_id}/wait", responses=answers(CallRecord, 404, 429), summary="Wait for the end of a task"
    )  # fmt: skip
    async def wait_for_task(
        request: Request, call_id: CallId,
        timeout: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)] = _WAIT_SECONDS,  # noqa: ASYNC109 - the client's
    ) -> Response:  # fmt: skip
        """What is known of it then, or after `timeout` seconds. Who waits no more leaves the task alone."""
        return said(await unless_gone(request.receive, service.wait(caller_of(request), call_id, timeout)))

    @router.delete("/v1/tasks/{call_id}", responses=answers(CallRecord, 404), summary="End a task")
    async def cancel_task(request: Request, call_id: CallId) -> Response:
        """A task that has ended stays as it is."""
        return said(await service.cancel(caller_of(request), call_id))

    @router.post("/v1/notes", responses=answers(Notes, 429), summary="Take the news of tasks that have ended")
    async def take_notes(request: Request) -> Response:
        """Each is told once, here or with the answer to a code_exec call, whichever comes first."""
        return said(Notes(notes=await service.take_notes(caller_of(request))))

    return router
