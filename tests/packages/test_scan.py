"""What a tree must not hold is found by the names of its files alone."""

from __future__ import annotations

import json

import pytest

from proxy.packages.reasons import PackageReason
from sandbox.packages.scan import identity_of, scan_npm, scan_python

STDLIB = frozenset({"json", "os", "site"})


@pytest.mark.parametrize(
    "path",
    [
        "x.pth",
        "X.PTH",
        "sitecustomize.py",
        "sitecustomize.pyc",
        "sitecustomize.cpython-313-x86_64-linux-gnu.so",
        "sitecustomize/__init__.py",
        "sitecustomize/anything",  # without an `__init__.py` it is a namespace package, and imported all the same
        "usercustomize.py",
        "SiteCustomize.py",
    ],
)
def test_what_would_run_at_a_start_is_a_hook(path: str) -> None:
    scan = scan_python("thing", ["thing/__init__.py", path], stdlib=STDLIB)
    assert [fault.reason for fault in scan.faults] == [PackageReason.STARTUP_HOOK]
    assert scan.hooks == (path,)


@pytest.mark.parametrize("path", ["thing/x.pth", "thing/sitecustomize.py", "sitecustomized.py", "pth", "sitecustomize"])
def test_the_same_names_elsewhere_are_none(path: str) -> None:
    assert scan_python("thing", [path], stdlib=STDLIB).hooks == ()


@pytest.mark.parametrize(
    "path", ["json.py", "json/__init__.py", "json/evil.py", "os.so", "os.cpython-313.so", "site.pyc"]
)
def test_a_module_of_the_standard_library_is_found(path: str) -> None:
    scan = scan_python("thing", [path], stdlib=STDLIB)
    assert [fault.reason for fault in scan.faults] == [PackageReason.STDLIB_NAME]


@pytest.mark.parametrize("path", ["thing/json.py", "json.txt", "json.data/METADATA", "json/data.txt", "jsonx.py"])
def test_what_cannot_be_imported_by_such_a_name_is_not(path: str) -> None:
    assert scan_python("thing", [path], stdlib=STDLIB).faults == ()


@pytest.mark.parametrize(
    "path",
    [
        "denied-1.0.dist-info/METADATA",
        "DENIED-1.0.DIST-INFO/METADATA",
        "denied-1.0-py3.13.egg-info",
        "denied.egg-info/PKG-INFO",
        "thing-2.0.dist-info/METADATA",
        "denied-thing-1.0.dist-info/METADATA",  # Python takes what stands before the first `-`
    ],
)
def test_the_metadata_of_another_package_is_a_package_inside(path: str) -> None:
    """The fault: a wheel could bring `denied/`, and by `.data/purelib/` what makes Python take it for installed."""
    own = ["thing/__init__.py", "thing-1.0.dist-info/METADATA", "thing-1.0.dist-info/RECORD"]
    assert scan_python("thing", own, stdlib=STDLIB).faults == ()
    scan = scan_python("thing", [*own, path], stdlib=STDLIB)
    assert [fault.reason for fault in scan.faults] == [PackageReason.BUNDLED_PACKAGE]
    assert path.partition("/")[0] in scan.faults[0].detail


@pytest.mark.parametrize("path", ["my_thing-1.0.dist-info/METADATA", "My.Thing.egg-info/PKG-INFO"])
def test_its_own_metadata_is_its_own_in_every_spelling(path: str) -> None:
    assert scan_python("my-thing", [path, "my_thing/_vendor/other-1.0.dist-info/METADATA"], stdlib=STDLIB).faults == ()


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x"])
def test_a_path_that_escapes_is_found_again(path: str) -> None:
    for scan in (scan_python("thing", [path], stdlib=STDLIB), scan_npm("thing", [path], package_json=b"{}")):
        assert [fault.reason for fault in scan.faults] == [PackageReason.UNSAFE_ARCHIVE_PATH]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("node_modules/evil/index.js", "evil"),
        ("lib/node_modules/@scope/evil/index.js", "@scope/evil"),
        ("node_modules/.hidden/x", ".hidden"),
    ],
)
def test_packages_inside_of_a_package_are_found(path: str, name: str) -> None:
    scan = scan_npm("thing", ["package.json", path], package_json=b"{}")
    assert [fault.reason for fault in scan.faults] == [PackageReason.BUNDLED_PACKAGE]
    assert f"`{name}`" in scan.faults[0].detail


@pytest.mark.parametrize(
    ("manifest", "paths", "scripts"),
    [
        ({"scripts": {"postinstall": "x", "test": "y"}}, [], ("postinstall",)),
        ({"scripts": {"preinstall": "x", "install": "y"}}, [], ("preinstall", "install")),
        ({"scripts": {"install": ""}}, [], ()),
        ({"scripts": ["install"]}, [], ()),
        ({}, ["binding.gyp"], ("install",)),
        ({"scripts": {"install": "x"}}, ["binding.gyp"], ("install",)),
        ({}, ["src/binding.gyp"], ()),
    ],
)
def test_install_scripts_are_named(manifest: dict[str, object], paths: list[str], scripts: tuple[str, ...]) -> None:
    assert scan_npm("thing", paths, package_json=json.dumps(manifest).encode()).install_scripts == scripts


def test_a_shrinkwrap_is_noted() -> None:
    assert scan_npm("thing", ["npm-shrinkwrap.json"], package_json=b"{}").notes
    assert not scan_npm("thing", ["lib/npm-shrinkwrap.json"], package_json=b"{}").notes


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"name": 1, "version": "1"}', b"[" * 100_000])
def test_a_package_json_that_is_none_has_no_identity(data: bytes) -> None:
    assert identity_of(data) is None


def test_an_identity_is_read() -> None:
    assert identity_of(b'\xef\xbb\xbf{"name": "@a/b", "version": "1.2.3"}') == ("@a/b", "1.2.3")
