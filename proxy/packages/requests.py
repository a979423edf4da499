"""What a request to a package registry asks for: recognised from its method, host and raw path, or not at all. Pure.

Owns: where registries are, and the one grammar of their requests. Must not: judge, or know what a registry answers.

Recognised are reads of four things, each under a registry's own base address:

    index       GET <index>/<name>/                     Python: the files of a project
    packument   GET <index>/<name>, <index>/@scope%2fname   npm: all versions of a package
    artifact    GET <files>/…/<file>                    a wheel or source distribution; npm: <index>/<name>/-/<file>.tgz
    metadata    GET <files>/…/<file>.metadata           Python: a wheel's METADATA, PEP 658

Everything else is `Unknown`, and denied: publishing, search, listings, audits, a version's own document, queries. What
is recognised holds nothing of the client's own text but what the grammar has read, so that it can be written anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated
from urllib.parse import quote, unquote, urlsplit

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from proxy.destinations import Host, InvalidHost, Unparsed, parse_host, parse_port
from proxy.packages.model import (
    Ecosystem,
    FileKind,
    InvalidName,
    InvalidVersion,
    PackageName,
    PackageVersion,
    parse_name,
    parse_version,
    wheel_or_sdist,
)
from proxy.packages.policy import PackagePolicy

MAX_PATH = 2048  # the longest that a registry has is some 400 characters
MAX_FILENAME = 400
_DEFAULT_PORTS = {"https": 443, "http": 80}

# A path as a registry writes one: RFC 3986's unreserved characters, and those of versions and scopes, plain or escaped.
_PATH = re.compile(r"/(?:[A-Za-z0-9._~+@!/-]|%[0-9A-Fa-f]{2})*", re.ASCII)
_PLAIN_PATH = re.compile(r"(?:/(?!\.+(?:/|\Z))[A-Za-z0-9._~+@!-]+)*/?", re.ASCII)  # nothing to decode, no dot segment
_DECODED = re.compile(r"[A-Za-z0-9._~+@!-]+", re.ASCII)  # a segment, once it is decoded
_SCOPED = re.compile(r"(@[A-Za-z0-9._-]+)(?:/|%2[Ff])([^/%]+)", re.ASCII)
# name, version, build number, and the tags: which of them there are does not matter here
_WHEEL = re.compile(r"([^-]+)-([^-]+)(?:-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl", re.ASCII)
_METADATA = ".metadata"
_KEPT = "/@+!~"  # besides unreserved characters, written without an escape


class InvalidBase(ValueError):
    """The text is no registry's address. The message says why."""


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """Where a registry's paths begin: `https://host[:port]/path/`. `path` is raw, and ends in a slash."""

    scheme: str
    host: Host
    port: int
    path: str

    def __str__(self) -> str:
        name = f"[{self.host}]" if self.host.address is not None and self.host.address.version == 6 else str(self.host)
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{name}{port}{self.path}"


def parse_base(text: str) -> BaseUrl:
    """Read `https://host[:port]/path/`. Raises `InvalidBase`."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidBase("it is not a URL") from error
    if parts.scheme not in _DEFAULT_PORTS or parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidBase("it is not `https://host/path/`, without user, query and fragment")
    name, port = parts.netloc, _DEFAULT_PORTS[parts.scheme]
    if ":" in name and not name.endswith("]"):
        name, _, port_text = name.rpartition(":")
        given = parse_port(port_text)
        if given is None:
            raise InvalidBase("its port is not a number from 1 to 65535")
        port = given
    try:
        host = parse_host(name)
    except InvalidHost as error:
        raise InvalidBase(f"its host is not one: {error}") from error
    path = parts.path if parts.path.endswith("/") else parts.path + "/"
    if read_path(path[:-1] or "/") is None and path != "/":
        raise InvalidBase("its path has a segment that could be read in two ways")
    return BaseUrl(parts.scheme, host, port, path)


def _to_base(value: object) -> object:
    return parse_base(value) if isinstance(value, str) else value


BaseField = Annotated[BaseUrl, BeforeValidator(_to_base), PlainSerializer(str, return_type=str)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Registry(_Frozen):
    """One registry. `files`: where a Python index keeps its files, if that is not at the index's own host. npm's files
    are below its packuments.

    `id` is the place it was read from, such as `registries.python[0]`; it is what the log names.
    """

    id: str
    ecosystem: Ecosystem
    index: BaseField
    files: tuple[BaseField, ...] = ()

    @cached_property
    def bases(self) -> tuple[BaseUrl, ...]:
        """Below which its files lie. The page of a project says which of what lies there are the project's."""
        return (self.index,) if self.ecosystem is Ecosystem.NPM else (_root(self.index), *self.files)


class Purpose(StrEnum):
    ATTEMPT = "attempt"
    PREPARATION = "preparation"


class RegistryGrant(_Frozen):
    """Which registries an attempt reads, and what it may have of them."""

    registries: tuple[Registry, ...] = Field(min_length=1)
    policy: PackagePolicy
    purpose: Purpose = Purpose.ATTEMPT

    @cached_property
    def hosts(self) -> frozenset[Host]:
        # Also those at which nothing of the registry's is: there a request is unknown, and not somebody else's.
        return frozenset(base.host for one in self.registries for base in (one.index, *one.bases, *one.files))

    def covers(self, host: Host) -> bool:
        """Whether requests to the host are a registry's, whatever their port. Exactly the host: not what is below."""
        return host in self.hosts


class RequestKind(StrEnum):
    INDEX = "index"
    PACKUMENT = "packument"
    ARTIFACT = "artifact"
    METADATA = "metadata"

    @property
    def is_page(self) -> bool:
        """Whether it lists the files of a project, rather than being one."""
        return self in (RequestKind.INDEX, RequestKind.PACKUMENT)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a file is. `path` is decoded: `+` and `%2B` are one; so is what is compared."""

    scheme: str
    host: Host
    port: int
    path: str

    @property
    def target(self) -> str:
        """The path as it is sent: escaped in one way, whatever way it was written in."""
        return self.path if _PLAIN_PATH.fullmatch(self.path) is not None else quote(self.path, safe=_KEPT)

    def __str__(self) -> str:
        return str(BaseUrl(self.scheme, self.host, self.port, self.target))


@dataclass(frozen=True, slots=True)
class RegistryRequest:
    """A recognised request. `location` is where it is sent; `version` and `filename` are an artifact's.

    An artifact's `location` is the file's own, also where its metadata is asked for.
    """

    kind: RequestKind
    registry: Registry
    name: PackageName
    location: Location
    version: PackageVersion | None = None
    filename: str | None = None

    @property
    def target(self) -> str:
        return self.location.target + (_METADATA if self.kind is RequestKind.METADATA else "")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not a request that a registry client needs. `why` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What one HTTP request says, as far as it matters here. `target` is raw, with its query."""

    method: str
    host: Host | Unparsed
    port: int | None
    target: str
    tls: bool = True
    has_body: bool = False
    upgrade: bool = False


def recognise(registries: tuple[Registry, ...], asked: Asked) -> RegistryRequest | Unknown:
    """The one thing that a request can mean at these registries. Total: whatever it is not sure of is `Unknown`."""
    if asked.method not in ("GET", "HEAD"):
        return Unknown("packages are only read: nothing is published, searched or audited here")
    if asked.has_body or asked.upgrade:
        return Unknown("a read of a package has neither a body nor an upgrade")
    if isinstance(asked.host, Unparsed):
        return Unknown("the destination is not a host")
    target, question, _query = asked.target.partition("?")
    if question:
        return Unknown("registry requests have no query here")
    path = read_path(target)
    if path is None:
        return Unknown("the path could be read in two ways, or has a character that no registry's path has")
    scheme = "https" if asked.tls else "http"
    here = [one for one in registries if one.index.host == asked.host or asked.host in {b.host for b in one.bases}]
    for registry in here:
        if (found := _page(registry, scheme, asked.host, asked.port, target)) is not None:
            return found
    for registry in here:
        if (found := _file(registry, scheme, asked.host, asked.port, path, target)) is not None:
            return found
    return Unknown("it is none of: a project's page, a file of a release, a file's metadata")


def read_path(raw: str) -> str | None:
    """The path, percent-decoded once; None where two readers could differ.

    An encoded slash is one only between an npm scope and its name, where every client writes it so.
    """
    if len(raw) > MAX_PATH:
        return None
    if raw and _PLAIN_PATH.fullmatch(raw) is not None:
        return raw
    if _PATH.fullmatch(raw) is None:
        return None
    segments: list[str] = []
    *leading, last = raw[1:].split("/")
    for segment in (*leading, *([last] if last else [])):
        scoped = _SCOPED.fullmatch(segment)
        decoded = list(scoped.groups()) if scoped is not None else [unquote(segment, errors="replace")]
        if any(_DECODED.fullmatch(one) is None or not one.strip(".") for one in decoded):
            return None
        segments += decoded
    if not last:
        segments.append("")
    return "/" + "/".join(segments)


def page_location(registry: Registry, name: PackageName) -> Location:
    """Where a project's page is."""
    base = registry.index
    tail = f"{name.normal}/" if registry.ecosystem is Ecosystem.PYPI else name.normal
    return Location(base.scheme, base.host, base.port, unquote(base.path) + tail)


def page_target(registry: Registry, name: PackageName) -> str:
    """The page's path as it is sent. npm's clients and registries escape the slash of a scope."""
    target = page_location(registry, name).target
    return target if name.scope is None else target[: -len(name.normal)] + name.normal.replace("/", "%2f")


def tarball_location(registry: Registry, name: PackageName, filename: str) -> Location:
    """Where an npm package's file is, by npm's own convention."""
    base = registry.index
    return Location(base.scheme, base.host, base.port, f"{unquote(base.path)}{name.normal}/-/{filename}")


def read_filename(filename: str) -> tuple[PackageName, PackageVersion] | None:
    """Whose file it is, by the name of a wheel or a source distribution; None where that can't be told for certain."""
    if len(filename) > MAX_FILENAME or _DECODED.fullmatch(filename) is None:
        return None
    if (wheel := _WHEEL.fullmatch(filename)) is not None:
        return _read_identity(f"{wheel[1]}-{wheel[2]}-py3-none-any.whl")
    return _read_identity(filename) if wheel_or_sdist(filename) is FileKind.SDIST else None


@lru_cache(maxsize=4096)
def _read_identity(filename: str) -> tuple[PackageName, PackageVersion] | None:
    """A project has thousands of wheels, of a few versions."""
    try:
        if filename.endswith(".whl"):
            name, version = parse_wheel_filename(filename)[:2]
        else:
            name, version = parse_sdist_filename(filename)
        return parse_name(Ecosystem.PYPI, name), parse_version(Ecosystem.PYPI, str(version))
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidName, InvalidVersion):
        return None


def read_tarball(name: PackageName, filename: str) -> PackageVersion | None:
    """The version in `name-1.2.3.tgz`."""
    base = name.normal.rpartition("/")[2]
    if len(filename) > MAX_FILENAME or not (filename.startswith(f"{base}-") and filename.endswith(".tgz")):
        return None
    try:
        return parse_version(Ecosystem.NPM, filename[len(base) + 1 : -len(".tgz")])
    except InvalidVersion:
        return None


def locate(url: str, page: Location) -> Location | None:
    """The place that a file's URL on a page leads to, without its fragment; None where it is not plain to read."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url or len(url) > MAX_PATH:
        return None
    url = url.partition("#")[0]
    if "?" in url:
        return None
    if "://" not in url:
        if url.startswith("//"):
            return None
        return _relative(url, page)
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    base = _read_origin(f"{scheme.lower()}://{authority}/")
    decoded = read_path(slash + path)
    return None if decoded is None or base is None else Location(base.scheme, base.host, base.port, decoded)


@lru_cache(maxsize=256)
def _read_origin(text: str) -> BaseUrl | None:
    try:
        return parse_base(text)
    except InvalidBase:
        return None


def _relative(url: str, page: Location) -> Location | None:
    """RFC 3986 section 5.2.4, as far as mirrors use it: `../../files/x.whl`, `x.whl`, `/files/x.whl`."""
    if url.startswith("/"):
        path = url
    else:
        parts = page.target.split("/")[:-1]
        while url.startswith(("../", "./")):
            if url.startswith("../"):
                if len(parts) == 1:
                    return None
                parts.pop()
                url = url[1:]
            url = url[2:]
        path = "/".join([*parts, url])
    decoded = read_path(path)
    return None if decoded is None else Location(page.scheme, page.host, page.port, decoded)


def _root(base: BaseUrl) -> BaseUrl:
    return BaseUrl(base.scheme, base.host, base.port, "/")


def _is_at(base: BaseUrl, scheme: str, host: Host, port: int | None) -> bool:
    return (base.scheme, base.host, base.port) == (scheme, host, port)


def _page(registry: Registry, scheme: str, host: Host, port: int | None, raw: str) -> RegistryRequest | None:
    base = registry.index
    if not _is_at(base, scheme, host, port) or not raw.startswith(base.path):
        return None
    text = raw[len(base.path) :]
    if registry.ecosystem is Ecosystem.PYPI:
        kind, text = RequestKind.INDEX, text.removesuffix("/")
    else:
        kind = RequestKind.PACKUMENT
        if (scoped := _SCOPED.fullmatch(text)) is not None:
            text = "/".join(scoped.groups())
    try:
        name = parse_name(registry.ecosystem, text)
    except InvalidName:
        return None
    return RegistryRequest(kind, registry, name, page_location(registry, name))


def _file(registry: Registry, scheme: str, host: Host, port: int | None, path: str, raw: str) -> RegistryRequest | None:
    base = next((b for b in registry.bases if _is_at(b, scheme, host, port) and raw.startswith(b.path)), None)
    if base is None:
        return None
    if registry.ecosystem is Ecosystem.NPM:
        return _tarball(registry, path.removeprefix(unquote(base.path)))
    kind, filename = RequestKind.ARTIFACT, path.rpartition("/")[2]
    if filename.endswith(_METADATA):
        kind, filename, path = RequestKind.METADATA, filename[: -len(_METADATA)], path[: -len(_METADATA)]
    whose = read_filename(filename)
    if whose is None:
        return None
    return RegistryRequest(kind, registry, whose[0], Location(scheme, host, base.port, path), whose[1], filename)


def _tarball(registry: Registry, tail: str) -> RegistryRequest | None:
    name_text, dash, filename = tail.rpartition("/-/")
    try:
        name = parse_name(Ecosystem.NPM, name_text)
    except InvalidName:
        return None
    version = read_tarball(name, filename) if dash else None
    if version is None:
        return None
    location = tarball_location(registry, name, filename)
    return RegistryRequest(RequestKind.ARTIFACT, registry, name, location, version, filename)


__all__ = [
    "Asked",
    "BaseUrl",
    "InvalidBase",
    "Location",
    "Purpose",
    "Registry",
    "RegistryGrant",
    "RegistryRequest",
    "RequestKind",
    "Unknown",
    "locate",
    "page_location",
    "page_target",
    "parse_base",
    "read_filename",
    "read_path",
    "read_tarball",
    "recognise",
    "tarball_location",
]
