"""What a test asks of the tool, whatever lies between: the library, HTTP or MCP.

Owns: the words that the tests and the three drivers share. Must not: know a transport.
"""

from __future__ import annotations

import base64
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.remote_executor import PATIENCE, until

ENDED = ("finished", "cancelled", "lost")
TENANT = "acme"


@dataclass(frozen=True)
class Who:
    """An ordinary user or an admin by name, or, where there is none, a single-user run of whoever started the tool.

    `claims_directory`: an ordinary user tells the client's working directory too, which is not for them.
    """

    user: str = ""
    admin: bool = False
    claims_directory: bool = False

    @property
    def ordinary(self) -> bool:
        return bool(self.user) and not self.admin

    @property
    def tells_directory(self) -> bool:
        return self.claims_directory or not self.ordinary


SINGLE_USER = Who()


class Refused(Exception):
    """There was no run: what the caller was told instead."""


@dataclass(frozen=True)
class Answer:
    """One answer. `everything` is all that came with it, as one text: what a reader could find in it at all."""

    success: bool | None
    output: str
    error: str | None
    exit_code: int | None
    call_id: str
    task_id: str | None
    working_dir: Mapping[str, Any]
    timeout_seconds: float
    notes: Sequence[Mapping[str, Any]]
    everything: str = field(repr=False, default="")

    @classmethod
    def of(cls, data: Mapping[str, Any], everything: str = "") -> Self:
        """From the structured result; a call that was detached may have less in it."""
        return cls(
            success=data.get("success"),
            output=data.get("output", ""),
            error=data.get("error"),
            exit_code=data.get("exit_code"),
            call_id=data["call_id"],
            task_id=data.get("task_id"),
            working_dir=data.get("working_dir", {}),
            timeout_seconds=data.get("timeout_seconds", 0),
            notes=data.get("notes", []),
            everything=everything or json.dumps(data),
        )


@dataclass(frozen=True)
class Task:
    """What `tasks` says of one. `answer` is its result, where it has one. `notes` came with it."""

    task_id: str
    state: str
    answer: Answer | None
    everything: str = field(repr=False)
    notes: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any], everything: str = "", notes: Sequence[Mapping[str, Any]] = ()) -> Self:
        answer = data.get("code_exec")
        return cls(
            task_id=data["task_id"] if "task_id" in data else data["call_id"],
            state=data["state"],
            answer=None if answer is None else Answer.of(answer),
            everything=everything or json.dumps(data),
            notes=notes,
        )


class Pending:
    """A call that runs. To `leave` is what a client does that will not wait any longer."""

    def __init__(self, future: Future[Answer]) -> None:
        self._future = future

    def answer(self) -> Answer:
        return self._future.result(PATIENCE)

    @property
    def answered(self) -> bool:
        return self._future.done()

    def leave(self) -> None:
        self._future.cancel()


class Driver(ABC):
    """One installation of the tool in `root`, and one way to it."""

    can_send_infinity = True

    def __init__(self, root: Path, prefix: Sequence[str] = ()) -> None:
        self.root = root
        self.prefix = prefix
        self.client_directory.mkdir(parents=True, exist_ok=True)

    @property
    def client_directory(self) -> Path:
        """The client's own working directory, for a single-user run."""
        return self.root / "projects" / "client"

    @property
    def user_data(self) -> Path:
        """Where ordinary users' directories are."""
        return self.root / "state" / "user_data"

    def files(self, who: Who) -> Path:
        """The directory that is somebody's own, on this host."""
        return self.user_data / who.user if who.ordinary else self.client_directory

    def environment(self, state: str = "state") -> dict[str, str]:
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        temporary.chmod(0o1777)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        return {
            **kept,
            "HOME": str(self.root),
            "TMPDIR": str(temporary),
            "SLUICEGATE_STATE_DIR": str(self.root / state),
        }

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """End it as an operator would."""

    @abstractmethod
    def kill(self) -> None:
        """End it by SIGKILL."""

    def restart(self, *, kill: bool = False) -> None:
        if kill:
            self.kill()
        else:
            self.close()
        self.start()

    @abstractmethod
    def forget(self, who: Who) -> None:
        """Close the connections that were somebody's."""

    @abstractmethod
    def begin(self, who: Who, arguments: Mapping[str, Any]) -> Pending:
        """Make a call, without waiting for its answer."""

    @abstractmethod
    def list_tasks(self, who: Who) -> list[Task]: ...

    @abstractmethod
    def show_task(self, who: Who, task_id: str) -> Task:
        """Raises `Refused` where there is none."""

    @abstractmethod
    def wait_for_task(self, who: Who, task_id: str, seconds: float) -> Task: ...

    @abstractmethod
    def cancel_task(self, who: Who, task_id: str) -> Task: ...

    @abstractmethod
    def take_notes(self, who: Who) -> list[Mapping[str, Any]]: ...

    @abstractmethod
    def state(self, who: Who, call_id: str) -> str:
        """What a call's record says of its state. Delivers no note."""

    @abstractmethod
    def written(self, who: Who, call_id: str, stream: str) -> str:
        """All that a call's record keeps of what its program wrote."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """The published JSON Schema of the tool's parameters."""

    def code_exec(self, who: Who, **arguments: Any) -> Answer:
        return self.begin(who, arguments).answer()

    def detach(self, who: Who, code: str, **arguments: Any) -> str:
        """The `task_id` of a call in the background."""
        answer = self.code_exec(who, code=code, background=True, **arguments)
        assert answer.task_id
        return answer.task_id

    def ended(self, who: Who, task_id: str) -> str:
        """How a task ended, once it has. Delivers no note."""
        found: str = until(lambda: (state := self.state(who, task_id)) in ENDED and state, f"the end of {task_id}")
        return found

    def put(self, who: Who, **files: str) -> None:
        """Make files, and the directories above them; a name that ends in `/` is a directory.

        As the owner would: an ordinary user through a run, in a single-user run by hand.
        """
        if not who.ordinary:
            for name, text in files.items():
                path = self.client_directory / name
                (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
                if not name.endswith("/"):
                    path.write_text(text)
            owner = self.client_directory.stat()
            for path in self.client_directory.rglob("*"):
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
            return
        given = base64.b64encode(json.dumps(files).encode()).decode()
        answer = self.code_exec(who, code=_PUT.replace("GIVEN", given))
        assert answer.success, answer.output


_PUT = """
import base64, json, pathlib
for name, text in json.loads(base64.b64decode("GIVEN")).items():
    path = pathlib.Path(name)
    (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if not name.endswith("/"):
        path.write_text(text)
"""


def wire(arguments: Mapping[str, Any]) -> str:
    """The arguments as JSON, with the two that it lacks as clients send them: `NaN`, and a number without bound."""
    return json.dumps(dict(arguments)).replace("Infinity", "1e309")
