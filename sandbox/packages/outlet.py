"""How a preparation sandbox hands out what it made, on its standard output. Pure; used on both sides.

    <number> <length> <bytes>   a piece of one stream: 0 is the program's own report, n the artifact n of the job;
                                both numbers are of 32 bits, little-endian

The pieces of a stream of an artifact make records: a line of JSON, and for a file as many bytes as it says:

    {"file": "numpy/__init__.py", "size": 1234, "executable": false}\n<1234 bytes>
    {"done": {...}}\n        the last record of an artifact that was unpacked
    {"failed": {...}}\n      the last record of one that was not

The form is this plain because its reader (`records`) is all that stands between hostile archives and the host: whoever
has taken over the process that unpacks one can write what it likes, into the stream of that one artifact.
Owns: the form, as it is written. Must not: open a file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

REPORT = 0
PIECE_BYTES = 1 << 20  # what an unprivileged process may make a pipe's capacity
HEAD = struct.Struct("<II")


def frames(number: int, data: bytes) -> Iterator[bytes]:
    """The frames that hand out `data` as a part of one stream."""
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        yield HEAD.pack(number, len(piece)) + piece


def record(value: dict[str, object]) -> bytes:
    """The line of JSON of a record."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
