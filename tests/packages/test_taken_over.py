"""A parser that a hostile archive has taken over speaks for that archive, and for nobody else.

Found by an attacker: it left a `traceback.py` in the working directory and interrupted its parent, which imported that
on its way out and so wrote, in the attacker's words, whatever tree of whatever package.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from proxy.packages.requests import Registry
from sandbox.interpreters import this_interpreter
from sandbox.isolation.plan import MIB
from sandbox.packages import program
from sandbox.runtimes import python
from tests.packages.conftest import Kitchen
from tests.registry.build import wheel
from tests.registry.server import PypiRegistry

# Run by the parent, if ever: both artifacts, as the attacker wants them.
FORGERY = """
import os, sys
from sandbox.packages import outlet
from sandbox.packages.inside import hand_out
def put(number, path, data):
    hand_out(number, outlet.record({"file": path, "size": len(data), "executable": False}) + data)
for number in (1, 2):
    put(number, ("taken_over", "the_other")[number - 1] + "/__init__.py", b"FORGED = 1")
    hand_out(number, outlet.record({"done": {"name": NAMES[number - 1], "version": "1.0"}}))
hand_out(outlet.REPORT, b'{"artifacts": 2}')
os._exit(0)
"""
HOSTILE = """
import os, signal, time
import sandbox.packages.inside_fetch as fetching
honest = fetching._parse
def parse(artifact):
    if "taken_over" in artifact["url"]:
        for name in ("traceback", "linecache", "selectors"):
            try:
                with open(f"/workspace/{name}.py", "w") as file:
                    file.write(FORGERY)
            except OSError:
                pass
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)  # nothing tells that a signal was ignored
        os.mkdir("/workspace/over")
        os._exit(0)
    until = time.monotonic() + 10
    while not os.path.exists("/workspace/over") and time.monotonic() < until:
        time.sleep(0.01)  # the other's tree is forged before it is made
    honest(artifact)
fetching._parse = parse
"""


@pytest.mark.parametrize("files", ["it may write no file", "it writes files"])
def test_a_taken_over_parser_forges_no_tree(
    kitchen: Kitchen, pypi: Registry, pypi_registry: PypiRegistry, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """Neither by a module that its parent would import, nor by a signal. Each of the locks holds without the other."""
    taken, other = (f"{name}-{files.split()[1]}" for name in ("taken-over", "the-other"))
    large = {"pad.bin": os.urandom(400_000)}  # the largest is the first
    pypi_registry.packages.add(wheel(taken, "1.0", files=large))
    pypi_registry.packages.add(wheel(other, "1.0", files={"the_other/__init__.py": "FORGED = 0"}))
    honest = program.modules
    hostile = f"FORGERY = {f'NAMES = {taken!r}, {other!r}{FORGERY}'!r}{HOSTILE}"
    if files == "it writes files":
        hostile += "fetching.forbid_files = lambda: None\n"
    with monkeypatch.context() as patched:
        patched.setattr(program, "modules", lambda op: honest(op) + (hostile if op == "fetch" else ""))
        wanted = kitchen.wanted(pypi, f"{taken}==1.0", f"{other}==1.0")
        assert kitchen.refusals(wanted) == {taken: "unsafe_archive_path"}
    with kitchen.prepare(kitchen.wanted(pypi, f"{other}==1.0")) as lease:
        assert (lease.tree / "the_other/__init__.py").read_text() == "FORGED = 0"


LEFT = "open('traceback.py', 'w').write('print(\"RAN\", flush=True)')\n"
RAISE = "def fail(job): raise KeyboardInterrupt('a fault')\n"


def run(kitchen: Kitchen, code: str) -> tuple[int | None, str, str]:
    base = python.plan(this_interpreter(), call_id="call-test", attempt=1, memory_bytes=256 * MIB)
    return kitchen.run(base, code)


def test_the_program_ends_at_a_fault_without_importing_anything(kitchen: Kitchen) -> None:
    """The control: a program as attempts run it imports what lies in its directory to show its traceback."""
    assert "RAN" in run(kitchen, LEFT + "raise ValueError")[1]
    main = "from sandbox.packages import inside\ninside.main({}, fail)\n"
    assert run(kitchen, program.modules("fetch") + LEFT + RAISE + main) == (1, "", "KeyboardInterrupt: a fault\n")


@pytest.mark.parametrize("operation", ["resolve", "facts", "fetch"])
def test_the_program_imports_from_the_standard_library_alone(kitchen: Kitchen, operation: str) -> None:
    """Not from the directory that it works in, nor from the user's site. The control: an attempt's program does."""
    site = "f'{os.environ[\"HOME\"]}/.local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages'"
    code = f"""
import os, sys
os.makedirs({site}, exist_ok=True)
for directory, name in ((".", "left_here"), ({site}, "left_there")):
    with open(f"{{directory}}/{{name}}.py", "w") as file:
        file.write("")
    try:
        __import__(name)
        print(name)
    except ImportError:
        pass
import stringprep, decimal, ctypes  # the library is all there
"""
    assert run(kitchen, code) == (0, "left_here\nleft_there\n", "")
    assert run(kitchen, program.modules(operation) + code) == (0, "", "")


def test_a_parser_can_write_no_file_and_still_hands_out(kitchen: Kitchen) -> None:
    """The control: before it has been told, it can."""
    code = """
def attempt():
    try:
        with open("file", "w") as file:
            file.write("x")
    except OSError as error:
        return error.strerror
attempt()
before = attempt()
sys.modules['sandbox.packages.inside_fetch'].forbid_files()
print(before, attempt())
"""
    assert run(kitchen, program.modules("fetch") + code) == (0, "None File too large\n", "")


def test_a_fetcher_answers_for_what_it_was_asked(kitchen: Kitchen, pypi: Registry, pypi_registry: Any) -> None:
    """Whatever number of an artifact it names, the one that it was asked for is meant: here both fail, each itself."""
    pypi_registry.packages.add(wheel("fetched-aa", "1.0"))
    pypi_registry.packages.add(wheel("fetched-bb", "1.0"))
    honest = program.modules
    hostile = """
import json
import sandbox.packages.inside_fetch as fetching
def serve(artifacts, client, requests):
    while requests.recv(4):
        requests.send(json.dumps({"number": 0, "failed": {"reason": "hash_mismatch", "message": "no"}}).encode())
fetching._serve_fetches = serve
"""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "modules", lambda op: honest(op) + (hostile if op == "fetch" else ""))
        refused = kitchen.refusals(kitchen.wanted(pypi, "fetched-aa==", "fetched-bb=="))
    assert refused == {"fetched-aa": "hash_mismatch", "fetched-bb": "hash_mismatch"}
