"""Programs that the tests of code_exec run, and what the host sees of them while they do.

Owns: the programs, and looking at what they hold open. Must not: know how a call is made.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path

from tests.contract.code_exec.driver import Answer, Driver, Who
from tests.remote_executor import until

# Says that it has begun, and ends when it is told to.
WAIT = """
import os, time
open('started', 'w').close()
while not os.path.exists('go'):
    time.sleep(0.01)
os.unlink('started')
"""

# Which of the directories that `marked` made is this one.
WHERE = "import os\nprint(*sorted(name for name in os.listdir() if name.startswith('here-')))"

# A family that holds a lock each: one that ignores polite signals, a session of its own, an orphan, another program.
FAMILY = ("parent", "session", "orphan", "program")
TREE = """
import fcntl, os, signal, subprocess, sys, time
def hold(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    held = open('lock-' + name, 'w')
    fcntl.flock(held, fcntl.LOCK_EX)
    open('ready-' + name, 'w').close()
    while True:
        time.sleep(60)
if os.fork() == 0:
    os.setsid()
    hold('session')
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        hold('orphan')
    os._exit(0)
program = (
    "import fcntl, time; held = open('lock-program', 'w'); fcntl.flock(held, fcntl.LOCK_EX);"
    "open('ready-program', 'w').close(); time.sleep(1000)"
)
subprocess.Popen([sys.executable, '-c', program], start_new_session=True, stdout=subprocess.DEVNULL)
print('be' + 'fore', flush=True)
print('be' + 'hind', file=sys.stderr, flush=True)
hold('parent')
"""


def started(directory: Path) -> None:
    """Return once `WAIT` runs there."""
    until((directory / "started").exists, "the program's start")


def family_is_ready(directory: Path) -> None:
    """Return once all of `TREE` holds its locks there, which is the control: they are seen from here."""
    until(lambda: all((directory / f"ready-{name}").exists() for name in FAMILY), "the family's start")
    assert {name for name in FAMILY if _held(directory / f"lock-{name}")} == set(FAMILY)


def family_is_gone(directory: Path) -> None:
    """Return once nobody holds any of the locks."""
    until(lambda: not any(_held(directory / f"lock-{name}") for name in FAMILY), "the family's end", 20)


def _held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def files_with(directory: Path, text: str) -> list[Path]:
    """The files below a directory that have the text in them: a temporary script is known by its code."""
    return [path for path in directory.rglob("*") if path.is_file() and text in path.read_text(errors="replace")]


def together(driver: Driver, who: Who, *calls: Mapping[str, object]) -> list[Answer]:
    """Make the calls at once."""
    return [pending.answer() for pending in [driver.begin(who, call) for call in calls]]


def marked(driver: Driver, who: Who, *directories: str) -> None:
    """Make directories, and in each, as in the root, a file that tells which it is; for `WHERE`."""
    names = {f"{name}/here-{name.replace('/', '-')}": "" for name in directories}
    driver.put(who, **{"here-root": ""}, **names)
