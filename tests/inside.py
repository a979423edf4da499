"""Probes that run inside a sandbox: the source of this module is put before the code of a test's attempt.

Standard library only, and no import of the project. A probe returns what it saw; `report` prints it for the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import ssl
import struct
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 20.0


def report(**seen: Any) -> None:
    """Say what was seen, for the test to read."""
    print("@@SEEN " + json.dumps(seen), flush=True)


def text(data: bytes) -> str:
    return data.decode("latin-1")


def read_all(sock: socket.socket) -> bytes:
    """Everything until the other side ends or resets, or nothing comes for long."""
    data = b""
    with contextlib.suppress(OSError):
        while part := sock.recv(65536):
            data += part
    return data


def exchange(host: str, port: int, payload: bytes = b"CANARY\r\n", family: int = socket.AF_INET) -> dict[str, Any]:
    """Connect, send, and read one piece: what a raw TCP client sees."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE)
            sock.connect((host, port))
            sock.sendall(payload)
            return {"answer": text(sock.recv(65536)), "error": None}
    except OSError as error:
        return {"answer": "", "error": repr(error)}


def proxy_address() -> tuple[str, int]:
    url = urlsplit(os.environ["HTTP_PROXY"])
    assert url.hostname is not None
    assert url.port is not None
    return url.hostname, url.port


def proxy_socket() -> socket.socket:
    return socket.create_connection(proxy_address(), PATIENCE)


def http_answer(sock: socket.socket) -> dict[str, Any]:
    """One HTTP/1.1 response: status, reason phrase, headers, body (JSON where it is)."""
    data = b""
    error = None
    try:
        while b"\r\n\r\n" not in data:
            part = sock.recv(65536)
            if not part:
                return {
                    "status": None,
                    "phrase": "",
                    "headers": {},
                    "body": text(data),
                    "json": None,
                    "error": "closed",
                }
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        _, status, phrase = (first + "  ").split(" ", 2)
        size = int(headers.get("content-length", "0"))
        while len(body) < size:
            part = sock.recv(65536)
            if not part:
                break
            body += part
    except OSError as problem:
        return {"status": None, "phrase": "", "headers": {}, "body": text(data), "json": None, "error": repr(problem)}
    return {
        "status": int(status),
        "phrase": phrase.strip(),
        "headers": headers,
        "body": text(body),
        "json": as_json(body),
        "error": error,
    }


def as_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def ask(sock: socket.socket, request: str | bytes) -> dict[str, Any]:
    """Send raw HTTP and read one response."""
    data = request.encode("latin-1") if isinstance(request, str) else request
    try:
        sock.sendall(data)
    except OSError as error:
        return {"status": None, "phrase": "", "headers": {}, "body": "", "json": None, "error": repr(error)}
    return http_answer(sock)


def through_proxy(request: str | bytes) -> dict[str, Any]:
    """Send raw HTTP to the explicit proxy and read one response."""
    with proxy_socket() as sock:
        return ask(sock, request)


def connect(target: str, host: str | None = None) -> tuple[dict[str, Any], socket.socket]:
    """Ask the explicit proxy for a tunnel. The socket is the tunnel when the status is 200."""
    sock = proxy_socket()
    return ask(sock, f"CONNECT {target} HTTP/1.1\r\nHost: {host or target}\r\n\r\n"), sock


def socks5(host: str, port: int) -> tuple[int | None, socket.socket]:
    """Ask the explicit proxy for a SOCKS5 connection, by name or by address. The reply code, and the socket."""
    sock = proxy_socket()
    try:
        sock.sendall(b"\x05\x01\x00")
        if sock.recv(2) != b"\x05\x00":
            return None, sock
        for family, kind in ((socket.AF_INET, b"\x01"), (socket.AF_INET6, b"\x04")):
            with contextlib.suppress(OSError):
                target = kind + socket.inet_pton(family, host)
                break
        else:
            target = b"\x03" + bytes([len(host)]) + host.encode()
        sock.sendall(b"\x05\x01\x00" + target + struct.pack("!H", port))
        head = sock.recv(4)
        if len(head) < 4:
            return None, sock
        rest = {1: 6, 4: 18}.get(head[3]) or sock.recv(1)[0] + 2
        sock.recv(rest)
        return head[1], sock
    except OSError:
        return None, sock


def tls(sock: socket.socket, name: str | None, alpn: str = "http/1.1", verify: bool = True) -> ssl.SSLSocket:
    """TLS with the trust that the sandbox came with; `name` is the SNI. `verify=False` only to look behind a refusal."""
    context = ssl.create_default_context()
    context.set_alpn_protocols([alpn])
    if not verify or name is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock, server_hostname=name)


def https(
    target: str, sni: str | None, host: str, path: str = "/echo", port: int = 443, verify: bool = True
) -> dict[str, Any]:
    """GET over TLS through a transparent connection, each name chosen apart: what is dialled, the SNI, the Host."""
    try:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as raw:
            raw.settimeout(PATIENCE)
            raw.connect((target, port))
            with tls(raw, sni, verify=verify) as sock:
                return ask(sock, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
    except OSError as error:
        return {"status": None, "phrase": "", "headers": {}, "body": "", "json": None, "error": repr(error)}


def fetch(url: str, method: str = "GET", data: bytes | None = None, **headers: str) -> dict[str, Any]:
    """urllib as a program uses it, without any setting."""
    request = urllib.request.Request(url, data, {k.replace("_", "-"): v for k, v in headers.items()}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            body = answer.read()
            return {"status": answer.status, "body": text(body), "json": as_json(body), "error": None}
    except urllib.error.HTTPError as error:
        body = error.read()
        return {"status": error.code, "body": text(body), "json": as_json(body), "error": error.reason}
    except (urllib.error.URLError, OSError) as error:
        return {"status": None, "body": "", "json": None, "error": repr(error)}


def resolve(name: str, family: int = socket.AF_UNSPEC) -> dict[str, Any]:
    """The libc resolver's answer."""
    try:
        answers = socket.getaddrinfo(name, 80, family, socket.SOCK_STREAM)
        return {"addresses": sorted({str(answer[4][0]) for answer in answers}), "error": None}
    except OSError as error:
        return {"addresses": [], "error": str(error)}


def dns(name: str, kind: int = 1, server: str = "8.8.8.8", tcp: bool = False) -> dict[str, Any]:
    """A DNS question of our own making, to any server: the response code and the number of answers."""
    ident = random.randrange(65536)
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    query = struct.pack("!HHHHHH", ident, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as sock:
            sock.settimeout(PATIENCE)
            sock.connect((server, 53))
            if tcp:
                sock.sendall(struct.pack("!H", len(query)) + query)
                size = struct.unpack("!H", sock.recv(2))[0]
                reply = sock.recv(size)
            else:
                sock.send(query)
                reply = sock.recv(65536)
    except (OSError, struct.error) as error:
        return {"code": None, "answers": 0, "error": repr(error)}
    answered, flags, _, answers = struct.unpack_from("!HHHH", reply)
    if answered != ident:
        return {"code": None, "answers": 0, "error": "an answer to another question"}
    return {"code": flags & 0xF, "answers": answers, "error": None}


def datagrams(targets: list[tuple[str, int]], how: str = "sendto", payload: bytes = b"CANARY") -> list[str]:
    """One UDP datagram to each target, sent in one of the ways the kernel has, and all that comes back in a moment."""
    answers = []
    with contextlib.ExitStack() as stack:
        socks = []
        for host, port in targets:
            sock = stack.enter_context(
                socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
            )
            socks.append(sock)
            with contextlib.suppress(OSError):
                if how == "sendto":
                    sock.sendto(payload, (host, port))
                elif how == "sendmsg":
                    sock.sendmsg([payload], [], 0, (host, port))
                else:
                    sock.connect((host, port))
                    sock.send(payload)
        # Silence is what is asked for, so it has to be waited for; an answer over loopback takes microseconds.
        while ready := select.select(socks, [], [], 0.5)[0]:
            for sock in ready:
                socks.remove(sock)
                with contextlib.suppress(OSError):
                    answers.append(text(sock.recv(65536)))
    return answers
