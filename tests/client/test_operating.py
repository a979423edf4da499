"""`docs/operating.md`: its commands, metrics, checks and steps are those of the program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.client import Client
from sandbox.service.metrics import Metrics
from tests.client.serving import serving
from tests.test_docs import ALL_COMMANDS, PAGES, README, TOP, blocks, rows, section

PAGE = PAGES["docs/operating.md"]
STEPS = [line for block in blocks(PAGE, "") for line in block.splitlines()]
POLICY = TOP / "configs" / "policies" / "default.yaml"
SOURCES = "".join(path.read_text() for path in (TOP / "sandbox").rglob("*.py"))


def commands_of(page: str) -> list[list[str]]:
    """Every `sluicegate …` that a page writes, in a block or in the text."""
    written = re.findall(r"`sluicegate ([^`]+)`", page)
    written += [line.partition("sluicegate ")[2] for line in STEPS if re.match(r"(\S+/)?sluicegate ", line)]
    return [shlex.split(line) for line in written]


def test_every_command_and_option_is_real() -> None:
    found = commands_of(PAGE)
    assert len(found) >= 10
    for words in found:
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in ALL_COMMANDS), None)
        assert name is not None, words
        known = {spelling for option in ALL_COMMANDS[name].params for spelling in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_options_of_serve_in_the_text_are_its_own() -> None:
    known = {spelling for option in ALL_COMMANDS["serve"].params for spelling in option.opts}
    others = {"--call", "--tenant", "--denied", "--json", "--ulimit"}
    mentioned = set(re.findall(r"(?<=`)--[a-z][a-z-]+", PAGE))
    assert mentioned - others <= known
    assert len(mentioned) >= 8


def test_what_is_installed_is_there_and_goes_where_the_unit_looks() -> None:
    unit = (TOP / "configs" / "systemd" / "sluicegate.service").read_text()
    installs = [shlex.split(line) for line in STEPS if line.startswith("install -D")]
    assert len(installs) == 4
    for words in installs:
        assert (TOP / words[-2]).is_file(), words
    assert "/etc/sluicegate/policy.yaml" in unit
    assert "/opt/sluicegate/bin/sluicegate" in unit


def test_the_metrics_are_counted() -> None:
    text = Metrics().text().decode()
    named = set(re.findall(r"`(sluicegate_[a-z_]+|process_[a-z_]+)", section(PAGE, "## What to watch")))
    assert len(named) >= 10
    for name in named:
        assert name in text or f'"{name.removeprefix("sluicegate_")}"' in SOURCES, name


def test_each_of_doctors_checks_has_its_line() -> None:
    table = rows(section(PAGE, "## When it does not work"))
    explained = {name for cells in table if len(cells) == 3 for name in re.findall(r"`([^`]+)`", cells[0])}
    named = set(re.findall(r'Check\(\s*"([a-z ]+)"', SOURCES)) | {"python", "javascript"}
    named |= {f"registry of {language}" for language in ("python", "javascript")}
    assert len(named) >= 9
    assert named <= explained
    codes = [cells[0] for cells in table if len(cells) == 2]
    for code in re.findall(r"`([a-z_]+)`", " ".join(codes)):
        assert f'"{code}"' in SOURCES, code


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_a_backup_of_a_running_service_can_be_restored(state: Path, tmp_path: Path) -> None:
    """By the page's own commands: what had ended is there, users' files are, and the key of the authority is not."""
    socket, backup = tmp_path / "s", tmp_path / "sluicegate.tar.gz"

    def step(beginning: str) -> None:
        [line] = [line for line in STEPS if line.startswith(beginning)]
        line = line.replace("/var/lib/sluicegate", str(state)).replace("/srv/backup/sluicegate.tar.gz", str(backup))
        line = line.replace("python3", sys.executable).replace("-o sluicegate -g sluicegate", "")
        subprocess.run(["/bin/sh", "-euc", line], check=True, timeout=60)

    with serving(state, "--uds", str(socket)), Client(uds=socket, user="alice") as client:
        done = client.submit(language="python", code="print('kept')")
        assert done.wait(30).state == "finished"
        assert client.code_exec("open('f', 'w').write('mine')").success
        step('python3 -m sqlite3 /var/lib/sluicegate/calls/calls.sqlite "VACUUM INTO')
        step("tar --create")
        step("rm /var/lib/sluicegate/backup.sqlite")
    state.rename(tmp_path / "gone")
    state.mkdir(mode=0o700)
    for beginning in ("tar --extract", "install -d -m 0700", "mv /var/lib/sluicegate/backup.sqlite"):
        step(beginning)
    names = {path.name for path in state.iterdir()}
    assert names >= {"calls", "user_data", "audit.jsonl"}
    assert names & {"authority", "package-store", "run", "backup.sqlite"} == set()
    with serving(state, "--uds", str(socket)), Client(uds=socket, user="alice") as client:
        assert client.task(done.task_id).result.stdout == "kept\n"  # type: ignore[union-attr]  # it has ended
        assert client.code_exec("print(open('f').read())").output == "mine\n"
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "sandbox.cli", "audit", "verify", str(state / "audit.jsonl")],
        cwd=TOP, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_user_can_be_removed(state: Path, tmp_path: Path) -> None:
    """By the page's own commands, and nobody else is."""
    socket = tmp_path / "s"
    with serving(state, "--uds", str(socket)):
        for user in ("alice", "bob"):
            with Client(uds=socket, user=user) as client:
                assert client.code_exec("open('f', 'w').write('mine')").success
    removal = section(PAGE, "## Incidents").partition("**Removing a user's data.**")[2]
    for line in blocks(removal, "")[0].splitlines():
        line = line.replace("/var/lib/sluicegate", str(state)).replace("python3", sys.executable)
        subprocess.run(["/bin/sh", "-euc", line], check=True, timeout=60)
    with serving(state, "--uds", str(socket)):
        for user, left in (("alice", 0), ("bob", 1)):
            with Client(uds=socket, user=user) as client:
                assert len(client.calls().calls) == left
                assert client.code_exec("import os; print('f' in os.listdir())").output == f"{bool(left)}\n"


def test_the_readme_leads_here() -> None:
    assert "docs/operating.md" in README
    assert "docs/client.md" in README


def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    """Against a service that was started as the readme starts it, but for the places."""
    (text,) = blocks(section(README, "## Beside an agent host"), "python")
    (shown,) = blocks(section(README, "## Beside an agent host"), "console")
    socket = tmp_path / "s"
    command, said = shown.splitlines()
    words = shlex.split(command.removeprefix("$ sluicegate serve ").replace("team.yaml", str(POLICY)))
    place = words[words.index("--uds") + 1]
    with serving(tmp_path / "state", *[word.replace(place, str(socket)) for word in words]) as service:
        assert f"listening on {service.address}".replace(str(socket), place) == said
        done = subprocess.run(
            [sys.executable, "-c", text.replace(place, str(socket))],
            cwd=TOP,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.stdout, done.stderr) == ("42\n seen\n\n", "")
