"""An executor in another process, so that a test can have it started by another user.

`python -m tests.remote DIRECTORY PACKAGES` reads a JSON call a line and answers with a JSON result a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from sandbox import Settings, SyncExecutor
from sandbox.contract import CodeCall, ToolResult
from tests.lab import PRELUDE, Call, Outside, Run, main_policy, parse_seen, read_events, unrestricted_policy


class RemoteLab:
    """Like `Lab`, for an executor that `prefix` starts, as a user who owns nothing of ours but one directory."""

    def __init__(self, prefix: Sequence[str], outside: Outside, packages: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="sg-")
        root = Path(self._directory.name)
        root.chmod(0o777)
        for name, text in (("main", main_policy(outside)), ("unrestricted", unrestricted_policy(outside))):
            (root / f"{name}.yaml").write_text(text.replace(str(outside.ca_file), str(root / "ca.pem")))
        (root / "ca.pem").write_bytes(outside.ca_file.read_bytes())
        self.log = root / "audit.jsonl"
        self.outside = outside
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.remote", str(root), str(packages)],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "HOME": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *calls: Call, prelude: bool = True, **more: Any) -> Run:
        fields: dict[str, Any] = {"language": "python"}
        for call in calls:
            fields |= call
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        text = PRELUDE + "\n" + code if prelude else code
        stdin.write(json.dumps({"code": text, **fields, **more}) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, "the executor in the other process has ended"
        result = ToolResult.model_validate_json(line)
        ids = {attempt.attempt_id for attempt in result.attempts}
        events = [event for event in read_events(self.log) if event.get("attempt_id") in ids]
        return Run(result, parse_seen(result.stdout), events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._directory.cleanup()


def main(root: Path, packages: Path) -> None:
    settings = Settings(state_dir=root / "state", audit_log=root / "audit.jsonl", python_packages=packages)
    with (
        SyncExecutor(root / "main.yaml", settings=settings) as executor,
        SyncExecutor(root / "unrestricted.yaml", settings=settings) as unrestricted,
    ):
        for line in sys.stdin:
            call = CodeCall(**json.loads(line))
            print((unrestricted if call.domains == [] else executor).run(call).model_dump_json(), flush=True)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
