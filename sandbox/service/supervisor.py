"""Telling the service manager how things stand: systemd's notification protocol, sd_notify(3).

Owns: its messages. Must not: wait for anybody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

READY = "READY=1"
STOPPING = "STOPPING=1"


def reloading() -> str:
    """A reload has begun; `READY` ends it."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"


def notify(state: str) -> None:
    """Tell it, where somebody listens at `$NOTIFY_SOCKET`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.setblocking(False)
        with contextlib.suppress(OSError):  # who does not listen is not told
            out.sendto(state.encode(), address)
