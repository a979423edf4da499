"""The helper that a launcher forks for each sandbox: it joins the sandbox's namespaces and prepares them.

Owns: one short-lived process. It has all capabilities of the sandbox's user namespace and none outside, and it ends
before the program starts. Must not: return, or touch the host.

bubblewrap runs pid 1 in a second, nested user namespace (`--disable-userns`); the network and the mounts belong to the
first, which is found as the owner of the network namespace.
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from typing import NoReturn

from proxy import channel
from sandbox.isolation import netns, socketmem, syscalls
from sandbox.isolation.memory import Group
from sandbox.isolation.plan import Tmpfs

_NS_GET_USERNS = 0xB701
_LOOPBACK_TIMEOUT_SECONDS = 10.0
_FIRST_FREE_FD = 3
_LAST_FD = (1 << 32) - 1
# What one sandbox may have of the kernel's account of the launcher's uid, of which all its sandboxes take. The kernel's
# own limits for a uid are 128 instances, and watches by the size of the memory.
_USER_LIMITS = {"max_inotify_instances": 32, "max_inotify_watches": 8192}


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Open descriptors of a sandbox's namespaces."""

    user: int
    network: int
    mount: int

    def close(self) -> None:
        for fd in (self.user, self.network, self.mount):
            os.close(fd)


def open_namespaces(pid: int) -> Namespaces:
    """Of the process `pid`, which must still be bubblewrap or a pid 1 that is not yet undumpable."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    mount = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    user = fcntl.ioctl(network, _NS_GET_USERNS)
    os.set_inheritable(user, False)
    return Namespaces(user, network, mount)


def run(sock: socket.socket, namespaces: Namespaces, pid: int, group: Group, tmpfs: tuple[Tmpfs, ...]) -> NoReturn:
    """The helper's whole life. It sends `listeners`, then waits to hear that pid 1 is up, then sends `ready`."""
    status = 1
    try:
        keep_only(sock.fileno(), namespaces.user, namespaces.network, namespaces.mount)
        _prepare(sock, namespaces, pid, group, tmpfs)
        status = 0
    except channel.ChannelClosed:
        pass  # the launcher has given this sandbox up
    except (OSError, TimeoutError) as error:
        channel.send(sock, {"step": "failed", "message": str(error)})
    finally:
        os._exit(status)


def _prepare(sock: socket.socket, namespaces: Namespaces, pid: int, group: Group, tmpfs: tuple[Tmpfs, ...]) -> None:
    os.setns(namespaces.user, os.CLONE_NEWUSER)
    _limit_user()
    os.setns(namespaces.network, os.CLONE_NEWNET)
    netns.wait_for_loopback(_LOOPBACK_TIMEOUT_SECONDS)
    listeners = netns.capture_everything()
    kinds = [kind for kind, _ in listeners]
    channel.send(sock, {"step": "listeners", "kinds": kinds}, [listener.fileno() for _, listener in listeners])
    group.admit(pid)
    channel.receive(sock)  # pid 1 is up, so bubblewrap's mounts are done
    os.setns(namespaces.mount, os.CLONE_NEWNS)
    for one in tmpfs:
        # bubblewrap has no option for it, and tmpfs's own default is an inode for every second page of the machine.
        syscalls.mount(
            "tmpfs", one.target, None, syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NODEV,
            f"size={one.size_bytes},nr_inodes={one.inodes}",
        )  # fmt: skip
    watched = [os.open(one.target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC) for one in tmpfs]
    if group.tick_seconds is not None:
        watched.append(socketmem.open_diagnostics().detach())
    channel.send(sock, {"step": "ready"}, watched)


def keep_only(*needed: int) -> None:
    """Close what the launcher has open for other sandboxes: of none may anything last longer for this process."""
    lowest = _FIRST_FREE_FD
    for fd in sorted(needed):
        if lowest < fd:
            syscalls.close_range(lowest, fd - 1)
        lowest = fd + 1
    syscalls.close_range(lowest, _LAST_FD)


def _limit_user() -> None:
    """Limits of the user namespace that this process has joined; the kernel counts what is nested in it, too."""
    for name, value in _USER_LIMITS.items():
        try:
            with open(f"/proc/sys/user/{name}", "w", encoding="ascii") as file:
                file.write(str(value))
        except FileNotFoundError:
            continue  # a kernel without inotify
