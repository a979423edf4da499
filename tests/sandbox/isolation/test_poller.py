"""The launcher's loop serves requests before times, and one time a turn."""

from __future__ import annotations

import os

from sandbox.isolation.poller import Poller


def test_descriptors_come_before_times_in_every_turn() -> None:
    """With many times due at once, a request waits for one of them and no more; all are served, the oldest first."""
    poller = Poller()
    read, write = os.pipe()
    seen: list[str] = []

    def on_request() -> None:
        os.read(read, 1)
        seen.append("request")

    def on_time(name: str) -> None:
        seen.append(name)
        os.write(write, b"x")

    poller.add(read, on_request)
    for name in ("first", "second", "third"):
        poller.call_after(0, name, lambda name=name: on_time(name))  # type: ignore[misc]
    os.write(write, b"x")
    for _ in range(4):
        poller.run_once()
    for fd in (read, write):
        poller.remove(fd)
        os.close(fd)
    assert seen == ["request", "first", "request", "second", "request", "third", "request"]
