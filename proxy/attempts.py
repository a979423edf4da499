"""What the proxy keeps of one attempt while it runs: what it may do, its synthetic addresses, its counters.

`Attempt.judge` is the one place where a decision is made *and* accounted for: every hook goes through it.
Owns: that state. Must not: touch sockets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from proxy.audit import AuditLog, AuditUnavailable
from proxy.destinations import Host, IPAddress, Unparsed
from proxy.events import ConnectionEvent, decision_event
from proxy.network import (
    Decision,
    Grant,
    Protocol,
    Reason,
    Request,
    RequestLayer,
    deny,
)
from proxy.shares import Share, Turns
from proxy.standing import Standing

_SYNTHETIC = ipaddress.IPv4Network("198.18.0.0/15")  # benchmarking range, RFC 2544: nobody's on the internet
_MAX_NAMES = 10_000
# A program must not be able to roll the log over and so remove what it did: whichever comes first.
_MAX_AUDIT_LINES = 20_000
_MAX_AUDIT_BYTES = 16 * 1024 * 1024  # a fortieth of the log with its rotated files
_MAX_DESTINATIONS = 1_000
_LOOKUPS_AT_ONCE = 8
_PAGES_AT_ONCE = 16  # of registries, that the proxy reads and judges for it
_MAX_ANSWERS_KEPT = 64 * 1024 * 1024  # bytes of pages that its clients have asked for, and not yet read
_ANSWER_PATIENCE_SECONDS = 30.0
_ANSWER_PAUSE_SECONDS = 0.05
# What one attempt may make the proxy do, which is one thread for all: far above what a program that gets anything done
# needs. What comes faster waits in the kernel, or is dropped there.
_BURST = 512
_PER_SECOND = 200
_ANSWERS_BURST = 512
_ANSWERS_PER_SECOND = 200


@dataclass(slots=True)
class Traffic:
    """Bytes as they crossed one connection's socket on the upstream side: `received` from it, `sent` to it."""

    received: int = 0
    sent: int = 0


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its response, as far as the log needs them."""

    request: Request
    started: float = field(default_factory=time.monotonic)
    traffic: Traffic = field(default_factory=Traffic)
    status: int | None = None
    refused: Decision | None = None  # answered by us, and written as a denial
    failed: str | None = None  # what went wrong upstream: no denial
    given_up: bool = False  # the client went away or broke the protocol
    served: bool = False  # answered by us, with what a registry says
    reserved: int = 0  # bytes of that answer which are not on their way yet

    @property
    def answered_here(self) -> bool:
        return self.refused is not None or self.failed is not None or self.served

    def count_sent(self, data: bytes) -> bytes:
        self.traffic.sent += len(data)
        return data

    def count_received(self, data: bytes) -> bytes:
        self.traffic.received += len(data)
        return data


@dataclass(frozen=True, slots=True)
class Dial:
    """One connection to a server, from the moment that it was allowed. `addresses` are those it may be, or is, at."""

    host: Host
    port: int
    protocol: Protocol
    addresses: tuple[IPAddress, ...]


@dataclass(slots=True, eq=False)
class Connection:
    """One client connection: how it came, where it goes, and a denial that is still to be told inside it."""

    protocol: str
    id: str | None = None
    destination: Host | Unparsed | None = None
    port: int | None = None
    denied: Decision | None = None
    carried: Protocol = Protocol.HTTP
    opaque: bool = False  # bytes pass unread: raw TCP, or TLS that is not opened
    sni: str | None = None
    started: float = field(default_factory=time.monotonic)
    upstream: Traffic = field(default_factory=Traffic)
    address: str | None = None
    error: str | None = None
    dialled: bool = False
    refused_dial: Decision | None = None
    unfinished_since: float | None = field(default_factory=time.monotonic)  # first bytes, a TLS handshake, a head
    upstreams: int = 0  # connections to servers that are open or being opened
    rests_until: float = 0.0  # before that nothing more of it is read
    aborted: bool = False
    open: set[Exchange] = field(default_factory=set)
    sending: set[Exchange] = field(default_factory=set)  # whose request is on its way, whatever became of its response
    dials: dict[str, Dial] = field(default_factory=dict)  # by the server connection's id
    unsent: Callable[..., int] | None = None  # `GuardedHttp.unsent`
    ahead: Callable[[], int] | None = None  # `GuardedHttp.ahead`
    buffered: Callable[[], int] | None = None  # `Handler.buffered_for_client`
    abort: Callable[[], None] | None = None  # `Handler.abort`
    hang_up: Callable[[str], None] | None = None  # `Handler.hang_up`

    @property
    def kept_for_client(self) -> int:
        """Bytes that the client has not taken yet."""
        kept = 0 if self.buffered is None else self.buffered()
        return kept + (0 if self.unsent is None else self.unsent(to_client=True))


class Attempt:
    """One attached attempt. Everything it decides, it also writes to the audit log, or it denies.

    `standing` is what it may do now; whoever asks a grant asks this, each time anew.
    """

    def __init__(self, grant: Grant, audit: AuditLog) -> None:
        self.standing = Standing(grant)
        self.over = False
        self.lookups = asyncio.Semaphore(_LOOKUPS_AT_ONCE)
        self.pages = asyncio.Semaphore(_PAGES_AT_ONCE)
        self.connections: dict[str, Connection] = {}
        self.connects = Share(_BURST, _PER_SECOND)
        self.queries = Share(_BURST, _PER_SECOND)
        self.answers = Share(_ANSWERS_BURST, _ANSWERS_PER_SECOND)
        self.turns = Turns()
        self.reserved = 0
        self.allowed = 0
        self.denied = 0
        self._audit = audit
        self._names: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._lines = 0
        self._bytes = 0
        self._log_full = False
        self._crowded = False
        self._destinations: dict[tuple[str, int | None, str, str], int] = {}

    @property
    def id(self) -> str:
        return self.standing.own.attempt_id

    def synthetic_address(self, name: Host) -> ipaddress.IPv4Address | None:
        """The address that stands for `name` in this attempt; None when it has used up its names."""
        if (known := self._addresses.get(name.text)) is not None:
            return ipaddress.IPv4Address(known)
        if len(self._names) >= _MAX_NAMES:
            return None
        address = _SYNTHETIC[len(self._names) + 1]
        self._names[str(address)] = name.text
        self._addresses[name.text] = str(address)
        return address

    def name_behind(self, address: str) -> str:
        """The name a synthetic address stands for; any other address is returned as it is."""
        return self._names.get(address, address)

    def admit(self, connection: Connection) -> bool:
        """Whether one more client connection may be served. Of a run of refusals the first is written, the rest is not.

        A run ends when the attempt is back at half of its connections, so that holding them at the limit is one line.
        """
        limit = self.standing.max_connections
        if len(self.connections) < limit:
            if len(self.connections) <= limit // 2:
                self._crowded = False
            return True
        if not self._crowded:
            self._crowded = True
            self.refuse(Request(RequestLayer.CONNECT, Unparsed("", "")), self._too_many("connections"), connection)
        return False

    def admit_upstream(self) -> Decision | None:
        """The denial of the newest connection to a server, which is counted already; None when it may be opened.

        One connection of a client can lead to many servers, so these have a limit too: twice that of the clients'.
        """
        upstreams = sum(connection.upstreams for connection in self.connections.values())
        if upstreams <= 2 * self.standing.max_connections:
            return None
        return self._too_many("connections to servers")

    async def reserve(self, exchange: Exchange, size: int) -> Decision | None:
        """Wait until an answer of ours may be kept for a client besides those that others have not read yet.

        None: it may. Else the denial: clients that don't read must not fill the proxy's memory.
        """
        deadline = time.monotonic() + _ANSWER_PATIENCE_SECONDS
        while (kept := self._kept()) and kept + size > _MAX_ANSWERS_KEPT:
            if time.monotonic() > deadline:
                detail = f"the attempt has asked for more than {_MAX_ANSWERS_KEPT // 2**20} MiB that it doesn't read"
                return deny(Reason.LIMIT_EXCEEDED, detail)
            await asyncio.sleep(_ANSWER_PAUSE_SECONDS)
        self.reserved += size
        exchange.reserved = size
        return None

    def release(self, exchange: Exchange) -> None:
        self.reserved -= exchange.reserved
        exchange.reserved = 0

    def _kept(self) -> int:
        return self.reserved + sum(connection.kept_for_client for connection in self.connections.values())

    @property
    def exhausted(self) -> bool:
        """Whether its share of the log is full: then nothing of it is served any more."""
        return self._log_full

    def note_wait(self, share: Share, what: str, connection: Connection) -> None:
        """Write that one of its shares is used up: of a burst the first time, the rest is not."""
        if share.is_first_wait():
            detail = f"the attempt has made {what} faster than {share.per_second} a second: the rest has to wait"
            decision = deny(Reason.LIMIT_EXCEEDED, detail)
            self.refuse(Request(RequestLayer.CONNECT, Unparsed("", "")), decision, connection)

    def rest(self, connection: Connection) -> None:
        """Note that a request was answered by us. Where that is too often, the connection rests after its answer."""
        if wait := self.answers.take():
            connection.rests_until = time.monotonic() + wait
            self.note_wait(self.answers, "requests that the proxy answers itself", connection)

    def _too_many(self, what: str) -> Decision:
        limit = self.standing.max_connections
        return deny(Reason.LIMIT_EXCEEDED, f"the attempt has too many {what} open: {limit} may be")

    def judge(self, request: Request, connection: Connection, *, final: bool = False, quiet: bool = False) -> Decision:
        """Decide, write the decision, count it. A decision that cannot be written is a denial.

        A denial is always written and counted. An allow is counted where it is `final`, that is, no later layer judges
        the same request; `quiet` leaves it out of the log where a later layer's line says the same and more.
        """
        decision = self.judge_silently(request)
        if not (quiet and decision.allowed):
            decision = self._write_decision(request, decision, connection)
        if final or not decision.allowed:
            self.count(request, decision)
        return decision

    def judge_silently(self, request: Request) -> Decision:
        """Decide without a trace: to choose between protocols or addresses, one of which is then judged for good."""
        if self.over:
            return deny(Reason.ATTEMPT_OVER, "the attempt is over")
        return self.standing.decide(request)

    def refuse(self, request: Request, decision: Decision, connection: Connection) -> Decision:
        """Write and count a denial that was not `decide`'s: a limit, or a protocol that is not what it must be."""
        decision = self._write_decision(request, decision, connection)
        self.count(request, decision)
        return decision

    def write(self, request: Request, decision: Decision, connection: Connection) -> Decision:
        """Write what was decided by more than `decide`, without counting it. If it can't be written it is a denial."""
        return self._write_decision(request, decision, connection)

    def repeat(self, request: Request, decision: Decision, connection: Connection) -> Decision:
        """Write, without counting it again, an earlier denial that a request inside the same connection runs into."""
        return self._write_decision(request, decision, connection)

    def write_end(
        self,
        connection: Connection,
        exchange: Exchange | None = None,
        *,
        error: str | None = None,
        address: str | None = None,
    ) -> None:
        """Write the end of a connection that was passed through unread, or of one exchange on one that was read.

        Raises `AuditUnavailable`.
        """
        outcome: Literal["completed", "failed", "aborted"] = "completed" if error is None else "failed"
        if connection.aborted or (exchange is not None and exchange.given_up):
            outcome = "aborted"
        traffic = connection.upstream if exchange is None else exchange.traffic
        grant = self.standing.told
        self._bytes += self._audit.write(
            ConnectionEvent(
                time=time.time(),
                call_id=grant.call_id,
                attempt_id=grant.attempt_id,
                tenant=grant.tenant,
                connection_id=connection.id,
                protocol=connection.protocol,
                host=str(connection.destination or "") if exchange is None else str(exchange.request.host),
                port=connection.port if exchange is None else exchange.request.port,
                sni=connection.sni,
                method=None if exchange is None else exchange.request.method,
                path=None if exchange is None else exchange.request.path,
                package=None if exchange is None else exchange.request.package,
                version=None if exchange is None else exchange.request.version,
                address=address if address is not None else connection.address,
                status=None if exchange is None else exchange.status,
                outcome=outcome,
                error=error,
                bytes_in=traffic.received,
                bytes_out=traffic.sent,
                duration_seconds=round(time.monotonic() - (connection if exchange is None else exchange).started, 6),
                policy_name=grant.policy_name,
                policy_digest=grant.policy_digest,
            )
        )
        self._lines += 1

    def destinations(self) -> list[dict[str, object]]:
        """Counts per host, port, decision and reason, most first."""
        rows = sorted(self._destinations.items(), key=lambda row: -row[1])
        return [
            {"host": host, "port": port, "decision": decision, "reason": reason, "count": count}
            for (host, port, decision, reason), count in rows[:100]
        ]

    def _write_decision(self, request: Request, decision: Decision, connection: Connection) -> Decision:
        if self._lines >= _MAX_AUDIT_LINES or self._bytes >= _MAX_AUDIT_BYTES:
            decision = deny(Reason.LIMIT_EXCEEDED, "this attempt has filled its share of the audit log")
            if self._log_full:
                return decision
            self._log_full = True
        self._lines += 1
        try:
            self._bytes += self._audit.write(
                decision_event(
                    self.standing.told,
                    request,
                    decision,
                    time=time.time(),
                    protocol=connection.protocol,
                    connection_id=connection.id,
                )
            )
        except AuditUnavailable as error:
            return deny(Reason.AUDIT_UNAVAILABLE, f"the decision could not be written to the audit log: {error}")
        return decision

    def count(self, request: Request, decision: Decision) -> None:
        """Count a request's final verdict; denials are counted by `judge` and `refuse` themselves."""
        if decision.allowed:
            self.allowed += 1
        else:
            self.denied += 1
        key = (str(request.host)[:300], request.port, decision.verdict.value, decision.reason.value)
        if key in self._destinations or len(self._destinations) < _MAX_DESTINATIONS:
            self._destinations[key] = self._destinations.get(key, 0) + 1
