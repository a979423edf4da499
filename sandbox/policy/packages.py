"""The `packages:` section of the policy file, and the package policy that it means. Pure.

Owns: its keys, and `package_policy`. Must not: judge; `proxy.packages.judge` does, by a value of
`proxy.packages.policy` whose keys are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from proxy.packages.model import Ecosystem
from proxy.packages.policy import (
    Action,
    AdvisoriesPolicy,
    Age,
    Artifacts,
    DeniedVersions,
    Exemption,
    HookAction,
    IgnoredAdvisory,
    MaxClosure,
    NameMode,
    Names,
    NamesPolicy,
    PackagePolicy,
    PythonFiles,
    Selectors,
    Similarity,
)
from sandbox.policy.package_scalars import (
    AbsolutePath,
    AdvisoryId,
    AllowOrDeny,
    AllowOrWarn,
    AnyAction,
    Duration,
    Lifted,
    NpmName,
    NpmPrefix,
    NpmRange,
    NpmVersion,
    PypiName,
    PypiPrefix,
    PypiRange,
    PypiVersion,
    Section,
    Tag,
    Until,
    WarnOrDeny,
    Why,
    listed,
    some_reasons,
    word,
)
from sandbox.policy.scalars import Flag, bounded, distinct

_MAX_SPECIFIERS = 200

_names = (listed("[requests]"), AfterValidator(distinct))
_ranges = (listed('["urllib3<2"]'), AfterValidator(distinct))


class NameLists(Section):
    pypi: Annotated[tuple[PypiName, ...], *_names] = ()
    npm: Annotated[tuple[NpmName, ...], *_names] = ()


class PrefixLists(Section):
    pypi: Annotated[tuple[PypiPrefix, ...], listed("[acme-]", most=100), AfterValidator(distinct)] = ()
    npm: Annotated[tuple[NpmPrefix, ...], listed('["@acme/"]', most=100), AfterValidator(distinct)] = ()


class RangeLists(Section):
    pypi: Annotated[tuple[PypiRange, ...], *_ranges] = ()
    npm: Annotated[tuple[NpmRange, ...], *_ranges] = ()


class NamesSection(Section):
    mode: Annotated[NameMode, *word(NameMode)] = NameMode.DENYLIST
    allow: NameLists = NameLists()
    deny: NameLists = NameLists()
    internal_prefixes: PrefixLists = PrefixLists()
    stdlib: AllowOrDeny = Action.DENY


class VersionsSection(Section):
    deny: RangeLists = RangeLists()


class SelectorsSection(Section):
    require_exact: Flag = False
    dist_tags: Annotated[tuple[Tag, ...], listed("[latest]", most=50), AfterValidator(distinct)] = ("latest",)
    prerelease: AnyAction = Action.DENY
    local_versions: AnyAction = Action.DENY
    extras: AnyAction = Action.ALLOW


class ListFiles(Section):
    """Lists of popular names in place of those that come with the program."""

    pypi: AbsolutePath | None = None
    npm: AbsolutePath | None = None


class SimilaritySection(Section):
    action: AnyAction = Action.DENY
    popular_top: Annotated[int, *bounded(1, 15_000, "names", whole=True)] = 1_000
    ignore_top: Annotated[int, *bounded(1, 200_000, "names", whole=True)] = 15_000
    list_files: ListFiles = ListFiles()


class AgeSection(Section):
    version_min: Duration = 3 * 86_400
    package_min: Duration = 0
    unknown: AllowOrDeny = Action.DENY
    security_fix_exempt: Flag = True


class IgnoreEntry(Section):
    """An advisory that is not looked at before `until`."""

    id: AdvisoryId
    until: Until
    reason: Why


class AdvisoriesSection(Section):
    db_dir: AbsolutePath | None = None
    malicious: WarnOrDeny = Action.DENY
    deny_cvss_at_least: Annotated[float, *bounded(0, 10, "points", whole=False)] = 9.0
    unscored: AnyAction = Action.WARN
    ignore: Annotated[tuple[IgnoreEntry, ...], listed("[{id: …, until: 2027-01-31, reason: …}]")] = ()
    max_db_age: Duration = 2 * 86_400
    when_stale: WarnOrDeny = Action.DENY


class ArtifactsSection(Section):
    python: Annotated[PythonFiles, *word(PythonFiles)] = PythonFiles.WHEELS_ONLY
    install_scripts: AnyAction = Action.DENY
    yanked: AnyAction = Action.DENY
    deprecated: AllowOrWarn = Action.WARN
    startup_hooks: Annotated[HookAction, *word(HookAction)] = HookAction.DENY
    bundled: AnyAction = Action.DENY


class MaxClosureSection(Section):
    packages: Annotated[int, *bounded(1, 5_000, "packages", whole=True)] = 300
    bytes: Annotated[int, *bounded(1, 100_000_000_000, "bytes", whole=True)] = 1_500_000_000
    files: Annotated[int, *bounded(1, 5_000_000, "files", whole=True)] = 60_000


class _ExemptionEntry(Section):
    """One exact version, of which the reasons `of` do not hold before `until`."""

    of: Annotated[tuple[Lifted, ...], BeforeValidator(some_reasons), AfterValidator(distinct)]
    until: Until
    reason: Why


class PypiExemption(_ExemptionEntry):
    package: PypiName
    version: PypiVersion


class NpmExemption(_ExemptionEntry):
    package: NpmName
    version: NpmVersion


_exemptions = listed("[{package: …, version: …, of: [version_too_new], until: 2027-01-31, reason: …}]")


class ExemptionLists(Section):
    pypi: Annotated[tuple[PypiExemption, ...], _exemptions] = ()
    npm: Annotated[tuple[NpmExemption, ...], _exemptions] = ()


class PackagesSection(Section):
    """Which packages calls may bring, and which a package registry hands out."""

    prepare: Flag = False
    max_specifiers: Annotated[int, *bounded(1, _MAX_SPECIFIERS, "packages", whole=True)] = 50
    max_closure: MaxClosureSection = MaxClosureSection()
    selectors: SelectorsSection = SelectorsSection()
    names: NamesSection = NamesSection()
    versions: VersionsSection = VersionsSection()
    similarity: SimilaritySection = SimilaritySection()
    age: AgeSection = AgeSection()
    advisories: AdvisoriesSection = AdvisoriesSection()
    artifacts: ArtifactsSection = ArtifactsSection()
    exemptions: ExemptionLists = ExemptionLists()


def package_policy(section: PackagesSection) -> PackagePolicy:
    """The section as the value that travels with a grant, and that judgements are made by."""
    names, advisories, artifacts = section.names, section.advisories, section.artifacts
    files = {Ecosystem.PYPI: section.similarity.list_files.pypi, Ecosystem.NPM: section.similarity.list_files.npm}
    return PackagePolicy(
        prepare=section.prepare,
        max_specifiers=section.max_specifiers,
        max_closure=MaxClosure(**dict(section.max_closure)),
        selectors=Selectors(**dict(section.selectors)),
        names=NamesPolicy(
            mode=names.mode,
            allow=_names_of(names.allow),
            deny=_names_of(names.deny),
            internal_prefixes=Names(pypi=names.internal_prefixes.pypi, npm=names.internal_prefixes.npm),
            stdlib=names.stdlib,
        ),
        versions_deny=tuple(
            DeniedVersions(
                id=f"packages.versions.deny.{ecosystem}[{place}]",
                ecosystem=ecosystem,
                name=entry.name.normal,
                versions=entry.versions,
            )
            for ecosystem, entries in _each(section.versions.deny)
            for place, entry in enumerate(entries)
        ),
        similarity=Similarity(
            action=section.similarity.action,
            popular_top=section.similarity.popular_top,
            ignore_top=section.similarity.ignore_top,
            list_files={ecosystem: path for ecosystem, path in files.items() if path is not None},
        ),
        age=Age(**dict(section.age)),
        advisories=AdvisoriesPolicy(
            **{key: value for key, value in advisories if key != "ignore"},
            ignore=tuple(IgnoredAdvisory(**dict(entry)) for entry in advisories.ignore),
        ),
        artifacts=Artifacts(**dict(artifacts)),
        exemptions=tuple(
            Exemption(
                id=f"packages.exemptions.{ecosystem}[{place}]",
                ecosystem=ecosystem,
                name=entry.package.normal,
                version=entry.version.text,
                of=entry.of,
                until=entry.until,
                reason=entry.reason,
            )
            for ecosystem, entries in _each(section.exemptions)
            for place, entry in enumerate(entries)
        ),
    )


def _names_of(lists: NameLists) -> Names:
    return Names(pypi=tuple(map(str, lists.pypi)), npm=tuple(map(str, lists.npm)))


def _each(lists: Any) -> list[tuple[Ecosystem, tuple[Any, ...]]]:
    return [(Ecosystem.PYPI, lists.pypi), (Ecosystem.NPM, lists.npm)]


def data_paths(section: PackagesSection) -> dict[tuple[str, ...], Path]:
    """The files and directories that the section names, by key."""
    found = {
        ("advisories", "db_dir"): section.advisories.db_dir,
        ("similarity", "list_files", "pypi"): section.similarity.list_files.pypi,
        ("similarity", "list_files", "npm"): section.similarity.list_files.npm,
    }
    return {key: path for key, path in found.items() if path is not None}
