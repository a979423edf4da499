"""The policy file: YAML text to a frozen `Policy`, strictly, and back.

Owns: reading the file; gathering every fault with its place; the digest. Must not: narrow a policy to a call, or judge.

A policy that has a fault is refused as a whole: there is no part of it that is safe to keep without the rest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import eq
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from proxy.destinations import InvalidHost, parse_host
from sandbox.policy.lint import lint
from sandbox.policy.positions import MAX_BYTES, Document, read_document
from sandbox.policy.problems import Finding, InvalidPolicy, KeyPath, Problem, key_text, shown
from sandbox.policy.scalars import kind_of
from sandbox.policy.schema import Policy
from sandbox.policy.tenants import Tenant
from sandbox.policy.wording import path_of, translate
from sandbox.policy_data import package_files
from sandbox.state import shipped_policies

__all__ = [
    "InvalidPolicy",
    "LoadedPolicy",
    "Narrowing",
    "Policy",
    "Problem",
    "default_policy_path",
    "digest_of",
    "load_policy",
    "parse_policy",
    "policy_schema",
    "read_policy_text",
    "to_yaml",
]

_LISTS_OF_ENTRIES = frozenset({("network", "allow"), ("network", "deny"), ("network", "private_addresses")})
_LISTS_OF_TENANTS = frozenset({("network", "allow"), ("network", "deny")})


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What made a tenant's policy: the operator's, and the tenant's own section of it."""

    operator: Policy
    section: Tenant


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with where it came from. `digest` is that of its meaning: comments and spelling do not change it.

    With `narrowing` it is the policy of one tenant, as `sandbox.tenants` makes it: `policy` has what holds for the
    tenant, and `digest` stays that of the whole file.
    """

    policy: Policy
    warnings: tuple[Problem, ...]
    digest: str
    path: Path | None
    narrowing: Narrowing | None = None

    @property
    def tenant(self) -> str:
        """Whose policy this is; empty for the operator's own."""
        return "" if self.narrowing is None else self.narrowing.section.name


def default_policy_path() -> Path:
    """The policy in force where none is named."""
    return shipped_policies() / "default.yaml"


def load_policy(path: Path) -> LoadedPolicy:
    """Read a policy file. Raises `InvalidPolicy`, also when the file cannot be read."""
    return parse_policy(read_policy_text(path), file=str(path), path=path)


def parse_policy(text: str, *, file: str = "policy", path: Path | None = None) -> LoadedPolicy:
    """A policy from YAML text; `file` is how messages call it. Raises `InvalidPolicy` with every fault."""
    document = read_document(text, file)
    if document.broken:
        raise InvalidPolicy(document.problems)
    if document.data is None:
        raise InvalidPolicy([Problem(file, None, "", "it is empty", "write at least `version: 1`")])
    if not isinstance(document.data, dict):
        message = f"a policy is a mapping, not {kind_of(document.data)}"
        raise InvalidPolicy([Problem(file, document.mark(()), "", message, "begin with `version: 1`")])
    problems = list(document.problems)
    policy, gaps = _validate(document, document.data, file, problems)
    found = lint(policy, datetime.now(UTC)) if policy is not None else []
    findings = [finding for finding in found if not problems or (finding.error and gaps.tell(finding))]
    problems += [_problem(document, file, finding, gaps) for finding in findings if finding.error]
    if policy is not None and not problems:
        problems += _files(policy, document, file)
    if problems or policy is None:
        raise InvalidPolicy(_sorted(problems))
    warnings = [_problem(document, file, finding, gaps) for finding in findings]
    return LoadedPolicy(policy, tuple(_sorted(warnings)), digest_of(policy), path)


def digest_of(policy: Policy) -> str:
    """SHA-256 over the policy's canonical JSON: every key in order, defaults written out."""
    canonical = json.dumps(_plain(policy), sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def to_yaml(policy: Policy) -> str:
    """The policy as YAML, defaults written out. Reading it back gives an equal policy."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 2**20  # long texts would be folded over lines
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # ruamel declares it as None
    out = io.StringIO()
    yaml.dump(_plain(policy), out)
    return out.getvalue()


def policy_schema() -> dict[str, Any]:
    """The JSON Schema of the file: its shape and bounds. What depends on several keys is checked on loading alone."""
    schema = _without_null(Policy.model_json_schema(mode="validation"))
    assert isinstance(schema, dict)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _plain(policy: Policy) -> dict[str, Any]:
    return policy.model_dump(mode="json", exclude_none=True)


def _without_null(schema: object) -> object:
    """A key without a value is an error, so the schema must not offer `null` for the keys that may be left out."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: value for key, value in schema.items() if not (key == "default" and value is None)}
    choices = rest.get("anyOf")
    if isinstance(choices, list):
        kept = [choice for choice in choices if choice != {"type": "null"}]
        if len(kept) == 1:
            rest.pop("anyOf")
            rest |= kept[0]
        else:
            rest["anyOf"] = kept
    return {key: _without_null(value) for key, value in rest.items()}


# Reading


def read_policy_text(path: Path) -> str:
    """The text of a policy file, or of one of cases. Raises `InvalidPolicy`."""

    def refuse(message: str, hint: str | None = None) -> InvalidPolicy:
        return InvalidPolicy([Problem(str(path), None, "", message, hint)])

    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise refuse(f"it cannot be read: {reason.lower()}", "name a policy file that exists") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise refuse("it is not a file")
        with open(fd, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise refuse(f"it cannot be read: {(error.strerror or str(error)).lower()}") from error
    finally:
        os.close(fd)
    if len(content) > MAX_BYTES:
        raise refuse(f"it is larger than {MAX_BYTES // 1024} KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(f"it is not UTF-8 text: byte {error.start}", "save it as UTF-8") from error


def _files(policy: Policy, document: Document, file: str) -> Iterable[Problem]:
    """Files that the policy names and that must be there, or every request would fail later."""
    path: KeyPath
    for problem in package_files(policy.packages):
        path = ("packages", *problem.key)
        yield Problem(file, document.mark(path), key_text(path), problem.message, problem.hint)
    ca_file = policy.network.upstream.ca_file
    if ca_file is None:
        return
    import ssl

    path = ("network", "upstream", "ca_file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        missing = isinstance(error, FileNotFoundError)
        message = f"`{shown(str(ca_file))}` " + (
            "does not exist" if missing else "has no certificates that can be read"
        )
        hint = "write the file of the certificate authorities to trust, in PEM form"
        yield Problem(file, document.mark(path), key_text(path), message, hint)


# Validation


@dataclass(frozen=True, slots=True)
class _Gaps:
    """What of a document was left out for being wrong: `cuts`, and for lists that lost entries the places that stayed.

    All paths are those of the text.
    """

    cuts: frozenset[KeyPath] = frozenset()
    kept: Mapping[KeyPath, Sequence[int]] = field(default_factory=dict)

    def in_text(self, path: KeyPath) -> KeyPath:
        """The place in the text of what stands at a place in the rest."""
        found: KeyPath = ()
        for part in path:
            places = self.kept.get(found)
            found = (*found, places[part] if places is not None and isinstance(part, int) else part)
        return found

    def tell(self, finding: Finding) -> bool:
        """Whether nothing that the finding rests on was left out."""
        bases = [self.in_text(base) for base in finding.rests_on]
        return not any(all(map(eq, cut, base)) for cut in self.cuts for base in bases)


def _validate(
    document: Document, data: dict[str, object], file: str, problems: list[Problem]
) -> tuple[Policy | None, _Gaps]:
    """The policy, as far as it is one: what is wrong is reported and left out, so that the rest is checked as well."""
    try:
        return Policy.model_validate(data), _Gaps(frozenset(document.absent))
    except ValidationError as error:
        faults = error.errors(include_url=False)
    problems += translate(faults, Policy, document, file)
    rest, gaps = _without(data, frozenset(_cut(path_of(fault)) for fault in faults))
    gaps = replace(gaps, cuts=gaps.cuts | document.absent)
    try:
        return Policy.model_validate({**rest, "version": 1}), gaps
    except ValidationError:
        return None, gaps


def _cut(path: KeyPath) -> KeyPath:
    """What is left out for a fault: an entry of a list of rules, else a key of the second level.

    Of a tenant alike, in its own section; all of it, when it is its name that is wrong.
    """
    if path[:1] != ("tenants",):
        return path[: 3 if path[:2] in _LISTS_OF_ENTRIES else 2]
    inner = path[2:]
    if inner[:1] == ("name",):
        return path[:2]
    return path[: 5 if inner[:2] in _LISTS_OF_TENANTS else 3 if inner[:1] == ("rate",) else 4]


def _without(data: dict[str, object], cuts: frozenset[KeyPath]) -> tuple[dict[str, object], _Gaps]:
    """A copy without some parts."""
    kept: dict[KeyPath, list[int]] = {}

    def rest(value: object, path: KeyPath) -> object:
        if isinstance(value, dict):
            return {key: rest(item, (*path, key)) for key, item in value.items() if (*path, key) not in cuts}
        if isinstance(value, list):
            places = [place for place in range(len(value)) if (*path, place) not in cuts]
            if len(places) < len(value):
                kept[path] = places
            return [rest(value[place], (*path, place)) for place in places]
        return value

    return {key: rest(value, (key,)) for key, value in data.items() if (key,) not in cuts}, _Gaps(cuts, kept)


def _problem(document: Document, file: str, finding: Finding, gaps: _Gaps) -> Problem:
    path = gaps.in_text(finding.path)
    if path[:2] == ("network", "hosts") and len(path) > 2:
        path = _as_written(document, path)
    path = document.written(path)
    return Problem(file, document.mark(path), key_text(path), finding.message, finding.hint)


def _as_written(document: Document, path: KeyPath) -> KeyPath:
    """A key of `hosts` as it stands in the text: the policy has it normalised."""
    for place in document.places:
        if len(place) == 3 and place[:2] == path[:2]:
            try:
                if parse_host(str(place[2])).text == path[2]:
                    return (*place, *path[3:])
            except InvalidHost:
                continue
    return path


def _sorted(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda p: (p.mark.line, p.mark.column) if p.mark is not None else (0, 0))
