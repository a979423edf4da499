"""What a registry's site says to one request, before it is bytes.

    Answer(200, b"...", "text/plain").wire(seen)   # validators, ranges and HEAD are seen to

Owns: status, validators (ETag, If-None-Match), ranges, HEAD. Must not: know what a package is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tests.servers import SeenRequest

_PHRASES = {200: "OK", 201: "Created", 206: "Partial Content", 301: "Moved Permanently", 304: "Not Modified"}


@dataclass(frozen=True)
class Answer:
    """A status, a body, and the headers that are this answer's own."""

    status: int
    body: bytes = b""
    kind: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_json(cls, value: Any, kind: str = "application/json", status: int = 200, **headers: str) -> Self:
        named = {key.replace("_", "-"): text for key, text in headers.items()}
        return cls(status, json.dumps(value).encode(), kind, named)

    def wire(self, seen: SeenRequest) -> bytes:
        """The bytes for who asked so. Only a whole, good answer has a validator and can be asked for in parts."""
        status, body = self.status, self.body
        headers = {"Content-Type": self.kind, **self.headers}
        if status == 200:
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            headers |= {"ETag": tag, "Accept-Ranges": "bytes"}
            known = [text.strip().removeprefix("W/") for text in (seen.header("if-none-match") or "").split(",")]
            if tag in known or "*" in known:
                status, body = 304, b""
            elif asked := seen.header("range"):
                status, body, headers = _part(body, asked, headers)
        if status != 304:
            headers["Content-Length"] = str(len(body))
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Answer')}", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if seen.method == "HEAD" else body)


NOT_FOUND = Answer.of_json({"error": "not found"}, status=404)


def _part(body: bytes, asked: str, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    """One range of the body; the whole where more than one range, or none that can be read, was asked for."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if found is None or found[0] == "bytes=-":
        return 200, body, headers
    size = len(body)
    if found[1]:
        first, last = int(found[1]), min(int(found[2] or size - 1), size - 1)
    else:
        first, last = max(size - int(found[2]), 0), size - 1
    if first > last:
        return 416, b"", headers | {"Content-Range": f"bytes */{size}"}
    return 206, body[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
