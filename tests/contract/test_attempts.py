"""Attempts: fresh state in each, none of a refused call, and one result for each call, whatever it took."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sandbox import Executor, Settings
from sandbox.call_parsing import parse_call
from sandbox.contract import CodeCall, InvalidCall, ToolResult
from tests.conftest import MakeLab
from tests.contract.conftest import Runs, contract_policy, said
from tests.contract.programs import HANG, HELLO, LEAVE, LOOK, PLACES, leave_and_tell, pair
from tests.lab import Lab, Outside, read_events

OWN_ID = pair(
    "import os\nprint(os.environ['SLUICEGATE_CALL_ID'], os.environ['SLUICEGATE_ATTEMPT'])",
    "console.log(process.env.SLUICEGATE_CALL_ID, process.env.SLUICEGATE_ATTEMPT);",
)
NOTHING = {"files": [], "processes": 0, "variable": None}


def found(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: seen[name] for name in NOTHING}


def attempt_events(log: Path, call_id: str) -> list[tuple[str, str]]:
    """Attempt id and phase of each line about a call's attempts, in the order of the log."""
    return [
        (event["attempt_id"], event["phase"])
        for event in read_events(log)
        if event["event"] == "attempt" and event["call_id"] == call_id
    ]


def test_files_and_processes_of_one_attempt_are_not_there_in_the_next(run: Runs) -> None:
    """Each attempt has fresh writable state: files, processes and variables do not carry over."""
    left = said(run(LEAVE))  # the control: there, the attempt's own are seen
    assert left["files"][: len(PLACES)] == [f"{place}/left-by-an-attempt" for place in PLACES]
    assert (left["processes"], left["variable"]) == (1, "x")
    for _ in range(3):  # also in the sandboxes that were made ready while the first ran
        assert found(said(run(LOOK))) == NOTHING


def test_state_does_not_pass_from_one_language_to_the_other(contract: Lab, language: str) -> None:
    """Fresh state is fresh whatever ran before."""
    (other,) = {"python", "javascript"} - {language}
    assert said(contract.run(LEAVE[language], prelude=False, language=language))["processes"] == 1
    assert found(said(contract.run(LOOK[other], prelude=False, language=other))) == NOTHING


def test_attempts_at_the_same_time_share_nothing(run: Runs) -> None:
    """State is an attempt's own while others run, too."""
    with ThreadPoolExecutor(4) as pool:
        seen = [said(one) for one in pool.map(run, [LEAVE, LEAVE, LEAVE, LOOK])]
    assert [one["processes"] for one in seen] == [1, 1, 1, 0]
    assert found(seen[3]) == NOTHING


def test_a_variable_of_one_call_is_not_there_in_the_next(run: Runs) -> None:
    """Process state does not carry over: the environment is made anew from each call."""
    assert said(run(LOOK, env={"LEFT": "given"}))["variable"] == "given"
    assert said(run(LOOK))["variable"] is None


def test_each_call_has_one_result_of_its_own(run: Runs) -> None:
    """One terminal result supplied for each call: none lost, none mixed up, each with an id of its own."""

    def one(number: int) -> ToolResult:
        result = run(pair(f"print({number})", f"console.log({number})")).result
        assert result.stdout == f"{number}\n"
        return result

    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(one, range(20)))
    assert len({result.call_id for result in results}) == 20
    assert len({attempt.attempt_id for result in results for attempt in result.attempts}) == 20


def test_an_attempt_knows_its_call_and_its_number_and_the_log_has_them(run: Runs, contract: Lab) -> None:
    """A code run is an attempt at a call; it can tell which, and the log tells the same."""
    result = run(OWN_ID).result
    (attempt,) = result.attempts
    assert result.stdout == f"{result.call_id} 1\n"
    assert attempt_events(contract.log, result.call_id) == [(attempt.attempt_id, "start"), (attempt.attempt_id, "end")]
    assert attempt.attempt_id != result.call_id


def test_an_attempt_is_told_with_its_times(run: Runs) -> None:
    """The report says of each attempt when it began and ended, and how."""
    result = run(HELLO).result
    (attempt,) = result.attempts
    assert 0 < attempt.started_at <= attempt.ended_at
    assert (attempt.status, attempt.cause, attempt.exit_code) == (result.status, result.cause, result.exit_code)
    assert attempt.isolation


def test_a_refused_call_settles_before_any_attempt(contract: Lab, language: str) -> None:
    """A call can settle before any code attempt: what the policy refuses has a result and no attempt."""
    result = contract.run(HELLO[language], prelude=False, language=language, allow_network=True, domains=["com"]).result
    assert (result.status, result.cause, result.attempts) == ("error", "policy_refused", [])
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", None)
    assert attempt_events(contract.log, result.call_id) == []
    assert [event["layer"] for event in read_events(contract.log) if event.get("call_id") == result.call_id] == ["call"]


def test_what_is_no_call_makes_no_attempt(contract: Lab, language: str) -> None:
    """A request out of bounds is refused as it is read; the log has no attempt of it."""
    before = _attempts_in(contract)
    with pytest.raises(InvalidCall):
        parse_call({"language": language, "code": HELLO[language], "timeout": 301})
    assert _attempts_in(contract) == before
    assert contract.run(HELLO[language], prelude=False, language=language).result.status == "success"
    assert _attempts_in(contract) == before + 1


def _attempts_in(lab: Lab) -> int:
    """How many attempts the log says were started."""
    return sum(event["event"] == "attempt" and event["phase"] == "start" for event in read_events(lab.log))


def test_an_infrastructure_failure_causes_another_isolated_attempt(
    open_lab: MakeLab, outside: Outside, language: str
) -> None:
    """When this side fails, another isolated attempt may be made before the one result; its state is fresh again.

    And fresh state is not exactly-once execution: the destination hears of both attempts, under the same call's id,
    from which the code can make a key that is stable and that the destination can enforce.
    """
    outside.forget()
    local = outside.local
    program = leave_and_tell(f"http://local.test:{local.port}")[language]
    call = {"allow_network": True, "domains": ["local.test"], "timeout": 20}
    with open_lab(contract_policy(outside)) as lab:

        def lose_the_launcher() -> None:
            local.wait(lambda journal: any(seen.target.startswith("/hold?") for seen in journal.requests))
            os.kill(lab.launcher_pid, signal.SIGKILL)

        run, _ = lab.during(program, lose_the_launcher, call, prelude=False, language=language)
        result = run.result
        seen = said(run)
        events = attempt_events(lab.log, result.call_id)
    assert [(one.status, one.cause, one.code) for one in result.attempts] == [
        ("error", "infrastructure", "launcher_lost"),
        ("success", "exit", "exit"),
    ]
    assert (seen["attempt"], seen["call"]) == ("2", result.call_id)
    assert found(seen) == NOTHING
    first, second = result.attempts
    assert first.attempt_id != second.attempt_id
    assert first.ended_at <= second.started_at
    assert events == [(one.attempt_id, phase) for one in (first, second) for phase in ("start", "end")]
    told = [one.target.partition("?")[2] for one in local.journal.requests]
    assert told == [f"{result.call_id}.1", f"{result.call_id}.2"]


@pytest.mark.parametrize(
    "program",
    [
        pair("import os\nos._exit(3)", "process.exit(3)"),
        pair("import os\nos.abort()", "process.abort()"),
        HANG,
    ],
    ids=["exit", "signal", "timeout"],
)
def test_what_the_program_did_causes_no_other_attempt(run: Runs, program: dict[str, str]) -> None:
    """Only an infrastructure failure causes another attempt; a program's own failure is reported, not tried again."""
    result = run(program, timeout=2).result
    assert result.status in ("error", "timeout")
    assert len(result.attempts) == 1


def test_a_call_not_answered_before_its_deadline_has_the_timeout_result(
    outside: Outside, tmp_path: Path, language: str
) -> None:
    """When no answer is there at the tool's deadline, which is longer than the code's own timeout, the generic timeout
    result is supplied at once; here of a call that still waits for its turn, so that there was no attempt.
    """
    policy = tmp_path / "policy.yaml"
    policy.write_text(contract_policy(outside, attempts={"margin_seconds": 1}))
    settings = Settings(state_dir=tmp_path / "state", audit_log=tmp_path / "audit.jsonl", max_concurrency=1)

    async def story() -> tuple[ToolResult, ToolResult, float]:
        async with Executor(policy, settings=settings) as executor:
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()
            occupant = executor.submit(_call(language, HANG, timeout=30), lambda _: begun.set())
            await asyncio.wait_for(begun.wait(), 20)
            started = loop.time()
            late = await executor.run(_call(language, HELLO, timeout=1))
            took = loop.time() - started
            occupant.cancel()
            return late, await occupant.result(), took

    late, occupant, took = asyncio.run(story())
    assert (late.status, late.cause, late.attempts, late.stdout) == ("timeout", "wall_clock", [], "")
    assert late.error is not None
    assert late.error.code == "deadline"
    assert 2 <= took < 2 + 2
    assert (occupant.status, occupant.cause) == ("killed", "cancelled")


def _call(language: str, program: Any, **fields: Any) -> CodeCall:
    return parse_call({"language": language, "code": program[language], **fields})
