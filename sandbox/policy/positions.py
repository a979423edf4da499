"""YAML text to plain values, with the place of each. Pure.

Owns: what of YAML a policy may use. Must not: know the schema.

Only the plain part of YAML 1.2 is taken: mappings with text keys, lists, and scalars of the core schema (`yes` is text,
`010` is text). Anchors, aliases, tags and more than one document are refused: a file that is audited should say what it
says where it says it, and aliases can unfold to any size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from sandbox.policy.problems import KeyPath, Mark, Problem, key_text, shown

MAX_BYTES = 256 * 1024
_MAX_DEPTH = 16
_MAX_NODES = 50_000

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z", re.ASCII)
_MAX_DIGITS = 18  # what fits 64 bits; int() of a longer text is also slow


@dataclass(slots=True)
class Document:
    """A file's values (mappings without the keys that had none), where each stands, and what YAML itself got wrong."""

    data: object = None
    places: dict[KeyPath, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    absent: set[KeyPath] = field(default_factory=set)  # keys and list entries without a value; each has its problem
    broken: bool = False  # the text could not be read to its end

    def written(self, path: KeyPath) -> KeyPath:
        """The key path as the text has it: a value may stand alone for a list of one."""
        while path and isinstance(path[-1], int) and path not in self.places:
            path = path[:-1]
        return path

    def mark(self, path: KeyPath) -> Mark | None:
        """The place of a key, or of the nearest thing around it that stands in the text."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path)


def read_document(text: str, file: str) -> Document:
    """Read one YAML document. Never raises; what is wrong is in `problems`."""
    reader = _Reader(file)
    try:
        reader.read(YAML(typ="safe", pure=True).parse(text))
    except _Refused as refused:
        reader.refuse(refused)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.context_mark is not None and "stream end" in (error.problem or ""):
            mark = error.context_mark  # where the thing began that does not end
        reader.refuse(
            _Refused(
                Mark(mark.line + 1, mark.column + 1) if mark is not None else None,
                f"not YAML: {_words(error.problem or error.context)}",
                'quote a value that has a colon, a star or another mark of YAML, such as `"::1/128"`',
            )
        )
    except (YAMLError, ValueError, RecursionError) as error:
        reader.refuse(_Refused(None, f"not YAML: {_words(str(error))}", None))
    return reader.document


def _words(text: str | None) -> str:
    return shown(" ".join((text or "it cannot be read").split()), 120)


class _Refused(Exception):
    def __init__(self, mark: Mark | None, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.mark, self.message, self.hint = mark, message, hint


class _Absent:
    """A value that was not given. A mapping leaves its key out; in a list it keeps the places of what follows."""


_ABSENT = _Absent()


class _Reader:
    def __init__(self, file: str) -> None:
        self.document = Document()
        self._file = file
        self._nodes = 0

    def refuse(self, refused: _Refused) -> None:
        self.document.broken = True
        self.document.problems.append(Problem(self._file, refused.mark, "", refused.message, refused.hint))

    def read(self, events: Iterator[Event]) -> None:
        documents = 0
        for event in events:
            if isinstance(event, StreamEndEvent):
                break
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Refused(
                        _mark(event), "there is a second document", "write one policy per file, without `---`"
                    )
            elif isinstance(event, NodeEvent):
                value = self._value(event, events, ())
                self.document.data = None if value is _ABSENT else value

    def _value(self, event: Event, events: Iterator[Event], path: KeyPath) -> object:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise _Refused(_mark(event), f"there are more than {_MAX_NODES} values", None)
        if len(path) > _MAX_DEPTH:
            raise _Refused(_mark(event), f"values are nested more than {_MAX_DEPTH} deep", None)
        self.document.places.setdefault(path, _mark(event))
        if isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor is not None):
            raise _Refused(
                _mark(event), "anchors and aliases (`&`, `*`) are not used here", "write the value out, or quote a star"
            )
        if isinstance(event, (ScalarEvent, MappingStartEvent, SequenceStartEvent)) and _tagged(event):
            raise _Refused(_mark(event), "tags (`!`) are not used here", "write the value alone, or quote it")
        if isinstance(event, MappingStartEvent):
            return self._mapping(events, path)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(events, path)
        assert isinstance(event, ScalarEvent)
        value = _scalar(event)
        if value is _ABSENT:
            self._absent(path, _mark(event))
        elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise _Refused(_mark(event), "there is an escape that is half a character", None)
        return value

    def _mapping(self, events: Iterator[Event], path: KeyPath) -> dict[str, object]:
        result: dict[str, object] = {}
        seen: set[str] = set()
        for event in events:
            if isinstance(event, MappingEndEvent):
                return result
            if not isinstance(event, ScalarEvent) or event.anchor is not None or _tagged(event):
                raise _Refused(_mark(event), "a key is plain text", None)
            # A key is its text, so that `12:` and `null:` come out as unknown keys with their place.
            name, key_mark = str(event.value), _mark(event)
            below = (*path, name)
            duplicate = name in seen
            seen.add(name)
            if duplicate:
                self._say(below, key_mark, "the key is there twice", "keep one of them")
                below = (*path, f"{name} (again)")
            self.document.places[below] = key_mark
            value = self._value(next(events), events, below)
            if value is not _ABSENT and not duplicate:
                result[name] = value
        raise AssertionError("a mapping that does not end")

    def _sequence(self, events: Iterator[Event], path: KeyPath) -> list[object]:
        result: list[object] = []
        for event in events:
            if isinstance(event, SequenceEndEvent):
                return result
            result.append(self._value(event, events, (*path, len(result))))
        raise AssertionError("a list that does not end")

    def _absent(self, path: KeyPath, mark: Mark) -> None:
        if not path:
            return
        if path == ("network", "allow"):
            message = "it has no value, which says neither nothing nor anything"
            hint = "write `allow: []` to let calls name no host, or leave the key out to let them name any public host"
        else:
            message, hint = "it has no value", "give one, or leave the line out"
        self.document.absent.add(path)
        self._say(path, self.document.places.get(path, mark), message, hint)

    def _say(self, path: KeyPath, mark: Mark, message: str, hint: str | None) -> None:
        self.document.problems.append(Problem(self._file, mark, key_text(path), message, hint))


def _mark(event: Event) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)


def _tagged(event: ScalarEvent | MappingStartEvent | SequenceStartEvent) -> bool:
    return event.tag is not None


def _scalar(event: ScalarEvent) -> object:
    text = str(event.value)
    if event.style is not None:  # quoted, or a block
        return text
    if text in _NULL:
        return _ABSENT
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.match(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _FLOAT.match(text) and len(text) <= _MAX_DIGITS + 8 and math.isfinite(number := float(text)):
        return number
    return text
