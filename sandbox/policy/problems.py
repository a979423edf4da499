"""What is wrong with a policy file, said so that it can be mended. Pure.

Owns: the form of a problem and of `InvalidPolicy`. Must not: know what a policy means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

type KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text; both numbers count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: where (`file:line:column` and the key), what, and the form to write."""

    file: str
    mark: Mark | None
    key: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.mark.line}:{self.mark.column}" if self.mark is not None else self.file
        text = f"{place}: `{self.key}`: {self.message}" if self.key else f"{place}: {self.message}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that lint found. `error` says that the policy is refused for it.

    `rests_on` are keys elsewhere that it was held against: where one of them is wrong itself, it says nothing.
    """

    path: KeyPath
    message: str
    hint: str | None
    error: bool
    rests_on: tuple[KeyPath, ...] = ()


_MAX_SHOWN = 100
_TOKEN = re.compile(r"sgt_[A-Za-z0-9_-]{8,}")


class InvalidPolicy(Exception):
    """A policy file that is not one. `problems` has every fault that was found, in the order of the text.

    The message shows the first hundred.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        lines = [str(problem) for problem in problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            lines.append(f"… and {len(problems) - _MAX_SHOWN} more")
        super().__init__("\n".join(lines))
        self.problems = list(problems)


def key_text(path: KeyPath) -> str:
    """A key path as people write it: `network.allow[0].host`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{shown(part)}" if text else shown(part)
    return text


def shown(value: object, limit: int = 80) -> str:
    """A value of the file as a message may quote it: one line, printable, bounded, and no token of ours."""
    text = (
        value if isinstance(value, str) else json.dumps(value) if isinstance(value, (bool, type(None))) else str(value)
    )
    text = _TOKEN.sub("sgt_…", text)
    cut = text[:limit]
    if not cut.isprintable() or "`" in cut:
        cut = cut.encode("unicode_escape", "backslashreplace").decode("ascii").replace("`", "\\x60")[:limit]
    return cut if len(text) <= limit else cut + "…"
