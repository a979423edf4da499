"""Where the service is, and as whom it is spoken to. Effect: reads the environment.

Owns: the choice of address, and that a token is not sent where others can read it. Must not: connect.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TypedDict, Unpack
from urllib.parse import urlsplit

from sandbox.state import InvalidSettings, default_socket

TOKEN_VARIABLE = "SLUICEGATE_TOKEN"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True)
class Place:
    """An address of the service, with what every request to it carries. `socket` is None over TCP."""

    base_url: str
    socket: str | None = None
    headers: Mapping[str, str | bytes] = field(default_factory=dict, repr=False)  # the token is in them
    ca: str | None = None

    def tls(self) -> ssl.SSLContext:
        """Trusts the given authority, else those of this system. Raises `InvalidSettings`."""
        if self.socket is not None:
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; to load authorities takes a while
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSettings(
                f"`ca` is `{self.ca!a}`, and no authority can be read from it: {error.strerror or error}\nhint: give a "
                "file of certificates in PEM form"
            ) from error


class Address(TypedDict, total=False):
    """What a client can be told of where the service is, and as whom to speak to it; see `choose_place`."""

    uds: Path | str | None
    token: str | None
    user: str | None
    working_directory: Path | str | None
    ca: Path | str | None
    send_token_in_plaintext: bool


def choose_place(base_url: str | None = None, **address: Unpack[Address]) -> Place:
    """The place that is meant: `uds` is the path of a socket, and that of the default one without any address.

    `token` falls to `$SLUICEGATE_TOKEN`. `ca` is a file of the authorities to trust over `https`. `user` and
    `working_directory` are whose calls these are, and where an administrator's `code_exec` works. A token goes to no
    other machine without TLS, unless `send_token_in_plaintext`.

    Raises `InvalidSettings`.
    """
    uds, token, ca = address.get("uds"), address.get("token"), address.get("ca")
    if base_url is not None and uds is not None:
        raise InvalidSettings("`base_url` and `uds` are two addresses\nhint: give one of them")
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    headers: dict[str, str | bytes] = {}
    if token:
        headers["authorization"] = f"Bearer {_header('token', token)}"
    if (user := address.get("user")) is not None:
        headers["sluicegate-user"] = _header("user", user)
    if (directory := address.get("working_directory")) is not None:
        if not Path(directory).is_absolute():
            raise InvalidSettings(f"`working_directory` is `{str(directory)!a}`\nhint: give an absolute path")
        headers["sluicegate-working-directory"] = _path_header(os.fsencode(directory))
    if base_url is None:
        return Place("http://sluicegate", str(default_socket() if uds is None else uds), headers)
    _check_url(base_url, bool(token) and not address.get("send_token_in_plaintext", False))
    return Place(base_url.rstrip("/"), None, headers, None if ca is None else str(ca))


def _check_url(base_url: str, has_secret: bool) -> None:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise InvalidSettings(f"`base_url` is `{base_url!a}`\nhint: write `https://host:port`")
    if url.username is not None:
        raise InvalidSettings("`base_url` has a user in it\nhint: a token is given as `token`")
    if url.scheme == "http" and has_secret and not _is_loopback(url.hostname):
        raise InvalidSettings(
            f"a token would go to `{url.hostname}` without TLS, and who reads it can call with it\nhint: write "
            "`https://`, or, on a network that is yours alone, give `send_token_in_plaintext=True`"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header(name: str, value: str) -> str:
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise InvalidSettings(f"`{name}` has characters that no header can carry\nhint: give printable ASCII")
    return value


def _path_header(path: bytes) -> bytes:
    """A path may have any byte but a zero, and a header none that ends or bends a line."""
    if any(byte < 0x20 or byte == 0x7F for byte in path) or path != path.strip():
        raise InvalidSettings("`working_directory` has characters that no header can carry\nhint: rename it")
    return path
