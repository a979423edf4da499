"""`AsyncClient`: the service, for programs with an event loop. Tasks may share one.

Owns: sending and waiting, in the caller's loop. Must not: decide what is asked (`operations.py`) or tried again
(`attempts.py`), which the other client shares.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from sandbox.client import operations as ask
from sandbox.client.attempts import ENDED_EARLY, Following, Retries, all_output, attempts, until_ended
from sandbox.client.errors import refusal
from sandbox.client.events import EventReader
from sandbox.client.operations import Failure, Operation, Readiness, Reply
from sandbox.client.place import Address, choose_place
from sandbox.client.wire import failure_of, reply_of, request_options, transport_options, with_key
from sandbox.code_exec import CodeExecResult, Note
from sandbox.contract import CodeCall, ToolResult
from sandbox.service.model import CallList, CallRecord, FeedEvent, NetworkExplanation, OutputSlice, StreamName


class AsyncClient:
    """Speaks to one service as one user. Closed by `async with`, or by `close`.

    Where it is, and who speaks, is told as to `choose_place`. `retries` says what is sent again; `margin_seconds` is
    how much longer than its timeout a call may take, with waiting and preparing. Every method raises `ServiceError`.
    """

    def __init__(
        self, base_url: str | None = None, *, retries: Retries | None = None,
        margin_seconds: float = ask.MARGIN_SECONDS, transport: httpx.AsyncBaseTransport | None = None,
        **address: Unpack[Address],
    ) -> None:  # fmt: skip
        """Raises `InvalidSettings`. Nothing is connected yet. `transport` replaces httpx's own, for tests."""
        self._place = choose_place(base_url, **address)
        self._retries, self._margin = retries or Retries(), margin_seconds
        transport = transport or httpx.AsyncHTTPTransport(**transport_options(self._place))
        self._http = httpx.AsyncClient(transport=transport, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def run(
        self, call: CodeCall | Mapping[str, Any] | None = None, *, once_only: bool = True, **fields: Any
    ) -> ToolResult:
        """Answer a call. Who stops waiting, by an interrupt or by its end, ends the call.

        `once_only`: a call without an idempotency key gets one, so that it can be asked for again when the connection
        is lost, and still runs once at most. Without it such a call raises `ConnectionLost`.
        """
        return await self._do(ask.run(with_key(ask.call_fields(call, fields), once_only), self._margin))

    async def submit(
        self, call: CodeCall | Mapping[str, Any] | None = None, *, once_only: bool = True, **fields: Any
    ) -> AsyncTaskHandle:
        """Detach a call: it goes on without this program."""
        return AsyncTaskHandle(self, await self._do(ask.submit(with_key(ask.call_fields(call, fields), once_only))))

    async def code_exec(
        self, code: str, working_dir: str | None = None,
        timeout: float | str | None = None,  # noqa: ASYNC109 - the program's
        background: bool = False,
    ) -> CodeExecResult:  # fmt: skip
        """A call of the *code_exec* tool. It has no key, so that a lost connection is never tried again."""
        return await self._do(ask.code_exec(code, working_dir, timeout, background, self._margin))

    async def calls(self, limit: int = 50, before: float | None = None) -> CallList:
        """This user's calls, newest first."""
        return await self._do(ask.calls(limit, before))

    async def record(self, call_id: str) -> CallRecord:
        return await self._do(ask.record(call_id))

    async def cancel(self, call_id: str) -> CallRecord:
        """End a call or a task. One that has its answer keeps it."""
        return await self._do(ask.cancel(call_id))

    async def output(self, call_id: str, stream: StreamName, offset: int = 0, limit: int = 30_000) -> OutputSlice:
        """A part of what a program wrote, in characters."""
        return await self._do(ask.output(call_id, stream, offset, limit))

    async def read_all(self, call_id: str, stream: StreamName) -> str:
        """All that is kept of what a program has written by now."""
        return await self._tell(all_output(call_id, stream, ask.SLICE_CHARS))

    async def events(self, call_id: str, after: int = 0) -> AsyncIterator[FeedEvent]:
        """A call's life as it happens, up to its `result`. A lost connection is taken up where it broke."""
        following = Following(call_id, self._retries, after)
        while True:
            try:
                async with aclosing(self._stream(following.request())) as stream:
                    async for event in stream:
                        if following.is_new(event):
                            yield event
                        if following.over:
                            return
                failure = ENDED_EARLY
            except httpx.TransportError as error:
                failure = failure_of(error, self._place)
            await asyncio.sleep(following.broken(failure))

    async def tasks(self, limit: int = 50, before: float | None = None) -> CallList:
        """This user's detached calls, newest first."""
        return await self._do(ask.tasks(limit, before))

    async def task(self, task_id: str) -> CallRecord:
        return await self._do(ask.task(task_id))

    async def wait(self, task_id: str, timeout: float | None = None) -> CallRecord:  # noqa: ASYNC109 - as the other has
        """Wait until a task has ended, or for `timeout` seconds: its record then says that it still runs."""
        return await self._tell(until_ended(task_id, timeout, time.monotonic))

    async def notes(self) -> list[Note]:
        """The tasks that have ended and were not told yet; each is told once."""
        return await self._do(ask.notes())

    async def explain(
        self, url: str, *, language: str = "python", method: str = "GET", allow_network: bool = False,
        domains: list[str] | None = None,
    ) -> NetworkExplanation:  # fmt: skip
        """What would become of a request that a call with these fields makes."""
        operation = ask.explain(url, language=language, method=method, allow_network=allow_network, domains=domains)
        return await self._do(operation)

    async def ready(self) -> Readiness:
        """Whether calls can run now, and if not, what is missing."""
        return await self._do(ask.ready())

    async def _do[T](self, operation: Operation[T]) -> T:
        story = attempts(operation, self._retries)
        pause = next(story)
        while True:
            if pause:
                await asyncio.sleep(pause)
            try:
                pause = story.send(await self._exchange(operation))
            except StopIteration as end:
                answer: T = end.value
                return answer

    async def _exchange(self, operation: Operation[Any]) -> Reply | Failure:
        try:
            return reply_of(await self._http.send(self._http.build_request(**request_options(self._place, operation))))
        except httpx.TransportError as error:
            return failure_of(error, self._place)

    async def _stream(self, operation: Operation[None]) -> AsyncGenerator[FeedEvent]:
        request = self._http.build_request(**request_options(self._place, operation))
        async with aclosing(await self._http.send(request, stream=True)) as response:
            if response.status_code >= 400:
                await response.aread()
                raise refusal(reply_of(response))
            reader = EventReader()
            async for data in response.aiter_bytes():
                for event in reader.feed(data):
                    yield event

    async def _tell[A, T](self, story: Generator[Operation[A], A, T]) -> T:
        operation = next(story)
        while True:
            try:
                operation = story.send(await self._do(operation))
            except StopIteration as end:
                whole: T = end.value
                return whole


class AsyncTaskHandle:
    """A detached call. `task_id` is its call's id; another client of the same user can take it up by that."""

    def __init__(self, client: AsyncClient, task_id: str) -> None:
        self._client, self.task_id = client, task_id

    async def record(self) -> CallRecord:
        return await self._client.task(self.task_id)

    async def wait(self, timeout: float | None = None) -> CallRecord:  # noqa: ASYNC109 - likewise
        return await self._client.wait(self.task_id, timeout)

    async def cancel(self) -> CallRecord:
        return await self._client.cancel(self.task_id)

    def events(self, after: int = 0) -> AsyncIterator[FeedEvent]:
        return self._client.events(self.task_id, after)

    async def read_all(self, stream: StreamName) -> str:
        return await self._client.read_all(self.task_id, stream)
