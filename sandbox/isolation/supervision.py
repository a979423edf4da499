"""One sandbox as the launcher has it: started, prepared, released, ended, and every trace removed.

Owns: its bwrap, helper, pipes and memory group. Must not: know other sandboxes, or let an error reach them: every call
from outside goes through `_guarded`. `launcher.py` has the theory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable

from proxy import channel, memory_file
from sandbox.isolation import joiner, syscalls
from sandbox.isolation.attaching import Attachment
from sandbox.isolation.confine import Confinement
from sandbox.isolation.filesystems import Filesystems
from sandbox.isolation.memory import Evidence, Group
from sandbox.isolation.plan import Descriptors, LaunchPlan, bwrap_argv
from sandbox.isolation.poller import Poller

_REMOVAL_PATIENCE_SECONDS = 2.0
_REMOVAL_TICK_SECONDS = 0.002
_ERROR_BYTES = 4096
_REPORT_BYTES = 128  # more than any report has
_THREAD_STACK_BYTES = 8 * 1024 * 1024  # glibc's; counted by RLIMIT_DATA whether touched or not
_REPORT = re.compile(rb"E(\d{1,5}) (\d{1,9}\.\d{6}) (\d{1,18})\n")  # as `init.py` writes it
_MEMORY = "memory"  # the value of KillReason.MEMORY
_SAMPLED_NOFILE = 256  # no sample shows what sockets hold, which is up to 208 KiB each by the kernel's default


class Supervision:
    """One sandbox. `send` answers the executor; `finished` is called once, when nothing is left.

    Raises `OSError` if bwrap cannot be started.
    """

    def __init__(
        self,
        number: int,
        plan: LaunchPlan,
        fds: list[int],
        *,
        confinement: Confinement,
        poller: Poller,
        send: Callable[[channel.Message, list[int]], None],
        finished: Callable[[int, channel.Message], None],
    ) -> None:
        self._number = number
        self._confinement = confinement
        self._poller = poller
        self._send = send
        self._finished = finished
        self._plan = plan
        self._fds: set[int] = set()  # all that are open on this sandbox's behalf
        self._pid1: int | None = None
        self._pid1_fd: int | None = None
        self._helper: socket.socket | None = None
        self._helper_pid: int | None = None
        self._up = self._ready = self._release = self._released = self._started = False
        self._kill_reason: str | None = None
        self._report: bytes = b""
        self._attachment: Attachment | None = None
        self._filesystems = Filesystems()
        self._pids_limit: int | None = None
        self._error = b""
        self._failure: str | None = None
        self._bwrap_ended = self._pid1_ended = False
        self._group: Group = confinement.accounting.group(str(number), plan.memory_bytes, plan.pids)
        try:
            self._start_bwrap(*fds)
        except BaseException:
            self._close_all()
            self._group.remove()
            raise

    # --- start

    def _start_bwrap(self, payload: int, stdout: int, stderr: int) -> None:
        confinement = self._confinement
        info, info_w = self._pipe()
        error, error_w = self._pipe()
        self._status, status_w = self._pipe()
        control_r, self._control = self._pipe()
        filter_r, filter_w = self._pipe()
        os.write(filter_w, confinement.seccomp[self._plan.filter])  # a few KiB: fits the pipe
        self._close(filter_w)
        descriptors = Descriptors(
            info_w, filter_r, (status_w, control_r, payload, stdout, stderr, *self._group.entrances)
        )
        arguments = bwrap_argv(
            self._plan, root=confinement.skeleton, system_mounts=confinement.system_mounts, descriptors=descriptors,
            locate=confinement.locate,
        )  # fmt: skip
        args = self._own(memory_file.create("bwrap-args"))
        separator = arguments.index("--")
        os.write(args, b"".join(argument.encode() + b"\0" for argument in arguments[:separator]))
        os.lseek(args, 0, os.SEEK_SET)
        # `info` has a reader even if this process dies now: else bwrap would end on a broken pipe and leave its child
        # behind, waiting for it for ever. As it is, pid 1 starts, finds `control` at its end, and exits.
        given = (args, info, info_w, filter_r, *descriptors.for_init)
        for fd in given:
            os.set_inheritable(fd, True)
        try:
            bwrap = os.posix_spawn(
                confinement.bwrap,
                # By descriptor, since anyone on the host can read a command line.
                ["bwrap", "--args", str(args), *arguments[separator:]],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, error_w, 2),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        finally:
            for fd in given:
                os.set_inheritable(fd, False)
        self._bwrap_fd = self._own(syscalls.pidfd_open(bwrap))
        self._bwrap = bwrap
        for fd in (args, info_w, error_w, status_w, control_r, filter_r):
            self._close(fd)
        for fd in (info, error, self._status):
            os.set_blocking(fd, False)
        self._error_fd = error
        self._info_text = b""
        self._watch(info, lambda: self._on_info(info))
        self._watch(error, self._on_error)
        self._watch(self._status, self._on_status)
        self._watch(self._bwrap_fd, self._on_bwrap_end)
        if self._group.oom_fd is not None:
            self._watch(self._group.oom_fd, self._on_memory)

    # --- the border to the other sandboxes

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Whether the action went well. If not, this sandbox is given up, and the launcher goes on."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - one sandbox's outermost frame
            self._fail(f"the sandbox had to be given up: {str(error) or type(error).__name__}")
            return False
        return True

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        def handle() -> None:
            if not self._guarded(handler):
                self._poller.remove(fd)  # else it would be called again at once, for ever

        self._poller.add(fd, handle)

    def _call_after(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            self._guarded(action)

        self._poller.call_after(seconds, self, act)

    def _on_info(self, info: int) -> None:
        data = _read_available(info) or b""
        self._info_text += data
        if data and b"}" not in data:
            return
        self._close(info)
        if not data:
            return  # bwrap failed: its message and its end follow
        try:
            self._join(int(json.loads(self._info_text)["child-pid"]))
        except (OSError, ValueError) as error:
            self._fail(f"the sandbox could not be joined: {error}")

    def _join(self, pid: int) -> None:
        self._pid1_fd = self._own(syscalls.pidfd_open(pid))
        self._pid1 = pid
        if _parent_of(pid) != self._bwrap:  # it ended, and its number is another's now
            self._pid1_ended = True
            raise ProcessLookupError("pid 1 ended at once")
        self._watch(self._pid1_fd, self._on_pid1_end)
        if self._kill_reason is not None:
            self._kill_now()
            return
        self._limit(pid)
        namespaces = joiner.open_namespaces(pid)
        ours, theirs = channel.pair()
        try:
            helper = os.fork()
            if helper == 0:
                ours.close()
                joiner.run(theirs, namespaces, pid, self._group, self._plan.tmpfs)
        finally:
            namespaces.close()
            theirs.close()
        self._helper, self._helper_pid = ours, helper
        ours.setblocking(False)
        self._watch(ours.fileno(), self._on_helper)
        if self._up:
            self._tell_helper()

    def _limit(self, pid: int) -> None:
        limits = self._plan.rlimits
        values = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: limits.nofile,
            resource.RLIMIT_NPROC: limits.nproc,
            resource.RLIMIT_FSIZE: limits.fsize_bytes,
            resource.RLIMIT_MEMLOCK: 0,
        }
        if self._group.tick_seconds is not None:  # no group of the kernel's: what a process's own limits can do
            stacks = self._plan.pids * _THREAD_STACK_BYTES
            values[resource.RLIMIT_DATA] = limits.data_bytes or self._plan.memory_bytes + stacks
            values[resource.RLIMIT_NPROC] = min(limits.nproc, self._plan.pids)
            values[resource.RLIMIT_NOFILE] = min(limits.nofile, _SAMPLED_NOFILE)
        for kind, value in values.items():
            _, hard = resource.prlimit(pid, kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (value, value))
            if kind == resource.RLIMIT_NPROC:
                self._pids_limit = min(value, self._plan.pids)

    # --- progress

    def _on_helper(self) -> None:
        assert self._helper is not None
        try:
            message, fds = channel.receive(self._helper)
        except channel.ChannelClosed:
            self._drop_helper()
            if not self._ready:
                self._fail("the helper that prepares the network ended early")
            return
        if message["step"] == "listeners":
            try:
                self._send({"op": "prepared", "id": self._number, "kinds": message["kinds"]}, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        elif message["step"] == "ready":
            self._ready = True
            self._tell_pid1(b"P")
            assert self._pid1 is not None
            number = len(self._plan.tmpfs)
            self._filesystems = Filesystems(self._plan.tmpfs, fds[:number])
            self._group.watch(self._pid1, self._filesystems, fds[number:])
            self._go()
        else:
            self._fail(f"the sandbox's network could not be set up: {message['message']}")

    def _tell_helper(self) -> None:
        if self._helper is not None:
            with contextlib.suppress(channel.ChannelClosed):
                channel.send(self._helper, {})

    def _tell_pid1(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, word)

    def attach(self, directory: int, *, detached: bool) -> None:
        """Put a directory at `/workspace` before the program starts. It takes the descriptor over."""
        self._attachment = Attachment(directory, detached=detached)
        self._guarded(self._go)

    def _on_attached(self) -> None:
        assert self._attachment is not None
        self._poller.remove(self._attaching_fd)
        try:
            self._attachment.finish()
        except OSError as error:
            self._fail(f"the working directory could not be put into the sandbox: {error}")
            return
        self._go()

    def _drop_attachment(self) -> None:
        if self._attachment is not None:
            if self._attachment.started and not self._attachment.done:
                self._poller.remove(self._attaching_fd)
            self._attachment.close()

    def release(self) -> None:
        """Start the program, as soon as all is ready for it."""
        self._release = True
        self._guarded(self._go)

    def _go(self) -> None:
        if not (self._up and self._ready) or self._released or self._pid1_ended:
            return
        if self._attachment is not None and not self._attachment.done:
            if not self._attachment.started:
                assert self._pid1 is not None
                assert self._pid1_fd is not None
                self._attaching_fd = self._attachment.start(self._pid1, self._pid1_fd)
                self._watch(self._attaching_fd, self._on_attached)
            return
        if not self._release:
            return
        self._released = True
        self._tell_pid1(b"R")
        if self._group.tick_seconds is not None:
            self._call_after(self._group.tick_seconds, self._on_tick)

    def _on_status(self) -> None:
        data = _read_available(self._status)
        if data is None:
            return
        if not data:
            self._poller.remove(self._status)
        if data[:1] == b"U" and not self._up:
            self._up = True
            data = data[1:]
            self._tell_helper()
        if data[:1] == b"S" and not self._started:
            self._started = True
            data = data[1:]
        self._report = (self._report + data)[:_REPORT_BYTES]
        if self._report:
            self._filesystems.close()  # now, while what else runs inside still holds its files

    def _on_error(self) -> None:
        data = _read_available(self._error_fd)
        if data is None:
            return
        if not data:
            self._poller.remove(self._error_fd)
        self._error = (self._error + data)[:_ERROR_BYTES]

    # --- end

    def _on_memory(self) -> None:
        if self._group.exceeded():
            self._kill(_MEMORY)

    def _on_tick(self) -> None:
        self._on_memory()
        if self._kill_reason is None and self._group.tick_seconds is not None:
            self._call_after(self._group.tick_seconds, self._on_tick)

    def _fail(self, message: str) -> None:
        if self._failure is None and self._kill_reason is None:
            self._failure = message
        self._kill_now()

    def kill(self, reason: str) -> None:
        """End the sandbox. A program that has ended before keeps its own ending."""
        self._guarded(lambda: self._kill(reason))

    def _kill(self, reason: str) -> None:
        self._on_status()
        if self._kill_reason is None and not self._report:
            self._kill_reason = reason
        self._kill_now()

    def _kill_now(self) -> None:
        self._filesystems.close()  # before it: what is open and has no name is gone after it
        with contextlib.suppress(ProcessLookupError):
            if self._pid1_fd is not None:
                syscalls.pidfd_send_signal(self._pid1_fd, signal.SIGKILL)
            elif self._failure is not None:
                # bwrap kills its child on its own death once it has written `info`, which it had.
                syscalls.pidfd_send_signal(self._bwrap_fd, signal.SIGKILL)
        # Else pid 1 is not known yet: `_join` kills it as soon as it is.

    def _on_bwrap_end(self) -> None:
        self._poller.remove(self._bwrap_fd)
        status = os.waitid(syscalls.P_PIDFD, self._bwrap_fd, os.WEXITED)
        self._bwrap_ended = True
        if status is not None and status.si_code != os.CLD_EXITED:
            self._guarded(self._on_bwrap_killed)
        self._maybe_finish()

    def _on_bwrap_killed(self) -> None:
        """From outside: nothing inside can signal it, and when its child is killed it exits.

        Its child dies with it, but for one that had not come so far as to ask for that: that one is ended here.
        """
        self._on_status()
        if not self._report:
            self._fail("bubblewrap was killed from outside the sandbox")

    def _on_pid1_end(self) -> None:
        assert self._pid1_fd is not None
        self._poller.remove(self._pid1_fd)
        self._pid1_ended = True
        self._maybe_finish()

    def _maybe_finish(self) -> None:
        if not self._bwrap_ended or not (self._pid1_ended or self._pid1_fd is None):
            return
        for step in (self._on_status, self._on_error, self._drop_helper, self._drop_attachment):
            self._guarded(step)  # each, whatever became of the one before: the executor waits for this ending
        self._filesystems.close()
        self._poller.cancel(self)
        try:
            self._evidence = self._group.evidence()
        except (OSError, ValueError) as error:
            self._evidence = Evidence()
            self._failure = f"the account of the sandbox's memory was lost: {error}"
        if self._group.oom_fd is not None:
            self._poller.remove(self._group.oom_fd)
        self._close_all()
        self._give_up_at = time.monotonic() + _REMOVAL_PATIENCE_SECONDS
        self._remove()

    def _remove(self) -> None:
        """A cgroup stays busy for a moment after its last process."""
        if not self._group.remove() and time.monotonic() < self._give_up_at:
            self._call_after(_REMOVAL_TICK_SECONDS, self._remove)
            return
        self._drop_attachment()  # one may have come since the end
        self._finished(self._number, self._ending())

    def _ending(self) -> channel.Message:
        exit_code = number = cpu = peak = None
        report = _REPORT.fullmatch(self._report)
        if report is not None:
            wait_status, cpu, peak = int(report[1]), float(report[2]), int(report[3])
            if os.WIFSIGNALED(wait_status):
                number = os.WTERMSIG(wait_status)
            else:
                exit_code = os.WEXITSTATUS(wait_status)
        elif self._kill_reason is None and self._failure is None and not self._evidence.oom_kills and not self._started:
            self._failure = "pid 1 of the sandbox ended without a report"  # later it is the program's doing
        if self._failure is not None:  # what bwrap said comes before what we made of it
            self._failure = self._error.decode(errors="replace").strip() or self._failure
        # What a group of the kernel's says is exact; the samples of a tree may have missed what one process had.
        if self._evidence.peak_memory_bytes is not None and self._group.tick_seconds is None:
            peak = None
        if self._evidence.cpu_seconds is not None and self._group.tick_seconds is None:
            cpu = None
        return {
            "op": "ended",
            "id": self._number,
            "exit_code": exit_code,
            "signal": number,
            "killed_by_us": self._kill_reason,
            "oom_kills": self._evidence.oom_kills,
            "pids_limit": self._pids_limit,
            "pids_limit_hits": self._evidence.pids_limit_hits,
            "full_filesystems": self._filesystems.full(),
            "cpu_seconds": max((one for one in (self._evidence.cpu_seconds, cpu) if one is not None), default=None),
            "peak_memory_bytes": max(self._evidence.peak_memory_bytes or 0, peak or 0) or None,
            "failure": self._failure,
            "released": self._started,
        }

    # --- descriptors

    def _own(self, fd: int) -> int:
        self._fds.add(fd)
        return fd

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe2(os.O_CLOEXEC)
        return self._own(read), self._own(write)

    def _close(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            self._poller.remove(fd)
            os.close(fd)

    def _close_all(self) -> None:
        for fd in list(self._fds):
            self._close(fd)

    def _drop_helper(self) -> None:
        if self._helper is not None:
            self._poller.remove(self._helper.fileno())
            self._helper.close()  # a helper that still waits sees it, and exits
            self._helper = None
        if self._helper_pid is not None:
            if not self._ready:
                os.kill(self._helper_pid, signal.SIGKILL)  # not yet waited for: the number is still its own
            os.waitpid(self._helper_pid, 0)
            self._helper_pid = None


def _read_available(fd: int) -> bytes | None:
    """What is there; None if nothing is there yet; empty at the end."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None
