"""What users of other tools for running code complained about, tried here, as far as no other test holds it.

`docs/cases.md` has all of the complaints, with the test that holds each.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sandbox import Settings, SyncExecutor
from sandbox.contract import CodeCall, Status, ToolResult
from tests.javascript import run_js
from tests.lab import Lab, Run


@contextlib.contextmanager
def open_executor(settings: Settings) -> Iterator[SyncExecutor]:
    """An executor under a policy that says nothing, with directories of its own."""
    root = Path(tempfile.mkdtemp(prefix="sg-"))
    try:
        (root / "policy.yaml").write_text("version: 1\nname: tests-cases\n")
        chosen = replace(settings, state_dir=root / "state", audit_log=root / "audit.jsonl")
        with SyncExecutor(root / "policy.yaml", settings=chosen) as executor:
            yield executor
    finally:
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def executor(packages: Path) -> Iterator[SyncExecutor]:
    """matplotlib and numpy are among the packages of the environment that runs the tests."""
    with open_executor(Settings(python_packages=packages)) as executor:
        yield executor


def run(executor: SyncExecutor, code: str, **fields: object) -> ToolResult:
    return executor.run(CodeCall.model_validate({"language": "python", "code": code, "timeout": 100, **fields}))


PLOT = """
import time
begun = time.monotonic()
import matplotlib.pyplot as plt
imported = time.monotonic()
plt.plot([1, 2, 3])
plt.title(TITLE)
plt.savefig("/workspace/plot.png")
ended = time.monotonic()
import json, os
print(json.dumps({
    "import": imported - begun, "plot": ended - imported, "bytes": os.path.getsize("plot.png"),
    "cache": [name for name in os.listdir(os.environ["MPLCONFIGDIR"]) if name.startswith("fontlist")],
}))
"""


@pytest.mark.slow
def test_a_plot_works_and_its_cache_is_writable(executor: SyncExecutor) -> None:
    """matplotlib finds where to keep its cache, warns of nothing of the kind, and the second attempt is no slower.

    Each attempt makes its list of fonts anew, since nothing is left of the one before.
    """
    took = []
    for _ in range(2):
        result = run(executor, PLOT.replace("TITLE", "'plot'"))
        assert result.status is Status.SUCCESS, result
        seen = json.loads(result.stdout)
        assert seen["bytes"] > 1000
        assert len(seen["cache"]) == 1
        assert "MPLCONFIGDIR" not in result.stderr
        assert "not a writable" not in result.stderr
        took.append(seen["import"] + seen["plot"])
    first, second = took
    assert second < 2 * first + 2


@pytest.mark.slow
@pytest.mark.parametrize("text", ["漢字", "한글", "かな"])
def test_letters_of_a_chart_are_those_of_the_hosts_fonts(executor: SyncExecutor, text: str) -> None:
    """The host's fonts are there, read-only. With one that has the letters they are drawn; else matplotlib names them."""
    fonts = run(executor, "import os\nprint(sum(len(files) for *_, files in os.walk('/usr/share/fonts')))").stdout
    assert int(fonts) == sum(len(files) for *_, files in os.walk("/usr/share/fonts"))
    pick = f"""
import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
text = {text!r}
able = [f.name for f in font_manager.fontManager.ttflist if all(ord(c) in FT2Font(f.fname).get_charmap() for c in text)]
if able: matplotlib.rcParams["font.family"] = able[0]
"""
    result = run(executor, pick + PLOT.replace("TITLE", "text") + "print(bool(able))")
    assert result.status is Status.SUCCESS, result
    able = result.stdout.endswith("True\n")
    assert ("missing from font" in result.stderr) is not able


THREADS = """
import json, os
import numpy as np
a = np.ones((600, 600))
a @ a
print(json.dumps({"threads": len(os.listdir("/proc/self/task")), "told": os.environ["OPENBLAS_NUM_THREADS"]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_numeric_libraries_start_as_many_threads_as_they_are_told(packages: Path, threads: int) -> None:
    """Not one per processor of the host: that is what would meet the process limit."""
    with open_executor(Settings(python_packages=packages, threads=threads)) as executor:
        result = run(executor, THREADS, memory_mib=256)
        assert result.status is Status.SUCCESS, result
        expected = min(threads, len(os.sched_getaffinity(0)))  # OpenBLAS starts no more than there are processors
        assert json.loads(result.stdout) == {"threads": expected, "told": str(threads)}
        assert result.attempts[0].evidence.process_limit_hits in (0, None)


def test_the_default_is_a_thread_for_each_processor_that_may_be_used() -> None:
    assert Settings().threads == len(os.sched_getaffinity(0))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["numpy", "matplotlib.pyplot", "PIL.Image", "dateutil.parser", "fontTools.ttLib"])
def test_compiled_packages_import_under_the_filter(executor: SyncExecutor, module: str) -> None:
    """No system call that they need is refused."""
    result = run(executor, f"import {module}\nprint('fine')")
    assert result.stdout == "fine\n", result.stderr


# Not for an attempt: they open a window or a browser, are for another platform, or are the interpreter's own tests.
NOT_IMPORTED = {"_ios_support", "antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "test", "__main__"}
STDLIB = """
import importlib, json, sys
faults = {}
for name in sorted(sys.stdlib_module_names - SKIPPED):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        pass  # of another platform, or not built
    except BaseException as error:
        faults[name] = repr(error)
print(json.dumps(faults))
"""


def test_the_whole_standard_library_imports_under_the_filter(lab: Lab) -> None:
    """No module of Python's own fails for a refused system call or a file that is not there."""
    result = lab.run(STDLIB.replace("SKIPPED", repr(NOT_IMPORTED)), prelude=False, timeout=60).result
    assert result.stdout == "{}\n", result.stderr


NODE_MODULES = """
const { builtinModules } = require("module");
const faults = {};
for (const name of builtinModules) try { require(name); } catch (error) { faults[name] = String(error); }
report([builtinModules.length > 50, faults]);
"""


def test_every_module_of_node_loads_under_the_filter(lab: Lab) -> None:
    assert run_js(lab.run, NODE_MODULES).only == [True, {}]  # type: ignore[comparison-overlap]  # a probe may report any JSON


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_an_endless_loop_stops_using_the_processor(lab: Lab, language: str) -> None:
    """After the answer no process of the attempt exists, so none uses any."""
    code = {"python": "while True: pass", "javascript": "for (;;);"}[language]
    run: Run = lab.run(code, language=language, timeout=1, prelude=False)
    assert run.result.status is Status.TIMEOUT
    assert run.result.usage.cpu_seconds is not None
    assert 0.2 < run.result.usage.cpu_seconds < 2.5
    busy = [p for p in psutil.Process(lab.launcher_pid).children(recursive=True) if p.status() == psutil.STATUS_RUNNING]
    before = sum(sum(process.cpu_times()[:2]) for process in busy)
    time.sleep(0.2)  # what is looked for is that nothing happens
    after = sum(sum(process.cpu_times()[:2]) for process in busy if process.is_running())
    assert after - before < 0.15


def test_a_shell_that_waits_for_its_child_is_ended_with_it(lab: Lab) -> None:
    """`sleep 300 & wait`: the child does not outlive the timeout of its shell."""
    run = lab.run("import os\nos.system('sleep 299 & wait')", timeout=1, prelude=False)
    assert run.result.status is Status.TIMEOUT
    left = psutil.Process(lab.launcher_pid).children(recursive=True)
    assert [process for process in left if "299" in process.cmdline()] == []


def test_node_prints_any_character_and_its_clock_is_utc(lab: Lab) -> None:
    code = 'console.log("żółć 漢字 😀", new Date(0).getHours(), Intl.DateTimeFormat().resolvedOptions().timeZone)'
    assert lab.run(code, language="javascript", prelude=False).result.stdout == "żółć 漢字 😀 0 UTC\n"


def test_a_python_that_the_program_starts_prints_at_once_too(lab: Lab) -> None:
    """Output of a child that hangs is kept, as the program's own is."""
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; print(\"child\"); time.sleep(300)'])"
    )
    result = lab.run(code, timeout=3, prelude=False).result
    assert (result.status, result.stdout) == (Status.TIMEOUT, "child\n")


def test_a_short_program_takes_no_fixed_time(lab: Lab) -> None:
    """The quickest of ten runs of `print(1)` is far from a second: nothing waits for a clock."""
    took = []
    for _ in range(10):
        begun = time.monotonic()
        assert lab.run("print(1)", prelude=False).result.stdout == "1\n"
        took.append(time.monotonic() - begun)
    assert min(took) < 0.4


def test_a_here_document_and_a_pipe_end(lab: Lab) -> None:
    code = "import subprocess\nprint(subprocess.run(['sh', '-c', 'cat <<X | sort\\nb\\na\\nX'], capture_output=True, timeout=20).stdout)"
    assert lab.run(code, prelude=False).result.stdout == "b'a\\nb\\n'\n"
