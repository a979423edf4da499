"""All of this holds for an ordinary user, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unprivileged import unprivileged_command

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent


@pytest.mark.skipif(os.getuid() != 0, reason="the tests already run as an ordinary user")
def test_the_other_tests_of_isolation_pass_for_an_ordinary_user() -> None:
    """The same tests, in a process of an unprivileged uid."""
    files = [
        HERE / f"test_{name}.py"
        for name in (
            "attaching",
            "confinement",
            "filesystems",
            "init",
            "launcher",
            "memory",
            "netns",
            "probe",
            "seccomp",
        )
    ]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    with unprivileged_command() as prefix:
        answer = subprocess.run(
            [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *map(str, files)],
            cwd=ROOT, env=environment, capture_output=True, text=True,
        )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
