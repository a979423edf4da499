"""Advisories in the OSV format: what is known of vulnerable versions and malicious packages, offline. Pure.

Owns: reading one OSV document, the index by package, and which advisories hold for a version. Must not: read files, or
say what a policy makes of an advisory.

Where a document is unclear, it is taken to cover more: a version that can't be read ends no range, a range that can't
be read is of all versions, and so is an entry that says something of versions of which nothing can be read. A report of
malware without versions covers all of them. A withdrawn advisory covers nothing, from the time it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

from proxy.packages.model import (
    Ecosystem,
    InvalidName,
    InvalidVersion,
    PackageName,
    PackageVersion,
    parse_name,
    parse_version,
)

_ECOSYSTEMS = {"pypi": Ecosystem.PYPI, "npm": Ecosystem.NPM}  # in lower case
_EMBEDDED_MALICIOUS_CODE = "CWE-506"

# The lower ends of CVSS's own bands, for documents that have the word and no vector.
_BANDS = {"LOW": 0.1, "MODERATE": 4.0, "MEDIUM": 4.0, "HIGH": 7.0, "CRITICAL": 9.0}

# Of events at one version, in the order in which they hold.
_ORDER = {"last_affected": 0, "fixed": 1, "introduced": 2}


class InvalidAdvisory(ValueError):
    """The document is not OSV. The message says why."""


@dataclass(frozen=True, slots=True)
class Advisory:
    """One advisory, as far as it speaks of one package. `score` is CVSS's base score; None: it has none.

    `events` are those of its ranges, sorted; a version None is before all others. `everything`: all versions.
    """

    id: str
    malicious: bool
    score: float | None
    everything: bool
    events: tuple[tuple[tuple[str, PackageVersion | None], ...], ...] = ()
    versions: frozenset[PackageVersion] = frozenset()
    aliases: tuple[str, ...] = ()

    def covers(self, version: PackageVersion) -> bool:
        """Whether it speaks of this version, or of the version of which this is somebody's own build."""
        return self._covers(version, version.public)

    def _covers(self, version: PackageVersion, public: PackageVersion) -> bool:
        return (
            self.everything
            or public in self.versions
            or version in self.versions
            or any(_in_range(events, public) for events in self.events)
        )

    def mended_in(self, version: PackageVersion) -> bool:
        """Whether this very version is the one that ends a range."""
        public = version.public
        return any(kind == "fixed" and at == public for events in self.events for kind, at in events)


def _in_range(events: tuple[tuple[str, PackageVersion | None], ...], version: PackageVersion) -> bool:
    affected = False
    for kind, at in events:
        if kind == "introduced":
            affected = affected or at is None or version >= at
        elif affected and (at is None or (version >= at if kind == "fixed" else version > at)):
            affected = False
    return affected


@dataclass(frozen=True, slots=True)
class Report:
    """What a document says of one package, its versions not read yet: of a whole database few are ever asked for."""

    id: str
    aliases: tuple[str, ...]
    malicious: bool
    severities: tuple[Any, ...]
    bands: tuple[str, ...]
    ranges: tuple[Any, ...]
    versions: tuple[Any, ...]

    def advisory(self, ecosystem: Ecosystem) -> Advisory:
        score = _score(self.severities, self.bands)
        # Ranges of a repository's commits say nothing of versions.
        ranges = [one for one in map(_mapping, self.ranges) if str(one.get("type")).upper() != "GIT"]
        events = tuple(_events(ecosystem, one) for one in ranges)
        versions = frozenset(
            version
            for text in self.versions
            if isinstance(text, str) and (version := _version(ecosystem, text)) is not None
        )
        # Without any statement that can be read all versions are meant, unless one of commits is all there is.
        silent = not versions and not events and (self.malicious or bool(self.versions) or not self.ranges)
        if silent or any(one in ((), (("introduced", None),)) for one in events):
            return Advisory(self.id, self.malicious, score, everything=True, aliases=self.aliases)
        return Advisory(self.id, self.malicious, score, False, events, versions, self.aliases)


@dataclass(frozen=True, slots=True)
class Document:
    """One OSV document: the packages that it speaks of, each with what it says. `modified`: when it was changed.

    `withdrawn`: since when it says nothing.
    """

    modified: datetime | None
    reports: tuple[tuple[PackageName, Report], ...]
    withdrawn: datetime | None = None


class Advisories:
    """All advisories of a database. `newest`: when the latest of its documents was changed, which is its age."""

    def __init__(self, by_package: Mapping[tuple[Ecosystem, str], tuple[Report, ...]], newest: datetime | None) -> None:
        self._by_package = by_package
        self.newest = newest
        self._read: dict[PackageName, tuple[Advisory, ...]] = {}
        self._covering: dict[tuple[PackageName, PackageVersion], tuple[Advisory, ...]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._by_package.values())

    def of(self, name: PackageName) -> tuple[Advisory, ...]:
        """All that speak of a package, whatever the version."""
        reports = self._by_package.get((name.ecosystem, name.normal))
        if reports is None:
            return ()
        found = self._read.get(name)
        if found is None:
            found = _with_scores_of_aliases([report.advisory(name.ecosystem) for report in reports])
            self._read[name] = found
        return found

    def covering(self, name: PackageName, version: PackageVersion) -> tuple[Advisory, ...]:
        """Those that speak of one version. A version has many files: the answer is kept."""
        known = self.of(name)
        if not known:
            return ()
        found = self._covering.get((name, version))
        if found is None:
            public = version.public
            found = tuple(advisory for advisory in known if advisory._covers(version, public))
            if len(self._covering) >= _MAX_KEPT:
                self._covering.clear()
            self._covering[name, version] = found
        return found


_MAX_KEPT = 100_000


def build(documents: Iterable[Document], now: datetime) -> Advisories:
    """The index of documents. A time of change after `now` does not count: it would never grow old."""
    found: dict[tuple[Ecosystem, str], tuple[Report, ...]] = {}
    newest: datetime | None = None
    for document in documents:
        modified = document.modified
        if modified is not None and modified <= now and (newest is None or modified > newest):
            newest = modified
        if document.withdrawn is not None and document.withdrawn <= now:
            continue
        for name, report in document.reports:
            key = (name.ecosystem, name.normal)
            found[key] = (*found.get(key, ()), report)
    return Advisories(found, newest)


def _with_scores_of_aliases(advisories: list[Advisory]) -> tuple[Advisory, ...]:
    """One flaw has several documents, and often only one of them has a score."""
    if len(advisories) < 2:
        return tuple(advisories)
    scores: dict[str, float] = {}
    for advisory in advisories:
        for known in (advisory.id, *advisory.aliases):
            if advisory.score is not None:
                scores[known] = max(scores.get(known, 0.0), advisory.score)
    return tuple(
        replace(advisory, score=max((scores[a] for a in (advisory.id, *advisory.aliases) if a in scores), default=None))
        for advisory in advisories
    )


def read_document(document: object) -> Document:
    """Read one OSV document from JSON values. Raises `InvalidAdvisory`."""
    if not isinstance(document, Mapping):
        raise InvalidAdvisory("it is no JSON object")
    modified = _time(document.get("modified"))
    identity, affected = document.get("id"), document.get("affected", [])
    if not isinstance(identity, str) or not identity or not isinstance(affected, list):
        raise InvalidAdvisory("it has no `id`, or its `affected` is no list")
    aliases = tuple(a for a in _list(document.get("aliases")) if isinstance(a, str))
    specific = _mapping(document.get("database_specific"))
    malicious = (
        any(known.startswith("MAL-") for known in (identity, *aliases))
        or _EMBEDDED_MALICIOUS_CODE in _list(specific.get("cwe_ids"))
        or "malicious-packages-origins" in specific
    )
    severities, found = _list(document.get("severity")), []
    for item in affected:
        entry = _mapping(item)
        package = _mapping(entry.get("package"))
        ecosystem = _ECOSYSTEMS.get(str(package.get("ecosystem", "")).partition(":")[0].strip().lower())
        if ecosystem is None:
            continue
        try:
            name = parse_name(ecosystem, str(package.get("name", "")))
        except InvalidName:
            continue  # no registry request and no specifier can name it either
        holders = (specific, _mapping(entry.get("database_specific")), _mapping(entry.get("ecosystem_specific")))
        report = Report(
            identity,
            aliases,
            malicious,
            severities=(*severities, *_list(entry.get("severity"))),
            bands=tuple(str(holder["severity"]).upper() for holder in holders if "severity" in holder),
            ranges=_statements(entry.get("ranges")),
            versions=_statements(entry.get("versions")),
        )
        found.append((name, report))
    return Document(modified, tuple(found), _time(document.get("withdrawn")))


def _events(ecosystem: Ecosystem, one: Mapping[str, Any]) -> tuple[tuple[str, PackageVersion | None], ...]:
    found: list[tuple[str, PackageVersion | None]] = []
    for event in _list(one.get("events")):
        for kind, text in _mapping(event).items():
            if kind not in _ORDER:
                continue
            version = None if text == "0" else _version(ecosystem, str(text))
            if kind == "introduced" or version is not None:
                found.append((kind, version))
    lowest = [event for event in found if event[1] is None]
    rest = [(kind, version) for kind, version in found if version is not None]
    rest.sort(key=lambda event: _ORDER[event[0]])
    rest.sort(key=lambda event: event[1])
    return (*lowest[:1], *rest)


def _score(severities: tuple[Any, ...], bands: tuple[str, ...]) -> float | None:
    scores = [
        score
        for one in map(_mapping, severities)
        if (score := _base_score(str(one.get("type", "")), str(one.get("score", "")))) is not None
    ]
    return max(scores) if scores else next((_BANDS[band] for band in bands if band in _BANDS), None)


@cache
def _base_score(kind: str, vector: str) -> float | None:
    """The base score of a CVSS vector; None for what is none."""
    from cvss import CVSS2, CVSS3, CVSS4, CVSSError

    try:
        match kind:
            case "CVSS_V2":
                score = CVSS2(vector).scores()[0]
            case "CVSS_V3":
                score = CVSS3(vector).scores()[0]
            case "CVSS_V4":
                score = CVSS4(vector).base_score
            case _:
                return None
    except CVSSError:
        return None
    return None if score is None else float(score)


def _version(ecosystem: Ecosystem, text: str) -> PackageVersion | None:
    """npm's is `v1.0.0` in some documents, as in tags of repositories."""
    try:
        return parse_version(ecosystem, text.strip().removeprefix("v") if ecosystem is Ecosystem.NPM else text)
    except InvalidVersion:
        return None


def _time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _statements(value: object) -> tuple[Any, ...]:
    """The entries of a list. Anything else that is there is one entry, which nobody can read."""
    if isinstance(value, list):
        return tuple(value)
    return () if value is None else (None,)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
