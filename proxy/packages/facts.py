"""What the proxy has read of files, in the form in which it tells the executor. Pure.

A preparation judges the files that its resolver chose by what the registry itself says of them. For the resolver the
proxy has just read that, so nobody asks the registry again.
Owns: the form. Must not: read a page; `pages` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from proxy.packages.model import FileFacts, FileKind, PackageFacts, PackageName, parse_version
from proxy.packages.pages import ProjectPage


def to_message(page: ProjectPage, filenames: Collection[str]) -> dict[str, Any]:
    """What the page says of the project, and of those of these files that it lists."""
    return {
        "first_published": _text(page.package.first_published),
        "quarantined": page.package.quarantined,
        "files": [_file(one.facts) for one in page.files.values() if one.facts.filename in filenames],
    }


def read_message(name: PackageName, message: Mapping[str, Any]) -> tuple[PackageFacts, tuple[FileFacts, ...]]:
    """The other way round."""
    package = PackageFacts(name, _time(message["first_published"]), message["quarantined"])
    return package, tuple(_read_file(name, entry) for entry in message["files"])


def _file(facts: FileFacts) -> dict[str, Any]:
    return {
        "version": facts.version.text,
        "filename": facts.filename,
        "kind": facts.kind.value,
        "uploaded_at": _text(facts.uploaded_at),
        "yanked": facts.yanked,
        "yanked_reason": facts.yanked_reason,
        "deprecated": facts.deprecated,
        "has_install_script": facts.has_install_script,
        "hashes": dict(facts.hashes),
        "size_bytes": facts.size_bytes,
        "quarantined": facts.quarantined,
        "released_at": _text(facts.released_at),
    }


def _read_file(name: PackageName, entry: Mapping[str, Any]) -> FileFacts:
    version = parse_version(name.ecosystem, entry["version"])
    times = {key: _time(entry[key]) for key in ("uploaded_at", "released_at")}
    read = {"version": version, "kind": FileKind(entry["kind"]), **times}
    return FileFacts(name=name, **{**entry, **read})


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


__all__ = ["read_message", "to_message"]
