"""Runs code that an AI agent wrote, each time in a fresh sandbox, and lets out only what a policy allows.

The names below are imported when they are first used: the launcher is a module of this package too, and must stay
small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.control import ProxyUnavailable
    from sandbox.call_parsing import parse_call
    from sandbox.calls import RunningCall
    from sandbox.contract import Cause, CodeCall, InvalidCall, Status, ToolResult
    from sandbox.executor import Executor
    from sandbox.isolation.client import IsolationUnavailable
    from sandbox.ledger import LedgerUnavailable
    from sandbox.policy_file import InvalidPolicy
    from sandbox.settings import Settings
    from sandbox.state import InvalidSettings
    from sandbox.sync import SyncExecutor, SyncRunningCall

_HOME = {
    "Cause": "sandbox.contract",
    "CodeCall": "sandbox.contract",
    "Executor": "sandbox.executor",
    "InvalidCall": "sandbox.contract",
    "InvalidPolicy": "sandbox.policy_file",
    "InvalidSettings": "sandbox.state",
    "IsolationUnavailable": "sandbox.isolation.client",
    "LedgerUnavailable": "sandbox.ledger",
    "ProxyUnavailable": "proxy.control",
    "RunningCall": "sandbox.calls",
    "Settings": "sandbox.settings",
    "Status": "sandbox.contract",
    "SyncExecutor": "sandbox.sync",
    "SyncRunningCall": "sandbox.sync",
    "ToolResult": "sandbox.contract",
    "parse_call": "sandbox.call_parsing",
}

__all__ = [
    "Cause",
    "CodeCall",
    "Executor",
    "InvalidCall",
    "InvalidPolicy",
    "InvalidSettings",
    "IsolationUnavailable",
    "LedgerUnavailable",
    "ProxyUnavailable",
    "RunningCall",
    "Settings",
    "Status",
    "SyncExecutor",
    "SyncRunningCall",
    "ToolResult",
    "parse_call",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `sandbox` has no attribute `{name}`")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
