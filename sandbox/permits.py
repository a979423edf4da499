"""What a call may do: the policy narrowed to it, with the registries of its language found out when first needed.

Owns: the answers of the package clients, asked for once. Must not: decide; that is `narrowing`.
"""

from __future__ import annotations

import asyncio

from proxy.network import Grant, Mode
from sandbox import narrowing
from sandbox.contract import CodeCall
from sandbox.narrowing import Limits, Refused
from sandbox.policy_file import LoadedPolicy
from sandbox.registries import RegistryRules, resolve_registries


class Permits:
    """Gives calls their limits and grants under one policy."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self._policy = policy
        self._registries: dict[str, RegistryRules] = {}

    async def narrow(self, call: CodeCall, call_id: str) -> tuple[Limits, Grant]:
        """The limits and the grant of a call; an attempt puts its own id into the grant.

        Raises `Refused`, and `InvalidPolicy` when the registries that the policy leaves to the language's client cannot
        be found out.
        """
        if call.packages:
            raise Refused(
                "packages_unavailable",
                "the call names packages, and none can be prepared",
                layer="call", rule="packages", hint="leave `packages` out, and use what the runtime has",
            )  # fmt: skip
        limits = narrowing.narrow_limits(self._policy, timeout=call.timeout, memory_mib=call.memory_mib)
        grant = narrowing.narrow(
            self._policy, await self._registries_for(call), call_id=call_id, attempt_id="", language=call.language,
            allow_network=call.allow_network, domains=call.domains,
        )  # fmt: skip
        return limits, grant

    async def _registries_for(self, call: CodeCall) -> RegistryRules | None:
        network = self._policy.policy.network
        if mode_asked(call) is not Mode.REGISTRY_DEFAULT or Mode.REGISTRY_DEFAULT not in network.modes:
            return None
        if call.language not in self._registries:
            found = await asyncio.to_thread(resolve_registries, network.registries, call.language)
            self._registries[call.language] = found
        return self._registries[call.language]


def mode_asked(call: CodeCall) -> Mode:
    """The network mode that a call asks for, whether or not it may."""
    return narrowing.mode_of(allow_network=call.allow_network, domains=call.domains)
