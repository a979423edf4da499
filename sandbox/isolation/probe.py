"""What the confinement needs of this host, checked one by one, each with the remedy. Nothing is changed by it.

Owns: the questions, and what is known of systems that say no. Must not: start a sandbox, which `runtime_probe` does.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.isolation import netns

_BWRAP_PATH = "/usr/bin:/bin:/usr/local/bin"
_MIN_BWRAP = (0, 8, 0)  # --disable-userns and --size; earlier ones are refused
_PROBE_TIMEOUT_SECONDS = 20
_MIN_DESCRIPTORS = 4096  # well above what one sandbox may have, see `privilege.raise_descriptor_limit`

_INSTALL_BWRAP = "install the package `bubblewrap`, 0.8 or later"
_CONTAINER = (
    "in a container, start it with `--security-opt seccomp=<profile that allows unshare, clone and mount>`, "
    "`--security-opt apparmor=unconfined` and `--security-opt systempaths=unconfined`, or run sluicegate in a "
    "privileged container beside yours"
)
_APPARMOR = (
    "this system restricts user namespaces by AppArmor: allow them to bubblewrap with a file "
    "`/etc/apparmor.d/bwrap` that reads\n"
    "    abi <abi/4.0>,\n    include <tunables/global>\n"
    "    profile bwrap /usr/bin/bwrap flags=(unconfined) {\n        userns,\n    }\n"
    "and load it with `apparmor_parser -r /etc/apparmor.d/bwrap`"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is needed. `detail` says what was found; `remedy` is empty if `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str


def check_host() -> list[Check]:
    """All checks, in the order in which an attempt needs them."""
    checks = [check_bwrap(), check_libseccomp(), check_descriptors()]
    bwrap = shutil.which("bwrap", path=_BWRAP_PATH)
    if bwrap is not None:
        checks.append(check_namespaces(bwrap))
    if all(check.ok for check in checks):
        checks.append(check_capture())
    return checks


def check_bwrap() -> Check:
    path = shutil.which("bwrap", path=_BWRAP_PATH)
    if path is None:
        return Check("bubblewrap", False, f"`bwrap` is in none of {_BWRAP_PATH}", _INSTALL_BWRAP)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, env={})
    numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", answer.stdout)
    version = tuple(int(n or 0) for n in numbers.groups()) if numbers else (0, 0, 0)
    text = ".".join(map(str, version))
    if version < _MIN_BWRAP:
        return Check("bubblewrap", False, f"`{path}` is version {text}", _INSTALL_BWRAP)
    return Check("bubblewrap", True, f"`{path}`, version {text}", "")


def check_libseccomp() -> Check:
    try:
        from sandbox.isolation import seccomp

        size = len(seccomp.build_filter(deny_unseen_memory=True)) // 8
    except (ImportError, OSError, RuntimeError) as error:
        return Check("libseccomp", False, str(error), "install the package `libseccomp2` (`libseccomp` elsewhere)")
    return Check("libseccomp", True, f"a filter of {size} instructions", "")


def check_descriptors() -> Check:
    """Whether the launcher can have so many descriptors that sandboxes, which have fewer, cannot starve it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_DESCRIPTORS:
        detail = f"at most {hard} descriptors for a process, so that code inside can keep every launch from working"
        remedy = f"raise the hard limit to {_MIN_DESCRIPTORS} or more (`ulimit -Hn`, or `LimitNOFILE=` of the service)"
        return Check("descriptors", False, detail, remedy)
    return Check("descriptors", True, f"up to {hard} for a process", "")


def check_namespaces(bwrap: str) -> Check:
    """Whether bubblewrap can make all namespaces and mounts, as the user that the launcher would be."""
    command = [
        bwrap, "--unshare-user", "--unshare-all", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc",
        "--dev", "/dev", "--die-with-parent", "--", "/bin/true",
    ]  # fmt: skip
    as_user: dict[str, object] = {}
    if os.geteuid() == 0:
        as_user = {"user": 65534, "group": 65534, "extra_groups": []}
    try:
        answer = subprocess.run(  # type: ignore[call-overload]
            command, capture_output=True, text=True, env={}, cwd="/", timeout=_PROBE_TIMEOUT_SECONDS, **as_user
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("namespaces", False, str(error), _CONTAINER)
    if answer.returncode == 0:
        return Check("namespaces", True, "user, mount, pid, network, ipc, uts and cgroup namespaces can be made", "")
    detail = answer.stderr.strip() or f"bwrap exited with {answer.returncode}"
    return Check("namespaces", False, detail, explain_refusal(detail, _read))


def explain_refusal(message: str, read: Callable[[str], str | None]) -> str:
    """The remedy for bubblewrap's `message`, by what `read` finds in /proc/sys. Pure but for `read`."""
    if read("/proc/sys/user/max_user_namespaces") == "0":
        return "user namespaces are switched off: `sysctl -w user.max_user_namespaces=10000`"
    if read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are for root only: `sysctl -w kernel.unprivileged_userns_clone=1`"
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if "mount proc" in message or "/proc" in message:
        return "a part of /proc is masked, so that no new one may be mounted: " + _CONTAINER
    return "a security profile refuses namespaces or mounts: " + _CONTAINER


def check_capture() -> Check:
    """Whether a network namespace can be set up as a sandbox's: in a child, in namespaces of its own."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _try_capture(theirs)
    theirs.close()
    with ours:
        answer = ours.recv(4096).decode()
    os.waitpid(pid, 0)
    if answer == "ok":
        return Check("capture", True, "all TCP of a network namespace can be captured (nf_tables, TPROXY)", "")
    remedy = "load the kernel modules `nf_tables` and `nft_tproxy`, or use a kernel that has them"
    return Check("capture", False, answer or "the probe ended early", remedy)


def _try_capture(sock: socket.socket) -> None:
    try:
        uid, gid = os.geteuid(), os.getegid()
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        netns.raise_loopback()
        netns.capture_everything()
        sock.send(b"ok")
    except OSError as error:
        # Where only bubblewrap may make user namespaces, the launcher's helper joins its, and this cannot be probed.
        allowed_to_bwrap_only = error.errno in (errno.EPERM, errno.EACCES) and "capture" not in str(error)
        sock.send(b"ok" if allowed_to_bwrap_only and _restricted_by_apparmor() else str(error).encode())
    finally:
        os._exit(0)


def _restricted_by_apparmor() -> bool:
    return _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1"


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
