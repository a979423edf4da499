"""Inside a preparation sandbox: running a resolver. Owns: its process. Must not: read what it wrote."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from sandbox.packages.inside import MAX_MESSAGE


def resolve(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a resolver in an empty directory, with an empty home, and give what it wrote."""
    for directory in job["directories"]:
        os.makedirs(directory)
    for path, text in job["files"].items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    done = subprocess.run(
        job["argv"], input=job["stdin"].encode(), capture_output=True, env=dict(job["environment"]),
        cwd=job["cwd"], check=False,
    )  # fmt: skip
    lock = done.stdout.decode("utf-8", "replace")
    if job["lock"] is not None:
        try:
            with open(job["lock"], encoding="utf-8") as file:
                lock = file.read()
        except OSError:
            lock = ""
    message = done.stderr.decode("utf-8", "replace")
    return {"exit": done.returncode, "lock": lock, "message": message[-MAX_MESSAGE:]}
