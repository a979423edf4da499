"""kill -9 of a service with calls at every stage: what the next one says of them is true, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lab import read_events
from tests.remote_executor import GONE_SECONDS
from tests.unprivileged import unprivileged_command

pytestmark = pytest.mark.slow  # each test starts a service, or programs that go on for a while

TOP = Path(__file__).parents[2]
DETACHED = ["detached", "keyed", "waiting", "waiting, plain"]


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sg-"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=["as-we-are", "unprivileged"])
def prefix(request: pytest.FixtureRequest) -> Iterator[Sequence[str]]:
    if request.param == "as-we-are":
        yield []
        return
    if os.getuid() != 0:
        pytest.skip("the tests already run as an unprivileged user")
    with unprivileged_command() as words:
        yield words


@contextlib.contextmanager
def service(prefix: Sequence[str], root: Path, what: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and what it said."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.faults.service_process", str(root), what], cwd=TOP,
        env={**os.environ, "HOME": str(root), "TMPDIR": str(root)}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            said: dict[str, Any] = json.loads(process.stdout.readline())
            yield process, said
        finally:
            if process.poll() is None and what == "begin":
                process.kill()


def scripts(root: Path) -> list[str]:
    directory = root / "state" / "user_data" / "default"
    return sorted(str(path.parent.relative_to(directory)) for path in directory.rglob("code_exec_*.py"))


def test_calls_of_a_killed_service_are_lost_and_told_once(root: Path, prefix: Sequence[str]) -> None:
    """Ended ones have their answer; all others are lost, with that said; none is run again, and no script is left."""
    with service(prefix, root, "begin") as (process, ids):
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
    assert scripts(root) == [".", "below"], "the control: there was something to remove"
    _, alive = psutil.wait_procs(started, timeout=GONE_SECONDS)
    assert alive == []
    open_ids = {call_id for name, call_id in ids.items() if name != "ended"}

    with service(prefix, root, "look") as (_, found):
        pass
    assert scripts(root) == []
    assert found["listing"].startswith("['below', 'code_exec_"), found["listing"]
    assert set(found["lost"]) == open_ids
    records = found["records"]
    assert set(records) == set(ids.values())
    assert records[ids["ended"]]["state"] == "finished"
    assert records[ids["ended"]]["code_exec"]["success"] is True
    for call_id in open_ids:
        record = records[call_id]
        assert record["state"] == "lost"
        assert record["result"]["error"]["code"] == "executor_lost"
        assert record["result"]["stdout"] == ""
    notes, none = found["notes"]
    assert {note["task_id"]: note["state"] for note in notes} == {ids["ended"]: "finished"} | {
        ids[name]: "lost" for name in DETACHED
    }
    assert none == []
    assert found["keyed"]["call_id"] == ids["keyed"]
    assert found["keyed"]["error"]["code"] == "executor_lost"
    lost = [event["call_id"] for event in read_events(root / "audit.jsonl") if event.get("what") == "lost"]
    assert sorted(lost) == sorted(open_ids)

    with service(prefix, root, "look") as (_, again):
        pass
    assert (again["lost"], again["notes"]) == ([], [[], []])
    assert {one: record["state"] for one, record in again["records"].items() if one in records} == {
        one: record["state"] for one, record in records.items()
    }


def test_under_load_no_call_is_answered_twice_and_none_is_lost_without_a_word(root: Path) -> None:
    """Killed three times. What was answered stays so; what was accepted has an answer or is lost; keys agree with that."""
    for answers in (1, 12, 40):
        accepted: dict[str, str] = {}
        answered: dict[str, tuple[str, str]] = {}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.faults.service_process", str(root), "load"], cwd=TOP,
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:  # to the last whole one
                if not line.endswith("\n"):
                    break
                said = json.loads(line)
                if "accepted" in said:
                    accepted[said["accepted"]] = said["key"]
                else:
                    answered[said["answered"]] = said["key"], said["stdout"]
                if len(answered) == answers:
                    process.kill()
        assert len(answered) >= answers
        keys = accepted | {call_id: key for call_id, (key, _) in answered.items()}
        (root / "asked.json").write_text(json.dumps(list(keys.items())))
        with service([], root, "ask") as (_, found):
            pass
        for call_id in keys:
            record, again = found["calls"][call_id]["record"], found["calls"][call_id]["again"]
            assert again["call_id"] == call_id, "its key gives it, and runs nothing again"
            if call_id in answered:
                assert record["state"] == "finished"
                assert record["result"]["stdout"] == again["stdout"] == answered[call_id][1]
            elif record["state"] == "finished":
                assert record["result"]["stdout"] == again["stdout"] != ""
            else:
                assert record["state"] == "lost"
                assert again["error"]["code"] == "executor_lost"
        told, none = found["notes"]
        assert none == []
        assert len(told) == len(set(told))
        assert set(accepted) <= set(told), "of each that was accepted its owner is told"
