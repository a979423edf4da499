"""The references of the library and of what code finds say what is so: members, defaults, exceptions, sizes, variables."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

import sandbox
from sandbox import CodeCall, InvalidPolicy, InvalidSettings, Settings, SyncExecutor
from sandbox.interpreters import _MIN_NODE
from sandbox.isolation import supervision
from sandbox.isolation.plan import MIB, NODE_MODULES, PACKAGES, SANDBOX_UID, LaunchPlan, Rlimits
from sandbox.isolation.skeleton import gather
from sandbox.permits import _client_environment
from sandbox.policy_file import parse_policy
from sandbox.registries import resolve_registries
from sandbox.runtimes import javascript, python
from sandbox.runtimes.python import Interpreter
from tests.lab import Lab
from tests.test_docs import PAGES, TOP, blocks, rows, section

LIBRARY, RUNTIME = PAGES["docs/library.md"], PAGES["docs/runtime.md"]


def code_in(text: str) -> set[str]:
    """The identifiers that stand in backticks, outside of examples."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"\b[A-Za-z_]\w*\b", " ".join(re.findall(r"`([^`]+)`", text))))


# The library


def test_the_agent_host_runs(tmp_path: Path) -> None:
    """It answers a call, shows its output as it came, and names the fault of what is no call."""
    (text,) = blocks(section(LIBRARY, "## An agent host"), "python")
    assert len(text.splitlines()) <= 60
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=TOP, capture_output=True, text=True, timeout=100, check=True,
            env={**os.environ, "SLUICEGATE_STATE_DIR": str(tmp_path / "state")},
        )  # fmt: skip
        result, fault = map(json.loads, done.stdout.splitlines())
        assert (result["status"], result["stdout"]) == ("success", "42\n")
        assert fault["status"] == "error"
        assert fault["problems"][0].startswith("timeout: ")
        outputs.append((result["call_id"], done.stderr))
    # The second time nothing ran: the answer was kept under the key.
    assert outputs[0][1] == "42\n"
    assert outputs[1] == (outputs[0][0], "")


def test_all_that_is_exported_is_explained_and_can_be_had() -> None:
    assert set(sandbox.__all__) <= code_in(LIBRARY)
    for name in sandbox.__all__:
        assert getattr(sandbox, name).__name__ == name
    assert len(sandbox.__all__) >= 15


@pytest.mark.parametrize("name", ["Executor", "SyncExecutor", "RunningCall", "SyncRunningCall"])
def test_every_public_member_is_explained(name: str) -> None:
    inner = {  # of `RunningCall`, for the story, for the executor and for the service
        "follow", "add", "unless_cancelled", "answer", "fail", "may_have_begun", "workdir", "enter", "note", "noted",
        "revise", "withdraw",
    }  # fmt: skip
    kind = getattr(sandbox, name)
    members = {member for member in vars(kind) if not member.startswith("_")} - inner
    assert members
    assert members <= code_in(LIBRARY)


@pytest.mark.parametrize("name", ["Executor", "SyncExecutor"])
def test_the_signatures_are_those_of_the_code(name: str) -> None:
    cells = [cells[0].strip("`") for cells in rows(LIBRARY) if "(" in cells[0]]
    kind = getattr(sandbox, name)
    for member in ("run", "submit", "cancel"):
        parameters = list(inspect.signature(getattr(kind, member)).parameters.values())[1:]
        stars = [index for index, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY][:1]
        words = [one.name + ("" if one.default is one.empty else f"={one.default}") for one in parameters]
        for index in stars:
            words.insert(index, "*")
        written = f"{member}({', '.join(words)})"
        assert any(written in cell for cell in cells), written


def test_the_settings_are_those_of_the_code_with_their_defaults() -> None:
    explained = {
        cells[0].strip("`"): cells[1] for cells in rows(section(LIBRARY, "## Settings")) if cells[0] != "`Settings`"
    }
    explained.pop("---", None)
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert set(explained) == set(fields)
    for name in ("max_concurrency", "max_waiting", "warm_sandboxes"):
        assert explained[name] == str(fields[name])


def test_each_exception_is_raised_where_the_page_says(tmp_path: Path) -> None:
    explained = {cells[0].strip("`") for cells in rows(section(LIBRARY, "## Exceptions"))}
    kinds = {name: getattr(sandbox, name) for name in sandbox.__all__}
    exported = {name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert len(exported) == 6
    assert exported | {"pydantic.ValidationError"} <= explained
    with pytest.raises(sandbox.InvalidCall) as caught:
        sandbox.parse_call({"language": "ruby", "timeout": "30"})
    assert len(caught.value.problems) == 3
    with pytest.raises(pydantic.ValidationError):
        CodeCall(language="python", code="")
    with pytest.raises(InvalidSettings):
        Settings(max_concurrency=0)
    (tmp_path / "policy.yaml").write_text("version: 2\n")
    with pytest.raises(InvalidPolicy):
        SyncExecutor(tmp_path / "policy.yaml")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "calls").write_text("no directory")
    with (
        pytest.raises(sandbox.LedgerUnavailable),
        SyncExecutor(TOP / "configs/policies/default.yaml", settings=Settings(state_dir=tmp_path / "state")),
    ):
        pass


def test_nothing_runs_outside_of_with(tmp_path: Path) -> None:
    executor = SyncExecutor(TOP / "configs/policies/default.yaml", settings=Settings(state_dir=tmp_path))
    for method in (executor.run, executor.submit):
        with pytest.raises(RuntimeError, match="with"):
            method(CodeCall(language="python", code="1"))


def test_what_lies_in_the_state_directory_has_the_mode_that_the_page_says(tmp_path: Path) -> None:
    """Whatever the umask, and whoever makes the directory first."""
    table = section(PAGES["docs/commands.md"], "## Environment")
    written = {re.findall(r"`([^`]+)`", cells[0])[0]: cells[1] for cells in rows(table) if cells[1].startswith("0")}
    state = tmp_path / "missing" / "state"
    umask = os.umask(0)
    try:
        with SyncExecutor(TOP / "configs/policies/default.yaml", settings=Settings(state_dir=state)) as executor:
            assert executor.run(CodeCall(language="python", code="print(1)")).stdout == "1\n"
            names = {path.name for path in state.iterdir()}
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state.parent, state)] == [0o700, 0o700]
    there = {name for name in written if (state / name).exists()}
    assert there >= {"authority/", "audit.jsonl", "calls/", "package-store/"}
    for name in there:
        assert f"{stat.S_IMODE((state / name).stat().st_mode):04o}" == written[name], name
    kept = {name for name in names if not name.startswith("sluicegate-launcher-")}
    assert kept == {name.strip("/") for name in there}


# What code finds


def plans() -> list[LaunchPlan]:
    interpreter = Interpreter("/elsewhere", (3, 13), shared=True)
    more: dict[str, Any] = {"call_id": "c", "attempt": 1, "memory_bytes": 512 * MIB, "packages": "/there"}
    return [python.plan(interpreter, **more), javascript.plan(javascript.Node("/node", "24.5"), interpreter, **more)]


@pytest.mark.parametrize("plan", plans(), ids=["python", "javascript"])
def test_the_sizes_of_the_places_are_those_of_the_plan(plan: LaunchPlan) -> None:
    table = rows(section(RUNTIME, "## Files"))[1:]
    written = {cells[0].strip("`"): (cells[1], cells[2]) for cells in table if cells[0].startswith("`")}
    assert written == {one.target: (f"{one.size_bytes // MIB} MiB", f"{one.inodes:,}") for one in plan.tmpfs}


@pytest.mark.parametrize("plan", plans(), ids=["python", "javascript"])
def test_the_limits_are_those_of_the_plan(plan: LaunchPlan) -> None:
    written = {cells[0]: cells[1] for cells in rows(section(RUNTIME, "## Limits"))}
    assert written["processes and threads"] == str(plan.pids)
    assert plan.rlimits == Rlimits()
    nofile = f"{plan.rlimits.nofile:,} ({supervision._SAMPLED_NOFILE} where memory is sampled)"
    assert written["open descriptors of a process"] == nofile
    assert written["one file"] == f"{plan.rlimits.fsize_bytes // MIB:,} MiB"
    assert plan.rlimits.nproc >= plan.pids


def test_the_places_and_versions_are_those_of_the_code() -> None:
    table = section(RUNTIME, "## Languages")
    assert f"`{python.MAIN}`" in table
    assert f"`{javascript.MAIN}`" in table
    assert f"`{PACKAGES}`" in table
    assert f"`{NODE_MODULES}`" in table
    assert f"{'.'.join(map(str, _MIN_NODE))} or newer" in table
    assert f"uid and gid {SANDBOX_UID}" in RUNTIME
    links = {Path(path).name for path in gather(None).links if path.startswith("run/bin/")}
    assert {"node", "npm", "npx"} == links


def test_every_variable_of_an_attempt_is_explained() -> None:
    text = section(RUNTIME, "## Environment")
    own: set[str] = set()
    for plan in plans():
        own |= {*plan.environment, *plan.start_environment, *plan.call_environment}
    setting = parse_policy("version: 1\nname: any\n").policy.network.registries
    for language in ("python", "javascript"):
        own |= _client_environment(resolve_registries(setting, language).registry).keys()
    like = {name for name in own if name.endswith(("_NUM_THREADS", "_MAXIMUM_THREADS", "_MAX_THREADS"))}
    assert "OMP_NUM_THREADS" in like
    missing = {name for name in own - like if name.upper() not in code_in(text)}
    assert missing == set()
    explained = {name for cells in rows(text)[1:] for name in code_in(cells[0]) if name.isupper()}
    assert explained - {name.upper() for name in own} == set()


PROBE = """
import sys, resource, time
places = {}
for place in ("/workspace", "/tmp", "/dev/shm"):
    status = os.statvfs(place)
    places[place] = status.f_blocks * status.f_frsize >> 20
try:
    open("/here", "w")
    readonly = False
except OSError:
    readonly = True
report(places=places, readonly=readonly, cwd=os.getcwd(), home=os.environ["HOME"], file=__file__, stdin=sys.stdin.read(),
       args=sys.argv[1:], zone=time.tzname[0], encoding=sys.stdout.encoding, host=socket.gethostname(), uid=os.getuid(),
       nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0], core=resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def test_what_the_page_says_is_what_code_sees(lab: Lab) -> None:
    seen = lab.run(PROBE).only
    assert seen.pop("nofile") in (1024, 256)
    assert seen == {
        "places": {"/workspace": 256, "/tmp": 256, "/dev/shm": 128}, "readonly": True, "cwd": "/workspace",
        "home": "/workspace", "file": "/workspace/main.py", "stdin": "", "args": [], "zone": "UTC", "encoding": "utf-8",
        "host": "sandbox", "uid": 1000, "core": 0,
    }  # fmt: skip


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm"])
def test_what_is_written_there_counts_against_the_calls_memory(lab: Lab, place: str) -> None:
    """As much fits with enough of it: the control."""
    code = (
        f"with open('{place}/x', 'wb') as file:\n    for _ in range(120): file.write(bytes(1 << 20))\nprint('written')"
    )
    less, more = (lab.run(code, memory_mib=mib).result for mib in (128, 512))
    assert (less.cause, more.stdout) == (sandbox.Cause.MEMORY, "written\n")
