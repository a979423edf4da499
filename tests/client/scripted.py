"""A server on a unix socket that answers what it was told to, byte for byte, and keeps what it was asked.

Owns: the wire's accidents: connections that are closed before an answer, or in the middle of one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

CLOSE = b""  # the request is read, and the connection closed without an answer


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def answer(status: int, body: object, **headers: str) -> bytes:
    """A whole HTTP answer in JSON. `headers` have `_` for `-`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(data)}", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def refusal(status: int, code: str, message: str = "so it is", **fields: object) -> bytes:
    return answer(status, {"error": {"code": code, "message": message, **fields}})


def stream(*events: tuple[int, str, object], cut: bool = False) -> bytes:
    """A stream of events that ends; `cut`: in the middle of the last one."""
    text = ": still here\n\n" + "".join(
        f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for number, kind, data in events
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + (text[:-2] if cut else text).encode()


class Scripted:
    """Answers each request with the next of `answers`, each on a connection of its own."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        self.path = path
        self.asked: list[Asked] = []
        self._answers = list(answers)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        self.path.unlink()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, connection.makefile("rb") as file:
                    connection.settimeout(10)
                    if (asked := self._read(file)) is not None:
                        self.asked.append(asked)
                        connection.sendall(self._answers.pop(0) if self._answers else CLOSE)

    @staticmethod
    def _read(file: Any) -> Asked | None:
        line = file.readline().decode()
        if not line:
            return None
        method, target, _ = line.split(" ")
        headers = {}
        while (line := file.readline().decode().strip()):  # fmt: skip
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        return Asked(method, target, headers, file.read(int(headers.get("content-length", "0"))))
