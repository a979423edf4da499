"""`sluicegate doctor`: is this host able to confine an attempt fully, and does it?

First each thing that the confinement needs is checked (`isolation.probe`), and each language's runtime in a sandbox
(`runtime_probe`). Then one attempt without network runs probes
that must all fail, and the audit log must show that their denials were written.
Owns: the list of checks and what proves them. Must not: weaken anything to make a check pass.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from proxy.audit_reader import Line, read
from proxy.control import ProxyUnavailable
from proxy.network import Mode, Reason
from sandbox.contract import CodeCall, Status, ToolResult
from sandbox.executor import Executor
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.probe import Check, check_host
from sandbox.languages import LANGUAGES, Languages
from sandbox.policy_file import InvalidPolicy, LoadedPolicy, load_policy, parse_policy
from sandbox.registries import resolve_registries
from sandbox.runtime_probe import check_runtimes
from sandbox.settings import Settings

_CANARY = "SLUICEGATE_DOCTOR_CANARY"

# Runs inside the attempt. It prints one JSON object: the probe's name, and what it saw; every probe must be refused.
_PROBES = r"""
import json, os, socket, urllib.error, urllib.request

def outcome(probe):
    try:
        return probe()
    except OSError as error:
        return f"refused: {type(error).__name__}: {error}"

def exchange(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(5)
        s.connect(address)
        s.sendall(b"probe\r\n\r\n")
        data = s.recv(64)
        if not data:
            raise ConnectionResetError("closed without an answer")
        return f"answered: {data!r}"

def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        s.connect(("198.51.100.7", 9))
        s.send(b"probe")
        s.send(b"probe")
        return f"answered: {s.recv(64)!r}"

def connect():
    with socket.create_connection(("127.0.0.1", 3128), 5) as s:
        s.sendall(b"CONNECT doctor.invalid:8443 HTTP/1.1\r\nHost: doctor.invalid:8443\r\n\r\n")
        head = s.recv(4096).split(b"\r\n")[0].decode("latin-1")
    if " 403 " not in head:
        return f"answered: {head}"
    raise PermissionError(head)

def status(key):
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith(key + ":"))

print(json.dumps({
    "tcp over IPv4": outcome(lambda: exchange(socket.AF_INET, ("198.51.100.7", 9))),
    "tcp over IPv6": outcome(lambda: exchange(socket.AF_INET6, ("2001:db8::7", 9))),
    "udp": outcome(datagram),
    "dns": outcome(lambda: f"answered: {socket.getaddrinfo('doctor.invalid', 443)}"),
    "a denied CONNECT": outcome(connect),
    "host files": outcome(lambda: open("/etc/shadow").read() and "answered: /etc/shadow was read"),
    "interfaces": sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "uid": os.getuid(),
    "CapEff": status("CapEff"),
    "CapBnd": status("CapBnd"),
    "NoNewPrivs": status("NoNewPrivs"),
    "Seccomp": status("Seccomp"),
    "canary": [name for name in os.environ if "CANARY" in name],
}))
"""


@dataclass(frozen=True, slots=True)
class Report:
    """Every check in order, and what the policy leaves to the host."""

    checks: tuple[Check, ...]
    facts: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> str:
        return json.dumps(
            {"ok": self.ok, "checks": [asdict(check) for check in self.checks], "facts": list(self.facts)}, indent=2
        )

    def to_text(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
            if not check.ok and check.remedy:
                lines += [f"      hint: {line}" for line in check.remedy.splitlines()]
        lines += [f"info  {fact}" for fact in self.facts]
        lines.append(
            "an attempt is fully confined on this host" if self.ok else "an attempt would be refused on this host"
        )
        return "\n".join(lines) + "\n"


async def examine(policy_path: Path) -> Report:
    """Run all checks under a policy. Raises `InvalidPolicy`."""
    policy = load_policy(policy_path)
    checks = check_host()
    if all(check.ok for check in checks):
        checks += await check_runtimes(Languages(Settings()))
    facts = [f"policy `{policy.policy.name}` ({policy.path}), modes {', '.join(policy.policy.network.modes)}"]
    if Mode.REGISTRY_DEFAULT in policy.policy.network.modes:
        checks += [await _check_registries(policy, language, facts) for language in LANGUAGES]
    if all(check.ok for check in checks):
        checks += await _check_attempt(policy, facts)
    return Report(tuple(checks), tuple(facts))


async def _check_registries(policy: LoadedPolicy, language: str, facts: list[str]) -> Check:
    name = f"registry of {language}"
    try:
        registries = await asyncio.to_thread(resolve_registries, policy.policy.network.registries, language)
    except InvalidPolicy as error:
        return Check(name, False, str(error), "name it under `network.registries` in the policy file")
    facts += [f"registry of {language} `{host.host}:{host.port}`, from {host.source}" for host in registries.hosts]
    facts += [f"warning: {warning}" for warning in registries.warnings]
    return Check(name, True, f"{len(registries.hosts)} host(s) for registry-default", "")


async def _check_attempt(policy: LoadedPolicy, facts: list[str]) -> list[Check]:
    os.environ[_CANARY] = secrets.token_hex(8)
    try:
        settings = Settings()
        settings = replace(settings, audit_log=settings.state_dir / policy.policy.audit.path)
        # Under a policy of its own: the probes are made without network, which the operator's policy need not allow.
        async with Executor(parse_policy("version: 1\nname: doctor\n"), settings=settings) as executor:
            facts.append(f"audit log {executor.audit_path}")
            result = await executor.run(CodeCall(language="python", code=_PROBES, timeout=30))
            facts.append(
                f"memory limit by {result.attempts[-1].memory_method}" if result.attempts else "no attempt ran"
            )
            return [*_judge(result), _check_audit(executor.audit_path, result)]
    except (IsolationUnavailable, ProxyUnavailable) as error:
        return [Check("attempt", False, str(error), "see the checks above and the message itself")]
    finally:
        del os.environ[_CANARY]


def _judge(result: ToolResult) -> list[Check]:
    if result.status is not Status.SUCCESS:
        why = result.error.message if result.error else result.status.value
        return [Check("attempt", False, f"the probes did not run: {why} {result.stderr[-300:]}", "")]
    seen = json.loads(result.stdout)
    checks = [
        Check(f"probe: {name}", str(seen[name]).startswith("refused"), str(seen[name]), _ESCAPED)
        for name in ("tcp over IPv4", "tcp over IPv6", "udp", "dns", "a denied CONNECT", "host files")
    ]
    for name, ok in (
        ("interfaces", seen["interfaces"] == ["lo"]),
        ("processes", len(seen["processes"]) <= 3 and 1 in seen["processes"]),
        ("uid", seen["uid"] != 0),
        ("CapEff", int(seen["CapEff"], 16) == 0),
        ("CapBnd", int(seen["CapBnd"], 16) == 0),
        ("NoNewPrivs", seen["NoNewPrivs"] == "1"),
        ("Seccomp", seen["Seccomp"] == "2"),
        ("canary", seen["canary"] == []),
    ):
        checks.append(Check(f"probe: {name}", ok, str(seen[name]), _ESCAPED))
    quiet = result.network.allowed == 0
    checks.append(Check("probe: nothing allowed", quiet, f"{result.network.denied} requests denied", _ESCAPED))
    return checks


_ESCAPED = "this must not happen: report it, and do not run untrusted code on this host"


def _check_audit(path: Path, result: ToolResult) -> Check:
    lines = [line for line in read(path, call_id=result.call_id, denied=True) if isinstance(line, Line)]
    reasons = {str(line.fields.get("reason")) for line in lines}
    ok = Reason.NETWORK_OFF.value in reasons
    return Check(
        "audit log", ok, f"{len(lines)} denials of the probes are in `{path}`",
        "the log does not show what was denied: see that its file is not replaced or cut while Sluicegate runs",
    )  # fmt: skip
