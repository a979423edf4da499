"""What is known of a snapshot, and of each artifact in it: all that judging it again needs. Pure.

Owns: the form of `manifest.json`. A policy that changes is held against these, without a network or a rebuild.
Must not: decide what a policy allows (`closure`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from proxy.packages.model import (
    Ecosystem,
    FileFacts,
    FileKind,
    PackageFacts,
    PackageName,
    PackageVersion,
    parse_name,
    parse_version,
)
from proxy.packages.reasons import PackageReason
from sandbox.packages.locked import LockedArtifact

LAYOUT = 1  # of trees and bytecode: another number, and everything is made anew


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Frozen):
    """What a scan found in a tree."""

    reason: PackageReason
    detail: str


class Contents(_Frozen):
    """What one artifact is, once unpacked. It depends on nothing but the artifact.

    `name` and `version` are those of its own metadata, in the form of a lock: a digest alone would serve it as another.
    """

    name: str
    version: str
    bytes: int
    files: int
    findings: tuple[Finding, ...] = ()
    install_scripts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Facts(_Frozen):
    """What the registry said of an artifact when it was resolved."""

    first_published: datetime | None = None
    uploaded_at: datetime | None = None
    yanked: bool = False
    yanked_reason: str | None = None
    deprecated: str | None = None
    has_install_script: bool | None = None
    size_bytes: int | None = None
    quarantined: bool = False
    released_at: datetime | None = None


class Artifact(_Frozen):
    """One artifact of a snapshot. `places` are where its tree stands below the snapshot's root."""

    name: str
    version: str
    url: str
    filename: str
    algorithm: str
    digest: str
    places: tuple[str, ...]
    requested: bool
    facts: Facts
    contents: Contents
    dependencies: tuple[str, ...] = ()

    def key(self, ecosystem: Ecosystem, platform: str) -> str:
        return artifact_key(ecosystem, platform, self.algorithm, self.digest)


class Manifest(_Frozen):
    """A snapshot. `platform` is the interpreter and machine that its artifacts are for."""

    layout: int = LAYOUT
    ecosystem: Ecosystem
    platform: str
    created_at: datetime
    artifacts: tuple[Artifact, ...]

    @property
    def id(self) -> str:
        """Of what is in it and where. Not of the policy: being allowed is a property of who asks."""
        content = sorted(
            (one.name, one.version, one.algorithm, one.digest, *sorted(one.places)) for one in self.artifacts
        )
        return _digest(["snapshot", self.layout, self.ecosystem, self.platform, content])

    @property
    def bytes(self) -> int:
        return sum(one.contents.bytes * len(one.places) for one in self.artifacts)

    @property
    def files(self) -> int:
        return sum(one.contents.files * len(one.places) for one in self.artifacts)

    def artifact_keys(self) -> frozenset[str]:
        return frozenset(one.key(self.ecosystem, self.platform) for one in self.artifacts)

    def for_request(self, names: Iterable[str]) -> Manifest:
        """As it is for who asked for these: a snapshot is shared by requests for different parts of it."""
        requested = frozenset(names)
        artifacts = (one.model_copy(update={"requested": one.name in requested}) for one in self.artifacts)
        return self.model_copy(update={"artifacts": tuple(artifacts)})

    def facts_of(self, artifact: Artifact) -> tuple[FileFacts, PackageFacts]:
        """As judging takes them. Raises `ValueError` for a name or version that is none."""
        return registry_facts(
            parse_name(self.ecosystem, artifact.name), parse_version(self.ecosystem, artifact.version),
            artifact.filename, artifact.facts, scripted=bool(artifact.contents.install_scripts),
        )  # fmt: skip


class RequestRecord(_Frozen):
    """What a set of specifiers was last resolved to. `policy_revision` is what the answer was judged by."""

    snapshot: str
    resolved_at: datetime
    expires_at: datetime
    policy_revision: str
    specifiers: tuple[str, ...]


def registry_facts(
    name: PackageName, version: PackageVersion, filename: str, facts: Facts, *, scripted: bool = False
) -> tuple[FileFacts, PackageFacts]:
    kind = FileKind.WHEEL if name.ecosystem is Ecosystem.PYPI else FileKind.TARBALL
    file = FileFacts(
        name=name, version=version, filename=filename, kind=kind, uploaded_at=facts.uploaded_at, yanked=facts.yanked,
        yanked_reason=facts.yanked_reason, deprecated=facts.deprecated,
        has_install_script=scripted or facts.has_install_script, size_bytes=facts.size_bytes,
        quarantined=facts.quarantined, released_at=facts.released_at,
    )  # fmt: skip
    return file, PackageFacts(name=name, first_published=facts.first_published, quarantined=facts.quarantined)


def facts_of_lock(locked: LockedArtifact) -> Facts:
    """What the lock alone says."""
    return Facts(
        uploaded_at=locked.uploaded_at, has_install_script=locked.has_install_script, size_bytes=locked.size_bytes
    )


def artifact_key(ecosystem: Ecosystem, platform: str, algorithm: str, digest: str) -> str:
    """Where an unpacked artifact lies. A wheel's tree has bytecode, so it is of one interpreter."""
    kind = f"py-{platform}" if ecosystem is Ecosystem.PYPI else "npm"
    return f"{kind}-{LAYOUT}-{algorithm}-{digest}"


def request_key(ecosystem: Ecosystem, platform: str, registry: str, specifiers: Iterable[str]) -> str:
    """Of what was asked for, of whom. Not of the policy: its revision is in the record."""
    return _digest(["request", LAYOUT, ecosystem, platform, registry, sorted(specifiers)])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
