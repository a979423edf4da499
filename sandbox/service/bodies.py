"""Bodies of requests: read up to a bound, and decoded strictly.

Owns: the bounds of what is read, and what counts as JSON. Must not: know what a call is.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message

from sandbox.contract import InvalidCall
from sandbox.service.errors import HttpError
from sandbox.strict_json import NotJson, read_json


class ClientGone(Exception):
    """Whoever asked has left."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `HttpError` 413 when it is longer, and `ClientGone`."""
    if (told := declared_length(request)) is not None and told > max_bytes:
        raise too_large(max_bytes)
    parts: list[bytes] = []
    length = 0
    while True:
        message: Message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        length += len(part)
        if length > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def declared_length(request: Request) -> int | None:
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413, "too_large", f"the body has more than {max_bytes} bytes, which the policy's `service.max_body_mib` allows"
    )


async def read_json_object(request: Request, max_bytes: int, *, constants: bool = False) -> dict[str, object]:
    """The JSON object that a request carries. Raises `HttpError` 413 and 415, `InvalidCall`, and `ClientGone`."""
    kinds = request.headers.getlist("content-type") or ["application/json"]
    if len(kinds) > 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
        raise HttpError(
            415, "unsupported_media_type", "the body is not told to be JSON\nhint: send `content-type: "
            "application/json`, once; with curl, `--json` does",
        )  # fmt: skip
    body = await read_body(request, max_bytes)
    try:
        data = read_json(body.decode(), constants=constants)
    except UnicodeDecodeError as error:
        raise InvalidCall([f"call: it is not UTF-8 at byte {error.start}"]) from error
    except NotJson as error:
        raise InvalidCall([f"call: {error}"]) from error
    if not isinstance(data, dict):
        raise InvalidCall(["call: it is not a JSON object"])
    return data
