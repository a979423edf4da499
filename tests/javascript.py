"""What the tests of JavaScript share: a way to run a program and to read what it reports."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

from sandbox.interpreters import this_node
from tests.lab import MARK, Call, Run, parse_seen

# On the program's first line, so that its lines keep their numbers.
PRELUDE = f"const report = (seen) => console.log({json.dumps(MARK)} + JSON.stringify(seen)); "


def run_js(run: Callable[..., Run], code: str, *calls: Call, **more: Any) -> Run:
    """Run a program by `Lab.run` or `RemoteLab.run`, with `report` defined."""
    return run(PRELUDE + code, *calls, **{"prelude": False, "language": "javascript"} | more)


def unconfined_js(code: str) -> list[dict[str, Any]]:
    """The positive control: the same program in a plain Node.js of the same version, in the same world."""
    done = subprocess.run(
        [f"{this_node().directory}/bin/node", "-"], input=PRELUDE + code, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return parse_seen(done.stdout)
