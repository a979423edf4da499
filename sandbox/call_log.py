"""Calls in the audit log: what was refused before any attempt, and what was lost with its executor; and new policies.

Owns: those three kinds of line. The proxy writes all others; the log takes lines of several processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from proxy.audit import AuditLog, AuditUnavailable
from proxy.events import CallEvent, DecisionEvent, Event, PolicyEvent
from proxy.network import Verdict
from sandbox.contract import CodeCall
from sandbox.ledger import Entry
from sandbox.narrowing import Refused
from sandbox.policy_file import LoadedPolicy

LAYER = "call"
_log = logging.getLogger("sluicegate")


async def report_refusal(path: Path, policy: LoadedPolicy, call_id: str, call: CodeCall, refused: Refused) -> str:
    """Write that the call was refused, with the code and the rule. Returns what to tell the caller of the refusal."""
    event = DecisionEvent(
        time=time.time(),
        call_id=call_id,
        tenant=policy.tenant,
        attempt_id="",
        layer=LAYER,
        protocol=LAYER,
        host=", ".join(call.domains or ()),
        decision=Verdict.DENY.value,
        reason=refused.code,
        rule=refused.rule,
        detail=refused.message,
        policy_name=policy.policy.name,
        policy_digest=policy.digest,
    )
    try:
        await asyncio.to_thread(_write, path, [event])
    except AuditUnavailable as error:
        return f"{refused}\nthis refusal is not in the audit log: {error}"
    return str(refused)


async def report_lost(path: Path, lost: Sequence[Entry]) -> None:
    """Write which calls ended with their executor, so that nobody waits for them."""
    events = [
        CallEvent(
            time=time.time(), call_id=entry.call_id, tenant=entry.owner.tenant, what="lost", started_at=entry.started_at
        )
        for entry in lost
    ]
    for entry in lost:
        _log.warning("call %s was lost: its executor ended while it ran", entry.call_id)
    try:
        await asyncio.to_thread(_write, path, events)
    except AuditUnavailable as error:
        _log.warning("%d lost calls are not in the audit log: %s", len(lost), error)


async def report_policy(path: Path, old: LoadedPolicy, new: LoadedPolicy | None, detail: str = "") -> None:
    """Write that another policy is in force; with `detail`, why it is not (`new` is None where it is no policy)."""
    event = PolicyEvent(
        time=time.time(),
        what="rejected" if detail else "reloaded",
        old_digest=old.digest,
        new_digest=None if new is None else new.digest,
        detail=detail,
    )
    try:
        await asyncio.to_thread(_write, path, [event])
    except AuditUnavailable as error:
        _log.warning("what became of a new policy is not in the audit log: %s", error)


def _write(path: Path, events: Sequence[Event]) -> None:
    if not events:
        return
    with AuditLog(path) as log:
        for event in events:
            log.write(event)
