"""Ranges of versions as a policy writes them: `==1.2.3`, `<2`, `>=1.0,<1.5.2`. Pure.

Owns: one small form for both ecosystems; comparisons are each ecosystem's own. Must not: know npm's or pip's ranges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from proxy.packages.model import Ecosystem, InvalidVersion, PackageVersion, parse_version

_COMPARISON = re.compile(r"(==|!=|<=|>=|<|>)([A-Za-z0-9][A-Za-z0-9.!+-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Range:
    """Comparisons that all hold. `text` is canonical; without any it covers every version."""

    ecosystem: Ecosystem
    comparisons: tuple[tuple[str, PackageVersion], ...]

    def __str__(self) -> str:
        body = ",".join(f"{operator}{version}" for operator, version in self.comparisons)
        return f"{self.ecosystem}:{body or '*'}"

    def covers(self, version: PackageVersion) -> bool:
        """Whether a version is in it. A local build of a version is judged as that version."""
        if version.ecosystem is not self.ecosystem:
            return False
        public = version.public
        return all(
            _holds(operator, version if bound.local is not None else public, bound)
            for operator, bound in self.comparisons
        )


def parse_range(ecosystem: Ecosystem, text: str) -> Range:
    """A range from `>=1.0,<2` or `*`. Raises `InvalidVersion`."""
    if text == "*":
        return Range(ecosystem, ())
    comparisons = []
    for part in text.split(","):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            raise InvalidVersion(f"`{part[:40]}` is no comparison, such as `<2.0.0` or `==1.4.2`")
        comparisons.append((match[1], _bound(ecosystem, match[2])))
    return Range(ecosystem, tuple(comparisons))


def _bound(ecosystem: Ecosystem, text: str) -> PackageVersion:
    """A version; for npm `2` and `1.4` stand for `2.0.0` and `1.4.0`."""
    if ecosystem is Ecosystem.NPM and re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        text += ".0" * (2 - text.count("."))
    return parse_version(ecosystem, text)


def _holds(operator: str, version: PackageVersion, bound: PackageVersion) -> bool:
    match operator:
        case "==":
            return version == bound
        case "!=":
            return version != bound
        case "<":
            return version < bound
        case "<=":
            return version <= bound
        case ">":
            return version > bound
    return version >= bound


@cache
def _read(text: str) -> Range:
    ecosystem, _, body = text.partition(":")
    return parse_range(Ecosystem(ecosystem), body)


def _to_range(value: object) -> object:
    return _read(value) if isinstance(value, str) else value


VersionRange = Annotated[Range, BeforeValidator(_to_range), PlainSerializer(str, return_type=str)]
"""In a pydantic model; in JSON its text, `pypi:>=1.0,<2`."""
