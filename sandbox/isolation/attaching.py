"""The launcher's part in a call's working directory: the helper that puts it at `/workspace` of one sandbox.

Started as root, the launcher gets a mount that is nowhere yet (`trees.py`): in its own root directory there is nothing
of the host's to be mounted. Started as anyone else, it gets the directory; the helper then copies the host's mounts
into a namespace that belongs to the sandbox's user namespace, where it may make that mount itself.
Owns: one short-lived process and the descriptor that it was given. Must not: decide what is put there, or outlive the
sandbox's preparation.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from typing import NoReturn

from proxy import channel
from sandbox.isolation import joiner, syscalls
from sandbox.isolation.plan import WORKSPACE

_REMEDIES = {
    errno.ENOSYS: "use a kernel of version 5.12 or later",
    errno.EINVAL: "nothing may be mounted below a working directory: take another one, or unmount what is there",
}


class Attachment:
    """One directory on its way into one sandbox. It takes the descriptor over."""

    def __init__(self, directory: int, *, detached: bool) -> None:
        self._directory = directory
        self._detached = detached
        self._helper: int | None = None
        self._sock: socket.socket | None = None
        self.done = False

    @property
    def started(self) -> bool:
        return self._helper is not None or self.done

    def start(self, pid: int, pidfd: int) -> int:
        """Fork the helper, for the sandbox of this pid 1, all of whose mounts are made. A descriptor that is readable
        when it has answered. Raises `OSError`.
        """
        namespaces = joiner.open_namespaces(pid)
        ours, theirs = channel.pair()
        try:
            syscalls.pidfd_send_signal(pidfd, 0)  # else it had ended, and its number could be another's by then
            helper = os.fork()
            if helper == 0:
                ours.close()
                _run(theirs, namespaces, self._directory, detached=self._detached)
        except OSError:
            ours.close()
            raise
        finally:
            namespaces.close()
            theirs.close()
        self._helper, self._sock = helper, ours
        return ours.fileno()

    def finish(self) -> None:
        """Take the helper's answer. Raises `OSError`, with the helper's own words, if the directory is not there."""
        assert self._sock is not None
        try:
            message, _ = channel.receive(self._sock)
        except channel.ChannelClosed:
            raise OSError("the helper that puts it there ended early") from None
        finally:
            self.close()
        if "message" in message:
            raise OSError(str(message["message"]))
        self.done = True

    def close(self) -> None:
        """Give everything back, wherever it stands."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._helper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._helper, signal.SIGKILL)  # not yet waited for: the number is still its own
            os.waitpid(self._helper, 0)
            self._helper = None
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


def _run(sock: socket.socket, namespaces: joiner.Namespaces, directory: int, *, detached: bool) -> NoReturn:
    """The helper's whole life."""
    try:
        joiner.keep_only(sock.fileno(), directory, namespaces.user, namespaces.mount)
        os.setns(namespaces.user, os.CLONE_NEWUSER)
        mount = directory if detached else _detach(directory)
        os.setns(namespaces.mount, os.CLONE_NEWNS)
        syscalls.attach_mount(mount, WORKSPACE)
        channel.send(sock, {})
    except channel.ChannelClosed:
        pass  # the launcher has given this sandbox up
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        with contextlib.suppress(channel.ChannelClosed):
            channel.send(sock, {"message": f"{error.strerror or error}" + (f"\nhint: {remedy}" if remedy else "")})
    finally:
        os._exit(0)


def _detach(directory: int) -> int:
    """A mount of a directory that was opened among the host's mounts, made among copies of them.

    It is found again by the name that the kernel has for it. No link is followed on the way, and what is found must be
    the same directory: who changes the way meanwhile brings about this error, and nothing else.
    """
    os.unshare(os.CLONE_NEWNS)
    path = os.readlink(f"/proc/self/fd/{directory}")
    resolve = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
    try:
        found = syscalls.open_resolved(-1, path, os.O_PATH | os.O_DIRECTORY, resolve)
        same = os.path.sameopenfile(found, directory)
    except OSError as error:
        raise OSError(f"`{path}` cannot be reached any more: {error.strerror}") from error
    if not same:
        raise OSError(f"`{path}` is another directory than it was a moment ago")
    mount = syscalls.clone_mount(found)
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
    syscalls.set_mount_attributes(mount, attributes, propagation=syscalls.MS_PRIVATE)
    return mount
