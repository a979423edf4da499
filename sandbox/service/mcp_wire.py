"""JSON-RPC as both transports take it: read strictly, and each id at most once at a time.

Owns: what counts as a message's text, which ids are one to the SDK, and how a refusal reads. Must not: know a
transport, or what is in a message beside that.
"""

from __future__ import annotations

import json
import math
from typing import Any

from mcp.shared.dispatcher import coerce_request_id
from mcp_types import INVALID_REQUEST

from sandbox.strict_json import NotJson, read_json

_CLAMPED = ("params", "arguments", "timeout")  # of any type, by the contract of code_exec; the other tools look at it


def read_message(data: bytes) -> object:
    """What one message says. Raises `NotJson`, also for `NaN` and `Infinity`, but for where a tool's timeout stands."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NotJson(f"it is not UTF-8 at byte {error.start}") from error
    try:
        return read_json(text)
    except NotJson:
        message = read_json(text, constants=True)
    place = _without_number(message)
    if place is not None:
        raise NotJson(f"the number at {place!a} is none")
    return message


def id_key(number: str | int) -> str:
    """What an id is to the SDK, which takes `7` and `"7"` for one another."""
    return str(coerce_request_id(number))


def request_key(message: object) -> str | None:
    """The key of a request's id; None for what is no request."""
    if not isinstance(message, dict) or "method" not in message:
        return None
    number = message.get("id")
    if not isinstance(number, str | int) or isinstance(number, bool):
        return None
    return id_key(number)


def in_use(key: str) -> bytes:
    """The answer to a request whose id is another's that is not answered yet.

    Without an id, as JSON-RPC has it for a request that is none: clients would take it for the first one's answer.
    """
    return error_line(None, INVALID_REQUEST, f"the id `{key[:80]!a}` is that of a request that has not ended")


def error_line(number: str | int | None, code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}).encode()


def _without_number(message: object) -> str | None:
    """Where a number stands that is none, other than at its place."""
    left: list[tuple[tuple[str, ...], Any]] = [((), message)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [((*path, name) if len(path) < len(_CLAMPED) else path, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [((*path, "0") if len(path) < len(_CLAMPED) else path, inner) for inner in value]
        elif isinstance(value, float) and not math.isfinite(value) and path != _CLAMPED:
            return ".".join(path)[:80]
    return None
