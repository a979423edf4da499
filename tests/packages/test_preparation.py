"""Preparations on loopback registries: what is allowed becomes a snapshot that imports; what is not has its reason.

The launcher, the proxy with its filter, uv and npm are the real ones; the registries have packages for every fault.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from proxy.packages.requests import Registry
from sandbox.interpreters import this_interpreter
from sandbox.isolation.plan import MIB, NODE_MODULES, LaunchPlan, ReadOnly
from sandbox.packages.errands import Errands
from sandbox.packages.platforms import this_platform
from sandbox.packages.preparation import NotPrepared, Preparer, _Preparation
from sandbox.packages.program import modules
from sandbox.packages.store import Lease
from sandbox.runtimes import javascript, python
from tests.packages.conftest import Kitchen
from tests.registry.build import wheel
from tests.registry.cast import write_advisories
from tests.registry.server import NpmRegistry, PypiRegistry

POLICY: dict[str, Any] = {
    "names": {
        "deny": {"pypi": ("denied",), "npm": ("ndenied",)},
        "allow": {"npm": ("nfresh",)},  # near a popular name by chance
        "internal_prefixes": {"pypi": ("acme-",), "npm": ("@acme/",)},
    },
}


@pytest.fixture(scope="session")
def advisories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("advisories")
    write_advisories(directory)
    return {"advisories": {"db_dir": directory, "max_db_age": 0}}


def names(lease: Lease) -> list[str]:
    return [f"{one.name} {one.version}" for one in lease.manifest.artifacts]


def plan(lease: Lease, **changes: Any) -> LaunchPlan:
    base = python.plan(
        this_interpreter(), call_id="call-test", attempt=1, memory_bytes=512 * MIB, packages=str(lease.tree)
    )
    return replace(base, **changes)


def node_plan(lease: Lease) -> LaunchPlan:
    base = python.plan(this_interpreter(), call_id="call-test", attempt=1, memory_bytes=512 * MIB)
    node = [mount for mount in this_platform().mounts if mount.target == javascript.RUNTIME]
    return replace(base, read_only=(*base.read_only, *node, ReadOnly(str(lease.tree), NODE_MODULES)))


# What is allowed


def test_a_package_and_what_it_needs_are_prepared_and_imported(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """In an attempt without network; the newest version that the policy allows, not the newest."""
    with kitchen.prepare(kitchen.wanted(pypi, "app==", **POLICY)) as lease:
        assert names(lease) == ["app 1.0", "libx 1.2"]
        code = "import app, libx, sys; print(libx.VERSION, libx.__file__, sys.path[-1])"
        status, out, err = kitchen.run(plan(lease), code)
    assert (status, err) == (0, "")
    assert out.split() == ["1.2", "/opt/packages/libx/__init__.py", "/opt/packages"]
    assert pypi_registry.markers.below(kitchen.directory) == []


def test_its_bytecode_is_used(kitchen: Kitchen, pypi: Registry) -> None:
    code = (
        "import _frozen_importlib_external as external\n"
        "def compiled(*_, **__): raise RuntimeError('it was compiled')\n"
        "external.SourceLoader.source_to_code = compiled\n"
        "import libx\n"
        "print(libx.__cached__)\n"
    )
    with kitchen.prepare(kitchen.wanted(pypi, "libx==", **POLICY)) as lease:
        status, out, err = kitchen.run(plan(lease), code)
        assert (status, err) == (0, "")
        assert out.startswith("/opt/packages/libx/__pycache__/")
        (lease.tree / "libx/__pycache__").chmod(0o755)
        for path in (lease.tree / "libx/__pycache__").iterdir():
            path.unlink()
        assert kitchen.run(plan(lease), code)[0] == 1, "the control: without bytecode it has to be compiled"
        (lease.tree / "libx/__pycache__").chmod(0o555)


def test_a_child_process_of_multiprocessing_has_the_packages_too(kitchen: Kitchen, pypi: Registry) -> None:
    code = (
        "import multiprocessing\n"
        "def version(_):\n"
        "    import libx\n"
        "    return libx.VERSION\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(version, [0]))\n"
    )
    with kitchen.prepare(kitchen.wanted(pypi, "libx==", **POLICY)) as lease:
        assert kitchen.run(plan(lease), code)[:2] == (0, "['1.2']\n")


def test_npm_packages_are_found_by_require_and_by_import(
    kitchen: Kitchen, npm: Registry, npm_registry: NpmRegistry
) -> None:
    code = (
        "import subprocess\n"
        "open('a.cjs', 'w').write('console.log(require(\"napp\") !== undefined, require.resolve(\"@scope/thing\"))')\n"
        "open('b.mjs', 'w').write('import \"napp\"; import * as e from \"esm-lib\"; console.log(Object.keys(e).length > 0)')\n"
        "for name in ('a.cjs', 'b.mjs'):\n"
        f"    subprocess.run([{kitchen.platform.node!r}, name], check=True)\n"
    )
    with kitchen.prepare(kitchen.wanted(npm, "napp@", "esm-lib@", "@scope/thing@", **POLICY)) as lease:
        assert names(lease) == ["@scope/thing 1.0.0", "esm-lib 1.0.0", "napp 1.0.0", "nlib 1.2.0"]
        status, out, err = kitchen.run(node_plan(lease), code)
    assert (status, err) == (0, "")
    assert out.split() == ["true", "/node_modules/@scope/thing/index.js", "true"]
    assert npm_registry.markers.below(kitchen.directory) == []


@pytest.mark.parametrize("package", ["pth-hook", "data-pth", "sitecustom", "usercustom"])
def test_start_up_hooks_are_left_out_where_the_policy_strips_them(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, package: str
) -> None:
    changed = {**POLICY, "artifacts": {"startup_hooks": "strip"}}
    with kitchen.prepare(kitchen.wanted(pypi, f"{package}==", **changed)) as lease:
        left = [path.name for path in lease.tree.rglob("*")]
        assert left
        assert not [name for name in left if name.endswith(".pth") or "customize" in name]
        status, _, err = kitchen.run(plan(lease), "import site; site.addsitedir('/opt/packages')")
    assert (status, err) == (0, "")


@pytest.mark.parametrize("module", ["sitecustomize", "usercustomize"])
def test_a_start_up_hook_may_be_a_directory(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, module: str
) -> None:
    """It was removed twice, once as a file and once as another's bytecode, which ended as a failure of our own."""
    name = f"{module[:4]}-directory"
    files: dict[str, str | bytes] = {f"{module}/__init__.py": "", f"{module}/more.py": "", "kept.py": "X = 1\n"}
    pypi_registry.packages.add(wheel(name, "1.0", files=files))
    assert kitchen.refusals(kitchen.wanted(pypi, f"{name}==", **POLICY)) == {name: "startup_hook"}
    changed = {**POLICY, "artifacts": {"startup_hooks": "strip"}}
    with kitchen.prepare(kitchen.wanted(pypi, f"{name}==", **changed)) as lease:
        left = [path.name for path in lease.tree.rglob("*")]
        assert "kept.py" in left
        assert not [one for one in left if "customize" in one or one.startswith(("more", "__init__"))]
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}))"
        assert kitchen.run(plan(lease), code) == (0, "None\n", "")


# What is not

PYPI_REFUSED = {
    "setup-py==": {"setup-py": "no_wheel"},
    "backend-py==": {"backend-py": "no_wheel"},
    "mixed==2.0": {"mixed": "no_wheel"},
    "pth-hook==": {"pth-hook": "startup_hook"},
    "data-pth==": {"data-pth": "startup_hook"},
    "sitecustom==": {"sitecustom": "startup_hook"},
    "usercustom==": {"usercustom": "startup_hook"},
    "json-shadow==": {"json-shadow": "stdlib_name"},
    "hash-liar==": {"hash-liar": "hash_mismatch"},
    "metadata-hash==": {"metadata-hash": "hash_mismatch"},
    "liar-name==": {"liar-name": "metadata_mismatch"},
    "liar-version==": {"liar-version": "metadata_mismatch"},
    "zip-bomb==": {"zip-bomb": "closure_too_large"},
    "many-files==": {"many-files": "closure_too_large"},
    "escape-dots==": {"escape-dots": "unsafe_archive_path"},
    "escape-absolute==": {"escape-absolute": "unsafe_archive_path"},
    "escape-symlink==": {"escape-symlink": "unsafe_archive_path"},
    "escape-data==": {"escape-data": "unsafe_archive_path"},
    "case-collision==": {"case-collision": "unsafe_archive_path"},
    "fresh==2.0": {"fresh": "version_too_new"},
    "newborn==": {"newborn": "version_too_new"},
    "no-time==": {"no-time": "release_time_unknown"},
    "late-file==": {"late-file": "version_too_new"},
    "all-yanked==": {"all-yanked": "version_yanked"},
    "libx==1.2.5": {"libx": "version_yanked"},
    "libx==1.3": {"libx": "version_too_new"},
    "quarantined==": {"quarantined": "project_quarantined"},
    "vulnerable==1.0": {"vulnerable": "known_vulnerability"},
    "malicious==": {"malicious": "malicious_package"},
    "denied==": {"denied": "name_denied"},
    "requestss==": {"requestss": "typosquat_suspect"},
    "acme-utils==": {"acme-utils": "internal_name"},
    "chain-a==": {"denied": "name_denied"},
    "url-need==": {"url-need": "non_registry_source"},
    "local==1.0+evil": {"local": "local_version_denied"},
}
PYPI_UNAVAILABLE = {
    "nobody-has-it==": {"nobody-has-it": "package_not_found"},
    "libx==99": {"libx": "version_not_found"},
    "windows-only==": {"windows-only": "no_compatible_artifact"},
    "future-python==": {"future-python": "no_compatible_artifact"},
    "quarrel==": {"quarrel": "resolution_conflict"},
    "missing-need==": {"nobody-has-this": "package_not_found"},
}
NPM_REFUSED = {
    "npreinstall@": {"npreinstall": "install_script_required"},
    "ninstall@": {"ninstall": "install_script_required"},
    "npostinstall@": {"npostinstall": "install_script_required"},
    "ngyp@": {"ngyp": "install_script_required"},
    "nconfused@": {"nconfused": "install_script_required"},
    "nbundler@": {"ndenied": "bundled_package"},
    "nshrinkwrap@": {"nlib": "version_too_new"},
    "nalias@": {"ndenied": "name_denied"},
    "npeer@": {"ndenied": "name_denied"},
    "nchain-a@": {"ndenied": "name_denied"},
    "nremote@": {"nremote": "non_registry_source"},
    "ngit@": {"ngit": "non_registry_source"},
    "nfile@": {"nfile": "non_registry_source"},
    "nhash-liar@": {"nhash-liar": "hash_mismatch"},
    "nname-liar@": {"nname-liar": "metadata_mismatch"},
    "nbomb@": {"nbomb": "closure_too_large"},
    "nmany-files@": {"nmany-files": "closure_too_large"},
    "nescape-dots@": {"nescape-dots": "unsafe_archive_path"},
    "nescape-absolute@": {"nescape-absolute": "unsafe_archive_path"},
    "nescape-symlink@": {"nescape-symlink": "unsafe_archive_path"},
    "nescape-hardlink@": {"nescape-hardlink": "unsafe_archive_path"},
    "nescape-device@": {"nescape-device": "unsafe_archive_path"},
    "ncase-collision@": {"ncase-collision": "unsafe_archive_path"},
    "nfresh@2.0.0": {"nfresh": "version_too_new"},
    "nnewborn@": {"nnewborn": "version_too_new"},
    "nvulnerable@1.0.0": {"nvulnerable": "known_vulnerability"},
    "nmalicious@": {"nmalicious": "malicious_package"},
    "ndenied@": {"ndenied": "name_denied"},
    "lodahs@": {"lodahs": "typosquat_suspect"},
    "@acme/x@": {"@acme/x": "internal_name"},
    "nlib@1.3.0": {"nlib": "version_too_new"},
}
NPM_UNAVAILABLE = {
    "nobody-has-it@": {"nobody-has-it": "package_not_found"},
    "nlib@99.0.0": {"nlib": "version_not_found"},
    "nwindows-only@": {"nwindows-only": "no_compatible_artifact"},
    "nmissing-need@": {"nobody-has-this": "package_not_found"},
}


@pytest.mark.parametrize("specifier", [*PYPI_REFUSED, *PYPI_UNAVAILABLE])
def test_a_python_package_that_is_not_had_has_its_reason(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, advisories: dict[str, Any], specifier: str
) -> None:
    expected = {**PYPI_REFUSED, **PYPI_UNAVAILABLE}[specifier]
    wanted = kitchen.wanted(pypi, specifier, **POLICY, **advisories)
    assert kitchen.refusals(wanted) == expected
    assert nothing_ran(kitchen, pypi_registry)


@pytest.mark.parametrize("specifier", [*NPM_REFUSED, *NPM_UNAVAILABLE])
def test_a_javascript_package_that_is_not_had_has_its_reason(
    kitchen: Kitchen, npm: Registry, npm_registry: NpmRegistry, advisories: dict[str, Any], specifier: str
) -> None:
    expected = {**NPM_REFUSED, **NPM_UNAVAILABLE}[specifier]
    wanted = kitchen.wanted(npm, specifier, **POLICY, **advisories)
    assert kitchen.refusals(wanted) == expected
    assert nothing_ran(kitchen, npm_registry)


@pytest.mark.parametrize("pair", [("clash-file==", "clash-directory=="), ("clash-one==", "clash-two==")])
def test_two_packages_with_one_file_are_a_conflict(kitchen: Kitchen, pypi: Registry, pair: tuple[str, str]) -> None:
    assert set(kitchen.refusals(kitchen.wanted(pypi, *pair, **POLICY)).values()) == {"file_conflict"}


def test_what_is_refused_and_what_is_not_there_are_never_confused(kitchen: Kitchen, pypi: Registry) -> None:
    for specifier, refused in (
        ("denied==", True),
        ("libx==1.3", True),
        ("libx==99", False),
        ("nobody-has-it==", False),
    ):
        with pytest.raises(NotPrepared) as caught:
            kitchen.prepare(kitchen.wanted(pypi, specifier, **POLICY)).close()
        assert caught.value.refused is refused, specifier


def test_a_closure_has_a_size(kitchen: Kitchen, pypi: Registry) -> None:
    small = {**POLICY, "max_closure": {"packages": 1}}
    assert set(kitchen.refusals(kitchen.wanted(pypi, "app==", **small)).values()) == {"closure_too_large"}


def test_a_registry_that_does_not_answer_is_unavailable(kitchen: Kitchen, pypi: Registry) -> None:
    wanted = kitchen.wanted(pypi, "with-extra==", **POLICY)
    dead = wanted.grant.model_copy(update={"private_addresses": ()})  # its address may not be dialled
    assert kitchen.refusals(replace(wanted, grant=dead)) == {"with-extra": "registry_unavailable"}


def nothing_ran(kitchen: Kitchen, registry: PypiRegistry | NpmRegistry) -> bool:
    """No code of a package left its trace where this process could see it, nor anything in the store's way."""
    return (
        registry.markers.below(registry.markers.directory) == [] and list((kitchen.store.root / "tmp").iterdir()) == []
    )


# The store, and the log


def test_the_second_call_takes_the_snapshot_and_asks_nobody(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    wanted = kitchen.wanted(pypi, "good==1.0", **POLICY)
    kitchen.prepare(wanted).close()
    assert kitchen.told[0].stage == "resolve"
    assert pypi_registry.paths
    pypi_registry.forget()
    before = kitchen.chambers
    with kitchen.prepare(kitchen.wanted(pypi, "good==1.0", **POLICY)) as lease:
        assert names(lease) == ["good 1.0"]
    assert (kitchen.told, kitchen.chambers, pypi_registry.paths) == ([], before, [])


def test_a_policy_that_changes_is_held_against_the_snapshot_without_a_rebuild(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    kitchen.prepare(kitchen.wanted(pypi, "attested==1.0", **POLICY)).close()
    pypi_registry.forget()
    changed = {**POLICY, "max_specifiers": 7}
    kitchen.prepare(kitchen.wanted(pypi, "attested==1.0", **changed)).close()
    assert pypi_registry.paths == [], "a policy that still allows it needs nothing anew"
    denying = {**POLICY, "names": {"deny": {"pypi": ("attested",)}}}
    assert kitchen.refusals(kitchen.wanted(pypi, "attested==1.0", **denying)) == {"attested": "name_denied"}


def at(moment: datetime) -> Callable[[], datetime]:
    return lambda: moment


def test_what_is_known_newly_of_a_snapshot_is_what_every_policy_judges_by(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """A manifest was never replaced: a strict policy accepted what was known to be yanked."""
    pypi_registry.packages.add(wheel("turns-bad", "1.0"))
    lax = {**POLICY, "artifacts": {"yanked": "allow"}}
    kitchen.prepare(kitchen.wanted(pypi, "turns-bad==1.0", **lax)).close()
    kitchen.prepare(kitchen.wanted(pypi, "turns-bad==1.0", **POLICY)).close()
    listed = pypi_registry.packages.project("turns-bad").files
    listed[0] = replace(listed[0], yanked="stolen token")
    later = datetime.now(UTC) + timedelta(hours=25)
    other = {**lax, "max_specifiers": 9}  # its page is not the one that was read before
    with kitchen.do(kitchen.preparer.prepare(kitchen.wanted(pypi, "turns-bad==1.0", **other), now=at(later))) as lease:
        assert lease.manifest.artifacts[0].facts.yanked
    with pytest.raises(NotPrepared) as caught:
        kitchen.do(kitchen.preparer.prepare(kitchen.wanted(pypi, "turns-bad==1.0", **POLICY), now=at(later))).close()
    assert {str(fault.reason) for fault in caught.value.faults} == {"version_yanked"}


def test_a_file_is_never_served_under_the_name_of_another(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """Artifacts were found by their digest alone, so that an index that gave another's was served that one's tree."""
    other = wheel("known-first", "6.6", files={"innocent/__init__.py": "X = 'ANOTHER'\n"})
    pypi_registry.packages.add(other)
    kitchen.prepare(kitchen.wanted(pypi, "known-first==", **POLICY)).close()
    pypi_registry.packages.add(wheel("innocent", "1.0"), said_sha256=other.sha256)
    for specifiers in (["innocent=="], ["known-first==", "innocent=="]):
        assert kitchen.refusals(kitchen.wanted(pypi, *specifiers, **POLICY)) == {"innocent": "metadata_mismatch"}


def test_the_facts_of_two_that_say_they_are_one_file_do_not_mix(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """Facts were kept by digest alone: the last of two had the word for both."""
    first = wheel("twin-aa", "1.0")
    pypi_registry.packages.add(first, yanked="bad")
    pypi_registry.packages.add(wheel("twin-bb", "1.0"), said_sha256=first.sha256)
    lax = {**POLICY, "artifacts": {"yanked": "warn"}}
    wanted = kitchen.wanted(pypi, "twin-aa==1.0", "twin-bb==1.0", **lax)
    errands = Errands(wanted, kitchen.platform, kitchen.do(kitchen.chamber()), kitchen.store.root / "tmp")
    resolved = kitchen.do(errands.resolve())
    assert resolved.lock is not None
    preparation = _Preparation(
        kitchen.preparer, wanted, kitchen.do(kitchen.chamber()), lambda: datetime.now(UTC), lambda _: None
    )
    locked = preparation._parse_lock(resolved.lock)
    facts = kitchen.do(preparation._ask(locked))
    assert {one.name.normal: facts[one].yanked for one in locked} == {"twin-aa": True, "twin-bb": False}
    assert kitchen.refusals(wanted)["twin-bb"] in ("hash_mismatch", "metadata_mismatch")


def test_a_lock_is_held_to_the_hash_that_the_page_gives(kitchen: Kitchen, pypi: Registry) -> None:
    wanted = kitchen.wanted(pypi, "good==1.0", **POLICY)
    errands = Errands(wanted, kitchen.platform, kitchen.do(kitchen.chamber()), kitchen.store.root / "tmp")
    lock = kitchen.do(errands.resolve()).lock
    assert lock is not None
    preparation = _Preparation(
        kitchen.preparer, wanted, kitchen.do(kitchen.chamber()), lambda: datetime.now(UTC), lambda _: None
    )
    locked = preparation._parse_lock(lock)
    assert set(kitchen.do(preparation._ask(locked))) == set(locked), "the control: as it was locked"
    with pytest.raises(NotPrepared) as caught:
        kitchen.do(preparation._ask([replace(one, digest="0" * 64) for one in locked]))
    assert {str(fault.reason) for fault in caught.value.faults} == {"hash_mismatch"}


def test_what_was_asked_for_is_judged_as_such_in_a_snapshot_of_another_request(
    kitchen: Kitchen, pypi: Registry
) -> None:
    """A snapshot is of what is in it: who asked for which part of it is of the request."""
    kitchen.prepare(kitchen.wanted(pypi, "app==1.0", "libx==1.2", **POLICY)).close()
    with kitchen.prepare(kitchen.wanted(pypi, "app==1.0", **POLICY)) as lease:
        for asked in (["app"], ["app", "libx"]):
            seen = lease.manifest.for_request(asked)
            assert [one.name for one in seen.artifacts if one.requested] == asked


@pytest.mark.parametrize("torn", ["manifest.json", "artifact.json"])
def test_what_was_torn_is_made_anew(kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, torn: str) -> None:
    """A record that a stopped host left empty was never replaced: its packages could not be had any more."""
    name = f"torn-{torn[:4]}"
    module = name.replace("-", "_")
    pypi_registry.packages.add(wheel(name, "1.0", files={f"{module}.py": "X = 1\n"}))
    wanted = kitchen.wanted(pypi, f"{name}==1.0", **POLICY)
    with kitchen.prepare(wanted) as lease:
        snapshot = lease.tree.parent
        key = lease.manifest.artifacts[0].key(lease.manifest.ecosystem, lease.manifest.platform)
    artifact = kitchen.store.root / "artifacts" / key
    file = artifact / "tree" / f"{module}.py"
    file.chmod(0o644)
    file.write_text("")  # one inode: the snapshot's too
    file.chmod(0o444)
    (snapshot / "manifest.json").write_text("")
    (artifact / "artifact.json").write_text("")
    if torn == "artifact.json":
        (snapshot / "manifest.json").unlink()
    with kitchen.prepare(wanted) as lease:
        assert (lease.tree / f"{module}.py").read_text() == "X = 1\n"


def test_an_answer_grows_old(kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry) -> None:
    """An exact version is asked for again after a day, any other selector after minutes."""
    pypi_registry.packages.add(wheel("ages", "1.0"))
    now = datetime.now(UTC)
    for specifier, fresh, stale in (("ages==", timedelta(minutes=9), timedelta(minutes=11)),
                                    ("ages==1.0", timedelta(hours=23), timedelta(hours=25))):  # fmt: skip
        wanted = kitchen.wanted(pypi, specifier, **POLICY)
        kitchen.prepare(wanted).close()
        for later, asked in ((fresh, 0), (stale, 1)):
            before = kitchen.chambers
            kitchen.do(kitchen.preparer.prepare(wanted, now=at(now + later))).close()
            assert kitchen.chambers - before == asked, (specifier, later)


def test_concurrent_preparations_of_one_set_are_one(kitchen: Kitchen, pypi: Registry) -> None:
    wanted = kitchen.wanted(pypi, "with-tool==", "libx==1.0", **POLICY)
    before = kitchen.chambers

    async def all_at_once() -> list[Lease]:
        return await asyncio.gather(*(kitchen.preparer.prepare(wanted) for _ in range(8)))

    leases = kitchen.do(all_at_once())
    assert len({lease.tree for lease in leases}) == 1
    assert kitchen.chambers - before == 1
    for lease in leases:
        lease.close()


def test_a_new_set_of_known_packages_fetches_none_of_them(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    kitchen.prepare(kitchen.wanted(pypi, "good==1.0", **POLICY)).close()
    kitchen.prepare(kitchen.wanted(pypi, "attested==1.0", **POLICY)).close()
    pypi_registry.forget()
    with kitchen.prepare(kitchen.wanted(pypi, "good==1.0", "attested==1.0", **POLICY)) as lease:
        assert names(lease) == ["attested 1.0", "good 1.0"]
    assert not [path for path in pypi_registry.paths if path.endswith(".whl")]


def test_the_store_is_kept_within_its_budget(kitchen: Kitchen, pypi: Registry) -> None:
    """After a preparation what is not in use goes, and what was just made stays."""
    kitchen.prepare(kitchen.wanted(pypi, "good==1.0", **POLICY)).close()
    small = Preparer(kitchen.store, kitchen.platform, kitchen.chamber, budget_bytes=0)
    with kitchen.prepare(kitchen.wanted(pypi, "attested==1.0", **POLICY)) as used:
        with kitchen.do(small.prepare(kitchen.wanted(pypi, "libx==1.0", **POLICY))) as made:
            assert {entry.id for entry in kitchen.store.entries()} == {used.id, made.id}
            assert kitchen.run(plan(made), "import libx; print(libx.VERSION)")[:2] == (0, "1.0\n")


def test_every_request_is_in_the_log_under_the_call(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    pypi_registry.packages.add(wheel("only-here", "1.0"))
    wanted = kitchen.wanted(pypi, "only-here==", **POLICY)
    kitchen.prepare(wanted).close()
    events = [event for event in kitchen.events() if event.get("call_id") == wanted.grant.call_id]
    assert {event["attempt_id"] for event in events} == {f"{wanted.grant.call_id}.prepare{n}" for n in (1, 2)}
    logged = {event["path"] for event in events if event.get("path")}
    assert {path.partition(" ")[2] for path in pypi_registry.paths} <= logged
    assert all(event["decision"] == "allow" for event in events if "decision" in event)


def test_the_registry_is_asked_for_a_project_once(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """The resolver's page and the facts that its choice is judged by are of one answer."""
    pypi_registry.packages.add(wheel("asked-once", "1.0"))
    pypi_registry.forget()
    kitchen.prepare(kitchen.wanted(pypi, "asked-once==", **POLICY)).close()
    assert len([path for path in pypi_registry.paths if path.endswith("/asked-once/")]) == 1


@pytest.mark.parametrize(("ecosystem", "name", "version"), [("pypi", "libx", "1.0"), ("npm", "nlib", "1.0.0")])
def test_what_the_proxy_tells_of_files_is_what_the_registry_says(
    kitchen: Kitchen, pypi: Registry, npm: Registry, ecosystem: str, name: str, version: str
) -> None:
    """Of those that it has read under the same grant. Of others it tells nothing, and the registry is asked."""
    python_ = ecosystem == "pypi"
    registry, delimiter = (pypi, "==") if python_ else (npm, "@")
    wanted = kitchen.wanted(registry, f"{name}{delimiter}{version}", **POLICY, max_specifiers=11)
    errands = Errands(wanted, kitchen.platform, kitchen.do(kitchen.chamber()), kitchen.store.root / "tmp")
    filename = f"{name}-{version}-py3-none-any.whl" if python_ else f"{name}-{version}.tgz"
    assert kitchen.do(errands.known({name: [filename]})) == {}
    assert kitchen.do(errands.resolve()).lock is not None
    said = kitchen.do(errands.pages({name: [filename if python_ else version]}))[name]
    told = kitchen.do(errands.known({name: [filename], "never-asked-for": ["x"]}))
    assert told.keys() == {name}
    assert [file.filename for file in told[name].files] == [filename]
    assert (told[name].package, told[name].files) == (said.package, said.files)


def test_source_that_cannot_be_compiled_is_left_as_it_is(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """Neither a compiler that gives up nor one that ends costs more than that file's bytecode, or that one package."""
    files: dict[str, str | bytes] = {
        "odd/__init__.py": "X = 1\n",
        "odd/deep.py": "(" * 100_000,
        "odd/nul.py": "\0",
        "odd/latin.py": b"\xff",
        "odd/long.py": "-" * 1_000_000 + "1",
    }
    pypi_registry.packages.add(wheel("odd", "1.0", files=files))
    with kitchen.prepare(kitchen.wanted(pypi, "odd==", **POLICY)) as lease:
        compiled = [path.name.partition(".")[0] for path in lease.tree.rglob("*.pyc")]
        assert compiled == ["__init__"]
        assert kitchen.run(plan(lease), "import odd; print(odd.X)")[:2] == (0, "1\n")


def test_a_preparation_that_is_cancelled_leaves_nothing(kitchen: Kitchen, pypi: Registry) -> None:
    wanted = kitchen.wanted(pypi, "Foo.Bar_Baz==", **POLICY)

    async def cancel() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(kitchen.preparer.prepare(wanted, progress=lambda _: started.set()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    kitchen.do(cancel())
    assert list((kitchen.store.root / "tmp").iterdir()) == []
    with kitchen.prepare(wanted) as lease:
        assert names(lease) == ["foo-bar-baz 1.0"]


def test_a_manifest_has_the_facts_of_every_artifact(kitchen: Kitchen, pypi: Registry) -> None:
    with kitchen.prepare(kitchen.wanted(pypi, "app==", **POLICY)) as lease:
        written = json.loads((lease.tree.parent / "manifest.json").read_text())
        files = [path for path in lease.tree.rglob("*") if path.is_file()]
    assert {one["name"]: one["requested"] for one in written["artifacts"]} == {"app": True, "libx": False}
    assert all(one["facts"]["uploaded_at"] and one["facts"]["first_published"] for one in written["artifacts"])
    assert sum(one["contents"]["files"] for one in written["artifacts"]) == len(files)
    assert sum(one["contents"]["bytes"] for one in written["artifacts"]) == sum(map(os.path.getsize, map(Path, files)))


_SIBLINGS = """
import os, tempfile
file = tempfile.TemporaryFile()
reader, writer = os.pipe()
first = os.fork()
if first == 0:
    os.read(reader, 1)
    os._exit(0)
second = os.fork()
if second == 0:
    try:
        os.open(f"/proc/{first}/fd/{file.fileno()}", os.O_RDWR)
        os._exit(7)
    except PermissionError:
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""


@pytest.mark.parametrize(("undumpable", "reached"), [(False, "7\n"), (True, "0\n")])
def test_who_takes_over_one_archives_parser_reaches_no_others(kitchen: Kitchen, undumpable: bool, reached: str) -> None:
    """Siblings of one uid: what one holds, the other cannot open. The control: as processes usually are, it can."""
    loaded = modules("fetch")
    step = "sys.modules['sandbox.packages.inside_fetch'].set_undumpable()\n" if undumpable else ""
    base = python.plan(this_interpreter(), call_id="call-test", attempt=1, memory_bytes=256 * MIB)
    assert kitchen.run(base, loaded + step + _SIBLINGS) == (0, reached, "")
