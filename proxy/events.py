"""Audit events: what a line of the audit log says, as frozen values with their JSON. Pure.

Every text in an event is made fit for a log when the event is made, so no consumer can see it raw: characters that do
not print are escaped, the length is bounded, and a path has neither query nor fragment. The code under guard chooses
most of these texts; whatever it sends, the event is one well-formed JSON object of ASCII.

Owns: the fields of each event and their bounds. Must not: read a clock, write, or decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from types import MappingProxyType
from typing import ClassVar, Literal

from proxy.network import Decision, Grant, Request

CUT_MARK = "…"  # ends a text that was longer than its bound
DEFAULT_LIMIT = 300

# Characters kept of each text field, before the mark. A name has at most 253; what is longer is no name.
LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "call_id": 128,
        "attempt_id": 128,
        "tenant": 64,
        "connection_id": 64,
        "layer": 32,
        "protocol": 32,
        "method": 64,
        "path": 1024,
        "version": 128,
        "address": 64,
        "decision": 16,
        "reason": 64,
        "outcome": 32,
        "error": 500,
        "detail": 500,
        "cause": 64,
        "policy_digest": 128,
        "old_digest": 128,
        "new_digest": 128,
    }
)
MAX_DOMAINS = 256  # the contract's own bound on a call's `domains`

type JSONValue = str | int | float | bool | list[str] | None


def clean_text(text: str, limit: int = DEFAULT_LIMIT) -> str:
    r"""`text` as a log may carry it: at most `limit` characters, `CUT_MARK` after them if that was not all.

    Every character that does not print is escaped as Python writes it (`\x1b`, `\u202e`, lone surrogates too), and the
    backslash is doubled, so that two different texts never look the same.
    """
    if len(text) <= limit and text.isprintable() and "\\" not in text:
        return text
    kept: list[str] = []
    room = limit
    for character in text[: limit + 1]:
        shown = _escape(character)
        room -= len(shown)
        if room < 0:
            return "".join(kept) + CUT_MARK
        kept.append(shown)
    return "".join(kept)


def _escape(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def clean_path(path: str) -> str:
    """A request target without its query, its fragment and its user information, all of which may hold secrets."""
    for separator in "?#":
        path = path.partition(separator)[0]
    scheme, slashes, rest = path.partition("//")
    if slashes and not path.startswith("/"):
        authority, slash, tail = rest.partition("/")
        path = f"{scheme}//{_without_userinfo(authority)}{slash}{tail}"
    return clean_text(path, LIMITS["path"])


def clean_host(text: str) -> str:
    """What stood where a host belongs; it may be anything, and user information or a query in it may be secret."""
    for separator in "?#":
        text = text.partition(separator)[0]
    return clean_text(_without_userinfo(text), DEFAULT_LIMIT)


def _without_userinfo(authority: str) -> str:
    userinfo, at, host = authority.rpartition("@")
    return f"{CUT_MARK}@{host}" if at and userinfo else authority


def format_time(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC with microseconds, always the same 27 characters.

    Raises `ValueError` for a time outside the calendar.
    """
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError) as error:
        raise ValueError(f"`{seconds}` is not a time") from error
    return moment.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


class _Event:
    """What all events share. A subclass is a frozen dataclass; its fields are the keys of its JSON, in their order."""

    __slots__ = ()
    kind: ClassVar[str]
    time: float

    def __post_init__(self) -> None:
        for name in _field_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, str):
                clean = _clean_field(name, value)
                if clean is not value:
                    object.__setattr__(self, name, clean)
            elif isinstance(value, tuple):
                listed = tuple(clean_host(item) for item in value[:MAX_DOMAINS])
                object.__setattr__(self, name, (*listed, CUT_MARK) if len(value) > MAX_DOMAINS else listed)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` is not a finite number")

    def to_json(self) -> dict[str, JSONValue]:
        """The event as a JSON object: every field of its kind, null where there was nothing to see."""
        out: dict[str, JSONValue] = {"time": format_time(self.time), "event": self.kind}
        for name in _field_names(type(self)):
            if name != "time":
                value = getattr(self, name)
                out[name] = list(value) if isinstance(value, tuple) else value
        return out


_FIELD_NAMES: dict[type[_Event], tuple[str, ...]] = {}


def _field_names(kind: type[_Event]) -> tuple[str, ...]:
    names = _FIELD_NAMES.get(kind)
    if names is None:
        # Every subclass is a dataclass; the base is not, so the type checker cannot know.
        names = _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]  # every subclass is a dataclass
    return names


def _clean_field(name: str, text: str) -> str:
    text = str.__str__(text)  # an enum member becomes its plain value
    if name == "path":
        return clean_path(text)
    if name in ("host", "sni"):
        return clean_host(text)
    return clean_text(text, LIMITS.get(name, DEFAULT_LIMIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionEvent(_Event):
    """One decision, at one layer.

    `protocol` is the one the client spoke: dns, http, socks5, connect, transparent, tls, tcp …
    """

    kind: ClassVar[str] = "decision"

    time: float
    call_id: str
    attempt_id: str
    tenant: str = ""
    connection_id: str | None = None
    layer: str
    protocol: str
    host: str
    port: int | None = None
    sni: str | None = None
    method: str | None = None
    path: str | None = None
    package: str | None = None
    version: str | None = None
    address: str | None = None
    decision: str
    reason: str
    rule: str | None = None
    detail: str = ""
    policy_name: str
    policy_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEvent(_Event):
    """The end of one connection, or of one exchange on it.

    `outcome` says how it ended; `error` names a failure upstream (`dns_failed`, `connect_failed`, `tls_failed` …),
    which is no denial. `bytes_in` is what came from upstream for the code, `bytes_out` what the code sent.
    """

    kind: ClassVar[str] = "connection"

    time: float
    call_id: str
    attempt_id: str
    tenant: str = ""
    connection_id: str | None = None
    layer: Literal["connection"] = "connection"
    protocol: str
    host: str
    port: int | None = None
    sni: str | None = None
    method: str | None = None
    path: str | None = None
    package: str | None = None
    version: str | None = None
    address: str | None = None
    status: int | None = None
    outcome: Literal["completed", "failed", "aborted"]
    error: str | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    duration_seconds: float = 0.0
    policy_name: str
    policy_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent(_Event):
    """The start or the end of an attempt. What only the end knows is None at the start."""

    kind: ClassVar[str] = "attempt"

    time: float
    call_id: str
    attempt_id: str
    tenant: str = ""
    phase: Literal["start", "end"]
    mode: str
    domains: tuple[str, ...] | None = None
    language: str | None = None
    status: str | None = None
    cause: str | None = None
    exit_code: int | None = None
    allowed: int | None = None
    denied: int | None = None
    duration_seconds: float | None = None
    policy_name: str
    policy_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyEvent(_Event):
    """The life of the proxy and of the log itself. `what` is a word such as start, stop, policy, rotated, recovered."""

    kind: ClassVar[str] = "proxy"

    time: float
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvent(_Event):
    """A policy that was to be loaded anew. `what` is `reloaded`, or `rejected`: the old one stays in force.

    `new_digest` is None where the new policy could not be read as far as to have one.
    """

    kind: ClassVar[str] = "policy"

    time: float
    what: Literal["reloaded", "rejected"]
    old_digest: str
    new_digest: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent(_Event):
    """What befell a call as a whole. `what` is `lost`: its executor ended while it ran, and it has no answer.

    `started_at` is when the call came, in seconds since the epoch.
    """

    kind: ClassVar[str] = "call"

    time: float
    call_id: str
    tenant: str = ""
    what: Literal["lost"]
    started_at: float


type Event = DecisionEvent | ConnectionEvent | AttemptEvent | ProxyEvent | PolicyEvent | CallEvent


def decision_event(
    grant: Grant, request: Request, decision: Decision, *, time: float, protocol: str, connection_id: str | None = None
) -> DecisionEvent:
    """The event of one decision, from the three values of `decide`."""
    return DecisionEvent(
        time=time,
        call_id=grant.call_id,
        attempt_id=grant.attempt_id,
        tenant=grant.tenant,
        connection_id=connection_id,
        layer=request.layer.value,
        protocol=protocol,
        host=str(request.host),
        port=request.port,
        sni=None if request.sni is None else str(request.sni),
        method=request.method,
        path=request.path,
        package=request.package,
        version=request.version,
        address=None if request.address is None else str(request.address),
        decision=decision.verdict.value,
        reason=decision.reason.value,
        rule=decision.rule,
        detail=decision.detail,
        policy_name=grant.policy_name,
        policy_digest=grant.policy_digest,
    )
