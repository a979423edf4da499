"""What a hostile publisher or registry may try in a preparation, each with the answer that it gets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.packages.model import Ecosystem, parse_name, parse_version
from proxy.packages.requests import Registry
from sandbox.packages import outlet
from sandbox.packages.chamber import Chamber
from sandbox.packages.examination import examine
from sandbox.packages.locked import Fault, LockedArtifact
from sandbox.packages.receive import Tree, receive
from sandbox.packages.records import InvalidOutlet
from sandbox.packages.unpack import Bounds
from tests.packages.conftest import Kitchen
from tests.packages.test_preparation import POLICY, names
from tests.packages.test_unpack import pax_bomb, streams
from tests.registry.build import wheel
from tests.registry.server import NpmRegistry, PypiRegistry

LINUX = "cp313-cp313-manylinux_2_17_x86_64"


def test_a_package_inside_of_a_wheel_is_found(kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry) -> None:
    """The fault: `importlib.metadata` took a denied package for installed, and it was imported."""
    files = {
        "bundler/__init__.py": "",
        "denied/__init__.py": "",
        "bundler-1.0.data/purelib/denied-1.0.dist-info/METADATA": "Name: denied\nVersion: 1.0\n",
    }
    pypi_registry.packages.add(wheel("bundler", "1.0", files=files))
    assert kitchen.refusals(kitchen.wanted(pypi, "bundler==", **POLICY)) == {"bundler": "bundled_package"}


def test_no_wheel_takes_the_place_of_anothers_module(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """The fault: of `victim.py` and `victim/__init__.py` Python imports the second, which another package brought."""
    pypi_registry.packages.add(wheel("victim", "1.0", files={"victim.py": ""}))
    files = {"shadower/__init__.py": "", "victim/__init__.py": ""}
    pypi_registry.packages.add(wheel("shadower", "1.0", requires=["victim"], files=files))
    refused = kitchen.refusals(kitchen.wanted(pypi, "shadower==", **POLICY))
    assert set(refused.values()) == {"file_conflict"}
    kitchen.prepare(kitchen.wanted(pypi, "victim==", **POLICY)).close()


@pytest.mark.parametrize(
    ("alias", "reason"), [("@acme/secret", "internal_name"), ("ndenied", "name_denied"), ("free", None)]
)
def test_no_alias_is_a_name_that_is_denied_or_the_operators_own(
    kitchen: Kitchen, npm: Registry, npm_registry: NpmRegistry, alias: str, reason: str | None
) -> None:
    """The fault: a dependency `"@acme/secret": "npm:payload@1.0.0"` was what `require("@acme/secret")` loads."""
    payload, asker = f"payload-{len(alias)}", f"asker-{len(alias)}"
    npm_registry.packages.add({"name": payload, "version": "1.0.0"})
    npm_registry.packages.add({"name": asker, "version": "1.0.0", "dependencies": {alias: f"npm:{payload}@1.0.0"}})
    wanted = kitchen.wanted(npm, f"{asker}@", **POLICY)
    if reason is None:
        kitchen.prepare(wanted).close()
    else:
        assert kitchen.refusals(wanted) == {payload: reason}


@pytest.mark.parametrize("asked", ["==1.1", "==", "needed"])
def test_of_a_release_the_wheel_that_is_old_enough_is_had(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, asked: str
) -> None:
    """The fault: uv chose the better wheel that was added today, and its refusal was told as a conflict of versions."""
    name = f"late-{len(asked)}"
    pypi_registry.packages.add(wheel(name, "1.1"), age_days=400)
    pypi_registry.packages.add(wheel(name, "1.1", tag=LINUX), age_days=0)
    pypi_registry.packages.add(wheel(f"needs-{name}", "1.0", requires=[f"{name}==1.1"]))
    spec = f"needs-{name}==" if asked == "needed" else name + asked
    with kitchen.prepare(kitchen.wanted(pypi, spec, **POLICY)) as lease:
        assert f"{name} 1.1" in names(lease)
        filenames = [one.filename for one in lease.manifest.artifacts if one.name == name]
        assert filenames == [f"{name.replace('-', '_')}-1.1-py3-none-any.whl"]


def test_a_late_file_of_a_release_that_mends_a_flaw_is_too_new(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, tmp_path: Path
) -> None:
    """The fault: the exemption of the release held for whatever was added to it years later."""
    affected = {"package": {"ecosystem": "PyPI", "name": "mended"}}
    events = [{"introduced": "0"}, {"fixed": "1.1"}]
    report = {"id": "GHSA-1", "affected": [{**affected, "ranges": [{"type": "ECOSYSTEM", "events": events}]}]}
    (tmp_path / "a.json").write_text(json.dumps(report | {"modified": "2026-01-01T00:00:00Z"}))
    policy = {**POLICY, "advisories": {"db_dir": tmp_path, "max_db_age": 0}}
    pypi_registry.packages.add(wheel("mended", "1.1"), age_days=0)
    kitchen.prepare(kitchen.wanted(pypi, "mended==1.1", **policy)).close()  # the control: new, and exempt
    report["affected"][0]["package"]["name"] = "mended-late"  # type: ignore[index]
    (tmp_path / "a.json").write_text(json.dumps(report | {"modified": "2026-01-01T00:00:00Z"}))
    pypi_registry.packages.add(wheel("mended-late", "1.1", tag="cp313-cp313-win_amd64"), age_days=400)
    pypi_registry.packages.add(wheel("mended-late", "1.1", tag=LINUX), age_days=0)
    late = kitchen.wanted(pypi, "mended-late==1.1", **policy, max_specifiers=7)
    assert kitchen.refusals(late) == {"mended-late": "version_too_new"}


def test_half_a_character_in_a_publishers_text_breaks_nothing(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, npm: Registry, npm_registry: NpmRegistry
) -> None:
    """The fault: the manifest could not be written, and a page of uv's not be read."""
    npm_registry.packages.add({"name": "halved-js", "version": "1.0.0"}, said={"deprecated": "bad \ud800 text"})
    with kitchen.prepare(kitchen.wanted(npm, "halved-js@", **POLICY)) as lease:
        assert lease.manifest.artifacts[0].facts.deprecated == "bad \ufffd text"
    pypi_registry.packages.add(wheel("halved", "1.0"), yanked="bad \ud800")
    policy = {**POLICY, "artifacts": {"yanked": "warn"}}
    with kitchen.prepare(kitchen.wanted(pypi, "halved==1.0", **policy)) as lease:
        assert lease.manifest.artifacts[0].facts.yanked_reason == "bad \ufffd"


def test_a_tarball_whose_headers_grow_without_end_is_too_large(
    kitchen: Kitchen, npm: Registry, npm_registry: NpmRegistry
) -> None:
    """The fault: it took the sandbox's whole memory, and was told as a failure of ours."""
    npm_registry.packages.add({"name": "pax-bomb", "version": "1.0.0"}, tarball=pax_bomb(12_000_000))
    assert kitchen.refusals(kitchen.wanted(npm, "pax-bomb@", **POLICY)) == {"pax-bomb": "closure_too_large"}


@pytest.mark.parametrize("reason", ["nope", "\ud800", ["name_denied"], None])
def test_a_reason_that_no_parser_of_ours_has_is_a_failure_of_ours(tmp_path: Path, reason: object) -> None:
    """The fault: it ended as an error that nothing expects."""

    def examined(reason: object) -> str:
        tree = Tree(tmp_path / str(reason == "closure_too_large"), Bounds())
        receive([*streams(outlet.record({"failed": {"reason": reason, "message": "x"}}))], [tree])
        outcome = examine(locked, tree)
        assert isinstance(outcome, Fault)
        return str(outcome.reason)

    name, version = parse_name(Ecosystem.PYPI, "thing"), parse_version(Ecosystem.PYPI, "1.0")
    locked = LockedArtifact(name, version, "https://files.test/thing.whl", "thing.whl", "sha256", "00" * 32)
    assert examined("closure_too_large") == "closure_too_large"
    with pytest.raises(InvalidOutlet):
        examined(reason)


@contextmanager
def small_workspace(kitchen: Kitchen, size: int) -> Iterator[None]:
    had = kitchen.preparer._chamber

    async def chamber() -> Chamber:
        return replace(await had(), workspace_bytes=size)

    kitchen.preparer._chamber = chamber
    try:
        yield
    finally:
        kitchen.preparer._chamber = had


def test_files_that_do_not_fit_are_too_large_and_not_unavailable(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry
) -> None:
    """The fault: what had no room in the sandbox was told as a registry that does not answer."""
    bulky = [f"bulky-{letter}" for letter in "abcd"]
    for name in bulky:
        files: dict[str, Any] = {f"{name.replace('-', '_')}/data.bin": os.urandom(3_000_000)}
        pypi_registry.packages.add(wheel(name, "1.0", files=files))
    wanted = kitchen.wanted(pypi, *(f"{name}==" for name in bulky), **POLICY)
    with small_workspace(kitchen, 5 << 20):
        assert set(kitchen.refusals(wanted).values()) == {"closure_too_large"}
    kitchen.prepare(wanted).close()
