"""`package-lock.json` (version 3), as npm writes it, to locked artifacts. Pure.

Owns: what of a lock is installed here, and what of it is refused: all that is no tarball of the one registry with a
strong hash. Must not: decide what a policy allows.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import cast
from urllib.parse import unquote, urlsplit

from proxy.packages.model import (
    Ecosystem,
    InvalidName,
    InvalidVersion,
    PackageName,
    parse_name,
    parse_version,
)
from proxy.packages.reasons import Availability, PackageReason
from sandbox.packages.locked import ALGORITHMS, Fault, LockedArtifact, LockRefused, LockUnreadable, strongest

_NODE_MODULES = "node_modules/"
_MAX_DEPTH = 32


def parse_package_lock(
    text: str, *, registry: str, os: str = "linux", cpu: str = "x64", libc: str = "glibc"
) -> tuple[LockedArtifact, ...]:
    """The artifacts of a lock that this platform gets, each once, with all of its places.

    `registry` is the URL of the registry that the resolver asked. Raises `LockUnreadable`, `LockRefused`.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LockUnreadable(f"the lock is not JSON: {error}") from error
    entries = document.get("packages") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or document.get("lockfileVersion") not in (2, 3):
        raise LockUnreadable("the lock is not of version 3")
    platform = {"os": os, "cpu": cpu, "libc": libc}
    found: dict[tuple[str, str, str], LockedArtifact] = {}
    faults: list[Fault] = []
    for key, entry in entries.items():
        if key == "":
            continue
        if not isinstance(entry, dict):
            raise LockUnreadable(f"`{key[:214]}` of the lock is not an object")
        outcome = _artifact(key, entry, registry, platform)
        if isinstance(outcome, Fault):
            faults.append(outcome)
        elif outcome is not None:
            same = (outcome.name.normal, outcome.version.text, outcome.digest)
            known = found.get(same)
            found[same] = outcome if known is None else _with_place(known, outcome.places[0])
    if faults:
        raise LockRefused(dict.fromkeys(faults))
    return tuple(found[same] for same in sorted(found))


def _with_place(artifact: LockedArtifact, place: str) -> LockedArtifact:
    return replace(artifact, places=tuple(sorted({*artifact.places, place})))


def _artifact(
    key: str, entry: Mapping[str, object], registry: str, platform: Mapping[str, str]
) -> LockedArtifact | Fault | None:
    place, alias = _place(key)
    label = entry.get("name", alias)
    try:
        name = parse_name(Ecosystem.NPM, str(label))
    except InvalidName as error:
        raise LockUnreadable(f"`{str(label)[:214]}` of the lock: {error}") from error
    if entry.get("link") is True:
        return Fault(PackageReason.NON_REGISTRY_SOURCE, name.normal, "it would be a link to a directory")
    if entry.get("inBundle") is True:
        return Fault(
            PackageReason.BUNDLED_PACKAGE, name.normal, f"it lies inside of `{_holder(key)}`, where nothing judges it"
        )
    if not all(_fits(entry.get(field), wanted) for field, wanted in platform.items()):
        if entry.get("optional") is True:
            return None  # npm leaves it out too
        return Fault(Availability.NO_COMPATIBLE_ARTIFACT, name.normal, "it is not for this platform")
    url = entry.get("resolved")
    if not isinstance(url, str) or not _of_registry(url, name, registry):
        return Fault(PackageReason.NON_REGISTRY_SOURCE, name.normal, "it would not come from the registry")
    try:
        version = parse_version(Ecosystem.NPM, str(entry.get("version", "")))
    except InvalidVersion as error:
        raise LockUnreadable(f"`{name}` of the lock: {error}") from error
    held = strongest(read_integrity(str(entry.get("integrity", ""))))
    if held is None:
        return Fault(
            PackageReason.HASH_MISMATCH,
            name.normal,
            "the registry gives no strong hash to hold its file to",
            version.text,
        )
    return LockedArtifact(
        name=name,
        version=version,
        url=url,
        filename=unquote(urlsplit(url).path.rpartition("/")[2]),
        algorithm=held[0],
        digest=held[1],
        dependencies=_dependencies(entry),
        places=(place,),
        has_install_script=entry.get("hasInstallScript") is True,
        has_shrinkwrap=entry.get("hasShrinkwrap") is True,
    )


def _place(key: str) -> tuple[str, str]:
    """Where a key says that its package is installed, relative to the top `node_modules`, and under what name there."""
    parts = key.split(f"/{_NODE_MODULES}")
    if not parts[0].startswith(_NODE_MODULES) or len(parts) > _MAX_DEPTH:
        raise LockUnreadable(f"`{key[:214]}` of the lock is no place below `node_modules`")
    parts[0] = parts[0].removeprefix(_NODE_MODULES)
    for part in parts:
        try:
            parse_name(Ecosystem.NPM, part)
        except InvalidName as error:
            raise LockUnreadable(f"`{key[:214]}` of the lock: {error}") from error
    return f"/{_NODE_MODULES}".join(parts), parts[-1]


def _holder(key: str) -> str:
    return key.rpartition(f"/{_NODE_MODULES}")[0].rpartition(_NODE_MODULES)[2] or "another package"


def _fits(field: object, wanted: str) -> bool:
    """npm's `os`, `cpu` and `libc`: a list of names, of which those with `!` exclude."""
    if not isinstance(field, (list, str)):
        return True
    names = [field] if isinstance(field, str) else [str(one) for one in field]
    if f"!{wanted}" in names:
        return False
    positive = [name for name in names if not name.startswith("!")]
    return not positive or wanted in positive or "any" in positive


def _of_registry(url: str, name: PackageName, registry: str) -> bool:
    """Whether the URL is of a tarball of this package, at the registry itself."""
    try:
        ours, theirs = urlsplit(registry), urlsplit(url)
        same = (ours.scheme, ours.hostname, ours.port) == (theirs.scheme, theirs.hostname, theirs.port)
    except ValueError:
        return False
    if not same or not url.isascii() or theirs.query or theirs.fragment or theirs.username is not None:
        return False
    start = ours.path.rstrip("/") + f"/{name.normal}/-/"
    path = unquote(theirs.path)
    return path.startswith(start) and "/" not in path[len(start) :] and path.endswith(".tgz")


def read_integrity(text: str) -> dict[str, str]:
    """Subresource integrity, `sha512-BASE64`, several with spaces between, to hex digests."""
    found: dict[str, str] = {}
    for part in text.split():
        algorithm, dash, value = part.partition("?")[0].partition("-")
        if not dash or algorithm not in ALGORITHMS:
            continue
        try:
            found.setdefault(algorithm, base64.b64decode(value, validate=True).hex())
        except binascii.Error:
            found[algorithm] = ""
    return found


def _dependencies(entry: Mapping[str, object]) -> tuple[str, ...]:
    names: set[str] = set()
    for field in ("dependencies", "optionalDependencies", "peerDependencies"):
        value = entry.get(field)
        if isinstance(value, dict):
            names.update(name for name in cast("dict[str, object]", value) if _is_name(name))
    return tuple(sorted(names))


def _is_name(text: str) -> bool:
    """Whether it is one at all: a lock repeats what a publisher wrote, whatever that is."""
    try:
        parse_name(Ecosystem.NPM, text)
    except InvalidName:
        return False
    return True
