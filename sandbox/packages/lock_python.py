"""`pylock.toml` (PEP 751), as uv writes it, to locked artifacts. Pure.

Owns: which wheel of a package is taken, and what of a lock is refused: all that is no wheel of the registry with a
strong hash. Must not: decide what a policy allows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import cast
from urllib.parse import unquote, urlsplit

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from proxy.packages.model import Ecosystem, InvalidName, InvalidVersion, parse_name, parse_version
from proxy.packages.reasons import Availability, PackageReason
from sandbox.packages.locked import Fault, LockedArtifact, LockRefused, LockUnreadable, strongest

_ELSEWHERE = ("vcs", "directory", "archive")  # PEP 751's sources that are no registry's


def parse_pylock(text: str, *, tags: Sequence[str]) -> tuple[LockedArtifact, ...]:
    """The artifacts of a lock, by name. `tags` are those of the interpreter, the most wanted first.

    Raises `LockUnreadable`, `LockRefused`.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise LockUnreadable(f"the lock is not TOML: {error}") from error
    packages = document.get("packages", [])
    if str(document.get("lock-version", "")).partition(".")[0] != "1" or not isinstance(packages, list):
        raise LockUnreadable("the lock is not of version 1")
    ranks = {tag: rank for rank, tag in reversed(list(enumerate(tags)))}
    artifacts: dict[str, LockedArtifact] = {}
    faults: list[Fault] = []
    for package in packages:
        if not isinstance(package, dict) or not isinstance(package.get("name"), str):
            raise LockUnreadable("a package of the lock has no name")
        found = _artifact(package, ranks)
        if isinstance(found, Fault):
            faults.append(found)
        elif found.name.normal in artifacts:
            raise LockUnreadable(f"the lock has `{found.name}` twice")
        else:
            artifacts[found.name.normal] = found
    if faults:
        raise LockRefused(faults)
    return tuple(artifacts[name] for name in sorted(artifacts))


def _artifact(package: Mapping[str, object], ranks: Mapping[str, int]) -> LockedArtifact | Fault:
    label = str(package["name"])[:214]
    for source in _ELSEWHERE:
        if source in package:
            return Fault(
                PackageReason.NON_REGISTRY_SOURCE,
                label,
                f"it would come from a `{source}` source, not from the registry",
            )
    try:
        name = parse_name(Ecosystem.PYPI, label)
        version = parse_version(Ecosystem.PYPI, str(package.get("version", "")))
    except (InvalidName, InvalidVersion) as error:
        raise LockUnreadable(f"`{label}` of the lock: {error}") from error
    wheels = package.get("wheels")
    if not isinstance(wheels, list) or not wheels:
        return Fault(PackageReason.NO_WHEEL, name.normal, "it has source only, and source is not built", version.text)
    best: tuple[int, str, Mapping[str, object]] | None = None
    for wheel in wheels:
        if not isinstance(wheel, dict):
            raise LockUnreadable(f"a wheel of `{label}` is not a table")
        if "path" in wheel or not isinstance(wheel.get("url"), str):
            return Fault(
                PackageReason.NON_REGISTRY_SOURCE,
                name.normal,
                "it would come from a path, not from the registry",
                version.text,
            )
        filename = unquote(urlsplit(cast(str, wheel["url"])).path.rpartition("/")[2])
        try:
            wheel_name, wheel_version, _, tags = parse_wheel_filename(filename)
        except InvalidWheelFilename as error:
            raise LockUnreadable(f"a wheel of `{label}`: {error}") from error
        if (wheel_name, str(wheel_version)) != (name.normal, version.text):
            return Fault(
                PackageReason.METADATA_MISMATCH, name.normal, f"its file is called `{filename[:200]}`", version.text
            )
        rank = min((ranks[str(tag)] for tag in tags if str(tag) in ranks), default=None)
        if rank is not None and (best is None or rank < best[0]):
            best = (rank, filename, wheel)
    if best is None:
        return Fault(
            Availability.NO_COMPATIBLE_ARTIFACT,
            name.normal,
            "it has no wheel for this platform and interpreter",
            version.text,
        )
    _, filename, chosen = best
    hashes = chosen.get("hashes")
    held = strongest({str(key): str(value) for key, value in hashes.items()}) if isinstance(hashes, dict) else None
    if held is None:
        return Fault(
            PackageReason.HASH_MISMATCH,
            name.normal,
            "the registry gives no strong hash to hold its file to",
            version.text,
        )
    size, uploaded = chosen.get("size"), chosen.get("upload-time")
    dependencies = package.get("dependencies", [])
    return LockedArtifact(
        name=name,
        version=version,
        url=cast(str, chosen["url"]),
        filename=filename,
        algorithm=held[0],
        digest=held[1],
        size_bytes=size if isinstance(size, int) else None,
        uploaded_at=_utc(uploaded) if isinstance(uploaded, datetime) else None,
        dependencies=tuple(str(one.get("name")) for one in dependencies if isinstance(one, dict))
        if isinstance(dependencies, list)
        else (),
    )


def _utc(moment: datetime) -> datetime:
    """PEP 700 says that upload times are in UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
