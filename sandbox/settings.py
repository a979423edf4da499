"""What an embedding program chooses about an executor, as opposed to what a policy allows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.state import InvalidSettings, state_dir


@dataclass(frozen=True, slots=True)
class Settings:
    """`state_dir` holds the certificate authority, the ledger and, unless named elsewhere, the audit log.

    `audit_log` overrides the policy's `audit.path`. `python_packages` is a directory of installed packages that every
    Python attempt may import from; it is mounted read-only and searched after the standard library. `proxy_command`
    replaces the command that starts the proxy, for tests. `max_concurrency` bounds the calls that are worked on at
    once, and `max_waiting` those that wait for their turn. `warm_sandboxes` is how many sandboxes wait for the next
    call, each for one call (about 6 MiB with Python, 16 MiB with Node.js), for each of the last few plans that were
    asked for. `threads` is what numeric libraries in an attempt are told to use.
    """

    state_dir: Path = field(default_factory=state_dir)
    audit_log: Path | None = None
    python_packages: Path | None = None
    proxy_command: tuple[str, ...] | None = None
    max_concurrency: int = 16
    max_waiting: int = 1000
    warm_sandboxes: int = 1
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def __post_init__(self) -> None:
        """Raises `InvalidSettings`."""
        for name, lowest in (("max_concurrency", 1), ("max_waiting", 0), ("warm_sandboxes", 0), ("threads", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidSettings(f"`{name}` is `{value!a}`\nhint: give a whole number from {lowest} on")
        for name in ("state_dir", "audit_log", "python_packages"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Path):
                raise InvalidSettings(f"`{name}` is `{value!a}`\nhint: give a `pathlib.Path`")
