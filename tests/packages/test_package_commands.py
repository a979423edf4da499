"""`sluicegate packages check` says the verdicts, and `popular` makes a list that a policy can name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from proxy.packages.data_files import read_list
from proxy.packages.model import Ecosystem
from sandbox import cli


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\npackages: {prepare: true, max_specifiers: 4, names: {deny: {pypi: [denied]}}}\n")
    return path


def packages(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["packages", *map(str, words)])


def test_allowed_packages_exit_0(policy: Path) -> None:
    done = packages("check", "--language", "python", "--policy", policy, "requests==", "Six==1.16.0")
    assert (done.exit_code, done.stdout) == (0, "allowed  requests==\nallowed  six==1.16.0\n")


def test_refused_packages_exit_1_with_every_refusal(policy: Path) -> None:
    done = packages("check", "--language", "python", "--policy", policy, "denied==1", "requestss==2.0rc1", "six==")
    assert done.exit_code == 1
    assert done.stdout == (
        "allowed  six==\n"
        "refused  denied==1\n"
        "  `denied` is denied by the policy\n"
        "  reason name_denied, rule packages.names.deny.pypi[0]\n"
        "  hint: use another package: the operator means it\n"
        "refused  requestss==2.0rc1\n"
        "  `requestss` is little used and one letter away from `requests`\n"
        "  reason typosquat_suspect, rule packages.similarity\n"
        "  hint: write `requests`; if `requestss` is meant, the operator adds it to `packages.names.allow`\n"
        "refused  requestss==2.0rc1\n"
        "  `2.0rc1` of `requestss` is a pre-release\n"
        "  reason prerelease_denied, rule packages.selectors.prerelease\n"
        "  hint: write a final version\n"
    )


@pytest.mark.parametrize(
    "texts", [["requests"], ["six==1", "six==2"], ["six==", "a\x1b[31mb=="], ["denied==1", "x@file:/etc"]]
)
def test_what_is_no_specifier_exits_2_and_nothing_raw_is_printed(policy: Path, texts: list[str]) -> None:
    done = packages("check", "--language", "python", "--policy", policy, *texts)
    assert done.exit_code == 2
    assert done.stdout.replace("\n", "").isprintable()


def test_json_has_it_all(policy: Path) -> None:
    done = packages(
        "check", "--language", "javascript", "--policy", policy, "--json", "lodash@", "@scope/x@1.2.3", "loadsh@^1"
    )
    assert done.exit_code == 2
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    assert answer["allowed"] == [
        {"specifier": "lodash@*", "purl": "pkg:npm/lodash", "installer_argument": "lodash@*"},
        {"specifier": "@scope/x@1.2.3", "purl": "pkg:npm/%40scope/x@1.2.3", "installer_argument": "@scope/x@1.2.3"},
    ]
    (refusal,) = answer["refusals"]
    assert refusal["specifier"] == "loadsh@^1"
    assert (refusal["reason"], refusal["details"]) == ("specifier_syntax", ["range_operator"])
    assert refusal["hint"] == "write `loadsh@1.2.3`, or `loadsh@` for any version"


def test_packages_are_refused_where_the_policy_has_none(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("version: 1\n")
    done = packages("check", "--language", "python", "--policy", tmp_path / "none.yaml", "six==")
    assert done.exit_code == 1
    assert "packages_not_allowed, rule packages.prepare" in done.stdout


def test_too_many_are_refused_as_one_call(policy: Path) -> None:
    done = packages("check", "--language", "python", "--policy", policy, *(f"name{number}==" for number in range(5)))
    assert done.exit_code == 1
    assert "too_many_packages, rule packages.max_specifiers" in done.stdout


def test_a_specifier_that_is_written_twice_is_one(policy: Path) -> None:
    done = packages("check", "--language", "python", "--policy", policy, "Foo_Bar==1.0", "foo.bar==01.0")
    assert (done.exit_code, done.stdout) == (0, "allowed  foo-bar==1.0\n")


@pytest.mark.parametrize(
    "words", [["--language", "cobol", "six=="], ["--language", "python", "--policy", "/none.yaml", "six=="]]
)
def test_arguments_that_are_none_exit_2(words: list[str]) -> None:
    done = packages("check", *words)
    assert done.exit_code == 2
    assert "hint:" in done.stderr


def test_a_list_is_checked_and_put_where_a_policy_can_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "names").write_text("Requests\nsix\nrequests\n")
    done = packages("popular", tmp_path / "names", "--language", "python", "--source", "our mirror")
    target = tmp_path / "state" / "packages" / "popular-pypi.txt"
    assert done.exit_code == 0
    assert f"list_files: {{pypi: {target}}}" in done.stdout
    made = read_list(target, Ecosystem.PYPI)
    assert made.names == ("requests", "six")
    assert made.header["source"] == "our mirror"
    assert made.header["date"]
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_bad_list_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("six\n../x\n")
    (tmp_path / "out").write_text("before")
    done = packages("popular", tmp_path / "names", "--language", "python", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "names:2:" in done.stderr
    assert (tmp_path / "out").read_text() == "before"
