"""A lock becomes artifacts of the registry with strong hashes, or the reasons why not, all at once."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from proxy.packages.reasons import Availability, PackageReason
from sandbox.packages.lock_npm import parse_package_lock
from sandbox.packages.lock_python import parse_pylock
from sandbox.packages.locked import LockRefused, LockUnreadable, strongest
from sandbox.packages.resolve_npm import npm_argv, npm_environment, npm_project
from sandbox.packages.resolve_python import uv_argv, uv_environment

TAGS = ("cp313-cp313-manylinux_2_28_x86_64", "cp313-abi3-linux_x86_64", "py3-none-any")
SHA256, SHA512 = "ab" * 32, "cd" * 64
HASH = f'hashes = {{ sha256 = "{SHA256}" }}'


def pylock(*packages: str) -> str:
    return 'lock-version = "1.0"\ncreated-by = "uv"\n' + "".join(f"[[packages]]\n{one}\n" for one in packages)


def wheels(*files: str, more: str = HASH, name: str = "thing") -> str:
    rows = ", ".join(f'{{ url = "https://files.test/x/{file}", {more} }}' for file in files)
    return f'name = "{name}"\nversion = "1.0"\nwheels = [{rows}]'


def refused(text: str) -> dict[str, str]:
    with pytest.raises(LockRefused) as caught:
        parse_pylock(text, tags=TAGS)
    return {fault.package: str(fault.reason) for fault in caught.value.faults}


def test_a_wheel_of_the_registry_is_taken_with_all_its_facts() -> None:
    more = f"upload-time = 2026-01-02T03:04:05Z, size = 12, {HASH}"
    [found] = parse_pylock(pylock(wheels("thing-1.0-py3-none-any.whl", more=more)), tags=TAGS)
    assert (found.name.normal, found.version.text, found.filename) == ("thing", "1.0", "thing-1.0-py3-none-any.whl")
    assert (found.algorithm, found.digest, found.size_bytes) == ("sha256", SHA256, 12)
    assert found.uploaded_at is not None
    assert found.uploaded_at.isoformat() == "2026-01-02T03:04:05+00:00"
    assert found.places == ("",)


def test_of_several_wheels_the_one_that_fits_best_is_taken() -> None:
    files = [
        "thing-1.0-py3-none-any.whl",
        "thing-1.0-cp313-cp313-manylinux_2_28_x86_64.whl",
        "thing-1.0-cp313-cp313-win32.whl",
    ]
    for order in (files, files[::-1]):
        [found] = parse_pylock(pylock(wheels(*order)), tags=TAGS)
        assert found.filename == files[1]


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (
            'name = "thing"\nversion = "1"\nvcs = { type = "git", url = "https://x.test/x" }',
            PackageReason.NON_REGISTRY_SOURCE,
        ),
        (
            'name = "thing"\nversion = "1"\narchive = { url = "https://x.test/x.whl" }',
            PackageReason.NON_REGISTRY_SOURCE,
        ),
        ('name = "thing"\ndirectory = { path = "/etc" }', PackageReason.NON_REGISTRY_SOURCE),
        ('name = "thing"\nversion = "1"\nwheels = [{ path = "/x.whl" }]', PackageReason.NON_REGISTRY_SOURCE),
        ('name = "thing"\nversion = "1"\nsdist = { url = "https://x.test/x.tar.gz" }', PackageReason.NO_WHEEL),
        (wheels("thing-1.0-cp313-cp313-win_amd64.whl"), Availability.NO_COMPATIBLE_ARTIFACT),
        (wheels("thing-2.0-py3-none-any.whl"), PackageReason.METADATA_MISMATCH),
        (wheels("other-1.0-py3-none-any.whl"), PackageReason.METADATA_MISMATCH),
        (wheels("thing-1.0-py3-none-any.whl", more="size = 1"), PackageReason.HASH_MISMATCH),
        (wheels("thing-1.0-py3-none-any.whl", more='hashes = { md5 = "00" }'), PackageReason.HASH_MISMATCH),
        (wheels("thing-1.0-py3-none-any.whl", more='hashes = { sha256 = "zz" }'), PackageReason.HASH_MISMATCH),
    ],
)
def test_what_is_no_wheel_of_the_registry_with_a_strong_hash_is_refused(package: str, reason: str) -> None:
    assert refused(pylock(package)) == {"thing": str(reason)}


def test_all_that_is_wrong_with_a_lock_is_said_at_once() -> None:
    text = pylock(
        'name = "one"\nversion = "1"\nsdist = { url = "https://x.test/x" }',
        'name = "two"\nversion = "1"\nvcs = { type = "git" }',
    )
    assert refused(text) == {"one": "no_wheel", "two": "non_registry_source"}


@pytest.mark.parametrize(
    "text",
    [
        "created-by = 1", "[", 'lock-version = "2.0"', 'lock-version = "1.0"\npackages = 1', pylock("version = 1"),
        pylock('name = "-x"\nversion = "1"'), pylock('name = "x"\nversion = "one"'),
        pylock(wheels("nonsense.whl")), pylock(*[wheels("thing-1.0-py3-none-any.whl")] * 2),
    ],
)  # fmt: skip
def test_what_is_no_lock_is_unreadable_not_refused(text: str) -> None:
    with pytest.raises(LockUnreadable):
        parse_pylock(text, tags=TAGS)


@pytest.mark.parametrize(
    ("hashes", "held"),
    [
        ({"sha256": SHA256, "sha512": SHA512}, ("sha512", SHA512)),
        ({"sha256": SHA256.upper()}, ("sha256", SHA256)),
        ({"sha1": "00" * 20, "md5": "00" * 16}, None),
        ({"sha512": "short", "sha256": SHA256}, None),
        ({}, None),
    ],
)
def test_the_strongest_hash_holds_and_a_malformed_one_is_none(hashes: dict[str, str], held: object) -> None:
    assert strongest(hashes) == held


# npm

REGISTRY = "https://npm.test:8443/root/"
INTEGRITY = "sha512-" + base64.b64encode(bytes.fromhex(SHA512)).decode()


def entry(name: str = "thing", version: str = "1.0.0", **more: Any) -> dict[str, Any]:
    base = name.rpartition("/")[2]
    url = f"https://npm.test:8443/root/{name}/-/{base}-{version}.tgz"
    return {"version": version, "resolved": url, "integrity": INTEGRITY, **more}


def package_lock(**entries: dict[str, Any]) -> str:
    return json.dumps({"lockfileVersion": 3, "packages": {"": {"dependencies": {}}, **entries}})


def npm_refused(**entries: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(LockRefused) as caught:
        parse_package_lock(package_lock(**entries), registry=REGISTRY)
    return {fault.package: str(fault.reason) for fault in caught.value.faults}


def test_a_tarball_of_the_registry_is_taken_with_all_its_places() -> None:
    one = entry(dependencies={"b": "1"}, hasInstallScript=True)
    text = package_lock(
        **{"node_modules/thing": one, "node_modules/x/node_modules/thing": one, "node_modules/x": entry("x")}
    )
    found, other = parse_package_lock(text, registry=REGISTRY)
    assert (found.name.normal, found.version.text, found.filename) == ("thing", "1.0.0", "thing-1.0.0.tgz")
    assert found.places == ("thing", "x/node_modules/thing")
    assert (found.algorithm, found.digest) == ("sha512", SHA512)
    assert (found.has_install_script, found.dependencies) == (True, ("b",))
    assert other.name.normal == "x"


def test_of_dependencies_only_names_are_kept() -> None:
    """The fault: a lock repeats what a publisher wrote, and a manifest with half a character can't be written."""
    text = package_lock(**{"node_modules/thing": entry(dependencies={"b": "1", "\ud800": "1", "": "1", "a b": "1"})})
    (found,) = parse_package_lock(text, registry=REGISTRY)
    assert found.dependencies == ("b",)


def test_an_alias_is_the_package_that_it_stands_for() -> None:
    [found] = parse_package_lock(
        package_lock(**{"node_modules/nice": {**entry("evil"), "name": "evil"}}), registry=REGISTRY
    )
    assert found.name.normal == "evil"
    assert found.places == ("nice",)


def test_a_scoped_tarball_is_of_the_registry_in_both_spellings() -> None:
    for slash in ("/", "%2f"):
        one = entry("@a/b")
        one["resolved"] = one["resolved"].replace("@a/b/", f"@a{slash}b/")
        [found] = parse_package_lock(package_lock(**{"node_modules/@a/b": one}), registry=REGISTRY)
        assert found.name.normal == "@a/b"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"resolved": "https://other.test/root/thing/-/thing-1.0.0.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "https://npm.test/root/thing/-/thing-1.0.0.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "http://npm.test:8443/root/thing/-/thing-1.0.0.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "https://npm.test:8443/thing/-/thing-1.0.0.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "https://npm.test:8443/root/other/-/thing-1.0.0.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "https://npm.test:8443/root/thing/-/../../other/-/o.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "https://x@npm.test:8443/root/thing/-/thing-1.0.0.tgz"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "https://npm.test:8443/root/thing/-/thing-1.0.0.tgz?x"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "git+ssh://git@x.test/x.git#1"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": "file:../x"}, PackageReason.NON_REGISTRY_SOURCE),
        ({"resolved": None}, PackageReason.NON_REGISTRY_SOURCE),
        ({"link": True}, PackageReason.NON_REGISTRY_SOURCE),
        ({"inBundle": True}, PackageReason.BUNDLED_PACKAGE),
        ({"integrity": "sha1-AAAAAAAAAAAAAAAAAAAAAAAAAAA="}, PackageReason.HASH_MISMATCH),
        ({"integrity": "sha512-AAAA"}, PackageReason.HASH_MISMATCH),
        ({"integrity": ""}, PackageReason.HASH_MISMATCH),
        ({"os": ["win32"]}, Availability.NO_COMPATIBLE_ARTIFACT),
        ({"cpu": ["!x64"]}, Availability.NO_COMPATIBLE_ARTIFACT),
    ],
)
def test_what_is_no_tarball_of_the_registry_with_a_strong_hash_is_refused(more: dict[str, Any], reason: str) -> None:
    assert npm_refused(**{"node_modules/thing": entry(**more)}) == {"thing": str(reason)}


@pytest.mark.parametrize("more", [{"os": ["darwin"]}, {"cpu": ["arm64"]}, {"libc": ["musl"]}, {"os": ["!linux"]}])
def test_what_is_optional_and_not_for_this_platform_is_left_out(more: dict[str, Any]) -> None:
    text = package_lock(
        **{"node_modules/thing": entry(optional=True, **more), "node_modules/x": entry("x", os=["linux"])}
    )
    assert [one.name.normal for one in parse_package_lock(text, registry=REGISTRY)] == ["x"]


@pytest.mark.parametrize(
    "key", ["thing", "node_modules/../x", "node_modules/", "/node_modules/x", "node_modules/a/b", "node_modules/.x",
            "node_modules/a/node_modules", "node_modules/a//node_modules/b"],
)  # fmt: skip
def test_a_place_that_is_none_is_unreadable(key: str) -> None:
    with pytest.raises(LockUnreadable):
        parse_package_lock(package_lock(**{key: entry()}), registry=REGISTRY)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"lockfileVersion": 1, "packages": {}}', "[" * 100_000])
def test_what_is_no_package_lock_is_unreadable(text: str) -> None:
    with pytest.raises(LockUnreadable):
        parse_package_lock(text, registry=REGISTRY)


# How the resolvers are asked


def test_uv_is_told_by_options_alone_and_builds_nothing() -> None:
    argv = uv_argv(index="https://pypi.test/simple/", interpreter="/opt/python/bin/python3.13")
    assert argv[argv.index("--only-binary") + 1] == ":all:"
    assert argv[argv.index("--default-index") + 1] == "https://pypi.test/simple/"
    assert {"--no-config", "--no-sources", "--no-python-downloads", "-"} <= set(argv)


def test_npm_is_told_by_options_alone_and_runs_no_script() -> None:
    argv = npm_argv(registry=REGISTRY, node="/n", npm="/npm-cli.js")
    assert {
        "--ignore-scripts",
        "--allow-git=none",
        "--allow-remote=none",
        "--allow-file=none",
        "--allow-directory=none",
    } <= set(argv)
    assert f"--registry={REGISTRY}" in argv
    assert json.loads(npm_project([("@a/b", "1.0.0")]))["dependencies"] == {"@a/b": "1.0.0"}


def test_nothing_of_a_calls_environment_reaches_a_resolver() -> None:
    given = {
        "HTTPS_PROXY": "http://p",
        "SSL_CERT_FILE": "/c",
        "SECRET": "x",
        "UV_INDEX": "x",
        "NPM_CONFIG_REGISTRY": "x",
        "NO_PROXY": "*",
    }
    for made in (uv_environment(given, authority="/own"), npm_environment(given, authority="/own")):
        assert made["HTTPS_PROXY"] == "http://p"
        assert made["NO_PROXY"] == ""
        assert "/own" in made.values()
        assert not {"SECRET", "UV_INDEX", "NPM_CONFIG_REGISTRY"} & set(made)
