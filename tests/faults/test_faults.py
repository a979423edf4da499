"""Each of our processes killed, the log made unwritable: all end in a denial or a named error, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from proxy.control import ProxyUnavailable
from proxy.network import Reason
from sandbox import Settings, SyncExecutor
from sandbox.contract import CodeCall, Status, ToolResult
from sandbox.isolation.client import IsolationUnavailable
from sandbox.state import InvalidSettings
from tests import world
from tests.lab import NAMED, PRELUDE, STRANGER, Lab, Outside, main_policy, named, parse_seen, read_events

ROOT = Path(__file__).parent.parent.parent
HOLDING = named("allowed.test", "local.test")
GONE_SECONDS = 15  # until everything that a killed process started must be gone

type OpenLab = Callable[[str], AbstractContextManager[Lab]]


@pytest.fixture
def fresh(open_lab: OpenLab, outside: Outside) -> Iterator[Lab]:
    """An executor of the test's own, to be damaged."""
    with open_lab(main_policy(outside)) as lab:
        outside.forget()
        yield lab


def tree(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def attempt_processes(lab: Lab) -> list[psutil.Process]:
    """Those of the attempt that has started a `sleep`, and not those of a sandbox that waits for the next one."""
    for child in psutil.Process(lab.launcher_pid).children():
        processes = [child, *child.children(recursive=True)]
        if any(process.name() == "sleep" for process in processes):
            return processes
    raise AssertionError("no sandbox runs a `sleep`")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    assert alive == [], "a process survived"


PROBE_AFTER = f"""
report(before=fetch("http://allowed.test/echo")["status"])
report(held=fetch("HOLD")["status"])
report(after=[
    fetch("http://allowed.test/after")["status"], fetch("https://allowed.test/after")["status"],
    exchange("{STRANGER}", 8080)["answer"], exchange("{STRANGER}", 80, b"GET / HTTP/1.0\\r\\n\\r\\n")["answer"],
    datagrams([("{STRANGER}", 9999)]), resolve("other.test")["addresses"],
])
"""


def test_without_the_proxy_there_is_no_network(fresh: Lab, outside: Outside) -> None:
    """The proxy killed mid-run: nothing the code tries afterwards arrives, and the result does not look like success of it."""
    code = PROBE_AFTER.replace("HOLD", fresh.hold_url)
    counted: list[int] = []

    def kill() -> None:
        fresh.held()
        counted.append(len(outside.allowed.journal.requests))
        outside.dns.forget()
        os.kill(fresh.proxy_pid, signal.SIGKILL)
        outside.local.release()

    run, _ = fresh.during(code, kill, HOLDING, timeout=60)
    assert counted == [1], "the control: with the proxy the request arrived"
    assert all(peer.untouched for peer in outside.strangers)
    assert "other.test" not in outside.dns.names()
    lost = run.result
    if len(lost.attempts) == 1:
        assert len(outside.allowed.journal.requests) == 1
        assert outside.allowed_tls.untouched
    for one in run.seen:
        if "after" in one and len(lost.attempts) == 1:
            assert one["after"][:2] == [None, None]
        if "after" in one:
            assert one["after"][2:] == ["", "", [], []]
    ledger = [attempt.code for attempt in lost.attempts]
    assert any("proxy" in code for code in ledger) or "proxy" in (lost.error.code if lost.error else ""), lost
    if lost.status != Status.SUCCESS:
        assert lost.error is not None


def test_the_next_call_after_a_lost_proxy_is_guarded_or_refused(fresh: Lab, outside: Outside) -> None:
    """After the proxy was killed between calls, a call has a proxy again or fails by name; it is never unguarded."""
    old = psutil.Process(fresh.proxy_pid)
    old.kill()
    psutil.wait_procs([old], timeout=10)
    for _ in range(3):
        outside.forget()
        try:
            run = fresh.run(
                'report(seen=[fetch("http://other.test/")["status"], fetch("http://allowed.test/echo")["status"]])',
                NAMED,
            )
        except ProxyUnavailable:
            pass
        else:
            if run.result.status == Status.SUCCESS:
                assert run.only["seen"][0] != 200
                assert run.only["seen"][1] == 200, "a proxy that serves"
            else:
                assert run.result.error is not None
                assert "proxy" in run.result.error.code
        assert outside.other.untouched
    starts = [event for event in read_events(fresh.log) if event["event"] == "proxy" and event["what"] == "start"]
    assert len(starts) >= 2, "the log shows where a proxy was lost"


def test_a_proxy_that_hangs_does_not_hang_the_call(fresh: Lab, outside: Outside) -> None:
    """A stopped proxy gives no network, and the timeout ends the attempt all the same."""
    proxy = psutil.Process(fresh.proxy_pid)

    def stop() -> None:
        fresh.held()
        proxy.suspend()

    try:
        run, _ = fresh.during(
            f'report(seen=fetch("{fresh.hold_url}")["status"])\nwhile True: fetch("http://allowed.test/after")',
            stop,
            HOLDING,
            timeout=5,
        )
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            proxy.resume()
        outside.local.release()
    assert run.result.status == Status.TIMEOUT
    assert run.result.usage.wall_seconds < 20
    again = fresh.run('report(seen=fetch("http://allowed.test/echo")["status"])', NAMED)
    assert again.only["seen"] == 200


def test_a_launcher_that_hangs_does_not_hang_the_call(fresh: Lab, outside: Outside) -> None:
    """A stopped launcher cannot end the attempt, so it is ended itself, and with it the attempt."""
    launcher = psutil.Process(fresh.launcher_pid)

    def stop() -> None:
        fresh.held()
        launcher.suspend()

    try:
        run, _ = fresh.during(
            f'report(seen=fetch("{fresh.hold_url}")["status"])\nwhile True: pass', stop, HOLDING, timeout=2
        )
    finally:
        outside.local.release()
    assert run.result.status == Status.ERROR
    assert run.result.error is not None
    assert run.result.error.code == "launcher_lost"
    assert not launcher.is_running()
    assert fresh.run("report(seen=1)").only["seen"] == 1


def test_killing_the_launcher_kills_its_sandboxes(fresh: Lab, outside: Outside) -> None:
    """The launcher killed mid-run takes every sandbox with it, and the call ends by name."""
    inside: list[psutil.Process] = []

    def kill() -> None:
        fresh.held()
        inside.extend(tree(fresh.launcher_pid))
        os.kill(fresh.launcher_pid, signal.SIGKILL)

    code = f'import subprocess\nsubprocess.Popen(["setsid", "sleep", "300"])\nreport(seen=fetch("{fresh.hold_url}")["status"])'
    result: ToolResult | None = None
    try:
        run, _ = fresh.during(code, kill, HOLDING, timeout=20)
        result = run.result
    except (IsolationUnavailable, ProxyUnavailable):
        pass
    finally:
        outside.local.release()
    assert inside
    assert_gone(inside)
    if result is not None and len(result.attempts) == 1:
        assert result.status in (Status.ERROR, Status.KILLED)
        assert result.error is not None
    for _ in range(2):
        try:
            assert fresh.run("report(ok=True)").result.status in (Status.SUCCESS, Status.ERROR)
        except IsolationUnavailable:
            pass


def test_killing_bubblewrap_kills_the_sandbox(fresh: Lab, outside: Outside) -> None:
    """Each process of one sandbox killed from outside: the others go, and the call does not end as a success."""
    names: set[str] = set()
    for place in range(3):
        outside.forget()
        inside: list[psutil.Process] = []

        def kill(place: int = place, inside: list[psutil.Process] = inside) -> None:
            fresh.held()
            inside.extend(attempt_processes(fresh))
            names.update(process.name() for process in inside)
            if place < len(inside):
                inside[place].kill()
            else:
                outside.local.release()

        code = (
            f'import subprocess\nsubprocess.Popen(["sleep", "300"])\nreport(seen=fetch("{fresh.hold_url}")["status"])'
        )
        run, _ = fresh.during(code, kill, HOLDING, timeout=20)
        outside.local.release()
        assert inside
        assert_gone(inside)
        if place < len(inside):
            assert run.result.status != Status.SUCCESS or run.seen == []
            assert run.result.status in (Status.ERROR, Status.KILLED, Status.TIMEOUT)
    assert "bwrap" in names
    assert fresh.run("report(ok=True)").only["ok"]


def test_a_log_that_cannot_be_written_denies_all_traffic(outside: Outside) -> None:
    """The log's file system is full: every request is denied from then on, and the reason says so."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        root = Path(directory)
        logs = root / "logs"
        logs.mkdir()
        policy = root / "policy.yaml"
        policy.write_text(main_policy(outside))
        with world.small_filesystem(logs, 1 << 20):
            settings = Settings(state_dir=root / "state", audit_log=logs / "audit.jsonl")
            with SyncExecutor(policy, settings=settings) as executor:
                probe = (
                    PRELUDE
                    + """
report(seen=[fetch("http://allowed.test/echo")["status"], fetch("https://allowed.test/echo")["status"], resolve("allowed.test")["addresses"]])
report(body=fetch("http://allowed.test/echo")["json"])
"""
                )
                call = CodeCall(
                    language="python", code=probe, allow_network=True, domains=["allowed.test"], timeout=100
                )
                fine = parse_seen(executor.run(call).stdout)
                assert fine[0]["seen"][:2] == [200, 200], "the control: with room, traffic flows"
                _fill(logs / "ballast")
                # What of the last block is still free takes some lines; nobody may get through once it is used up.
                for _ in range(60):
                    outside.forget()
                    refused = _run(executor, call)
                    if refused is None or outside.allowed.untouched:
                        break
                else:
                    pytest.fail("traffic went on with a log that could not be written")
                outside.forget()
                result = _run(executor, call)
                assert outside.allowed.untouched
                assert outside.allowed_tls.untouched
                if result is not None and result.status == Status.SUCCESS:
                    seen = parse_seen(result.stdout)
                    assert 200 not in seen[0]["seen"]
                    assert seen[0]["seen"][2] == []
                    if seen[1]["body"]:
                        assert seen[1]["body"]["code"] == Reason.AUDIT_UNAVAILABLE
                elif result is not None:
                    assert result.error is not None
            whole = (logs / "audit.jsonl").read_bytes().split(b"\n")
            assert read_events(logs / "audit.jsonl") or len(whole) == 1


def _fill(path: Path) -> None:
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def _run(executor: SyncExecutor, call: CodeCall) -> ToolResult | None:
    """The call's result, or None where it was refused by name."""
    try:
        return executor.run(call)
    except ProxyUnavailable:
        return None


@pytest.mark.parametrize("target", ["/dev/full", "a directory", "below a file"])
def test_a_log_that_cannot_be_opened_lets_nothing_run_unlogged(outside: Outside, target: str) -> None:
    """A log path that can take no line refuses at the start or denies: nothing arrives outside."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        root = Path(directory)
        policy = root / "policy.yaml"
        policy.write_text(main_policy(outside))
        (root / "file").touch()
        path = {"/dev/full": Path("/dev/full"), "a directory": root, "below a file": root / "file" / "audit.jsonl"}[
            target
        ]
        call = CodeCall(
            language="python",
            code=PRELUDE + 'report(seen=fetch("http://allowed.test/echo")["status"])',
            allow_network=True,
            domains=["allowed.test"],
        )
        with outside.silence():
            try:
                with SyncExecutor(policy, settings=Settings(state_dir=root / "state", audit_log=path)) as executor:
                    result = executor.run(call)
            except (ProxyUnavailable, InvalidSettings) as error:
                said = str(error)
            else:
                said = "denied"
                assert [one for one in parse_seen(result.stdout) if one["seen"] == 200] == []
        assert said


@dataclass
class Running:
    """A whole `sluicegate run`, to be killed."""

    process: subprocess.Popen[str]
    home: Path
    others: set[int]  # processes of the tests that were there before

    def descendants(self) -> list[psutil.Process]:
        return tree(self.process.pid)

    def kill(self) -> list[psutil.Process]:
        """SIGKILL the command. What it had started by then."""
        started = self.descendants()
        self.process.kill()
        self.process.wait(30)
        return started

    def assert_nothing_left(self) -> None:
        """No process that the command started is left, seen or unseen: orphans are this process's children now."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := [p for p in tree(os.getpid()) if p.pid not in self.others and p.pid != self.process.pid]:
            assert time.monotonic() < deadline, f"survived: {left}"
            psutil.wait_procs(left, timeout=1)


type Start = Callable[..., Running]


@pytest.fixture
def start(command: list[str], outside: Outside) -> Iterator[Start]:
    homes: list[Path] = []
    running: list[Running] = []

    world.adopt_orphans()
    others = {process.pid for process in tree(os.getpid())}

    def run(code: str, *arguments: str, home: Path | None = None) -> Running:
        if home is None:
            home = Path(tempfile.mkdtemp(prefix="sg-"))
            homes.append(home)
            (home / "policy.yaml").write_text(main_policy(outside))
            (home / "tmp").mkdir()
        process = subprocess.Popen(
            [*command, "run", "--policy", str(home / "policy.yaml"), "--audit-log", str(home / "audit.jsonl"), *arguments, "--code", code],
            env={**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TMPDIR": str(home / "tmp")},
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(Running(process, home, others))
        return running[-1]

    yield run
    for one in running:
        one.process.kill()
        one.process.communicate(timeout=30)
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)


STAGES = ["at once", "with a child", "with the proxy", "in the code", "in a request", "at the end"]


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_survives_the_killed_command(start: Start, outside: Outside, stage: str) -> None:
    """SIGKILL of the whole command, at any stage, ends every process that it started."""
    outside.forget()
    code = (
        PRELUDE
        + f"""
import subprocess
subprocess.Popen(["setsid", "sleep", "300"])
subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 301 & wait"])
print("running", flush=True)
fetch("http://local.test:{outside.local.port}/hold")
while True: pass
"""
    )
    running = start(code, "--allow-network", "--domain", "local.test", "--timeout", "100")
    assert running.process.stdout is not None
    if stage == "with a child":
        while not running.descendants():
            assert running.process.poll() is None
    elif stage == "with the proxy":
        while len(running.descendants()) < 2:
            assert running.process.poll() is None
    elif stage != "at once":
        assert running.process.stdout.readline() == "running\n"
        if stage in ("in a request", "at the end"):
            outside.local.wait(lambda journal: bool(journal.requests))
            if stage == "at the end":
                outside.local.release()
    started = running.kill()
    if stage not in ("at once", "with a child", "with the proxy"):
        assert len(started) >= 4
    mounts = Path("/proc/self/mounts").read_text()
    try:
        assert_gone(started)
        running.assert_nothing_left()
        again = start("print('again')", home=running.home)
        assert again.process.wait(60) == 0
        again.assert_nothing_left()
    finally:
        outside.local.release()
    # What only a living process could remove is gone after the next start.
    assert Path("/proc/self/mounts").read_text() == mounts
    assert list((running.home / "tmp").iterdir()) == []
    assert list((running.home / "state").rglob("*launcher*")) == []
    groups = [path.name for path in Path("/sys/fs/cgroup").glob("**/sluicegate-*")]
    assert [name for name in groups for process in started if f"-{process.pid}-" in name] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_command_ends_everything(start: Start, outside: Outside, number: signal.Signals) -> None:
    """A polite end is a whole end, and is in the log."""
    running = start("print('running', flush=True)\nwhile True: pass", "--timeout", "100")
    assert running.process.stdout is not None
    assert running.process.stdout.readline() == "running\n"
    started = running.descendants()
    running.process.send_signal(number)
    assert running.process.wait(30) == 128 + number
    assert_gone(started)
    phases = [
        event.get("phase") for event in read_events(running.home / "audit.jsonl") if event.get("event") == "attempt"
    ]
    assert phases == ["start", "end"]


def test_after_many_kills_several_at_once_still_work(start: Start, outside: Outside) -> None:
    """Killed over and over, then several commands at once under different grants: no leftover, no cross-talk."""
    started: list[psutil.Process] = []
    first = start("print('running', flush=True)\nwhile True: pass", "--timeout", "100")
    home = first.home
    batch = [
        first,
        *(start("print('running', flush=True)\nwhile True: pass", "--timeout", "100", home=home) for _ in range(3)),
    ]
    for running in batch:
        assert running.process.stdout is not None
        running.process.stdout.readline()
        started += running.kill()
    assert_gone(started)
    first.assert_nothing_left()
    hosts = ["allowed.test", "other.test", "six.test"]
    code = PRELUDE + f'report(seen=[fetch("http://" + host + "/echo")["status"] for host in {hosts}])'
    outside.forget()
    for group in range(2):
        several = [
            start(code, "--allow-network", "--domain", hosts[n % 3], "--timeout", "100", home=home)
            for n in range(group * 4, group * 4 + 4)
        ]
        for number, running in enumerate(several, group * 4):
            output, error = running.process.communicate(timeout=100)
            assert running.process.returncode == 0, error
            (one,) = parse_seen(output)
            assert [host for host, status in zip(hosts, one["seen"], strict=True) if status == 200] == [
                hosts[number % 3]
            ]
    events = read_events(home / "audit.jsonl")
    by_attempt: dict[str, set[str]] = {}
    for event in events:
        if event.get("decision") == "allow" and event["host"].endswith(".test"):
            by_attempt.setdefault(event["attempt_id"], set()).add(event["host"])
    assert len(by_attempt) == 8
    assert all(len(names) == 1 for names in by_attempt.values())
    first.assert_nothing_left()


def test_a_changed_policy_file_does_not_change_a_running_executor(fresh: Lab, outside: Outside) -> None:
    """The policy is what was read at the start: a broken or an opened file later opens nothing."""
    for text in ("{ broken", "version: 1\nname: open\nnetwork: {modes: [unrestricted]}\n", ""):
        fresh.policy.write_text(text)
        with outside.silence():
            run = fresh.run('report(seen=fetch("http://other.test/")["status"])', NAMED)
        assert run.only["seen"] == 403
        assert run.reasons == {Reason.HOST_NOT_ALLOWED}
