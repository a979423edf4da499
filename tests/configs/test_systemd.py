"""The systemd unit: real directives, real options, the privileges that are needed, and none of those that break it.

systemd itself does not run here. What its directives do to the service is done by `directives.py`, and `doctor` is asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.serving import PATIENCE_SECONDS
from tests.configs import directives
from tests.test_docs import ALL_COMMANDS, TOP

UNIT = TOP / "configs" / "systemd" / "sluicegate.service"
DROP_IN = UNIT.with_suffix(".service.d") / "systemd-252.conf"
RIG = [sys.executable, "-m", "tests.configs.directives"]
OLD_SYSTEMD = "Unknown key 'DelegateSubgroup' in section [Service], ignoring."
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="to mount, and to become another user, takes root")


def settings(text: str) -> dict[str, list[str]]:
    """Every directive with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


SETTINGS = settings(UNIT.read_text())
STAY_OFF = re.findall(
    r"\b([A-Z]\w+)=", UNIT.read_text().partition("# --- what must stay off")[2].partition("[Install]")[0]
)


def test_what_must_stay_off_is_off_and_has_its_reason() -> None:
    assert {"ProtectKernelTunables", "ProtectKernelLogs", "ProtectHostname", "RestrictSUIDSGID", "ProcSubset"} <= {
        *STAY_OFF
    }
    assert set(STAY_OFF) & SETTINGS.keys() == set()
    assert "DynamicUser" not in SETTINGS


def test_no_privilege_is_left() -> None:
    assert SETTINGS["User"] == ["sluicegate"]
    assert SETTINGS["CapabilityBoundingSet"] == SETTINGS["AmbientCapabilities"] == [""]
    assert SETTINGS["NoNewPrivileges"] == ["yes"]
    for name in ("StateDirectoryMode", "RuntimeDirectoryMode"):
        assert SETTINGS[name] == ["0700"]


def test_a_stop_and_a_memory_kill_reach_the_service_as_it_expects_them() -> None:
    assert (SETTINGS["KillMode"], SETTINGS["OOMPolicy"]) == (["mixed"], ["continue"])
    drains = float(next(p.default for p in ALL_COMMANDS["serve"].params if p.name == "drain_seconds"))
    assert float(SETTINGS["TimeoutStopSec"][0]) > drains + 15 + 5  # what is cancelled ends, and what is sent is sent
    assert SETTINGS["RestartPreventExitStatus"] == ["2"]


@pytest.mark.parametrize("path", [UNIT, DROP_IN], ids=lambda path: path.name)
def test_the_command_is_one_that_there_is(path: Path) -> None:
    command = settings(path.read_text())["ExecStart"][-1]
    known = {spelling for option in ALL_COMMANDS["serve"].params for spelling in option.opts}
    written = set(re.findall(r" (--[a-z-]+)", command))
    assert {"--policy", "--uds"} <= written <= known
    assert "sluicegate serve " in command


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this system has no systemd")
@pytest.mark.parametrize("drop_in", [False, True])
def test_systemd_knows_every_directive(tmp_path: Path, drop_in: bool) -> None:
    """But for the one that the unit says earlier versions ignore."""
    (tmp_path / "sluicegate").write_text("#!/bin/sh\n")
    (tmp_path / "sluicegate").chmod(0o755)
    unit = tmp_path / "sluicegate.service"
    unit.write_text(UNIT.read_text().replace("/opt/sluicegate/bin/", f"{tmp_path}/"))
    if drop_in:
        unit.with_suffix(".service.d").mkdir()
        (unit.with_suffix(".service.d") / DROP_IN.name).write_text(DROP_IN.read_text())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    said = [line for line in done.stderr.splitlines() if "sluicegate" in line and OLD_SYSTEMD not in line]
    assert (done.returncode, said) == (0, [])


# --- what the directives do


def effects() -> dict[str, str]:
    """The unit's own directives, of those whose effect is known here."""
    return {name: SETTINGS[name][-1] for name in {*directives.MOUNTS, *directives.FILTERS} & SETTINGS.keys()}


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory that another user can reach."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        Path(directory).chmod(0o755)
        (Path(directory) / "state").mkdir()
        yield Path(directory) / "state"


def doctor(state: Path, given: dict[str, str], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Doctor's report under these directives."""
    words = [f"{name}={value}" for name, value in given.items()]
    command = [*prefix, *RIG, str(state), *words, "--", sys.executable, "-P", "-m", "sandbox.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=110)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@needs_root
def test_an_attempt_is_fully_confined_under_the_unit_s_own_directives(state: Path) -> None:
    assert len(effects()) >= 9
    report = doctor(state, effects())
    assert [check for check in report["checks"] if not check["ok"]] == []


BREAKS = {
    "ProtectKernelTunables=yes": "namespaces",
    "ProtectKernelLogs=yes": "namespaces",
    "ProcSubset=pid": "namespaces",
    "ProtectHostname=yes": "python",
    "MemoryDenyWriteExecute=yes": "javascript",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6": "namespaces",
    "SystemCallFilter=@system-service seccomp sethostname": "namespaces",
    "SystemCallFilter=@system-service @mount seccomp": "python",
}


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(("directive", "check"), BREAKS.items())
def test_each_directive_that_must_stay_off_breaks_the_confinement(state: Path, directive: str, check: str) -> None:
    """Where it does no more, it belongs into the unit. What fails is refused, and named."""
    name, _, value = directive.partition("=")
    report = doctor(state, {name: value})
    assert not report["ok"]
    assert check in [one["name"] for one in report["checks"] if not one["ok"]]


@needs_root
def test_working_directories_need_what_one_directive_forbids(state: Path) -> None:
    """With the unit's directives they are had; with RestrictSUIDSGID= the call is refused before it runs."""
    from sandbox.client import Client, Unavailable

    socket = state / "run" / "s"
    serve = [sys.executable, "-P", "-m", "sandbox.cli", "serve", "--uds", str(socket)]
    for given in (effects(), {"RestrictSUIDSGID": "yes"}):
        words = [f"{name}={value}" for name, value in given.items()]
        command = [*RIG, str(state), *words, "--", *serve]
        with subprocess.Popen(command, cwd=TOP, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("listening on ")
                with Client(uds=socket) as client:
                    if "RestrictSUIDSGID" not in given:
                        assert client.code_exec("import os; print(os.getcwd())").output == "/workspace\n"
                    else:
                        with pytest.raises(Unavailable) as caught:
                            client.code_exec("1")
                        assert caught.value.code == "directory_unavailable"
            finally:
                process.terminate()
                process.wait(PATIENCE_SECONDS)


# As `Delegate=` does it: a group of the user's own, with the process in it. Then the drop-in's own words.
_DELEGATE = """
mount --make-rprivate /
place=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts)
[ -n "$place" ] || { mkdir -p /run/two; mount -t cgroup2 none /run/two; place=/run/two; }
mount --bind "$place" /sys/fs/cgroup
group=/sys/fs/cgroup/sluicegate-test-$$
mkdir "$group"
chown 65534 "$group" "$group/cgroup.procs" "$group/cgroup.subtree_control"
echo $$ >"$group/cgroup.procs"
export RUNTIME_DIRECTORY=/run/sluicegate
exec setpriv --reuid 65534 --clear-groups --regid 65534 /bin/sh -euc "$1"
"""


@needs_root
def test_before_systemd_254_the_shell_puts_the_service_into_a_leaf(state: Path) -> None:
    """And becomes the service, with the pid that systemd knows."""
    script = re.fullmatch(r"/bin/sh -euc '(.*)'", settings(DROP_IN.read_text())["ExecStart"][-1])
    assert script is not None
    service, told = state / "service", state / "told"
    service.write_text('#!/bin/sh\ncat /proc/self/cgroup; echo "$$" "$@"\n')
    service.chmod(0o755)
    shell = script[1].replace("$$$$", "$$").replace("/opt/sluicegate/bin/sluicegate", str(service))
    command = ["unshare", "-m", "/bin/sh", "-euc", _DELEGATE, "sh", shell]
    with told.open("w") as file, subprocess.Popen(command, stdout=file) as process:
        status = process.wait(PATIENCE_SECONDS)
    group = f"sluicegate-test-{process.pid}"
    for place in Path("/sys/fs/cgroup").glob(f"**/{group}"):
        for leaf in (place / "service", place):
            leaf.rmdir()
    *cgroups, last = told.read_text().splitlines()
    assert status == 0
    assert f"0::/{group}/service" in cgroups
    arguments = ["serve", "--policy", "/etc/sluicegate/policy.yaml", "--uds", "/run/sluicegate/sluicegate.sock"]
    assert last.split() == [str(process.pid), *arguments]
