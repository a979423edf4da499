"""The documents say what is so: commands, options, codes, fields, files, claims, links, and the examples in them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel

from proxy.network import Reason
from proxy.packages.reasons import Availability, PackageReason, SyntaxDetail
from sandbox import attempt, cli, execute, results, run_commands
from sandbox.contract import (
    AttemptRecord,
    CallError,
    Cause,
    DestinationCount,
    Evidence,
    FullDisk,
    NetworkReport,
    PackageFault,
    ToolResult,
    Usage,
)
from sandbox.policy_file import parse_policy
from sandbox.run_commands import EXIT_INVALID, EXIT_KILLED, EXIT_OUR_FAULT, EXIT_TIMEOUT

TOP = Path(__file__).parents[1]
PAGES = {
    path.relative_to(TOP).as_posix(): path.read_text() for path in (TOP / "README.md", *(TOP / "docs").glob("*.md"))
}
README, COMMANDS, RESULTS = PAGES["README.md"], PAGES["docs/commands.md"], PAGES["docs/results.md"]
DESIGN, THREATS, POLICY = PAGES["docs/design.md"], PAGES["docs/threat-model.md"], PAGES["docs/policy.md"]
PACKAGES = PAGES["docs/packages.md"]


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its depth or above."""
    depth = len(title) - len(title.lstrip("#"))
    start = text.index(f"\n{title}") + 1
    end = re.search(rf"^#{{1,{depth}}} ", text[start + len(title) :], re.MULTILINE)
    return text[start : start + len(title) + end.start()] if end else text[start:]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# Commands


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def options(name: str) -> list[Any]:
    return [one for one in ALL_COMMANDS[name].params if one.param_type_name == "option"]


ALL_COMMANDS = dict(commands(typer.main.get_command(cli.app)))


def test_the_walk_finds_the_commands() -> None:
    assert set(ALL_COMMANDS) >= {"run", "doctor", "policy explain", "audit verify"}


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_every_command_has_its_place_and_every_option_its_line(name: str) -> None:
    group = f"## `sluicegate {name.split()[0]}"
    text = section(COMMANDS, group)
    assert f"`sluicegate {name}" in text
    assert len(options(name)) >= {"run": 9, "policy explain": 6, "audit show": 3}.get(name, 0)
    explained = [cells[0] for cells in rows(text) if len(cells) == 2]
    for option in options(name):
        for spelling in option.opts:
            assert any(re.search(rf"`{spelling}[ `]", cell) for cell in explained), spelling


def test_no_option_is_explained_that_does_not_exist() -> None:
    known = {spelling for name in ALL_COMMANDS for option in options(name) for spelling in option.opts} | {"--help"}
    for page in (README, COMMANDS, POLICY, PACKAGES, PAGES["docs/audit.md"]):
        mentioned = set(re.findall(r"(?:`|sluicegate [^\n`]*?\s|\[)(--[a-z][a-z-]+)", page))
        assert mentioned <= known, mentioned - known


def test_the_exit_statuses_of_run_are_explained() -> None:
    explained = {cells[0] for cells in rows(section(COMMANDS, "## `sluicegate run"))}
    for status in (EXIT_INVALID, EXIT_OUR_FAULT, EXIT_TIMEOUT, EXIT_KILLED):
        assert str(status) in explained
        assert re.search(rf"\b{status}\b", section(README, "## A session"))


# Results


def causes_in_the_code() -> dict[str, set[str]]:
    """Every cause with its statuses, and every finer code with its cause, from the calls that make them."""
    found: dict[str, set[str]] = {}
    for module in (attempt, results):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Verdict", "without_attempt"):
                causes = re.findall(r"Cause\.([A-Z_]+)", ast.unparse(node))
                statuses = re.findall(r"Status\.([A-Z_]+)", ast.unparse(node)) or ["ERROR"]
                for cause in causes:
                    found.setdefault(cause.lower(), set()).add(statuses[0].lower())
    return found


def codes_in_the_code() -> set[str]:
    """Every code of an error that is not the name of a cause, from the calls that make them."""
    found: set[str] = set()
    for module in (attempt, execute, results, run_commands):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.Call):
                continue
            found |= {
                str(k.value.value) for k in node.keywords if k.arg == "code" and isinstance(k.value, ast.Constant)
            }
            if ast.unparse(node.func) in ("_failed", "failed", "results.failed", "_refuse"):
                found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
            if ast.unparse(node.func) == "failed":  # its code was chosen above
                found |= {"proxy_unavailable", "isolation_unavailable"}
            if ast.unparse(node.func) == "_failed":
                found |= {str(c.value) for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant)}
    return found


def test_every_cause_is_explained_with_its_status_and_no_other() -> None:
    made = causes_in_the_code()
    # Not told apart by the call that makes them: a program's own failure, and a call that is none.
    made |= {"signal": {"error"}, "disk": {"error", "killed"}, "pids": {"error"}, "invalid_call": {"error"}}
    made["exit"] = {"success", "error"}
    explained = {
        cells[0].strip("`"): set(re.findall(r"`([a-z]+)`", cells[1]))
        for cells in rows(section(RESULTS, "## Causes"))
        if cells[0].startswith("`") and cells[0] != "`cause`"
    }
    assert explained.keys() == set(Cause)
    assert explained == made


def test_every_code_of_an_error_is_explained_and_no_other() -> None:
    made = codes_in_the_code()
    assert len(made) >= 10
    explained = {cells[0].strip("`") for cells in rows(section(RESULTS, "## Codes"))} - {"error.code"}
    assert explained == (made - set(Cause)) | {"invalid_call", "policy_refused"}


@pytest.mark.parametrize(
    "model",
    [ToolResult, CallError, PackageFault, AttemptRecord, Evidence, FullDisk, Usage, NetworkReport, DestinationCount],
)
def test_every_field_of_a_result_is_explained(model: type[BaseModel]) -> None:
    cells = " ".join(cell for row in rows(RESULTS) for cell in row)
    for field in model.model_fields:
        assert f"`{field}`" in cells, field


def test_every_denial_has_advice() -> None:
    """`tests/configs/test_policy_reference.py` sees to it that each has a line; here, to what stands on it."""
    advice = {cells[0].strip("`"): cells[2] for cells in rows(section(POLICY, "## Reasons")) if len(cells) == 3}
    silent = {Reason.ALLOWED, Reason.ATTEMPT_OVER}
    assert [reason for reason in Reason if not advice[reason] and reason not in silent] == []


@pytest.mark.parametrize(
    ("title", "codes"),
    [("## Reasons", PackageReason), ("## Availability", Availability), ("## Details", SyntaxDetail)],
)
def test_every_code_of_packages_has_its_line_and_no_other_has(title: str, codes: type[StrEnum]) -> None:
    lines = rows(section(PACKAGES, title))[1:]
    assert [cells[0].strip("`") for cells in lines] == [str(code) for code in codes]
    assert all(cell for cells in lines for cell in cells), "each has a meaning, and what to do about it"


# The threat model


def ids_in(path: Path) -> set[str]:
    """The ids of a file's tests, as pytest has them."""
    name, found = path.relative_to(TOP).as_posix(), set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{name}::{node.name}" if isinstance(node, ast.ClassDef) else name
        found |= {
            f"{prefix}::{one.name}"
            for one in inner
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
        }
    return found


ALL_TESTS = {one for path in (TOP / "tests").rglob("test_*.py") for one in ids_in(path)}
CLAIMS = dict(re.findall(r"^- \*\*(T\d+)\.\*\* (.*?)(?=^- \*\*T|^## )", THREATS, re.DOTALL | re.MULTILINE))


def test_the_claims_are_numbered_without_a_gap() -> None:
    assert list(CLAIMS) == [f"T{number}" for number in range(1, len(CLAIMS) + 1)]
    assert len(CLAIMS) >= 40
    assert len(re.findall(r"\*\*T\d", THREATS)) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_claim_names_tests_and_they_exist(claim: str) -> None:
    named = re.findall(r"`(tests/[^`]+)`", CLAIMS[claim])
    assert named
    assert set(named) <= ALL_TESTS


CASES = rows(PAGES["docs/cases.md"])[1:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_case_names_tests_and_they_exist(case: list[str]) -> None:
    *_, held = case
    named = re.findall(r"`([^`]+)`", held)
    assert named
    assert set(named) <= ALL_TESTS


def test_cases_that_do_not_apply_name_tests_that_exist() -> None:
    named = set(re.findall(r"`(tests/[^`]+::[^`]+)`", PAGES["docs/cases.md"]))
    assert len(CASES) >= 30
    assert named <= ALL_TESTS


def test_every_escape_test_attacks_a_claim() -> None:
    attacks = {one for one in ALL_TESTS if one.startswith("tests/escape/")}
    control = "tests/escape/test_escape.py::test_denials_inside_are_still_logged_for_an_unprivileged_user"
    assert {one for one in attacks if one not in THREATS} <= {control}


# The design


def test_the_layout_is_that_of_the_files() -> None:
    tree = blocks(section(DESIGN, "## Layout"), "")[0]
    written: set[str] = set()
    above: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*((?:[\w.-]+(?:\.py:?|/)\s+)*)", line + " ")
        assert names is not None
        first, *rest = names[1].replace(":", " ").split() or [""]
        if first.endswith("/"):
            above[depth:] = [first]
            written |= {"".join(above) + name for name in rest}
        elif first:
            written |= {"".join(above[:depth]) + name for name in (first, *rest)}
    files = {
        path.relative_to(TOP).as_posix()
        for package in ("proxy", "sandbox")
        for path in (TOP / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert {name for name in written if name.startswith(("proxy/", "sandbox/"))} == files


def test_the_directories_of_the_layout_exist() -> None:
    tree = blocks(section(DESIGN, "## Layout"), "")[0]
    names = re.findall(r"^([\w./-]+/)\s", tree, re.MULTILINE)
    assert len(names) >= 6
    assert [name for name in names if not (TOP / name).is_dir()] == []


def test_what_is_called_pure_is_held_to_it() -> None:
    """The modules that the layout calls pure are those of the contracts that import-linter checks."""
    tree = blocks(section(DESIGN, "## Layout"), "")[0]
    pure = re.findall(r"(\w+)\.py\b.*\bpure$", tree, re.MULTILINE)
    contracts = (TOP / "pyproject.toml").read_text()
    assert len(pure) >= 8
    assert [name for name in pure if not re.search(rf'"(?:proxy|sandbox)\.(?:\w+\.)?{name}"', contracts)] == []


# The published schemas


@pytest.mark.parametrize("part", ["call", "result"])
def test_a_published_schema_is_what_the_command_prints(sluicegate: Sluicegate, part: str) -> None:
    published = TOP / "docs" / f"{part}.schema.json"
    assert published.read_text() == sluicegate(f"sluicegate schema {part}")


# All pages


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        where = (TOP / page).parent / path if path else TOP / page
        assert where.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", where.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("page", PAGES)
def test_every_policy_in_a_page_is_one(page: str) -> None:
    for text in blocks(PAGES[page], "yaml"):
        if text.startswith("version:"):
            assert parse_policy(text).policy.version == 1


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`((?:docs|tests|proxy|sandbox|configs|tools|benchmarks)/[\w/.-]+)`", PAGES[page])
    assert [name for name in named if not (TOP / name).exists()] == []


# What the pages show is what happens

type Sluicegate = Callable[..., str]
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
_ATTEMPT = re.compile(r"call-[0-9a-f]+")


@pytest.fixture
def sluicegate(tmp_path: Path) -> Sluicegate:
    """Runs `sluicegate …` as a page writes it; both outputs together, as a terminal shows them."""

    def run(line: str, cwd: Path = tmp_path) -> str:
        words = line.split()
        assert words[0] == "sluicegate"
        done = subprocess.run(
            [sys.executable, "-m", "sandbox.cli", *words[1:]],
            cwd=cwd,
            env={**os.environ, "SLUICEGATE_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(TOP)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
        )  # fmt: skip
        return done.stdout

    return run


def transcript(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it prints."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def masked(text: str) -> str:
    return _ATTEMPT.sub("CALL", _TIME.sub("TIME", text))


def test_the_session_in_the_readme_is_real(sluicegate: Sluicegate, tmp_path: Path) -> None:
    text, answered = blocks(section(README, "## A session"), "console")
    (shown, program), *rest = transcript(text)
    assert shown == "cat fetch.py"
    (tmp_path / "fetch.py").write_text(program)
    assert len(rest) >= 3
    for command, output in rest:
        assert masked(sluicegate(command)) == masked(output)
    (_, call), (command, output) = transcript(answered)
    (tmp_path / "call.json").write_text(call)
    assert masked(sluicegate(command)).startswith(masked(output).removesuffix("…\n"))


def test_the_explanation_in_the_policy_reference_is_real(sluicegate: Sluicegate) -> None:
    text = section(POLICY, "## Explaining a request")
    ((command, output),) = transcript(re.findall(r"```\n(\$.*?)```", text, re.DOTALL)[0])
    assert sluicegate(command, TOP) == output


def test_the_library_example_in_the_readme_runs(tmp_path: Path) -> None:
    (text,) = blocks(section(README, "## As a library"), "python")
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=TOP, capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "SLUICEGATE_STATE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "success 42\n\n"


def test_the_readmes_policy_passes_its_own_check(sluicegate: Sluicegate, tmp_path: Path) -> None:
    (text,) = blocks(section(README, "## Policy"), "yaml")
    (tmp_path / "team.yaml").write_text(text)
    assert "policy `team-default` is valid" in sluicegate("sluicegate policy check team.yaml")


def test_doctor_says_that_this_host_confines(sluicegate: Sluicegate) -> None:
    said = sluicegate("sluicegate doctor")
    assert said.endswith("an attempt is fully confined on this host\n"), said


def test_every_command_that_the_readme_writes_exists() -> None:
    written = set(re.findall(r"sluicegate ((?:policy |audit )?[a-z]+)(?=[ `\n])", README))
    assert written
    assert written <= set(ALL_COMMANDS) | {"policy", "audit"}
    targets = set(re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
