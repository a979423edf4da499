"""The languages of attempts: the launch plan of a call in each, and what of the host their runtimes are.

Owns: which runtime a language has on this host. Must not: start anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sandbox.interpreters import this_interpreter, this_node
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import LaunchPlan, Workdir
from sandbox.runtimes import javascript, python
from sandbox.settings import Settings

LANGUAGES = ("python", "javascript")


class Languages:
    """What every attempt of an executor is planned with."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._interpreter = this_interpreter()
        try:
            self._node: javascript.Node | IsolationUnavailable = this_node()
        except IsolationUnavailable as error:  # kept for the call that asks for it
            self._node = error

    def plan(
        self, language: str, *, call_id: str, attempt: int, memory_bytes: int, call_environment: Mapping[str, str],
        packages: Path | None = None, workdir: Workdir | None = None,
    ) -> LaunchPlan:  # fmt: skip
        """The sandbox of one attempt; `packages` is the tree of a snapshot, in place of the settings' directory.

        It refuses what a sandbox with `workdir` must. Raises `IsolationUnavailable` if this host has no runtime for the
        language, or it is one whose runtime is started before it could be in a working directory.
        """
        if workdir is not None and language != "python":
            raise IsolationUnavailable(f"a call in a working directory is one in Python, not in `{language}`")
        plan = self._plan(language, call_id, attempt, memory_bytes, call_environment, packages)
        return plan if workdir is None else replace(plan, filter=workdir.filter)

    def _plan(
        self, language: str, call_id: str, attempt: int, memory_bytes: int, call_environment: Mapping[str, str],
        packages: Path | None,
    ) -> LaunchPlan:  # fmt: skip
        threads = self._settings.threads
        match language:
            case "python":
                packages = packages or self._settings.python_packages
                return python.plan(
                    self._interpreter, call_id=call_id, attempt=attempt, memory_bytes=memory_bytes,
                    call_environment=call_environment, packages=None if packages is None else str(packages),
                    threads=threads,
                )  # fmt: skip
            case "javascript":
                if isinstance(self._node, IsolationUnavailable):
                    raise IsolationUnavailable(str(self._node))
                return javascript.plan(
                    self._node, self._interpreter, call_id=call_id, attempt=attempt, memory_bytes=memory_bytes,
                    call_environment=call_environment, packages=None if packages is None else str(packages),
                    threads=threads,
                )  # fmt: skip
        raise IsolationUnavailable(f"there is no runtime for the language `{language}`")

    def readable(self) -> tuple[Path, ...]:
        """Directories of the host that the launcher must be able to show, besides Python's."""
        return () if isinstance(self._node, IsolationUnavailable) else (Path(self._node.directory),)
