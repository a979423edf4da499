"""What of the host no working directory may have in it: this program, and all that it reads and writes.

Who can write to the source of the launcher, to the policy, or to a directory that holds a link on the way to one, is
not confined by them. A working directory is judged by what the kernel calls it, a place of ours by every name on its
way, each time anew: links may be made and policies loaded meanwhile.
Owns: which places these are. Must not: open a working directory, or know calls.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from proxy.roots import host_ca_bundle
from sandbox.policy.packages import data_paths
from sandbox.policy.schema import Policy
from sandbox.state import InvalidSettings, shipped_policies

_MAX_LINKS = 40  # as the kernel has it
_ANOTHER = "name a directory that has nothing of sluicegate's own in it"
_OUTSIDE = (
    "name a directory without it, or install sluicegate outside, for example with `pipx` or `uv tool`, and start that"
)
_SAFE_PATH = "start the command `sluicegate`, or `python -P`, so that modules are not looked for there"
_CLIENTS = (  # files that tell pip and npm which registry is theirs, in the home directory
    ".npmrc", ".pip/pip.conf", ".config/pip/pip.conf",
)  # fmt: skip
_CLIENTS_BY_VARIABLE = ("PIP_CONFIG_FILE", "NPM_CONFIG_USERCONFIG", "npm_config_userconfig")
_SYSTEM = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys", "/usr",
    "/var/cache", "/var/lib", "/var/log", "/var/run", "/var/spool",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A path of ours, as it is written: absolute. `whole`: nothing below it may be a working directory, either."""

    path: Path
    what: str = "of sluicegate's own"
    hint: str = _ANOTHER
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """What a path goes through: `names` are all directories, links and the file on the way; `true` has no link."""

    names: tuple[str, ...]
    links: tuple[str, ...]
    true: str


def way_of(path: Path) -> Way:
    """The way that the kernel would go, as far as it is there; from there on as it is written."""
    names, links, here = [], [], "/"
    parts = deque(str(path).split("/"))
    while parts:
        part = parts.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        name = os.path.join(here, part)
        names.append(name)
        try:
            target = os.readlink(name)
        except OSError:
            here = name
            continue
        links.append(name)
        if len(links) > _MAX_LINKS:
            break
        if target.startswith("/"):
            here = "/"
        parts.extendleft(reversed(target.split("/")))
    return Way(tuple(names), tuple(links), here)


def installation() -> tuple[Place, ...]:
    """What this program is, and where Python looks for more of it."""
    import proxy
    import sandbox

    packages = [os.path.dirname(os.path.abspath(file)) for file in (sandbox.__file__, proxy.__file__) if file]
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    own = [Place(Path(path), "sluicegate itself", _OUTSIDE) for path in (*packages, str(shipped_policies()))]
    own += [Place(Path(path), "the Python that runs sluicegate", _OUTSIDE) for path in prefixes]
    own.append(Place(Path(sys.executable).absolute(), "the Python that runs sluicegate", _OUTSIDE, whole=False))
    # A project may lie below one, where sluicegate is installed from a checkout.
    looked_in = [Path(path).absolute() for path in sys.path]
    own += [Place(path, "where its modules are looked for", _SAFE_PATH, whole=False) for path in looked_in]
    return tuple(dict.fromkeys(own))


def settings_of_clients() -> tuple[Place, ...]:
    """What says which registries and authorities the host trusts, where a policy leaves that to the host."""
    home = Path.home() if os.environ.get("HOME", "").startswith("/") else None
    found = [home / name for name in _CLIENTS] if home is not None else []
    found += [Path(value) for name in _CLIENTS_BY_VARIABLE if (value := os.environ.get(name, "")).startswith("/")]
    if (bundle := host_ca_bundle()) is not None:
        found.append(bundle.absolute())
    return tuple(Place(path, "what says which registries or authorities are trusted", whole=False) for path in found)


def files_of(policy: Policy) -> tuple[Place, ...]:
    """What a policy names and is read again."""
    named = [*data_paths(policy.packages).values()]
    if policy.network.upstream.ca_file is not None:
        named.append(Path(policy.network.upstream.ca_file))
    return tuple(Place(path, "what the policy names") for path in named)


def check(root: str, places: Iterable[Place]) -> None:
    """Raises `InvalidSettings` if a directory, as the kernel calls it, is the system's or has one of the places."""
    for path in _SYSTEM:
        if _overlap(root, path) or _overlap(root, os.path.realpath(path)):
            raise InvalidSettings(
                f"`{root}` cannot be a working directory: it is the system's (`{path}`)\n"
                "hint: name the directory of a project"
            )
    numbers = _Numbers()
    own, above = numbers.of(root), numbers.upwards(root)
    for place in places:
        way = way_of(place.path)
        has = any(_is_in(name, root) for name in way.names)
        has = has or own in {one for name in way.names for one in numbers.upwards(name)}
        if has or (place.whole and (_is_in(root, way.true) or numbers.of(way.true) in above)):
            raise InvalidSettings(
                f"`{root}` cannot be a working directory: `{place.path}` ({place.what}) is in it, or it is in that\n"
                f"hint: {place.hint}"
            )


def _is_in(one: str, other: str) -> bool:
    return one == other or one.startswith(other.rstrip("/") + "/")


def _overlap(one: str, other: str) -> bool:
    return _is_in(one, other) or _is_in(other, one)


class _Numbers:
    """Directories by device and inode: one can be mounted at two places, and then has two names."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int] | None] = {}

    def of(self, path: str) -> tuple[int, int] | object:
        """Its number; of what is not there, something that is like nothing else."""
        if path not in self._known:
            self._known[path] = None
            with contextlib.suppress(OSError):
                status = os.stat(path)
                self._known[path] = (status.st_dev, status.st_ino)
        return self._known[path] or object()

    def upwards(self, path: str) -> set[object]:
        """Of a path without links, and of all above it."""
        found: set[object] = {self.of(path)}
        while path != "/":
            path = os.path.dirname(path)
            found.add(self.of(path))
        return found
