"""Pages written again, without what a policy forbids. Pure.

Owns: what a client is told of files that it may not have. Must not: judge; the verdicts are given.

A resolver has to choose what it can get, and people have to see why the rest is missing:

- a forbidden Python file stays on the page as yanked, with the reason (PEP 592). uv and pip leave it out, say why where
  nothing else would do, and still ask for it by an exact pin, which is then refused with the same reason. For a
  preparation it is left out where another file of its release may be had: uv would take the better one, and fail;
- a forbidden npm version is moved to `policyRestrictions`, whose message npm prints; `latest` is the newest one left.
  Other clients find it missing;
- what could not be read is left out.

A page is written anew from what was read, never copied: `Cache-Control`, `ETag` and URLs are ours.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.packages.judge import PackageVerdict
from proxy.packages.model import Ecosystem, FileFacts, PackageVersion
from proxy.packages.pages import Document, Listed, ProjectPage

JSON_INDEX = "application/vnd.pypi.simple.v1+json"
HTML_INDEX = "text/html; charset=utf-8"
PACKUMENT = "application/json"

_API_VERSION = "1.1"  # PEP 700
_MAX_REASON = 300
_TOLD = 8  # versions that npm's one message speaks of
_DROPPED = frozenset({"readme", "readmeFilename", "_attachments"})  # of use on a web page only, and most of the bytes


@dataclass(frozen=True, slots=True)
class FilteredPage:
    """A page as a client gets it. `withheld` counts reasons, `kept` the files that may be had."""

    body: bytes
    content_type: str
    etag: str
    kept: int
    withheld: Mapping[str, int]
    unreadable: int

    @property
    def summary(self) -> str:
        """`3 of 120 files are withheld: 2 version_too_new, 1 no_wheel`."""
        gone = sum(self.withheld.values())
        total = self.kept + gone
        if not gone:
            text = f"none of {total} files is withheld"
        else:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.withheld.items()))
            text = f"{gone} of {total} files {'is' if gone == 1 else 'are'} withheld: {reasons}"
        return text + (f"; {self.unreadable} more can't be read" if self.unreadable else "")


def filter_page(
    page: ProjectPage, document: Document, judge: Callable[[FileFacts], PackageVerdict], *, as_html: bool = False,
    only_choice: bool = False,
) -> FilteredPage:  # fmt: skip
    """The page with every file judged. `document` is what `page` was read from; it is not changed.

    `only_choice`: a forbidden Python file is shown, as yanked, only where its release has no other.
    """
    verdicts = [(listed, judge(listed.facts)) for listed in page.files.values()]
    if page.registry.ecosystem is Ecosystem.NPM:
        written: Document = _packument(page, document, verdicts)
        body, kind = _dump(written), PACKUMENT
    else:
        written = _index(page, document, _only_choices(verdicts) if only_choice else verdicts)
        body, kind = (_html(written), HTML_INDEX) if as_html else (_dump(written), JSON_INDEX)
    withheld = Counter(verdict.reason.value for _, verdict in verdicts if verdict.reason is not None)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return FilteredPage(body, kind, etag, len(verdicts) - withheld.total(), dict(withheld), page.unreadable)


def explain_verdict(verdict: PackageVerdict) -> str:
    """One line that stands where a registry's own words would."""
    assert verdict.reason is not None
    return f"sluicegate: {verdict.reason.value}: {verdict.message}"[:_MAX_REASON]


def _dump(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


# Python


def _only_choices(verdicts: list[tuple[Listed, PackageVerdict]]) -> list[tuple[Listed, PackageVerdict]]:
    had = {listed.facts.version for listed, verdict in verdicts if verdict.allowed}
    return [one for one in verdicts if one[1].allowed or one[0].facts.version not in had]


def _index(page: ProjectPage, document: Document, verdicts: list[tuple[Listed, PackageVerdict]]) -> Document:
    entries = document["files"]
    versions = sorted({listed.facts.version for listed, verdict in verdicts if verdict.allowed})
    written: Document = {
        "meta": {"api-version": _API_VERSION},
        "name": page.package.name.normal,
        "versions": [version.text for version in versions],
        "files": [_entry(listed, entries[listed.key], verdict) for listed, verdict in verdicts],
    }
    return written


def _entry(listed: Listed, original: Mapping[str, Any], verdict: PackageVerdict) -> Document:
    facts = listed.facts
    entry: Document = {"filename": facts.filename, "url": str(listed.location), "hashes": dict(facts.hashes)}
    if isinstance(requires := original.get("requires-python"), str):
        entry["requires-python"] = requires
    if facts.size_bytes is not None:
        entry["size"] = facts.size_bytes
    if facts.uploaded_at is not None:
        entry["upload-time"] = facts.uploaded_at.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
    metadata = original.get("core-metadata", original.get("dist-info-metadata"))  # PEP 714: the new key first
    if metadata is True or isinstance(metadata, dict):
        known = metadata if metadata is True else {k: v for k, v in metadata.items() if isinstance(v, str)}
        entry["core-metadata"] = entry["dist-info-metadata"] = known
    if not verdict.allowed:
        entry["yanked"] = explain_verdict(verdict)
    elif facts.yanked:
        entry["yanked"] = facts.yanked_reason or True
    return entry


def _html(document: Document) -> bytes:
    """The same for clients that read nothing else, PEP 503."""
    rows = [_anchor(entry) for entry in document["files"]]
    head = f'<meta name="pypi:repository-version" content="{_API_VERSION}"><title>{document["name"]}</title>'
    return "\n".join(["<!DOCTYPE html>", f"<html><head>{head}</head><body>", *rows, "</body></html>", ""]).encode(
        "ascii", "xmlcharrefreplace"
    )


def _anchor(entry: Document) -> str:
    digest = entry["hashes"].get("sha256")
    attributes = {"href": entry["url"] + (f"#sha256={digest}" if digest else "")}
    if "requires-python" in entry:
        attributes["data-requires-python"] = entry["requires-python"]
    if "yanked" in entry:
        attributes["data-yanked"] = entry["yanked"] if isinstance(entry["yanked"], str) else ""
    if (metadata := entry.get("core-metadata")) is not None:
        known = metadata.get("sha256") if isinstance(metadata, dict) else None
        attributes["data-core-metadata"] = f"sha256={known}" if known else "true"
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<a {text}>{html.escape(entry['filename'])}</a><br>"


# npm


def _packument(page: ProjectPage, document: Document, verdicts: list[tuple[Listed, PackageVerdict]]) -> Document:
    kept = {listed.key: listed for listed, verdict in verdicts if verdict.allowed}
    withheld = {listed.key: (listed, verdict) for listed, verdict in verdicts if not verdict.allowed}
    times = document.get("time")
    times = times if isinstance(times, dict) else {}
    written: Document = {
        "_id": page.package.name.normal,
        "name": page.package.name.normal,
        "dist-tags": _tags(document.get("dist-tags"), kept, withheld),
        "versions": {key: _manifest(listed, document["versions"][key]) for key, listed in kept.items()},
        "time": {
            key: text
            for key, text in times.items()
            if isinstance(text, str) and (key in ("created", "modified") or key in kept)
        },
    }
    if "modified" in written["time"]:
        written["modified"] = written["time"]["modified"]
    if withheld:
        name = page.package.name.normal
        written["policyRestrictions"] = {
            "message": _message(withheld),
            "versions": {key: {"name": name, "version": key} for key in withheld},
        }
    return written


def _manifest(listed: Listed, original: Document) -> Document:
    manifest = {key: value for key, value in original.items() if key not in _DROPPED}
    manifest["dist"] = {**original["dist"], "tarball": str(listed.location)}
    return manifest


def _tags(tags: object, kept: Mapping[Any, Listed], withheld: Mapping[Any, tuple[Listed, PackageVerdict]]) -> Document:
    """The tags whose versions are there. One of a withheld version stays: asking for it is answered with the reason.

    `latest` is what is taken where nothing is asked for. It goes back to the newest version that is left: of those
    before it, since a publisher may keep newer ones from being the default; of finished ones, if there are any.
    """
    written: Document = {}
    for tag, version in tags.items() if isinstance(tags, dict) else ():
        if isinstance(version, str) and (version in kept or version in withheld):
            written[tag] = version
    if (latest := written.get("latest")) in withheld and kept:
        before = withheld[latest][0].facts.version
        written["latest"] = max(kept, key=lambda key: _preference(kept[key].facts.version, before))
    return written


def _preference(version: PackageVersion, before: PackageVersion) -> tuple[bool, bool, PackageVersion]:
    return not version.is_prerelease, version < before, version


def _message(withheld: Mapping[Any, tuple[Listed, PackageVerdict]]) -> str:
    newest = sorted(withheld.values(), key=lambda one: one[0].facts.version, reverse=True)
    lines = [explain_verdict(verdict) for _, verdict in newest[:_TOLD]]
    if len(newest) > _TOLD:
        lines.append(f"and {len(newest) - _TOLD} more versions")
    return "\n".join(lines)


__all__ = ["HTML_INDEX", "JSON_INDEX", "PACKUMENT", "FilteredPage", "explain_verdict", "filter_page"]
