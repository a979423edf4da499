"""Inside a preparation sandbox: HTTP, as far as a preparation needs it.

Owns: the connections, and whom they trust. Must not: decide what is asked for.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - every connection's: loaded once, before there are processes that take connections
import http.client
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

_TIMEOUT_SECONDS = 60.0
_REDIRECTS = 3


def trust(job: Mapping[str, Any]) -> ssl.SSLContext:
    """The proxy's own authority, and no other: it opens every connection of a preparation."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=job["authority"])
    return context


class Client:
    """GET, over connections that are kept. What the proxy refuses is an answer like any other."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._connections: dict[tuple[str, str], http.client.HTTPConnection] = {}

    @contextlib.contextmanager
    def get(self, url: str, accept: str = "*/*") -> Iterator[http.client.HTTPResponse]:
        """Raises `OSError`, `http.client.HTTPException`."""
        for _ in range(_REDIRECTS + 1):
            response = self._ask(url, accept)
            location = response.getheader("location")
            if response.status not in (301, 302, 303, 307, 308) or location is None:
                break
            response.read()
            url = urljoin(url, location)
        try:
            yield response
        finally:
            if not response.isclosed():  # not read to its end
                self._forget(url)

    def _ask(self, url: str, accept: str) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        key = (parts.scheme, parts.netloc)
        headers = {"Accept": accept, "User-Agent": "sluicegate"}
        kept = key in self._connections
        try:
            connection = self._connections.get(key) or self._connect(parts.scheme, parts.netloc)
            connection.request("GET", parts.path or "/", headers=headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            self._forget(url)
            if not kept:
                raise
            return self._ask(url, accept)  # a kept connection may have been closed meanwhile

    def _connect(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        if scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                netloc, timeout=_TIMEOUT_SECONDS, context=self._context
            )
        elif scheme == "http":
            connection = http.client.HTTPConnection(netloc, timeout=_TIMEOUT_SECONDS)
        else:
            raise OSError("the URL is neither of http nor of https")
        self._connections[scheme, netloc] = connection
        return connection

    def _forget(self, url: str) -> None:
        parts = urlsplit(url)
        connection = self._connections.pop((parts.scheme, parts.netloc), None)
        if connection is not None:
            connection.close()
