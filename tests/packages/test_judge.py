"""What a policy makes of packages: a table for each judgement, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.packages.advisories import build, read_document
from proxy.packages.data_files import load_policy_data
from proxy.packages.judge import (
    PackageVerdict,
    PolicyData,
    duration_text,
    is_exempt,
    judge_alias,
    judge_closure,
    judge_file,
    judge_name,
    judge_selector,
    policy_revision,
)
from proxy.packages.model import Ecosystem, FileFacts, FileKind, PackageFacts, Specifier, parse_name, parse_version
from proxy.packages.policy import EXEMPTIBLE, Exemption, PackagePolicy
from proxy.packages.reasons import AVAILABILITY_HINTS, HINTS, Availability, PackageReason, hint_for
from sandbox.packages.specifiers import parse_specifier
from sandbox.policy.packages import package_policy
from sandbox.policy_file import parse_policy

PYPI, NPM = Ecosystem.PYPI, Ecosystem.NPM
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
OLD = NOW - timedelta(days=400)
DATA = load_policy_data(PackagePolicy(), NOW)


@cache
def policy(text: str = "{}") -> PackagePolicy:
    """The package policy of a `packages:` section in YAML's flow form."""
    return package_policy(
        parse_policy(f"version: 1\nnetwork: {{modes: [registry-default]}}\npackages: {text}\n").policy.packages
    )


def advisory(identity: str, name: str, *, events: list[dict[str, str]] | None = None, **more: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"package": {"ecosystem": "PyPI", "name": name}}
    if events is not None:
        entry["ranges"] = [{"type": "ECOSYSTEM", "events": events}]
    return {"id": identity, "modified": "2026-11-29T00:00:00Z", "affected": [entry], **more}


def with_advisories(*documents: dict[str, Any]) -> PolicyData:
    return replace(DATA, advisories=build([read_document(document) for document in documents], NOW))


@pytest.fixture
def database(tmp_path: Any) -> str:
    """A directory that a policy may name; what is in it is not read here."""
    (tmp_path / "x.json").write_text("{}")
    return str(tmp_path)


def code(verdict: PackageVerdict) -> tuple[str | None, str | None]:
    return (None if verdict.reason is None else str(verdict.reason)), verdict.rule


# Names


@pytest.mark.parametrize(
    ("section", "ecosystem", "name", "reason", "rule"),
    [
        ("{}", PYPI, "requests", None, None),
        ("{}", NPM, "@types/node", None, None),
        ("{names: {deny: {pypi: [Foo_Bar]}}}", PYPI, "foo.bar", "name_denied", "packages.names.deny.pypi[0]"),
        ("{names: {deny: {pypi: [foo]}}}", NPM, "foo", None, None),
        ("{names: {deny: {npm: [jsonstream]}}}", NPM, "JSONStream", "name_denied", "packages.names.deny.npm[0]"),
        ("{names: {mode: allowlist, allow: {pypi: [numpy]}}}", PYPI, "numpy", None, None),
        ("{names: {mode: allowlist, allow: {pypi: [numpy]}}}", PYPI, "six", "name_not_allowed", "packages.names.allow"),
        ("{names: {mode: allowlist, allow: {pypi: [numpy]}}}", NPM, "numpy", "name_not_allowed", "packages.names.allow"),
        ("{names: {mode: allowlist, allow: {npm: [JSONStream]}}}", NPM, "jsonstream", "name_not_allowed", "packages.names.allow"),
        ("{names: {allow: {pypi: [six]}, deny: {pypi: [six]}}}", PYPI, "six", "name_denied", "packages.names.deny.pypi[0]"),
        ("{names: {internal_prefixes: {pypi: [acme-]}}}", PYPI, "Acme_Utils", "internal_name", "packages.names.internal_prefixes.pypi[0]"),
        ("{names: {internal_prefixes: {pypi: [acme-]}}}", PYPI, "acme", "internal_name", "packages.names.internal_prefixes.pypi[0]"),
        ("{names: {internal_prefixes: {pypi: [acme-]}}}", PYPI, "acmeutils", None, None),
        ("{names: {internal_prefixes: {npm: ['@acme/']}}}", NPM, "@ACME/x", "internal_name", "packages.names.internal_prefixes.npm[0]"),
        ("{names: {internal_prefixes: {npm: ['@acme/']}}}", NPM, "@acme-x/y", None, None),
        ("{names: {internal_prefixes: {pypi: [acme-]}, allow: {pypi: [acme-open]}}}", PYPI, "acme-open", None, None),
        ("{}", PYPI, "json", "stdlib_name", "packages.names.stdlib"),
        ("{}", PYPI, "concurrent", "stdlib_name", "packages.names.stdlib"),
        ("{}", NPM, "worker_threads", "stdlib_name", "packages.names.stdlib"),
        ("{names: {stdlib: allow}}", PYPI, "argparse", None, None),
        ("{names: {allow: {npm: [events]}}}", NPM, "events", None, None),
        ("{}", PYPI, "requestss", "typosquat_suspect", "packages.similarity"),
        ("{}", NPM, "loadsh", "typosquat_suspect", "packages.similarity"),
        ("{names: {allow: {pypi: [requestss]}}}", PYPI, "requestss", None, None),
        ("{similarity: {action: allow}}", PYPI, "requestss", None, None),
        ("{similarity: {action: warn}}", PYPI, "requestss", None, None),
        ("{similarity: {popular_top: 1}}", PYPI, "requestss", None, None),
    ],
)  # fmt: skip
def test_names_are_judged_so(
    section: str, ecosystem: Ecosystem, name: str, reason: str | None, rule: str | None
) -> None:
    assert code(judge_name(policy(section), parse_name(ecosystem, name), NOW, DATA)) == (reason, rule)


def test_a_lookalike_that_many_people_use_is_no_suspect() -> None:
    """`requests` has real neighbours: the list of those that are left alone is longer than that of those imitated."""
    narrow = policy("{similarity: {popular_top: 1000, ignore_top: 1000}}")
    names = [parse_name(PYPI, name) for name in DATA.popular[PYPI].names[1000:15000]]
    suspected = [
        name
        for name in names
        if judge_name(narrow, name, NOW, DATA, requested=False).reason is PackageReason.TYPOSQUAT_SUSPECT
    ]
    assert suspected
    assert all(judge_name(policy(), name, NOW, DATA, requested=False).allowed for name in suspected)


def test_the_message_names_what_is_imitated_and_the_hint_the_way_out() -> None:
    verdict = judge_name(policy(), parse_name(PYPI, "requestss"), NOW, DATA)
    assert "`requests`" in verdict.message
    assert verdict.hint == "write `requests`; if `requestss` is meant, the operator adds it to `packages.names.allow`"
    warned = judge_name(policy("{similarity: {action: warn}}"), parse_name(PYPI, "requestss"), NOW, DATA)
    assert [warning.reason for warning in warned.warnings] == [PackageReason.TYPOSQUAT_SUSPECT]


@pytest.mark.parametrize(("ecosystem", "name"), [(NPM, "events"), (NPM, "string_decoder"), (PYPI, "dataclasses")])
def test_a_dependency_may_have_a_name_of_the_standard_library(ecosystem: Ecosystem, name: str) -> None:
    """Readable streams of half of npm depend on `string_decoder`, which is a package, and not Node's own."""
    assert judge_name(policy(), parse_name(ecosystem, name), NOW, DATA, requested=False).allowed
    assert judge_name(policy(), parse_name(ecosystem, name), NOW, DATA).reason is PackageReason.STDLIB_NAME


# Selectors


@pytest.mark.parametrize(
    ("section", "ecosystem", "text", "reason", "rule"),
    [
        ("{}", PYPI, "six==", None, None),
        ("{}", PYPI, "six==1.*", None, None),
        ("{}", PYPI, "six==1.16.0", None, None),
        ("{}", PYPI, "uvicorn[standard]==", None, None),
        ("{selectors: {extras: deny}}", PYPI, "uvicorn[standard]==", "extras_denied", "packages.selectors.extras"),
        ("{selectors: {require_exact: true}}", PYPI, "six==", "unpinned_version", "packages.selectors.require_exact"),
        ("{selectors: {require_exact: true}}", PYPI, "six==1.*", "unpinned_version", "packages.selectors.require_exact"),
        ("{selectors: {require_exact: true}}", PYPI, "six==1.16.0", None, None),
        ("{selectors: {require_exact: true}}", NPM, "lodash@latest", "unpinned_version", "packages.selectors.require_exact"),
        ("{}", NPM, "lodash@latest", None, None),
        ("{}", NPM, "lodash@next", "dist_tag_denied", "packages.selectors.dist_tags"),
        ("{selectors: {dist_tags: []}}", NPM, "lodash@latest", "dist_tag_denied", "packages.selectors.dist_tags"),
        ("{selectors: {dist_tags: [next]}}", NPM, "lodash@next", None, None),
        ("{}", PYPI, "six==2.0rc1", "prerelease_denied", "packages.selectors.prerelease"),
        ("{}", PYPI, "six==2.0.dev1", "prerelease_denied", "packages.selectors.prerelease"),
        ("{}", NPM, "lodash@5.0.0-beta.1", "prerelease_denied", "packages.selectors.prerelease"),
        ("{selectors: {prerelease: warn}}", PYPI, "six==2.0rc1", None, None),
        ("{}", PYPI, "six==1.0+x", "local_version_denied", "packages.selectors.local_versions"),
        ("{selectors: {local_versions: allow}}", PYPI, "six==1.0+x", None, None),
        ('{versions: {deny: {pypi: ["urllib3<2"]}}}', PYPI, "urllib3==1.26", "version_denied", "packages.versions.deny.pypi[0]"),
        ('{versions: {deny: {pypi: ["urllib3<2"]}}}', PYPI, "urllib3==2.0", None, None),
    ],
)  # fmt: skip
def test_selectors_are_judged_so(
    section: str, ecosystem: Ecosystem, text: str, reason: str | None, rule: str | None
) -> None:
    specifier = parse_specifier(ecosystem, text)
    assert isinstance(specifier, Specifier)
    verdict = judge_selector(policy(section), specifier, NOW)
    assert code(verdict) == (reason, rule)
    assert verdict.allowed or verdict.hint


# Files


def wheel(name: str = "six", version: str = "1.0", **more: Any) -> FileFacts:
    more = {"uploaded_at": OLD, "kind": FileKind.WHEEL, **more}
    return FileFacts(parse_name(PYPI, name), parse_version(PYPI, version), f"{name}-{version}-py3-none-any.whl", **more)


def tarball(name: str = "lodash", version: str = "4.17.21", **more: Any) -> FileFacts:
    more = {"uploaded_at": OLD, "kind": FileKind.TARBALL, **more}
    return FileFacts(parse_name(NPM, name), parse_version(NPM, version), f"{name}-{version}.tgz", **more)


def judged(
    section: str, file: FileFacts, data: PolicyData = DATA, first: datetime | None = OLD, now: datetime = NOW
) -> PackageVerdict:
    return judge_file(policy(section), file, PackageFacts(file.name, first), now, data)


@pytest.mark.parametrize(
    ("section", "file", "reason", "rule"),
    [
        ("{}", wheel(), None, None),
        ("{}", tarball(), None, None),
        ('{versions: {deny: {npm: ["event-stream==3.3.6"]}}}', tarball("event-stream", "3.3.6"), "version_denied", "packages.versions.deny.npm[0]"),
        ('{versions: {deny: {npm: ["event-stream==3.3.6"]}}}', tarball("event-stream", "3.3.5"), None, None),
        ('{versions: {deny: {pypi: ["six==1.0"]}}}', wheel(version="1.0.0"), "version_denied", "packages.versions.deny.pypi[0]"),
        ("{}", wheel(quarantined=True), "project_quarantined", "packages.artifacts"),
        ("{}", wheel(version="1.0+x"), "local_version_denied", "packages.selectors.local_versions"),
        ("{}", wheel(yanked=True), "version_yanked", "packages.artifacts.yanked"),
        ("{artifacts: {yanked: allow}}", wheel(yanked=True), None, None),
        ("{artifacts: {yanked: warn}}", wheel(yanked=True), None, None),
        ("{}", wheel(kind=FileKind.SDIST), "no_wheel", "packages.artifacts.python"),
        ("{artifacts: {python: any}}", wheel(kind=FileKind.SDIST), None, None),
        ("{artifacts: {python: any}}", wheel(kind=FileKind.OTHER), "no_wheel", "packages.artifacts.python"),
        ("{artifacts: {python: any}}", tarball(kind=FileKind.OTHER), "no_wheel", "packages.artifacts.python"),
        ("{}", tarball(has_install_script=True), "install_script_required", "packages.artifacts.install_scripts"),
        ("{artifacts: {install_scripts: allow}}", tarball(has_install_script=True), None, None),
        ("{}", tarball(deprecated="use another"), None, None),
        ("{}", wheel(uploaded_at=NOW - timedelta(hours=71)), "version_too_new", "packages.age.version_min"),
        ("{}", wheel(uploaded_at=NOW - timedelta(hours=72)), None, None),
        ("{age: {version_min: 0}}", wheel(uploaded_at=NOW), None, None),
        ("{}", wheel(uploaded_at=NOW + timedelta(days=400)), "version_too_new", "packages.age.version_min"),
        ("{}", wheel(uploaded_at=(NOW - timedelta(hours=1)).replace(tzinfo=None)), "version_too_new", "packages.age.version_min"),
        ("{}", wheel(uploaded_at=datetime.max.replace(tzinfo=UTC)), "version_too_new", "packages.age.version_min"),
        ("{}", wheel(uploaded_at=None), "release_time_unknown", "packages.age.unknown"),
        ("{age: {unknown: allow}}", wheel(uploaded_at=None), None, None),
        ("{age: {version_min: 0}}", wheel(uploaded_at=None), None, None),
        ("{age: {package_min: 500d}}", wheel(), "package_too_new", "packages.age.package_min"),
        ("{age: {package_min: 400d}}", wheel(), None, None),
    ],
)  # fmt: skip
def test_files_are_judged_so(section: str, file: FileFacts, reason: str | None, rule: str | None) -> None:
    verdict = judged(section, file)
    assert code(verdict) == (reason, rule)
    assert verdict.allowed or verdict.hint


def test_a_project_of_unknown_age_is_refused_where_its_age_matters() -> None:
    assert code(judged("{age: {package_min: 30d}}", wheel(), first=None)) == (
        "release_time_unknown",
        "packages.age.unknown",
    )
    assert judged("{}", wheel(), first=None).allowed


def test_what_is_too_new_is_told_when_it_will_do() -> None:
    uploaded = NOW - timedelta(hours=1)
    verdict = judged("{age: {version_min: 3d}}", wheel(uploaded_at=uploaded))
    assert verdict.retry_after == uploaded + timedelta(days=3)
    assert "asks for 3d" in verdict.message
    assert verdict.hint is not None
    assert verdict.hint.endswith("wait until 2026-12-02 11:00 UTC")
    assert judged("{}", wheel(uploaded_at=uploaded), now=verdict.retry_after).allowed


def test_waiting_is_advised_only_where_it_is_all_that_is_wrong() -> None:
    """A file that is too new and a source besides would be refused again."""
    verdict = judged("{}", wheel(uploaded_at=NOW, kind=FileKind.SDIST))
    assert verdict.reason is PackageReason.NO_WHEEL
    assert verdict.retry_after is None


def test_a_late_file_of_an_old_release_is_as_new_as_it_is() -> None:
    """Each file is judged by its own time: a wheel can be added to a release years afterwards."""
    assert judged("{}", wheel(uploaded_at=OLD)).allowed
    assert judged("{}", wheel(uploaded_at=NOW)).reason is PackageReason.VERSION_TOO_NEW


def test_a_deprecation_is_a_warning_with_the_publishers_words_on_one_line() -> None:
    verdict = judged("{}", tarball(deprecated="use\n\x1b[31m another  one"))
    assert [warning.reason for warning in verdict.warnings] == [PackageReason.VERSION_DEPRECATED]
    assert verdict.warnings[0].message.endswith(r"is deprecated: use \x1b[31m another one")
    assert judged("{artifacts: {deprecated: allow}}", tarball(deprecated="x")).warnings == ()


# Advisories


def test_without_a_database_nothing_is_known_and_nothing_is_refused_for_it() -> None:
    assert judged("{}", wheel()).allowed


def test_malware_is_refused_by_name_where_every_version_is_meant(database: str) -> None:
    section = f"{{advisories: {{db_dir: {database}}}}}"
    data = with_advisories(advisory("MAL-2026-1", "evil-six"))
    verdict = judge_name(policy(section), parse_name(PYPI, "evil-six"), NOW, data)
    assert code(verdict) == ("malicious_package", "packages.advisories.malicious")
    assert "MAL-2026-1" in verdict.message
    assert judge_name(policy(section), parse_name(PYPI, "six"), NOW, data).allowed
    warned = judge_name(
        policy(f"{{advisories: {{db_dir: {database}, malicious: warn}}}}"), parse_name(PYPI, "evil-six"), NOW, data
    )
    assert [warning.reason for warning in warned.warnings] == [PackageReason.MALICIOUS_PACKAGE]
    allowed = f"{{advisories: {{db_dir: {database}}}, names: {{allow: {{pypi: [evil-six]}}}}}}"
    assert (
        judge_name(policy(allowed), parse_name(PYPI, "evil-six"), NOW, data).reason is PackageReason.MALICIOUS_PACKAGE
    )


def test_malware_in_some_versions_is_refused_in_those(database: str) -> None:
    section = f"{{advisories: {{db_dir: {database}}}}}"
    document = advisory("MAL-2026-2", "six")
    document["affected"][0]["versions"] = ["1.0", "1.1"]
    data = with_advisories(document)
    assert judge_name(policy(section), parse_name(PYPI, "six"), NOW, data).allowed
    assert code(judged(section, wheel(version="1.0.0"), data)) == ("malicious_package", "packages.advisories.malicious")
    assert judged(section, wheel(version="1.2"), data).allowed


CRITICAL = {"severity": [{"type": "CVSS_V3", "score": "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"}]}  # 9.8
MEDIUM = {"severity": [{"type": "CVSS_V3", "score": "CVSS:3.1/AV:N/AC:H/PR:N/UI:N/S:U/C:L/I:L/A:N"}]}  # 4.8
RANGE = [{"introduced": "0"}, {"fixed": "1.5"}]


def test_a_grave_flaw_is_refused_a_lesser_one_is_a_warning(database: str) -> None:
    section = f"{{advisories: {{db_dir: {database}}}}}"
    grave = with_advisories(advisory("GHSA-a", "six", events=RANGE, **CRITICAL))
    verdict = judged(section, wheel(), grave)
    assert code(verdict) == ("known_vulnerability", "packages.advisories.deny_cvss_at_least")
    assert "GHSA-a (CVSS 9.8)" in verdict.message
    assert judged(section, wheel(version="1.5"), grave).allowed
    lesser = judged(section, wheel(), with_advisories(advisory("GHSA-b", "six", events=RANGE, **MEDIUM)))
    assert lesser.allowed
    assert [warning.reason for warning in lesser.warnings] == [PackageReason.KNOWN_VULNERABILITY]
    strict = f"{{advisories: {{db_dir: {database}, deny_cvss_at_least: 4}}}}"
    assert not judged(strict, wheel(), with_advisories(advisory("GHSA-b", "six", events=RANGE, **MEDIUM))).allowed


def test_a_flaw_without_a_score_is_what_the_policy_says(database: str) -> None:
    data = with_advisories(advisory("PYSEC-1", "six", events=RANGE))
    assert judged(f"{{advisories: {{db_dir: {database}}}}}", wheel(), data).warnings
    section = f"{{advisories: {{db_dir: {database}, unscored: deny}}}}"
    assert code(judged(section, wheel(), data)) == ("known_vulnerability", "packages.advisories.unscored")


def test_a_local_build_has_the_flaws_of_its_version(database: str) -> None:
    section = f"{{advisories: {{db_dir: {database}}}, selectors: {{local_versions: allow}}}}"
    data = with_advisories(advisory("GHSA-a", "six", events=RANGE, **CRITICAL))
    assert judged(section, wheel(version="1.4+cpu"), data).reason is PackageReason.KNOWN_VULNERABILITY


def test_an_ignored_advisory_holds_again_when_its_time_is_over(database: str) -> None:
    section = (
        f"{{advisories: {{db_dir: {database}, ignore: [{{id: CVE-1, until: 2026-12-01, reason: not reachable}}]}}}}"
    )
    data = with_advisories(advisory("GHSA-a", "six", events=RANGE, aliases=["CVE-1"], **CRITICAL))
    later = NOW + timedelta(days=3)
    assert judged(section, wheel(), data).allowed
    assert judged(section, wheel(), data, now=later).reason is PackageReason.KNOWN_VULNERABILITY


def test_what_mends_a_flaw_need_not_wait_and_what_has_one_must(database: str) -> None:
    section = f"{{advisories: {{db_dir: {database}, deny_cvss_at_least: 10}}}}"
    data = with_advisories(advisory("GHSA-a", "six", events=RANGE, **CRITICAL))
    assert judged(section, wheel(version="1.5", uploaded_at=NOW, released_at=NOW), data).allowed
    assert (
        judged(section, wheel(version="1.6", uploaded_at=NOW, released_at=NOW), data).reason
        is PackageReason.VERSION_TOO_NEW
    )
    off = f"{{advisories: {{db_dir: {database}}}, age: {{security_fix_exempt: false}}}}"
    assert (
        judged(off, wheel(version="1.5", uploaded_at=NOW, released_at=NOW), data).reason
        is PackageReason.VERSION_TOO_NEW
    )
    both = with_advisories(
        advisory("GHSA-a", "six", events=RANGE, **CRITICAL),
        advisory("GHSA-b", "six", events=[{"introduced": "1.5"}], **MEDIUM),
    )
    assert (
        judged(section, wheel(version="1.5", uploaded_at=NOW, released_at=NOW), both).reason
        is PackageReason.VERSION_TOO_NEW
    )


def test_a_file_that_comes_after_its_release_mends_nothing(database: str) -> None:
    """The fault: whoever took over a publisher's account could add a wheel to the release that mends a flaw."""
    section = f"{{advisories: {{db_dir: {database}}}}}"
    data = with_advisories(advisory("GHSA-a", "six", events=RANGE, **CRITICAL))

    def reason(released_at: datetime | None) -> PackageReason | None:
        return judged(section, wheel(version="1.5", uploaded_at=NOW, released_at=released_at), data).reason

    assert reason(NOW - timedelta(hours=24)) is None
    for late in (NOW - timedelta(hours=24, seconds=1), OLD, None):
        assert reason(late) is PackageReason.VERSION_TOO_NEW


def test_an_alias_is_judged_as_a_name_that_code_imports() -> None:
    """The fault: `"@acme/secret": "npm:other@1.0.0"` was installed as the operator's own package."""
    section = (
        "{names: {mode: MODE, deny: {npm: [bad]}, allow: {npm: ['@acme/open']}, internal_prefixes: {npm: ['@acme/']}}}"
    )
    expected = {
        "bad": "name_denied",
        "BAD": "name_denied",
        "@acme/secret": "internal_name",
        "@acme/open": None,
        "x-cjs": None,
    }
    for mode in ("denylist", "allowlist"):
        rules = policy(section.replace("MODE", mode))
        assert {text: judge_alias(rules, parse_name(NPM, text)).reason for text in expected} == expected


def test_stale_advisories_refuse_every_name_or_warn_as_the_policy_says(database: str) -> None:
    data = with_advisories(advisory("GHSA-a", "other", events=RANGE, **CRITICAL))
    section = f"{{advisories: {{db_dir: {database}}}}}"
    six, later = parse_name(PYPI, "six"), NOW + timedelta(days=3)
    assert judge_name(policy(section), six, NOW, data).allowed
    assert code(judge_name(policy(section), six, later, data)) == ("advisories_stale", "packages.advisories.max_db_age")
    warned = judge_name(policy(f"{{advisories: {{db_dir: {database}, when_stale: warn}}}}"), six, later, data)
    assert [warning.reason for warning in warned.warnings] == [PackageReason.ADVISORIES_STALE]
    assert judge_name(policy(f"{{advisories: {{db_dir: {database}, max_db_age: 0}}}}"), six, later, data).allowed


def test_advisories_that_were_not_loaded_refuse_everything(database: str) -> None:
    """Fail closed: a policy that names a database is not kept to without it."""
    section = f"{{advisories: {{db_dir: {database}}}}}"
    assert judge_name(policy(section), parse_name(PYPI, "six"), NOW, DATA).reason is PackageReason.ADVISORIES_STALE
    assert judged(section, wheel()).reason is PackageReason.ADVISORIES_STALE


# Closure


@pytest.mark.parametrize(
    ("amounts", "rule"),
    [
        ((300, 10, 10), None),
        ((301, 10, 10), "packages.max_closure.packages"),
        ((1, 1_500_000_001, 10), "packages.max_closure.bytes"),
        ((1, 10, 60_001), "packages.max_closure.files"),
    ],
)
def test_what_is_installed_together_has_bounds(amounts: tuple[int, int, int], rule: str | None) -> None:
    verdict = judge_closure(policy(), *amounts)
    assert code(verdict) == (None if rule is None else "closure_too_large", rule)


# Exemptions


def exempt(version: str = "1.0.0", of: str = "version_too_new", until: str = "2026-12-01") -> str:
    return f'{{exemptions: {{pypi: [{{package: Six, version: "{version}", of: [{of}], until: {until}, reason: looked at}}]}}}}'


def test_an_exemption_is_of_one_version_one_reason_and_a_time() -> None:
    new: dict[str, Any] = {"uploaded_at": NOW}
    assert judged(exempt(), wheel(**new)).allowed
    assert judged(exempt(), wheel(version="1.1", **new)).reason is PackageReason.VERSION_TOO_NEW
    assert judged(exempt(), wheel("seven", **new)).reason is PackageReason.VERSION_TOO_NEW
    assert judged(exempt(of="version_yanked"), wheel(**new)).reason is PackageReason.VERSION_TOO_NEW
    assert judged(exempt(), wheel(yanked=True, **new)).reason is PackageReason.VERSION_YANKED
    late = datetime(2026, 12, 2, tzinfo=UTC)
    assert judged(exempt(), wheel(uploaded_at=late), now=late - timedelta(microseconds=1)).allowed
    assert judged(exempt(), wheel(uploaded_at=late), now=late).reason is PackageReason.VERSION_TOO_NEW


def test_an_exemption_of_a_version_is_none_of_its_local_builds() -> None:
    section = exempt(of="local_version_denied, version_too_new")
    assert judged(section, wheel(version="1.0+x")).reason is PackageReason.LOCAL_VERSION_DENIED


def test_an_exempt_pre_release_may_be_asked_for() -> None:
    specifier = parse_specifier(PYPI, "six==2.0rc1")
    assert isinstance(specifier, Specifier)
    section = exempt(version="2.0rc1", of="prerelease_denied")
    assert judge_selector(policy(section), specifier, NOW).allowed
    assert judge_selector(policy(section), specifier).reason is PackageReason.PRERELEASE_DENIED


def test_reasons_that_show_after_fetching_are_looked_up_by_hand() -> None:
    six, version = parse_name(PYPI, "six"), parse_version(PYPI, "1.0")
    rules = policy(exempt(of="startup_hook"))
    assert is_exempt(rules, six, version, PackageReason.STARTUP_HOOK, NOW) == "packages.exemptions.pypi[0]"
    assert is_exempt(rules, six, version, PackageReason.BUNDLED_PACKAGE, NOW) is None


def test_what_says_that_a_package_is_an_attack_has_no_exemption() -> None:
    for reason in (
        "malicious_package name_denied typosquat_suspect internal_name hash_mismatch metadata_mismatch "
        "unsafe_archive_path non_registry_source project_quarantined"
    ).split():
        assert PackageReason(reason) not in EXEMPTIBLE


# What holds for all


def test_every_reason_has_a_hint_and_none_is_a_reason_for_not_being_there() -> None:
    assert set(HINTS) == set(PackageReason)
    assert set(AVAILABILITY_HINTS) == set(Availability)
    assert {str(one) for one in PackageReason}.isdisjoint(str(one) for one in Availability)
    for reason in PackageReason:
        text = hint_for(reason, "six")
        assert text
        assert "{" not in text
        assert text[0].islower()
        assert not text.endswith(".")


SECTIONS = st.sampled_from(
    [
        "{}",
        "{names: {mode: allowlist, allow: {pypi: [six]}}}",
        "{similarity: {action: allow}, names: {stdlib: allow}}",
        "{artifacts: {python: any, yanked: warn, install_scripts: allow}, age: {unknown: allow}}",
        "{age: {version_min: 30d, package_min: 30d}}",
        exempt(),
    ]
)
NAMES = st.sampled_from(["six", "json", "requestss", "acme-x", "anything"]).map(lambda text: parse_name(PYPI, text))
TIMES = st.one_of(st.none(), st.datetimes(), st.datetimes(timezones=st.just(UTC)))
FILES = st.builds(
    FileFacts,
    name=NAMES,
    version=st.sampled_from(["1.0", "2.0rc1", "1.0+x", "1!3"]).map(lambda text: parse_version(PYPI, text)),
    filename=st.text(),
    kind=st.sampled_from(list(FileKind)),
    uploaded_at=TIMES,
    yanked=st.booleans(),
    yanked_reason=st.none() | st.text(),
    deprecated=st.none() | st.text(),
    has_install_script=st.none() | st.booleans(),
    size_bytes=st.none() | st.integers(),
    quarantined=st.booleans(),
)


@settings(deadline=None)  # on a busy machine one example may wait
@given(SECTIONS, FILES, TIMES, st.datetimes())
def test_judging_a_file_is_total_and_its_words_are_printable(
    section: str, file: FileFacts, first: datetime | None, now: datetime
) -> None:
    verdict = judge_file(policy(section), file, PackageFacts(file.name, first), now, DATA)
    assert verdict.allowed == (verdict.reason is None)
    for text in (verdict.message, verdict.hint or "", *(warning.message for warning in verdict.warnings)):
        assert text.isprintable()
    if verdict.retry_after is not None:
        assert verdict.retry_after > now.replace(tzinfo=UTC)


@settings(deadline=None)  # on a busy machine one example may wait
@given(SECTIONS, NAMES, FILES)
def test_a_denied_name_is_never_allowed_and_an_exemption_never_denies(section: str, name: Any, file: FileFacts) -> None:
    rules = policy(section)
    denied = rules.model_copy(
        update={
            "names": rules.names.model_copy(
                update={"deny": rules.names.deny.model_copy(update={"pypi": (name.normal,)})}
            )
        }
    )
    assert judge_name(denied, name, NOW, DATA).reason is PackageReason.NAME_DENIED
    exemption = Exemption(
        id="x", ecosystem=PYPI, name=file.name.normal, version=file.version.text, of=tuple(sorted(EXEMPTIBLE)),
        until=datetime(9000, 1, 1, tzinfo=UTC), reason="all of them",
    )  # fmt: skip
    lifted = rules.model_copy(update={"exemptions": (*rules.exemptions, exemption)})
    facts = PackageFacts(file.name, OLD)
    if judge_file(rules, file, facts, NOW, DATA).allowed:
        assert judge_file(lifted, file, facts, NOW, DATA).allowed


def test_a_copy_of_a_policy_is_judged_by_what_it_says_itself() -> None:
    """What a policy computes once and keeps must not go into a copy."""
    rules = PackagePolicy()
    six = parse_name(PYPI, "six")
    assert judge_name(rules, six, NOW, DATA).allowed
    before = rules.digest
    copied = rules.model_copy(update={"names": policy("{names: {deny: {pypi: [six]}}}").names})
    assert not judge_name(copied, six, NOW, DATA).allowed
    assert copied.digest != before == rules.digest


def test_the_revision_changes_with_the_policy_and_with_the_data() -> None:
    revision = policy_revision(policy(), DATA)
    assert policy_revision(policy("{max_specifiers: 51}"), DATA) != revision
    assert policy_revision(policy(), replace(DATA, digest="another")) != revision
    assert policy_revision(policy("{max_specifiers: 50}"), DATA) == revision


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (30, "30s"), (90, "90s"), (5400, "90m"), (172_800, "2d"), (3600, "1h")]
)
def test_durations_are_written_as_in_a_policy(seconds: int, text: str) -> None:
    assert duration_text(seconds) == text
