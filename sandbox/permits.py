"""What a call may do: the policy narrowed to it, with the registries of its language found out when first needed.

Owns: the answers of the package clients, asked for once. Must not: decide; that is `narrowing`, and for packages
`packages.screening`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from proxy.network import Grant, Mode
from proxy.packages.model import Ecosystem
from proxy.packages.requests import Registry
from sandbox import narrowing
from sandbox.contract import CodeCall
from sandbox.narrowing import Limits
from sandbox.packages.preparation import Wanted
from sandbox.packages.supply import Supply
from sandbox.policy_file import LoadedPolicy
from sandbox.registries import RegistryRules, resolve_registries


@dataclass(frozen=True, slots=True)
class Permit:
    """The limits and the grant of a call, whose attempts put their own ids into it; the packages to be prepared.

    `environment` is what package clients in an attempt are told.
    """

    limits: Limits
    grant: Grant
    wanted: Wanted | None
    environment: dict[str, str]


class Permits:
    """Gives calls what they may do under one policy. `registries` are those found so far, by language."""

    def __init__(self, policy: LoadedPolicy, supply: Supply, registries: dict[str, RegistryRules]) -> None:
        self._policy = policy
        self._supply = supply
        self._registries = registries

    async def narrow(self, call: CodeCall, call_id: str) -> Permit:
        """What a call may do.

        Raises `Refused`, `SnapshotFailed`, and `InvalidPolicy` when the registries that the policy leaves to the
        language's client cannot be found out.
        """
        limits = narrowing.narrow_limits(self._policy, timeout=call.timeout, memory_mib=call.memory_mib)
        grant = await self.grant(call, call_id)
        reads = grant.mode is Mode.REGISTRY_DEFAULT
        prepares = bool(call.packages) and self._policy.policy.packages.prepare
        registries = await self.registries_of(call.language) if reads or prepares else None
        wanted = None
        if call.packages:
            ecosystem = Ecosystem.of_language(call.language)
            wanted = await self._supply.screen(call_id, call.packages, registries, ecosystem)
        environment = _client_environment(registries.registry) if reads and registries is not None else {}
        return Permit(limits, grant, wanted, environment)

    async def grant(self, call: CodeCall, call_id: str) -> Grant:
        """What a call may do on the network, whatever else of it the policy refuses.

        Raises `Refused`, and `InvalidPolicy` as above.
        """
        allowed = self._policy.policy.network.modes
        reads = mode_asked(call) is Mode.REGISTRY_DEFAULT and Mode.REGISTRY_DEFAULT in allowed
        registries = await self.registries_of(call.language) if reads else None
        return narrowing.narrow(
            self._policy, registries, call_id=call_id, attempt_id="", language=call.language,
            allow_network=call.allow_network, domains=call.domains,
        )  # fmt: skip

    async def registries_of(self, language: str) -> RegistryRules:
        """The registries of a language. Raises `InvalidPolicy` when they cannot be found out."""
        if language not in self._registries:
            setting = self._policy.policy.network.registries
            self._registries[language] = await asyncio.to_thread(resolve_registries, setting, language)
        return self._registries[language]


def _client_environment(registry: Registry | None) -> dict[str, str]:
    """Which index an agent's own `pip install` or `npm install` asks: the one that it may read."""
    if registry is None:
        return {}
    index = str(registry.index)
    if registry.ecosystem is Ecosystem.NPM:
        return {"NPM_CONFIG_REGISTRY": index, "NPM_CONFIG_UPDATE_NOTIFIER": "false"}
    return {
        "PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index, "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",  # a distribution's pip would refuse; it cannot write there in any case
    }  # fmt: skip


def mode_asked(call: CodeCall) -> Mode:
    """The network mode that a call asks for, whether or not it may."""
    return narrowing.mode_of(allow_network=call.allow_network, domains=call.domains)
