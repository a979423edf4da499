"""The program runs as a script would, and pid 1 beside it is out of its reach."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from sandbox.isolation.plan import MIB
from tests.sandbox.isolation.conftest import Outcome

type Run = Callable[..., Outcome]


def dedent(code: str) -> str:
    return textwrap.dedent(code).lstrip("\n")


@pytest.mark.parametrize(
    ("code", "exit_code", "signal"),
    [
        ("pass", 0, None),
        ("raise SystemExit", 0, None),
        ("import sys; sys.exit(137)", 137, None),
        ("exit(7)", 7, None),
        ("import os; os._exit(3)", 3, None),
        ("import sys; sys.exit(256 + 5)", 5, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, 9),
        ("import os; os.abort()", None, 6),
        ("import ctypes; ctypes.string_at(0)", None, 11),
        ("raise KeyboardInterrupt", None, 2),
        ("1 / 0", 1, None),
    ],
)
def test_the_ending_is_the_wait_status_itself(run: Run, code: str, exit_code: int | None, signal: int | None) -> None:
    """`exit(137)` is an exit and SIGKILL a signal; nothing is folded into 128 + n."""
    ending = run(code).ending
    assert (ending.exit_code, ending.signal) == (exit_code, signal)
    assert (ending.failure, ending.killed_by_us, ending.oom_kills) == (None, None, 0)


def test_sys_exit_with_a_message_prints_it_and_exits_with_1(run: Run) -> None:
    """As the interpreter does."""
    outcome = run("import sys; sys.exit('no luck')")
    assert (outcome.ending.exit_code, outcome.stderr) == (1, "no luck\n")


def test_a_traceback_names_the_lines_of_the_program_and_no_others(run: Run) -> None:
    """With source lines, and without the frames that started it."""
    outcome = run(
        dedent("""
            def inner():
                raise ValueError("boom")

            inner()
        """)
    )
    lines = outcome.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "/workspace/main.py", line 4, in <module>'
    assert "    inner()" in lines
    assert lines[-1] == "ValueError: boom"
    assert {line for line in lines if line.startswith("  File")} == {
        '  File "/workspace/main.py", line 4, in <module>',
        '  File "/workspace/main.py", line 2, in inner',
    }


def test_chained_exceptions_show_no_frames_of_ours_either(run: Run) -> None:
    """Neither in the cause nor in the context."""
    outcome = run("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e\n")
    assert outcome.stderr.count("Traceback") == 2
    assert "init" not in outcome.stderr
    assert "direct cause" in outcome.stderr


def test_a_syntax_error_shows_file_line_and_caret(run: Run) -> None:
    """And nothing of who compiled it."""
    outcome = run("x = 1\ny = (\n")
    assert outcome.ending.exit_code == 1
    assert outcome.stderr.splitlines()[0] == '  File "/workspace/main.py", line 2'
    assert outcome.stderr.splitlines()[-1].startswith("SyntaxError: ")
    assert "Traceback" not in outcome.stderr


def test_the_programs_own_excepthook_is_called(run: Run) -> None:
    """With a traceback that starts in the program."""
    outcome = run(
        dedent("""
            import sys
            def hook(kind, value, traceback):
                print(kind.__name__, value, traceback.tb_frame.f_code.co_filename)
            sys.excepthook = hook
            raise ValueError("seen")
        """)
    )
    assert (outcome.stdout, outcome.ending.exit_code) == ("ValueError seen /workspace/main.py\n", 1)


def test_a_failing_excepthook_is_reported_with_both_errors(run: Run) -> None:
    """As the interpreter does."""
    outcome = run("import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('first')\n")
    assert "Error in sys.excepthook:" in outcome.stderr
    assert "ZeroDivisionError" in outcome.stderr
    assert outcome.stderr.rstrip().endswith("ValueError: first")


def test_the_module_is_main_and_its_file_exists(run: Run) -> None:
    """`__main__` is the program's alone: name, file, argv, first module path, globals."""
    outcome = run(
        dedent("""
            import sys, inspect, __main__
            def here(): return 41 + 1
            print(__name__, __file__, sys.argv, sys.path[0])
            print(sorted(n for n in globals() if not n.startswith("__")))
            print(__main__.here is here, inspect.getsource(here), open(__file__).read().count("here"))
        """),
        arguments=("a", "b c"),
    )
    assert outcome.stderr == ""
    assert outcome.stdout.splitlines()[0] == (
        "__main__ /workspace/main.py ['/workspace/main.py', 'a', 'b c'] /workspace"
    )
    assert outcome.stdout.splitlines()[1] == "['__main__', 'here', 'inspect', 'sys']".replace("'__main__', ", "")
    assert "True def here(): return 41 + 1" in outcome.stdout


def test_atexit_and_threads_run_to_their_end(run: Run) -> None:
    """The interpreter is finalised as ever: non-daemon threads are joined, exit handlers called, output flushed."""
    outcome = run(
        dedent("""
            import atexit, sys, threading
            atexit.register(lambda: print("at exit"))
            gate = threading.Event()
            def work():
                gate.wait()
                print("thread done")
            threading.Thread(target=work).start()
            threading.main_thread
            gate.set()
            sys.stdout.write("no newline|")
        """)
    )
    assert sorted(outcome.stdout.replace("|", "\n").splitlines()) == ["at exit", "no newline", "thread done"]
    assert outcome.stdout.endswith("at exit\n")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_works(run: Run, method: str) -> None:
    """By every start method, with functions of the program."""
    outcome = run(
        dedent(f"""
            import multiprocessing
            def square(n): return n * n
            if __name__ == "__main__":
                multiprocessing.set_start_method("{method}")
                with multiprocessing.Pool(2) as pool:
                    print(pool.map(square, range(5)))
        """)
    )
    assert (outcome.stdout, outcome.stderr) == ("[0, 1, 4, 9, 16]\n", "")


def test_subprocesses_of_the_same_interpreter_work(run: Run) -> None:
    """`sys.executable` is one."""
    outcome = run("import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(6 * 7)']))")
    assert outcome.stdout == "b'42\\n'\n"


def test_standard_input_is_at_its_end(run: Run) -> None:
    """`input()` fails at once and nothing waits."""
    outcome = run("import sys\nprint(repr(sys.stdin.read()))\ninput()\n")
    assert outcome.stdout == "''\n"
    assert outcome.stderr.splitlines()[-1] == "EOFError: EOF when reading a line"


def test_what_was_printed_before_a_kill_is_there(run: Run) -> None:
    """Output is unbuffered."""
    assert run("import os\nprint('before', end='')\nos.kill(os.getpid(), 9)").stdout == "before"


def test_sigint_raises_keyboard_interrupt_in_the_program(run: Run) -> None:
    """Pid 1 has no handler for it; the program has the usual one."""
    outcome = run(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    print('caught')\n"
    )
    assert outcome.stdout == "caught\n"


def test_the_calls_environment_is_the_programs_and_its_childrens(run: Run) -> None:
    """It is in `os.environ`, in C's `getenv`, and inherited; pid 1 has none of it."""
    outcome = run(
        dedent("""
            import ctypes, os, subprocess
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            print(os.environ["GREETING"], getenv(b"GREETING").decode())
            print(subprocess.check_output(["sh", "-c", "echo $GREETING"], text=True), end="")
        """),
        call_environment={"GREETING": "grüß dich", "PYTHONINSPECT": "1", "MALLOC_CHECK_": "3"},
    )
    assert outcome.stdout == "grüß dich grüß dich\ngrüß dich\n"


def test_a_large_call_environment_reaches_the_program(run: Run) -> None:
    """50 values of 32768 four-byte characters: far more than one execve takes."""
    values = {f"BIG_{n}": "𝔘" * 32_768 for n in range(50)}
    outcome = run(
        "import os; print(sum(len(v) for k, v in os.environ.items() if k[:4] == 'BIG_'))", call_environment=values
    )
    assert outcome.stdout == f"{50 * 32_768}\n"


def test_the_program_has_no_descriptor_but_its_three(run: Run) -> None:
    """What pid 1, bubblewrap and the launcher have open is not inherited."""
    outcome = run(
        "import os\nfor fd in sorted(os.listdir('/proc/self/fd'), key=int): print(fd, os.path.exists('/proc/self/fd/' + fd))"
    )
    names = [line.split()[0] for line in outcome.stdout.splitlines()]
    assert names == ["0", "1", "2", "3"]  # 3 is the listing's own, gone when it is looked at
    assert outcome.stdout.splitlines()[3] == "3 False"


REACH = """
import os, signal
def attempt(what, action):
    try:
        action()
    except OSError as error:
        print(what, type(error).__name__)
    else:
        print(what, "WORKED")
victim = {victim}
attempt("memory", lambda: open(f"/proc/{{victim}}/mem", "rb"))
attempt("descriptors", lambda: os.listdir(f"/proc/{{victim}}/fd"))
attempt("environment", lambda: open(f"/proc/{{victim}}/environ").read(1))
attempt("maps", lambda: open(f"/proc/{{victim}}/maps").read(1))
"""


def test_pid_1_cannot_be_read_and_a_sibling_can(run: Run) -> None:
    """The same probes work on another process of the program's: it is pid 1 that is protected."""
    wanted = dict.fromkeys(("memory", "descriptors", "environment", "maps"), "PermissionError")
    assert dict(line.split() for line in run(REACH.format(victim=1)).stdout.splitlines()) == wanted
    sibling = "__import__('subprocess').Popen(['sleep', '60']).pid"
    control = run(REACH.format(victim=sibling)).stdout
    assert dict(line.split() for line in control.splitlines()) == dict.fromkeys(wanted, "WORKED")


def test_pid_1_cannot_be_killed_or_stopped_from_inside(run: Run) -> None:
    """By any signal at all; the status of the program is still reported."""
    outcome = run(
        dedent("""
            import os, signal
            for number in range(1, 65):
                try:
                    os.kill(1, number)
                except OSError:
                    pass
            print("still here", os.getppid())
            raise SystemExit(42)
        """)
    )
    assert (outcome.stdout, outcome.ending.exit_code) == ("still here 1\n", 42)


def test_orphans_are_reaped(run: Run) -> None:
    """500 double forks leave no zombie behind."""
    outcome = run(
        dedent("""
            import os
            for _ in range(500):
                if os.fork() == 0:
                    if os.fork() == 0:
                        os._exit(0)
                    os._exit(0)
                os.wait()
            def zombies():
                count = 0
                for pid in filter(str.isdigit, os.listdir("/proc")):
                    try:
                        count += open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
                    except OSError:
                        pass
                return count
            while zombies():
                pass
            print("none left")
        """),
        memory_bytes=256 * MIB,
    )
    assert outcome.stdout == "none left\n"


def test_packages_come_after_the_standard_library_and_run_no_pth_files(run: Run, packages: object) -> None:
    """They are imported from a fixed, read-only place."""
    outcome = run(
        "import sys, requests, os\nprint(sys.path[-1], requests.__file__, os.access('/opt/packages', os.W_OK))\n"
        "print([n for n in sys.modules if 'editable' in n or 'distutils-precedence' in n])",
        packages=str(packages),
    )
    assert outcome.stdout.splitlines() == ["/opt/packages /opt/packages/requests/__init__.py False", "[]"]


def test_source_in_another_encoding_is_decoded_by_its_cookie(run: Run) -> None:
    """The bytes are compiled as the interpreter would compile the file."""
    assert run("# coding: latin-1\nprint(len('é'))").stdout == "2\n"  # two bytes, two latin-1 characters


def test_text_of_any_script_prints(run: Run) -> None:
    """The locale is UTF-8."""
    assert run("print('grüß 你好 🐍')").stdout == "grüß 你好 🐍\n"


def test_the_report_of_pid_1_cannot_be_starved(run: Run) -> None:
    """Its limits and its scheduling are out of reach, and all that it needs for its report is loaded beforehand."""
    outcome = run(
        dedent("""
            import sys
            print("resource" in sys.modules)
            import os, resource
            for attempt in (
                lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1)),
                lambda: os.sched_setaffinity(1, {0}),
                lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
                lambda: os.setpriority(os.PRIO_PGRP, 0, 19),
                lambda: os.setpriority(os.PRIO_USER, 0, 19),
            ):
                try:
                    attempt()
                    print("WORKED")
                except PermissionError:
                    pass
            own = os.getpid()
            resource.prlimit(own, resource.RLIMIT_NOFILE, (64, 64))
            os.sched_setaffinity(own, os.sched_getaffinity(own))
            os.setpriority(os.PRIO_PROCESS, own, 5)
            print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.nice(0))
        """)
    )
    assert (outcome.stdout, outcome.stderr) == ("True\n64 5\n", "")
    assert (outcome.ending.exit_code, outcome.ending.failure, outcome.ending.released) == (0, None, True)
