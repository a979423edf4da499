"""`sluicegate packages list`, `show` and `prune` say what is in the store, and take nothing that is in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from sandbox.package_store_commands import register
from sandbox.packages.store import Store, store_directory
from tests.packages.test_store import build

type Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(store_directory(tmp_path))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    app = typer.Typer()
    register(app)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), env={"SLUICEGATE_STATE_DIR": str(tmp_path)})

    return run


def test_an_empty_store_is_no_error(run: Run) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, "0 snapshots, 0 B on disk\n")


def test_list_names_what_was_asked_for(run: Run, store: Store) -> None:
    made = build(store, "a", "b")
    result = run("list")
    assert result.exit_code == 0
    assert f"{made.id[:16]}  " in result.stdout
    assert "a@1.0 b@1.0" in result.stdout
    assert "1 snapshots, 2.0 KB on disk" in result.stdout
    assert json.loads(run("list", "--json").stdout)["snapshots"][0]["id"] == made.id


def test_show_has_every_package_with_its_digest(run: Run, store: Store) -> None:
    made = build(store, "a", "b")
    result = run("show", made.id[:8])
    assert result.exit_code == 0
    for one in made.artifacts:
        assert f"{one.name} 1.0  {one.filename}  sha256:{one.digest}" in result.stdout
    assert json.loads(run("show", made.id, "--json").stdout)["artifacts"][0]["name"] == "a"


@pytest.mark.parametrize("text", ["0123", "", "zz"])
def test_a_snapshot_that_is_not_there_is_said(run: Run, store: Store, text: str) -> None:
    build(store, "a")
    result = run("show", text)
    assert result.exit_code == 1
    assert "hint: see `sluicegate packages list`" in result.stderr


def test_prune_keeps_what_is_in_use(run: Run, store: Store) -> None:
    kept, gone = build(store, "a"), build(store, "b")
    lease = store.lease(kept.id)
    assert lease is not None
    with lease:
        result = run("prune", "--budget", "0", "--json")
    assert json.loads(result.stdout) == {
        "snapshots": [gone.id], "artifacts": 1, "freed_bytes": 1000, "left_bytes": 1000,
    }  # fmt: skip
    assert "removed 1 snapshots and 1 unpacked packages, 1.0 KB; 0 B are left" in run("prune", "--budget", "0").stdout


@pytest.mark.parametrize(
    "arguments", [("--budget", "much"), ("--budget", "-1"), ("--unused", "1y"), ("--unused", "d"), ("--budget", "٣")]
)
def test_a_size_or_a_time_that_is_none_is_refused(run: Run, store: Store, arguments: tuple[str, ...]) -> None:
    made = build(store, "a")
    result = run("prune", *arguments)
    assert result.exit_code == 2
    assert "hint: write a number" in result.stderr
    assert [entry.id for entry in store.entries()] == [made.id]


def test_what_is_within_the_budget_stays_unless_it_is_old(run: Run, store: Store) -> None:
    made = build(store, "a")
    assert "removed 0 snapshots" in run("prune").stdout
    assert "removed 0 snapshots" in run("prune", "--unused", "30d").stdout
    assert f"{made.id[:16]}" in run("list").stdout
    assert "removed 1 snapshots" in run("prune", "--unused", "0m").stdout
