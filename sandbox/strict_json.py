"""JSON as strangers send it: read strictly, with what is wrong said in words. Pure.

Owns: that a text means one thing to every reader. Must not: know what the text is for.
"""

from __future__ import annotations

import json
from typing import NoReturn

_MAX_DIGITS = 400
_MAX_SHOWN_CHARS = 80


class NotJson(ValueError):
    """The text is none. The message says why, and is short whatever the text is."""


def read_json(text: str, *, constants: bool = False) -> object:
    """What a JSON text says. `constants`: `NaN` and `Infinity` count as numbers, as many writers of JSON have it.

    A key that stands twice in one object is a fault, since readers disagree on which of the two counts. Raises
    `NotJson`.
    """
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            object_pairs_hook=_without_repetition,
            parse_constant=float if constants else _no_constant,
            parse_int=_integer,
        )
    except RecursionError as error:
        raise NotJson("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"it is not JSON: {error}") from error


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotJson(f"the key `{_printable(twice[:_MAX_SHOWN_CHARS])}` stands twice in one object")
    return found


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _integer(digits: str) -> int:
    """A number, or another that is out of any range where Python would not read one of so many digits."""
    return int(digits[:_MAX_DIGITS])


def _no_constant(name: str) -> NoReturn:
    raise NotJson(f"`{name}` is not JSON")
