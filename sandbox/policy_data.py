"""The files that a policy's `packages:` section names: whether they are there, and are what they should be.

Owns: these looks. Must not: load a database of advisories; whoever judges does, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.packages.data_files import InvalidData, advisory_files, read_list
from proxy.packages.model import Ecosystem
from sandbox.policy.packages import PackagesSection, data_paths
from sandbox.policy.problems import shown


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with a file; `key` is where the section names it."""

    key: tuple[str, ...]
    message: str
    hint: str


def package_files(section: PackagesSection) -> Iterator[FileProblem]:
    """Everything without which each package would be refused later."""
    for key, path in data_paths(section).items():
        if key[0] == "advisories":
            if (message := _no_database(path)) is not None:
                yield FileProblem(key, message, "write the directory of an OSV database: `*.json` or `*.zip` files")
            continue
        try:
            read_list(path, Ecosystem(key[-1]))
        except InvalidData as error:
            hint = "write one name a line, the most used first; `sluicegate packages popular` makes such a file"
            yield FileProblem(key, error.problems[0], hint)


def _no_database(path: Path) -> str | None:
    if not path.is_dir():
        return f"`{shown(str(path))}` " + ("is no directory" if path.exists() else "does not exist")
    try:
        return None if advisory_files(path) else f"`{shown(str(path))}` has no OSV documents"
    except OSError as error:
        return f"`{shown(str(error.filename or path))}` cannot be read: {error.strerror}"
