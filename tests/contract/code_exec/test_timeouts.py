"""The timeout of code_exec: clamped, never refused; and what it means when one runs out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.contract.code_exec.driver import Driver, Who
from tests.contract.code_exec.programs import TREE, WAIT, family_is_gone, family_is_ready, started, together

PRINTS_AND_HANGS = """
import sys, time
print('be' + 'fore', flush=True)
print('be' + 'hind', file=sys.stderr, flush=True)
open('reached', 'w').close()
time.sleep(250)
"""
# What `timeout` means. Of what is no number, the default; of what is one, itself within 1 to 300.
CLAMPED: list[tuple[Any, float]] = [
    (0, 1),
    (-5, 1),
    (0.4, 1),
    (90, 90),
    ("90", 90),
    (10000, 300),
    ("1e3", 300),
    (math.inf, 300),
    ("abc", 30),
    (math.nan, 30),
    (True, 30),
    (None, 30),
    ([], 30),
    ({}, 30),
]
MORE_CLAMPED: list[tuple[Any, float]] = [
    ("0", 1),
    (-math.inf, 1),
    (1, 1),
    (299, 299),
    (300, 300),
    (301, 300),
    ("10000", 300),
    (10**400, 300),
    ("", 30),
    ("90 seconds", 30),
    ("NaN", 30),
    (False, 30),
    ([90], 30),
]


def sendable(driver: Driver, clamped: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
    return [
        one
        for one in clamped
        if driver.can_send_infinity or not (isinstance(one[0], float) and not math.isfinite(one[0]))
    ]


@pytest.mark.parametrize("values", [CLAMPED, pytest.param(MORE_CLAMPED, marks=pytest.mark.slow)], ids=["some", "more"])
def test_a_timeout_is_clamped_and_never_refused(driver: Driver, user: Who, values: list[tuple[Any, float]]) -> None:
    """0 becomes 1, 10000 becomes 300, and what is no number falls back to 30, whatever kind of value it is."""
    clamped = sendable(driver, values)
    answers = together(driver, user, *({"code": "print(1)", "timeout": value} for value, _ in clamped))
    found = {repr(value): answer.timeout_seconds for (value, _), answer in zip(clamped, answers, strict=True)}
    assert found == {repr(value): seconds for value, seconds in clamped}
    assert [answer.output for answer in answers] == ["1\n"] * len(clamped)


def test_a_timeout_is_clamped_in_the_background_too(driver: Driver, user: Who) -> None:
    """300 seconds is the maximum either way, and so are the other rules."""
    clamped = [one for one in sendable(driver, CLAMPED) if one[0] is not None]
    calls = [{"code": "print(1)", "timeout": value, "background": True} for value, _ in clamped]
    found = {}
    for (value, _), accepted in zip(clamped, together(driver, user, *calls), strict=True):
        assert accepted.task_id
        assert driver.ended(user, accepted.task_id) == "finished"
        answer = driver.show_task(user, accepted.task_id).answer
        assert answer is not None
        found[repr(value)] = answer.timeout_seconds
    assert found == {repr(value): seconds for value, seconds in clamped}


def test_a_null_that_is_given_is_no_number_in_the_background_either(driver: Driver, user: Who) -> None:
    """It is a value that is no number, and so 30 seconds; a timeout that is not given is another thing."""
    task_id = driver.detach(user, "print(1)", timeout=None)
    assert driver.ended(user, task_id) == "finished"
    answer = driver.show_task(user, task_id).answer
    assert answer is not None
    assert answer.timeout_seconds == 30


def test_the_default_is_30_seconds(driver: Driver, who: Who) -> None:
    """Without a timeout, a run in the foreground has 30 seconds."""
    assert driver.code_exec(who, code="print(1)").timeout_seconds == 30


def test_a_detached_call_without_a_timeout_has_300_seconds(driver: Driver, user: Who) -> None:
    """And with one, that: so it is passed when the ceiling is needed, or less than it."""
    default, explicit = driver.detach(user, "print(1)"), driver.detach(user, "print(1)", timeout=40)
    for task_id, seconds in ((default, 300), (explicit, 40)):
        assert driver.ended(user, task_id) == "finished"
        answer = driver.show_task(user, task_id).answer
        assert answer is not None
        assert answer.timeout_seconds == seconds


def test_the_published_parameters_say_the_bounds(driver: Driver) -> None:
    """They name 1, 30 and 300, and refuse no number: 10000 is clamped, and a schema that refused it would not let it be."""
    timeout = driver.parameters()["properties"]["timeout"]
    assert "300" in timeout["description"]
    assert "30," in timeout["description"] or "30 " in timeout["description"]
    assert not {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "pattern"} & set(timeout)
    kinds = timeout["type"] if "type" in timeout else [one.get("type") for one in timeout.get("anyOf", [])]
    assert not kinds or {"number", "string"} <= set(kinds)


@pytest.mark.parametrize(("timeout", "seconds"), [(0, 1), ("2", 2)])
def test_what_runs_out_of_time_is_told_in_these_words(driver: Driver, user: Who, timeout: Any, seconds: int) -> None:
    """`Code execution timed out after Ns`, `error: timeout`, no success; and nothing of the run, on either stream."""
    answer = driver.code_exec(user, code=PRINTS_AND_HANGS, timeout=timeout)
    assert answer.output == f"Code execution timed out after {seconds}s"
    assert (answer.success, answer.error, answer.exit_code) == (False, "timeout", None)
    assert answer.timeout_seconds == seconds
    assert (driver.files(user) / "reached").exists()  # the control: it had written, and was ended then
    assert "before" not in answer.everything
    assert "behind" not in answer.everything


def test_what_was_written_before_the_timeout_stays_in_the_record(driver: Driver, user: Who) -> None:
    """The answer has nothing of the run; the call's record has what had been printed."""
    answer = driver.code_exec(user, code=PRINTS_AND_HANGS, timeout=1)
    assert "before" not in answer.everything
    assert driver.written(user, answer.call_id, "stdout") == "before\n"
    assert driver.written(user, answer.call_id, "stderr") == "behind\n"


def test_a_detached_run_that_times_out_says_the_same(driver: Driver, user: Who) -> None:
    """Its task and its note have the words, and nothing of the run."""
    task_id = driver.detach(user, PRINTS_AND_HANGS, timeout=1)
    assert driver.ended(user, task_id) == "finished"
    turn = driver.code_exec(user, code="print('next')")
    (note,) = turn.notes
    assert (note["task_id"], note["success"]) == (task_id, False)
    assert "Code execution timed out after 1s" in note["text"]
    assert "before" not in turn.everything
    task = driver.show_task(user, task_id)
    assert task.answer is not None
    assert (task.answer.output, task.answer.error) == ("Code execution timed out after 1s", "timeout")
    assert "before" not in task.answer.everything
    assert driver.written(user, task_id, "stdout") == "before\n"


def test_the_whole_process_tree_is_killed(driver: Driver, user: Who) -> None:
    """Children in sessions of their own, orphans, other programs, and those that ignore polite signals."""
    pending = driver.begin(user, {"code": TREE, "timeout": 3})
    family_is_ready(driver.files(user))
    assert not pending.answered
    assert pending.answer().error == "timeout"
    family_is_gone(driver.files(user))


def test_a_run_within_its_timeout_is_left_alone(driver: Driver, user: Who) -> None:
    """It may take longer than the least, and its answer is its own."""
    pending = driver.begin(user, {"code": WAIT + "print('done')", "timeout": 10000})
    started(driver.files(user))
    (driver.files(user) / "go").touch()
    answer = pending.answer()
    assert (answer.success, answer.output, answer.timeout_seconds) == (True, "done\n", 300)


def test_a_timeout_is_told_apart_from_a_failure(driver: Driver, user: Who) -> None:
    """A suite that fails has an exit code and its output; one that was cut off has neither."""
    failed, cut = together(
        driver,
        user,
        {
            "code": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail('broken')\nunittest.main()"
        },
        {"code": "import time\ntime.sleep(250)", "timeout": 1},
    )
    assert (failed.success, failed.exit_code) == (False, 1)
    assert failed.error not in (None, "timeout")
    assert "AssertionError: broken" in failed.output
    assert (cut.success, cut.exit_code, cut.error) == (False, None, "timeout")


@pytest.mark.slow
def test_what_needs_more_than_the_default_must_say_so(driver: Driver, user: Who) -> None:
    """A run of 35 seconds is cut off at the default of 30, and is not with a timeout of 90."""
    code = "import time\ntime.sleep(35)\nprint('passed')"
    default, enough = together(driver, user, {"code": code}, {"code": code, "timeout": 90})
    assert (default.output, default.error) == ("Code execution timed out after 30s", "timeout")
    assert (enough.output, enough.success) == ("passed\n", True)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("driver", ["library"], indirect=True)
def test_300_seconds_are_the_maximum_of_a_detached_run(driver: Driver, user: Who) -> None:
    """Also of one that asks for 10000."""
    from tests.remote_executor import until

    task_id = driver.detach(user, "import time\ntime.sleep(400)", timeout=10000)
    until(lambda: driver.state(user, task_id) == "finished", "the end of the longest run", 400)
    answer = driver.show_task(user, task_id).answer
    assert answer is not None
    assert answer.output == "Code execution timed out after 300s"
