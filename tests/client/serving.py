"""A service as a process of its own, as operators start it, for tests of its clients."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.test_docs import TOP

PATIENCE_SECONDS = 60


@dataclass
class Serving:
    """`address` is what it said that it listens at."""

    process: subprocess.Popen[str]
    address: str
    state: Path

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def serving(state: Path, *arguments: str, log: IO[str] | None = None) -> Iterator[Serving]:
    """`sluicegate serve`, ready. It is ended with the block, if it was not before."""
    command = [sys.executable, "-P", "-m", "sandbox.cli", "serve", *arguments]
    environment = {**os.environ, "SLUICEGATE_STATE_DIR": str(state), "PYTHONPATH": str(TOP)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), "the service did not start"
            yield Serving(process, line.removeprefix("listening on ").strip(), state)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
