"""The command `sluicegate run`: exit statuses, streams, the JSON object, and refusals that name what refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import world
from tests.lab import PRELUDE, Outside, main_policy, parse_seen, read_events

ROOT = Path(__file__).parent.parent.parent

RESULT_KEYS = {
    "call_id", "status", "cause", "exit_code", "stdout", "stderr", "truncated", "replaced", "output_chars", "error",
    "return_value", "attempts", "usage", "network",
}  # fmt: skip


@dataclass(frozen=True)
class Cli:
    """Runs the command with a state directory, a policy and a log of its own."""

    command: list[str]
    home: Path
    policy: Path
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state")}

    def arguments(self, *arguments: str) -> list[str]:
        return [*self.command, "run", "--policy", str(self.policy), "--audit-log", str(self.log), *arguments]

    def run(self, *arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.arguments(*arguments),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env=self.environment | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture
def cli(command: list[str], outside: Outside) -> Iterator[Cli]:
    home = Path(tempfile.mkdtemp(prefix="sg-"))
    policy = home / "policy.yaml"
    policy.write_text(main_policy(outside))
    yield Cli(command, home, policy, home / "audit.jsonl")
    shutil.rmtree(home)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--code", "print('x')"], 0),
        (["--code", "raise SystemExit(7)"], 7),
        (["--code", "raise SystemExit(255)"], 255),
        (["--code", "1/0"], 1),
        (["--timeout", "1", "--code", "while True: pass"], 124),
        (["--code", "raise SystemExit(124)"], 124),
        (["--code", "raise SystemExit(2)"], 2),
        (["--allow-network", "--unrestricted", "--domain", "allowed.test", "--code", "1"], 2),
        (["--timeout", "0", "--code", "1"], 2),
        (["--timeout", "301", "--code", "1"], 2),
        (["--memory-mib", "17179869184", "--code", "1"], 2),
        (["--memory-mib", "-1", "--code", "1"], 2),
        (["--memory-mib", "0", "--code", "1"], 2),
        (["--env", "NOVALUE", "--code", "1"], 2),
        (["--env", "LD_PRELOAD=x", "--code", "1"], 2),
        (["--env", "HTTP_PROXY=http://x", "--code", "1"], 2),
        (["--allow-network", "--domain", "bad domain", "--code", "1"], 2),
        (["--allow-network", "--domain", "1.2.3.4", "--code", "1"], 2),
        (["--unknown-option"], 2),
        (["no-such-file.py"], 2),
        ([], 2),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else str(value),
)
def test_the_exit_status_tells_the_ending(cli: Cli, arguments: list[str], status: int) -> None:
    """The code's own status; 124 on timeout; 2 when the call is refused, with words on stderr and nothing run."""
    done = cli.run(*arguments)
    assert done.returncode == status, done.stderr
    if status == 2 and "raise SystemExit(2)" not in arguments:
        assert done.stdout == ""
        assert done.stderr.strip()
        assert "Traceback" not in done.stderr
        assert not [event for event in read_events(cli.log) if event.get("event") == "attempt"]


def test_a_program_killed_for_its_memory_ends_with_137(cli: Cli) -> None:
    """137 is said when the attempt was killed, and stderr says for what."""
    done = cli.run("--memory-mib", "128", "--code", "import os\nx = [os.urandom(1 << 20) for _ in range(4096)]")
    if "MemoryError" in done.stderr:  # without a limit on the whole tree the program meets its own
        assert done.returncode == 1
    else:
        assert done.returncode == 137
        assert "memory" in done.stderr


def test_the_output_is_passed_through_unchanged(cli: Cli) -> None:
    """Both streams come out byte by byte, apart, and stdout has nothing of ours."""
    code = "import os\nos.write(1, bytes(range(256)))\nos.write(2, b'err\\n')\nos.write(1, 'żółć😀'.encode())"
    done = subprocess.run(
        cli.arguments("--code", code),
        env=cli.environment,
        cwd=ROOT,
        capture_output=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0
    assert done.stdout == bytes(range(256)) + "żółć😀".encode()
    assert b"err\n" in done.stderr


def test_the_output_comes_while_the_code_runs(cli: Cli) -> None:
    """A line is there before the program ends: it waits until the reader has killed it."""
    with subprocess.Popen(
        cli.arguments("--timeout", "60", "--code", "print('first')\nimport signal\nsignal.pause()"),
        env=cli.environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) not in (0, 124)


def test_a_closed_reader_does_not_break_the_command(cli: Cli) -> None:
    """`sluicegate run | head -1` ends, without a traceback."""
    with subprocess.Popen(
        cli.arguments("--timeout", "5", "--code", "while True: print('y' * 1000)"),
        env=cli.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(60) is not None
    assert b"Traceback" not in error


def test_the_json_object_is_the_contracts(cli: Cli) -> None:
    """`--json` prints one object with exactly the contract's keys, and the status is the same."""
    done = cli.run(
        "--json", "--allow-network", "--domain", "allowed.test", "--code",
        PRELUDE + 'fetch("http://allowed.test/echo"); fetch("http://other.test/"); print("out"); raise SystemExit(5)',
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == RESULT_KEYS
    assert result["truncated"] == {"stdout": False, "stderr": False}
    assert result["output_chars"] == {"stdout": 4, "stderr": 0}
    assert (result["status"], result["exit_code"], result["stdout"], result["stderr"]) == ("error", 5, "out\n", "")
    assert result["return_value"] is None
    assert len(result["attempts"]) == 1
    assert result["usage"].keys() == {"wall_seconds", "cpu_seconds", "peak_memory_bytes"}
    assert result["network"].keys() == {"mode", "allowed", "denied", "destinations"}
    assert result["network"]["mode"] == "named"
    for destination in result["network"]["destinations"]:
        assert destination.keys() == {"host", "port", "decision", "reason", "count"}
    assert result["network"]["denied"] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "word", "code"),
    [
        (["--code", "print(1)"], 0, "success", None),
        (["--timeout", "1", "--code", "while True: pass"], 124, "timeout", "wall_clock"),
        (["--allow-network", "--domain", "nowhere.test", "--code", "1"], 2, "error", "policy_refused"),
    ],
)
def test_the_json_status_is_the_endings(
    cli: Cli, arguments: list[str], status: int, word: str, code: str | None
) -> None:
    """The status word, the error and the exit status agree, also when nothing was run."""
    done = cli.run("--json", *arguments)
    assert done.returncode == status
    result = json.loads(done.stdout)
    assert result.keys() == RESULT_KEYS
    assert result["status"] == word
    assert (result["error"] or {}).get("code") == code
    if code == "policy_refused":
        assert result["attempts"] == []
        assert result["exit_code"] is None


def test_code_comes_from_a_file_or_standard_input(cli: Cli, tmp_path: Path) -> None:
    """A file's code, and `-` for standard input; the program's own input is at its end either way."""
    source = "import sys\nprint(repr(sys.stdin.read()))"
    (tmp_path / "x.py").write_text(source)
    for done in (cli.run(str(tmp_path / "x.py")), cli.run("-", stdin=source)):
        assert done.returncode == 0, done.stderr
        assert done.stdout == "''\n"


def test_variables_are_given_and_none_is_inherited(cli: Cli) -> None:
    """`--env` sets, an equals sign in the value is kept, and the caller's variables are not there."""
    done = cli.run(
        "--env", "A=1=2", "--env", "B=", "--code", "import os; print(os.environ['A'], repr(os.environ['B']), os.environ.get('CANARY'))",
        CANARY="secret",
    )  # fmt: skip
    assert done.stdout == "1=2 '' None\n", done.stderr


def test_the_default_policy_is_in_force_without_one(command: list[str], cli: Cli) -> None:
    """Without `--policy` a call may have no network, and not any name or everything."""
    base = [*command, "run", "--audit-log", str(cli.log)]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*base, *arguments],
            env=cli.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )

    done = run("--code", PRELUDE + 'report(seen=fetch("http://allowed.test/echo")["status"])')
    assert done.returncode == 0, done.stderr
    assert parse_seen(done.stdout) == [{"seen": 403}]
    for arguments in (["--allow-network", "--domain", "allowed.test"], ["--allow-network", "--unrestricted"]):
        refused = run(*arguments, "--code", "print(1)")
        assert refused.returncode == 2, refused.stdout
        assert refused.stdout == ""
        assert "modes" in refused.stderr


REFUSALS = [
    (["--allow-network", "--domain", "nowhere.test"], "nowhere.test", "network.allow"),
    (["--allow-network", "--domain", "denied.test"], "denied.test", "network.deny"),
    (["--allow-network", "--unrestricted"], "unrestricted", "network.modes"),
    (["--timeout", "200"], "200", "limits.timeout_seconds"),
    (["--memory-mib", "2000"], "2000", "limits.memory_mib"),
]


@pytest.mark.parametrize(("arguments", "thing", "rule"), REFUSALS, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_layer_and_the_rule(
    cli: Cli, outside: Outside, arguments: list[str], thing: str, rule: str
) -> None:
    """A call that asks for more than the policy allows is refused before any attempt, and told which key refused it."""
    document = json.loads(main_policy(outside))
    document["network"]["modes"] = ["block-all", "named"]
    document["limits"] = {"timeout_seconds": {"default": 30, "max": 60}, "memory_mib": {"default": 256, "max": 512}}
    cli.policy.write_text(json.dumps(document))
    with outside.silence():
        done = cli.run(*arguments, "--code", "print('ran')")
    assert done.returncode == 2
    assert "ran" not in done.stdout
    assert thing in done.stderr
    assert rule in done.stderr
    assert "operator" in done.stderr, "the layer"
    assert "hint:" in done.stderr


POLICY_ERRORS = {
    "an-unknown-key": ("version: 1\nname: x\nnetwork:\n  allowed: []\n", ["3:", "allowed"]),
    "a-wrong-version": ("version: 2\nname: x\n", ["1:", "version"]),
    "a-bad-mode": ("version: 1\nname: x\nnetwork:\n  modes: [everything]\n", ["4:", "everything"]),
    "an-address-where-a-name-belongs": ("version: 1\nname: x\nnetwork:\n  modes: [named]\n  allow:\n    - host: 127.0.0.1\n", ["6:", "127.0.0.1"]),
    "a-suffix": ("version: 1\nname: x\nnetwork:\n  modes: [named]\n  allow:\n    - host: co.uk\n", ["6:", "co.uk"]),
    "a-wildcard": ("version: 1\nname: x\nnetwork:\n  modes: [named]\n  allow:\n    - host: '*.com'\n", ["6:", "*.com"]),
    "no-yaml": ("version: 1\nname: [x\n", [":"]),
    "two-keys-of-a-name": ("version: 1\nname: x\nname: y\n", ["3:", "name"]),
    "a-name-that-is-no-host": ("version: 1\nname: x\nnetwork:\n  deny:\n    - host: 'ex ample.test'\n", ["5:", "ex ample"]),
    "memory-out-of-range": ("version: 1\nname: x\nlimits:\n  memory_mib: {default: 17179869184, max: 17179869184}\n", ["4:"]),
    "negative-timeout": ("version: 1\nname: x\nlimits:\n  timeout_seconds: {default: -1, max: 30}\n", ["4:"]),
    "a-port-out-of-range": ("version: 1\nname: x\nnetwork:\n  ports: [80, 65536]\n", ["4:", "65536"]),
    "a-path-without-a-slash": ("version: 1\nname: x\nnetwork:\n  modes: [named]\n  allow:\n    - {host: a.test, paths: [public]}\n", ["6:", "public"]),
    "four-kilobytes-of-name": (f"version: 1\nname: x\nnetwork:\n  deny:\n    - host: {'a' * 4096}.test\n", ["5:"]),
    "an-empty-file": ("", []),
    "a-list": ("- 1\n", []),
    "null": ("null\n", []),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICY_ERRORS)
def test_a_policy_that_cannot_be_meant_is_refused_where_it_stands(cli: Cli, name: str) -> None:
    """A broken policy is exit status 2, with file, line and column, and nothing is run."""
    text, words = POLICY_ERRORS[name]
    cli.policy.write_text(text)
    done = cli.run("--code", "print('ran')")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert str(cli.policy) in done.stderr.replace("\n", "")
    for word in words:
        assert word in done.stderr


def test_all_errors_of_a_policy_are_told_at_once(cli: Cli) -> None:
    """Three faults are three messages, each with its place."""
    cli.policy.write_text("version: 1\nname: x\nnetwork:\n  modes: [named, nope]\n  alow: []\n  ports: [0]\n")
    done = cli.run("--code", "1")
    assert done.returncode == 2
    for place in ("4:", "5:", "6:"):
        assert f"{cli.policy}:{place}" in done.stderr.replace("\n", ""), done.stderr


def test_a_missing_policy_is_refused(cli: Cli) -> None:
    """A policy that is not there is no open door."""
    cli.policy.unlink()
    done = cli.run("--code", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(cli.policy) in done.stderr.replace("\n", "")


def test_our_own_failure_is_3(cli: Cli) -> None:
    """Where the isolation cannot be had, nothing runs, and the message says what is missing."""
    with world.hidden(shutil.which("bwrap") or "bwrap"):
        done = cli.run("--code", "print('ran')")
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "bwrap" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_long_temporary_directory_is_no_fault(cli: Cli) -> None:
    """A TMPDIR longer than a unix socket's path works or is named."""
    long = cli.home / ("x" * 120)
    long.mkdir()
    done = cli.run("--code", "print('ran')", TMPDIR=str(long))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"


def test_the_installed_command_is_the_same(cli: Cli) -> None:
    """The console script of the installation runs the same code."""
    script = Path(sysconfig.get_path("scripts")) / "sluicegate"
    if not script.exists():
        pytest.skip("the project is not installed in this environment")
    done = subprocess.run(
        [str(script), *cli.arguments("--code", "print('ran')")[len(cli.command) :]],
        env=cli.environment, cwd=cli.home, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_the_command_leaves_no_process(cli: Cli) -> None:
    """When the command has ended, so has everything that it started."""
    marked = {"SLUICEGATE_TEST_MARK": str(cli.home)}
    done = cli.run("--code", "import subprocess; subprocess.Popen(['setsid', 'sleep', '300'])", **marked)
    assert done.returncode == 0, done.stderr
    assert [process for process in psutil.process_iter() if mentions(process, str(cli.home))] == []


def mentions(process: psutil.Process, mark: str) -> bool:
    """Whether a process bears a mark in its arguments or environment."""
    try:
        return any(mark in text for text in (*process.cmdline(), *process.environ().values()))
    except psutil.Error:
        return False


def status_with(cli: Cli, redirections: str, *arguments: str) -> tuple[int, str]:
    """The command's exit status and error output, run by a shell that redirects its streams."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *cli.arguments(*arguments)],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=cli.environment, cwd=ROOT, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["--code", "print(1)"], ["--json", "--code", "print(1)"]])
def test_output_that_cannot_be_written_is_not_a_success(cli: Cli, arguments: list[str]) -> None:
    status, errors = status_with(cli, ">/dev/full", *arguments)
    assert status == 3
    assert "the output could not be written: No space left on device" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_stream_of_the_command_is_an_empty_one(cli: Cli, closed: str) -> None:
    status, errors = status_with(cli, closed, "--code", "raise SystemExit(5)")
    assert (status, errors) == (5, "")


def test_the_command_ends_when_nobody_reads_its_output(cli: Cli) -> None:
    command = [*cli.arguments("--timeout", "90", "--code", "while True: print('y')")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=cli.environment, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(60) == 128 + 13


def test_a_program_without_end_is_not_read_to_its_end(cli: Cli) -> None:
    done = cli.run("/dev/zero")
    assert done.returncode == 2
    assert done.stderr == "sluicegate: code: `/dev/zero` has more than 100000 characters\n"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SLUICEGATE_STATE_DIR": "relative"}, "`SLUICEGATE_STATE_DIR` is `'relative'`"),
        ({"HOME": "", "XDG_STATE_HOME": ""}, "there is no state directory without a home"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(cli: Cli, environment: dict[str, str], said: str) -> None:
    done = cli.run("--code", "print(1)", **environment)
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_relative_log_needs_a_directory_to_be_relative_to(cli: Cli) -> None:
    gone = cli.home / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *cli.command, "run", "--policy", str(cli.policy), "--audit-log", "a.jsonl", "--code", "1"],
        env=cli.environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "is relative to a directory that is gone" in done.stderr


def test_a_call_that_is_refused_is_in_the_log(cli: Cli) -> None:
    """Code that asks for more than its ceiling is what a security team looks for."""
    (cli.home / "narrow.yaml").write_text("version: 1\nname: narrow\n")
    done = cli.run("--policy", str(cli.home / "narrow.yaml"), "--domain", "other.test", "--json", "--code", "print(1)")
    assert done.returncode == 2
    (line,) = [event for event in read_events(cli.log) if event["event"] == "decision"]
    assert line["call_id"] == json.loads(done.stdout)["call_id"]
    assert (line["layer"], line["decision"], line["reason"]) == ("call", "deny", "mode_not_allowed")
    assert (line["rule"], line["host"], line["policy_name"]) == ("network.modes", "other.test", "narrow")


def test_what_is_no_call_has_a_result_in_json_too(cli: Cli) -> None:
    done = cli.run("--json", "--timeout", "0", "--env", "PATH=1", "--env", "LD_PRELOAD=x", "--code", "print(1)")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "invalid_call"
    for fault in ("timeout:", "env.PATH:", "env.LD_PRELOAD:"):
        assert fault in error["message"]
