"""OSV documents say what they say, and where they are unclear they cover more."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.packages.advisories import Advisories, InvalidAdvisory, build, read_document
from proxy.packages.data_files import (
    InvalidData,
    load_advisories,
    load_policy_data,
    parse_list,
    read_list,
    shipped_list,
)
from proxy.packages.model import Ecosystem, parse_name, parse_version
from proxy.packages.policy import AdvisoriesPolicy, PackagePolicy, Similarity
from tests.unprivileged import unprivileged_command

ROOT = Path(__file__).parent.parent.parent

NOW = datetime(2026, 11, 29, tzinfo=UTC)
PYPI, NPM = Ecosystem.PYPI, Ecosystem.NPM


def document(identity: str = "GHSA-1", ecosystem: str = "PyPI", name: str = "six", **more: Any) -> dict[str, Any]:
    entry = {"package": {"ecosystem": ecosystem, "name": name}}
    entry |= {key: more.pop(key) for key in ("ranges", "versions") if key in more}
    return {"id": identity, "modified": "2026-11-01T00:00:00Z", "affected": [entry], **more}


def ranges(*events: dict[str, str], kind: str = "ECOSYSTEM") -> list[dict[str, Any]]:
    return [{"type": kind, "events": list(events)}]


def index(*documents: dict[str, Any]) -> Advisories:
    return build([read_document(one) for one in documents], NOW)


def covered(advisories: Advisories, *versions: str, ecosystem: Ecosystem = PYPI, name: str = "six") -> list[str]:
    found = parse_name(ecosystem, name)
    return [text for text in versions if advisories.covering(found, parse_version(ecosystem, text))]


VERSIONS = ("0.1", "1.0", "1.0.0", "1.4.9", "1.5", "2.0", "2.0.1", "3.0rc1", "3.0", "1!0.1")


@pytest.mark.parametrize(
    ("events", "inside"),
    [
        ([{"introduced": "0"}], VERSIONS),
        ([{"introduced": "0"}, {"fixed": "1.5"}], ("0.1", "1.0", "1.0.0", "1.4.9")),
        ([{"introduced": "1.0"}, {"last_affected": "1.5"}], ("1.0", "1.0.0", "1.4.9", "1.5")),
        ([{"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.0"}, {"fixed": "2.0.1"}], ("1.0", "1.0.0", "1.4.9", "2.0")),
        # in any order
        ([{"fixed": "2.0.1"}, {"introduced": "2.0"}], ("2.0",)),
        # an end that can't be read ends nothing, a beginning that can't be is the first version
        ([{"introduced": "1.0"}, {"fixed": "some day"}], ("1.0", "1.0.0", "1.4.9", "1.5", "2.0", "2.0.1", "3.0rc1", "3.0", "1!0.1")),
        ([{"introduced": "long ago"}, {"fixed": "1.0"}], ("0.1",)),
    ],
)  # fmt: skip
def test_a_range_covers_what_lies_between_its_events(events: list[dict[str, str]], inside: tuple[str, ...]) -> None:
    assert covered(index(document(ranges=ranges(*events))), *VERSIONS) == list(inside)


def test_npms_ranges_are_in_semvers_order() -> None:
    found = index(
        document(
            ecosystem="npm", name="lodash", ranges=ranges({"introduced": "0"}, {"fixed": "4.17.21"}, kind="SEMVER")
        )
    )
    versions = ("4.17.9", "4.17.20", "4.17.21-rc.1", "4.17.21", "10.0.0")
    assert covered(found, *versions, ecosystem=NPM, name="lodash") == ["4.17.9", "4.17.20", "4.17.21-rc.1"]


def test_listed_versions_are_covered_by_meaning_beside_the_ranges() -> None:
    found = index(document(versions=["2.0.0", "not one"], ranges=ranges({"introduced": "0"}, {"fixed": "1.0"})))
    assert covered(found, *VERSIONS) == ["0.1", "2.0"]


def test_a_name_is_found_in_every_spelling_and_another_ecosystems_is_not() -> None:
    found = index(document(name="Foo_Bar", ranges=ranges({"introduced": "0"})))
    assert covered(found, "1.0", name="foo.bar")
    assert not covered(found, "1.0.0", ecosystem=NPM, name="foo-bar")


@pytest.mark.parametrize(
    ("more", "ecosystem"),
    [
        ({"versions": ["1.0-bogus-x"]}, "PyPI"),
        ({"versions": [1.0, None]}, "PyPI"),
        ({"versions": "1.0"}, "PyPI"),
        ({"versions": ["1.x"]}, "npm"),
        ({"versions": ["1.x"], "ranges": ranges({"introduced": "0"}, kind="GIT")}, "npm"),
        ({"ranges": [{"type": "ECOSYSTEM", "events": {"introduced": "5"}}]}, "PyPI"),
        ({"ranges": [{"type": "ECOSYSTEM", "events": [{"limit": "5"}, 7]}]}, "PyPI"),
        ({"ranges": [{"type": "ECOSYSTEM"}]}, "PyPI"),
        ({"ranges": ["<5"]}, "PyPI"),
        ({"ranges": {"type": "SEMVER"}}, "npm"),
        ({"ranges": [{"type": "semver", "events": "all"}], "versions": ["0.1.0"]}, "npm"),
    ],
)
def test_an_entry_of_which_nothing_can_be_read_covers_everything(more: dict[str, Any], ecosystem: str) -> None:
    """The fault: it covered nothing, and the version that it meant was allowed."""
    found = index(document(ecosystem=ecosystem, **more))
    assert covered(found, "1.0.0", "99.0.0", ecosystem=PYPI if ecosystem == "PyPI" else NPM) == ["1.0.0", "99.0.0"]


def test_what_can_be_read_of_an_entry_is_not_widened_by_the_rest() -> None:
    assert covered(index(document(versions=["0.9", "2004-bogus-d"])), "0.9", "1.0") == ["0.9"]


@pytest.mark.parametrize("text", ["v1.0.0", "1.0.0"])
def test_npms_versions_are_read_as_tags_have_them(text: str) -> None:
    found = index(document(ecosystem="npm", versions=[text]))
    assert covered(found, "1.0.0", "1.0.1", ecosystem=NPM) == ["1.0.0"]


@pytest.mark.parametrize("kind", ["ecosystem", "Semver", "SEMVER"])
@pytest.mark.parametrize("ecosystem", ["pypi", "PYPI", "PyPI:extra"])
def test_case_of_an_ecosystem_and_of_a_ranges_type_does_not_matter(ecosystem: str, kind: str) -> None:
    """The fault: an advisory in another spelling covered nothing."""
    found = index(document(ecosystem=ecosystem, ranges=ranges({"introduced": "0"}, {"fixed": "1.0"}, kind=kind)))
    assert covered(found, "0.9", "1.0") == ["0.9"]


@pytest.mark.parametrize("withdrawn", ["2999-01-01T00:00:00Z", "soon", True])
def test_an_advisory_holds_until_it_is_withdrawn(withdrawn: object) -> None:
    """The fault: a time to come counted as one that has been."""
    assert covered(index(document("MAL-1", withdrawn=withdrawn)), "1.0") == ["1.0"]


def test_a_withdrawn_advisory_covers_nothing() -> None:
    assert covered(index(document("MAL-1", withdrawn="2026-01-01T00:00:00Z")), "1.0") == []


@pytest.mark.parametrize(
    "more",
    [
        {"identity": "MAL-2026-1"},
        {"identity": "GHSA-1", "aliases": ["MAL-2026-1"]},
        {"identity": "GHSA-1", "database_specific": {"cwe_ids": ["CWE-506"]}},
        {"identity": "GHSA-1", "database_specific": {"malicious-packages-origins": []}},
    ],
)
def test_malware_is_known_by_its_id_its_alias_or_its_weakness(more: dict[str, Any]) -> None:
    """Not every report of malware has an id that says so. Without versions it covers all."""
    (found,) = index(document(**more)).of(parse_name(PYPI, "six"))
    assert found.malicious
    assert found.everything


def test_ranges_of_commits_say_nothing_of_versions() -> None:
    assert covered(index(document(ranges=ranges({"introduced": "0"}, kind="GIT"))), "1.0") == []


@pytest.mark.parametrize(
    ("more", "score"),
    [
        ({"severity": [{"type": "CVSS_V3", "score": "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"}]}, 9.8),
        ({"severity": [{"type": "CVSS_V3", "score": "CVSS:3.0/AV:N/AC:L/PR:N/UI:N/S:C/C:H/I:H/A:H"}]}, 10.0),
        ({"severity": [{"type": "CVSS_V4", "score": "CVSS:4.0/AV:N/AC:L/AT:N/PR:N/UI:N/VC:H/VI:H/VA:H/SC:N/SI:N/SA:N"}]}, 9.3),
        ({"severity": [{"type": "CVSS_V2", "score": "AV:N/AC:L/Au:N/C:P/I:P/A:P"}]}, 7.5),
        ({"severity": [{"type": "CVSS_V3", "score": "nonsense"}], "database_specific": {"severity": "HIGH"}}, 7.0),
        ({"database_specific": {"severity": "moderate"}}, 4.0),
        ({}, None),
    ],
)  # fmt: skip
def test_the_score_is_that_of_the_vector_or_the_lowest_of_its_word(more: dict[str, Any], score: float | None) -> None:
    (found,) = index(document(ranges=ranges({"introduced": "0"}), **more)).of(parse_name(PYPI, "six"))
    assert found.score == score


def test_documents_of_one_flaw_share_the_score() -> None:
    found = index(
        document("PYSEC-1", aliases=["CVE-1"], ranges=ranges({"introduced": "0"})),
        document(
            "GHSA-1", aliases=["CVE-1"], ranges=ranges({"introduced": "0"}), database_specific={"severity": "CRITICAL"}
        ),
        document("PYSEC-2", ranges=ranges({"introduced": "0"})),
    )
    assert {one.id: one.score for one in found.of(parse_name(PYPI, "six"))} == {
        "PYSEC-1": 9.0,
        "GHSA-1": 9.0,
        "PYSEC-2": None,
    }


def test_the_age_is_that_of_the_newest_document_that_is_not_from_the_future() -> None:
    """One document with a date years ahead would keep the database young for ever."""
    found = index(
        document(),
        document("GHSA-2", modified="2026-11-28T00:00:00Z"),
        document("GHSA-3", modified="2099-01-01T00:00:00Z"),
    )
    assert found.newest == datetime(2026, 11, 28, tzinfo=UTC)
    assert index(document(modified="soon")).newest is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from(["PyPI", "npm", "six", "1.0", "0"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from("id affected package ecosystem name ranges type events introduced fixed versions severity score aliases database_specific cwe_ids withdrawn modified".split()),
        inner, max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


@settings(deadline=None)  # on a busy machine one example may wait
@given(JSON)
def test_any_json_is_a_document_or_is_refused(value: object) -> None:
    try:
        found = read_document(value)
    except InvalidAdvisory:
        return
    for name, report in found.reports:
        report.advisory(name.ecosystem).covers(parse_version(name.ecosystem, "1.0.0"))


# Files


def test_a_directory_of_files_and_archives_is_one_database(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.json").write_text(json.dumps(document("MAL-1", name="bad")))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("GHSA-2.json", json.dumps(document("GHSA-2", name="six", versions=["1.0"])))
        archive.writestr("README.md", "not one")
    found, digest = load_advisories(tmp_path, NOW)
    assert len(found) == 2
    assert covered(found, "1.0", "1.1") == ["1.0"]
    assert covered(found, "7", name="bad") == ["7"]
    assert load_advisories(tmp_path, NOW)[1] == digest
    (tmp_path / "deep" / "two.json").write_text(json.dumps(document("MAL-3", name="worse")))
    assert load_advisories(tmp_path, NOW)[1] != digest


def test_what_is_broken_in_a_database_refuses_it_with_every_fault(tmp_path: Path) -> None:
    """A document that can't be read may be the one about the package that is asked for."""
    (tmp_path / "good.json").write_text(json.dumps(document()))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "broken.zip").write_bytes(b"PK")
    with pytest.raises(InvalidData) as caught:
        load_advisories(tmp_path, NOW)
    assert {Path(problem.partition(": ")[0]).name for problem in caught.value.problems} == {
        "bad.json",
        "list.json",
        "deep.json",
        "broken.zip",
    }


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_database_that_is_not_there_refuses(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    policy = PackagePolicy(advisories=AdvisoriesPolicy(db_dir=tmp_path / name))
    with pytest.raises(InvalidData):
        load_policy_data(policy, NOW)


def test_no_part_of_a_database_is_passed_over(tmp_path: Path) -> None:
    """What lies behind a link is read; what cannot be reached makes the whole unreadable, since it may matter."""
    database, elsewhere = tmp_path / "osv", tmp_path / "elsewhere"
    for directory in (database / "npm", elsewhere):
        directory.mkdir(parents=True)
        (directory / "one.json").write_text(json.dumps(document(f"MAL-{directory.name}", name="bad")))
    assert len(load_advisories(database, NOW)[0]) == 1
    (database / "PyPI").symlink_to(elsewhere)
    assert len(load_advisories(database, NOW)[0]) == 2
    (database / "circle").symlink_to(database)
    assert len(load_advisories(database, NOW)[0]) == 2
    for name in ("gone.json", "gone"):
        (database / name).symlink_to("nowhere")
        with pytest.raises(InvalidData, match="cannot be read"):
            load_advisories(database, NOW)
        (database / name).unlink()


def test_a_directory_that_may_not_be_read_is_not_passed_over() -> None:
    """By a user who is not root, of whom no file is hidden."""
    with tempfile.TemporaryDirectory() as place, unprivileged_command() as prefix:
        for path in (Path(place), *(Path(place, name) for name in ("npm", "PyPI"))):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            (path / "one.json").write_text(json.dumps(document("MAL-1", name="bad")))
        code = f"from proxy.packages.data_files import *\nprint(len(load_advisories(Path({place!r}))[0]))"
        command = [*prefix, sys.executable, "-c", code]
        assert subprocess.run(command, stdout=-1, check=True, text=True, cwd=ROOT).stdout == "3\n", "the control"
        Path(place, "npm").chmod(0)
        done = subprocess.run(command, stderr=-1, text=True, check=False, cwd=ROOT)
        assert "npm: it cannot be read" in done.stderr


def test_a_list_of_names_is_read_with_its_header_and_its_faults_have_lines(tmp_path: Path) -> None:
    found = parse_list("# date: 2026-01\n# source: us\n\nFoo_Bar\nsix\r\nfoo-bar\n", PYPI, "names.txt")
    assert found.names == ("foo-bar", "six")
    assert found.header == {"date": "2026-01", "source": "us"}
    with pytest.raises(InvalidData) as caught:
        parse_list("six\n../x\na b\x1b\n", PYPI, "names.txt")
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["names.txt:2:", "names.txt:3:"]
    assert str(caught.value).replace("\n", "").isprintable()
    for text in ("", "# ecosystem: npm\nsix\n"):
        with pytest.raises(InvalidData):
            parse_list(text, PYPI, "names.txt")
    with pytest.raises(InvalidData, match="no such file"):
        read_list(tmp_path / "none.txt", PYPI)


def test_a_policys_own_list_takes_the_place_of_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("only-this\n")
    policy = PackagePolicy(similarity=Similarity(list_files={PYPI: tmp_path / "names.txt"}))
    data = load_policy_data(policy, NOW)
    assert data.popular[PYPI].names == ("only-this",)
    assert len(data.popular[NPM]) > 10_000
    assert data.digest != load_policy_data(PackagePolicy(), NOW).digest
    assert (
        load_policy_data(PackagePolicy(similarity=Similarity(list_files={PYPI: shipped_list(PYPI)})), NOW).digest
        == load_policy_data(PackagePolicy(), NOW).digest
    )
