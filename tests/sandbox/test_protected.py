"""No working directory has anything of this program in it: its source, its Python, what a policy names, the way there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import proxy
import sandbox
from sandbox.interpreters import this_interpreter
from sandbox.isolation import syscalls
from sandbox.policy_file import parse_policy, policy_schema
from sandbox.protected import Place, check, files_of, installation, settings_of_clients, way_of
from sandbox.state import InvalidSettings, shipped_policies

REPOSITORY = Path(__file__).parents[2]


def refused(root: Path, *places: Place) -> bool:
    try:
        check(os.path.realpath(root), places)
    except InvalidSettings as error:
        return "\nhint: " in str(error)
    return False


class TestInstallation:
    @pytest.mark.parametrize(
        "place",
        [
            Path(str(sandbox.__file__)).parent, Path(str(proxy.__file__)).parent, Path(sys.prefix), Path(sys.base_prefix),
            Path(sys.executable).parent, Path(sys.executable).resolve().parent, Path(this_interpreter().base_prefix),
            shipped_policies(), Path(str(sandbox.__file__)).parent / "isolation",
        ],
    )  # fmt: skip
    def test_no_part_of_it_and_nothing_that_has_it_is_one(self, place: Path) -> None:
        for root in (place, *place.parents):
            assert refused(root, *installation()), root

    def test_a_project_beside_it_is_one(self, tmp_path: Path) -> None:
        assert not refused(tmp_path, *installation(), *settings_of_clients())

    def ask(self, project: Path, python: str, *options: str) -> str:
        """What is said of a project, by a Python that is started in it."""
        code = (
            "import os, pathlib\nfrom sandbox.state import InvalidSettings\nfrom sandbox.workdir import WorkingDirectories\n"
            f"try: WorkingDirectories(pathlib.Path({str(project.parent / 'state')!r})).check_client_root(pathlib.Path())\n"
            "except InvalidSettings as error: print(error)\n"
        )
        packages = [path for path in sys.path if path.endswith("site-packages")]
        environment = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *packages]), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [python, *options, "-c", code], cwd=project, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def test_a_project_whose_environment_runs_sluicegate_is_none_and_the_remedy_is_told(self, tmp_path: Path) -> None:
        project = tmp_path / "project"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(project / ".venv")], check=True)
        told = self.ask(project, str(project / ".venv/bin/python"), "-P")
        assert f"`{project}` cannot be a working directory: `{project}/.venv` (the Python that runs sluicegate)" in told
        assert "`pipx`" in told.partition("\nhint: ")[2]
        assert self.ask(project, sys.executable, "-P") == "", "the control: it is by another Python"

    def test_nor_one_in_which_python_looks_for_modules(self, tmp_path: Path) -> None:
        """As `python -m` does in the current directory, before all else."""
        project = tmp_path / "project"
        project.mkdir()
        told = self.ask(project, sys.executable)
        assert "where its modules are looked for" in told
        assert "python -P" in told.partition("\nhint: ")[2]


class TestWays:
    """A place of ours is all the way there, as it is written: who writes to a directory on it makes it lead elsewhere."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        """`config/policy.yaml` by three links, in directories of their own, and one `..`."""
        for name in ("real", "one", "two/inner", "three", "config", "elsewhere"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "real/policy.yaml").touch()
        (tmp_path / "one/policy.yaml").symlink_to("../two/inner/../link")
        (tmp_path / "two/link").symlink_to(tmp_path / "three/policy.yaml")
        (tmp_path / "three/policy.yaml").symlink_to("../real/policy.yaml")
        (tmp_path / "config/current").symlink_to("../one")
        return Place(tmp_path / "config/current/policy.yaml")

    @pytest.mark.parametrize("name", ["real", "one", "two", "two/inner", "three", "config", "."])
    def test_each_directory_with_a_link_of_it_is_refused(self, tmp_path: Path, place: Place, name: str) -> None:
        assert refused(tmp_path / name, place)

    def test_others_are_not(self, tmp_path: Path, place: Place) -> None:
        assert not refused(tmp_path / "elsewhere", place)

    def test_it_is_gone_each_time_anew(self, tmp_path: Path, place: Place) -> None:
        (tmp_path / "elsewhere/policy.yaml").touch()
        (tmp_path / "three/policy.yaml").unlink()
        (tmp_path / "three/policy.yaml").symlink_to("../elsewhere/policy.yaml")
        assert refused(tmp_path / "elsewhere", place)
        assert not refused(tmp_path / "real", place)

    def test_what_is_not_there_yet_is_protected_as_it_is_written(self, tmp_path: Path) -> None:
        place = Place(tmp_path / "run/service.sock")
        assert refused(tmp_path, place)
        (tmp_path / "run").mkdir()
        assert refused(tmp_path / "run", place)

    def test_links_without_end_have_one(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        assert set(way_of(tmp_path / "a/x").links) == {str(tmp_path / "a"), str(tmp_path / "b")}
        assert refused(tmp_path, Place(tmp_path / "a/x"))

    def test_a_place_that_is_whole_has_nothing_below_it_and_others_may(self, tmp_path: Path) -> None:
        (tmp_path / "place/project").mkdir(parents=True)
        assert refused(tmp_path / "place/project", Place(tmp_path / "place"))
        assert not refused(tmp_path / "place/project", Place(tmp_path / "place", whole=False))
        assert refused(tmp_path / "place", Place(tmp_path / "place", whole=False))

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
    def test_a_directory_that_is_mounted_elsewhere_too_is_known(self, tmp_path: Path, place: Place) -> None:
        project = tmp_path / "project"
        project.mkdir()
        for name in ("real", "two", "three", "config"):
            syscalls.mount(str(tmp_path / name), str(project), None, syscalls.MS_BIND)
            try:
                assert refused(project, place), name
            finally:
                syscalls.unmount_lazily(str(project))


def absolute_paths(schema: dict[str, Any], node: object, above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The keys of a policy whose values are absolute paths of this host."""
    found: set[tuple[str, ...]] = set()
    if isinstance(node, list):
        for item in node:
            found |= absolute_paths(schema, item, above)
    if not isinstance(node, dict):
        return found
    if str(node.get("pattern", "")).startswith("^/"):
        return {above}
    if "$ref" in node:
        found |= absolute_paths(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], above)
    for key, value in node.get("properties", {}).items():
        found |= absolute_paths(schema, value, (*above, key))
    for key in ("items", "anyOf", "allOf", "additionalProperties"):
        found |= absolute_paths(schema, node.get(key), above)
    return found


def test_every_file_that_a_policy_names_is_one(tmp_path: Path) -> None:
    """A new key with a path is to be in `files_of`, but for the directories that the policy gives to code."""
    schema = policy_schema()
    keys = {".".join(key) for key in absolute_paths(schema, schema) if key[-1] != "paths"}  # those of requests
    assert keys - {"code_exec.working_directories"} == {
        "packages.advisories.db_dir", "packages.similarity.list_files.pypi", "packages.similarity.list_files.npm",
        "network.upstream.ca_file",
    }  # fmt: skip
    import certifi

    (tmp_path / "ca.pem").write_bytes(Path(certifi.where()).read_bytes())
    for name in ("pypi", "npm"):
        (tmp_path / name).write_text("".join(f"package-{number}\n" for number in range(20)))
    (tmp_path / "db").mkdir()
    (tmp_path / "db/one.json").write_text("{}")
    text = f"""
version: 1
network: {{upstream: {{ca_file: {tmp_path}/ca.pem}}}}
packages:
  advisories: {{db_dir: {tmp_path}/db}}
  similarity: {{list_files: {{pypi: {tmp_path}/pypi, npm: {tmp_path}/npm}}}}
"""
    found = {place.path.name for place in files_of(parse_policy(text).policy)}
    assert found == {"ca.pem", "db", "pypi", "npm"}
