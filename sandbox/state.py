"""Where things lie: the directory of what this host keeps between runs, and the policies that came with the program.

Owns: these paths. Must not: know what lies in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

AUDIT_NAME = "audit.jsonl"


class InvalidSettings(Exception):
    """The environment, or an option of the operator's, says something that can't be."""


def state_dir(environment: Mapping[str, str] | None = None) -> Path:
    """`$SLUICEGATE_STATE_DIR`, else `$XDG_STATE_HOME/sluicegate`, else `~/.local/state/sluicegate`.

    Of this process's environment, or the given one. A relative `$XDG_STATE_HOME` is ignored, as the XDG Base Directory
    Specification says; a relative directory of our own is an error, since it would move with the working directory.

    Raises `InvalidSettings`.
    """
    environment = os.environ if environment is None else environment
    if own := environment.get("SLUICEGATE_STATE_DIR"):
        if not own.startswith("/"):
            raise InvalidSettings(f"`SLUICEGATE_STATE_DIR` is `{own!a}`\nhint: give an absolute path")
        return Path(own)
    base = environment.get("XDG_STATE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "sluicegate"
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        raise InvalidSettings("there is no state directory without a home\nhint: set `SLUICEGATE_STATE_DIR`")
    return Path(home) / ".local" / "state" / "sluicegate"


def default_socket(environment: Mapping[str, str] | None = None) -> Path:
    """Where the service listens, and its clients look, when they are told nothing else. Raises `InvalidSettings`."""
    environment = os.environ if environment is None else environment
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) / "sluicegate" if runtime.startswith("/") else state_dir(environment) / "run"
    return base / "sluicegate.sock"


def audit_path(configured: str | None = None, directory: Path | None = None) -> Path:
    """The audit log: a policy's `audit.path`, which is relative to the state directory, or its default there.

    Raises `InvalidSettings`.
    """
    name = configured or AUDIT_NAME
    return Path(name) if name.startswith("/") else (directory or state_dir()) / name


def shipped_policies() -> Path:
    """The directory of the policies that come with the program: in the package once installed, else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_policies"
    return installed if installed.is_dir() else package.parent / "configs" / "policies"
