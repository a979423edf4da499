"""Names to addresses: one lookup, all answers, bounded, classified; and the loop that dials exactly what was vetted.

Owns: the lookups, their cache, and what `getaddrinfo` means inside the proxy. Must not: decide.
"""

from __future__ import annotations

import asyncio
import contextvars
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from proxy.destinations import AddressClass, Host, IPAddress, classify_address
from proxy.network import StaticHost

type Lookup = Callable[[str], list[IPAddress]]

_WORKERS = 32
_CACHE_ENTRIES = 4096


class ResolutionFailed(Exception):
    """The name has no address, or the lookup failed. Not a policy decision."""


@dataclass(frozen=True, slots=True)
class Resolved:
    address: IPAddress
    address_class: AddressClass


def system_lookup(name: str) -> list[IPAddress]:
    """All addresses that the host's resolver gives. Blocking. Raises OSError."""
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    texts = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return [ipaddress.ip_address(text) for text in texts if "%" not in text]


def observe_address(address: IPAddress) -> Resolved:
    """The class of an address as this host sees it: `OWN` for a public address that is this host's.

    Connecting a datagram socket asks the routing table and sends nothing; the kernel picks the destination itself as
    the source exactly when the destination is local.
    """
    kind = classify_address(address)
    if kind is AddressClass.PUBLIC:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((str(address), 9))
                if ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address:
                    kind = AddressClass.OWN
        except OSError:
            pass  # no route: the dial will say so
    return Resolved(address, kind)


class Resolver:
    """Bounded look-ups with a short cache. `ttl_seconds` is far below what rebinding needs to be harmless: every
    use is vetted again, cached or not."""

    def __init__(
        self, lookup: Lookup = system_lookup, *, ttl_seconds: float = 20.0, timeout_seconds: float = 10.0
    ) -> None:
        self._lookup = lookup
        self._ttl = ttl_seconds
        self._timeout = timeout_seconds
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="resolver")
        self._cache: dict[str, tuple[float, list[IPAddress]]] = {}
        self._running: dict[str, asyncio.Future[list[IPAddress]]] = {}

    def known(self, host: Host, static: Sequence[StaticHost]) -> tuple[Resolved, ...] | None:
        """Every address of `host` where no look-up is needed: itself, a static answer, or the answer given just now."""
        if host.address is not None:
            return (observe_address(host.address),)
        for entry in static:
            if entry.host == host:
                return tuple(observe_address(address) for address in entry.addresses)
        hit = self._cache.get(host.text)
        if hit is None or hit[0] <= time.monotonic():
            return None
        return tuple(observe_address(address) for address in hit[1])

    async def resolve(self, host: Host, static: Sequence[StaticHost], slots: asyncio.Semaphore) -> tuple[Resolved, ...]:
        """Every address of `host`.

        `slots` bounds the look-ups that one attempt may have under way. One that is given up still takes its slot until
        it has ended, since it takes a thread. Raises `ResolutionFailed`.
        """
        if (known := self.known(host, static)) is not None:
            return known
        await slots.acquire()
        running = self._running.get(host.text)
        if running is None:
            running = self._start(host.text)
        running.add_done_callback(lambda _done: slots.release())
        addresses = await self._finish(host.text, running)
        return tuple(observe_address(address) for address in addresses)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, name: str) -> asyncio.Future[list[IPAddress]]:
        def done(ended: asyncio.Future[list[IPAddress]]) -> None:
            self._running.pop(name, None)
            if not ended.cancelled():
                ended.exception()  # retrieved: nobody need be waiting any more

        running = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._pool, self._lookup, name))
        self._running[name] = running
        running.add_done_callback(done)
        return running

    async def _finish(self, name: str, running: asyncio.Future[list[IPAddress]]) -> list[IPAddress]:
        try:
            addresses = await asyncio.wait_for(asyncio.shield(running), self._timeout)
        except TimeoutError as error:
            raise ResolutionFailed(f"looking up `{name}` took longer than {self._timeout:.0f} s") from error
        except (OSError, ValueError) as error:  # UnicodeError is a ValueError, and so is an address that is none
            raise ResolutionFailed(f"`{name}` could not be resolved: {error}") from error
        if not addresses:
            raise ResolutionFailed(f"`{name}` has no address")
        while len(self._cache) >= _CACHE_ENTRIES:
            self._cache.pop(next(iter(self._cache)))
        self._cache[name] = (time.monotonic() + self._ttl, addresses)
        return addresses


_pinned: contextvars.ContextVar[tuple[str, tuple[IPAddress, ...]] | None] = contextvars.ContextVar(
    "pinned", default=None
)


def pin(host: Host, addresses: tuple[IPAddress, ...]) -> None:
    """Let the current task dial `host`, and only it, at these addresses."""
    _pinned.set((host.text, addresses))


def _vetted_addresses(host: str) -> tuple[IPAddress, ...]:
    pinned = _pinned.get()
    if pinned is None or pinned[0] != host:
        raise socket.gaierror(socket.EAI_FAIL, "nothing was vetted for this destination")
    return pinned[1]


class PinnedLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves nothing: a connection goes to the addresses that its own task has pinned.

    The connection keeps its name for SNI and for reuse, and no second lookup can change where it goes.
    """

    async def create_connection(self, protocol_factory: Any, host: Any = None, *args: Any, **options: Any) -> Any:
        _vetted_addresses(host)  # an address literal would not come by `getaddrinfo`
        return await super().create_connection(protocol_factory, host, *args, **options)

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - the loop's own signature
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        return [
            (
                socket.AF_INET if address.version == 4 else socket.AF_INET6,
                type or socket.SOCK_STREAM,
                proto or socket.IPPROTO_TCP,
                "",
                (str(address), port) if address.version == 4 else (str(address), port, 0, 0),
            )
            for address in _vetted_addresses(host)
            if family in (0, socket.AF_INET if address.version == 4 else socket.AF_INET6)
        ]
