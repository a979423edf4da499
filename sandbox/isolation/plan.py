"""LaunchPlan: everything about one sandbox, as a value, and the bubblewrap arguments it means. Pure.

Owns: what is mounted, limited and set. Must not: look at this machine, or know a language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

WORKSPACE = "/workspace"
PACKAGES = "/opt/packages"
NODE_MODULES = "/node_modules"  # found from everywhere, by `require` and by `import` of ES modules alike
UV = "/opt/uv"  # in the sandboxes of preparations
INIT = "/run/init.pyc"  # in the skeleton, as is the next
GATE = "/run/gate.cjs"
NODE_COMMANDS = "/run/bin"
PYTHON_COMMANDS = "/run/python"
SANDBOX_UID = 1000
SANDBOX_GID = 1000
MIB = 1024 * 1024
_LEAST_ROOM_BYTES = MIB  # of a directory that is nearly full: what a program needs for its temporary files


class Filter(StrEnum):
    """Which system calls a sandbox refuses; each refuses what the one before does, and more (`seccomp.py`)."""

    COMMON = "common"
    NO_UNIX_SOCKETS = "no-unix-sockets"  # where sockets of the host's programs may lie in the working directory
    NO_GROWTH = "no-growth"  # where the working directory is full: it can be read and emptied, and nothing else


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """A tree of the host, mounted read-only. `target` must exist in the skeleton or below an earlier mount."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """An empty writable file system. When either limit is reached, writers get ENOSPC."""

    target: str
    size_bytes: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Rlimits:
    """Per process, soft and hard alike. `core` is always 0.

    `nproc` counts per user namespace, so sandboxes do not share it. `data_bytes` is for machines where memory is
    sampled: it stops a single process before the next sample. Never RLIMIT_AS: it breaks runtimes that reserve much.
    """

    nofile: int = 1024  # also bounds the descriptors on their way in sockets, see `privilege.raise_descriptor_limit`
    nproc: int = 256
    fsize_bytes: int = 1024 * MIB
    data_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One sandbox. `argv` starts pid 1 and goes on with numbers of descriptors, which the launcher appends.

    `program` is the runtime that pid 1 starts, before there is a call, with `start_environment` and no more; it ends
    with a gate, where it waits for the call (`gate.cjs`). Without one, the program is a fork of pid 1's own Python,
    and has pid 1's environment. `main` is the file that the code is written to.

    `environment` is pid 1's; `call_environment` is what the call gave, set only in the program's own process, so that
    it can influence neither bubblewrap nor pid 1. `arguments` are the program's own (`sys.argv[1:]`). `packages` is a
    host directory, put at `/opt/packages` and at the end of the module path.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    main: str
    read_only: tuple[ReadOnly, ...]
    memory_bytes: int
    pids: int = 128
    program: tuple[str, ...] = ()
    start_environment: Mapping[str, str] = field(default_factory=dict)
    call_environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    packages: str | None = None
    tmpfs: tuple[Tmpfs, ...] = (
        Tmpfs(WORKSPACE, 256 * MIB, 65_536),
        Tmpfs("/tmp", 256 * MIB, 65_536),  # noqa: S108 - inside the sandbox
        Tmpfs("/dev/shm", 128 * MIB, 4_096),  # noqa: S108
    )
    rlimits: Rlimits = Rlimits()
    filter: Filter = Filter.COMMON
    hostname: str = "sandbox"

    def mounts(self) -> tuple[ReadOnly, ...]:
        """All read-only trees, in the order in which they are mounted."""
        if self.packages is None:
            return self.read_only
        return (*self.read_only, ReadOnly(self.packages, PACKAGES))

    def as_message(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Workdir:
    """A directory of the host's that one call has writable at `/workspace`, and where in it its code is run.

    `directory` is below it, empty for itself; the code is written there to `script`, a name without a slash. The two
    descriptors are of `root` and of `directory`; whoever made the value keeps them open for as long as it is used.
    `root` itself is for messages. `max_bytes` and `max_files` bound what the tree may hold; None is no limit.

    `client` tells a directory that the host's own programs use, too. `room_bytes` is what was left of `max_bytes` when
    it was last counted: no file is made longer than that. `full`: nothing is left, so that the code may only read and
    remove, and no script is written.
    """

    root: Path
    directory: str
    script: str
    root_fd: int
    directory_fd: int
    max_bytes: int | None = None
    max_files: int | None = None
    client: bool = False
    room_bytes: int | None = None
    full: bool = False

    @property
    def filter(self) -> Filter:
        """What a sandbox with this directory refuses."""
        if self.full:
            return Filter.NO_GROWTH
        return Filter.NO_UNIX_SOCKETS if self.client else Filter.COMMON

    @property
    def max_file_bytes(self) -> int | None:
        """How long the code may make a file; None for as long as any attempt may."""
        if self.full:
            return 0
        return None if self.room_bytes is None else max(self.room_bytes, _LEAST_ROOM_BYTES)

    @property
    def inside(self) -> str:
        """`directory`, as the code sees it."""
        return f"{WORKSPACE}/{self.directory}" if self.directory else WORKSPACE

    @property
    def main(self) -> str:
        """The script, as the code sees it."""
        return f"{self.inside}/{self.script}"


def without_call(plan: LaunchPlan) -> LaunchPlan:
    """The plan less what belongs to one call: what a sandbox can be prepared from before its call is known."""
    return replace(plan, call_environment={}, arguments=())


def plan_from_message(message: object) -> LaunchPlan:
    """The inverse of `as_message`, after JSON."""
    data = dict(cast("dict[str, object]", message))
    for key, kind in (("read_only", ReadOnly), ("tmpfs", Tmpfs)):
        data[key] = tuple(kind(**item) for item in cast("list[dict[str, object]]", data[key]))  # type: ignore[arg-type]
    data["filter"] = Filter(cast(str, data["filter"]))
    data["rlimits"] = Rlimits(**cast("dict[str, int]", data["rlimits"]))
    for key in ("argv", "program", "arguments"):
        data[key] = tuple(cast("list[str]", data[key]))
    return LaunchPlan(**data)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Numbers of inherited descriptors. `for_init` are those that pid 1 is told, in its own order."""

    info: int
    seccomp: int
    for_init: tuple[int, ...]


def bwrap_argv(
    plan: LaunchPlan,
    *,
    root: str,
    system_mounts: tuple[ReadOnly, ...],
    descriptors: Descriptors,
    locate: Callable[[str], str] = str,
) -> list[str]:
    """bubblewrap's arguments, without its own name.

    `root` is the skeleton: it has every mount point, so that the sandbox's root can be read-only too; bubblewrap's own
    root would be a writable tmpfs without limit. `locate` says where the launcher sees a host path.
    """
    argv = [
        "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup",
        "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_GID), "--hostname", plan.hostname,
        "--disable-userns",  # only takes effect with an explicit --unshare-user
        "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1",
        "--ro-bind", root, "/",
    ]  # fmt: skip
    for mount in (*system_mounts, *plan.mounts()):
        argv += ["--ro-bind", locate(mount.source), mount.target]
    # The launcher's uid owns nothing in /proc/sys unless it is 0, which it never is: the bind is the second lock.
    argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    for tmpfs in plan.tmpfs:
        argv += ["--perms", "1777" if tmpfs.target != WORKSPACE else "0755", "--size", str(tmpfs.size_bytes)]
        argv += ["--tmpfs", tmpfs.target]
    argv += ["--remount-ro", "/dev"]  # else a writable tmpfs without limit
    argv += ["--chdir", WORKSPACE, "--clearenv"]
    for name, value in plan.environment.items():
        argv += ["--setenv", name, value]
    argv += ["--seccomp", str(descriptors.seccomp), "--info-fd", str(descriptors.info), "--"]
    argv += [*plan.argv, *map(str, descriptors.for_init)]
    if plan.program:
        argv += ["--", *(f"{name}={value}" for name, value in plan.start_environment.items()), "--", *plan.program]
    return argv
