"""Calls that bring packages, end to end: prepared on loopback registries, imported without a network, refused with a
reason; and code that installs packages by itself.

The launcher, the proxy, uv, npm and pip are the real ones; the registries have packages for every fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from sandbox import Executor, Settings, SyncExecutor
from sandbox.contract import Cause, CodeCall, Status, ToolResult
from tests.conftest import MakeLab
from tests.lab import REGISTRY, Lab, Outside, Run
from tests.package_lab import NAMES, Registries, preparation, reasons, store_of, unfinished
from tests.packages.test_preparation import NPM_REFUSED, NPM_UNAVAILABLE, PYPI_REFUSED, PYPI_UNAVAILABLE
from tests.registry.build import wheel
from tests.registry.server import NpmRegistry, PypiRegistry
from tests.servers import PATIENCE, Peer
from tests.unprivileged import unprivileged_command

ROOT = Path(__file__).parent.parent.parent
JS = {"language": "javascript"}

type Language = Literal["python", "javascript"]


@pytest.fixture(scope="module")
def both(
    outside: Outside, _pypi: PypiRegistry, _npm: NpmRegistry, tmp_path_factory: pytest.TempPathFactory
) -> Registries:
    return Registries(outside, _pypi, _npm, tmp_path_factory.mktemp("osv"))


@pytest.fixture(scope="module")
def shop(open_lab: MakeLab, both: Registries) -> Iterator[Lab]:
    """The executor that most tests share, and with it one store."""
    with open_lab(both.policy()) as lab:
        yield lab


@pytest.fixture
def registries(both: Registries) -> Registries:
    """Both registries, which have seen nothing yet."""
    both.forget()
    return both


def python(lab: Lab, code: str, *packages: str, **more: Any) -> Run:
    return lab.run(code, prelude=False, packages=list(packages), **more)


def node(lab: Lab, code: str, *packages: str, **more: Any) -> Run:
    return lab.run(code, JS, prelude=False, packages=list(packages), **more)


def said(run: Run) -> str:
    assert run.result.status is Status.SUCCESS, f"{run.result.error}\n{run.result.stdout}{run.result.stderr}"
    return run.result.stdout


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(0.02)


# What a call is given


def test_python_imports_what_the_call_named(shop: Lab, registries: Registries) -> None:
    """With what it needs, in the newest version that the policy allows; in an attempt that has no network."""
    code = "import app, libx, sys; print(libx.VERSION, libx.__file__, sys.path[-1])"
    run = python(shop, code, "app==")
    assert said(run).split() == ["1.2", "/opt/packages/libx/__init__.py", "/opt/packages"]
    assert run.result.network.mode == "block-all"
    assert {event["event"] for event in run.events} == {"attempt"}, "the attempt asked for nothing"
    assert registries.paths


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("commonjs", "console.log(require('cjs-lib').kind, require('cjs-lib/lib/sub').value, require('dual-lib').kind)"),
        ("module", "import {kind} from 'esm-lib'; import * as dual from 'dual-lib'; console.log(kind, dual.kind)"),
        ("mixed", "import {kind} from 'esm-lib'; console.log(kind, require('cjs-lib').kind, require('@scope/thing').kind)"),
        ("dynamic", "import('esm-lib').then(async (m) => console.log(m.kind, (await import('@scope/thing')).default.kind))"),
    ],
)  # fmt: skip
def test_javascript_requires_and_imports_what_the_call_named(
    shop: Lab, registries: Registries, kind: str, code: str
) -> None:
    expected = {"commonjs": "cjs 42 cjs", "module": "esm esm", "mixed": "esm cjs scoped", "dynamic": "esm scoped"}
    run = node(shop, code, "cjs-lib@", "esm-lib@1.0.0", "dual-lib@1", "@scope/thing@latest")
    assert said(run) == expected[kind] + "\n"
    assert {event["event"] for event in run.events} == {"attempt"}, "the attempt asked for nothing"


def test_pythons_that_the_program_starts_have_the_packages_if_they_are_told(shop: Lab, registries: Registries) -> None:
    """Those of `multiprocessing` are; others where `PYTHONPATH` names the place. Each Node.js finds them."""
    code = (
        "import os, subprocess, sys\n"
        "for more in ({}, {'PYTHONPATH': '/opt/packages'}):\n"
        "    print(subprocess.run([sys.executable, '-c', 'import libx'], env=os.environ | more, stderr=-1).returncode)\n"
    )
    assert said(python(shop, code, "libx==")) == "1\n0\n"
    code = "require('child_process').execFileSync('node', ['-p', 'require(\"cjs-lib\").kind'], {cwd: '/tmp', stdio: 'inherit'})"
    assert said(node(shop, code, "cjs-lib@")) == "cjs\n"


def test_the_second_call_takes_the_snapshot(shop: Lab, registries: Registries) -> None:
    """No request reaches the registry, and no sandbox is made but the attempt's, however the set is written."""
    for first, second, run in (
        (["Foo.Bar_Baz==1.0", "good=="], ["good==*", "foo-bar-baz==v1.0"], python),
        (["napp@1.0.0", "ntags@1.0.0"], ["ntags@1.0.0", "napp@1.0.0"], node),
    ):
        assert said(run(shop, "1", *first)) == ""
        assert registries.paths
        registries.forget()
        again = run(shop, "1", *second)
        assert said(again) == ""
        assert (registries.paths, preparation(shop.log, again.result)) == ([], []), second


def test_another_set_shares_what_is_there_already(shop: Lab, registries: Registries) -> None:
    """Nothing is fetched twice; a file of two snapshots is one file."""
    registries.pypi.packages.add(wheel("shared-one", "1.0"))
    registries.pypi.packages.add(wheel("shared-two", "1.0"))
    for package in ("shared-one==1.0", "shared-two==1.0"):
        said(python(shop, "1", package))
    registries.forget()
    assert (
        said(python(shop, "import shared_one, shared_two; print('both')", "shared-one==1.0", "shared-two==1.0"))
        == "both\n"
    )
    assert not [path for path in registries.paths if path.endswith(".whl")]
    files = list((store_of(shop) / "snapshots").glob("*/tree/shared_one/__init__.py"))
    assert len(files) == 2
    assert len({path.stat().st_ino for path in files}) == 1


def test_concurrent_calls_for_one_set_build_it_once(shop: Lab, registries: Registries) -> None:
    registries.pypi.packages.add(wheel("together", "1.0"))
    registries.npm.packages.add({"name": "ntogether", "version": "1.0.0"}, files={"index.js": "exports.x = 1"})
    for run, code, package, ending in (
        (python, "import together", "together==", ".whl"),
        (node, "require('ntogether')", "ntogether@", ".tgz"),
    ):
        registries.forget()
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda _: run(shop, code, package), range(8)))  # noqa: B023 - called here
        assert {one.result.status for one in runs} == {Status.SUCCESS}
        assert len([path for path in registries.paths if path.endswith(ending)]) == 1
        assert len([one for one in runs if preparation(shop.log, one.result)]) == 1


def test_every_request_of_a_preparation_is_in_the_log_under_its_call(shop: Lab, registries: Registries) -> None:
    registries.pypi.packages.add(wheel("logged", "1.0"))
    result = python(shop, "1", "logged==").result
    lines = preparation(shop.log, result)
    assert {one["call_id"] for one in lines} == {result.call_id}
    logged = {one["path"] for one in lines if one.get("path")}
    assert {path.partition(" ")[2] for path in registries.paths} <= logged
    fetched = [one for one in lines if one.get("layer") == "package" and str(one["path"]).endswith(".whl")]
    assert [(one["decision"], one["package"], one["version"]) for one in fetched] == [
        ("allow", "pkg:pypi/logged", "1.0")
    ]
    assert {one["mode"] for one in lines if one["event"] == "attempt"} == {"registry-default"}


def test_a_retried_attempt_keeps_its_snapshot(open_lab: MakeLab, registries: Registries) -> None:
    """What was prepared once for a call is not prepared again when our side fails."""
    code = "import os, time, libx\nprint(os.environ['SLUICEGATE_ATTEMPT'], libx.__file__, flush=True)\n"
    code += "if os.environ['SLUICEGATE_ATTEMPT'] == '1': time.sleep(100)\n"
    with open_lab(registries.policy(attempts={"max": 2})) as lab:
        up = threading.Event()
        call = CodeCall(language="python", code=code, packages=["libx==1.1"])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lab.executor.run, call, stdout_sink=lambda _: up.set())
            assert up.wait(PATIENCE)
            registries.forget()
            psutil.Process(lab.launcher_pid).kill()
            result = running.result(PATIENCE)
        assert [attempt.code for attempt in result.attempts] == ["launcher_lost", "exit"], result
        assert result.stdout == "2 /opt/packages/libx/__init__.py\n"
        assert registries.paths == []


# What is given up


class Silent(Peer):
    """Takes a connection, and says nothing."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while await reader.read(65536):
            pass


@pytest.fixture
def silent(outside: Outside) -> Iterator[Silent]:
    peer = Silent(outside.dns.loop, "127.0.0.1")
    yield peer
    peer.close()


def silenced(registries: Registries, silent: Silent, **more: Any) -> str:
    """The policy of an operator whose registries never answer."""
    document = json.loads(registries.policy(**more))
    urls = [f"https://pypi.test:{silent.port}/simple/"], [f"https://npm.test:{silent.port}/"]
    document["network"]["registries"] = dict(zip(("python", "javascript"), urls, strict=True))
    document["network"]["private_addresses"] = [
        {"host": name, "cidr": "127.0.0.1/32", "ports": [silent.port]} for name in ("pypi.test", "npm.test")
    ]
    return json.dumps(document)


SPECIFIER = {"python": "good==1.0", "javascript": "cjs-lib@1.0.0"}


@pytest.mark.parametrize("language", SPECIFIER)
def test_a_call_cancelled_while_it_is_prepared_is_answered_at_once_and_leaves_nothing(
    registries: Registries, silent: Silent, tmp_path: Path, language: Language
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(silenced(registries, silent))
    settings = Settings(state_dir=tmp_path / "state", audit_log=tmp_path / "log", warm_sandboxes=0)
    call = CodeCall(language=language, code="1", packages=[SPECIFIER[language]])

    async def cancel() -> tuple[ToolResult, float]:
        async with Executor(policy, settings=settings) as executor:
            running = executor.submit(call)
            await asyncio.to_thread(silent.wait, lambda journal: journal.connections > 0)
            assert executor.launcher_pid is not None
            assert sandboxes(executor.launcher_pid), "the control: it is being prepared"
            began = time.monotonic()
            running.cancel()
            result = await running.result()
            took = time.monotonic() - began
            await asyncio.to_thread(until, lambda: not sandboxes(executor.launcher_pid or 0), "its sandbox has ended")
            await asyncio.to_thread(
                until, lambda: not unfinished(tmp_path / "state/package-store"), "its files are gone"
            )
            return result, took

    result, took = asyncio.run(cancel())
    assert (result.status, result.cause, result.attempts) == (Status.KILLED, Cause.CANCELLED, [])
    assert took < 5


def sandboxes(launcher: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(launcher).children(recursive=True) if "bwrap" in one.name()]


@pytest.mark.parametrize("language", SPECIFIER)
def test_a_call_whose_deadline_passes_while_it_is_prepared_is_answered_then_and_leaves_nothing(
    open_lab: MakeLab, registries: Registries, silent: Silent, language: str
) -> None:
    with open_lab(silenced(registries, silent, attempts={"max": 1, "margin_seconds": 1})) as lab:
        began = time.monotonic()
        result = lab.run("1", language=language, prelude=False, packages=[SPECIFIER[language]], timeout=1).result
        assert time.monotonic() - began < 10
        assert (result.status, result.cause, result.attempts) == (Status.TIMEOUT, Cause.WALL_CLOCK, [])
        assert result.error is not None
        assert result.error.code == "deadline"
        assert silent.journal.connections, "the control: it was being prepared"
        until(lambda: not unfinished(store_of(lab)), "its files are gone")
        until(lambda: not sandboxes(lab.launcher_pid), "its sandbox has ended")
        assert list((store_of(lab) / "snapshots").iterdir()) == []


# What is refused, and what is not there


@pytest.mark.parametrize("specifier", [*PYPI_REFUSED, *PYPI_UNAVAILABLE])
def test_a_python_package_that_is_not_had_has_its_reason(shop: Lab, registries: Registries, specifier: str) -> None:
    run = python(shop, "print('ran')", specifier)
    not_had(shop, registries, run, specifier, PYPI_REFUSED.get(specifier), PYPI_UNAVAILABLE.get(specifier))


@pytest.mark.parametrize("specifier", [*NPM_REFUSED, *NPM_UNAVAILABLE])
def test_a_javascript_package_that_is_not_had_has_its_reason(shop: Lab, registries: Registries, specifier: str) -> None:
    run = node(shop, "console.log('ran')", specifier)
    not_had(shop, registries, run, specifier, NPM_REFUSED.get(specifier), NPM_UNAVAILABLE.get(specifier))


def not_had(
    lab: Lab, registries: Registries, run: Run, specifier: str, refused: dict[str, str] | None,
    unavailable: dict[str, str] | None,
) -> None:  # fmt: skip
    """The call's one answer: a refusal or an absence, never one for the other; and nothing has run anywhere."""
    result = run.result
    expected = refused or unavailable or {}
    if result.error is not None and not registries.paths:  # screened out: what is told of is what was written
        expected = dict.fromkeys([specifier], *expected.values())
    assert reasons(result) == expected
    code = "policy_refused" if refused else "package_unavailable"
    assert (result.status, result.cause, result.attempts, result.stdout) == (Status.ERROR, Cause(code), [], "")
    assert result.error is not None
    assert (result.error.code, result.error.reason) == (code, *expected.values())
    for one in result.error.packages:
        assert one.hint, "every reason says what to do"
        assert one.message
    for registry in (registries.pypi, registries.npm):
        for place in (registry.markers.directory, lab.policy.parent):
            assert registry.markers.below(place) == []
    assert not registries.pypi.rogue.journal.requests
    assert not registries.npm.rogue.journal.requests
    assert unfinished(store_of(lab)) == []


def test_all_that_stands_against_a_call_is_said_at_once(shop: Lab, registries: Registries) -> None:
    """Before anything is asked for; the log has it."""
    result = python(
        shop, "1", "denied==", "requestss==", "json==1.0", "good==1,<2", "git+https://x==1", "libx==1.2"
    ).result
    found = {one.package: one.reason for one in result.error.packages} if result.error else {}
    assert found == {
        "denied==": "name_denied", "requestss==": "typosquat_suspect", "json==1.0": "stdlib_name",
        "good==1,<2": "specifier_syntax", "git+https://x==1": "specifier_syntax",
    }  # fmt: skip
    assert (result.cause, result.attempts, registries.paths) == (Cause.POLICY_REFUSED, [], [])
    assert result.error is not None
    for text in found:
        assert f"`{text}`" in result.error.message


def test_a_policy_that_prepares_nothing_refuses_every_package(open_lab: MakeLab, registries: Registries) -> None:
    with open_lab(registries.policy(prepare=False)) as lab:
        result = python(lab, "1", "good==").result
        assert result.cause is Cause.POLICY_REFUSED
        assert set(reasons(result).values()) == {"packages_not_allowed"}
        assert registries.paths == []


# What stays of a snapshot


def test_a_policy_that_changes_refuses_what_is_there_without_asking_anybody(
    registries: Registries, tmp_path: Path
) -> None:
    """One that still allows it takes the snapshot; one that no longer does refuses it. Nothing is fetched for either."""
    denying = {**NAMES, "deny": {"pypi": ["libx"], "npm": ["nlib"]}}
    texts = (registries.policy(), registries.policy(max_specifiers=7), registries.policy(names=denying))
    sets: tuple[tuple[Language, str, str, str], ...] = (
        ("python", "libx==1.2", "libx", "app==1.0"),
        ("javascript", "nlib@1.2.0", "nlib", "napp@1.0.0"),
    )
    with contextlib.ExitStack() as stack:
        before, other, after = (stack.enter_context(one_of(tmp_path, f"p{n}", text)) for n, text in enumerate(texts))
        for language, package, name, user in sets:
            for asked in (package, user):
                call = CodeCall(language=language, code="1", packages=[asked])
                assert before.run(call).status is Status.SUCCESS
                registries.forget()
                assert other.run(call).status is Status.SUCCESS
                assert registries.paths == []
                result = after.run(call)
                assert result.cause is Cause.POLICY_REFUSED
                assert set(reasons(result).values()) == {"name_denied"}
                assert result.error is not None
                assert f"`{name}`" in result.error.message
                assert not [path for path in registries.paths if path.endswith((".whl", ".tgz"))]


def one_of(directory: Path, name: str, policy: str) -> SyncExecutor:
    """An executor with a log of its own, on the one state directory."""
    file = directory / f"{name}.yaml"
    file.write_text(policy)
    settings = Settings(state_dir=directory / "state", audit_log=directory / f"{name}.jsonl", warm_sandboxes=0)
    return SyncExecutor(file, settings=settings)


def test_two_executors_on_one_state_directory_share_what_they_prepare(registries: Registries, tmp_path: Path) -> None:
    """The same set at the same time is built once; the other waits for it."""
    registries.pypi.packages.add(wheel("of-both", "1.0"))
    text = registries.policy()
    call = CodeCall(language="python", code="import of_both; print(of_both.__file__)", packages=["of-both=="])
    with one_of(tmp_path, "one", text) as one, one_of(tmp_path, "other", text) as other:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda executor: executor.run(call), (one, other, one, other)))
        assert {result.stdout for result in results} == {"/opt/packages/of_both/__init__.py\n"}, results
        assert len([path for path in registries.paths if path.endswith(".whl")]) == 1


# The command, and who starts it


@dataclass(frozen=True)
class Command:
    """The command with a state directory of its own, started as some user."""

    words: list[str]
    home: Path

    def __call__(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.words, *arguments],
            input=stdin,
            env={**os.environ, "HOME": str(self.home), "SLUICEGATE_STATE_DIR": str(self.home / "state")},
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip


@pytest.fixture(params=["as-we-are", pytest.param("unprivileged", marks=pytest.mark.slow)])
def sluicegate(request: pytest.FixtureRequest, command: list[str], both: Registries) -> Iterator[Command]:
    if request.param == "unprivileged" and os.getuid() != 0:
        pytest.skip("the tests already run as an unprivileged user")
    home = Path(tempfile.mkdtemp(prefix="sg-"))
    home.chmod(0o777)
    shutil.copy(both.outside.ca_file, home / "ca.pem")
    shutil.copytree(both.advisories, home / "osv")
    (home / "osv").chmod(0o755)
    text = both.policy(ca_file=home / "ca.pem", advisories={"db_dir": str(home / "osv")})
    (home / "policy.yaml").write_text(text)
    with unprivileged_command() as prefix:
        yield Command([*(prefix if request.param == "unprivileged" else []), *command], home)
    shutil.rmtree(home)


@pytest.mark.parametrize(
    ("language", "code", "package", "refused"),
    [
        ("python", "import libx; print(libx.VERSION)", "libx==", "libx==1.3"),
        ("javascript", "console.log(require('nlib/package.json').version)", "nlib@", "nlib@1.3.0"),
    ],
)
def test_the_command_prepares_packages_whoever_starts_it(
    sluicegate: Command, registries: Registries, language: str, code: str, package: str, refused: str
) -> None:
    """`call` and `run`, with one store between them; 2 is a refusal's status, 3 that of what cannot be had."""
    policy = ("--policy", str(sluicegate.home / "policy.yaml"))
    call = json.dumps({"language": language, "code": code, "packages": [package]})
    done = sluicegate("call", "-", *policy, stdin=call)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["stdout"].startswith("1.2")
    registries.forget()
    done = sluicegate("run", *policy, "--language", language, "--package", package, "--code", code)
    assert (done.returncode, done.stdout[:3], done.stderr) == (0, "1.2", "")
    assert registries.paths == []
    done = sluicegate("run", *policy, "--language", language, "--package", refused, "--code", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert "version_too_new" in done.stderr
    done = sluicegate(
        "run",
        *policy,
        "--language",
        language,
        "--package",
        f"nobody-has-it{package[-2 if language == 'python' else -1 :]}",
        "--code",
        "1",
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "package_not_found" in done.stderr


# Code that installs packages by itself

AGENT = {
    "python": "import subprocess\ndone = subprocess.run({!r}, shell=True, stdout=-1, stderr=-2, text=True)\n"
    "print(done.stdout)\nraise SystemExit(done.returncode)\n",
    "javascript": "const done = require('child_process').spawnSync({}, {{shell: true}})\n"
    "console.log(String(done.stdout) + String(done.stderr)); process.exitCode = done.status\n",
}


def shell(lab: Lab, language: str, command: str, after: str = "") -> Run:
    """A call whose code runs a command, as agents do, and has its exit status."""
    text = command if language == "python" else json.dumps(command)
    return lab.run(AGENT[language].format(text) + after, REGISTRY, prelude=False, language=language)


def refusals(run: Run) -> set[tuple[str, str | None, str | None]]:
    return {(one["reason"], one["package"], one["version"]) for one in run.denials}


@pytest.mark.parametrize("pip", ["pip", "pip3", "python3 -m pip"])
def test_code_installs_what_is_allowed_and_imports_it(shop: Lab, registries: Registries, pip: str) -> None:
    """In the program that ran pip too, which had looked for it before; after the standard library."""
    code = (
        "import importlib.metadata, subprocess, sys\n"
        "try:\n    import libx\nexcept ModuleNotFoundError:\n    print('not yet')\n"
        f"subprocess.run({[*pip.split(), 'install', '-q', 'app', 'json-shadow']!r}, check=True)\n"
        "import app, libx, json\n"
        "print(libx.VERSION, importlib.metadata.version('app'))\n"
        "print(libx.__file__, json.__file__)\n"
        "subprocess.run([sys.executable, '-c', 'import app; print(app.__name__)'], check=True)\n"
    )
    run = shop.run(code, REGISTRY, prelude=False)
    site = f"/workspace/.local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    lines = said(run).splitlines()
    assert lines[:2] == ["not yet", "1.2 1.0"]
    assert lines[2].split()[0] == f"{site}/libx/__init__.py"
    assert not lines[2].split()[1].startswith("/workspace")
    assert lines[3] == "app"
    assert "RAN-" not in run.result.stderr
    files = {(one["package"], one["version"]) for one in run.events if one.get("version")}
    assert files == {("pkg:pypi/app", "1.0"), ("pkg:pypi/libx", "1.2"), ("pkg:pypi/json-shadow", "1.0")}


def test_a_pth_file_that_code_installs_does_not_run_in_the_program(shop: Lab, registries: Registries) -> None:
    """pip puts it where child Pythons run it, which is the code's own doing: the control. The program reads no such file."""
    code = (
        "import subprocess, sys\n"
        "subprocess.run(['pip', 'install', '-q', 'pth-hook'], check=True)\n"
        "import pth_hook\nprint('imported', file=sys.stderr, flush=True)\n"
        "subprocess.run([sys.executable, '-c', '1'], check=True)\n"
    )
    run = shop.run(code, REGISTRY, prelude=False)
    said(run)
    lines = run.result.stderr.splitlines()
    assert lines[lines.index("imported") :] == ["imported", registries.pypi.markers.name("pth-hook")]
    assert registries.pypi.markers.name("pth-hook") not in lines[: lines.index("imported")]


def test_code_downloads_and_makes_environments(shop: Lab, registries: Registries) -> None:
    command = "pip download -q --no-deps -d here libx && ls here && python3 -m venv v && v/bin/pip install -q good && v/bin/python -c 'import good; print(good.VERSION)'"
    run = shell(shop, "python", command)
    assert said(run).split() == ["libx-1.2-py3-none-any.whl", "1.0"]


def test_code_installs_modules_and_requires_them(shop: Lab, registries: Registries) -> None:
    after = "console.log(require('nlib/package.json').version); import('napp').then(() => console.log('imported'))"
    run = shell(shop, "javascript", "npm install --silent napp", after)
    assert said(run).split() == ["1.2.0", "imported"]
    files = {(one["package"], one["version"]) for one in run.events if one.get("version")}
    assert files == {("pkg:npm/napp", "1.0.0"), ("pkg:npm/nlib", "1.2.0")}
    assert run.denials == []


def wheel_url(registry: PypiRegistry, name: str, version: str) -> str:
    return registry.files.url + registry.packages.find(name, version)[0].path


PIP_REFUSED = {
    "too new": ("libx==1.3", "version_too_new", "libx", "1.3"),
    "yanked": ("libx==1.2.5", "version_yanked", "libx", "1.2.5"),
    "denied": ("denied", "name_denied", "denied", None),
    "needed and denied": ("chain-a", "name_denied", "denied", None),
    "vulnerable": ("vulnerable==1.0", "known_vulnerability", "vulnerable", "1.0"),
    "malicious": ("malicious", "malicious_package", "malicious", None),
    "added late": ("late-file==1.0", "version_too_new", "late-file", "1.0"),
    "a file's address": ("{files}libx:1.3", "version_too_new", "libx", "1.3"),
    "source, by its address": ("{files}setup-py:1.0", "no_wheel", "setup-py", "1.0"),
    "source, where asked for": ("--no-binary :all: setup-py==1.0", "no_wheel", "setup-py", "1.0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PIP_REFUSED)
def test_pip_is_refused_what_the_policy_refuses(shop: Lab, registries: Registries, kind: str) -> None:
    """The log names package and version; no such file is asked of the registry; no code has run."""
    asked, reason, name, version = PIP_REFUSED[kind]
    if asked.startswith("{files}"):
        asked = wheel_url(registries.pypi, *asked.removeprefix("{files}").split(":"))
    run = shell(shop, "python", f"pip install {asked}")
    assert run.result.exit_code == 1, run.result.stdout
    assert (reason, f"pkg:pypi/{name}", version) in refusals(run)
    if version is not None:
        assert f"sluicegate: {reason}" in run.result.stdout, "pip says why"
    assert not [path for path in registries.paths if f"/{name.replace('-', '_')}-{version}" in path]
    assert registries.pypi.markers.below(registries.pypi.markers.directory) == []
    assert "RAN-" not in run.result.stdout


def test_pip_finds_no_source_and_nothing_elsewhere(shop: Lab, registries: Registries) -> None:
    """What has source only is not on its page as a choice, which the log says; another index is no registry."""
    run = shell(shop, "python", "pip install setup-py")
    assert run.result.exit_code == 1
    (line,) = [one for one in run.events if one.get("package") == "pkg:pypi/setup-py" and one["event"] == "decision"]
    assert "1 no_wheel" in line["detail"]
    for option in ("-i", "--extra-index-url"):
        run = shell(
            shop, "python", f"pip download --retries 0 --no-deps {option} {registries.pypi.rogue.url}/simple libx==6.6"
        )
        assert run.result.exit_code != 0
        assert {one["host"] for one in run.denials} == {"rogue.test"}
    run = shell(shop, "python", f"pip download --retries 0 {registries.pypi.rogue.url}/libx-6.6-py3-none-any.whl")
    assert run.result.exit_code != 0
    assert registries.pypi.rogue.untouched


NPM_REFUSED_TO_CODE = {
    "too new": ("nlib@1.3.0", "version_too_new", "nlib", None),
    "new": ("nnewborn", "version_too_new", "nnewborn", None),
    "denied": ("ndenied", "name_denied", "ndenied", "denial"),
    "needed and denied": ("nchain-a", "name_denied", "ndenied", "denial"),
    "under another name": ("nalias", "name_denied", "ndenied", "denial"),
    "vulnerable": ("nvulnerable@1.0.0", "known_vulnerability", "nvulnerable", None),
    "malicious": ("nmalicious", "malicious_package", "nmalicious", "denial"),
    "a script": ("npostinstall", "install_script_required", "npostinstall", None),
    "a shrinkwrap": ("nshrinkwrap", "version_too_new", "nlib", "1.3.0"),
    "a file's address": ("{npm}nlib/-/nlib-1.3.0.tgz", "version_too_new", "nlib", "1.3.0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NPM_REFUSED_TO_CODE)
def test_npm_is_refused_what_the_policy_refuses(shop: Lab, registries: Registries, kind: str) -> None:
    """It says why; the log names the package, and the version where a file of it was asked for; no code has run."""
    asked, reason, name, place = NPM_REFUSED_TO_CODE[kind]
    run = shell(shop, "javascript", f"npm install {asked.replace('{npm}', registries.npm.url)}")
    assert run.result.exit_code == 1, run.result.stdout
    assert f"sluicegate: {reason}" in run.result.stdout
    if place is None:
        (line, *_) = [
            one for one in run.events if one.get("package") == f"pkg:npm/{name}" and one["event"] == "decision"
        ]
        assert reason in line["detail"]
    else:
        assert (reason, f"pkg:npm/{name}", None if place == "denial" else place) in refusals(run)
    assert not [path for path in registries.paths if f"/{name}-" in path]
    assert registries.npm.markers.below(registries.npm.markers.directory) == []


@pytest.mark.parametrize(("version", "status"), [("1.2.0", 0), ("1.3.0", 1)])
def test_npm_ci_gets_of_a_lock_what_is_allowed(shop: Lab, registries: Registries, version: str, status: int) -> None:
    """No packument is asked for: each file is judged by itself. The control is a lock of an allowed version."""
    package = registries.npm.packages.package("nlib")
    assert package is not None
    dist = package.versions[version]["dist"]
    wants = {"name": "mine", "version": "1.0.0", "dependencies": {"nlib": version}}
    entry = {"version": version, "resolved": dist["tarball"], "integrity": dist["integrity"]}
    lock = {
        "name": "mine",
        "version": "1.0.0",
        "lockfileVersion": 3,
        "packages": {"": wants, "node_modules/nlib": entry},
    }
    files = (
        f"cd $(mktemp -d) && echo '{json.dumps(wants)}' > package.json && echo '{json.dumps(lock)}' > package-lock.json"
    )
    run = shell(shop, "javascript", f"{files} && npm ci && ls node_modules")
    assert run.result.exit_code == status, run.result.stdout
    expected = {("version_too_new", "pkg:npm/nlib", "1.3.0")} if status else set()
    assert {one for one in refusals(run) if one[1]} == expected
    assert bool([path for path in registries.paths if f"nlib-{version}" in path]) is not bool(status)


def arrived_clean(registries: Registries) -> int:
    """Whatever reached a registry was reading, and carried nothing of the client's. How much that was."""
    seen = [
        one
        for registry in (registries.pypi, registries.npm)
        for site in registry.sites
        for one in site.journal.requests
    ]
    for one in seen:
        assert one.method in ("GET", "HEAD"), one
        assert "?" not in one.target, one
        assert one.body_bytes == 0, one
        assert not {key.lower() for key, _ in one.headers} & {"authorization", "cookie", "npm-auth-type", "x-secret"}, (
            one
        )
        assert "TOKEN" not in repr(one), one
    return len(seen)


def test_nothing_is_published_and_no_credential_passes_in_python(shop: Lab, registries: Registries) -> None:
    code = f"""
import urllib.error, urllib.request
index, file = {registries.pypi.url!r}, {wheel_url(registries.pypi, "libx", "1.2")!r}
def ask(url, method="GET", data=None):
    headers = {{"Authorization": "Bearer TOKEN", "Cookie": "TOKEN=1", "X-Secret": "TOKEN", "User-Agent": "TOKEN"}}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
print(*[ask(url, method, b"TOKEN" if method in ("POST", "PUT", "PATCH") else None)
        for url in (index, index + "libx/", file, index.replace("simple", "legacy"))
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")])
print(*[ask(url) for url in (index, index + "libx/?q=TOKEN", index + "libx/?", file + "?TOKEN", index + "../pypi/libx/json",
                             index + "TOKEN/")])
print(ask(index + "libx/"), ask(file))
"""
    run = shop.run(code, REGISTRY, prelude=False)
    written, read, control = said(run).splitlines()
    assert set(written.split()) == {"403"}
    assert read.split() == ["403"] * 5 + ["404"]
    assert control == "200 200"
    registries.pypi.index.journal.requests[:] = [
        one for one in registries.pypi.index.journal.requests if one.target != "/simple/token/"
    ]  # a name that was asked for is a name
    assert arrived_clean(registries) >= 1


def test_nothing_is_published_and_no_credential_passes_in_npm(shop: Lab, registries: Registries) -> None:
    """npm's audit fails for it, and the installation does not."""
    host = registries.npm.url.removeprefix("https:")
    script = f"""
npm config set '{host}:_authToken=TOKEN' && npm config set fetch-retries 0
echo '{{"name": "stolen", "version": "1.0.0", "description": "TOKEN"}}' > package.json
npm install nlib > /dev/null && echo installed
for command in 'publish' 'audit' 'search nlib' 'whoami' 'dist-tag add nlib@1.2.0 mine' 'unpublish -f nlib' 'deprecate nlib x' \
    'owner add me nlib' 'star nlib' 'token list' 'ping'; do npm $command > /dev/null 2> /dev/null && echo "$command passed"; done
npm view nlib version
"""
    run = shell(shop, "javascript", script)
    assert said(run).split() == ["installed", "1.2.0"]
    assert {reason for reason, _, _ in refusals(run)} == {"registry_request_unknown", "method_not_allowed"}
    assert len(run.denials) >= 8, "the control: they were sent"
    assert arrived_clean(registries) >= 1
