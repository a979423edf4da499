"""Which packages a policy allows: `judge_name`, `judge_selector`, `judge_file`, `judge_closure`. Pure.

Every function is total: it takes values, returns a `PackageVerdict`, reads no clock and never raises. The proxy's
registry filter, the screening of a call and the judging of what was resolved all call these, and nothing else decides.

Who judges a package asks `judge_name` and, for each of its files, `judge_file`; a call's own specifier goes through
`judge_selector` besides. A package that isn't there is not judged at all: see `proxy.packages.reasons.Availability`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from proxy.events import clean_text
from proxy.packages.advisories import Advisories, Advisory
from proxy.packages.model import (
    Ecosystem,
    FileFacts,
    FileKind,
    PackageFacts,
    PackageName,
    PackageVersion,
    SelectorKind,
    Specifier,
)
from proxy.packages.policy import Action, NameMode, PackagePolicy, PythonFiles
from proxy.packages.popular import PopularNames
from proxy.packages.reasons import PackageReason, hint_for


@dataclass(frozen=True, slots=True)
class PolicyData:
    """What is judged by besides the policy: loaded by `proxy.packages.data_files`. `digest` tells two loads apart.

    None for `advisories`: no database was loaded. Where the policy names one, that is a denial.
    """

    popular: Mapping[Ecosystem, PopularNames]
    stdlib: Mapping[Ecosystem, frozenset[str]]
    advisories: Advisories | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class PackageWarning:
    """Something of an allowed package that its user should know."""

    reason: PackageReason
    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class PackageVerdict:
    """Allowed, where `reason` is None. `rule` is the policy's key; `message` a sentence; `hint` what to write instead.

    `retry_after`: when the same question will be answered otherwise, if waiting is all it takes.
    """

    reason: PackageReason | None
    rule: str | None
    message: str
    hint: str | None = None
    retry_after: datetime | None = None
    warnings: tuple[PackageWarning, ...] = field(default=())

    @property
    def allowed(self) -> bool:
        return self.reason is None


def policy_revision(policy: PackagePolicy, data: PolicyData) -> str:
    """What a kept judgement depends on, but the time: policy and data. Part of cache keys and manifests."""
    return hashlib.sha256(f"{policy.digest} {data.digest}".encode()).hexdigest()[:32]


_ALLOWED = PackageVerdict(None, None, "it is allowed")


def _refuse(
    reason: PackageReason, rule: str, message: str, name: PackageName | None = None, *, hint: str | None = None,
    retry_after: datetime | None = None,
) -> PackageVerdict:  # fmt: skip
    text = hint if hint is not None else hint_for(reason, "" if name is None else name.normal)
    return PackageVerdict(reason, f"packages.{rule}", message, text, retry_after)


# Names


def judge_name(
    policy: PackagePolicy, name: PackageName, now: datetime, data: PolicyData, *, requested: bool = True
) -> PackageVerdict:
    """Judge a project by its name alone.

    `requested`: the call's author wrote the name. False for what a registry client asks for by itself, and for
    dependencies: names of the standard library are real packages there (npm's `events`, `punycode`).
    """
    now = _aware(now)
    if (denied := _denied_name(policy, name)) is not None:
        return denied
    allowed = name.normal in policy.allowed_names[name.ecosystem]
    if policy.names.mode is NameMode.ALLOWLIST and not allowed:
        return _refuse(
            PackageReason.NAME_NOT_ALLOWED, "names.allow", f"`{name}` is not among the packages that are allowed", name
        )
    if not allowed and (verdict := _general(policy, name, data, requested=requested)) is not None:
        return verdict
    warnings: list[PackageWarning] = []
    if (verdict := _malicious_name(policy, name, now, data)) is not None:
        if policy.advisories.malicious is Action.DENY:
            return verdict
        warnings.append(_as_warning(verdict))
    stale = _stale(policy, now, data)
    if stale is not None:
        if policy.advisories.when_stale is Action.DENY:
            return stale
        if policy.advisories.when_stale is Action.WARN:
            warnings.append(_as_warning(stale))
    if not allowed and (near := _lookalike(policy, name, data)) is not None:
        if policy.similarity.action is Action.DENY:
            return near
        warnings.append(_as_warning(near))
    return _allow(warnings)


def judge_alias(policy: PackagePolicy, name: PackageName) -> PackageVerdict:
    """Judge a name that a dependency gives to another package: `"@acme/x": "npm:other@1.0.0"`.

    Code imports the package by it, so it may be neither a denied name nor one of the operator's own. What is said of
    names that a registry has does not hold: nothing was registered by it.
    """
    found = _denied_name(policy, name)
    if found is None and name.normal not in policy.allowed_names[name.ecosystem]:
        found = _internal_name(policy, name)
    return found or _ALLOWED


def _denied_name(policy: PackagePolicy, name: PackageName) -> PackageVerdict | None:
    denied = policy.denied_names[name.ecosystem].get(name.folded)
    if denied is None:
        return None
    message = f"`{name}` is denied by the policy"
    return PackageVerdict(PackageReason.NAME_DENIED, denied, message, hint_for(PackageReason.NAME_DENIED))


def _general(policy: PackagePolicy, name: PackageName, data: PolicyData, *, requested: bool) -> PackageVerdict | None:
    """What is said of names in general, which an entry of `names.allow` lifts."""
    if (internal := _internal_name(policy, name)) is not None:
        return internal
    if requested and policy.names.stdlib is Action.DENY and _module_name(name) in data.stdlib[name.ecosystem]:
        return _refuse(
            PackageReason.STDLIB_NAME,
            "names.stdlib",
            f"`{name}` is a module of {name.ecosystem.language_name}'s standard library",
        )
    return None


def _internal_name(policy: PackagePolicy, name: PackageName) -> PackageVerdict | None:
    for place, prefix in enumerate(policy.names.internal_prefixes.of(name.ecosystem)):
        if name.folded.startswith(prefix.lower()) or name.folded == prefix.lower().rstrip("-/"):
            return _refuse(
                PackageReason.INTERNAL_NAME,
                f"names.internal_prefixes.{name.ecosystem}[{place}]",
                f"`{name}` is a name of the operator's own packages: they begin with `{prefix}`",
                name,
            )
    return None


def _module_name(name: PackageName) -> str:
    """The name that the standard library's list would have: PyPI's normal form has `-` where a module has `_`."""
    return name.normal.replace("-", "_") if name.ecosystem is Ecosystem.PYPI else name.folded


def _lookalike(policy: PackagePolicy, name: PackageName, data: PolicyData) -> PackageVerdict | None:
    similarity, popular = policy.similarity, data.popular[name.ecosystem]
    if similarity.action is Action.ALLOW or popular.is_among(name.folded, similarity.ignore_top):
        return None
    near = popular.lookalike(name.folded, similarity.popular_top)
    if near is None:
        return None
    return _refuse(
        PackageReason.TYPOSQUAT_SUSPECT,
        "similarity",
        f"`{name}` is little used and one letter away from `{near}`",
        hint=f"write `{near}`; if `{name}` is meant, the operator adds it to `packages.names.allow`",
    )


# What is asked of a package


def judge_selector(policy: PackagePolicy, specifier: Specifier, now: datetime | None = None) -> PackageVerdict:
    """Judge what a call asks of a package: extras and versions. The version itself is judged with its files.

    Without `now`, no exemption holds.
    """
    name, selector, rules = specifier.name, specifier.selector, policy.selectors
    warnings: list[PackageWarning] = []
    for verdict, action in _selector_faults(policy, specifier):
        version = selector.version
        assert verdict.reason is not None
        if version is not None and now is not None and is_exempt(policy, name, version, verdict.reason, now):
            continue
        if action is Action.DENY:
            return verdict
        if action is Action.WARN:
            warnings.append(_as_warning(verdict))
    if rules.require_exact and selector.kind is not SelectorKind.EXACT:
        asked = f"`{name}` with the selector `{selector.text}`" if selector.text else f"any version of `{name}`"
        form = f"{name}==1.2.3" if name.ecosystem is Ecosystem.PYPI else f"{name}@1.2.3"
        return _refuse(
            PackageReason.UNPINNED_VERSION,
            "selectors.require_exact",
            f"{asked} is asked for, and the policy wants an exact version",
            hint=f"write an exact version, such as `{form}`",
        )
    if selector.version is not None and (denied := _denied_version(policy, name, selector.version)) is not None:
        return denied
    return _allow(warnings)


def _selector_faults(policy: PackagePolicy, specifier: Specifier) -> Iterator[tuple[PackageVerdict, Action]]:
    name, selector, rules = specifier.name, specifier.selector, policy.selectors
    if specifier.extras:
        extras = ", ".join(f"`{extra}`" for extra in specifier.extras)
        yield _refuse(PackageReason.EXTRAS_DENIED, "selectors.extras", f"`{name}` with {extras}"), rules.extras
    if selector.kind is SelectorKind.TAG and selector.text not in rules.dist_tags:
        tags = ", ".join(f"`{tag}`" for tag in rules.dist_tags) or "none"
        yield (
            _refuse(
                PackageReason.DIST_TAG_DENIED,
                "selectors.dist_tags",
                f"the tag `{selector.text}` of `{name}` is not one that is allowed: {tags}",
                hint="write a version" + (f", or `{name}@{rules.dist_tags[0]}`" if rules.dist_tags else ""),
            ),
            Action.DENY,
        )
    version = selector.version
    if version is not None and version.is_prerelease:
        message = f"`{version}` of `{name}` is a pre-release"
        yield _refuse(PackageReason.PRERELEASE_DENIED, "selectors.prerelease", message), rules.prerelease
    if version is not None and version.local is not None:
        yield _local_version(name, version), rules.local_versions


def _local_version(name: PackageName, version: PackageVersion) -> PackageVerdict:
    return _refuse(
        PackageReason.LOCAL_VERSION_DENIED,
        "selectors.local_versions",
        f"`{version}` of `{name}` is somebody's own build of `{version.public}`",
        hint=f"write `{name}=={version.public}`",
    )


# Files


def judge_file(
    policy: PackagePolicy, file: FileFacts, package: PackageFacts, now: datetime, data: PolicyData
) -> PackageVerdict:
    """Judge one file of one version by what the registry says of it, unfiltered. The name is judged by `judge_name`.

    What waiting would cure comes last: a verdict with `retry_after` has no other fault.
    """
    now = _aware(now)
    warnings: list[PackageWarning] = []
    for verdict, action in _file_faults(policy, file, package, now, data):
        assert verdict.reason is not None
        if action is Action.ALLOW or is_exempt(policy, file.name, file.version, verdict.reason, now) is not None:
            continue
        if action is Action.DENY:
            return verdict
        warnings.append(_as_warning(verdict))
    return _allow(warnings)


def _file_faults(
    policy: PackagePolicy, file: FileFacts, package: PackageFacts, now: datetime, data: PolicyData
) -> Iterator[tuple[PackageVerdict, Action]]:
    """Everything that is to be said against a file, the gravest first."""
    name, version = file.name, file.version
    yield from _advisory_faults(policy, name, version, now, data)
    if (denied := _denied_version(policy, name, version)) is not None:
        yield denied, Action.DENY
    if file.quarantined or package.quarantined:
        message = f"the registry has taken `{name}` out of use"
        yield _refuse(PackageReason.PROJECT_QUARANTINED, "artifacts", message), Action.DENY
    if version.local is not None:
        yield _local_version(name, version), policy.selectors.local_versions
    if file.yanked:
        why = f": {_quoted(file.yanked_reason)}" if file.yanked_reason else ""
        message = f"`{version}` of `{name}` was taken back by its publisher{why}"
        yield _refuse(PackageReason.VERSION_YANKED, "artifacts.yanked", message), policy.artifacts.yanked
    if not _usable(policy, file):
        message = f"`{_quoted(file.filename)}` is no wheel, and source is not built"
        yield _refuse(PackageReason.NO_WHEEL, "artifacts.python", message), Action.DENY
    if file.has_install_script:
        message = f"`{version}` of `{name}` has a script that runs when it is installed"
        yield (
            _refuse(PackageReason.INSTALL_SCRIPT_REQUIRED, "artifacts.install_scripts", message),
            policy.artifacts.install_scripts,
        )
    if file.deprecated:
        message = f"`{version}` of `{name}` is deprecated: {_quoted(file.deprecated)}"
        action = Action.ALLOW if policy.artifacts.deprecated is Action.ALLOW else Action.WARN
        yield _refuse(PackageReason.VERSION_DEPRECATED, "artifacts.deprecated", message), action
    yield from _age_faults(policy, file, package, now, data)


def _usable(policy: PackagePolicy, file: FileFacts) -> bool:
    if file.name.ecosystem is Ecosystem.NPM:
        return file.kind is FileKind.TARBALL
    return file.kind is FileKind.WHEEL or (policy.artifacts.python is PythonFiles.ANY and file.kind is FileKind.SDIST)


def _denied_version(policy: PackagePolicy, name: PackageName, version: PackageVersion) -> PackageVerdict | None:
    for entry in policy.denied_versions.get((name.ecosystem, name.folded), ()):
        if entry.versions.covers(version):
            return PackageVerdict(
                PackageReason.VERSION_DENIED,
                entry.id,
                f"`{version}` of `{name}` is denied by the policy: {str(entry.versions).partition(':')[2]}",
                hint_for(PackageReason.VERSION_DENIED),
            )
    return None


# Age


def _age_faults(
    policy: PackagePolicy, file: FileFacts, package: PackageFacts, now: datetime, data: PolicyData
) -> Iterator[tuple[PackageVerdict, Action]]:
    age, name, version = policy.age, file.name, file.version
    if age.version_min and not (
        age.security_fix_exempt and _came_with_its_release(file) and _is_security_fix(name, version, data)
    ):
        if file.uploaded_at is None:
            message = f"the registry doesn't say when `{version}` of `{name}` was published"
            yield _refuse(PackageReason.RELEASE_TIME_UNKNOWN, "age.unknown", message), age.unknown
        elif (ripe := _ripe(file.uploaded_at, age.version_min)) > now:
            yield _too_new(PackageReason.VERSION_TOO_NEW, "age.version_min", f"`{version}` of `{name}`",
                           file.uploaded_at, age.version_min, ripe), Action.DENY  # fmt: skip
    if age.package_min:
        if package.first_published is None:
            message = f"the registry doesn't say since when there is `{name}`"
            yield _refuse(PackageReason.RELEASE_TIME_UNKNOWN, "age.unknown", message), age.unknown
        elif (ripe := _ripe(package.first_published, age.package_min)) > now:
            yield _too_new(PackageReason.PACKAGE_TOO_NEW, "age.package_min", f"the package `{name}`",
                           package.first_published, age.package_min, ripe), Action.DENY  # fmt: skip


def _too_new(reason: PackageReason, rule: str, what: str, since: datetime, age: int, ripe: datetime) -> PackageVerdict:
    return _refuse(
        reason,
        rule,
        f"{what} was published at {_stamp(since)}, and the policy asks for {duration_text(age)}",
        hint=f"{hint_for(reason)} until {_stamp(ripe)}",
        retry_after=ripe,
    )


def _ripe(since: datetime, seconds: int) -> datetime:
    try:
        return _aware(since) + timedelta(seconds=seconds)
    except OverflowError:
        return _FOREVER


_FOREVER = datetime.max.replace(tzinfo=UTC)


def _stamp(moment: datetime) -> str:
    return _aware(moment).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def duration_text(seconds: int) -> str:
    """Seconds as a policy file writes them: `3d`, `48h`, `90m`, `30s`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _came_with_its_release(file: FileFacts) -> bool:
    """Whether a file was there when its version was published: a wheel that is added later mends nothing.

    A version of npm has one file.
    """
    if file.name.ecosystem is Ecosystem.NPM:
        return True
    if file.uploaded_at is None or file.released_at is None:
        return False
    return _aware(file.uploaded_at) - _aware(file.released_at) <= _RELEASE_SPAN


_RELEASE_SPAN = timedelta(hours=24)  # builds for many platforms take hours


def _is_security_fix(name: PackageName, version: PackageVersion, data: PolicyData) -> bool:
    """Whether an advisory names this very version as the one that mends it, and none covers it."""
    if data.advisories is None:
        return False
    known = data.advisories.of(name)
    return any(one.mended_in(version) for one in known) and not any(one.covers(version) for one in known)


# Advisories


def _malicious_name(policy: PackagePolicy, name: PackageName, now: datetime, data: PolicyData) -> PackageVerdict | None:
    """A report that covers every version is about the name."""
    if data.advisories is None:
        return None
    for advisory in data.advisories.of(name):
        if advisory.malicious and advisory.everything and not _ignored(policy, advisory, now):
            return _malicious(f"`{name}`", advisory)
    return None


def _malicious(what: str, advisory: Advisory) -> PackageVerdict:
    message = f"{what} is reported as malicious: {_quoted(advisory.id)}"
    return _refuse(PackageReason.MALICIOUS_PACKAGE, "advisories.malicious", message)


def _advisory_faults(
    policy: PackagePolicy, name: PackageName, version: PackageVersion, now: datetime, data: PolicyData
) -> Iterator[tuple[PackageVerdict, Action]]:
    if data.advisories is None:
        if policy.advisories.db_dir is not None and (stale := _stale(policy, now, data)) is not None:
            yield stale, policy.advisories.when_stale
        return
    covering = data.advisories.covering(name, version)
    if not covering:
        return
    rules, what = policy.advisories, f"`{version}` of `{name}`"
    holding = [advisory for advisory in covering if not _ignored(policy, advisory, now)]
    for advisory in holding:
        if advisory.malicious:
            yield _malicious(what, advisory), rules.malicious
    flaws = [advisory for advisory in holding if not advisory.malicious]
    grave = [one for one in flaws if one.score is not None and one.score >= rules.deny_cvss_at_least]
    unscored = [one for one in flaws if one.score is None]
    lesser = [one for one in flaws if one.score is not None and one.score < rules.deny_cvss_at_least]
    for found, rule, action in (
        (grave, "advisories.deny_cvss_at_least", Action.DENY),
        (unscored, "advisories.unscored", rules.unscored),
        (lesser, "advisories.deny_cvss_at_least", Action.WARN),
    ):
        if found:
            ids = ", ".join(_scored(one) for one in found[:5]) + (f" and {len(found) - 5} more" if found[5:] else "")
            yield _refuse(PackageReason.KNOWN_VULNERABILITY, rule, f"{what} has known flaws: {ids}"), action


def _scored(advisory: Advisory) -> str:
    return _quoted(advisory.id) + (f" (CVSS {advisory.score:.1f})" if advisory.score is not None else "")


def _ignored(policy: PackagePolicy, advisory: Advisory, now: datetime) -> bool:
    if not policy.ignored_advisories:
        return False
    untils = (policy.ignored_advisories.get(known) for known in (advisory.id, *advisory.aliases))
    return any(until is not None and now < until for until in untils)


def _stale(policy: PackagePolicy, now: datetime, data: PolicyData) -> PackageVerdict | None:
    rules = policy.advisories
    if rules.db_dir is None:
        return None
    if data.advisories is None:
        return _refuse(PackageReason.ADVISORIES_STALE, "advisories.db_dir", "the advisories were not loaded")
    if not rules.max_db_age:
        return None
    newest = data.advisories.newest
    if newest is not None and _ripe(newest, rules.max_db_age) >= now:
        return None
    since = "have no date" if newest is None else f"are from {_stamp(newest)}"
    message = f"the advisories {since}, and the policy asks for {duration_text(rules.max_db_age)} at most"
    return _refuse(PackageReason.ADVISORIES_STALE, "advisories.max_db_age", message)


# The whole


def judge_closure(policy: PackagePolicy, packages: int, size_bytes: int, files: int) -> PackageVerdict:
    """Judge how much is installed together: packages, unpacked bytes and files."""
    limits = policy.max_closure
    for key, amount, limit in (
        ("packages", packages, limits.packages),
        ("bytes", size_bytes, limits.bytes),
        ("files", files, limits.files),
    ):
        if amount > limit:
            message = f"{amount} {key} would be installed, and the policy allows {limit}"
            return _refuse(PackageReason.CLOSURE_TOO_LARGE, f"max_closure.{key}", message)
    return _ALLOWED


def is_exempt(
    policy: PackagePolicy, name: PackageName, version: PackageVersion, reason: PackageReason, now: datetime
) -> str | None:
    """The rule that exempts this version from a reason at this time; None: none does.

    For the judging of files it is already looked at; it is here for reasons that show after fetching.
    """
    for exact, entry in policy.exempted.get((name.ecosystem, name.normal), ()):
        if reason in entry.of and exact == version and _aware(now) < entry.until:
            return entry.id
    return None


def _allow(warnings: list[PackageWarning]) -> PackageVerdict:
    return replace(_ALLOWED, warnings=tuple(warnings)) if warnings else _ALLOWED


def _as_warning(verdict: PackageVerdict) -> PackageWarning:
    assert verdict.reason is not None
    assert verdict.rule is not None
    return PackageWarning(verdict.reason, verdict.rule, verdict.message)


def _aware(moment: datetime) -> datetime:
    """A time without a zone is taken as UTC, as registries mean it."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _quoted(text: str) -> str:
    """What somebody else wrote, fit for a message: one line, printable, bounded."""
    return clean_text(" ".join(text.split()), 160)
