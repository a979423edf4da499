"""The grammar of specifiers: every row of the table, and what holds for any text."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.packages.data_files import load_policy_data
from proxy.packages.model import Ecosystem, SelectorKind, Specifier
from proxy.packages.policy import Names, NamesPolicy, PackagePolicy
from proxy.packages.reasons import SyntaxDetail
from sandbox.packages.screening import screen
from sandbox.packages.specifiers import SyntaxFault, installer_argument, parse_specifier, specifier_text

NOW = datetime(2026, 11, 29, tzinfo=UTC)
POLICY = PackagePolicy(
    prepare=True,
    names=NamesPolicy(
        deny=Names(pypi=("denied",), npm=("left-pad",)), internal_prefixes=Names(pypi=("acme-",), npm=("@acme/",))
    ),
)
DATA = load_policy_data(POLICY, NOW)


def rows() -> list[list[str]]:
    """The table. `\\n` and `\\x00` in it stand for these characters."""
    lines = (Path(__file__).parent / "specifiers.tsv").read_text().splitlines()
    assert lines[0].split("\t")[0] == "input"
    found = [line.split("\t") for line in lines[1:]]
    return [[row[0].replace("\\n", "\n").replace("\\x00", "\x00"), *row[1:]] for row in found]


def test_the_table_is_there() -> None:
    assert len(rows()) == 65
    assert {len(row) for row in rows()} == {7}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[1]}-{row[0]!a}")
def test_every_row_of_the_table_holds(row: list[str]) -> None:
    text, language, valid, name, selector, outcome, argument = row
    ecosystem = Ecosystem.of_language(language)
    read = parse_specifier(ecosystem, text)
    screening = screen(POLICY, ecosystem, [text], NOW, DATA)
    if valid == "no":
        assert isinstance(read, SyntaxFault)
        assert [refusal.code for refusal in screening.refusals] == [outcome]
        return
    assert isinstance(read, Specifier)
    assert read.name.normal == name
    assert str(read.selector) == selector
    assert installer_argument(read) == argument
    if outcome.startswith("allow"):
        assert screening.ok
        assert screening.allowed == (read,)
    else:
        assert [refusal.code for refusal in screening.refusals] == [outcome]
        assert screening.allowed == ()


# One for each detail that the table has no row for, and forms that installers take.
REFUSED = [
    (Ecosystem.PYPI, "requests==1;x", SyntaxDetail.ENVIRONMENT_MARKER),
    (Ecosystem.PYPI, "requests===1.0", SyntaxDetail.ARBITRARY_EQUALITY),
    (Ecosystem.PYPI, "requests==latest", SyntaxDetail.BAD_VERSION),
    (Ecosystem.PYPI, "requests==1.0.*.*", SyntaxDetail.BAD_VERSION),
    (Ecosystem.PYPI, "requests==1.0==2.0", SyntaxDetail.BAD_VERSION),
    (Ecosystem.PYPI, "requests~=1.0", SyntaxDetail.RANGE_OPERATOR),
    (Ecosystem.PYPI, "requests==1.0,!=1.1", SyntaxDetail.RANGE_OPERATOR),
    (Ecosystem.PYPI, "six@file:///etc/passwd", SyntaxDetail.URL_OR_PROTOCOL),
    (Ecosystem.PYPI, "uvicorn[]==1.0", SyntaxDetail.MALFORMED),
    (Ecosystem.PYPI, "uvicorn[a]b==1.0", SyntaxDetail.MALFORMED),
    (Ecosystem.PYPI, "uvicorn[-e]==1.0", SyntaxDetail.MALFORMED),
    (Ecosystem.PYPI, "_x==1.0", SyntaxDetail.MALFORMED),
    (Ecosystem.PYPI, f"a=={'1' * 300}", SyntaxDetail.LENGTH),
    (Ecosystem.PYPI, f"a=={'1' * 150}", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@~4.17", SyntaxDetail.RANGE_OPERATOR),
    (Ecosystem.NPM, "lodash@=4.17.21", SyntaxDetail.RANGE_OPERATOR),
    (Ecosystem.NPM, "lodash@1||2", SyntaxDetail.RANGE_OPERATOR),
    (Ecosystem.NPM, "lodash@v4.17.21", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@04.1.0", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@1.2.3.4", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@4.x.x.x", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@x.x", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@99999999999999999999.0.0", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash@a@b", SyntaxDetail.BAD_VERSION),
    (Ecosystem.NPM, "lodash", SyntaxDetail.NO_VERSION_DELIMITER),
    (Ecosystem.NPM, "@scope/name", SyntaxDetail.NO_VERSION_DELIMITER),
    (Ecosystem.NPM, "@scope/favicon.ico@1.0.0", SyntaxDetail.RESERVED_NAME),
    (Ecosystem.NPM, "@a/b/c@1.0.0", SyntaxDetail.PATH_LIKE),
    (Ecosystem.NPM, "~x@1.0.0", SyntaxDetail.PATH_LIKE),
    (Ecosystem.NPM, "..\\x@1.0.0", SyntaxDetail.PATH_LIKE),
    (Ecosystem.NPM, "lodash@4.17.21\u2028", SyntaxDetail.NON_ASCII),
]


@pytest.mark.parametrize(("ecosystem", "text", "detail"), REFUSED)
def test_what_installers_would_take_is_refused_with_its_own_detail(
    ecosystem: Ecosystem, text: str, detail: SyntaxDetail
) -> None:
    read = parse_specifier(ecosystem, text)
    assert isinstance(read, SyntaxFault)
    assert read.detail is detail


def test_every_detail_can_be_met() -> None:
    """The table and the rows above, together."""
    met: set[str] = {detail for _, _, detail in REFUSED} | {
        row[5].partition("/")[2] for row in rows() if row[2] == "no"
    }
    assert met == set(SyntaxDetail)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    read = parse_specifier(Ecosystem.PYPI, "-r ../x>=1; é")
    assert isinstance(read, SyntaxFault)
    assert set(read.details) >= {
        SyntaxDetail.NON_ASCII, SyntaxDetail.WHITESPACE, SyntaxDetail.OPTION_LIKE, SyntaxDetail.PATH_LIKE,
        SyntaxDetail.ENVIRONMENT_MARKER, SyntaxDetail.RANGE_OPERATOR,
    }  # fmt: skip
    both = parse_specifier(Ecosystem.NPM, "_x@1.2.3.4")
    assert isinstance(both, SyntaxFault)
    assert both.details == (SyntaxDetail.BAD_VERSION, SyntaxDetail.MALFORMED)


@pytest.mark.parametrize(
    ("ecosystem", "text", "hint"),
    [
        (Ecosystem.PYPI, "requests>=2.0", "write `requests==1.2.3`, or `requests==` for any version"),
        (Ecosystem.PYPI, "requests", "write `requests==1.2.3`, or `requests==` for any version"),
        (Ecosystem.NPM, "@scope/name@^1.0.0", "write `@scope/name@1.2.3`, or `@scope/name@` for any version"),
        (Ecosystem.NPM, "github:user/repo", "write `name@1.2.3`, or `name@` for any version"),
    ],
)
def test_the_hint_says_the_form_to_write(ecosystem: Ecosystem, text: str, hint: str) -> None:
    read = parse_specifier(ecosystem, text)
    assert isinstance(read, SyntaxFault)
    assert read.hint == hint


ECOSYSTEMS = st.sampled_from(list(Ecosystem))
# Texts near the grammar as well as far from it: most random text never reaches the version.
PIECES = st.lists(
    st.sampled_from(
        ["requests", "lodash", "@", "@scope/", "==", "=", "1.0", "4.17.21", "2.*", "4.x", "*", "latest", "[a]", ",", "-", "..",
         "/", ":", " ", "\n", "\u212a", "+l", "rc1", "-beta.1", "v", "1!", ";", "^", ">=", "%2f", "\x00", "[", "]"]
    ),
    max_size=8,
).map("".join)  # fmt: skip
TEXTS = st.one_of(PIECES, st.text(), st.text(alphabet="abzAZ019@/=[].-_+*!xX,", max_size=30))

PYPI_ARGUMENT = re.compile(
    r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\[[a-z0-9-]+(?:,[a-z0-9-]+)*\])?(?:==[0-9][a-z0-9.!+]*(?:\.\*)?)?", re.ASCII
)
NPM_ARGUMENT = re.compile(
    r"(?:@[A-Za-z0-9._-]+/)?[A-Za-z0-9][A-Za-z0-9._-]*@(?:\*|[A-Za-z0-9][A-Za-z0-9.-]*[A-Za-z0-9-]|[A-Za-z0-9]|[A-Za-z][A-Za-z0-9._-]*)"
)


@settings(deadline=None)  # on a busy machine one example may wait
@given(ECOSYSTEMS, TEXTS)
@example(Ecosystem.PYPI, "requests==1!2.0rc1+local.1")
@example(Ecosystem.NPM, "@scope/name@1.0.0-rc.1+build")
@example(Ecosystem.NPM, "lodash@x")
def test_any_text_gives_a_specifier_or_a_fault_and_the_argument_is_plain(ecosystem: Ecosystem, text: str) -> None:
    """The installer's argument never has a space, a control character or a leading dash, whatever the call wrote."""
    read = parse_specifier(ecosystem, text)
    if isinstance(read, SyntaxFault):
        assert read.details
        assert read.message.isprintable()
        assert read.hint.isprintable()
        return
    argument = installer_argument(read)
    assert (PYPI_ARGUMENT if ecosystem is Ecosystem.PYPI else NPM_ARGUMENT).fullmatch(argument)
    assert argument.isascii()
    assert argument.isprintable()
    assert " " not in argument
    assert not argument.startswith("-")


@settings(deadline=None)  # on a busy machine one example may wait
@given(ECOSYSTEMS, TEXTS)
@example(Ecosystem.PYPI, "Foo_Bar[B,a]==v01.0")
@example(Ecosystem.NPM, "lodash@4.X")
def test_a_specifier_written_again_is_the_same(ecosystem: Ecosystem, text: str) -> None:
    read = parse_specifier(ecosystem, text)
    if isinstance(read, Specifier) and len(specifier_text(read)) >= 3:
        assert parse_specifier(ecosystem, specifier_text(read)) == read


VERSIONS = {
    Ecosystem.PYPI: st.from_regex(r"(1!)?(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3})){0,3}(a1|rc2|\.post3|\.dev4)?(\+abc\.1)?", fullmatch=True),
    Ecosystem.NPM: st.from_regex(r"(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3})){2}(-(alpha|rc\.1|0))?(\+b)?", fullmatch=True),
}  # fmt: skip
NAMES = st.from_regex(r"[a-z][a-z0-9]{1,10}(-[a-z0-9]{1,5})?", fullmatch=True)


@settings(deadline=None)  # on a busy machine one example may wait
@given(st.data(), ECOSYSTEMS)
def test_a_well_formed_specifier_is_read_as_what_it_says(data: st.DataObject, ecosystem: Ecosystem) -> None:
    name, version = data.draw(NAMES), data.draw(VERSIONS[ecosystem])
    delimiter = "==" if ecosystem is Ecosystem.PYPI else "@"
    read = parse_specifier(ecosystem, f"{name}{delimiter}{version}")
    assert isinstance(read, Specifier)
    assert read.name.normal == name
    assert read.selector.kind is SelectorKind.EXACT
    assert read.selector.version is not None
    assert installer_argument(read) == f"{name}{delimiter}{read.selector.version}"
