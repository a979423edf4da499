"""The `packages:` section of a policy file: strict, with the place of every fault, and the value that it means."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from proxy.packages.model import Ecosystem
from proxy.packages.policy import PackagePolicy
from sandbox.policy.lint import lint
from sandbox.policy.packages import PackagesSection, package_policy
from sandbox.policy_file import InvalidPolicy, default_policy_path, load_policy, parse_policy, to_yaml

FULL = """\
version: 1
packages:
  prepare: true
  max_specifiers: 10
  max_closure: {packages: 30, bytes: 1000, files: 60}
  selectors: {require_exact: true, dist_tags: [latest, next], prerelease: warn, local_versions: allow, extras: deny}
  names:
    mode: allowlist
    allow: {pypi: [Foo_Bar, six], npm: [JSONStream, "@scope/x"]}
    deny: {pypi: [bad], npm: [left-pad]}
    internal_prefixes: {pypi: [acme-], npm: ["@acme/"]}
    stdlib: allow
  versions: {deny: {pypi: ["urllib3>=1.0,<2"], npm: ["event-stream==3.3.6"]}}
  similarity: {action: warn, popular_top: 500, ignore_top: 5000}
  age: {version_min: 36h, package_min: 2w, unknown: allow, security_fix_exempt: false}
  advisories:
    malicious: warn
    deny_cvss_at_least: 7
    unscored: deny
    ignore: [{id: GHSA-1, until: 2027-01-31, reason: not reachable}]
    max_db_age: 0
    when_stale: warn
  artifacts: {python: any, install_scripts: allow, yanked: warn, deprecated: allow, startup_hooks: strip, bundled: warn}
  exemptions:
    pypi: [{package: six, version: "1.10", of: [version_too_new, no_wheel], until: "2027-01-31T12:00:00+01:00", reason: x}]
    npm: [{package: "@scope/x", version: 1.2.3, of: [bundled_package], until: 2027-01-31, reason: y}]
"""


def test_every_key_is_read_and_written_again() -> None:
    loaded = parse_policy(FULL)
    assert parse_policy(to_yaml(loaded.policy)).policy == loaded.policy
    assert parse_policy(to_yaml(loaded.policy)).digest == loaded.digest
    default = PackagesSection().model_dump(exclude={"similarity": {"list_files"}, "advisories": {"db_dir"}})
    given = loaded.policy.packages.model_dump(exclude={"similarity": {"list_files"}, "advisories": {"db_dir"}})

    def differs(one: object, other: object) -> bool:
        if isinstance(one, dict) and isinstance(other, dict):
            return all(differs(one[key], other[key]) for key in one)
        return one != other

    assert differs(given, default), "a key of the example has its default, so that reading it is not shown"


def test_the_section_means_one_policy_and_the_policy_travels() -> None:
    policy = package_policy(parse_policy(FULL).policy.packages)
    assert policy.names.allow.pypi == ("foo-bar", "six")
    assert policy.names.allow.npm == ("JSONStream", "@scope/x")
    assert policy.age.version_min == 36 * 3600
    assert policy.age.package_min == 14 * 86_400
    assert policy.advisories.ignore[0].until == datetime(2027, 2, 1, tzinfo=UTC)  # the date's end
    assert policy.exemptions[0].until == datetime(2027, 1, 31, 11, tzinfo=UTC)
    assert [entry.id for entry in policy.exemptions] == ["packages.exemptions.pypi[0]", "packages.exemptions.npm[0]"]
    assert policy.exemptions[0].version == "1.10"
    assert PackagePolicy.model_validate_json(policy.model_dump_json()) == policy
    assert PackagePolicy.model_validate_json(policy.model_dump_json()).digest == policy.digest
    assert policy.exempted[Ecosystem.NPM, "@scope/x"]


def test_the_defaults_of_the_file_and_of_the_value_are_the_same() -> None:
    assert package_policy(PackagesSection()) == PackagePolicy()
    assert not PackagePolicy().prepare


def test_the_shipped_default_spells_the_defaults_out() -> None:
    section = load_policy(default_policy_path()).policy.packages
    assert section.prepare
    assert section.model_copy(update={"prepare": False}) == PackagesSection()


def test_digests_tell_policies_apart_and_spellings_not() -> None:
    one = parse_policy("version: 1\npackages: {names: {deny: {pypi: [Foo_Bar]}}, age: {version_min: 3d}}\n")
    same = parse_policy("version: 1\npackages: {age: {version_min: 72h}, names: {deny: {pypi: [foo-bar]}}}\n")
    other = parse_policy("version: 1\npackages: {names: {deny: {pypi: [foo-baz]}}}\n")
    assert one.digest == same.digest
    assert package_policy(one.policy.packages).digest == package_policy(same.policy.packages).digest
    assert package_policy(one.policy.packages).digest != package_policy(other.policy.packages).digest


EXEMPTION = "package: six, version: 1.2.3, of: [no_wheel], until: 2027-01-31, reason: x"


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("{prepar: true}", "packages.prepar", "write `prepare`"),
        ("{prepare: 1}", "packages.prepare", "write `true` or `false`"),
        ("{max_specifiers: 0}", "packages.max_specifiers", "write a whole number of packages in that range"),
        ("{age: {version_min: 3}}", "packages.age.version_min", "write `3d`, `3h` or the like"),
        ("{age: {version_min: 3 days}}", "packages.age.version_min", "write a number and `s`, `m`, `h`, `d` or `w`, such as `3d`"),
        ("{age: {version_min: -3d}}", "packages.age.version_min", "write a number and `s`, `m`, `h`, `d` or `w`, such as `3d`"),
        ("{age: {version_min: 9999w}}", "packages.age.version_min", "write `0` to switch the rule off"),
        ("{age: {unknown: warn}}", "packages.age.unknown", "write `allow` or `deny`"),
        ("{names: {deny: [six]}}", "packages.names.deny", None),
        ("{names: {deny: {pypi: six}}}", "packages.names.deny.pypi", "write `[requests]`"),
        ("{names: {deny: {pypi: ['six==1']}}}", "packages.names.deny.pypi[0]", "write the name alone; versions belong in `packages.versions.deny`"),
        ("{names: {deny: {pypi: [a-b, A_B]}}}", "packages.names.deny.pypi", "keep one of them"),
        ("{names: {deny: {npm: [a/b]}}}", "packages.names.deny.npm[0]", None),
        ("{names: {deny: {python: [six]}}}", "packages.names.deny.python", "the keys here are `pypi`, `npm`"),
        ("{names: {internal_prefixes: {pypi: [acme_]}}}", "packages.names.internal_prefixes.pypi[0]", "write `acme-`"),
        ("{names: {internal_prefixes: {npm: ['@acme']}}}", "packages.names.internal_prefixes.npm[0]", 'write `"@acme/"`'),
        ("{versions: {deny: {pypi: [urllib3]}}}", "packages.versions.deny.pypi[0]", 'write `"urllib3<2"`; whole packages belong in `names.deny`'),
        ("{versions: {deny: {pypi: ['urllib3<x']}}}", "packages.versions.deny.pypi[0]", 'write `"urllib3<2"` or `"urllib3>=1.0.0,<1.5.2"`'),
        ("{selectors: {dist_tags: ['1.x']}}", "packages.selectors.dist_tags[0]", "write `latest`"),
        ("{advisories: {db_dir: osv}}", "packages.advisories.db_dir", "write an absolute path, such as `/var/lib/osv`"),
        ("{advisories: {deny_cvss_at_least: 11}}", "packages.advisories.deny_cvss_at_least", "write a number of points in that range"),
        ("{advisories: {ignore: [{id: GHSA-1, until: 2027-01-31}]}}", "packages.advisories.ignore[0].reason", "write `reason: …`"),
        ("{advisories: {ignore: [{id: GHSA-1, until: never, reason: x}]}}", "packages.advisories.ignore[0].until", "write `2027-01-31`"),
        ("{artifacts: {startup_hooks: allow}}", "packages.artifacts.startup_hooks", "write `strip` or `deny`"),
        (f"{{exemptions: [{{{EXEMPTION}}}]}}", "packages.exemptions", None),
        (f"{{exemptions: {{pypi: [{{{EXEMPTION.replace('1.2.3', '1.10')}}}]}}}}", "packages.exemptions.pypi[0].version", "put it in quotation marks"),
        (f"{{exemptions: {{pypi: [{{{EXEMPTION.replace('1.2.3', '1.*')}}}]}}}}", "packages.exemptions.pypi[0].version", "an exemption is of one exact version"),
        (f"{{exemptions: {{pypi: [{{{EXEMPTION.replace(', reason: x', '')}}}]}}}}", "packages.exemptions.pypi[0].reason", "write `reason: …`"),
        (f"{{exemptions: {{pypi: [{{{EXEMPTION.replace('2027-01-31', '2027-01-31T12:00')}}}]}}}}", "packages.exemptions.pypi[0].until", "write `2027-01-31T12:00Z`, or the date alone"),
        (f"{{exemptions: {{pypi: [{{{EXEMPTION.replace('no_wheel', 'malicious_package')}}}]}}}}", "packages.exemptions.pypi[0].of[0]", ...),
    ],
)  # fmt: skip
def test_a_fault_has_its_key_and_the_form_to_write(section: str, key: str, hint: object) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        parse_policy(f"version: 1\npackages: {section}\n")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.mark is not None
    assert problem.mark.line == 2
    if hint is not ...:
        assert problem.hint == hint


def test_all_faults_of_the_section_are_said_at_once() -> None:
    text = "version: 1\npackages:\n  max_specifiers: 0\n  names: {mode: x, deny: {pypi: [-a]}}\n  age: {unknown: 1}\n"
    with pytest.raises(InvalidPolicy) as caught:
        parse_policy(text)
    assert [problem.key for problem in caught.value.problems] == [
        "packages.max_specifiers", "packages.names.mode", "packages.names.deny.pypi[0]", "packages.age.unknown",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("{names: {mode: allowlist}}", "packages.names.mode"),
        ("{names: {allow: {pypi: [six]}, deny: {pypi: [Six]}}}", "packages.names.allow.pypi[0]"),
        ("{names: {internal_prefixes: {pypi: [a-]}}}", "packages.names.internal_prefixes.pypi[0]"),
        ("{similarity: {popular_top: 100, ignore_top: 10}}", "packages.similarity.ignore_top"),
        ("{advisories: {unscored: deny}}", "packages.advisories"),
        (f"{{exemptions: {{pypi: [{{{EXEMPTION.replace('2027', '2026')}}}]}}}}", "packages.exemptions.pypi[0]"),
        (f"{{names: {{deny: {{pypi: [six]}}}}, exemptions: {{pypi: [{{{EXEMPTION}}}]}}}}", "packages.exemptions.pypi[0]"),
    ],
)  # fmt: skip
def test_what_may_surprise_is_a_warning_at_its_place(section: str, key: str) -> None:
    policy = parse_policy(f"version: 1\nnetwork: {{modes: [registry-default]}}\npackages: {section}\n").policy
    findings = lint(policy, datetime(2026, 11, 29, tzinfo=UTC))
    assert [(".".join(map(str, f.path)).replace(".0", "[0]"), f.error) for f in findings] == [(key, False)]
    assert all(finding.hint for finding in findings)


def test_an_expired_ignore_is_a_warning() -> None:
    policy = parse_policy(
        "version: 1\nnetwork: {modes: [registry-default]}\npackages: {advisories: {ignore: [{id: GHSA-1, until: 2027-01-31, reason: x}]}}\n"
    ).policy
    before, after = datetime(2027, 1, 31, 23, tzinfo=UTC), datetime(2027, 2, 1, tzinfo=UTC)
    assert "expired" not in str(lint(policy, before))
    assert "expired" in str(lint(policy, after))
    assert "expired" not in str(lint(policy))


def test_a_section_that_nothing_reads_is_a_warning() -> None:
    (warning,) = parse_policy("version: 1\npackages: {max_specifiers: 3}\n").warnings
    assert warning.key == "packages"
    assert parse_policy("version: 1\npackages: {max_specifiers: 3, prepare: true}\n").warnings == ()


def test_a_section_that_could_not_travel_is_refused() -> None:
    names = ", ".join(f"a-rather-long-name-of-a-package-{number:030d}" for number in range(1000))
    with pytest.raises(InvalidPolicy, match="can travel with an attempt"):
        parse_policy(f"version: 1\npackages: {{prepare: true, names: {{deny: {{pypi: [{names}]}}}}}}\n")


def test_files_that_are_not_there_refuse_the_policy(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("../x\n")
    (tmp_path / "empty").mkdir()
    for section, key in (
        (f"{{advisories: {{db_dir: {tmp_path}/none}}}}", "packages.advisories.db_dir"),
        (f"{{advisories: {{db_dir: {tmp_path}/empty}}}}", "packages.advisories.db_dir"),
        (f"{{similarity: {{list_files: {{pypi: {tmp_path}/none.txt}}}}}}", "packages.similarity.list_files.pypi"),
        (f"{{similarity: {{list_files: {{npm: {tmp_path}/bad.txt}}}}}}", "packages.similarity.list_files.npm"),
    ):
        with pytest.raises(InvalidPolicy) as caught:
            parse_policy(f"version: 1\npackages: {section}\n")
        (problem,) = caught.value.problems
        assert problem.key == key
        assert problem.hint
    (tmp_path / "good.txt").write_text("six\n")
    parse_policy(f"version: 1\npackages: {{similarity: {{list_files: {{pypi: {tmp_path}/good.txt}}}}}}\n")
