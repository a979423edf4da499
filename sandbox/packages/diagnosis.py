"""Why a resolver found nothing: the policy's doing, or the registry's. Pure.

A resolver sees the filtered index, where what is refused looks like what is not there. So once it has failed, what was
asked for is held against the registry's own pages, unfiltered, and the two are told apart by them. The resolver's
words only say where to look, and what it found in an artifact itself.

Owns: that distinction. Must not: ask, or decide what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from proxy.packages.judge import judge_name
from proxy.packages.model import (
    Ecosystem,
    FileFacts,
    InvalidName,
    InvalidVersion,
    PackageFacts,
    PackageName,
    PackageVersion,
    Selector,
    Specifier,
    parse_name,
    parse_version,
)
from proxy.packages.model import SelectorKind as Kind
from proxy.packages.reasons import AVAILABILITY_HINTS, Availability, PackageReason, hint_for
from proxy.packages.requests import Registry, read_filename, read_tarball
from sandbox.packages.closure import Rules, fault_of, judge_artifact
from sandbox.packages.locked import Fault

# Where resolvers speak of a package, with the version that is needed of it if they say so. Each is looked up, so one
# that is meant otherwise costs a question.
_NAME = r"([A-Za-z0-9][A-Za-z0-9._-]*)"
_UV_MENTION = re.compile(
    rf"(?:\bdepends? on (?!(?:all|any|one) of\b|Python\b)|\bno versions? of |\bBecause (?=\S+ was not found)){_NAME}"
    r"(?:==([A-Za-z0-9!+._-]*[A-Za-z0-9]))?"
)
_NPM_NAME = r"((?:@[A-Za-z0-9._-]+(?:/|%2[fF]))?[A-Za-z0-9][A-Za-z0-9._-]*)"
_NPM_VERSION = r"(?:@([0-9][A-Za-z0-9+._-]*[A-Za-z0-9]))?"
_MAX_MENTIONS = 10
# A file that the proxy has refused to a resolver: the line has the status and the file's URL.
_REFUSED = re.compile(r"^.*?\b403\b.*?(https?://[^\s()`'\"]+)", re.MULTILINE)

# What a resolver found in an artifact or in its metadata, where the pages show nothing.
_FINDINGS: tuple[tuple[str, PackageReason | Availability, str], ...] = (
    (
        r"No space left on device|\bENOSPC\b",
        PackageReason.CLOSURE_TOO_LARGE,
        "what resolving it takes does not fit into the sandbox",
    ),
    (r"unexpected JSON", Availability.REGISTRY_UNAVAILABLE, "a page of the registry cannot be read"),
    (r"\bEALLOW[A-Z]+\b", PackageReason.NON_REGISTRY_SOURCE, "it, or what it needs, would not come from the registry"),
    (
        r"included as a URL dependency",
        PackageReason.NON_REGISTRY_SOURCE,
        "it needs what would not come from the registry",
    ),
    (r"Hash mismatch for", PackageReason.HASH_MISMATCH, "its metadata has another hash than the registry says"),
    (
        r"metadata (?:name|version) .* does not match",
        PackageReason.METADATA_MISMATCH,
        "its metadata is of another package",
    ),
    (r"current Python version|Requires-Python", Availability.NO_COMPATIBLE_ARTIFACT, "it is not for this interpreter"),
    (r"\bEBADPLATFORM\b", Availability.NO_COMPATIBLE_ARTIFACT, "it is not for this platform"),
)
_EXCERPT = 600


@dataclass(frozen=True, slots=True)
class Page:
    """What a registry answered about one project: its files, or the HTTP status in place of them (None: no answer).

    `tags` are npm's names for versions.
    """

    package: PackageFacts | None = None
    files: tuple[FileFacts, ...] = ()
    status: int | None = 200
    message: str = ""
    tags: Mapping[str, str] | None = None


def diagnose(
    rules: Rules, specifiers: Iterable[Specifier], pages: Mapping[str, Page], *, tags: Sequence[str], requested: bool,
    said: str = "",
) -> tuple[Fault, ...]:  # fmt: skip
    """What the registry's pages say against each; nothing, where each could be had by itself. `pages` are by name.

    `said` are the resolver's words: a file that was refused to it is judged, even if there are others.
    """
    refused = frozenset(filename for _, filename in _refused_files(said))
    found = (_of_specifier(rules, one, pages[one.name.normal], tags, requested, refused) for one in specifiers)
    return tuple(fault for fault in found if fault is not None)


def _refused_files(said: str) -> list[tuple[str, str]]:
    """The address without its scheme and the file's name, of each that the proxy has answered with 403."""
    paths = (
        unquote(url.partition("://")[2].partition("?")[0]).removesuffix(".metadata") for url in _REFUSED.findall(said)
    )
    return [(path, path.rpartition("/")[2]) for path in paths]


def mentions(registry: Registry, said: str) -> tuple[Specifier, ...]:
    """The packages that a resolver speaks of: where what was asked for is there, they may be what is missing."""
    ecosystem, pattern = registry.ecosystem, _UV_MENTION
    if ecosystem is Ecosystem.NPM:
        start = rf"(?:{re.escape(str(registry.index))}|No matching version found for )"
        pattern = re.compile(rf"{start}{_NPM_NAME}{_NPM_VERSION}(?=[\s'.]|$)")
    found: dict[str, Specifier] = {}
    for path, filename in _refused_files(said):
        whose = _whose(ecosystem, path, filename)
        if whose is not None:
            found[whose[0].normal] = Specifier(whose[0], Selector(Kind.EXACT, whose[1].text, whose[1]))
    for name_text, version_text in pattern.findall(said):
        try:
            name = parse_name(ecosystem, unquote(name_text))
            version = parse_version(ecosystem, version_text) if version_text else None
        except (InvalidName, InvalidVersion):
            continue
        selector = Selector(Kind.ANY) if version is None else Selector(Kind.EXACT, version.text, version)
        if name.normal not in found or version is not None:
            found[name.normal] = Specifier(name, selector)
    return tuple(found.values())[:_MAX_MENTIONS]


def _whose(ecosystem: Ecosystem, path: str, filename: str) -> tuple[PackageName, PackageVersion] | None:
    if ecosystem is Ecosystem.PYPI:
        return read_filename(filename)
    try:
        scope, name_text = path.rpartition("/-/")[0].split("/")[-2:]
        name = parse_name(ecosystem, f"{scope}/{name_text}" if scope.startswith("@") else name_text)
    except (InvalidName, ValueError):  # or no such path
        return None
    version = read_tarball(name, filename)
    return None if version is None else (name, version)


def from_words(names: Sequence[str], said: str) -> Fault:
    """What is left where every page is as it should be: what the resolver itself makes of the whole."""
    label = ", ".join(names)
    for pattern, reason, detail in _FINDINGS:
        if re.search(pattern, said):
            hint = hint_for(reason, label) if isinstance(reason, PackageReason) else AVAILABILITY_HINTS[reason]
            return Fault(reason, label, f"{detail}: {excerpt(said)}", hint=hint)
    return _unavailable(Availability.RESOLUTION_CONFLICT, label, f"no set of versions satisfies all: {excerpt(said)}")


def excerpt(text: str) -> str:
    """A resolver's words, fit for a message."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(plain.split())[:_EXCERPT]


def matches(specifier: Specifier, file: FileFacts, tags: Mapping[str, str] | None = None) -> bool:
    """Whether a file is of a version that the specifier asks for."""
    selector = specifier.selector
    match selector.kind:
        case Kind.ANY:
            return True
        case Kind.EXACT:
            return selector.version is not None and selector.version in (file.version, file.version.public)
        case Kind.TAG:
            return (tags or {}).get(selector.text) == file.version.text
    numbers = re.findall(r"\d+", selector.text.partition("!")[2] or selector.text)
    release = (*file.version.release, *([0] * len(numbers)))
    return release[: len(numbers)] == tuple(map(int, numbers))


def _of_specifier(
    rules: Rules, specifier: Specifier, page: Page, tags: Sequence[str], requested: bool, refused: frozenset[str]
) -> Fault | None:
    name = specifier.name.normal
    if fault := fault_of(
        judge_name(rules.policy, specifier.name, rules.now, rules.data, requested=requested), specifier.name
    ):
        return fault
    if page.status == 404:
        return _unavailable(Availability.PACKAGE_NOT_FOUND, name, "the registry has no package of this name")
    if page.status != 200 or page.package is None:
        return _unavailable(Availability.REGISTRY_UNAVAILABLE, name, excerpt(page.message) or f"status {page.status}")
    asked = [file for file in page.files if matches(specifier, file, page.tags)]
    if not asked:
        what = f"no version `{specifier.selector.text}`" if specifier.selector.text else "no version"
        if page.package.quarantined:
            return Fault(PackageReason.PROJECT_QUARANTINED, name, "the registry has taken it out of use")
        return _unavailable(Availability.VERSION_NOT_FOUND, name, f"the registry has {what} of it")
    fitting = [file for file in asked if _fits(file, tags)]
    # What is judged is what would be installed; only where nothing would, the rest says why.
    judged = [(file, judge_artifact(rules, file, page.package, requested=requested)) for file in fitting or asked]
    if all(fault is not None for _, fault in judged):
        _, fault = max(judged, key=lambda pair: (not pair[0].version.is_prerelease, pair[0].version))
        return fault
    if not fitting:
        return _unavailable(
            Availability.NO_COMPATIBLE_ARTIFACT, name, "it has no file for this platform and interpreter"
        )
    return next((fault for file, fault in judged if fault is not None and file.filename in refused), None)


def _fits(file: FileFacts, tags: Sequence[str]) -> bool:
    if file.name.ecosystem is Ecosystem.NPM:
        return True
    try:
        return any(str(tag) in tags for tag in parse_wheel_filename(file.filename)[3])
    except InvalidWheelFilename:
        return False


def _unavailable(reason: Availability, name: str, detail: str) -> Fault:
    return Fault(reason, name, detail, hint=AVAILABILITY_HINTS[reason])
