"""What a registry's page is read as, and how it is written again without what a policy forbids."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.packages.filtering import HTML_INDEX, JSON_INDEX, FilteredPage, filter_page
from proxy.packages.judge import PackageVerdict
from proxy.packages.model import Ecosystem, FileFacts, FileKind, parse_name
from proxy.packages.pages import InvalidPage, ProjectPage, read_document, read_page, read_time
from proxy.packages.reasons import PackageReason
from proxy.packages.requests import Registry, parse_base

PYPI = Registry(
    id="registries.python[0]", ecosystem=Ecosystem.PYPI, index=parse_base("https://index.test/simple/"),
    files=(parse_base("https://files.test/packages/"),),
)  # fmt: skip
NPM = Registry(id="registries.javascript[0]", ecosystem=Ecosystem.NPM, index=parse_base("https://npm.test/"))
FOO = parse_name(Ecosystem.PYPI, "foo")
NFOO = parse_name(Ecosystem.NPM, "foo")


def entry(version: str = "1.0", *, kind: str = "-py3-none-any.whl", **more: Any) -> dict[str, Any]:
    filename = f"foo-{version}{kind}"
    return {
        "filename": filename,
        "url": f"https://files.test/packages/{filename}",
        "hashes": {"sha256": "00"},
        "upload-time": "2020-01-02T03:04:05.600000Z",
        "size": 10,
        "yanked": False,
        **more,
    }


def index(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"meta": {"api-version": "1.4"}, "name": "foo", "files": list(entries), **more}


def manifest(version: str, **more: Any) -> dict[str, Any]:
    dist = {"tarball": f"https://npm.test/foo/-/foo-{version}.tgz", "integrity": "sha512-x", "shasum": "ab"}
    return {"name": "foo", "version": version, "dist": dist, **more}


def packument(*manifests: dict[str, Any], latest: str = "1.0.0", **more: Any) -> dict[str, Any]:
    times = {one["version"]: "2020-01-02T03:04:05.600Z" for one in manifests}
    return {
        "name": "foo",
        "dist-tags": {"latest": latest},
        "versions": {one["version"]: one for one in manifests},
        "time": {"created": "2019-01-01T00:00:00.000Z", "modified": "2020-06-01T00:00:00.000Z", **times},
        **more,
    }


def read(document: dict[str, Any]) -> ProjectPage:
    known = read_document(json.dumps(document).encode())
    return read_page(PYPI, FOO, known) if "files" in document else read_page(NPM, NFOO, known)


def facts(document: dict[str, Any]) -> list[FileFacts]:
    return [listed.facts for listed in read(document).files.values()]


def refusing(*versions: str) -> Any:
    def judge(file: FileFacts) -> PackageVerdict:
        if file.version.text in versions:
            return PackageVerdict(PackageReason.VERSION_DENIED, "rule", f"`{file.version}` is denied")
        return PackageVerdict(None, None, "allowed")

    return judge


def filtered(document: dict[str, Any], *versions: str, as_html: bool = False) -> FilteredPage:
    before = copy.deepcopy(document)
    page = filter_page(read(document), document, refusing(*versions), as_html=as_html)
    assert document == before
    return page


def shown(document: dict[str, Any], *versions: str) -> dict[str, Any]:
    written = json.loads(filtered(document, *versions).body)
    assert isinstance(written, dict)
    return written


# Reading


def test_an_index_page_says_what_pep_691_700_and_592_let_it_say() -> None:
    (one,) = facts(index(entry(yanked="broken")))
    assert (one.name, one.version.text, one.kind, one.size_bytes) == (FOO, "1.0", FileKind.WHEEL, 10)
    assert one.uploaded_at == datetime(2020, 1, 2, 3, 4, 5, 600000, UTC)
    assert (one.yanked, one.yanked_reason, one.hashes) == (True, "broken", {"sha256": "00"})
    assert facts(index(entry(yanked="")))[0].yanked
    assert facts(index(entry(yanked=True)))[0].yanked
    assert facts(index(entry(kind=".tar.gz")))[0].kind is FileKind.SDIST


def test_a_quarantined_project_is_one() -> None:
    page = read(index(entry(), **{"project-status": {"status": "quarantined"}}))
    assert page.package.quarantined
    assert all(one.facts.quarantined for one in page.files.values())
    assert not read(index(entry(), **{"project-status": {"status": "active"}})).package.quarantined


def test_a_project_is_as_old_as_its_first_file() -> None:
    page = read(index(entry("2.0"), entry("1.0", **{"upload-time": "2018-01-01T00:00:00Z"})))
    assert page.package.first_published == datetime(2018, 1, 1, tzinfo=UTC)
    assert read(index(entry() | {"upload-time": None})).package.first_published is None
    assert read(packument(manifest("1.0.0"))).package.first_published == datetime(2019, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "wrong",
    [
        {"filename": "bar-1.0-py3-none-any.whl", "url": "https://files.test/packages/bar-1.0-py3-none-any.whl"},
        {"filename": "foo-1.0.exe", "url": "https://files.test/packages/foo-1.0.exe"},
        {"filename": None}, {"url": None}, {"url": 5},
        {"url": "https://files.test/packages/other-1.0-py3-none-any.whl"},
        {"url": "https://rogue.test/packages/foo-1.0-py3-none-any.whl"},
        {"url": "https://files.test/elsewhere/foo-1.0-py3-none-any.whl"},
        {"url": "http://files.test/packages/foo-1.0-py3-none-any.whl"},
        {"url": "https://files.test/packages/foo-1.0-py3-none-any.whl?x=y"},
        {"url": "https://files.test/packages/../foo-1.0-py3-none-any.whl"},
    ],
)  # fmt: skip
def test_a_file_that_is_not_the_projects_or_not_at_the_registry_is_left_out(wrong: dict[str, Any]) -> None:
    """One such entry does not take the page with it."""
    page = read(index(entry() | wrong, entry("2.0")))
    assert [one.facts.version.text for one in page.files.values()] == ["2.0"]
    assert page.unreadable == 1


def test_a_files_release_is_as_old_as_its_first_file() -> None:
    """A file that is added late is told from one that came with its release."""
    late = entry("1.0", kind="-cp313-cp313-win_amd64.whl", **{"upload-time": "2024-01-01T00:00:00Z"})
    early, _, other = facts(index(entry("1.0"), late, entry("2.0") | {"upload-time": None}))
    assert [one.released_at for one in facts(index(late, entry("1.0")))] == [early.uploaded_at] * 2
    assert other.released_at is None


@pytest.mark.parametrize("size", [-1, -(10**18), 10**30, 1.5, "1", True, None])
def test_what_is_no_size_is_none_and_reaches_no_client(size: object) -> None:
    """The fault: uv refuses a whole page for one negative size, and that was told as a conflict of versions."""
    document = index(entry("1.0", size=size))
    assert facts(document)[0].size_bytes is None
    assert "size" not in shown(document)["files"][0]
    assert shown(index(entry("1.0", size=0)))["files"][0]["size"] == 0


def test_half_a_character_is_replaced_wherever_a_publisher_writes_one() -> None:
    """The fault: a manifest with such a text could not be written, and uv could not read such a page."""
    spelled = r'"\ud800 and \ude00 but \ud83d\ude00"'
    good = "\ufffd and \ufffd but \U0001f600"
    for key, value in (("yanked", spelled), ("requires-python", spelled), ("hashes", f"{{{spelled}: {spelled}}}")):
        body = json.dumps(index(entry("1.0", **{key: "HERE"}))).replace('"HERE"', value).encode()
        document = read_document(body)
        assert document["files"][0][key] == ({good: good} if key == "hashes" else good)
        json.dumps(document, ensure_ascii=False).encode()
    halved = facts(index(entry("1.0", yanked="\ud800"))) + facts(packument(manifest("1.0.0", deprecated="\ud800")))
    assert [(one.yanked_reason, one.deprecated) for one in halved] == [("\ufffd", None), (None, "\ufffd")]
    raw = read_page(NPM, NFOO, packument(manifest("1.0.0", deprecated="\ud800")))  # read elsewhere, as a report has it
    assert [one.facts.deprecated for one in raw.files.values()] == ["\ufffd"]


def test_a_page_in_no_utf_8_is_refused() -> None:
    with pytest.raises(InvalidPage):
        read_document(b'{"name": "\xed\xa0\x80"}')


def test_of_two_files_of_one_name_the_first_stands() -> None:
    twice = index(entry(), entry(url="https://files.test/packages/b/foo-1.0-py3-none-any.whl"), 5)
    page = read(twice)
    assert [str(location) for location in page.files] == ["https://files.test/packages/foo-1.0-py3-none-any.whl"]
    assert page.unreadable == 2


def test_a_version_of_npm_says_when_how_and_with_which_scripts() -> None:
    document = packument(
        manifest("1.0.0", deprecated="old"),
        manifest("1.1.0", scripts={"postinstall": "x"}),
        manifest("1.2.0", hasInstallScript=True),
        manifest("1.3.0", gypfile=True),
        manifest("1.4.0", scripts={"test": "x", "install": ""}),
    )
    found = {one.version.text: one for one in facts(document)}
    assert found["1.0.0"].deprecated == "old"
    assert found["1.0.0"].uploaded_at == datetime(2020, 1, 2, 3, 4, 5, 600000, UTC)
    assert found["1.0.0"].hashes == {"integrity": "sha512-x", "sha1": "ab"}
    assert [one.has_install_script for one in found.values()] == [False, True, True, True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "bar"}, {"version": "1.0.1"}, {"dist": None}, {"dist": {}}, {"dist": {"tarball": 5}},
        {"dist": {"tarball": "https://npm.test/foo/-/foo-1.0.1.tgz"}},
        {"dist": {"tarball": "https://npm.test/bar/-/foo-1.0.0.tgz"}},
        {"dist": {"tarball": "https://rogue.test/foo-1.0.0.tgz"}},
        {"dist": {"tarball": "https://npm.test/foo/-/../-/foo-1.0.0.tgz"}},
    ],
)  # fmt: skip
def test_a_version_that_is_not_the_packages_or_not_in_npms_own_place_is_left_out(wrong: dict[str, Any]) -> None:
    page = read(
        packument(manifest("2.0.0")) | {"versions": {"1.0.0": manifest("1.0.0") | wrong, "2.0.0": manifest("2.0.0")}}
    )
    assert [one.facts.version.text for one in page.files.values()] == ["2.0.0"]
    assert page.unreadable == 1


def test_a_mirrors_tarballs_are_fetched_from_the_mirror_whatever_host_they_name() -> None:
    elsewhere = {"tarball": "http://original.test/foo/-/foo-1.0.0.tgz", "integrity": "sha512-x"}
    document = packument(manifest("1.0.0", dist=elsewhere))
    written = shown(document)["versions"]["1.0.0"]["dist"]
    assert written == {"tarball": "https://npm.test/foo/-/foo-1.0.0.tgz", "integrity": "sha512-x"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"<html>", b"{", b'{"name": NaN}', b"[" * 100_000, b"\xff",
        b'{"meta": {"api-version": "1.0"}, "name": "foo"}', b'{"meta": {"api-version": "2.0"}, "name": "foo", "files": []}',
        b'{"meta": {"api-version": "1.0"}, "name": "bar", "files": []}', b'{"name": "foo", "files": []}',
        b'{"meta": {"api-version": "1.0"}, "files": []}', b'{"meta": {"api-version": "1.0"}, "name": "foo", "files": {}}',
    ],
)  # fmt: skip
def test_what_is_no_page_of_the_project_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidPage):
        read_page(PYPI, FOO, read_document(body))


def test_a_packument_of_another_name_is_refused() -> None:
    documents: list[dict[str, Any]] = [packument() | {"name": "Foo"}, packument() | {"versions": []}, {"versions": {}}]
    for document in documents:
        with pytest.raises(InvalidPage):
            read_page(NPM, NFOO, document)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1970-01-01T00:00:01Z", 1), ("1970-01-01T00:00:01.5+00:00", 1.5), ("1970-01-01T01:00:01+01:00", 1), ("1970-01-01T00:00:01", 1)],
)  # fmt: skip
def test_a_time_is_read_with_its_zone(text: str, seconds: float) -> None:
    assert read_time(text) == datetime.fromtimestamp(seconds, UTC)


@pytest.mark.parametrize("value", [None, 5, "", "yesterday", "9999-12-31T23:59:59-14:00", "1" * 100])
def test_what_is_no_time_is_none(value: object) -> None:
    assert read_time(value) is None


# Writing


def test_a_forbidden_file_is_marked_as_yanked_with_the_reason() -> None:
    document = index(entry("1.0"), entry("2.0"), entry("3.0", yanked="by its publisher"))
    written = shown(document, "2.0")
    assert [one.get("yanked") for one in written["files"]] == [
        None, "sluicegate: version_denied: `2.0` is denied", "by its publisher",
    ]  # fmt: skip
    assert written["versions"] == ["1.0", "3.0"]
    page = filtered(document, "2.0")
    assert (page.content_type, page.kept, page.withheld) == (JSON_INDEX, 2, {"version_denied": 1})
    assert page.summary == "1 of 3 files is withheld: 1 version_denied"


def test_a_preparation_is_shown_a_forbidden_file_only_where_its_release_has_no_other() -> None:
    """The fault: uv took the better of two wheels, was refused it, and the other was never had."""
    old, better = entry("1.0"), entry("1.0", kind="-cp313-cp313-linux_x86_64.whl")
    document = index(old, better, entry("2.0"))

    def judge(file: FileFacts) -> PackageVerdict:
        verdict = refusing(file.version.text if file.version.text == "2.0" or "cp313" in file.filename else "")(file)
        assert isinstance(verdict, PackageVerdict)
        return verdict

    for only_choice, expected in ((True, ["1.0-py3", "2.0-py3"]), (False, ["1.0-py3", "1.0-cp313", "2.0-py3"])):
        page = filter_page(read(document), document, judge, only_choice=only_choice)
        names = [one["filename"].removeprefix("foo-") for one in json.loads(page.body)["files"]]
        assert ["-".join(name.split("-")[:2]) for name in names] == expected
        assert (page.kept, page.withheld) == (1, {"version_denied": 2})


def test_what_a_resolver_needs_of_an_index_stays_and_nothing_else() -> None:
    metadata = {"sha256": "11", "x": 5}
    written = shown(
        index(
            entry() | {"requires-python": ">=3.9", "core-metadata": metadata, "provenance": "https://rogue.test/",
                       "gpg-sig": True, "secret": "x"},
            entry("2.0") | {"dist-info-metadata": True, "requires-python": 5, "size": True},
            **{"alternate-locations": ["https://rogue.test/"], "tracks": ["https://rogue.test/"]},
        )
    )  # fmt: skip
    assert set(written) == {"meta", "name", "versions", "files"}
    first, second = written["files"]
    assert first == {
        "filename": "foo-1.0-py3-none-any.whl", "url": "https://files.test/packages/foo-1.0-py3-none-any.whl",
        "hashes": {"sha256": "00"}, "requires-python": ">=3.9", "size": 10,
        "upload-time": "2020-01-02T03:04:05.600000Z",
        "core-metadata": {"sha256": "11"}, "dist-info-metadata": {"sha256": "11"},
    }  # fmt: skip
    assert (second["core-metadata"], "requires-python" in second, "size" in second) == (True, False, False)
    assert "rogue" not in json.dumps(written)


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def test_html_says_the_same_and_can_not_be_broken_out_of() -> None:
    evil = '"><script>\u00e9'
    first = entry() | {"requires-python": evil, "core-metadata": True}
    document = index(first, entry("2.0"), entry("3.0", yanked=evil))
    page = filtered(document, "2.0", as_html=True)
    assert page.content_type == HTML_INDEX
    assert b"<script" not in page.body
    parser = _Anchors()
    parser.feed(page.body.decode("ascii"))
    one, two, three = parser.found
    assert one["href"] == "https://files.test/packages/foo-1.0-py3-none-any.whl#sha256=00"
    assert (one["data-requires-python"], one["data-core-metadata"]) == (evil, "true")
    assert "data-yanked" not in one
    assert two["data-yanked"] == "sluicegate: version_denied: `2.0` is denied"
    assert three["data-yanked"] == evil


@pytest.mark.parametrize(
    ("versions", "latest", "forbidden", "left"),
    [
        (["1.0.0", "1.1.0"], "1.1.0", ["1.1.0"], "1.0.0"),
        (["1.0.0", "1.9.0", "1.10.0"], "1.10.0", ["1.10.0"], "1.9.0"),
        (["1.0.0", "2.0.0-rc.1", "2.0.0"], "2.0.0", ["2.0.0"], "1.0.0"),
        (["1.0.0", "1.1.0", "2.0.0"], "1.1.0", ["1.1.0"], "1.0.0"),
        (["1.0.0", "2.0.0"], "1.0.0", ["1.0.0"], "2.0.0"),
        (["1.0.0-a.1", "1.0.0"], "1.0.0", ["1.0.0"], "1.0.0-a.1"),
        (["1.0.0", "1.1.0"], "1.0.0", ["1.1.0"], "1.0.0"),
        (["1.0.0"], "1.0.0", ["1.0.0"], "1.0.0"),
    ],
)
def test_latest_is_the_newest_allowed_version_that_its_publisher_would_have_had(
    versions: list[str], latest: str, forbidden: list[str], left: str
) -> None:
    """Not newer than what was the latest, if there is any such, nor a pre-release. With none left, the reason stands."""
    document = packument(*(manifest(version) for version in versions), latest=latest)
    written = shown(document, *forbidden)
    assert written["dist-tags"]["latest"] == left
    assert set(written["versions"]) == set(versions) - set(forbidden)
    assert set(written["policyRestrictions"]["versions"]) == set(forbidden)


def test_other_tags_of_forbidden_versions_stay_so_that_the_reason_is_shown() -> None:
    document = packument(manifest("1.0.0"), manifest("2.0.0"))
    document["dist-tags"] |= {"next": "2.0.0", "gone": "7.0.0", "odd": 5}
    written = shown(document, "2.0.0")
    assert written["dist-tags"] == {"latest": "1.0.0", "next": "2.0.0"}
    assert written["policyRestrictions"] == {
        "message": "sluicegate: version_denied: `2.0.0` is denied",
        "versions": {"2.0.0": {"name": "foo", "version": "2.0.0"}},
    }
    assert "policyRestrictions" not in shown(document)


def test_a_packument_keeps_what_installing_needs() -> None:
    about = {"dependencies": {"a": "^1"}, "bin": {"foo": "x"}, "engines": {"node": ">=1"}, "_hasShrinkwrap": True,
             "readme": "long"}  # fmt: skip
    written = shown(packument(manifest("1.0.0", **about), readme="long", _attachments={"a": 1}, extra="rogue"))
    kept = written["versions"]["1.0.0"]
    assert {key: kept[key] for key in about if key != "readme"} == {k: v for k, v in about.items() if k != "readme"}
    assert "long" not in json.dumps(written)
    assert "rogue" not in json.dumps(written)
    assert written["time"] == {
        "created": "2019-01-01T00:00:00.000Z", "modified": "2020-06-01T00:00:00.000Z",
        "1.0.0": "2020-01-02T03:04:05.600Z",
    }  # fmt: skip


def test_npms_message_speaks_of_the_newest_and_counts_the_rest() -> None:
    versions = [f"1.{number}.0" for number in range(30)]
    message = shown(packument(*map(manifest, versions)), *versions)["policyRestrictions"]["message"]
    assert re.findall(r"`(1\.\d+\.0)`", message) == versions[:-9:-1]
    assert message.endswith("and 22 more versions")


def test_the_validator_is_of_what_is_shown() -> None:
    """A change of the policy's answer is another page; a change that no client sees is none."""
    document = index(entry("1.0"), entry("2.0"))
    assert filtered(document).etag == filtered(index(*document["files"], **{"_last-serial": 5})).etag
    assert len({filtered(document).etag, filtered(document, "2.0").etag, filtered(document, as_html=True).etag}) == 3


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_ENTRY_KEYS = ["filename", "url", "hashes", "upload-time", "size", "yanked", "core-metadata", "requires-python"]
_MANIFEST_KEYS = ["name", "version", "dist", "scripts", "deprecated", "hasInstallScript", "gypfile"]


@settings(max_examples=200)
@given(
    changes=st.dictionaries(st.sampled_from(_ENTRY_KEYS), _JSON, max_size=3),
    top=st.dictionaries(
        st.sampled_from(["project-status", "versions", "meta", "alternate-locations"]), _JSON, max_size=2
    ),
    as_html=st.booleans(),
)
def test_no_index_page_makes_reading_or_writing_crash_and_only_allowed_files_are_unmarked(
    changes: dict[str, Any], top: dict[str, Any], as_html: bool
) -> None:
    document = index(entry() | changes, entry("2.0"), entry("3.0")) | top
    try:
        page = read(document)
    except InvalidPage:
        assert "meta" in top
        return
    assert page.unreadable + len(page.files) == 3
    body = filter_page(page, document, refusing("2.0"), as_html=as_html).body
    if not as_html:
        files = {one["filename"]: one for one in json.loads(body)["files"]}
        assert files["foo-2.0-py3-none-any.whl"]["yanked"].startswith("sluicegate: ")
        assert "yanked" not in files["foo-3.0-py3-none-any.whl"]


@settings(max_examples=200)
@given(
    changes=st.dictionaries(st.sampled_from(_MANIFEST_KEYS), _JSON, max_size=3),
    top=st.dictionaries(st.sampled_from(["time", "dist-tags", "readme", "policyRestrictions"]), _JSON, max_size=2),
)
def test_no_packument_makes_reading_or_writing_crash_and_no_forbidden_version_is_left(
    changes: dict[str, Any], top: dict[str, Any]
) -> None:
    document = packument(manifest("1.0.0"), manifest("2.0.0"), manifest("3.0.0")) | top
    document["versions"]["1.0.0"] = document["versions"]["1.0.0"] | changes
    page = read(document)
    assert page.unreadable + len(page.files) == 3
    written = json.loads(filter_page(page, document, refusing("2.0.0")).body)
    assert set(written["versions"]) - {"1.0.0"} == {"3.0.0"}
    assert set(written["policyRestrictions"]["versions"]) == {"2.0.0"}


def test_a_page_of_thousands_of_files_is_read_and_written_in_a_second() -> None:
    """As many as the largest have. Measured at a fifth of it; a square would take minutes."""
    start = datetime(2015, 1, 1, tzinfo=UTC)
    entries = [
        entry(f"{number // 20}.{number % 20}", kind=f"-cp3{python}-none-any.whl",
              **{"upload-time": (start + timedelta(hours=number)).isoformat()})
        for number in range(1000)
        for python in range(5)
    ]  # fmt: skip
    document = index(*entries)
    before = datetime.now(UTC)
    page = read(document)
    assert len(page.files) == 5000
    filter_page(page, document, refusing("1.0"))
    assert datetime.now(UTC) - before < timedelta(seconds=5)
