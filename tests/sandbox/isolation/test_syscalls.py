"""The system calls that go by number do what their names say, and raise what the standard library would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sandbox.isolation import syscalls


def test_a_process_is_held_signalled_and_waited_for_by_its_pidfd() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = syscalls.pidfd_open(child.pid)
    try:
        assert not os.get_inheritable(handle)
        syscalls.pidfd_send_signal(handle, 0)
        syscalls.pidfd_send_signal(handle, signal.SIGKILL)
        ended = os.waitid(syscalls.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert (ended.si_pid, ended.si_status) == (child.pid, signal.SIGKILL)
        child.communicate()
        with pytest.raises(ProcessLookupError):
            syscalls.pidfd_send_signal(handle, 0)
        with pytest.raises(ProcessLookupError):
            syscalls.pidfd_open(child.pid)
    finally:
        os.close(handle)
