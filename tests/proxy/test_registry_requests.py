"""What a request to a registry is recognised as, and what is not: tables, and properties over any target."""

from __future__ import annotations

import string
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.destinations import Unparsed, parse_host
from proxy.packages.model import Ecosystem, parse_name
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import (
    Asked,
    InvalidBase,
    Location,
    Registry,
    RegistryGrant,
    RegistryRequest,
    RequestKind,
    Unknown,
    locate,
    page_location,
    page_target,
    parse_base,
    read_filename,
    read_path,
    recognise,
)


def registry(ecosystem: Ecosystem, index: str, *files: str) -> Registry:
    bases = tuple(parse_base(url) for url in files)
    return Registry(id=f"{ecosystem}[0]", ecosystem=ecosystem, index=parse_base(index), files=bases)


PYPI = registry(Ecosystem.PYPI, "https://index.test/simple/", "https://files.test/packages/")
NPM = registry(Ecosystem.NPM, "https://npm.test/")
MIRRORED = (
    registry(Ecosystem.PYPI, "https://mirror.test:8443/api/pypi/main/simple/"),
    registry(Ecosystem.NPM, "https://mirror.test:8443/api/npm/main/"),
)
ALL = (PYPI, NPM, *MIRRORED)


def ask(
    url: str, method: str = "GET", registries: tuple[Registry, ...] = ALL, **more: bool
) -> RegistryRequest | Unknown:
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    name, _, port = authority.partition(":")
    number = int(port or (443 if scheme == "https" else 80))
    return recognise(registries, Asked(method, parse_host(name), number, slash + path, scheme == "https", **more))


def said(found: RegistryRequest | Unknown) -> tuple[str, str, str | None, str] | None:
    if isinstance(found, Unknown):
        return None
    version = None if found.version is None else found.version.text
    return found.kind.value, found.name.normal, version, found.target


WHEEL = "https://files.test/packages/ab/cd/ef/Foo_Bar-1.0-py3-none-any.whl"
RECOGNISED = [
    ("https://index.test/simple/foo/", "index", "foo", None, "/simple/foo/"),
    ("https://index.test/simple/foo", "index", "foo", None, "/simple/foo/"),
    ("https://index.test/simple/Foo.Bar__baz/", "index", "foo-bar-baz", None, "/simple/foo-bar-baz/"),
    (WHEEL, "artifact", "foo-bar", "1.0", "/packages/ab/cd/ef/Foo_Bar-1.0-py3-none-any.whl"),
    (WHEEL + ".metadata", "metadata", "foo-bar", "1.0", "/packages/ab/cd/ef/Foo_Bar-1.0-py3-none-any.whl.metadata"),
    ("https://index.test/files/foo-2.0.tar.gz", "artifact", "foo", "2.0", "/files/foo-2.0.tar.gz"),
    ("https://files.test/packages/foo-1.0+cpu-py3-none-any.whl", "artifact", "foo", "1.0+cpu",
     "/packages/foo-1.0+cpu-py3-none-any.whl"),
    ("https://files.test/packages/foo-1.0%2Bcpu-py3-none-any.whl", "artifact", "foo", "1.0+cpu",
     "/packages/foo-1.0+cpu-py3-none-any.whl"),
    ("https://files.test/packages/%66oo-1.0-py3-none-any.whl", "artifact", "foo", "1.0",
     "/packages/foo-1.0-py3-none-any.whl"),
    ("https://npm.test/JSONStream", "packument", "JSONStream", None, "/JSONStream"),
    ("https://npm.test/npm", "packument", "npm", None, "/npm"),
    ("https://npm.test/@scope%2fname", "packument", "@scope/name", None, "/@scope/name"),
    ("https://npm.test/@scope%2Fname", "packument", "@scope/name", None, "/@scope/name"),
    ("https://npm.test/@scope/name", "packument", "@scope/name", None, "/@scope/name"),
    ("https://npm.test/foo/-/foo-1.2.3.tgz", "artifact", "foo", "1.2.3", "/foo/-/foo-1.2.3.tgz"),
    ("https://npm.test/foo/-/foo-1.2.3-rc.1%2Bb.tgz", "artifact", "foo", "1.2.3-rc.1", "/foo/-/foo-1.2.3-rc.1+b.tgz"),
    ("https://npm.test/@scope/name/-/name-1.0.0.tgz", "artifact", "@scope/name", "1.0.0", "/@scope/name/-/name-1.0.0.tgz"),
    ("https://npm.test/@scope%2fname/-/name-1.0.0.tgz", "artifact", "@scope/name", "1.0.0",
     "/@scope/name/-/name-1.0.0.tgz"),
    ("https://mirror.test:8443/api/pypi/main/simple/foo/", "index", "foo", None, "/api/pypi/main/simple/foo/"),
    ("https://mirror.test:8443/api/pypi/main/packages/a/foo-1.0.zip", "artifact", "foo", "1.0",
     "/api/pypi/main/packages/a/foo-1.0.zip"),
    ("https://mirror.test:8443/api/npm/main/foo", "packument", "foo", None, "/api/npm/main/foo"),
    ("https://mirror.test:8443/api/npm/main/foo/-/foo-1.0.0.tgz", "artifact", "foo", "1.0.0",
     "/api/npm/main/foo/-/foo-1.0.0.tgz"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "kind", "name", "version", "target"), RECOGNISED)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_clients_send_is_recognised(
    url: str, kind: str, name: str, version: str | None, target: str, method: str
) -> None:
    assert said(ask(url, method)) == (kind, name, version, target)


@pytest.mark.parametrize(
    "url",
    [
        "https://index.test/simple/", "https://index.test/simple", "https://index.test/", "https://index.test",
        "https://index.test/simple/foo/?x", "https://index.test/simple/foo?", "https://index.test/simple/foo/#x",
        "https://index.test/simple/foo//", "https://index.test//simple/foo/", "https://index.test/simple//foo/",
        "https://index.test/simple/foo/..", "https://index.test/simple/../simple/foo/", "https://index.test/simple/./foo/",
        "https://index.test/simple/f%6fo/", "https://index.test/simple/foo%2f", "https://index.test/simple/foo%2Fbar/",
        "https://index.test/simple/foo%00/", "https://index.test/simple/fo\u00f6/", "https://index.test/simple/foo%C3%B6/",
        "https://index.test/simple/-foo/", "https://index.test/simple/foo;x/", "https://index.test/simple/foo\\",
        "https://index.test/Simple/foo/", "https://index.test/pypi/foo/json", "https://index.test/simple/@a%2fb/",
        "https://index.test:8443/simple/foo/", "http://index.test/simple/foo/", "http://index.test:443/simple/foo/",
        "https://other.test/simple/foo/", "https://sub.index.test/simple/foo/", "https://files.test/simple/foo/",
        "https://files.test/packages/foo.whl", "https://files.test/packages/foo-1.0.egg",
        "https://files.test/packages/foo-1.0.exe", "https://files.test/packages/foo-1.0-py3-none-any.whl.asc",
        "https://files.test/packages/foo-1.0-py3-none-any.whl/", "https://files.test/other/foo-1.0.tar.gz",
        "https://files.test/packages/../other/foo-1.0.tar.gz", "https://files.test/packages/a%2ffoo-1.0.tar.gz",
        "https://files.test/packages/%2e%2e/foo-1.0.tar.gz", "https://files.test/packages/..%2ffoo-1.0.tar.gz",
        "https://files.test/packages/foo-not-a-version.tar.gz", "https://files.test/packages/foo-1.0.tar.gz.metadata.metadata",
        "https://files.test/packages/foo-1.0.tar%2egz%00", "https://files.test/packages/foo-1.0.tar.gz?x=y",
        "https://npm.test/", "https://npm.test/-/ping", "https://npm.test/-/v1/search", "https://npm.test/-/all",
        "https://npm.test/foo/1.0.0", "https://npm.test/foo/latest", "https://npm.test/foo/", "https://npm.test/@scope",
        "https://npm.test/@scope/name/1.0.0", "https://npm.test/foo%2fbar", "https://npm.test/@scope%252fname",
        "https://npm.test/%40scope%2fname", "https://npm.test/@scope%5cname", "https://npm.test/@a/b/c",
        "https://npm.test/foo/-/bar-1.0.0.tgz", "https://npm.test/foo/-/foo-latest.tgz", "https://npm.test/foo/-/foo-.tgz",
        "https://npm.test/foo/-/foo-1.0.tgz", "https://npm.test/foo/-/foo-1.0.0.tar.gz", "https://npm.test/foo/-/a/foo-1.0.0.tgz",
        "https://npm.test/@scope/name/-/@scope/name-1.0.0.tgz", "https://npm.test/-/foo-1.0.0.tgz",
        "https://npm.test/foo/-/../-/foo-1.0.0.tgz", "https://npm.test/@scope%2f..", "https://npm.test/.foo",
        "https://npm.test/node_modules", "https://npm.test/foo/-/foo-1.0.0.tgz?x", "https://npm.test/foo/-rev/1",
        "https://mirror.test:8443/simple/foo/", "https://mirror.test:8443/foo", "https://mirror.test/api/npm/main/foo",
        "https://mirror.test:8443/api/npm/main", "https://mirror.test:8443/api/npm/other/foo",
    ],
)  # fmt: skip
def test_nothing_else_is(url: str) -> None:
    assert said(ask(url)) is None


@pytest.mark.parametrize("url", ["https://index.test/simple/foo/", WHEEL, "https://npm.test/foo"])
def test_only_plain_reads_are(url: str) -> None:
    assert said(ask(url)) is not None
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "get", "", "HEAD "):
        assert isinstance(ask(url, method), Unknown)
    assert isinstance(ask(url, has_body=True), Unknown)
    assert isinstance(ask(url, upgrade=True), Unknown)
    assert isinstance(recognise(ALL, Asked("GET", Unparsed("x", "no host"), 443, "/simple/foo/")), Unknown)
    assert isinstance(ask(url, registries=()), Unknown)


def test_a_scoped_packument_is_sent_as_npm_sends_it() -> None:
    """Registries redirect other spellings, or don't know them."""
    for one, name, target in (
        (NPM, "@scope/name", "/@scope%2fname"),
        (NPM, "foo", "/foo"),
        (MIRRORED[1], "@scope/name", "/api/npm/main/@scope%2fname"),
        (PYPI, "Foo", "/simple/foo/"),
    ):
        assert page_target(one, parse_name(one.ecosystem, name)) == target


# Properties

_TARGETS = st.one_of(
    st.text(max_size=60).map(lambda text: "/" + text),
    st.lists(
        st.sampled_from(
            ["simple", "packages", "-", "..", ".", "", "@scope", "@scope%2fname", "foo", "%2e%2e", "foo-1.0.0.tgz",
             "foo-1.0.tar.gz", "foo-1.0-py3-none-any.whl", "foo-1.0%2Bx-py3-none-any.whl", "a%2fb", "foo.metadata",
             "f%6fo", "api", "npm", "pypi", "main", "?x", "%", "%zz", "\u212a"]
        ),
        max_size=7,
    ).map(lambda parts: "/" + "/".join(parts)),
    st.text(alphabet=string.ascii_letters + string.digits + "/-._@%+~!;?#\\", max_size=60).map(lambda text: "/" + text),
)  # fmt: skip
_PLACES = st.sampled_from([("index.test", 443), ("files.test", 443), ("npm.test", 443), ("mirror.test", 8443)])


@given(place=_PLACES, target=_TARGETS, method=st.sampled_from(["GET", "HEAD", "POST"]))
@example(place=("npm.test", 443), target="/@scope%2f..", method="GET")
def test_what_is_recognised_can_be_written_anew_and_is_then_the_same(
    place: tuple[str, int], target: str, method: str
) -> None:
    """No target crashes it. What is sent holds no part of the target that was not read, and reads as it did."""
    host = parse_host(place[0])
    found = recognise(ALL, Asked(method, host, place[1], target))
    if isinstance(found, Unknown):
        assert found.why
        return
    assert method != "POST"
    sent = page_target(found.registry, found.name) if found.kind.is_page else found.target
    again = recognise(ALL, Asked("GET", host, place[1], sent))
    assert again == found
    # one decoding, of characters that are of a path in one way only
    plain = unquote(sent)
    assert not set(plain) & set("%?#\\;")
    assert not {"..", "."} & set(plain.split("/"))
    assert "//" not in plain
    assert found.registry.index.host == host or host in {base.host for base in found.registry.bases}
    if not found.kind.is_page:
        assert found.filename is not None
        assert plain.removesuffix(".metadata").endswith("/" + found.filename)
        assert found.version is not None


@given(target=st.text(max_size=80), url=st.text(max_size=80))
def test_no_text_makes_reading_paths_files_and_addresses_crash(target: str, url: str) -> None:
    page = page_location(PYPI, parse_name(Ecosystem.PYPI, "foo"))
    assert read_path(target) is None or target.startswith("/")
    read_filename(target)
    for text in (url, "https://" + url, "https://files.test/" + url, "../" + url, "/" + url):
        found = locate(text, page)
        assert found is None or locate(str(found), page) == found
    try:
        base = parse_base(url)
    except InvalidBase:
        return
    assert parse_base(str(base)) == base


# Addresses of files on a page


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://files.test/packages/a/foo.whl#sha256=00", "https://files.test/packages/a/foo.whl"),
        ("https://files.test:443/packages/foo.whl", "https://files.test/packages/foo.whl"),
        ("HTTPS://FILES.test/packages/foo%2Bx.whl", "https://files.test/packages/foo+x.whl"),
        ("http://files.test/packages/foo.whl", "http://files.test/packages/foo.whl"),
        ("foo.whl", "https://index.test/simple/foo/foo.whl"),
        ("./foo.whl", "https://index.test/simple/foo/foo.whl"),
        ("../../packages/foo.whl#md5=1", "https://index.test/packages/foo.whl"),
        ("/packages/foo.whl", "https://index.test/packages/foo.whl"),
        ("../../../packages/foo.whl", None),
        ("//files.test/foo.whl", None),
        ("https://files.test/a/../foo.whl", None),
        ("https://files.test/foo.whl?token=1", None),
        ("https://user@files.test/foo.whl", None),
        ("https://files.test/a%2ffoo.whl", None),
        ("https://files.test//foo.whl", None),
        ("ftp://files.test/foo.whl", None),
        ("file:///etc/passwd", None),
        ("a/../foo.whl", None),
        ("foo .whl", None),
        ("https://files.test\\foo.whl", None),
        ("https://f\u0131les.test/foo.whl", None),
    ],
)
def test_a_files_address_is_read_in_one_way(url: str, place: str | None) -> None:
    found = locate(url, page_location(PYPI, parse_name(Ecosystem.PYPI, "foo")))
    assert (None if found is None else str(found)) == place


# The grant


@pytest.mark.parametrize(
    "text", ["ftp://a.test/", "https://a.test/?x", "https://u:p@a.test/", "a.test", "https://a.test/../", "https://a:0/",
             "https:///x", "https://a.test/%zz/"]
)  # fmt: skip
def test_what_is_no_address_of_a_registry_is_refused(text: str) -> None:
    with pytest.raises(InvalidBase):
        parse_base(text)


def test_a_grant_survives_the_control_channel() -> None:
    grant = RegistryGrant(registries=ALL, policy=PackagePolicy())
    assert RegistryGrant.model_validate_json(grant.model_dump_json()) == grant
    assert grant.covers(parse_host("files.test"))
    assert not grant.covers(parse_host("sub.files.test"))


def test_a_location_is_equal_to_itself_however_it_was_written() -> None:
    host = parse_host("files.test")
    assert RequestKind.METADATA.is_page is False
    assert Location("https", host, 443, "/a+b").target == "/a+b"
    one, other = ask("https://files.test/packages/foo-1.0%2bx.zip"), ask("https://files.test/packages/foo-1.0+x.zip")
    assert one == other != ask("https://files.test/packages/foo-1.0.zip")
