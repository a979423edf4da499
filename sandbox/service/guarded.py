"""What of the host this service has beside its program, as the policy in force names it. Owns: the list."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sandbox.executor import Executor
from sandbox.protected import Place, files_of


def places_of(executor: Executor, more: Iterable[Path]) -> tuple[Place, ...]:
    """Looked up each time that it is asked for: policies are loaded anew. `more` are the service's own files."""
    found = [Place(executor.audit_path.absolute(), "the audit log"), *files_of(executor.policy.policy)]
    found += [Place(path) for path in more]
    if executor.policy.path is not None:
        found.append(Place(executor.policy.path.absolute(), "the policy"))
    if executor.settings.python_packages is not None:
        found.append(Place(executor.settings.python_packages.absolute(), "packages of every call"))
    found += [Place(path, "a runtime that calls are run with") for path in executor.readable]
    return tuple(found)
