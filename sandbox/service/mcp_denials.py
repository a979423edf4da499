"""What a run was denied, each with the rule that says so, as far as that can be told.

A result counts destinations and has their reasons; the rules are in the audit log, which callers don't see. So the
policy now in force is asked what it would say of the same destination, and believed where it gives the same reason.

Owns: that question. Must not: decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.network import Mode
from sandbox.contract import DestinationCount, ToolResult
from sandbox.owners import Caller
from sandbox.service.mcp_answers import ANSWERED_ERRORS, MAX_DENIED
from sandbox.service.mcp_views import Denied
from sandbox.service.service import Service

_HTTPS = 443


async def denied_of(
    service: Service, caller: Caller, result: ToolResult, language: str, domains: Sequence[str] | None
) -> list[Denied]:
    """The first destinations that were denied. `domains` are those that the call named; None: that is not known."""
    rows = [row for row in result.network.destinations if row.decision == "deny"][:MAX_DENIED]
    mode, policy = result.network.mode, service.loaded.policy.name
    found = []
    for row in rows:
        rule = None
        if mode != Mode.NAMED or domains is not None:
            rule = await _rule(service, caller, row, language, Mode(mode), domains)
        found.append(Denied(host=row.host, port=row.port, reason=row.reason, policy=policy, rule=rule, count=row.count))
    return found


async def _rule(
    service: Service, caller: Caller, row: DestinationCount, language: str, mode: Mode, domains: Sequence[str] | None
) -> str | None:
    host = f"[{row.host}]" if ":" in row.host else row.host
    try:
        explained = await service.explain(
            caller, f"{host}:{row.port or _HTTPS}", language=language, allow_network=mode is not Mode.BLOCK_ALL,
            domains={Mode.NAMED: domains, Mode.UNRESTRICTED: []}.get(mode),
        )  # fmt: skip
    except ANSWERED_ERRORS:
        return None  # then the reason alone is told
    return explained.rule if explained.reason == row.reason else None
