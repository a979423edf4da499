"""What directives of a systemd unit, and options of a container, do to a process: mounts, filters, and another user.

    python tests/configs/directives.py STATE_DIR DIRECTIVE[=VALUE] … -- COMMAND …

Owns: the effect of each on what `sluicegate` needs, as systemd.exec(5) and the runtime specification describe it. What
systemd and container engines do besides (cgroups, networks, images) is not here.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyseccomp as seccomp

from sandbox.isolation import netns
from sandbox.isolation import syscalls as sys_
from tests import unprivileged

UID = 0x6FFF_0000  # nobody's
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC = 1, 2, 4, 8, 32, 0x1000, 0x4000
_PR_CAPBSET_DROP = 24
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_libc = ctypes.CDLL(None, use_errno=True)

_TUNABLES = "sys sysrq-trigger latency_stats mtrr apm acpi timer_stats asound bus fs irq".split()
_CLOCK = "clock_adjtime adjtimex settimeofday clock_settime".split()
_MODULES = "init_module finit_module delete_module".split()
_MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2}


# --- mounts, made as root


def _read_only(path: str) -> None:
    if os.path.exists(path):
        sys_.mount(path, path, None, _BIND | _REC)
        sys_.mount("none", path, None, _BIND | _REMOUNT | _RDONLY)


def _masked(path: str) -> None:
    if os.path.isdir(path):
        sys_.mount("tmpfs", path, "tmpfs", _RDONLY, "mode=000")
    elif os.path.exists(path):
        sys_.mount("/dev/null", path, None, _BIND)


def _proc(options: str) -> None:
    sys_.unmount_lazily("/proc")
    sys_.mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, options)


def _private_devices(_: str) -> None:
    place = tempfile.mkdtemp(prefix="sg-dev-")
    sys_.mount("tmpfs", place, "tmpfs", _NOSUID | _NOEXEC, "mode=755")
    for name in _DEVICES:
        os.mknod(f"{place}/{name}", 0o020666, os.stat(f"/dev/{name}").st_rdev)
        os.chmod(f"{place}/{name}", 0o666)
    for name in ("pts", "shm"):
        os.mkdir(f"{place}/{name}")
        sys_.mount(f"/dev/{name}", f"{place}/{name}", None, _BIND)
    os.symlink("pts/ptmx", f"{place}/ptmx")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{place}/{name}")
    sys_.mount(place, "/dev", None, _BIND | _REC)
    sys_.unmount_lazily(place)
    os.rmdir(place)


def _strict(state: str) -> None:
    """All read-only but the interfaces of the kernel, the state directory, and the places for temporary files."""
    kept = (state, "/tmp", "/var/tmp")
    for place in kept:
        sys_.mount(place, place, None, _BIND)
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4] for line in file]
    for point in points:
        if not (point.startswith(("/dev", "/proc", "/sys", *(f"{place}/" for place in kept))) or point in kept):
            sys_.mount("none", point, None, _BIND | _REMOUNT | _RDONLY)


def _tunables(_: str) -> None:
    for path in (*(f"/proc/{name}" for name in _TUNABLES), "/sys"):
        _read_only(path)
    for path in ("/proc/kallsyms", "/proc/kcore"):
        _masked(path)


def _kernel_logs(_: str) -> None:
    for path in ("/proc/kmsg", "/dev/kmsg"):
        _masked(path)


MOUNTS: dict[str, Callable[[str], None]] = {
    "PrivateDevices": _private_devices,
    "ProtectControlGroups": lambda _: _read_only("/sys/fs/cgroup"),
    "ProtectKernelLogs": _kernel_logs,
    "ProtectKernelModules": lambda _: _masked("/usr/lib/modules"),
    "ProtectKernelTunables": _tunables,
    "ProtectProc": lambda value: _proc(f"hidepid={value}"),
    "ProcSubset": lambda value: _proc(f"subset={value}"),
    "ProtectSystem": _strict,
}


# --- filters, loaded as the service's user


def _load_denials(names: list[str], error: int, *conditions: seccomp.Arg) -> None:
    chosen = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in names:
        chosen.add_rule(seccomp.ERRNO(error), name, *conditions)
    chosen.load()


def _no_suid(_: str) -> None:
    for bit in (0o4000, 0o2000):
        for name, argument in _MODES.items():
            _load_denials([name], errno.EPERM, seccomp.Arg(argument, seccomp.MASKED_EQ, bit, bit))
    _load_denials(["openat2"], errno.ENOSYS)


def _no_written_code(_: str) -> None:
    _load_denials(["mmap"], errno.EPERM, seccomp.Arg(2, seccomp.MASKED_EQ, 6, 6))
    for name in ("mprotect", "pkey_mprotect"):
        _load_denials([name], errno.EPERM, seccomp.Arg(2, seccomp.MASKED_EQ, 4, 4))


def _families(value: str) -> None:
    allowed = {int(getattr(socket, name)) for name in value.split()}
    chosen = seccomp.SyscallFilter(seccomp.ALLOW)
    for family in set(range(46)) - allowed:
        chosen.add_rule(seccomp.ERRNO(errno.EAFNOSUPPORT), "socket", seccomp.Arg(0, seccomp.EQ, family))
    chosen.load()


def _members(name: str) -> set[str]:
    """The system calls of one of systemd's sets, as this machine's systemd has it."""
    if not name.startswith("@"):
        return {name}
    listed = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    words = [line.split("#")[0].strip() for line in listed.stdout.splitlines()[1:]]
    return {member for word in words if word for member in _members(word)}


def _allowed_calls(value: str) -> None:
    chosen = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    for name in sorted({member for word in value.split() for member in _members(word)}):
        try:
            chosen.add_rule(seccomp.ALLOW, name)
        except (OSError, ValueError, RuntimeError):
            continue  # this processor, or this libseccomp, has no such call
    chosen.load()


def _profile(path: str) -> None:
    """A profile as container engines read them."""
    profile = json.loads(Path(path).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    for rule in profile["syscalls"]:
        chosen = seccomp.SyscallFilter(seccomp.ALLOW)
        for name in rule["names"]:
            try:
                chosen.add_rule(seccomp.ERRNO(rule["errnoRet"]), name)
            except (OSError, ValueError, RuntimeError):
                continue  # not on this processor; engines do the same
        chosen.load()


FILTERS: dict[str, Callable[[str], None]] = {
    "LockPersonality": lambda _: _load_denials(["personality"], errno.EPERM, seccomp.Arg(0, seccomp.NE, 0)),
    "MemoryDenyWriteExecute": _no_written_code,
    "ProtectClock": lambda _: _load_denials(_CLOCK, errno.EPERM),
    "ProtectHostname": lambda _: _load_denials(["sethostname", "setdomainname"], errno.EPERM),
    "ProtectKernelModules": lambda _: _load_denials(_MODULES, errno.EPERM),
    "RestrictAddressFamilies": _families,
    "RestrictRealtime": lambda _: _load_denials(["sched_setscheduler"], errno.EPERM, seccomp.Arg(1, seccomp.GE, 1)),
    "RestrictSUIDSGID": _no_suid,
    "seccomp": _profile,
    "SystemCallFilter": _allowed_calls,  # the last: it may forbid what loads the others
}


def main(state: str, directives: dict[str, str], command: list[str]) -> None:
    project = str(Path(__file__).resolve().parents[2])
    unprivileged._open_up(list(dict.fromkeys(map(os.path.realpath, (sys.base_prefix, sys.prefix, project)))))
    os.unshare(os.CLONE_NEWNET)
    netns.raise_loopback()
    os.chown(state, UID, UID)
    filters = [FILTERS[name] for name in FILTERS if name in directives]
    values = [directives[name] for name in FILTERS if name in directives]
    for name in sorted(directives.keys() & MOUNTS.keys(), key=list(MOUNTS).index):
        MOUNTS[name](state if name == "ProtectSystem" else directives[name])
    os.chdir("/")
    for capability in range(41):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    sys_.set_no_new_privileges()
    for load, value in zip(filters, values, strict=True):
        load(value)
    environment = {"PATH": "/usr/bin:/bin", "HOME": state, "SLUICEGATE_STATE_DIR": state, "PYTHONPATH": project}
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    state_, *words = sys.argv[1:]
    end = words.index("--")
    main(state_, {name: value for name, _, value in (word.partition("=") for word in words[:end])}, words[end + 1 :])
