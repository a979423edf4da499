"""Packages as values: ecosystems, names, versions, what a call asks for, and what a registry says of a file. Pure.

Owns: the one normaliser of package names and versions, for policy text, calls and registry traffic alike. A name that
went round it can't be compared: every function here takes parsed values. Must not: judge, read a file, or ask a clock.

Names are ASCII. PyPI's are compared in their PEP 503 form; npm's are taken as written, and folded only where a policy
looks for what is meant (`PackageName.folded`). Versions are compared as PEP 440 and SemVer 2 say, never as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from urllib.parse import quote

import semver
from packaging.version import InvalidVersion as NotPep440
from packaging.version import Version as Pep440

MAX_NAME = 214  # npm's own bound; PyPI's names are shorter
MAX_VERSION = 128  # longer than any that a registry has; bounds what comparing may cost
_MAX_NUMBER = 2**53 - 1  # npm refuses larger numbers in a version: JavaScript can't tell them apart


class Ecosystem(StrEnum):
    """A package registry's world; the values are purl types."""

    PYPI = "pypi"
    NPM = "npm"

    @classmethod
    def of_language(cls, language: str) -> Ecosystem:
        """The ecosystem of a call's language. Raises `ValueError` for a language without one."""
        match language:
            case "python":
                return cls.PYPI
            case "javascript":
                return cls.NPM
        raise ValueError(f"`{language[:40]}` has no packages")

    @property
    def language(self) -> str:
        return "python" if self is Ecosystem.PYPI else "javascript"

    @property
    def language_name(self) -> str:
        """As people write it."""
        return "Python" if self is Ecosystem.PYPI else "JavaScript"


class InvalidName(ValueError):
    """The text is no package name. The message says why."""


class InvalidVersion(ValueError):
    """The text is no version. The message says why."""


@dataclass(frozen=True, slots=True)
class PackageName:
    """A name in its canonical form. `display` is how it was written, and plays no part in comparisons."""

    ecosystem: Ecosystem
    normal: str
    display: str = field(compare=False)

    def __str__(self) -> str:
        return self.normal

    @property
    def folded(self) -> str:
        """For deny lists, prefixes and similarity: npm has `JSONStream` and `jsonstream`, and people mean either."""
        return self.normal.lower()

    @property
    def scope(self) -> str | None:
        """`@scope` of an npm name that has one."""
        return self.normal.partition("/")[0] if self.normal.startswith("@") else None


# PEP 508's names, and what npm allows of old packages less the marks that mean something to a shell or a URL. A leading
# dash, dot or underscore is refused: to an installer these are options, paths and internals.
_PYPI_NAME = re.compile(r"[A-Z0-9](?:[A-Z0-9._-]*[A-Z0-9])?", re.IGNORECASE | re.ASCII)
_NPM_PART = re.compile(r"[a-z0-9][a-z0-9._-]*", re.IGNORECASE | re.ASCII)
_SEPARATORS = re.compile(r"[-_.]+")
NPM_RESERVED = frozenset({"node_modules", "favicon.ico"})


def parse_name(ecosystem: Ecosystem, text: str) -> PackageName:
    """A package name as its registry has it. Raises `InvalidName`."""
    if not text.isascii():
        raise InvalidName("it has characters that are not ASCII")
    if not 1 <= len(text) <= MAX_NAME:
        raise InvalidName("it is empty" if not text else f"it is longer than {MAX_NAME} characters")
    if ecosystem is Ecosystem.PYPI:
        if _PYPI_NAME.fullmatch(text) is None:
            raise InvalidName(
                "a name is of letters, digits, `-`, `_` and `.`, and begins and ends with a letter or digit"
            )
        return PackageName(ecosystem, _SEPARATORS.sub("-", text).lower(), text)
    scope, slash, base = text.rpartition("/")
    if slash and (not scope.startswith("@") or _NPM_PART.fullmatch(scope[1:]) is None):
        raise InvalidName("before the `/` stands no scope: a scope is `@` and a name")
    if _NPM_PART.fullmatch(base) is None:
        raise InvalidName("a name is of letters, digits, `-`, `_` and `.`, and begins with a letter or digit")
    if base.lower() in NPM_RESERVED:
        raise InvalidName(f"`{base}` is reserved")
    return PackageName(ecosystem, text, text)


type _Key = Pep440 | semver.Version


@dataclass(frozen=True, slots=True, eq=False)
class PackageVersion:
    """A version. Equality and order are the ecosystem's: `1.0` is `1.0.0` on PyPI; npm's build metadata is dropped.

    `text` is a canonical spelling of it. Versions of different ecosystems are never equal and have no order.
    """

    ecosystem: Ecosystem
    text: str
    key: _Key

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackageVersion):
            return NotImplemented
        return self.ecosystem is other.ecosystem and self.key == other.key

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, PackageVersion) or self.ecosystem is not other.ecosystem:
            return NotImplemented
        return bool(self.key < other.key)  # type: ignore[operator]  # the ecosystem says that both are of one kind

    def __le__(self, other: object) -> bool:
        if not isinstance(other, PackageVersion) or self.ecosystem is not other.ecosystem:
            return NotImplemented
        return bool(self.key <= other.key)  # type: ignore[operator]  # as above

    def __gt__(self, other: object) -> bool:
        if not isinstance(other, PackageVersion) or self.ecosystem is not other.ecosystem:
            return NotImplemented
        return bool(self.key > other.key)  # type: ignore[operator]  # as above

    def __ge__(self, other: object) -> bool:
        if not isinstance(other, PackageVersion) or self.ecosystem is not other.ecosystem:
            return NotImplemented
        return bool(self.key >= other.key)  # type: ignore[operator]  # as above

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def is_prerelease(self) -> bool:
        return self.key.is_prerelease if isinstance(self.key, Pep440) else self.key.prerelease is not None

    @property
    def local(self) -> str | None:
        """PEP 440's local part, `cpu` in `2.1+cpu`: somebody's own build of a public version."""
        return self.key.local if isinstance(self.key, Pep440) else None

    @property
    def public(self) -> PackageVersion:
        """Without the local part. What is said of a version, in a policy or an advisory, is said of its builds too."""
        return parse_version(self.ecosystem, self.key.public) if isinstance(self.key, Pep440) and self.local else self

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers: `(1, 4)` of `1.4rc1`."""
        key = self.key
        return key.release if isinstance(key, Pep440) else (key.major, key.minor, key.patch)

    @property
    def epoch(self) -> int:
        """PEP 440's epoch; 0 elsewhere."""
        return self.key.epoch if isinstance(self.key, Pep440) else 0


def parse_version(ecosystem: Ecosystem, text: str) -> PackageVersion:
    """A whole version, as its registry would have it. Raises `InvalidVersion`."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidVersion("it has characters that no version has")
    if len(text) > MAX_VERSION:
        raise InvalidVersion(f"it is longer than {MAX_VERSION} characters")
    if ecosystem is Ecosystem.PYPI:
        try:
            key = Pep440(text)
        except NotPep440 as error:
            raise InvalidVersion("it is not a version by PEP 440, such as `1.4.2`") from error
        return PackageVersion(ecosystem, str(key), key)
    try:
        number = semver.Version.parse(text)
    except ValueError as error:
        raise InvalidVersion("it is not a version by SemVer, such as `1.4.2`") from error
    if max(number.major, number.minor, number.patch) > _MAX_NUMBER:
        raise InvalidVersion("one of its numbers is larger than npm allows")
    plain = number.replace(build=None)
    return PackageVersion(ecosystem, str(plain), plain)


def purl(name: PackageName, version: PackageVersion | None = None) -> str:
    """The package URL: `pkg:pypi/foo-bar@1.2.3`, `pkg:npm/%40scope/name@1.2.3`."""
    path = "/".join(quote(part, safe="") for part in name.normal.split("/"))
    return f"pkg:{name.ecosystem}/{path}" + (f"@{quote(version.text, safe='')}" if version is not None else "")


# What a call asks for


class SelectorKind(StrEnum):
    ANY = "any"  # whichever the resolver takes
    EXACT = "exact"
    PREFIX = "prefix"  # `2.*`, `4.x`: any whose numbers begin so
    TAG = "tag"  # npm's names for versions: `latest`, `next`


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """Which versions are asked for. `text` is canonical: `1.0`, `2.*`, `4`, `latest`, or empty for any.

    Exact ones are equal where their versions are: `1.0` and `1.0.0` ask for the same.
    """

    kind: SelectorKind
    text: str = ""
    version: PackageVersion | None = None  # of an exact one

    def __str__(self) -> str:
        return f"{self.kind}:{self.text}" if self.text else str(self.kind)

    @property
    def _meaning(self) -> tuple[SelectorKind, PackageVersion | str]:
        return self.kind, self.version if self.version is not None else self.text

    def __eq__(self, other: object) -> bool:
        return self._meaning == other._meaning if isinstance(other, Selector) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._meaning)


@dataclass(frozen=True, slots=True)
class Specifier:
    """One package that a call asks for. `sandbox.packages.specifiers` reads it from text, and writes it again."""

    name: PackageName
    selector: Selector
    extras: tuple[str, ...] = ()  # PEP 503 forms, sorted


# What a registry says


class FileKind(StrEnum):
    WHEEL = "wheel"
    SDIST = "sdist"
    TARBALL = "tarball"  # npm's one kind
    OTHER = "other"  # eggs, installers, and what can't be told


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the registry says of one file of one version, unfiltered. For npm, a version has one file.

    None: the registry doesn't say. `deprecated` is the text of an npm deprecation. `quarantined`: the registry has
    taken the project out of use.

    Of PyPI's files each has a time of its own: a file added late to an old release is as new as it is. `released_at`
    is the time of the first file of its version.
    """

    name: PackageName
    version: PackageVersion
    filename: str
    kind: FileKind
    uploaded_at: datetime | None = None
    yanked: bool = False
    yanked_reason: str | None = None
    deprecated: str | None = None
    has_install_script: bool | None = None
    hashes: Mapping[str, str] = field(default_factory=dict, hash=False)
    size_bytes: int | None = None
    quarantined: bool = False
    released_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """What the registry says of a project. `first_published` is the earliest time of any version; None: not known."""

    name: PackageName
    first_published: datetime | None = None
    quarantined: bool = False


def wheel_or_sdist(filename: str) -> FileKind:
    """The kind of a file on PyPI, by its name."""
    lower = filename.lower()
    if lower.endswith(".whl"):
        return FileKind.WHEEL
    return FileKind.SDIST if lower.endswith((".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz")) else FileKind.OTHER
