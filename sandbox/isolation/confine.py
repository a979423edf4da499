"""What a launcher does once, before its first sandbox: filter, skeleton, cgroups, and giving up its privileges.

Owns: the order of these steps. Must not: start anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from proxy.channel import Message
from proxy.directories import make_private
from sandbox.isolation import cgroups, orphans, privilege, seccomp, skeleton
from sandbox.isolation.memory import V1, V2, Accounting
from sandbox.isolation.plan import Filter, ReadOnly

_DIRECTORY_PREFIX = "sluicegate-launcher-"


@dataclass(frozen=True, slots=True)
class Confinement:
    """What every sandbox of this launcher is started with."""

    bwrap: str
    skeleton: str
    system_mounts: tuple[ReadOnly, ...]
    seccomp: Mapping[Filter, bytes]
    accounting: Accounting
    locate: Callable[[str], str]
    leftovers: list[str]  # cgroup directories that whoever started the launcher removes after it
    clean_up: Callable[[], None]


def confine(config: Message, parent: int) -> Confinement:
    """Apply `client.LauncherConfig`, as a message. Raises `OSError`, and `ImportError` without libseccomp."""
    bwrap = shutil.which(cast(str, config["bwrap"]), path="/usr/bin:/bin:/usr/local/bin")
    if bwrap is None:
        raise FileNotFoundError("`bwrap` is not installed; hint: install the package `bubblewrap`")
    certificate = cast("str | None", config["authority_certificate"])
    readable = cast("list[str]", config["readable"])
    is_root = os.geteuid() == 0
    uid = privilege.choose_uid(os.getpid(), Path("/proc/self/uid_map").read_text()) if is_root else os.geteuid()
    gid = uid if is_root else os.getegid()
    orphans.end_orphans()
    subtree = cgroups.make_subtree(uid, gid) if config["memory_method"] == "auto" else None
    if subtree is None:
        from sandbox.isolation import sampling  # noqa: F401 - now: in the private root no module can be read
    filters = {kind: seccomp.build_filter(kind, deny_unseen_memory=subtree is None) for kind in Filter}
    leftovers = list(subtree.directories.values()) if subtree else []
    try:
        if is_root:
            result = _as_root(bwrap, certificate, readable, subtree, filters, uid, parent)
        else:
            result = _as_user(bwrap, certificate, Path(cast(str, config["state_dir"])), subtree, filters, parent)
    except BaseException:
        for directory in leftovers:
            cgroups.remove_tree(directory)
        raise
    gc.freeze()  # forks share what is there now
    return result


def _accounting(subtree: cgroups.Subtree | None, places: dict[str, str]) -> Accounting:
    if subtree is None:
        from sandbox.isolation.sampling import Sampling

        return Sampling()
    return V1(places) if subtree.version == "v1" else V2(places["unified"])


def _as_root(
    bwrap: str, certificate: str | None, readable: list[str], subtree: cgroups.Subtree | None,
    filters: Mapping[Filter, bytes], uid: int, parent: int,
) -> Confinement:  # fmt: skip
    root = privilege.PrivateRoot()
    for place in ("/usr", "/proc", "/dev"):
        root.add(place, place)
    root.add(bwrap, privilege.BWRAP)
    for name in skeleton.SYSTEM_DIRECTORIES:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            root.add(f"/{name}", f"/{name}")
    for number, source in enumerate(readable):
        root.add(source, f"/sources/{number}")
    places = {}
    if subtree is not None:
        for controller, directory in subtree.directories.items():
            places[controller] = f"/cgroup/{controller}"
            root.add(directory, places[controller])
    content = skeleton.gather(certificate)
    skeleton.write(content, root.build())
    root.enter()
    privilege.become(uid, parent)
    return Confinement(
        bwrap=privilege.BWRAP,
        skeleton=privilege.SKELETON,
        system_mounts=content.mounts,
        seccomp=filters,
        accounting=_accounting(subtree, places),
        locate=root.locate,
        leftovers=list(subtree.directories.values()) if subtree else [],
        clean_up=lambda: None,  # the root directory ends with the process; the cgroups are root's to remove
    )


def _as_user(
    bwrap: str, certificate: str | None, state_dir: Path, subtree: cgroups.Subtree | None,
    filters: Mapping[Filter, bytes], parent: int,
) -> Confinement:  # fmt: skip
    make_private(state_dir)
    _sweep(state_dir)
    directory, lock = _locked_directory(state_dir)
    root = directory / "root"
    root.mkdir()
    content = skeleton.gather(certificate)
    skeleton.write(content, root)
    privilege.settle(parent)
    leftovers = list(subtree.directories.values()) if subtree else []

    def clean_up() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)

    return Confinement(
        bwrap=bwrap,
        skeleton=str(root),
        system_mounts=content.mounts,
        seccomp=filters,
        accounting=_accounting(subtree, subtree.directories if subtree else {}),
        locate=os.path.realpath,
        leftovers=leftovers,
        clean_up=clean_up,
    )


def _locked_directory(state_dir: Path) -> tuple[Path, int]:
    """A new directory and a lock on it, which ends with this process however it ends."""
    directory = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=state_dir))
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, lock


def _sweep(state_dir: Path) -> None:
    """Remove the directories of launchers that were killed: nobody holds their lock."""
    for directory in state_dir.glob(f"{_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if os.lstat(directory).st_uid != os.geteuid():
                continue  # another user's, in a directory that all may write
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
