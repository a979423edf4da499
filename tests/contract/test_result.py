"""The result: its status words, its output and the bounds of that, and that it is a report and no proof."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.contract import Status, ToolResult
from tests.contract.conftest import Runs, said
from tests.contract.programs import (
    ABORT,
    DEVOUR,
    EXIT_7,
    FLOOD,
    HANG,
    HELLO,
    RAISE,
    READ_INPUT,
    SPIN,
    Pair,
    pair,
    write,
    write_bytes,
)
from tests.contract.schema import faults
from tests.lab import Lab, Outside

MAX_STDOUT, MAX_STDERR = 1_000_000, 100_000  # the contract's numbers, not the product's constants

ENDINGS = {
    "success": (pair("print('before')", "console.log('before')"), "success", "exit", 0),
    "exit": (EXIT_7, "error", "exit", 7),
    "exception": (RAISE, "error", "exit", 1),
    "signal": (ABORT, "error", "signal", None),
    "timeout": (HANG, "timeout", "wall_clock", None),
    "timeout of a busy program": (SPIN, "timeout", "wall_clock", None),
    "memory": (DEVOUR, "killed", "memory", None),
    "flood": (FLOOD, "killed", "output_flood", None),
}


def ended(run: Runs, name: str) -> ToolResult:
    short = name.startswith("timeout")
    result: ToolResult = run(ENDINGS[name][0], timeout=2 if short else 60, memory_mib=256).result
    return result


# Status


def test_there_are_four_statuses() -> None:
    """A result's status is `success`, `error`, `timeout` or `killed`, and nothing else."""
    assert {str(status) for status in Status} == {"success", "error", "timeout", "killed"}


@pytest.mark.parametrize("name", ENDINGS)
def test_each_ending_has_its_status_its_output_and_the_published_form(
    run: Runs, schemas: dict[str, Any], name: str
) -> None:
    """The status says how the run ended; what was written before is kept on every ending; the form is the published one."""
    result = ended(run, name)
    _, status, cause, exit_code = ENDINGS[name]
    assert (result.status, result.cause, result.exit_code) == (status, cause, exit_code), result.stderr[-2000:]
    assert result.stdout.startswith("before\n")
    assert (result.error is None) == (status == "success")
    assert faults(result.model_dump(mode="json"), schemas["result"]) == []


def test_a_call_that_its_caller_ends_is_killed(contract: Lab, schemas: dict[str, Any], language: str) -> None:
    """Status `killed`: of a call that is cancelled, with what it had written until then."""
    import threading

    from sandbox.call_parsing import parse_call

    code = pair(
        "import os, time\nprint(os.environ['SLUICEGATE_CALL_ID'], flush=True)\nwhile True: time.sleep(1)",
        "console.log(process.env.SLUICEGATE_CALL_ID); setInterval(() => {}, 1000);",
    )[language]
    told = bytearray()
    cancellers: list[threading.Thread] = []

    def hear(data: bytes) -> None:
        told.extend(data)
        if (
            told.endswith(b"\n") and not cancellers
        ):  # called in the executor's own thread, which may not wait for itself
            cancellers.append(threading.Thread(target=contract.executor.cancel, args=[told.decode().strip()]))
            cancellers[0].start()

    result = contract.executor.run(parse_call({"language": language, "code": code}), stdout_sink=hear)
    cancellers[0].join(20)
    assert (result.status, result.cause, result.exit_code) == ("killed", "cancelled", None)
    assert result.stdout == f"{result.call_id}\n"
    assert faults(result.model_dump(mode="json"), schemas["result"]) == []


@pytest.mark.parametrize("number", [2, 124, 130, 137, 255])
def test_an_exit_status_is_the_programs_own(run: Runs, number: int) -> None:
    """Status `error`: a number that elsewhere means a timeout or a kill is not taken for one."""
    result = run(pair(f"raise SystemExit({number})", f"process.exit({number})")).result
    assert (result.status, result.cause, result.exit_code) == ("error", "exit", number)


def test_a_refused_call_has_the_published_form(run: Runs, schemas: dict[str, Any]) -> None:
    """A result without an attempt is a result."""
    result = run(HELLO, allow_network=True, domains=["com"]).result
    assert (result.status, result.attempts) == ("error", [])
    assert faults(result.model_dump(mode="json"), schemas["result"]) == []


def test_the_published_form_refuses_what_is_no_result(run: Runs, schemas: dict[str, Any]) -> None:
    """The control of the checks above: the schema can refuse."""
    good = run(HELLO).result.model_dump(mode="json")
    assert faults(good, schemas["result"]) == []
    changes: list[dict[str, Any]] = [
        {"status": "failed"}, {"more": 1}, {"return_value": 1}, {"stdout": None}, {"attempts": [{}]},
    ]  # fmt: skip
    for change in changes:
        assert faults(good | change, schemas["result"]), change


# Output


@pytest.mark.parametrize("character", ["x", "😀"], ids=["narrow", "wide"])
@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_kept_up_to_its_bound_and_counted(run: Runs, stream: str, over: int, character: str) -> None:
    """Up to 1,000,000 characters of standard output and 100,000 of standard error; what is more is cut, counted and flagged.

    The other stream, at the same time, is whole: the streams are apart, and so are their bounds.
    """
    bound = {"stdout": MAX_STDOUT, "stderr": MAX_STDERR}[stream]
    counts = {"stdout": 3, "stderr": 3} | {stream: bound + over}
    result = run(write(character, **counts)).result
    assert result.status == "success", result.stderr[-1000:]
    kept = {"stdout": result.stdout, "stderr": result.stderr}
    for name, count in counts.items():
        limit = bound if name == stream else count
        assert len(kept[name]) == min(count, limit)
        assert set(kept[name]) == {character}
        assert getattr(result.output_chars, name) == count
        assert getattr(result.truncated, name) == (count > limit)
        assert not getattr(result.replaced, name)


def test_what_is_far_beyond_both_bounds_is_counted_exactly(run: Runs) -> None:
    """The bounds hold for both streams at once, and the beginning is what is kept."""
    result = run(write("aé中😀", 2_345_678, 1_234_567)).result
    assert result.status == "success"
    assert result.stdout == "aé中😀" * (MAX_STDOUT // 4)
    assert result.stderr == "aé中😀" * (MAX_STDERR // 4)
    assert (result.output_chars.stdout, result.output_chars.stderr) == (2_345_678, 1_234_567)
    assert (result.truncated.stdout, result.truncated.stderr) == (True, True)


def test_bytes_that_are_no_text_are_replaced_and_flagged(run: Runs) -> None:
    """Output is characters: bytes that are no UTF-8 become U+FFFD, and it is said of which stream."""
    result = run(write_bytes(b"a\xff\xfeb\xf0\x9f\x98\x80")).result
    assert result.stdout == "a\ufffd\ufffdb😀"
    assert (result.replaced.stdout, result.replaced.stderr) == (True, False)
    assert result.output_chars.stdout == 5


def test_the_streams_are_apart(run: Runs) -> None:
    """Standard output and standard error are carried apart, whatever their order was."""
    program = pair(
        "import sys\nfor n in range(100):\n    print('out', n)\n    print('err', n, file=sys.stderr)",
        "for (let n = 0; n < 100; n++) { console.log('out', n); console.error('err', n); }",
    )
    result = run(program).result
    assert result.stdout == "".join(f"out {n}\n" for n in range(100))
    assert result.stderr == "".join(f"err {n}\n" for n in range(100))


def test_standard_input_is_at_its_end(run: Runs) -> None:
    """A call has no field for input: a program that reads it finds none, and doesn't wait."""
    assert said(run(READ_INPUT)) == ""


@pytest.mark.parametrize(
    "program",
    [
        pair("return_value = 42\n42", "globalThis.return_value = 42; 42"),
        pair("def main(): return 42\nmain()", "module.exports = 42;"),
        pair("import sys\nsys.exit(0)", "export default 42;"),
    ],
)
def test_the_return_value_is_there_and_null(run: Runs, program: Pair) -> None:
    """The contract permits a structured return value, which is not populated: print what must be observed."""
    result = run(program).result
    assert result.status == "success", result.stderr
    assert "return_value" in result.model_dump(mode="json")
    assert result.model_dump(mode="json")["return_value"] is None


# A report, no proof


def test_an_error_may_have_had_an_effect(run: Runs, outside: Outside) -> None:
    """The result reports what the run came to; it doesn't prove that an external request had no effect."""
    outside.forget()
    program = pair(
        "import urllib.request\nurllib.request.urlopen('http://allowed.test/order', b'1').read()\nraise SystemExit(1)",
        "await (await fetch('http://allowed.test/order', {method: 'POST', body: '1'})).text(); process.exit(1);",
    )
    result = run(program, allow_network=True, domains=["allowed.test"]).result
    assert (result.status, result.exit_code) == ("error", 1)
    assert [(seen.method, seen.target) for seen in outside.allowed.journal.requests] == [("POST", "/order")]
    assert result.network.allowed >= 1


def test_a_success_may_have_had_none(run: Runs, outside: Outside) -> None:
    """Nor does it prove that one had: the program's own exit decides the status, whatever a destination said."""
    program = pair(
        "import urllib.request\ntry: urllib.request.urlopen('http://allowed.test/status/503', b'1')\nexcept OSError: print('failed')",
        "const answer = await fetch('http://allowed.test/status/503', {method: 'POST', body: '1'}); if (!answer.ok) console.log('failed');",
    )
    result = run(program, allow_network=True, domains=["allowed.test"]).result
    assert (result.status, result.stdout) == ("success", "failed\n")
