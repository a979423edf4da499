"""What a user still has when the service was killed, or restarted: tasks that tell the truth, and nothing else left."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import pytest

from tests.contract.code_exec.driver import Driver, Who
from tests.contract.code_exec.programs import TREE, WAIT, family_is_gone, family_is_ready, files_with, started


@dataclass(frozen=True)
class Left:
    """What somebody had when the service was killed."""

    told: str
    running: str
    finished: str


def leave(driver: Driver, who: Who, mark: str) -> Left:
    """A task whose note was told, one that runs, one that has ended since; a call in the foreground; and a file."""
    driver.put(who, **{"kept.txt": "kept", "sub/": "", "family/": ""})
    directory = driver.files(who)
    told = driver.detach(who, "print('told')")
    driver.ended(who, told)
    assert [note["task_id"] for note in driver.code_exec(who, code="print()").notes] == [told]
    running = driver.detach(who, f"mark = '{mark}'\n{TREE}", working_dir="family")
    family_is_ready(directory / "family")
    driver.begin(who, {"code": f"mark = '{mark}'\n{WAIT}", "working_dir": "sub", "timeout": 100})
    started(directory / "sub")
    finished = driver.detach(who, "print('finished', 6 * 7)")
    driver.ended(who, finished)
    assert len(files_with(directory, mark)) == 2
    return Left(told, running, finished)


def test_after_a_kill_tasks_tell_the_truth_and_nothing_is_left(driver: Driver, user: Who, single_user: Who) -> None:
    """Those that had ended have their result, those that ran are lost and say so, each is told once; no script stays."""
    mark = secrets.token_hex(8)
    callers = (user, single_user)
    driver.take_notes(single_user)
    left = {who: leave(driver, who, mark) for who in callers}
    driver.restart(kill=True)
    for who in callers:
        directory, tasks = driver.files(who), left[who]
        turn = driver.code_exec(who, code="print(open('kept.txt').read())")
        assert turn.output == "kept\n"
        family_is_gone(directory / "family")
        assert files_with(directory, mark) == []
        assert {note["task_id"]: (note["state"], note["success"]) for note in turn.notes} == {
            tasks.finished: ("finished", True),
            tasks.running: ("lost", False),
        }
        assert driver.code_exec(who, code="print()").notes == []
        for task_id, output in ((tasks.told, "told\n"), (tasks.finished, "finished 42\n")):
            task = driver.show_task(who, task_id)
            assert task.state == "finished"
            assert task.answer is not None
            assert (task.answer.success, task.answer.output) == (True, output)
        lost = driver.show_task(who, tasks.running)
        assert lost.state == "lost"
        assert lost.answer is None or lost.answer.success is False
        listed = [(task.task_id, task.state) for task in driver.list_tasks(who)]
        assert listed[:3] == [(tasks.finished, "finished"), (tasks.running, "lost"), (tasks.told, "finished")]


@pytest.mark.slow
def test_after_an_orderly_restart_tasks_tell_the_truth(driver: Driver, user: Who) -> None:
    """Those that had ended have their result; one that could not end in time is not said to have finished."""
    running = driver.detach(user, TREE)
    directory = driver.files(user)
    family_is_ready(directory)
    finished = driver.detach(user, "print('finished')")
    driver.ended(user, finished)
    driver.restart()
    family_is_gone(directory)
    assert driver.state(user, finished) == "finished"
    assert driver.state(user, running) in ("cancelled", "lost")
    notes = driver.code_exec(user, code="print()").notes
    assert {note["task_id"]: note["success"] for note in notes} == {finished: True, running: False}
    assert driver.code_exec(user, code="print()").notes == []
    assert not list(directory.glob("code_exec_*"))
