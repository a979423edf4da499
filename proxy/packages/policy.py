"""The package policy as a frozen value: what a grant carries, and every judgement is made by. Pure.

Owns: the keys, their defaults, the digest. Must not: judge, or hold data: lists of names and advisories are named by
their files, and whoever judges has loaded them (`proxy.packages.data_files`).

The names here are in the normal form of their ecosystem; `sandbox.policy.packages` sees to it for a policy file. The
keys are those of the file's `packages:` section, so that a rule's id is the place where it is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from proxy.packages.model import Ecosystem, InvalidVersion, PackageVersion, parse_version
from proxy.packages.ranges import VersionRange
from proxy.packages.reasons import PackageReason

DAY = 86_400


class Action(StrEnum):
    ALLOW = "allow"
    WARN = "warn"
    DENY = "deny"


class NameMode(StrEnum):
    DENYLIST = "denylist"  # every name that is not denied
    ALLOWLIST = "allowlist"  # the names of `allow`, and no others


class PythonFiles(StrEnum):
    WHEELS_ONLY = "wheels_only"
    ANY = "any"  # source too: building it runs the package's own code


class HookAction(StrEnum):
    STRIP = "strip"  # the package is installed without the files that would run at every start
    DENY = "deny"


# What an exemption can lift. What says that a package is somebody's attack, or another package, has no exemption.
EXEMPTIBLE = frozenset(
    {
        PackageReason.BUNDLED_PACKAGE,
        PackageReason.INSTALL_SCRIPT_REQUIRED,
        PackageReason.KNOWN_VULNERABILITY,
        PackageReason.LOCAL_VERSION_DENIED,
        PackageReason.NO_WHEEL,
        PackageReason.PACKAGE_TOO_NEW,
        PackageReason.PRERELEASE_DENIED,
        PackageReason.RELEASE_TIME_UNKNOWN,
        PackageReason.STARTUP_HOOK,
        PackageReason.VERSION_TOO_NEW,
        PackageReason.VERSION_YANKED,
    }
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Names(_Frozen):
    """Names of each ecosystem, in normal form. Prefixes are in this form too, as far as they go."""

    pypi: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()

    def of(self, ecosystem: Ecosystem) -> tuple[str, ...]:
        return self.pypi if ecosystem is Ecosystem.PYPI else self.npm


class NamesPolicy(_Frozen):
    """`allow` also lifts what is said of names in general: prefixes, the standard library, similarity. Deny wins."""

    mode: NameMode = NameMode.DENYLIST
    allow: Names = Names()
    deny: Names = Names()
    internal_prefixes: Names = Names()
    stdlib: Action = Action.DENY


class Selectors(_Frozen):
    require_exact: bool = False
    dist_tags: tuple[str, ...] = ("latest",)
    prerelease: Action = Action.DENY
    local_versions: Action = Action.DENY
    extras: Action = Action.ALLOW


class DeniedVersions(_Frozen):
    """Versions that are refused, of one package. `id` is the place it was read from."""

    id: str
    ecosystem: Ecosystem
    name: str
    versions: VersionRange


class Similarity(_Frozen):
    """Names within one edit of the `popular_top` most used names, unless among the `ignore_top` themselves.

    `list_files` replace the lists that come with the program.
    """

    action: Action = Action.DENY
    popular_top: Annotated[int, Field(ge=1)] = 1000
    ignore_top: Annotated[int, Field(ge=1)] = 15_000
    list_files: dict[Ecosystem, Path] = Field(default_factory=dict)


class Age(_Frozen):
    """Seconds since upload, of a file; and since the first upload, of a project. 0: not looked at."""

    version_min: Annotated[int, Field(ge=0)] = 3 * DAY
    package_min: Annotated[int, Field(ge=0)] = 0
    unknown: Action = Action.DENY
    security_fix_exempt: bool = True


class IgnoredAdvisory(_Frozen):
    id: str
    until: AwareDatetime
    reason: str


class AdvisoriesPolicy(_Frozen):
    """None for `db_dir`: there is no database, and nothing is known of vulnerabilities or malware."""

    db_dir: Path | None = None
    malicious: Action = Action.DENY
    deny_cvss_at_least: Annotated[float, Field(ge=0, le=10)] = 9.0
    unscored: Action = Action.WARN
    ignore: tuple[IgnoredAdvisory, ...] = ()
    max_db_age: Annotated[int, Field(ge=0)] = 2 * DAY  # 0: any
    when_stale: Action = Action.DENY


class Artifacts(_Frozen):
    """`install_scripts: allow` installs the package and does not run them: no script is ever run."""

    python: PythonFiles = PythonFiles.WHEELS_ONLY
    install_scripts: Action = Action.DENY
    yanked: Action = Action.DENY
    deprecated: Action = Action.WARN
    startup_hooks: HookAction = HookAction.DENY
    bundled: Action = Action.DENY


class MaxClosure(_Frozen):
    packages: Annotated[int, Field(ge=1)] = 300
    bytes: Annotated[int, Field(ge=1)] = 1_500_000_000
    files: Annotated[int, Field(ge=1)] = 60_000


class Exemption(_Frozen):
    """One exact version, of which the reasons `of` do not hold before `until`. `id` is the place it was read from."""

    id: str
    ecosystem: Ecosystem
    name: str
    version: str  # canonical text
    of: tuple[PackageReason, ...]
    until: AwareDatetime
    reason: str


class PackagePolicy(_Frozen):
    """The `packages:` section. Without a section, and by its defaults, calls bring no packages.

    `prepare`: whether calls may name packages, prepared before the attempt. What code fetches by itself from a
    registry, where the network policy lets it, is judged by all the other keys whatever `prepare` says.
    """

    prepare: bool = False
    max_specifiers: Annotated[int, Field(ge=1)] = 50
    max_closure: MaxClosure = MaxClosure()
    selectors: Selectors = Selectors()
    names: NamesPolicy = NamesPolicy()
    versions_deny: tuple[DeniedVersions, ...] = ()
    similarity: Similarity = Similarity()
    age: Age = Age()
    advisories: AdvisoriesPolicy = AdvisoriesPolicy()
    artifacts: Artifacts = Artifacts()
    exemptions: tuple[Exemption, ...] = ()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without what was computed of the original: a copy would keep its digest, and its tables."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON. Part of every key under which a judgement is kept."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"

    # Looked up for every file of an index page, which can be thousands: made once.

    @cached_property
    def allowed_names(self) -> dict[Ecosystem, dict[str, str]]:
        """Name, as written for npm, -> the rule that allows it."""
        return {eco: _places("names.allow", eco, self.names.allow) for eco in Ecosystem}

    @cached_property
    def denied_names(self) -> dict[Ecosystem, dict[str, str]]:
        """Folded name -> the rule that denies it."""
        return {
            eco: {name.lower(): rule for name, rule in _places("names.deny", eco, self.names.deny).items()}
            for eco in Ecosystem
        }

    @cached_property
    def denied_versions(self) -> dict[tuple[Ecosystem, str], tuple[DeniedVersions, ...]]:
        """Folded name -> what is denied of it."""
        found: dict[tuple[Ecosystem, str], tuple[DeniedVersions, ...]] = {}
        for entry in self.versions_deny:
            key = (entry.ecosystem, entry.name.lower())
            found[key] = (*found.get(key, ()), entry)
        return found

    @cached_property
    def exempted(self) -> dict[tuple[Ecosystem, str], tuple[tuple[PackageVersion, Exemption], ...]]:
        """Name -> its exemptions, each with its version. What has no version that can be read exempts nothing."""
        found: dict[tuple[Ecosystem, str], tuple[tuple[PackageVersion, Exemption], ...]] = {}
        for entry in self.exemptions:
            key = (entry.ecosystem, entry.name)
            try:
                version = parse_version(entry.ecosystem, entry.version)
            except InvalidVersion:
                continue
            found[key] = (*found.get(key, ()), (version, entry))
        return found

    @cached_property
    def ignored_advisories(self) -> dict[str, datetime]:
        """Id -> until when it is ignored."""
        return {entry.id: entry.until for entry in self.advisories.ignore}


def _places(key: str, ecosystem: Ecosystem, names: Names) -> dict[str, str]:
    return {name: f"packages.{key}.{ecosystem}[{place}]" for place, name in enumerate(names.of(ecosystem))}
