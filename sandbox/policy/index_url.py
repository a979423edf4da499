"""The address of a package index, as a policy or a package client writes it. Pure.

Owns: reading it strictly. Must not: know which index belongs to which language.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.destinations import Host, InvalidHost, parse_host, parse_port

_DEFAULT_PORTS = {"https": 443, "http": 80}


class InvalidIndex(ValueError):
    """The text is not an index address. The message says why, without quoting the text: it may hold a password."""


@dataclass(frozen=True, slots=True)
class IndexUrl:
    """Where an index is. `has_credentials` tells that a user name or password stood in the text; they are not kept."""

    scheme: str
    host: Host
    port: int
    path: str
    has_credentials: bool = False

    def __str__(self) -> str:
        name = f"[{self.host}]" if self.host.address is not None and self.host.address.version == 6 else str(self.host)
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{name}{port}{self.path}"


def parse_index(text: str) -> IndexUrl:
    """Read `https://host[:port]/path`, or a bare host name, which means https. Raises `InvalidIndex`."""
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text or len(text) > 1024:
        raise InvalidIndex("it has a character that no address has, or is too long")
    if "://" not in text:
        if "/" in text or ":" in text or "@" in text:
            raise InvalidIndex("it is neither an `https://` address nor a host name")
        text = f"https://{text}/"
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise InvalidIndex("it is not an `https://` address")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
    except ValueError as error:
        raise InvalidIndex("it is not an address") from error
    credentials, at, authority = parts.netloc.rpartition("@")
    if parts.query or parts.fragment:
        raise InvalidIndex("it has a query or a fragment")
    name, port = authority, _DEFAULT_PORTS[scheme]
    if not authority.endswith("]") and ":" in authority:
        name, _, port_text = authority.rpartition(":")
        given = parse_port(port_text)
        if given is None:
            raise InvalidIndex("its port is not a number from 1 to 65535")
        port = given
    try:
        host = parse_host(name)
    except InvalidHost as error:
        raise InvalidIndex(f"its host is not one: {error}") from error
    return IndexUrl(scheme, host, port, parts.path or "/", bool(at) or bool(credentials))
