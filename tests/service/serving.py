"""A real `sluicegate serve`, in a process of its own, and clients that speak to it.

Owns: the life of that process. Must not: look into it; what it answers, prints and leaves behind is all there is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import trustme

from sandbox.tokens import hash_token, new_token
from tests.remote_executor import PATIENCE, until

TOP = Path(__file__).parents[2]
JSON = {"content-type": "application/json"}


class Token:
    """A token, and the entry of a policy that lets it in."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.text = new_token()
        self.entry = {"name": name, "sha256": hash_token(self.text), **fields}

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.text}"}


def policy_text(**sections: Any) -> str:
    """A policy as JSON, which is YAML."""
    return json.dumps({"version": 1, "name": "tests-service", **sections}, indent=1)


class Service:
    """`sluicegate serve`, listening. `root` has its policy, its state and, unless it is told otherwise, its socket."""

    def __init__(
        self, root: Path, policy: str, *options: str, prefix: Sequence[str] = (), environment: Mapping[str, str] = {}
    ) -> None:  # fmt: skip
        self.root = root
        self.policy = root / "policy.yaml"
        self.policy.write_text(policy)
        if not any(option in options for option in ("--uds", "--host", "--port")):
            options = (*options, "--uds", str(root / "s.sock"))
        self._errors: list[str] = []
        self._heard = threading.Condition()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "sandbox.cli", "serve", "--policy", str(self.policy), *options],
            cwd=TOP, env={**os.environ, "SLUICEGATE_STATE_DIR": str(root / "state"), "TMPDIR": str(root), **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        if not self.said.startswith("listening on "):
            self.close()
            raise AssertionError(f"it does not listen: {self.said}{self.log}")
        self.place = self.said.removeprefix("listening on ").strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def socket_path(self) -> str:
        return self.place.removeprefix("unix:")

    @property
    def port(self) -> int:
        return int(self.place.rpartition(":")[2])

    @property
    def log(self) -> str:
        """What it has written to its error output so far."""
        with self._heard:
            return "".join(self._errors)

    def logs(self, text: str) -> None:
        """Return once it has logged this."""
        with self._heard:
            assert self._heard.wait_for(lambda: text in "".join(self._errors), PATIENCE), self._errors

    def client(self, token: Token | None = None, *, ca: trustme.CA | None = None, **headers: str) -> httpx.Client:
        """httpx, as `token`, or as nobody."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given |= {} if token is None else token.headers
        if self.place.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.socket_path)
            return httpx.Client(transport=transport, base_url="http://sluicegate", headers=given, timeout=PATIENCE)
        verify: Any = False
        if ca is not None:
            import ssl

            verify = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
        return httpx.Client(base_url=self.place, headers=given, timeout=PATIENCE, verify=verify, trust_env=False)

    def connect(self) -> socket.socket:
        """A plain connection to its socket or port."""
        if self.place.startswith("unix:"):
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.settimeout(PATIENCE)
            plain.connect(self.socket_path)
            return plain
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        status = self._process.wait(PATIENCE)
        self._listener.join(PATIENCE)
        return status

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._listener.join(PATIENCE)
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._heard:
                self._errors.append(line)
                self._heard.notify_all()


def run(client: httpx.Client, code: str, **fields: Any) -> httpx.Response:
    """A Python call, answered."""
    return client.post("/v1/calls", json={"language": "python", "code": code, **fields})


def detach(client: httpx.Client, code: str, **fields: Any) -> str:
    """A Python call that runs in the background: its id."""
    answer = run(client, code, background=True, **fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["task_id"])


def sandboxed(service: Service) -> int:
    """How many sandboxes there are: the processes that bubblewrap is the parent of."""
    return sum(process.name() == "bwrap" for process in _alive(service.children()))


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            process.name()
        except psutil.NoSuchProcess:
            continue
        found.append(process)
    return found


def ended(client: httpx.Client, call_id: str) -> dict[str, Any]:
    """The record of a call, once it has ended."""

    def record() -> dict[str, Any] | None:
        answer = client.post(f"/v1/tasks/{call_id}/wait", params={"timeout": 50})
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told if told["state"] not in ("waiting", "running") else None

    found: dict[str, Any] = until(record, f"call {call_id} ends")
    return found
