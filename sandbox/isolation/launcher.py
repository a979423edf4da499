"""The launcher process: the only starter of bubblewrap.

Processes. The executor starts one launcher, with one end of a SEQPACKET socket. For each sandbox the launcher starts
one `bwrap`, whose child becomes pid 1 of the new namespaces (`init.py`), and forks one helper (`joiner.py`), which
prepares the network and leaves. Single-threaded: joining a user namespace needs that, and forks are then plain.

Privileges. Started as root, it makes a private root directory and becomes a uid that nothing else has
(`privilege.py`); started as anyone else, it stays that. Only the helper has capabilities, and only over the sandbox.

Pipes of a sandbox.
    info      bwrap → launcher     pid of pid 1
    error     bwrap → launcher     bwrap's own messages, never the program's
    status    pid 1 → launcher     `U` when up; `S` when the program starts; its wait status at the end
    control   launcher → pid 1     `P` when every limit holds: a runtime may start, and wait; `R` starts the program;
                                   closed without it, pid 1 exits
    payload, stdout, stderr        from the executor to pid 1, through here
    helper    helper ↔ launcher    listeners; readiness
    attaching helper → launcher    the working directory of a call is in its place, or why not (`attaching.py`)

Order. bwrap starts; `info` names pid 1; the helper joins, opens the listeners, admits pid 1 to its memory group; the
listeners go to the executor (`prepared`) while pid 1's interpreter still starts. A directory that the executor gives
with `attach` is put at `/workspace`, by another helper, when pid 1 is up and the first helper is done; after that the
executor's `release` takes effect.

Who kills whom. Only a pid 1 is ever killed, by pidfd: the kernel then ends its namespace, and bwrap follows. If the
launcher dies, the kernel kills each bwrap (`--die-with-parent`) and that its pid 1; a pid 1 not yet released exits at
the end of `control`. If the executor dies, the launcher sees the end of its socket, or dies by the parent-death signal.

Whatever fails for one sandbox ends that one: code inside can bring about errors here, and the launcher serves all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import cast

from proxy import channel
from sandbox.isolation import privilege
from sandbox.isolation.confine import Confinement, confine
from sandbox.isolation.plan import plan_from_message
from sandbox.isolation.poller import Poller
from sandbox.isolation.supervision import Supervision

_CANCELLED = "cancelled"  # the value of KillReason.CANCELLED
_RETRY_SECONDS = 0.05


class Launcher:
    """The executor's requests, and the sandboxes that are alive."""

    def __init__(self, sock: socket.socket, confinement: Confinement) -> None:
        self._confinement = confinement
        self._poller = Poller()
        self._sock = sock
        self._supervised: dict[int, Supervision] = {}
        self._serving = True
        self._poller.add(sock.fileno(), self._on_request)

    def serve(self) -> None:
        """Until the executor closes its end and every sandbox is gone."""
        while self._serving or self._supervised:
            self._poller.run_once()

    def _send(self, message: channel.Message, fds: list[int]) -> None:
        with contextlib.suppress(channel.ChannelClosed):
            channel.send(self._sock, message, fds)

    def _tell(self, message: channel.Message) -> None:
        """Send what the executor waits for, now or when the kernel has room for it again."""
        try:
            self._send(message, [])
        except OSError:
            self._poller.call_after(_RETRY_SECONDS, object(), lambda: self._tell(message))

    def _finished(self, number: int, ending: channel.Message) -> None:
        del self._supervised[number]
        self._tell(ending)

    def _on_request(self) -> None:
        try:
            message, fds = channel.receive(self._sock)
        except channel.ChannelClosed:
            self._poller.remove(self._sock.fileno())
            self._serving = False
            for supervision in list(self._supervised.values()):
                supervision.kill(_CANCELLED)
            return
        number = cast(int, message["id"])
        if message["op"] == "launch":
            try:
                plan = plan_from_message(message["plan"])
                self._supervised[number] = Supervision(
                    number, plan, fds, confinement=self._confinement, poller=self._poller, send=self._send,
                    finished=self._finished,
                )  # fmt: skip
            except OSError as error:
                self._tell({"op": "refused", "id": number, "message": str(error)})
            finally:
                for fd in fds:
                    os.close(fd)
        elif number in self._supervised:  # else it has ended meanwhile: see below
            supervision = self._supervised[number]
            match message["op"]:
                case "attach":
                    supervision.attach(fds[0], detached=cast(bool, message["detached"]))
                case "release":
                    supervision.release()
                case "kill":
                    supervision.kill(cast(str, message["reason"]))
        else:
            for fd in fds:
                os.close(fd)


def main(fd: int, parent: int) -> None:
    """The process: configure by the first message, answer, serve."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    os.umask(0o022)  # whatever the caller's is: the uid that this becomes has to reach what is made here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the executor, which then closes its end
    message, _ = channel.receive(sock)
    privilege.raise_descriptor_limit()  # before any helper is forked
    try:
        confinement = confine(message, parent)
    except (OSError, ImportError) as error:
        channel.send(sock, {"op": "unavailable", "message": str(error)})
        sys.exit(1)
    channel.send(
        sock,
        {
            "op": "started",
            "memory_method": confinement.accounting.method,
            "leftovers": confinement.leftovers,
            "user": [os.geteuid(), os.getegid()],
        },
    )
    Launcher(sock, confinement).serve()
    confinement.clean_up()
