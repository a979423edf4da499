"""A call from decoded JSON, or every fault of it, each with its path, in the contract's words. Pure.

Owns: that no fault hides another. Must not: know bounds; they are the `contract`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError

from sandbox.contract import DOMAINS_WITHOUT_NETWORK, CodeCall, InvalidCall, specifier_fault

_MAX_STEP_CHARS = 80
_MAX_PROBLEMS = 100
_MAX_ENTRIES = 1024
_NO_CHARACTER = "it has a lone surrogate, which is no character"


def check_entries(data: object) -> None:
    """Raises `InvalidCall` for a call with an object or a list that no field takes, before looking at each entry.

    The most that a call can have in one place is 256 domains.
    """
    inner = data.items() if isinstance(data, dict) else ()
    for name, value in (("call", data), *inner):
        if isinstance(value, dict | list) and len(value) > _MAX_ENTRIES:
            raise invalid_call({path_step(str(name)): f"it has more than {_MAX_ENTRIES} entries"})


def parse_call(data: object) -> CodeCall:
    """A call from decoded JSON. Raises `InvalidCall` with every problem and its path."""
    check_entries(data)
    problems = dict(_surrogates(data))
    readable = _readable(data)
    try:
        call = CodeCall.model_validate(readable)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            path = ".".join(path_step(step) for step in problem["loc"] if step != "[key]") or "call"
            if path != "call" or problem["type"] != "value_error":  # else it is about fields together: see below
                problems.setdefault(path, _said(problem["type"], problem["msg"], problem.get("ctx")))
        problems = dict(_disagreements(readable)) | problems
        raise invalid_call(problems) from error
    if problems:
        raise invalid_call(problems)
    return call


def invalid_call(problems: Mapping[str, str]) -> InvalidCall:
    """All of them, but for a call that is nothing else: what is answered must not be larger than what was asked."""
    told = [f"{path}: {text}" for path, text in problems.items()]
    if len(told) > _MAX_PROBLEMS:
        told[_MAX_PROBLEMS:] = [f"call: it has {len(told) - _MAX_PROBLEMS} faults more"]
    return InvalidCall(told)


def path_step(step: str | int) -> str:
    """One step of a problem's path. It is the caller's text where a key is unknown, so that it may hold anything."""
    text = str(step)[:_MAX_STEP_CHARS]
    return text if text.isprintable() and text.isascii() else ascii(text)[1:-1]


_SURROGATE = re.compile("[\ud800-\udfff]")


def _has_surrogate(text: object) -> bool:
    return isinstance(text, str) and _SURROGATE.search(text) is not None


def _readable(data: object) -> object:
    """What pydantic can read: it gives up on a whole object for a name that is no text."""
    if not isinstance(data, dict):
        return data
    return {name: _field(value) for name, value in data.items() if not _has_surrogate(name)}


def _field(value: object) -> object:
    """A field's value, made readable; a call has no deeper ones."""
    if isinstance(value, dict):
        return {name: _item(item) for name, item in value.items() if not _has_surrogate(name)}
    return [_item(item) for item in value] if isinstance(value, list) else _item(value)


def _item(value: object) -> object:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and _has_surrogate(value) else value


def _surrogates(data: object) -> Iterator[tuple[str, str]]:
    """Where a name or a text of a call has a lone surrogate, which JSON can write and no text can hold."""
    if not isinstance(data, dict):
        return
    for name, value in cast("dict[object, object]", data).items():
        path = path_step(str(name))
        if _has_surrogate(name):
            yield path, f"{_NO_CHARACTER}, and it is not a field of a call"
        if isinstance(value, str) and (found := _SURROGATE.search(value)) is not None:
            yield path, f"it has a lone surrogate at character {found.start()}"
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inner:
            if _has_surrogate(key) or _has_surrogate(item):
                yield f"{path}.{path_step(str(key))}", _NO_CHARACTER


def _disagreements(data: object) -> Iterator[tuple[str, str]]:
    """What pydantic looks at last, and not at all in a call with other faults."""
    if not isinstance(data, dict):
        return
    call = cast("Mapping[str, object]", data)
    if isinstance(call.get("domains"), list) and call.get("allow_network", False) is False:
        yield "call", DOMAINS_WITHOUT_NETWORK
    packages = call.get("packages")
    for place, specifier in enumerate(packages if isinstance(packages, list) else ()):
        if (fault := specifier_fault(call.get("language"), specifier)) is not None:
            yield f"packages.{place}", fault


_WANTED = {
    "string_type": "a string",
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object of strings",
    "model_type": "a JSON object",
    "model_attributes_type": "a JSON object",
    "finite_number": "a finite number",
}


def _said(kind: str, message: str, context: dict[str, Any] | None) -> str:
    """What is wrong with a value, in the contract's words. `kind` and `context` are pydantic's."""
    if kind in _WANTED:
        return f"it is not {_WANTED[kind]}"
    limits = context or {}
    match kind:
        case "missing":
            return "it is required"
        case "extra_forbidden":
            return f"it is not a field of a call; the fields are {', '.join(CodeCall.model_fields)}"
        case "greater_than_equal":
            return f"it is below {limits['ge']:g}"
        case "less_than_equal":
            return f"it is above {limits['le']:g}"
        case "string_too_short":
            return f"it has fewer than {limits['min_length']} characters"
        case "string_too_long":
            return f"it has more than {limits['max_length']} characters"
        case "too_long":
            return f"it has more than {limits['max_length']} entries"
        case "literal_error":
            return f"it is none of {limits['expected']}"
        case "string_unicode":
            return _NO_CHARACTER
    return message.removeprefix("Value error, ")
