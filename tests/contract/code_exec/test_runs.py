"""What code_exec does: it runs Python in a fresh interpreter, says what was written, and how it ended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.code_exec.driver import Driver, Pending, Refused, Who
from tests.contract.code_exec.programs import family_is_gone, family_is_ready, together

EXAMPLES = [
    r"""{"code": "import json, pathlib\nprint(json.loads(pathlib.Path('package.json').read_text())['version'])"}""",
    r"""{"code": "print(sum(len(l) for l in open('data.csv')))", "working_dir": "/home/user/project"}""",
    r"""{"code": "import time\nfor i in range(5):\n    print(i); time.sleep(1)", "timeout": 120}""",
]
DATA = "name,size\nä,1\nb,22\n"


@pytest.fixture(scope="module", autouse=True)
def long_example(driver: Driver) -> Pending:
    """The example that takes five seconds, begun before the other tests."""
    return driver.begin(Who("example"), json.loads(EXAMPLES[2]))


def test_it_runs_python_and_returns_what_is_written(driver: Driver, user: Who) -> None:
    """The text is what the program wrote to standard output, to the letter."""
    code = "import sys\nprint('ä €', 1 + 1)\nsys.stdout.write('\\tno end')\nassert sys.implementation.name == 'cpython'"
    answer = driver.code_exec(user, code=code)
    assert (answer.output, answer.success, answer.error, answer.exit_code) == ("ä € 2\n\tno end", True, None, 0)


def test_standard_error_follows_behind_its_prefix(driver: Driver, user: Who) -> None:
    """Standard output comes first, whatever was written first, then standard error behind `[stderr]`."""
    both, only, unended = together(
        driver,
        user,
        {"code": "import sys\nprint('a\\nb', file=sys.stderr, flush=True)\nprint('out')"},
        {"code": "import sys\nprint('err', file=sys.stderr)"},
        {"code": "import sys\nsys.stdout.write('out')\nsys.stderr.write('err')"},
    )
    assert both.output == "out\n[stderr] a\nb\n"
    assert only.output == "[stderr] err\n"
    assert unended.output.startswith("out")
    assert unended.output.removeprefix("out").strip() == "[stderr] err"
    assert (both.success, only.success, unended.success) == (True, True, True)


def test_a_program_runs_in_a_process_of_its_own(driver: Driver, user: Who) -> None:
    """What ends or breaks its process ends nothing else: the next call is answered."""
    ended = driver.code_exec(user, code="import os\nos._exit(0)")
    assert (ended.success, ended.output) == (True, "(no output)")
    shot = driver.code_exec(user, code="import os, signal\nos.kill(0, signal.SIGKILL)")
    assert shot.success is False
    assert driver.code_exec(user, code="print('here')").output == "here\n"


def test_no_state_persists_between_calls(driver: Driver, user: Who) -> None:
    """Neither imports, nor variables, nor what was done to the interpreter, its environment or its temporary files."""
    leave = """
import builtins, json, os, pathlib, sys
variable = builtins.planted = os.environ['PLANTED'] = 'left'
sys.modules['planted'] = json
pathlib.Path('/tmp/planted').write_text('left')
os.umask(0)
"""
    look = """
import os, sys
print([name in globals() for name in ('json', 'variable', 'planted')], 'PLANTED' in os.environ)
print('planted' in sys.modules, hasattr(__builtins__, 'planted'), os.path.exists('/tmp/planted'), os.umask(0o22) == 0)
"""
    clean = "[False, False, False] False\nFalse False False False\n"
    assert driver.code_exec(user, code=look).output == clean
    # The control: where it was done, it is seen.
    assert driver.code_exec(user, code=leave + look).output == "[True, True, False] True\nTrue True True True\n"
    assert driver.code_exec(user, code=look).output == clean


def test_each_script_must_import_what_it_needs(driver: Driver, user: Who) -> None:
    """What the call before imported or assigned is not there, and the traceback says so."""
    assert driver.code_exec(user, code="import json\nvalue = 1\nprint(json.dumps(value))").success is True
    no_import, no_variable = together(driver, user, {"code": "json.dumps(1)"}, {"code": "print(value)"})
    assert (no_import.success, no_variable.success) == (False, False)
    assert "NameError: name 'json' is not defined" in no_import.output
    assert "NameError: name 'value' is not defined" in no_variable.output


def test_no_process_of_a_call_outlives_it(driver: Driver, user: Who) -> None:
    """Every call starts clean: what a program leaves running ends with it."""
    from tests.contract.code_exec.programs import TREE

    code = TREE.replace("hold('parent')", "") + (
        "while not all(os.path.exists('ready-' + name) for name in ('session', 'orphan', 'program')): time.sleep(0.01)\n"
        "parent = open('lock-parent', 'w')\nfcntl.flock(parent, fcntl.LOCK_EX)\nopen('ready-parent', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    pending = driver.begin(user, {"code": code, "timeout": 60})
    directory = driver.files(user)
    family_is_ready(directory)
    (directory / "go").touch()
    answer = pending.answer()
    assert (answer.success, answer.output) == (True, "before\n[stderr] behind\n")
    family_is_gone(directory)


def test_success_means_exit_code_0(driver: Driver, user: Who) -> None:
    """Success, if and only if the exit code is 0; and the exit code is told."""
    endings = {
        "pass": 0,
        "raise SystemExit": 0,
        "import sys; sys.exit(0)": 0,
        "import sys; print('bad', file=sys.stderr)": 0,
        "import sys; sys.exit(1)": 1,
        "import sys; sys.exit('why')": 1,
        "import sys; sys.exit(7)": 7,
        "import sys; sys.exit(255)": 255,
        "import os; os._exit(3)": 3,
        "1 / 0": 1,
        "this is no python": 1,
    }
    answers = together(driver, user, *({"code": code} for code in endings))
    assert {code: answer.exit_code for code, answer in zip(endings, answers, strict=True)} == endings
    assert [answer.success for answer in answers] == [code == 0 for code in endings.values()]
    assert [answer.error is None for answer in answers] == [code == 0 for code in endings.values()]


def test_a_program_that_a_signal_ends_is_no_success(driver: Driver, user: Who) -> None:
    """It has no exit code 0, and what it had written is there."""
    answer = driver.code_exec(user, code="import os\nprint('before', flush=True)\nos.abort()")
    assert answer.success is False
    assert answer.exit_code != 0
    assert answer.output.startswith("before\n")


def test_a_failure_has_its_exit_code_and_the_full_output(driver: Driver, user: Who) -> None:
    """The traceback is in it whole, behind what was printed before; it is an ordinary answer, no fault of the tool."""
    code = "def inner():\n    raise ValueError('mine')\nprint('before')\ninner()"
    answer = driver.code_exec(user, code=code)
    assert (answer.success, answer.exit_code) == (False, 1)
    assert answer.error not in (None, "timeout")
    assert answer.output.startswith("before\n[stderr] Traceback (most recent call last):\n")
    assert "line 4, in <module>" in answer.output
    assert "line 2, in inner" in answer.output
    assert answer.output.endswith("ValueError: mine\n")


def test_the_traceback_shows_the_line_that_failed(driver: Driver, user: Who) -> None:
    """Read it: the source line stands in it, also of what is no Python at all."""
    raised, unread = together(driver, user, {"code": "value = {}\nvalue['missing']"}, {"code": "print('a'\nfor"})
    assert "value['missing']" in raised.output
    assert "KeyError: 'missing'" in raised.output
    assert "SyntaxError" in unread.output
    assert "print('a'" in unread.output


def test_long_output_of_a_failure_can_be_had_whole(driver: Driver, user: Who) -> None:
    """The full output, however long: in the answer, or, where an answer is bounded, beside it."""
    lines = "".join(f"line {number}\n" for number in range(20_000))
    code = "for number in range(20_000): print('line', number)\nraise SystemExit(2)"
    answer = driver.code_exec(user, code=code)
    assert (answer.success, answer.exit_code) == (False, 2)
    assert answer.output.startswith("line 0\n")
    assert "line 19999\n" in answer.output
    assert driver.written(user, answer.call_id, "stdout") == lines
    short = driver.code_exec(user, code="print('x' * 20_000)\nraise SystemExit(2)")
    assert short.output == "x" * 20_000 + "\n"


def test_nothing_written_is_no_output_and_a_success(driver: Driver, user: Who) -> None:
    """`(no output)`: the run is a success all the same; and a failure without a word is none."""
    silent, failed, blank = together(
        driver, user, {"code": "x = 1"}, {"code": "import sys\nsys.exit(3)"}, {"code": "print()"}
    )
    assert (silent.output, silent.success, silent.exit_code) == ("(no output)", True, 0)
    assert (failed.output, failed.success, failed.exit_code) == ("(no output)", False, 3)
    assert blank.output == "\n"


def test_the_first_example_runs_as_given(driver: Driver, who: Who) -> None:
    """It reads a file of the directory."""
    driver.put(who, **{"package.json": '{"name": "x", "version": "1.2.3"}'})
    answer = driver.code_exec(who, **json.loads(EXAMPLES[0]))
    assert (answer.success, answer.output) == (True, "1.2.3\n")


def test_the_second_example_runs_as_given(driver: Driver, user: Who) -> None:
    """An ordinary user's directory takes the place of the one that is outside."""
    driver.put(user, **{"data.csv": DATA})
    answer = driver.code_exec(user, **json.loads(EXAMPLES[1]))
    assert (answer.success, answer.output) == (True, f"{len(DATA)}\n")
    assert answer.working_dir["replaced"] is True


def test_the_second_example_runs_in_the_clients_own_project(driver: Driver, single_user: Who) -> None:
    """In a single-user run the directory is the client's, by its path on the host."""
    driver.put(single_user, **{"project/data.csv": DATA})
    place = str(driver.client_directory / "project")
    answer = driver.code_exec(single_user, **json.loads(EXAMPLES[1]) | {"working_dir": place})
    assert (answer.success, answer.output) == (True, f"{len(DATA)}\n")
    assert answer.working_dir["replaced"] is False


def test_there_are_four_parameters(driver: Driver) -> None:
    """Only `code` must be given; `code`, `working_dir`, `timeout` and `background` are all there are."""
    parameters = driver.parameters()
    assert set(parameters["properties"]) == {"code", "working_dir", "timeout", "background"}
    assert parameters["required"] == ["code"]


@pytest.mark.parametrize(
    ("arguments", "at_fault"),
    [
        ({}, "code"),
        ({"code": ""}, "code"),
        ({"code": 1}, "code"),
        ({"code": None}, "code"),
        ({"code": "print(1)", "language": "python"}, "language"),
        ({"code": "print(1)", "working_dir": 1}, "working_dir"),
        ({"code": "print(1)", "background": "yes"}, "background"),
    ],
    ids=str,
)
def test_what_is_no_call_is_refused(driver: Driver, arguments: dict[str, Any], at_fault: str, user: Who) -> None:
    """A parameter that is none, or of another type, is named, and nothing is run."""
    with pytest.raises(Refused, match=at_fault):
        driver.begin(user, arguments).answer()


def test_it_does_what_is_properly_a_program(driver: Driver, user: Who) -> None:
    """Parsing and transforming data, calculation, text munging, calling a library, a quick check of a value."""
    programs = {
        "import csv, json, sys\n"
        'rows = json.loads(\'[{"a": 1, "b": 2}]\')\n'
        "table = csv.DictWriter(sys.stdout, ['b', 'a'], lineterminator='\\n')\n"
        "table.writeheader(); table.writerows(rows)": "b,a\n2,1\n",
        "import math\nprint(math.comb(100, 50) % 1_000_007, f'{math.pi ** 10:.3f}')": None,
        "import re\nprint(re.sub(r'(\\w+)@(\\w+)', r'\\2 at \\1', 'me@home'))": "home at me\n",
        "import sqlite3, statistics\nprint(statistics.median([3, 1, 2]), sqlite3.connect(':memory:')"
        ".execute('select 40 + 2').fetchone())": "2 (42,)\n",
        "print(0.1 + 0.2 == 0.3)": "False\n",
    }
    import math

    answers = together(driver, user, *({"code": code} for code in programs))
    expected = [text or f"{math.comb(100, 50) % 1_000_007} {math.pi**10:.3f}\n" for text in programs.values()]
    assert [answer.output for answer in answers] == expected
    assert all(answer.success for answer in answers)


def test_a_chain_of_steps_is_one_program(driver: Driver, user: Who) -> None:
    """What would be many calls is one: write files, read them, transform them, check the result, tidy up."""
    code = """
import json, pathlib
here = pathlib.Path('work'); here.mkdir()
for number in range(50):
    (here / f'{number}.json').write_text(json.dumps({'n': number}))
total = sum(json.loads(path.read_text())['n'] for path in here.glob('*.json'))
for path in here.iterdir(): path.unlink()
here.rmdir()
print(total)
"""
    answer = driver.code_exec(user, code=code)
    assert answer.output == f"{sum(range(50))}\n"
    assert list(driver.files(user).iterdir()) == []


def test_what_is_read_back_is_the_output_alone(driver: Driver, user: Who) -> None:
    """A script that shows a file returns its text to the letter: nothing stands around it that must be taken off."""
    text = "first\n\n  [stderr] not an error\nlast, without an end"
    driver.put(user, **{"notes.txt": text})
    assert driver.code_exec(user, code="print(open('notes.txt').read(), end='')").output == text


def test_a_command_of_the_shell_works_where_another_tool_would_do(driver: Driver, user: Who) -> None:
    """`subprocess.run("ls")`, pipes and tools of the command line are a roundabout way, and no fault."""
    driver.put(user, **{"a-file.txt": "one\ntwo\n"})
    listed, piped = together(
        driver,
        user,
        {"code": 'import subprocess\nsubprocess.run("ls")'},
        {"code": "import subprocess\nsubprocess.run(\"cat a-file.txt | grep two | awk '{print $1 $1}'\", shell=True)"},
    )
    assert (listed.success, "a-file.txt\n" in listed.output) == (True, True)
    assert (piped.success, piped.output) == (True, "twotwo\n")


def test_the_third_example_runs_as_given(driver: Driver, long_example: Pending) -> None:
    """It writes a number a second, and has a timeout of its own."""
    answer = long_example.answer()
    assert (answer.success, answer.output) == (True, "0\n1\n2\n3\n4\n")
    assert answer.timeout_seconds == 120
