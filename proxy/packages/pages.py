"""What a registry's page says of a project's files: PEP 691 documents and npm packuments, read into facts. Pure.

Owns: reading, and what of a page can't be trusted. Must not: judge, or write a page; `filtering` does.

A file is `Listed` where its name says whose it is, that is the project the page is of, and its URL lies at the registry
under that name. Every other entry is left out and counted: nothing could be said of it, and nothing fetched from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NoReturn

from proxy.packages.model import (
    Ecosystem,
    FileFacts,
    FileKind,
    InvalidName,
    InvalidVersion,
    PackageFacts,
    PackageName,
    PackageVersion,
    parse_name,
    parse_version,
    wheel_or_sdist,
)
from proxy.packages.requests import (
    Location,
    Registry,
    locate,
    page_location,
    read_filename,
    read_path,
    read_tarball,
    tarball_location,
)

type Document = dict[str, Any]

MAX_FILES = 50_000  # of one project; the largest has some 10,000
_INSTALL_SCRIPTS = ("preinstall", "install", "postinstall")


_MAX_SIZE = 1 << 50  # of one file; what is said beyond is no size
_HALF = re.compile(r"[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class InvalidPage(ValueError):
    """The document is not a page of this project. The message says why."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file, and the entry of the document that it was read from: the key is an index, or npm's version."""

    facts: FileFacts
    location: Location
    key: int | str


@dataclass(frozen=True, slots=True)
class ProjectPage:
    """A project as its registry has it, unfiltered. `unreadable` counts the entries that are left out."""

    registry: Registry
    package: PackageFacts
    files: Mapping[Location, Listed]
    unreadable: int = 0


def read_document(body: bytes) -> Document:
    """The JSON object of a page. Raises `InvalidPage`.

    Halves of characters (`\\ud83d` alone), which JSON can spell and no encoding can, are replaced in every text.
    """
    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, parse_constant=_refuse_constant)
        if _ESCAPED_HALF.search(text):
            document = _whole(document)
    except (ValueError, RecursionError) as error:
        raise InvalidPage("it is not JSON") from error
    if not isinstance(document, dict):
        raise InvalidPage("it is not a JSON object")
    return document


def read_page(registry: Registry, name: PackageName, document: Document) -> ProjectPage:
    """The facts of a project's page. Raises `InvalidPage`."""
    if registry.ecosystem is Ecosystem.PYPI:
        return _read_index(registry, name, document)
    return _read_packument(registry, name, document)


def whole_text(text: str) -> str:
    """A publisher's text, with what is no character replaced: it may be in another document, or in a message."""
    return _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


def _whole(value: object) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {whole_text(key): _whole(one) for key, one in value.items()}
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"`{text}` is no JSON")


# Python: PEP 691, 700 (sizes, upload times), 592 (yanked), 792 (project status)


def _read_index(registry: Registry, name: PackageName, document: Document) -> ProjectPage:
    meta, entries = document.get("meta"), document.get("files")
    version = meta.get("api-version") if isinstance(meta, dict) else None
    if not isinstance(version, str) or not version.startswith("1."):
        raise InvalidPage("it is not a page by PEP 691, version 1")
    if not isinstance(entries, list) or len(entries) > MAX_FILES:
        raise InvalidPage("it has no list of files, or one that is too long")
    _check_name(name, document)
    status = document.get("project-status")
    quarantined = isinstance(status, dict) and status.get("status") == "quarantined"
    page = page_location(registry, name)
    files: dict[Location, Listed] = {}
    seen: set[str] = set()
    for place, entry in enumerate(entries):
        listed = _listed(registry, name, page, entry, place, quarantined=quarantined)
        if listed is None or listed.facts.filename in seen:  # a file's name is the last of its location
            continue
        seen.add(listed.facts.filename)
        files[listed.location] = listed
    released = _released(files.values())
    files = {
        location: replace(one, facts=replace(one.facts, released_at=released.get(one.facts.version)))
        for location, one in files.items()
    }
    times = released.values()
    package = PackageFacts(name, min(times, default=None), quarantined)
    return ProjectPage(registry, package, files, len(entries) - len(files))


def _released(files: Iterable[Listed]) -> dict[PackageVersion, datetime]:
    """When the first file of each version was uploaded."""
    found: dict[PackageVersion, datetime] = {}
    for one in files:
        at = one.facts.uploaded_at
        if at is not None and at < found.get(one.facts.version, _LATEST):
            found[one.facts.version] = at
    return found


_LATEST = datetime.max.replace(tzinfo=UTC)


def _listed(
    registry: Registry, name: PackageName, page: Location, entry: object, place: int, *, quarantined: bool
) -> Listed | None:
    if not isinstance(entry, dict):
        return None
    filename, url = entry.get("filename"), entry.get("url")
    if not isinstance(filename, str) or not isinstance(url, str):
        return None
    whose, location = read_filename(filename), locate(url, page)
    if whose is None or whose[0] != name or location is None or not _is_below(registry, location):
        return None
    if location.path.rpartition("/")[2] != filename:
        return None
    yanked, hashes, size = entry.get("yanked", False), entry.get("hashes"), entry.get("size")
    facts = FileFacts(
        name=name,
        version=whose[1],
        filename=filename,
        kind=wheel_or_sdist(filename),
        uploaded_at=read_time(entry.get("upload-time")),
        yanked=yanked is not False and yanked is not None,  # PEP 592: an empty reason is one too
        yanked_reason=whole_text(yanked) if isinstance(yanked, str) and yanked else None,
        hashes=_texts(hashes),
        size_bytes=size if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= _MAX_SIZE else None,
        quarantined=quarantined,
    )
    return Listed(facts, location, place)


def _is_below(registry: Registry, location: Location) -> bool:
    target = location.target
    for base in registry.bases:  # thousands of times for a page, so that the cheapest comparison comes first
        if (
            target.startswith(base.path)
            and location.port == base.port
            and location.scheme == base.scheme
            and location.host == base.host
        ):
            return True
    return False


# npm


def _read_packument(registry: Registry, name: PackageName, document: Document) -> ProjectPage:
    _check_name(name, document)
    versions = document.get("versions", {})
    times = document.get("time")
    times = times if isinstance(times, dict) else {}
    if not isinstance(versions, dict) or len(versions) > MAX_FILES:
        raise InvalidPage("it has no versions, or too many")
    files: dict[Location, Listed] = {}
    for listed in _tarballs(registry, name, versions, times):
        files.setdefault(listed.location, listed)
    package = PackageFacts(name, read_time(times.get("created")))
    return ProjectPage(registry, package, files, len(versions) - len(files))


def _tarballs(registry: Registry, name: PackageName, versions: Document, times: Document) -> Iterator[Listed]:
    for text, manifest in versions.items():
        if not isinstance(manifest, dict) or manifest.get("name") != name.normal or manifest.get("version") != text:
            continue
        dist = manifest.get("dist")
        version = _version(text)
        filename = _tarball_name(name, dist.get("tarball")) if isinstance(dist, dict) else None
        if version is None or filename is None or read_tarball(name, filename) != version:
            continue
        assert isinstance(dist, dict)
        deprecated = manifest.get("deprecated")
        facts = FileFacts(
            name=name,
            version=version,
            filename=filename,
            kind=FileKind.TARBALL,
            uploaded_at=read_time(times.get(text)),
            deprecated=whole_text(deprecated) if isinstance(deprecated, str) and deprecated else None,
            has_install_script=_runs_scripts(manifest),
            hashes=_texts({"integrity": dist.get("integrity"), "sha1": dist.get("shasum")}),
        )
        yield Listed(facts, tarball_location(registry, name, filename), text)


def _tarball_name(name: PackageName, url: object) -> str | None:
    """The file's name, where the URL is of npm's own form. Its host does not matter.

    Mirrors leave the original registry's URLs as they are, and clients ask the mirror for the same path.
    """
    if not isinstance(url, str) or not url.isascii():
        return None
    path = read_path("/" + url.partition("://")[2].partition("/")[2])
    if path is None:
        return None
    directory, _, filename = path.rpartition("/")
    return filename if directory.endswith(f"/{name.normal}/-") else None


def _runs_scripts(manifest: Document) -> bool:
    """Whether installing it would run something: scripts of its own, or node-gyp for a `binding.gyp`."""
    scripts = manifest.get("scripts")
    named = isinstance(scripts, dict) and any(scripts.get(script) for script in _INSTALL_SCRIPTS)
    return named or bool(manifest.get("hasInstallScript")) or bool(manifest.get("gypfile"))


# Both


def _check_name(name: PackageName, document: Document) -> None:
    text = document.get("name")
    try:
        if isinstance(text, str) and parse_name(name.ecosystem, text) == name:
            return
    except InvalidName:
        pass
    raise InvalidPage(f"it is not of `{name}`")


def _version(text: str) -> PackageVersion | None:
    try:
        return parse_version(Ecosystem.NPM, text)
    except InvalidVersion:
        return None


def read_time(value: object) -> datetime | None:
    """ISO 8601 with its zone, UTC where it has none; None for anything else."""
    if not isinstance(value, str) or len(value) > 64:
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _texts(value: object) -> dict[str, str]:
    """The entries of an object whose values are texts."""
    if not isinstance(value, dict):
        return {}
    return {whole_text(key): whole_text(text) for key, text in value.items() if isinstance(text, str)}


__all__ = ["Document", "InvalidPage", "Listed", "ProjectPage", "read_document", "read_page", "read_time", "whole_text"]
