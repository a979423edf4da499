"""A small agent host. The model is a script, so that it needs no network; the host and the service are real.

    python docs/examples/agent_host.py               # starts a service of its own, on a temporary socket
    python docs/examples/agent_host.py --uds PATH    # uses one that runs

`docs/client.md` walks through it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.client import Busy, Client, InvalidCall, Retries, ServiceError, TaskHandle
from sandbox.code_exec import CodeExecResult, shown
from sandbox.contract import ToolResult


@dataclass(frozen=True)
class ToolCall:
    """What a model asks for. `stop_at` is the person's doing: they press stop when this text is shown."""

    tool: str
    arguments: dict[str, Any]
    stop_at: str | None = None


@dataclass
class Host:
    """Makes the model's calls, and turns what comes of them into text for the model."""

    client: Client
    tasks: list[TaskHandle] = field(default_factory=list)
    news: list[str] = field(default_factory=list)  # notes that the model was not told yet

    def answer(self, call: ToolCall) -> str:
        """Whatever happens, the model gets a text that it can act on."""
        try:
            if call.tool == "code_exec":
                return self._code_exec(**call.arguments)
            return self._code_execution(call)
        except InvalidCall as error:  # the model's own fault: every one of them, with its path
            return "invalid call: " + "; ".join(error.problems)
        except Busy as error:
            return f"busy: {error}; try again in {error.retry_after_seconds:g} s"
        except ServiceError as error:  # for the operator; the model need not know more
            print(f"  host: {error.code}: {error}", file=sys.stderr)
            return f"the sandbox cannot be used now ({error.code})"

    def _code_execution(self, call: ToolCall) -> str:
        """Detached, so that its output can be shown as it comes; the answer is its last event."""
        task = self.client.submit(**call.arguments)
        for event in task.events():
            if event.kind in ("stdout", "stderr"):
                text = event.data["text"]
                for line in text.strip().splitlines():
                    print(f"  live {event.kind}: {line}")
                if call.stop_at is not None and call.stop_at in text:
                    print("  host: the person pressed stop")
                    task.cancel()
        record = task.wait()
        self._take_notes(but_of=task.task_id)  # which was just seen
        if record.result is None:
            return f"the call is {record.state}: whether its code ran is not known"
        return self._said(record.result)

    def _said(self, result: ToolResult) -> str:
        if result.error is None:
            return result.stdout
        if result.error.code == "policy_refused":
            rule = result.error.rule
            return f"refused by the policy, and another way there will be, too ({rule}): {result.error.message}"
        return f"{result.error.code}: {result.error.message}\n{result.stdout}{result.stderr}"

    def _code_exec(self, **arguments: Any) -> str:
        result: CodeExecResult = self.client.code_exec(**arguments)
        if result.success is None and result.task_id is not None:
            self.tasks.append(TaskHandle(self.client, result.task_id))
        return shown(result)  # notes of tasks that have ended are in it

    def begin_turn(self) -> list[str]:
        """What happened since the last one, for the head of the model's next prompt."""
        self._take_notes()
        news, self.news = self.news, []
        return news

    def _take_notes(self, but_of: str = "") -> None:
        for note in self.client.notes():  # each is told once: whoever takes them keeps them
            if note.task_id != but_of:
                self.news.append(f"[note] {note.task_id} {note.state}: {note.text.strip()}")


def model() -> Generator[ToolCall, str, None]:
    """A model that was trained on one afternoon. It yields calls, and is sent what came of them."""
    python = {"language": "python"}
    yield ToolCall("code_execution", {**python, "code": "for n in range(3):\n    print(n * n)"})
    said = yield ToolCall("code_execution", {**python, "code": "print(1)", "timeout": 0, "colour": "blue"})
    if "timeout" in said:  # it reads the faults, and mends its call
        yield ToolCall("code_execution", {**python, "code": "print(1)", "timeout": 5})
    fetch = "import urllib.request as r; print(r.urlopen('https://blocked.example').status)"
    yield ToolCall("code_execution", {**python, "code": fetch, "allow_network": True, "domains": ["blocked.example"]})
    yield ToolCall("code_exec", {"code": "import time; print('too slow'); time.sleep(60)", "timeout": 1})
    add = "total = sum(range(10**6)); open('sum.txt', 'w').write(str(total)); print('written')"
    yield ToolCall("code_exec", {"code": add, "background": True})
    yield ToolCall("code_exec", {"code": "print(open('sum.txt').read())"})
    forever = "import time\nprint('step 1', flush=True)\ntime.sleep(60)\nprint('step 2')"
    yield ToolCall("code_execution", {**python, "code": forever, "timeout": 90}, stop_at="step 1")


def converse(host: Host) -> None:
    script, said = model(), None
    number = 0
    while True:
        try:
            call = next(script) if said is None else script.send(said)
        except StopIteration:
            return
        number += 1
        print(f"turn {number}: {call.tool}")
        for note in host.begin_turn():
            print(f"  {note}")
        said = host.answer(call)
        for line in said.splitlines():
            print(f"  model reads: {line}")
        for task in host.tasks:  # a person would type their next message meanwhile
            task.wait(timeout=30)


def ask_twice(client: Client) -> None:
    """The connection was lost, and nobody knows whether the call ran: under its key it is safe to ask again."""
    key = f"turn-9-{os.getpid()}"
    call = {"language": "python", "code": "import uuid; print(uuid.uuid4())", "idempotency_key": key}
    first, again = client.run(call), client.run(call)
    print(f"asked twice under one key: {'one run' if first == again else 'two runs'}")


@contextlib.contextmanager
def own_service() -> Iterator[Path]:
    """A service on a temporary socket, with a state directory of its own. It ends with this program."""
    with tempfile.TemporaryDirectory(prefix="agent-host-") as directory:
        socket = Path(directory) / "run" / "sluicegate.sock"
        environment = {**os.environ, "SLUICEGATE_STATE_DIR": f"{directory}/state"}
        command = [sys.executable, "-m", "sandbox.cli", "serve", "--uds", str(socket)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as service:
            try:
                assert service.stdout is not None
                if not service.stdout.readline().startswith("listening on "):
                    raise SystemExit("the service did not start; it has said why")
                yield socket
            finally:
                service.terminate()  # it lets calls end, for up to `--drain-seconds`


def main() -> None:
    parser = argparse.ArgumentParser(description="A small agent host.")
    parser.add_argument("--uds", type=Path, help="the socket of a service that runs")
    given = parser.parse_args().uds
    with contextlib.nullcontext(given) if given else own_service() as socket:
        with Client(uds=socket, retries=Retries(lost=2, busy=3)) as client:
            converse(Host(client))
            ask_twice(client)


if __name__ == "__main__":
    main()
