"""The story of one call, top to bottom.

A call comes in, decoded and checked (`contract`). The policy narrows it to limits and a grant, or refuses it before
any attempt (`narrowing`). The backend has the launcher and the proxy up. The launch plan is made; the attempt runs
(`attempt`); what was observed becomes the one result.

Processes: the executor (this one) starts the proxy and the launcher; the launcher alone starts sandboxes. When the
executor dies, the closed sockets end both, and the launcher takes its sandboxes with it. When the launcher dies, its
sandboxes die with it. When the proxy dies, no sandbox has network, and the attempts that run are ended and reported.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from proxy.audit import AuditUnavailable
from proxy.control import ProxyUnavailable
from proxy.network import Mode
from sandbox import narrowing, results
from sandbox.attempt import AttemptSpec, Sink, run_attempt
from sandbox.backend import Backend
from sandbox.contract import CodeCall, ToolResult
from sandbox.interpreters import this_interpreter
from sandbox.isolation.client import IsolationUnavailable
from sandbox.narrowing import Refused
from sandbox.policy_file import LoadedPolicy, load_policy
from sandbox.refusals import record_refusal
from sandbox.registries import RegistryRules, resolve_registries
from sandbox.runtimes import python
from sandbox.settings import Settings


class Executor:
    """Runs calls under one policy. Use it as an asynchronous context manager; calls may run concurrently.

    Raises `InvalidPolicy` when it is made from a file that is none.
    """

    def __init__(self, policy: Path | LoadedPolicy, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.policy = policy if isinstance(policy, LoadedPolicy) else load_policy(policy)
        self.audit_path = self.settings.audit_log or self.settings.state_dir / self.policy.policy.audit.path
        self._backend = Backend(
            self.settings, audit_path=self.audit_path, upstream_ca_file=self.policy.policy.network.upstream.ca_file
        )
        self._entered = False
        self._registries: RegistryRules | None = None
        self._interpreter = this_interpreter()
        self._packages = None if self.settings.python_packages is None else str(self.settings.python_packages)
        self._slots = asyncio.Semaphore(self.settings.max_concurrency)

    async def __aenter__(self) -> Self:
        """Start the proxy and the launcher. Raises `IsolationUnavailable`, `ProxyUnavailable`."""
        try:
            await self._backend.ready()
        except BaseException:
            await self._backend.close()
            raise
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        await asyncio.shield(self._backend.close())

    @property
    def launcher_pid(self) -> int | None:
        return self._backend.launcher_pid

    @property
    def proxy_pid(self) -> int | None:
        return self._backend.proxy_pid

    async def run(self, call: CodeCall, stdout_sink: Sink | None = None, stderr_sink: Sink | None = None) -> ToolResult:
        """Answer one call. Whatever happens inside is in the result; the sinks see the output's bytes as they come.

        Raises only what is this side's fault and no attempt's: `InvalidPolicy` when the registries that the policy
        leaves to the language's client cannot be found out, `RuntimeError` outside the executor's `async with`.
        """
        if not self._entered:
            raise RuntimeError("an `Executor` runs calls inside its `async with` statement only")
        call_id = f"call-{secrets.token_hex(8)}"
        attempt_id = f"{call_id}.1"
        try:
            limits = narrowing.narrow_limits(self.policy, timeout=call.timeout, memory_mib=call.memory_mib)
            grant = narrowing.narrow(
                self.policy, await self._registries_for(call), call_id=call_id, attempt_id=attempt_id,
                language=call.language, allow_network=call.allow_network, domains=call.domains,
            )  # fmt: skip
        except Refused as refused:
            return await self._refuse(call_id, call, refused)
        spec = AttemptSpec(
            plan=python.plan(
                self._interpreter, call_id=call_id, attempt=1, memory_bytes=limits.memory_bytes,
                call_environment=call.env, packages=self._packages, threads=self.settings.threads,
            ),
            grant=grant,
            code=call.code.encode(),
            language=call.language,
            domains=None if call.domains is None else tuple(call.domains),
            wall_seconds=limits.timeout_seconds,
            stdout_sink=stdout_sink,
            stderr_sink=stderr_sink,
        )  # fmt: skip
        async with self._slots:
            try:
                pool, proxy = await self._backend.ready()
            except IsolationUnavailable as error:
                return results.without_attempt(call_id, grant.mode.value, "isolation_unavailable", str(error))
            except ProxyUnavailable as error:
                return results.without_attempt(call_id, grant.mode.value, "proxy_unavailable", str(error))
            outcome = await run_attempt(spec, pool, proxy)
        return results.from_outcome(call_id, grant.mode, outcome, memory_method=pool.launcher.memory_method)

    async def _refuse(self, call_id: str, call: CodeCall, refused: Refused) -> ToolResult:
        message = str(refused)
        try:
            await asyncio.to_thread(record_refusal, self.audit_path, self.policy, call_id, call, refused)
        except AuditUnavailable as error:
            message += f"\nthis refusal is not in the audit log: {error}"
        return results.without_attempt(call_id, _mode_asked(call), "policy_refused", message)

    async def _registries_for(self, call: CodeCall) -> RegistryRules | None:
        """The language's registries, asked for once and only by a call that needs them."""
        if (
            _mode_asked(call) is not Mode.REGISTRY_DEFAULT
            or Mode.REGISTRY_DEFAULT not in self.policy.policy.network.modes
        ):
            return None
        if self._registries is None:
            self._registries = await asyncio.to_thread(
                resolve_registries, self.policy.policy.network.registries, call.language
            )
        return self._registries


def _mode_asked(call: CodeCall) -> Mode:
    return narrowing.mode_of(allow_network=call.allow_network, domains=call.domains)
