"""The container example: what it gives back is needed, what it leaves away is not, and its command is real.

No container engine runs here. The namespaces, mounts and filters that it would make are made by `unshare` and
`directives.py`, and `doctor` is asked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pyseccomp
import pytest

from sandbox.isolation import seccomp
from tests.configs.test_systemd import doctor, needs_root, state
from tests.test_docs import ALL_COMMANDS, TOP

__all__ = ["state"]  # the fixture

HERE = TOP / "configs" / "container"
PROFILE = HERE / "seccomp.json"
RULES = json.loads(PROFILE.read_text())["syscalls"]
DENIED = {name for rule in RULES for name in rule["names"]}
NEEDED = {
    "unshare", "clone", "clone3", "setns", "mount", "umount2", "pivot_root", "chroot", "seccomp", "sethostname",
    "open_tree", "move_mount", "mount_setattr", "openat2", "prctl", "pidfd_open", "pidfd_send_signal", "memfd_create",
}  # fmt: skip
# As an engine makes them; the network namespace is the rig's.
CONTAINER = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--ipc", "--uts", "--cgroup")
OPTIONS = {"ProtectSystem": "strict", "PrivateDevices": "yes", "seccomp": str(PROFILE)}


def test_the_profile_forbids_nothing_that_sandboxes_are_made_with() -> None:
    assert not DENIED & NEEDED


def test_the_profile_forbids_only_what_code_in_a_sandbox_has_not_anyway() -> None:
    """So that nothing works outside of a container that fails in one."""
    assert not DENIED - {*seccomp._EPERM, *seccomp._ENOSYS}
    assert len(DENIED) > 40


def test_the_profile_s_names_are_system_calls() -> None:
    unknown = [name for name in DENIED if pyseccomp.resolve_syscall(pyseccomp.Arch.X86, name) == -1]
    assert unknown == []
    assert {rule["errnoRet"] for rule in RULES} == {1, 38}


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_the_command_gives_back_what_is_needed_and_no_more(tmp_path: Path, engine: str) -> None:
    fake = tmp_path / engine
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    policy = TOP / "configs" / "policies" / "default.yaml"
    done = subprocess.run(
        ["sh", str(HERE / "run.sh"), str(policy), "--publish", "127.0.0.1:8080:8080"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "ENGINE": engine},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert (words[0], words[-1]) == ("run", "sluicegate")
    given = set(pairwise(words))
    assert "--privileged" not in words
    assert {"--cap-add", "--device"} & {*words} == set()
    for pair in (("--cap-drop", "ALL"), ("--user", "10001:10001"), ("--security-opt", "no-new-privileges"),
                 ("--security-opt", f"seccomp={PROFILE}"), ("--publish", "127.0.0.1:8080:8080")):  # fmt: skip
        assert pair in given
    assert "--read-only" in words
    unmasked = {"podman": "unmask=ALL", "docker": "systempaths=unconfined"}
    assert [one for one in unmasked.values() if one in words] == [unmasked[engine]]


def test_the_image_runs_a_real_command_as_nobody_s_root() -> None:
    text = (HERE / "Containerfile").read_text()
    command = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[-1])
    known = {spelling for option in ALL_COMMANDS[command[0]].params for spelling in option.opts}
    assert {word for word in command if word.startswith("--")} <= known
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    started = (HERE / "run.sh").read_text()
    for place in ("/var/lib/sluicegate", "/run/sluicegate", "/etc/sluicegate/policy.yaml"):
        assert place in text
        assert f":{place}" in started


@needs_root
def test_an_attempt_is_fully_confined_in_such_a_container(state: Path) -> None:
    report = doctor(state, OPTIONS, CONTAINER)
    assert [check for check in report["checks"] if not check["ok"]] == []


@needs_root
def test_what_engines_take_away_by_default_is_refused_with_its_remedy(state: Path) -> None:
    """Masks over /proc; and a filter that forbids namespaces and mounts to who has no CAP_SYS_ADMIN."""
    usual = state.parent / "usual.json"
    forbidden = ["unshare", "setns", "mount", "umount2", "pivot_root", "open_tree", "move_mount", "mount_setattr"]
    rule = {"names": forbidden, "errnoRet": 1}
    usual.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    for given, remedy in (
        (OPTIONS | {"ProtectKernelTunables": "yes"}, "systempaths=unconfined"),
        (OPTIONS | {"seccomp": str(usual)}, "seccomp="),
    ):
        report = doctor(state, given, CONTAINER)
        failed = {check["name"]: check["remedy"] for check in report["checks"] if not check["ok"]}
        assert remedy in failed["namespaces"]
