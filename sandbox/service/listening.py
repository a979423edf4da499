"""Where the service listens: a unix socket of its user's alone, or a TCP port, and TLS.

Every connection has a place from the moment it is accepted, also while it shakes hands. One that gets none is told so,
where that can be said without TLS, and closed.

Owns: the listening socket and its file. Must not: read from a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from proxy.directories import make_private
from sandbox.service.connections import Connection, raw_answer
from sandbox.service.errors import HttpError
from sandbox.service.places import Place, Places
from sandbox.state import InvalidSettings

HANDSHAKE_SECONDS = 10.0
_GOODBYE_SECONDS = 300.0  # what is still to be sent counts; who does not read is dropped by the connection's own clock
_BACKLOG = 512
_MAX_PATH_BYTES = 107  # `sun_path` has 108 bytes, the last of which is a zero
_MAX_LOCK_NAME = 100
_CROWDED_SECONDS = 0.01  # between looks whether there is room
_TURNS = 3  # of the loop, for what has arrived to be read and to have shown whose it is, before another is let in
_FULL_SECONDS = 0.5  # after running out of descriptors
_TOO_MANY = HttpError(503, "too_many_connections", "too many connections are open", retry_after_seconds=1)
_log = logging.getLogger("sluicegate.service")


class CannotListen(Exception):
    """There is no socket to be had there now. The message says why, with a hint."""


# Sockets


class UnixSocket:
    """A listening socket in the file system, mode 0600, for as long as this is open."""

    def __init__(self, path: Path) -> None:
        """Bind. A file that a dead server left is replaced. Raises `InvalidSettings`, `CannotListen`."""
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise InvalidSettings(
                f"the path of the socket has more than {_MAX_PATH_BYTES} bytes: `{path}`\nhint: give a shorter one by "
                "`--uds`"
            )
        self.path = path
        try:
            make_private(path.parent)
            _check_directory(path.parent)
            self._lock = _lock_beside(path)
            try:
                self.socket = _bound(path)
                self._file = os.lstat(path)
            except BaseException:
                self._unlock()
                raise
        except OSError as error:
            raise CannotListen(
                f"`{path}` cannot be listened at: {(error.strerror or str(error)).lower()}\nhint: give another path by "
                "`--uds`"
            ) from error

    def close(self) -> None:
        """Remove the file, unless another has taken its place."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if os.path.samestat(self._file, os.lstat(self.path)):
                self.path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            _lock_name(self.path).unlink()
        os.close(self._lock)


def _check_directory(directory: Path) -> None:
    status = directory.stat()
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise InvalidSettings(
            f"others may replace the socket in `{directory}`\nhint: `chmod 700 {directory}`, or give another path by "
            "`--uds`"
        )


def _lock_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:_MAX_LOCK_NAME]}.lock")


def _lock_beside(path: Path) -> int:
    """Held while the server lives, so that two that start at once do not remove one another's socket."""
    while True:
        lock = os.open(_lock_name(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.lstat(_lock_name(path))):
                return lock
        except FileNotFoundError:
            pass  # whoever had it removed it in between
        except BlockingIOError:
            os.close(lock)
            raise _in_use(path) from None
        os.close(lock)


def _bound(path: Path) -> socket.socket:
    """Bound and private before anyone can connect: until it listens, nobody can."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise CannotListen(f"`{path}` is there and is no socket\nhint: give another path by `--uds`")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise _in_use(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(os.fspath(path))
        path.chmod(0o600)
    except BaseException:
        bound.close()
        raise
    return bound


def _in_use(path: Path) -> CannotListen:
    return CannotListen(f"another server listens at `{path}`\nhint: end it, or give another path by `--uds`")


def tcp_socket(host: str, port: int) -> socket.socket:
    """Bound to an address. Raises `InvalidSettings`, `CannotListen`."""
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host.replace("%", "/"))  # no zones
    except ValueError as error:
        raise InvalidSettings(f"`--host` is `{host!a}`, which is no address\nhint: write `127.0.0.1`") from error
    bound = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.version == 6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((str(address), port))
    except OSError as error:
        bound.close()
        raise CannotListen(
            f"`{address}` port {port} cannot be listened at: {(error.strerror or str(error)).lower()}\nhint: give "
            "another by `--host` and `--port`"
        ) from error
    return bound


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and later, with this certificate. Raises `InvalidSettings`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise InvalidSettings(
            f"`{certificate}` and `{key}` cannot be used for TLS: {error}\nhint: give a certificate and its key, both "
            "in PEM form, the key without a passphrase"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a passphrase")


# Connections


class Listener:
    """Accepts connections at one socket. Made as uvicorn knows servers: `close`, then `wait_closed`."""

    def __init__(
        self, bound: socket.socket, tls: ssl.SSLContext | None, places: Places,
        make: Callable[[Place], Connection],
    ) -> None:  # fmt: skip
        """`make` makes the protocol of one connection, which gives its place back when it is lost."""
        self._socket = bound
        self._tls = tls
        self._places = places
        self._make = make
        self._accepting: asyncio.Task[None] | None = None
        self._greeting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Raises `CannotListen`."""
        self._socket.setblocking(False)
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:
            raise CannotListen(f"the socket cannot be listened at: {(error.strerror or str(error)).lower()}") from error
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept no more. Connections that are there stay."""
        for task in (self._accepting, *self._greeting):
            if task is not None:
                task.cancel()
        self._socket.close()

    async def wait_closed(self) -> None:
        if tasks := [task for task in (self._accepting, *self._greeting) if task is not None]:
            await asyncio.wait(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while (seconds := self._places.wait_seconds()) > 0:  # noqa: ASYNC110 - time alone may end it
                await asyncio.sleep(min(seconds, _CROWDED_SECONDS))
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    _log.error("no connection can be accepted: %s", error.strerror)
                    await asyncio.sleep(_FULL_SECONDS)
                continue  # else it was gone before it was accepted
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        def end() -> None:
            task.cancel()

        if (place := self._places.take(end)) is None:
            self._turn_away(connection)
            return
        task = asyncio.get_running_loop().create_task(self._greet(connection, place))
        self._greeting.add(task)

        def greeted(_: asyncio.Task[None]) -> None:
            self._greeting.discard(task)
            if task.cancelled():  # perhaps before it had begun
                connection.close()
                place.give_back()

        task.add_done_callback(greeted)

    def _turn_away(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if self._tls is None:
                connection.send(raw_answer(_TOO_MANY))

    async def _greet(self, connection: socket.socket, place: Place) -> None:
        """Shake hands. From then on the connection gives its place back itself."""
        shake, end = (None, None) if self._tls is None else (HANDSHAKE_SECONDS, _GOODBYE_SECONDS)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(place), connection, ssl=self._tls, ssl_handshake_timeout=shake,
                ssl_shutdown_timeout=end,
            )  # fmt: skip
        except OSError:  # of TLS, too
            connection.close()
            place.give_back()
        except BaseException:
            connection.close()
            place.give_back()
            raise
