"""Runs code that an AI agent wrote, each time in a fresh sandbox, and lets out only what a policy allows.

The names below are imported when they are first used: the launcher is a module of this package too, and must stay
small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.call_parsing import parse_call
    from sandbox.contract import CodeCall, InvalidCall, Status, ToolResult
    from sandbox.executor import Executor
    from sandbox.policy_file import InvalidPolicy
    from sandbox.settings import Settings
    from sandbox.sync import SyncExecutor

_HOME = {
    "CodeCall": "sandbox.contract",
    "Executor": "sandbox.executor",
    "InvalidCall": "sandbox.contract",
    "InvalidPolicy": "sandbox.policy_file",
    "Settings": "sandbox.settings",
    "Status": "sandbox.contract",
    "SyncExecutor": "sandbox.sync",
    "ToolResult": "sandbox.contract",
    "parse_call": "sandbox.call_parsing",
}

__all__ = [
    "CodeCall",
    "Executor",
    "InvalidCall",
    "InvalidPolicy",
    "Settings",
    "Status",
    "SyncExecutor",
    "ToolResult",
    "parse_call",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `sandbox` has no attribute `{name}`")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
