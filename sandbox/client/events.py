"""Server-sent events, read from the bytes that come. Pure.

Owns: the form of the stream (HTML standard, 9.2.6). Must not: reconnect (`attempts.Following`).
"""

from __future__ import annotations

import json
import re

from sandbox.client.errors import unreadable
from sandbox.client.operations import Reply
from sandbox.service.model import FeedEvent

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end may be half of CR LF


class EventReader:
    """Takes pieces of a stream, gives the events that are whole. Comments, which keep a line alive, are none."""

    def __init__(self) -> None:
        self._rest = b""
        self._looked_at = 0  # bytes of it that end no line
        self._fields: dict[str, str] = {}

    def feed(self, data: bytes) -> list[FeedEvent]:
        """Raises `ServiceError` for an event that is none of the service's."""
        text = self._rest + data
        found, start = [], 0
        for end in _LINE_END.finditer(text, self._looked_at):
            if (event := self._line(text[start : end.start()].decode("utf-8", "replace"))) is not None:
                found.append(event)
            start = end.end()
        self._rest = text[start:]
        self._looked_at = max(0, len(self._rest) - 1)
        return found

    def _line(self, line: str) -> FeedEvent | None:
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in self._fields:
                value = f"{self._fields['data']}\n{value}"
            if name:  # else a comment
                self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        try:
            event = {"id": int(fields.get("id", "")), "kind": fields.get("event"), "data": json.loads(fields["data"])}
            return FeedEvent.model_validate(event, extra="ignore")
        except ValueError as error:
            raise unreadable(Reply(200), str(error)) from error
