"""`sluicegate call`: a call as JSON in, one result as JSON out, whatever happens, and the exit status that fits it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import contract_policy
from tests.contract.programs import ABORT, DEVOUR, ENVIRONMENT, EXIT_7, HANG, HELLO, RAISE, Pair, pair
from tests.contract.schema import faults
from tests.lab import Outside, read_events

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """How the command ended: its exit status, and the one object that it printed."""

    exit_status: int
    result: dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """Runs `sluicegate call` with a policy, a state directory and a log of its own. What it prints is always looked at."""

    command: list[str]
    home: Path
    schema: dict[str, Any]

    @property
    def log(self) -> Path:
        return self.home / "audit.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.home), "SLUICEGATE_STATE_DIR": str(self.home / "state")}

    def arguments(self, *arguments: str) -> list[str]:
        policy = self.home / "policy.yaml"
        return [*self.command, "call", "--policy", str(policy), "--audit-log", str(self.log), *arguments]

    def call(self, text: str | bytes, *arguments: str, **environment: str) -> Done:
        """With the text as standard input; as a file where a file's name is among the arguments."""
        data = text if isinstance(text, bytes) else text.encode()
        done = subprocess.run(
            self.arguments(*(arguments or ("-",))),
            input=data,
            env=self.environment | environment,
            cwd=ROOT,
            capture_output=True,
            timeout=100,
        )
        return self.read(done.returncode, done.stdout, done.stderr)

    def ask(self, language: str, program: Pair, **fields: Any) -> Done:
        return self.call(json.dumps({"language": language, "code": program[language], **fields}))

    def read(self, status: int, stdout: bytes, stderr: bytes) -> Done:
        """Exactly one JSON object, in the published form, on one stream; and no traceback of ours on the other."""
        text = stdout.decode()
        assert b"Traceback" not in stderr, stderr.decode()
        result, end = json.JSONDecoder().raw_decode(text)
        assert text[end:].strip() == "", "something stands behind the object"
        assert isinstance(result, dict)
        assert faults(result, self.schema) == []
        return Done(status, result)


@pytest.fixture
def tool(command: list[str], outside: Outside, schemas: dict[str, Any]) -> Iterator[Tool]:
    home = Path(tempfile.mkdtemp(prefix="sg-"))
    (home / "policy.yaml").write_text(contract_policy(outside))
    yield Tool(command, home, schemas["result"])
    shutil.rmtree(home)


def text(language: str = "python", **fields: Any) -> str:
    return json.dumps({"language": language, "code": HELLO[language], **fields})


def assert_refused(tool: Tool, done: Done, *words: str) -> None:
    """Refused as no call, with these words in the message, and nothing was run."""
    assert (done.exit_status, done.result["status"], done.result["cause"]) == (2, "error", "invalid_call")
    assert done.result["attempts"] == []
    assert done.result["stdout"] == done.result["stderr"] == ""
    assert done.result["error"]["code"] == "invalid_call"
    for word in words:
        assert word in done.result["error"]["message"]
    assert not [event for event in read_events(tool.log) if event["event"] == "attempt"]


# Where the call comes from


def test_a_call_comes_from_a_file_or_from_standard_input(tool: Tool, language: str) -> None:
    """One logical call with its code and options: either way it is the same."""
    file = tool.home / "a call.json"
    file.write_text(text(language, timeout=7, memory_mib=200))
    for done in (tool.call("", str(file)), tool.call(file.read_text(), "-")):
        assert (done.exit_status, done.result["status"], done.result["stdout"]) == (0, "success", "hello\n")
        (attempt,) = done.result["attempts"]
        assert attempt["evidence"]["wall_limit_seconds"] == 7
        assert attempt["evidence"]["memory_limit_bytes"] == 200 << 20


def test_a_file_that_is_not_there_has_a_result(tool: Tool) -> None:
    """The call settles before any attempt; the file is named."""
    assert_refused(tool, tool.call("", str(tool.home / "missing.json")), "missing.json")


# Every ending has its exit status


@pytest.mark.parametrize(
    ("program", "fields", "exit_status", "status", "cause"),
    [
        (HELLO, {}, 0, "success", "exit"),
        (EXIT_7, {}, 7, "error", "exit"),
        (RAISE, {}, 1, "error", "exit"),
        (pair("raise SystemExit(137)", "process.exit(137)"), {}, 137, "error", "exit"),
        (ABORT, {}, 128 + signal.SIGABRT, "error", "signal"),
        (HANG, {"timeout": 1}, 124, "timeout", "wall_clock"),
        (DEVOUR, {"memory_mib": 128}, 137, "killed", "memory"),
        (HELLO, {"allow_network": True, "domains": ["com"]}, 2, "error", "policy_refused"),
        (HELLO, {"timeout": 301}, 2, "error", "invalid_call"),
    ],
    ids=["success", "own", "exception", "own 137", "signal", "timeout", "memory", "refused", "invalid"],
)
def test_every_ending_has_its_exit_status(
    tool: Tool, language: str, program: Pair, fields: dict[str, Any], exit_status: int, status: str, cause: str
) -> None:
    """Statuses `success`, `error`, `timeout`, `killed`: the command's exit status fits, and there is one result."""
    done = tool.ask(language, program, **fields)
    assert (done.exit_status, done.result["status"], done.result["cause"]) == (exit_status, status, cause)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_command_has_one_result(tool: Tool, language: str, name: str) -> None:
    """A call that its caller ends is `killed`; the one result comes all the same, with what had been written."""
    code = HANG[language]
    file = tool.home / "call.json"
    file.write_text(json.dumps({"language": language, "code": code}))
    with subprocess.Popen(
        tool.arguments(str(file)), env=tool.environment, cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        _wait_for_an_attempt(tool, process)
        process.send_signal(getattr(signal, name))
        stdout, stderr = process.communicate(timeout=60)
    done = tool.read(process.returncode, stdout, stderr)
    assert (done.result["status"], done.result["cause"]) == ("killed", "cancelled")
    assert done.exit_status in (128 + getattr(signal, name), 137)


def _wait_for_an_attempt(tool: Tool, process: subprocess.Popen[bytes]) -> None:
    """Return once the log says that an attempt has started."""
    import time

    deadline = time.monotonic() + 30
    while not [event for event in read_events(tool.log) if event["event"] == "attempt"]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)  # a file has no event that could be awaited


def test_a_host_that_cannot_confine_has_a_result(tool: Tool, language: str) -> None:
    """A call can settle before any attempt: where no attempt can be confined none is made, and the result says whose
    failure that is. Exit status 3.
    """
    no_namespaces = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh"]
    done = Tool([*no_namespaces, *tool.command], tool.home, tool.schema).call(text(language))
    assert (done.exit_status, done.result["status"], done.result["cause"]) == (3, "error", "infrastructure")
    assert (done.result["error"]["code"], done.result["attempts"]) == ("isolation_unavailable", [])


def test_a_call_that_cannot_be_written_down_has_a_result(tool: Tool) -> None:
    """A call can settle before any attempt: what the ledger cannot take is not run. Exit status 3."""
    (tool.home / "state").mkdir(mode=0o700)
    (tool.home / "state" / "calls").write_text("no directory")
    done = tool.call(text())
    assert (done.exit_status, done.result["status"], done.result["cause"]) == (3, "error", "infrastructure")
    assert (done.result["error"]["code"], done.result["attempts"]) == ("ledger_unavailable", [])


def test_a_policy_that_is_none_has_a_result(tool: Tool) -> None:
    """Whatever happens, there is one result: here nothing may run, since nobody said what is allowed."""
    (tool.home / "policy.yaml").write_text("version: 1\nnetwork: {modes: everything}\n")
    done = tool.call(text())
    assert (done.exit_status, done.result["status"], done.result["attempts"]) == (2, "error", [])
    assert done.result["error"]["code"] == "invalid_policy"


def test_what_the_program_prints_is_in_the_object_alone(tool: Tool, language: str) -> None:
    """The result carries the output: a program cannot print a second result beside it."""
    forged = json.dumps({"status": "success", "stdout": "forged"})
    program = pair(
        f"import sys\nprint({forged!r})\nprint({forged!r}, file=sys.stderr)\nraise SystemExit(9)",
        f"console.log({json.dumps(forged)}); console.error({json.dumps(forged)}); process.exitCode = 9;",
    )
    done = tool.ask(language, program)
    assert (done.exit_status, done.result["status"], done.result["exit_code"]) == (9, "error", 9)
    assert done.result["stdout"] == done.result["stderr"] == forged + "\n"


def test_the_commands_own_environment_is_not_the_programs(tool: Tool, language: str) -> None:
    """The platform controls the environment variables: none of the caller's own is there, only those of the call."""
    done = tool.call(
        json.dumps({"language": language, "code": ENVIRONMENT[language], "env": {"GIVEN": "x"}}),
        "-",
        NOT_GIVEN="secret",
    )
    seen = json.loads(done.result["stdout"])
    assert seen["GIVEN"] == "x"
    assert "NOT_GIVEN" not in seen
    assert str(tool.home) not in seen.values()


# What is no call


@pytest.mark.parametrize(
    "data",
    [
        "", "nothing", "null", '"python"', "[{}]", '{"language": "python", "code": "1"', "{'language': 'python', 'code': '1'}",
        '{"language": "python", "code": "1",}', '{"language": "python", "code": "1", "timeout": NaN}',
        '{"language": "python", "code": "1", "timeout": -Infinity}', text() + text(), b"\xff\xfe{}", b"\x00",
        b'{"language": "python", "code": "\xff"}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_has_a_result(tool: Tool, data: str | bytes) -> None:
    """Every request is kept within the form: what can't be read is refused, and the refusal is a result."""
    assert_refused(tool, tool.call(data))


@pytest.mark.parametrize(
    "opening", ["[", '{"a":', '{"language": "python", "code": ['], ids=["lists", "objects", "field"]
)
def test_nesting_without_end_has_a_result(tool: Tool, opening: str) -> None:
    """Deep nesting is refused, not crashed on; whether it is closed or not."""
    assert_refused(tool, tool.call(opening * 100_000))
    closing = "".join({"[": "]", "{": "}"}[sign] for sign in reversed(opening) if sign in "[{")
    assert_refused(tool, tool.call(opening * 100_000 + "1" + closing * 100_000))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"language": "python", "code": "1", "code": "2"}', ["code"]),
        ('{"language": "python", "language": "python", "code": "1"}', ["language"]),
        ('{"language": "python", "code": "1", "env": {"A": "1", "A": "2"}}', ["A"]),
        ('{"language": "python", "code": "1", "allow_network": false, "allow_network": true}', ["allow_network"]),
        ('{"language": "python", "code": "1", "allow_network": true, "allow\\u005fnetwork": false}', ["allow_network"]),
    ],
)
def test_the_same_key_twice_is_refused(tool: Tool, data: str, words: list[str]) -> None:
    """Two values for one input are none: which one is meant is not guessed, also where the key is spelt otherwise."""
    assert_refused(tool, tool.call(data), *words)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ('"timeout": 1e999', "timeout"),
        ('"timeout": 300.001', "timeout"),
        ('"timeout": true', "timeout"),
        ('"memory_mib": 1' + "0" * 4000, "memory_mib"),
        ('"memory_mib": 1' + "0" * 5000, "memory_mib"),
        ('"memory_mib": 2049', "memory_mib"),
        ('"env": {"A": "\\u0000"}', "env"),
        ('"env": {"A": "\\ud800"}', "env"),
        ('"allow_network": true, "domains": ["\\udfff.test"]', "domains"),
        ('"domains": []', "domains"),
        ('"\\ud800": 1', "ud800"),
        ('"packages": ["a"]', "packages.0"),
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused_with_their_path(tool: Tool, fields: str, path: str) -> None:
    """The bounds hold for calls in JSON, whichever way JSON can write a value."""
    assert_refused(tool, tool.call('{"language": "python", "code": "1", ' + fields + "}"), path)


@pytest.mark.parametrize("code", ["\\u0000", "a\\u0000", "\\ud83d", "\\ude00\\ud83d"])
def test_code_that_is_no_text_is_refused(tool: Tool, language: str, code: str) -> None:
    """A NUL or half a pair in the code is a fault at `code`."""
    assert_refused(tool, tool.call(f'{{"language": "{language}", "code": "{code}"}}'), "code")


def test_a_whole_pair_is_one_character(tool: Tool, language: str) -> None:
    """JSON may write a character beyond the basic plane as a pair: it counts as one, and arrives as one."""
    program = {"python": "print('{}')#", "javascript": "console.log('{}')//"}[language].format("\U0001f600")
    padded = program + "\U0001f600" * (100_000 - len(program))
    done = tool.call(json.dumps({"language": language, "code": padded}, ensure_ascii=True))
    assert (done.exit_status, done.result["stdout"]) == (0, "\U0001f600\n")
    assert_refused(Tool(tool.command, tool.home, tool.schema), _without_log(tool, padded + "x", language), "code")


def _without_log(tool: Tool, code: str, language: str) -> Done:
    """A call whose log begins anew."""
    tool.log.unlink()
    return tool.call(json.dumps({"language": language, "code": code}))


def test_all_faults_are_told_at_once(tool: Tool) -> None:
    """The one result of a request with several faults names all their paths."""
    done = tool.call(text(timeout=0, memory_mib=1, env={"A": 1}, domains=[], more=1))
    assert_refused(tool, done, "timeout", "memory_mib", "env.A", "domains", "more")


def test_output_with_every_character_is_one_json_object(tool: Tool, language: str) -> None:
    """Whatever a program writes, the result can be read: control characters, separators, what is no UTF-8."""
    program = pair(
        "import os\nos.write(1, bytes(range(256)) + '\\u2028\\u0085\\U0010ffff'.encode())",
        "require('fs').writeSync(1, Buffer.concat([Buffer.from(Array.from({length: 256}, (_, n) => n)),"
        " Buffer.from('\\u2028\\u0085\\u{10ffff}')]));",
    )
    done = tool.ask(language, program)
    assert done.exit_status == 0
    assert done.result["stdout"] == (bytes(range(256)) + "\u2028\u0085\U0010ffff".encode()).decode("utf-8", "replace")
    assert done.result["replaced"] == {"stdout": True, "stderr": False}
