"""Whether the service can run calls: doctor's verdict on this host, and the two processes behind the executor.

Doctor runs once at the start, again when one of the processes was lost, and, while a check fails and somebody asks,
once a minute. It runs in a process of its own and at a low priority: its probes take seconds, and calls must not wait
for them. In between its verdict is remembered.

Owns: that verdict. Must not: judge a host; doctor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from proxy.control import ProxyUnavailable
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.service.service import Service

RETRY_SECONDS = 60.0  # what failed may have been put right
_BACKEND_SECONDS = 5.0
_DOCTOR_SECONDS = 300.0
_NICENESS = 10
_LEDGER_REMEDY = "put its directory back where it was, or restart the service"
# The command, which ends with the service that asks, however that ends: it would take over what is lost with it.
_DOCTOR = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("who asked has ended")
from sandbox.cli import main
main()
"""
_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which a terminal or a manager sends to all processes at once
_log = logging.getLogger("sluicegate.service")


class FailedCheck(BaseModel):
    """One of doctor's checks that failed. `detail` and `remedy` are for the operator; others see the name alone."""

    model_config = ConfigDict(frozen=True)

    name: str
    detail: str = ""
    remedy: str = ""


class Readiness(BaseModel):
    """`checking`: doctor has not come to its verdict. `draining`: the service is about to end."""

    model_config = ConfigDict(frozen=True)

    ready: bool
    state: Literal["ready", "checking", "draining", "failed"]
    failed: list[FailedCheck] = []

    def for_others(self) -> Readiness:
        """Without what an operator alone should see."""
        return self.model_copy(update={"failed": [FailedCheck(name=one.name) for one in self.failed]})


class _CutShort(Exception):
    """Doctor was ended before it came to a verdict, which says nothing of this host."""


class Inspection:
    """Asks doctor, and remembers. Use it as an asynchronous context manager, inside the service's."""

    def __init__(self, service: Service, policy: Path, command: Sequence[str] | None = None) -> None:
        """`command` replaces doctor's, for tests."""
        self._service = service
        doctor = [sys.executable, "-P", "-c", _DOCTOR, str(os.getpid()), "doctor", "--policy", str(policy), "--json"]
        self._command = command or doctor
        self._failed: list[FailedCheck] | None = None  # None: no verdict yet
        self._asked_for: tuple[int | None, int | None] | None = None
        self._asked_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Inspection:
        self._ask()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def settled(self) -> None:
        """Return once doctor has come to its verdict."""
        if self._asking is not None:
            await asyncio.wait({self._asking})

    async def readiness(self) -> Readiness:
        """How it is now. Starts again what was lost."""
        if self._service.draining:
            return Readiness(ready=False, state="draining")
        try:
            async with asyncio.timeout(_BACKEND_SECONDS):
                await self._service.executor.ready()
                await self._service.executor.ledger.check()
        except (IsolationUnavailable, ProxyUnavailable) as error:
            name = "launcher" if isinstance(error, IsolationUnavailable) else "proxy"
            return Readiness(ready=False, state="failed", failed=[FailedCheck(name=name, detail=str(error))])
        except LedgerUnavailable as error:
            failed = FailedCheck(name="ledger", detail=str(error), remedy=_LEDGER_REMEDY)
            return Readiness(ready=False, state="failed", failed=[failed])
        except TimeoutError:
            detail = f"the launcher, the proxy or the ledger has not answered within {_BACKEND_SECONDS:g} s"
            return Readiness(ready=False, state="failed", failed=[FailedCheck(name="backend", detail=detail)])
        if self._asked_for != self._processes() or (self._failed and self._age() > RETRY_SECONDS):
            self._ask()
        if self._failed is None:
            return Readiness(ready=False, state="checking")
        return Readiness(ready=not self._failed, state="failed" if self._failed else "ready", failed=self._failed)

    def _age(self) -> float:
        """Of the verdict, in seconds."""
        return asyncio.get_running_loop().time() - self._asked_at

    def _processes(self) -> tuple[int | None, int | None]:
        executor = self._service.executor
        return executor.launcher_pid, executor.proxy_pid

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asked_for = self._processes()
            self._asked_at = asyncio.get_running_loop().time()
            self._asking = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(_DOCTOR_SECONDS):
                self._failed = await self._verdict()
        except _CutShort:
            self._asked_for = None  # whoever asks next has it asked again
            return
        except (OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            self._failed = [FailedCheck(name="doctor", detail=f"it gave no verdict: {why}")]
        for one in self._failed:
            _log.error("this host is not ready: %s: %s", one.name, one.detail)

    async def _verdict(self) -> list[FailedCheck]:
        state_dir = self._service.executor.settings.state_dir
        process = await asyncio.create_subprocess_exec(
            *self._command, env={**os.environ, "SLUICEGATE_STATE_DIR": str(state_dir)},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's ^C is for the service, which ends it
        )  # fmt: skip
        try:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._service.draining or -(process.returncode or 0) in _TO_END:
            raise _CutShort
        report = json.loads(said)
        return [
            FailedCheck(name=one["name"], detail=one["detail"], remedy=one["remedy"])
            for one in report["checks"]
            if not one["ok"]
        ]
