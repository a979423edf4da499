"""A call refused before any attempt, in the audit log: what code may not do says who tried.

Owns: that one line. The proxy writes all others; the log takes lines of several processes.
"""

from __future__ import annotations

import time
from pathlib import Path

from proxy.audit import AuditLog
from proxy.events import DecisionEvent
from proxy.network import Verdict
from sandbox.contract import CodeCall
from sandbox.narrowing import Refused
from sandbox.policy_file import LoadedPolicy

LAYER = "call"


def record_refusal(path: Path, policy: LoadedPolicy, call_id: str, call: CodeCall, refused: Refused) -> None:
    """Write that the call was refused, with the code and the rule of the refusal. Raises `AuditUnavailable`."""
    with AuditLog(path) as log:
        log.write(
            DecisionEvent(
                time=time.time(),
                call_id=call_id,
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
        )
