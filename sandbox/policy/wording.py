"""Faults that pydantic found, in the words and with the places of a policy file. Pure.

Owns: the translation, and what to write instead of a key that does not exist. Must not: know what a policy means.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from sandbox.policy.positions import Document
from sandbox.policy.problems import KeyPath, Problem, key_text, shown
from sandbox.policy.scalars import kind_of

# Keys that people look for where they are not, and what to write.
_MISPLACED = {
    (
        "network.allow[]",
        "cidr",
    ): "calls name host names, never addresses: give the address a name in `hosts`, and allow it",
    ("network.deny[]", "protocol"): "leave it out: a denied host is denied in every protocol",
    ("network.allow[]", "domain"): "write `host`",
    ("network.deny[]", "domain"): "write `host`",
    ("network.allow[]", "port"): "write `ports: [443]`",
    ("network.deny[]", "port"): "write `ports: [443]`",
    ("network.allow[]", "path"): 'write `paths: ["/public/**"]`',
    ("network.allow[]", "method"): "write `methods: [GET, HEAD]`",
    ("", "modes"): "it belongs in `network`",
    ("", "allow"): "it belongs in `network`",
    ("", "deny"): "it belongs in `network`",
    ("network", "passthrough"): "it belongs in `network.inspect`",
    ("network", "ca_file"): "it belongs in `network.upstream`",
    ("tenants[]", "modes"): "it belongs in `network`",
    ("tenants[]", "allow"): "it belongs in `network`",
    ("tenants[]", "deny"): "it belongs in `network`",
    ("tokens[]", "token"): "write `sha256`, the hash alone: `sluicegate token` prints it",
}
# How an entry of a list is written that was given as plain text; others are rules.
_ENTRIES = {"tenants[]": "- name: {0}", "tokens[]": "- {{name: {0}, sha256: …}}"}


def translate(faults: Sequence[ErrorDetails], model: type[BaseModel], document: Document, file: str) -> list[Problem]:
    """The problems of a document that is no `model`, without those that follow from a value that was not given."""
    unknown = {path_of(fault) for fault in faults if fault["type"] == "extra_forbidden"}
    problems = []
    for fault in faults:
        path = document.written(path_of(fault))
        if fault["type"] == "missing" and any((*path[:-1], stray) in unknown for stray in ("cidr", "domain")):
            continue  # the stray key's own hint says what to write instead
        if any(path[: len(absent)] == absent or absent[: len(path)] == path for absent in document.absent):
            continue
        problems.append(_problem(document, file, path, fault, model))
    return problems


def path_of(fault: ErrorDetails) -> KeyPath:
    """The key path of a fault, without the marks that pydantic adds for a key of a mapping."""
    path: list[str | int] = []
    for part in fault["loc"]:
        if part == "[key]":
            break
        path.append(part)
    return tuple(path)


def _problem(document: Document, file: str, path: KeyPath, fault: ErrorDetails, model: type[BaseModel]) -> Problem:
    context = fault.get("ctx") or {}
    message, hint = str(context.get("message", fault["msg"])), context.get("hint")
    match fault["type"]:
        case "missing":
            message = "it is missing"
            hint = "write `version: 1`" if path == ("version",) else f"write `{path[-1]}: …`"
        case "extra_forbidden":
            parent, key = _shape(path[:-1]), str(path[-1])
            message, hint = "there is no such key", _MISPLACED.get((parent, key)) or _suggest(path, model)
        case "model_type" | "dict_type" | "model_attributes_type":
            value = fault.get("input")
            message = f"a mapping is expected, not {kind_of(value)}"
            if isinstance(value, str) and isinstance(path[-1], int):
                hint = f"write `{_ENTRIES.get(_shape(path), '- host: {0}').format(shown(value))}`"
    return Problem(file, document.mark(path), key_text(path), message, None if hint is None else str(hint))


def _shape(path: KeyPath) -> str:
    """The section that a path leads to; what a tenant's own sections are called is what the operator's are."""
    if path[:1] == ("tenants",) and len(path) > 2:
        path = path[2:]
    return key_text(path[:-1]) + "[]" if path and isinstance(path[-1], int) else key_text(path)


def _suggest(path: KeyPath, model: type[BaseModel]) -> str:
    """What to write instead of a key that does not exist: the nearest one there is, or all of them."""
    keys = _keys_at(path[:-1], model)
    near = difflib.get_close_matches(str(path[-1]), keys, n=1)
    return f"write `{near[0]}`" if near else "the keys here are " + ", ".join(f"`{key}`" for key in keys)


def _keys_at(path: KeyPath, model: type[BaseModel]) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        found = _model_in(model.model_fields[part].annotation)
        if found is None:
            return []
        model = found
    return list(model.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _model_in(argument)) is not None:
            return found
    return None
