"""What a call writes for a package, read strictly, and the argument that an installer gets. Pure.

Owns: the grammar of each language, and `installer_argument`, which is made from the parsed value alone: no text of a
call's ever reaches an installer. Must not: say what a policy allows.

    Python      name[extras]==selector     selector: a version, `2.*`, `*` or nothing
    JavaScript  name@selector              selector: a version, `4`, `4.x`, a tag, `*` or nothing
                @scope/name@selector

Everything else that installers take (ranges, addresses, paths, options, markers, aliases) is refused, each with its own
detail and the form to write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.events import clean_text
from proxy.packages.model import (
    NPM_RESERVED,
    Ecosystem,
    InvalidName,
    InvalidVersion,
    PackageName,
    Selector,
    SelectorKind,
    Specifier,
    parse_name,
    parse_version,
)
from proxy.packages.reasons import SyntaxDetail

__all__ = ["Selector", "SelectorKind", "Specifier", "SyntaxFault", "installer_argument", "parse_specifier"]

MIN_LENGTH = 3
MAX_LENGTH = 214


@dataclass(frozen=True, slots=True)
class SyntaxFault:
    """A specifier that is none. `details` has all that is wrong with it, what matters most first."""

    text: str
    details: tuple[SyntaxDetail, ...]
    message: str
    hint: str

    @property
    def detail(self) -> SyntaxDetail:
        return self.details[0]


def parse_specifier(ecosystem: Ecosystem, text: str) -> Specifier | SyntaxFault:
    """Read one specifier. Total: any text gives one or the other."""
    details = _faults_of_text(text) | (_python_faults(text) if ecosystem is Ecosystem.PYPI else _npm_faults(text))
    if not details:
        read = _read_python(text) if ecosystem is Ecosystem.PYPI else _read_npm(text)
        if isinstance(read, Specifier):
            return read
        details = read
    ordered = tuple(detail for detail in SyntaxDetail if detail in details)
    message = "; ".join(_MESSAGES[detail] for detail in ordered)
    return SyntaxFault(text, ordered, f"`{clean_text(text, 80)}`: {message}", _hint(ecosystem, text, ordered))


def installer_argument(specifier: Specifier) -> str:
    """What the ecosystem's installer is told, in the canonical form of what was asked."""
    name, selector = specifier.name.normal, specifier.selector
    if specifier.name.ecosystem is Ecosystem.NPM:
        return f"{name}@{selector.text or '*'}"
    extras = f"[{','.join(specifier.extras)}]" if specifier.extras else ""
    return f"{name}{extras}=={selector.text}" if selector.text else f"{name}{extras}"


def specifier_text(specifier: Specifier) -> str:
    """The specifier as a call would write it."""
    if specifier.name.ecosystem is Ecosystem.PYPI and specifier.selector.kind is SelectorKind.ANY:
        return f"{installer_argument(specifier)}=="
    return installer_argument(specifier)


# What is wrong with the text, whatever it was meant to be


def _faults_of_text(text: str) -> set[SyntaxDetail]:
    found = set()
    if not MIN_LENGTH <= len(text) <= MAX_LENGTH:
        found.add(SyntaxDetail.LENGTH)
    if not text.isascii():
        found.add(SyntaxDetail.NON_ASCII)
    if any(_is_control(c) for c in text):
        found.add(SyntaxDetail.CONTROL_CHARACTER)
    if any(c.isspace() and not _is_control(c) for c in text):
        found.add(SyntaxDetail.WHITESPACE)
    if text.lstrip().startswith("-"):
        found.add(SyntaxDetail.OPTION_LIKE)
    if ":" in text:
        found.add(SyntaxDetail.URL_OR_PROTOCOL)
    if text.startswith((".", "~", "/")) or "\\" in text:
        found.add(SyntaxDetail.PATH_LIKE)
    return found


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f"


def _python_faults(text: str) -> set[SyntaxDetail]:
    found = set()
    if "/" in text:
        found.add(SyntaxDetail.PATH_LIKE)
    if ";" in text:
        found.add(SyntaxDetail.ENVIRONMENT_MARKER)
    if "===" in text:
        found.add(SyntaxDetail.ARBITRARY_EQUALITY)
    if re.search(r"[<>,]|[~!]=", text.partition("]")[2] if "]" in text else text):
        found.add(SyntaxDetail.RANGE_OPERATOR)
    if "==" not in text and not found and ":" not in text:
        found.add(SyntaxDetail.NO_VERSION_DELIMITER)
    return found


def _npm_faults(text: str) -> set[SyntaxDetail]:
    found = set()
    name, delimiter, selector = _split_npm(text)
    if name.count("/") > (1 if name.startswith("@") else 0) or "/" in selector:
        found.add(SyntaxDetail.PATH_LIKE)
    if re.search(r"[\^~<>=|,]| - ", selector):
        found.add(SyntaxDetail.RANGE_OPERATOR)
    if not delimiter and not found and ":" not in text:
        found.add(SyntaxDetail.NO_VERSION_DELIMITER)
    return found


def _split_npm(text: str) -> tuple[str, str, str]:
    """Name, `@` if it is there, and selector. The `@` of a scope is no delimiter."""
    at = text.find("@", 1)
    return (text, "", "") if at < 0 else (text[:at], "@", text[at + 1 :])


# Python

_EXTRA = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_NAME_AND_EXTRAS = re.compile(rf"([^\[\]]*)(?:\[({_EXTRA}(?:,{_EXTRA})*)\])?", re.ASCII)
_PREFIX = re.compile(r"v?((?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*)\.\*", re.ASCII | re.IGNORECASE)


def _read_python(text: str) -> Specifier | set[SyntaxDetail]:
    left, _, right = text.partition("==")
    match = _NAME_AND_EXTRAS.fullmatch(left)
    name = SyntaxDetail.MALFORMED if match is None else _name(Ecosystem.PYPI, match[1])
    selector = _python_selector(right)
    if isinstance(name, PackageName) and isinstance(selector, Selector):
        assert match is not None
        written = match[2].split(",") if match[2] else []
        extras = sorted({parse_name(Ecosystem.PYPI, extra).normal for extra in written})
        return Specifier(name, selector, tuple(extras))
    return {part for part in (name, selector) if isinstance(part, SyntaxDetail)}


def _python_selector(text: str) -> Selector | SyntaxDetail:
    if text in ("", "*"):
        return Selector(SelectorKind.ANY)
    try:
        if (match := _PREFIX.fullmatch(text)) is not None:
            return Selector(SelectorKind.PREFIX, f"{parse_version(Ecosystem.PYPI, match[1])}.*")
        version = parse_version(Ecosystem.PYPI, text)
    except InvalidVersion:
        return SyntaxDetail.BAD_VERSION
    return Selector(SelectorKind.EXACT, version.text, version)


# JavaScript

_NUMBER = r"(?:0|[1-9][0-9]{0,15})"
_PARTIAL = re.compile(rf"({_NUMBER}(?:\.{_NUMBER})?)(?:\.[xX*]){{0,2}}", re.ASCII)
_TAG = re.compile(r"(?![xX](?:\.|$))(?![vV][0-9])[A-Za-z][A-Za-z0-9._-]*", re.ASCII)


def _read_npm(text: str) -> Specifier | set[SyntaxDetail]:
    left, _, right = _split_npm(text)
    name, selector = _name(Ecosystem.NPM, left), _npm_selector(right)
    if isinstance(name, PackageName) and isinstance(selector, Selector):
        return Specifier(name, selector)
    return {part for part in (name, selector) if isinstance(part, SyntaxDetail)}


def _npm_selector(text: str) -> Selector | SyntaxDetail:
    if text in ("", "*", "x", "X"):
        return Selector(SelectorKind.ANY)
    if (match := _PARTIAL.fullmatch(text)) is not None and text.count(".") <= 2:
        return Selector(SelectorKind.PREFIX, match[1])
    if text[0].isdigit():
        try:
            version = parse_version(Ecosystem.NPM, text)
        except InvalidVersion:
            return SyntaxDetail.BAD_VERSION
        return Selector(SelectorKind.EXACT, version.text, version)
    return Selector(SelectorKind.TAG, text) if _TAG.fullmatch(text) else SyntaxDetail.BAD_VERSION


def _name(ecosystem: Ecosystem, text: str) -> PackageName | SyntaxDetail:
    try:
        return parse_name(ecosystem, text)
    except InvalidName:
        reserved = ecosystem is Ecosystem.NPM and text.rpartition("/")[2].lower() in NPM_RESERVED
        return SyntaxDetail.RESERVED_NAME if reserved else SyntaxDetail.MALFORMED


# Words

_MESSAGES = {
    SyntaxDetail.LENGTH: f"a specifier has {MIN_LENGTH} to {MAX_LENGTH} characters",
    SyntaxDetail.CONTROL_CHARACTER: "it has a control character, such as a line's end",
    SyntaxDetail.NON_ASCII: "it has a character that is not ASCII, and may look like one that is",
    SyntaxDetail.WHITESPACE: "it has a space",
    SyntaxDetail.OPTION_LIKE: "it begins with a dash, as an installer's option does",
    SyntaxDetail.URL_OR_PROTOCOL: "it has an address or a protocol: packages come from the registry alone",
    SyntaxDetail.PATH_LIKE: "it has a path: packages come from the registry alone",
    SyntaxDetail.ENVIRONMENT_MARKER: "it has an environment marker",
    SyntaxDetail.ARBITRARY_EQUALITY: "`===` compares texts, not versions",
    SyntaxDetail.RANGE_OPERATOR: "it has a range of versions",
    SyntaxDetail.NO_VERSION_DELIMITER: "nothing stands between name and version",
    SyntaxDetail.BAD_VERSION: "what stands for the version is none",
    SyntaxDetail.RESERVED_NAME: "the name is one that npm keeps for itself",
    SyntaxDetail.MALFORMED: "the name is not one that the registry could have",
}


def _hint(ecosystem: Ecosystem, text: str, details: tuple[SyntaxDetail, ...]) -> str:
    """The form to write, with the call's own name in it where that is plain."""
    if ecosystem is Ecosystem.PYPI:
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}(?<![._-])", text, re.ASCII)
        name = "name" if match is None or _unclear(details) else match[0]
        return f"write `{name}==1.2.3`, or `{name}==` for any version"
    match = re.match(r"(?:@[A-Za-z0-9][A-Za-z0-9._-]{0,60}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,60}", text, re.ASCII)
    name = "name" if match is None or _unclear(details) else match[0]
    return f"write `{name}@1.2.3`, or `{name}@` for any version"


def _unclear(details: tuple[SyntaxDetail, ...]) -> bool:
    """Whether it can't be told what the name is."""
    return not {
        SyntaxDetail.LENGTH, SyntaxDetail.NON_ASCII, SyntaxDetail.URL_OR_PROTOCOL, SyntaxDetail.PATH_LIKE,
        SyntaxDetail.OPTION_LIKE, SyntaxDetail.RESERVED_NAME, SyntaxDetail.MALFORMED,
    }.isdisjoint(details)  # fmt: skip
