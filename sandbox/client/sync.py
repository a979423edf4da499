"""`Client`: the service, for programs without an event loop. Threads may share one.

Owns: sending and waiting, in the caller's thread. Must not: decide what is asked (`operations.py`) or tried again
(`attempts.py`), which the asynchronous client shares.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
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


class Client:
    """Speaks to one service as one user. Closed by `with`, or by `close`.

    Where it is, and who speaks, is told as to `choose_place`. `retries` says what is sent again; `margin_seconds` is
    how much longer than its timeout a call may take, with waiting and preparing. Every method raises `ServiceError`.
    """

    def __init__(
        self, base_url: str | None = None, *, retries: Retries | None = None,
        margin_seconds: float = ask.MARGIN_SECONDS, transport: httpx.BaseTransport | None = None,
        **address: Unpack[Address],
    ) -> None:  # fmt: skip
        """Raises `InvalidSettings`. Nothing is connected yet. `transport` replaces httpx's own, for tests."""
        self._place = choose_place(base_url, **address)
        self._retries, self._margin = retries or Retries(), margin_seconds
        transport = transport or httpx.HTTPTransport(**transport_options(self._place))
        self._http = httpx.Client(transport=transport, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def run(
        self, call: CodeCall | Mapping[str, Any] | None = None, *, once_only: bool = True, **fields: Any
    ) -> ToolResult:
        """Answer a call. Who stops waiting, by an interrupt or by its end, ends the call.

        `once_only`: a call without an idempotency key gets one, so that it can be asked for again when the connection
        is lost, and still runs once at most. Without it such a call raises `ConnectionLost`.
        """
        return self._do(ask.run(with_key(ask.call_fields(call, fields), once_only), self._margin))

    def submit(
        self, call: CodeCall | Mapping[str, Any] | None = None, *, once_only: bool = True, **fields: Any
    ) -> TaskHandle:
        """Detach a call: it goes on without this program."""
        return TaskHandle(self, self._do(ask.submit(with_key(ask.call_fields(call, fields), once_only))))

    def code_exec(
        self, code: str, working_dir: str | None = None, timeout: float | str | None = None, background: bool = False
    ) -> CodeExecResult:
        """A call of the *code_exec* tool. It has no key, so that a lost connection is never tried again."""
        return self._do(ask.code_exec(code, working_dir, timeout, background, self._margin))

    def calls(self, limit: int = 50, before: float | None = None) -> CallList:
        """This user's calls, newest first."""
        return self._do(ask.calls(limit, before))

    def record(self, call_id: str) -> CallRecord:
        return self._do(ask.record(call_id))

    def cancel(self, call_id: str) -> CallRecord:
        """End a call or a task. One that has its answer keeps it."""
        return self._do(ask.cancel(call_id))

    def output(self, call_id: str, stream: StreamName, offset: int = 0, limit: int = 30_000) -> OutputSlice:
        """A part of what a program wrote, in characters."""
        return self._do(ask.output(call_id, stream, offset, limit))

    def read_all(self, call_id: str, stream: StreamName) -> str:
        """All that is kept of what a program has written by now."""
        return self._tell(all_output(call_id, stream, ask.SLICE_CHARS))

    def events(self, call_id: str, after: int = 0) -> Iterator[FeedEvent]:
        """A call's life as it happens, up to its `result`. A lost connection is taken up where it broke."""
        following = Following(call_id, self._retries, after)
        while True:
            try:
                with closing(self._stream(following.request())) as stream:
                    for event in stream:
                        if following.is_new(event):
                            yield event
                        if following.over:
                            return
                failure = ENDED_EARLY
            except httpx.TransportError as error:
                failure = failure_of(error, self._place)
            time.sleep(following.broken(failure))

    def tasks(self, limit: int = 50, before: float | None = None) -> CallList:
        """This user's detached calls, newest first."""
        return self._do(ask.tasks(limit, before))

    def task(self, task_id: str) -> CallRecord:
        return self._do(ask.task(task_id))

    def wait(self, task_id: str, timeout: float | None = None) -> CallRecord:
        """Wait until a task has ended, or for `timeout` seconds: its record then says that it still runs."""
        return self._tell(until_ended(task_id, timeout, time.monotonic))

    def notes(self) -> list[Note]:
        """The tasks that have ended and were not told yet; each is told once."""
        return self._do(ask.notes())

    def explain(
        self, url: str, *, language: str = "python", method: str = "GET", allow_network: bool = False,
        domains: list[str] | None = None,
    ) -> NetworkExplanation:  # fmt: skip
        """What would become of a request that a call with these fields makes."""
        operation = ask.explain(url, language=language, method=method, allow_network=allow_network, domains=domains)
        return self._do(operation)

    def ready(self) -> Readiness:
        """Whether calls can run now, and if not, what is missing."""
        return self._do(ask.ready())

    def _do[T](self, operation: Operation[T]) -> T:
        story = attempts(operation, self._retries)
        pause = next(story)
        while True:
            if pause:
                time.sleep(pause)
            try:
                pause = story.send(self._exchange(operation))
            except StopIteration as end:
                answer: T = end.value
                return answer

    def _exchange(self, operation: Operation[Any]) -> Reply | Failure:
        try:
            return reply_of(self._http.send(self._http.build_request(**request_options(self._place, operation))))
        except httpx.TransportError as error:
            return failure_of(error, self._place)

    def _stream(self, operation: Operation[None]) -> Generator[FeedEvent]:
        request = self._http.build_request(**request_options(self._place, operation))
        with closing(self._http.send(request, stream=True)) as response:
            if response.status_code >= 400:
                response.read()
                raise refusal(reply_of(response))
            reader = EventReader()
            for data in response.iter_bytes():
                yield from reader.feed(data)

    def _tell[A, T](self, story: Generator[Operation[A], A, T]) -> T:
        operation = next(story)
        while True:
            try:
                operation = story.send(self._do(operation))
            except StopIteration as end:
                whole: T = end.value
                return whole


class TaskHandle:
    """A detached call. `task_id` is its call's id; another client of the same user can take it up by that."""

    def __init__(self, client: Client, task_id: str) -> None:
        self._client, self.task_id = client, task_id

    def record(self) -> CallRecord:
        return self._client.task(self.task_id)

    def wait(self, timeout: float | None = None) -> CallRecord:
        return self._client.wait(self.task_id, timeout)

    def cancel(self) -> CallRecord:
        return self._client.cancel(self.task_id)

    def events(self, after: int = 0) -> Iterator[FeedEvent]:
        return self._client.events(self.task_id, after)

    def read_all(self, stream: StreamName) -> str:
        return self._client.read_all(self.task_id, stream)
