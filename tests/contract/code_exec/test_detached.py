"""Calls in the background: a `task_id` at once, the `tasks` tool, and a note that is told once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.contract.code_exec.driver import ENDED, Driver, Refused, Who
from tests.contract.code_exec.programs import TREE, WAIT, family_is_gone, family_is_ready, started, together
from tests.remote_executor import until


def turn(driver: Driver, who: Who) -> list[dict[str, Any]]:
    """A user's next turn, and the notes that it began with."""
    answer = driver.code_exec(who, code="print('a turn')")
    assert answer.output == "a turn\n"
    return [dict(note) for note in answer.notes]


def test_a_detached_call_answers_at_once_with_a_task_id(driver: Driver, who: Who) -> None:
    """The answer is there while the program cannot have ended, and is no result yet."""
    answer = driver.code_exec(who, code=WAIT + "print('done')", background=True)
    assert isinstance(answer.task_id, str)
    assert answer.success is None
    assert "done" not in answer.output
    assert driver.state(who, answer.task_id) not in ENDED
    started(driver.files(who))
    (driver.files(who) / "go").touch()
    assert driver.ended(who, answer.task_id) == "finished"
    driver.take_notes(who)


def test_a_detached_call_outlives_the_turn(driver: Driver, user: Who) -> None:
    """The client goes away, other calls are made and answered, and it still runs to its end."""
    task_id = driver.detach(user, WAIT + "print('outlived')")
    started(driver.files(user))
    driver.forget(user)
    assert turn(driver, user) == []
    (driver.files(user) / "go").touch()
    assert driver.ended(user, task_id) == "finished"
    (note,) = turn(driver, user)
    assert "outlived" in note["text"]


def test_the_result_is_a_note_at_the_next_turn_exactly_once(driver: Driver, who: Who) -> None:
    """With the real result; and in no turn before it had ended, nor in any later one."""
    driver.take_notes(who)
    task_id = driver.detach(who, WAIT + "print(6 * 7)")
    started(driver.files(who))
    assert turn(driver, who) == []
    (driver.files(who) / "go").touch()
    assert driver.ended(who, task_id) == "finished"
    (note,) = turn(driver, who)
    assert (note["task_id"], note["state"], note["success"]) == (task_id, "finished", True)
    assert "42\n" in note["text"]
    assert [turn(driver, who), turn(driver, who), driver.take_notes(who)] == [[], [], []]


def test_turns_at_once_have_a_note_once_between_them(driver: Driver, user: Who) -> None:
    """Whichever of them has it, no other does."""
    detached = together(driver, user, *({"code": f"print({number})", "background": True} for number in range(5)))
    task_ids = [str(answer.task_id) for answer in detached]
    for task_id in task_ids:
        driver.ended(user, task_id)
    answers = together(driver, user, *[{"code": "print()"}] * 6)
    told = [note["task_id"] for answer in [*detached, *answers] for note in answer.notes]
    assert sorted(told) == sorted(task_ids)


def test_notes_can_be_taken_without_a_run(driver: Driver, user: Who) -> None:
    """A host that starts a turn asks for them; they count as told then."""
    task_id = driver.detach(user, "print('taken')")
    driver.ended(user, task_id)
    (note,) = driver.take_notes(user)
    assert note["task_id"] == task_id
    assert "taken" in note["text"]
    assert (driver.take_notes(user), turn(driver, user)) == ([], [])


def test_a_call_that_is_given_up_takes_no_note_with_it(driver: Driver, user: Who) -> None:
    """A note that nobody was there to hear has not been told: the next turn has it."""
    task_id = driver.detach(user, "print('heard')")
    driver.ended(user, task_id)
    pending = driver.begin(user, {"code": TREE, "timeout": 100})
    family_is_ready(driver.files(user))
    pending.leave()
    family_is_gone(driver.files(user))
    until(lambda: not list(driver.files(user).glob("*.py")), "the end of the script")
    assert [note["task_id"] for _ in range(3) for note in turn(driver, user)] == [task_id]


def test_a_failed_task_has_its_real_result(driver: Driver, user: Who) -> None:
    """Exit code and traceback, as in the foreground."""
    task_id = driver.detach(user, "print('before')\nraise ValueError('mine')")
    driver.ended(user, task_id)
    (note,) = turn(driver, user)
    assert (note["state"], note["success"]) == ("finished", False)
    assert "ValueError: mine" in note["text"]
    answer = driver.show_task(user, task_id).answer
    assert answer is not None
    assert (answer.success, answer.exit_code) == (False, 1)
    assert answer.output.startswith("before\n[stderr] Traceback")
    assert answer.output.endswith("ValueError: mine\n")


def test_notes_are_their_users_own(driver: Driver, user: Who, other: Who, single_user: Who) -> None:
    """Nobody else's turn begins with them, and nobody else can take them."""
    driver.take_notes(single_user)
    task_id = driver.detach(user, "print('mine')")
    driver.ended(user, task_id)
    for stranger in (other, single_user):
        assert (turn(driver, stranger), driver.take_notes(stranger)) == ([], [])
    assert [note["task_id"] for note in turn(driver, user)] == [task_id]


def test_the_tasks_tool_lists_and_shows(driver: Driver, user: Who) -> None:
    """What runs and what has ended, newest first; calls in the foreground are no tasks."""
    assert driver.list_tasks(user) == []
    first = driver.detach(user, "print('first')")
    assert driver.ended(user, first) == "finished"
    second = driver.detach(user, WAIT)
    started(driver.files(user))
    driver.code_exec(user, code="print('in the foreground')")
    assert [(task.task_id, task.state) for task in driver.list_tasks(user)] == [
        (second, "running"),
        (first, "finished"),
    ]
    shown = driver.show_task(user, first)
    assert shown.state == "finished"
    assert shown.answer is not None
    assert (shown.answer.success, shown.answer.output) == (True, "first\n")
    running = driver.show_task(user, second)
    assert (running.state, running.answer is None or running.answer.success is None) == ("running", True)
    (driver.files(user) / "go").touch()
    driver.ended(user, second)


def test_the_tasks_tool_waits(driver: Driver, user: Who) -> None:
    """For the result, if it comes; and no longer than it was told to, if it doesn't."""
    task_id = driver.detach(user, WAIT + "print('waited for')")
    started(driver.files(user))
    assert driver.wait_for_task(user, task_id, 1).state == "running"
    (driver.files(user) / "go").touch()
    waited = driver.wait_for_task(user, task_id, 40)
    assert waited.state == "finished"
    assert waited.answer is not None
    assert waited.answer.output == "waited for\n"


def test_the_tasks_tool_cancels(driver: Driver, who: Who) -> None:
    """The whole tree is killed, the task says so, and it has no success."""
    driver.take_notes(who)
    task_id = driver.detach(who, TREE)
    family_is_ready(driver.files(who))
    driver.cancel_task(who, task_id)
    family_is_gone(driver.files(who))
    assert driver.ended(who, task_id) == "cancelled"
    task = driver.show_task(who, task_id)
    assert task.answer is None or task.answer.success is False
    driver.take_notes(who)


def test_the_note_of_a_cancelled_task_says_so(driver: Driver, user: Who) -> None:
    """It is told once, as every end of a task is."""
    task_id = driver.detach(user, WAIT)
    started(driver.files(user))
    notes = [dict(note) for note in driver.cancel_task(user, task_id).notes]
    driver.ended(user, task_id)
    notes += turn(driver, user) + turn(driver, user)
    assert [(note["task_id"], note["state"], note["success"]) for note in notes] == [(task_id, "cancelled", False)]


def test_tasks_are_their_users_own(driver: Driver, user: Who, other: Who, single_user: Who) -> None:
    """For anybody else there is no such task: it is not listed, shown, waited for, cancelled or read."""
    task_id = driver.detach(user, WAIT + "print('still here')")
    started(driver.files(user))
    for stranger in (other, single_user):
        assert task_id not in {task.task_id for task in driver.list_tasks(stranger)}
        looks: list[Callable[[], object]] = [
            partial(driver.show_task, stranger, task_id),
            partial(driver.wait_for_task, stranger, task_id, 1),
            partial(driver.cancel_task, stranger, task_id),
            partial(driver.state, stranger, task_id),
            partial(driver.written, stranger, task_id, "stdout"),
        ]
        for look in looks:
            with pytest.raises(Refused):
                look()
    with pytest.raises(Refused) as missing:
        driver.show_task(other, "call-" + "0" * 16)
    with pytest.raises(Refused) as theirs:
        driver.show_task(other, task_id)
    assert str(theirs.value).replace(task_id, "ID") == str(missing.value).replace("call-" + "0" * 16, "ID")
    (driver.files(user) / "go").touch()
    assert driver.ended(user, task_id) == "finished"


def test_a_result_stays_readable_after_its_note(driver: Driver, user: Who) -> None:
    """Until it expires: the note is told once, the result is shown as often as one asks."""
    task_id = driver.detach(user, "print('kept')")
    driver.ended(user, task_id)
    assert len(turn(driver, user)) == 1
    for _ in range(2):
        task = driver.show_task(user, task_id)
        assert task.answer is not None
        assert task.answer.output == "kept\n"
        assert driver.written(user, task_id, "stdout") == "kept\n"


def test_a_detached_call_works_in_the_directory_too(driver: Driver, who: Who) -> None:
    """The same confinement: its directory, its script that goes, its files that stay."""
    driver.put(who, **{"sub/": ""})
    task_id = driver.detach(who, "open('made.txt', 'w').write('by a task')", working_dir="sub")
    driver.ended(who, task_id)
    driver.take_notes(who)
    assert (driver.files(who) / "sub" / "made.txt").read_text() == "by a task"
    assert [path.name for path in (driver.files(who) / "sub").iterdir()] == ["made.txt"]
    outside = driver.detach(who, "open('made.txt', 'w').write('outside')", working_dir="/home/user/project")
    driver.ended(who, outside)
    driver.take_notes(who)
    assert (driver.files(who) / "made.txt").read_text() == "outside"
    answer = driver.show_task(who, outside).answer
    assert answer is not None
    assert answer.working_dir["replaced"] is True


def test_a_call_in_the_foreground_ends_with_its_client(driver: Driver, user: Who) -> None:
    """What must outlive the turn is detached: a client that leaves takes its call with it, and all its processes."""
    pending = driver.begin(user, {"code": TREE, "timeout": 200})
    family_is_ready(driver.files(user))
    pending.leave()
    family_is_gone(driver.files(user))
    until(lambda: turn(driver, user) == [], "a turn without a note")
