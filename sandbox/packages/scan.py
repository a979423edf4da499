"""What a package's own tree holds that it must not: judged from the list of its files. Pure.

An attempt has its packages at the end of the module path, so nothing of these takes effect there: no `.pth` is read, no
`sitecustomize` imported before the program, no module of the standard library shadowed. The scan is the second lock,
and says so before anything is published.
Owns: these findings. Must not: read a file; what it needs of `package.json` is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from proxy.packages.reasons import PackageReason
from sandbox.packages.locked import Fault
from sandbox.packages.paths import UnsafePath, safe_path

_HOOKS = frozenset({"sitecustomize", "usercustomize"})
_INSTALL_SCRIPTS = ("preinstall", "install", "postinstall")
_MODULE_ENDINGS = (".py", ".pyc", ".so", ".pyd")
_METADATA_ENDINGS = (".dist-info", ".egg-info")


@dataclass(frozen=True, slots=True)
class Scan:
    """`faults` are what a policy has a say in. `hooks` are files that would run at every start: they are left out of
    what is published, whatever the policy says. `install_scripts` are named, and never run. `notes` are for people.
    """

    faults: tuple[Fault, ...] = ()
    hooks: tuple[str, ...] = ()
    install_scripts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def scan_python(package: str, paths: Iterable[str], *, stdlib: frozenset[str]) -> Scan:
    """Scan an unpacked wheel. `stdlib` are the names of the standard library's top modules."""
    faults: list[Fault] = []
    hooks: list[str] = []
    shadows: set[str] = set()
    described: set[str] = set()
    for path in paths:
        if (fault := _path_fault(package, path)) is not None:
            faults.append(fault)
            continue
        top, slash, _ = path.partition("/")
        if top.lower().endswith(_METADATA_ENDINGS):
            described.add(top)
            continue
        # A directory counts whether or not it has an `__init__.py`: without one it is a namespace package.
        module = top if slash else module_of(top)
        is_path_file = not slash and top.lower().endswith(".pth")
        if is_path_file or (module is not None and module.lower() in _HOOKS):
            hooks.append(path)
        elif module is not None and module in stdlib and (not slash or path.endswith(_MODULE_ENDINGS)):
            shadows.add(module)
    faults += [
        Fault(
            PackageReason.BUNDLED_PACKAGE,
            package,
            f"it carries `{ascii(top)[1:-1][:120]}`, by which Python takes another package to be there",
        )
        for top in _of_others(package, described)
    ]
    faults += [
        Fault(PackageReason.STDLIB_NAME, package, f"it brings a module `{module}`, as the standard library does")
        for module in sorted(shadows)
    ]
    faults += [
        Fault(
            PackageReason.STARTUP_HOOK,
            package,
            f"it brings `{ascii(hook)[1:-1][:120]}`, which would run at every start",
        )
        for hook in sorted(hooks)
    ]
    return Scan(tuple(faults), hooks=tuple(hooks))


def _of_others(package: str, described: set[str]) -> list[str]:
    """The metadata at the root that is not of this package: of another name, or beside its own a second time.

    `importlib.metadata` finds a package by what stands before the first `-`, whatever the files inside say.
    """
    own: dict[str, str] = {}  # of each kind, the first
    for top in sorted(described):
        stem, _, kind = top.rpartition(".")
        if canonicalize_name(stem.partition("-")[0]) == package:
            own.setdefault(kind.lower(), top)
    return sorted(described.difference(own.values()))


def module_of(name: str) -> str | None:
    """The module that a file at the root is, if it is one: `a` of `a.py`, `a.pyc` and `a.cpython-313-x86_64.so`."""
    return name.partition(".")[0] if name.endswith(_MODULE_ENDINGS) else None


def scan_npm(package: str, paths: Iterable[str], *, package_json: bytes) -> Scan:
    """Scan an unpacked npm tarball, of which `package_json` is the content of that file."""
    faults: list[Fault] = []
    notes: list[str] = []
    bundled: set[str] = set()
    gyp = False
    for path in paths:
        if (fault := _path_fault(package, path)) is not None:
            faults.append(fault)
            continue
        parts = path.split("/")
        if "node_modules" in parts[:-1]:
            inner = parts[parts.index("node_modules") + 1 :]
            bundled.add("/".join(inner[:2]) if inner[0].startswith("@") else inner[0])
        gyp = gyp or path == "binding.gyp"
        if path == "npm-shrinkwrap.json":
            notes.append("it has a shrinkwrap: its dependencies are the versions that it names, judged like all others")
    faults += [
        Fault(PackageReason.BUNDLED_PACKAGE, package, f"it carries `{name[:214]}` inside, where nothing judges it")
        for name in sorted(bundled)
    ]
    manifest = read_package_json(package_json)
    scripts = manifest.get("scripts") if manifest is not None else None
    named = [name for name in _INSTALL_SCRIPTS if isinstance(scripts, dict) and scripts.get(name)]
    if gyp and "install" not in named and "preinstall" not in named:
        named.append("install")  # npm's own, where a package has a `binding.gyp`: it builds an extension
    return Scan(tuple(faults), install_scripts=tuple(named), notes=tuple(notes))


def identity_of(package_json: bytes) -> tuple[str, str] | None:
    """The name and version that a `package.json` gives; None if it is not readable."""
    manifest = read_package_json(package_json)
    if manifest is None:
        return None
    name, version = manifest.get("name"), manifest.get("version")
    return (name, version) if isinstance(name, str) and isinstance(version, str) else None


def read_package_json(data: bytes) -> Mapping[str, object] | None:
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _path_fault(package: str, path: str) -> Fault | None:
    try:
        safe_path(path)
    except UnsafePath as error:
        return Fault(PackageReason.UNSAFE_ARCHIVE_PATH, package, f"{ascii(path)[:120]}: {error}")
    return None
