"""The example agent host runs, and `docs/client.md` shows what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.test_docs import PAGES, TOP, blocks, section
from tests.unprivileged import unprivileged_command

EXAMPLE = TOP / "docs" / "examples" / "agent_host.py"
_TASK = re.compile(r"call-[0-9a-f]{16}")


@pytest.mark.parametrize("privileged", [True, False], ids=["as-we-are", "unprivileged"])
def test_the_example_prints_what_the_page_shows(privileged: bool) -> None:
    """A faulty call, a refusal, a timeout, a task with its note, a stop and a second try, each as the page has it."""
    if not privileged and os.getuid() != 0:
        pytest.skip("the tests already run as an unprivileged user")
    environment = os.environ if privileged else {**os.environ, "HOME": "/nonexistent", "TMPDIR": "/tmp"}
    with unprivileged_command() as prefix:
        command = [*([] if privileged else prefix), sys.executable, str(EXAMPLE)]
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (shown,) = blocks(section(PAGES["docs/client.md"], "## An agent host"), "console")
    assert _TASK.sub("TASK", done.stdout) == _TASK.sub("TASK", shown)
    task, note = _TASK.findall(done.stdout)
    assert task == note


def test_the_example_is_short_enough_to_be_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 180
