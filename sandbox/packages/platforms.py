"""What artifacts are chosen for: the interpreter that attempts run on, this machine, and the resolvers' own places.

Owns: finding these out on this host. Must not: start anything.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox.interpreters import this_node
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import UV, ReadOnly
from sandbox.runtimes import javascript

_CPUS = {"x86_64": "x64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Platform:
    """`tags` are PEP 425's, the most wanted first. `tag` and `npm_tag` are short names of all that trees depend on.

    `node` and `npm` are paths in the sandbox. `mounts` are what the resolvers need of the host.
    """

    tag: str
    tags: tuple[str, ...]
    npm_tag: str
    npm_cpu: str
    npm_libc: str
    node: str
    npm: str
    mounts: tuple[ReadOnly, ...]

    def readable(self) -> tuple[Path, ...]:
        """What a launcher must be able to show, besides the store's snapshots."""
        return tuple(Path(mount.source) for mount in self.mounts)


class ResolverMissing(Exception):
    """A resolver is not installed. The message says how to get it."""


def this_platform() -> Platform:
    """Of this process's interpreter, which is also the one that attempts run on. Raises `ResolverMissing`."""
    from packaging.tags import sys_tags

    machine = platform.machine()
    cpu = _CPUS.get(machine, machine)
    libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
    node, npm, mounts = _npm()
    return Platform(
        tag=f"{sys.implementation.cache_tag}-{machine}",
        tags=tuple(map(str, sys_tags())),
        npm_tag=f"{cpu}-{libc}",
        npm_cpu=cpu,
        npm_libc=libc,
        node=node,
        npm=npm,
        mounts=(ReadOnly(_uv(), UV), *mounts),
    )


def _uv() -> str:
    try:
        from uv import find_uv_bin

        return os.path.realpath(find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        raise ResolverMissing("`uv` is not installed\nhint: install the Python package `uv`") from error


def _npm() -> tuple[str, str, tuple[ReadOnly, ...]]:
    """Node and npm's own program, as paths in the sandbox, and what they need of the host."""
    try:
        node = this_node()
    except IsolationUnavailable as error:
        raise ResolverMissing(str(error)) from error
    return javascript.EXECUTABLE, javascript.NPM, (ReadOnly(node.directory, javascript.RUNTIME),)
