"""How much of an answer a model is shown: the beginning and the end, and where the rest can be read. Pure.

Owns: the numbers. A model's host cuts what is longer by itself, and says nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.service.model import StreamName

MAX_SHOWN_CHARS = 30_000
MIN_OUTPUT_CHARS = 4_000
MAX_MESSAGE_CHARS = 4_000
MAX_NOTE_CHARS = 2_000
_STDERR_SHARE = 3
_MARK_CHARS = 160


@dataclass(frozen=True, slots=True)
class Gap:
    """What is not shown of a stream: `chars` characters from `offset` on."""

    stream: StreamName
    offset: int
    chars: int


@dataclass(frozen=True, slots=True)
class Shown:
    """Both streams as they are shown, with a mark where something is left out."""

    stdout: str
    stderr: str
    gaps: tuple[Gap, ...] = ()


def bound_streams(stdout: str, stderr: str, call_id: str, limit: int) -> Shown:
    """At most `limit` characters of both together, and never less than `MIN_OUTPUT_CHARS`.

    Standard error has a third of it, or what the other leaves: a traceback is short, and what matters of it stands at
    its end.
    """
    limit = max(limit, MIN_OUTPUT_CHARS)
    if len(stdout) + len(stderr) <= limit:
        return Shown(stdout, stderr)
    for_stderr = min(len(stderr), max(limit // _STDERR_SHARE, limit - len(stdout)))
    shown_out, gap_out = _bound(stdout, "stdout", call_id, limit - for_stderr)
    shown_err, gap_err = _bound(stderr, "stderr", call_id, for_stderr)
    return Shown(shown_out, shown_err, tuple(gap for gap in (gap_out, gap_err) if gap is not None))


def bound_text(text: str, limit: int, where: str = "") -> str:
    """At most about `limit` characters of a message, which nobody reads on. `where` says where all of it is."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit} characters left out{where}]\n{text[-tail:]}"


def _bound(text: str, stream: StreamName, call_id: str, limit: int) -> tuple[str, Gap | None]:
    if len(text) <= limit:
        return text, None
    kept = max(limit - _MARK_CHARS, 0)
    head = kept // 2
    tail = kept - head
    left_out = len(text) - kept
    mark = (
        f"\n[… {left_out} characters left out; read them with "
        f'read_output(call_id="{call_id}", stream="{stream}", offset={head})]\n'
    )
    return text[:head] + mark + text[len(text) - tail :], Gap(stream, head, left_out)
