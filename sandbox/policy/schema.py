"""The policy file's schema, version 1, as frozen values. Pure.

Owns: sections, keys and defaults. Must not: weigh keys against one another beyond one entry; that is
`sandbox.policy.lint`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from proxy.network import DEFAULT_PORTS, Mode, Protocol
from sandbox.contract import MAX_MEMORY_MIB, MAX_TIMEOUT_SECONDS, MIN_MEMORY_MIB
from sandbox.policy.packages import PackagesSection
from sandbox.policy.scalars import (
    AbsoluteFileName,
    AllowName,
    DenyName,
    FileName,
    Flag,
    Index,
    Methods,
    ModeName,
    Network,
    Paths,
    PlainName,
    PolicyName,
    Ports,
    ProtocolName,
    StaticHosts,
    Subject,
    Version,
    bounded,
    distinct,
    fault,
    kind_of,
)

MIN_TIMEOUT_SECONDS = 1  # the contract's
DEFAULT_TIMEOUT_SECONDS = 30  # the contract's
DEFAULT_MEMORY_MIB = 512  # the contract's
DEFAULT_MAX_CONNECTIONS = 256
DEFAULT_OUTPUT_MIB = 256
DEFAULT_ATTEMPTS = 2
DEFAULT_MARGIN_SECONDS = 120.0
DEFAULT_KEEP_HOURS = 24.0
_MAX_CONNECTIONS = 65_535
_MAX_OUTPUT_MIB = 65_536
_MAX_ATTEMPTS = 3
_MAX_MARGIN_SECONDS = 3_600
_MAX_KEEP_HOURS = 24 * 365
_MAX_RULES = 5_000  # each is looked at in every decision


class Section(BaseModel):
    """Frozen, and strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AllowRule(Section):
    """A host that `named` calls may name, with all names below it unless `subdomains: false`."""

    host: AllowName
    subdomains: Flag = True
    ports: Ports | None = None
    methods: Methods | None = None
    paths: Paths | None = None
    protocol: ProtocolName = Protocol.HTTP

    @model_validator(mode="after")
    def _raw_tcp(self) -> AllowRule:
        if self.protocol is Protocol.TCP:
            if self.methods is not None or self.paths is not None:
                fault("raw TCP has neither methods nor paths", "leave them out, or write `protocol: http`")
            if self.ports is None:
                fault("a rule for raw TCP names its ports", "write `ports: [5432]`")
        return self


class DenyRule(Section):
    """Hosts or addresses that no call reaches, in any mode or protocol."""

    host: DenyName | None = None
    cidr: Network | None = None
    subdomains: Flag = True
    ports: Ports | None = None
    methods: Methods | None = None
    paths: Paths | None = None

    @model_validator(mode="after")
    def _one_target(self) -> DenyRule:
        if (self.host is None) == (self.cidr is None):
            fault("a rule has either a `host` or a `cidr`", "write one of them, such as `- host: evil.example`")
        return self


class PrivateAddressEntry(Section):
    """Permission to dial addresses of one network that are not public."""

    host: Subject | None = None
    registries: Flag = False
    cidr: Network
    ports: Ports | None = None

    @model_validator(mode="after")
    def _one_subject(self) -> PrivateAddressEntry:
        if (self.host is None) != self.registries:
            fault("an entry has either a `host` or `registries: true`", "write one, such as `host: box.example`")
        return self


def _list_of(example: str) -> BeforeValidator:
    """A list, which may be empty. `example` is the form to write."""

    def check(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            fault(f"a list is expected, not {kind_of(value)}", f"write `{example}`")
        if len(value) > _MAX_RULES:
            fault(f"there are more than {_MAX_RULES} entries")
        return value

    return BeforeValidator(check)


class Inspect(Section):
    """Which TLS is not opened: it is judged by host, port and server name alone."""

    passthrough: Annotated[tuple[PlainName, ...], _list_of("[pinned.example]"), AfterValidator(distinct)] = ()


_REGISTRIES_HINT = "write `auto`, or `{python: [https://index.example/simple/]}`"


def _one_index_or_more(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)) or not value:
        fault(f"{'an empty list' if value == [] else kind_of(value)} says no index", _REGISTRIES_HINT)
    return value


Indexes = Annotated[
    tuple[Index, ...],
    BeforeValidator(_one_index_or_more, json_schema_input_type=str | list[str]),
    AfterValidator(distinct),
]


class Registries(Section):
    """The package index of each language; None (`auto`): the one that the language's own client is configured for.

    The hosts of all the addresses given are the registry; none is added to them.
    """

    python: Indexes | None = None
    javascript: Indexes | None = None

    @model_serializer
    def _shape(self) -> str | dict[str, list[str]]:
        named = {"python": self.python, "javascript": self.javascript}
        return {language: [str(url) for url in urls] for language, urls in named.items() if urls is not None} or "auto"


def _registries(value: object) -> object:
    if value == "auto":
        return Registries()
    if not isinstance(value, dict):
        fault(f"{kind_of(value)} says no index", _REGISTRIES_HINT)
    if not value:
        fault("the mapping is empty", _REGISTRIES_HINT)
    return value


class Upstream(Section):
    """How servers are verified. None: the host's own certificate authorities."""

    ca_file: AbsoluteFileName | None = None


def _modes(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        fault(f"a list is expected, not {kind_of(value)}", "write `[block-all]`")
    if not value:
        fault("the list is empty, so no call could run", "write `[block-all]` to let calls run without a network")
    return value


class NetworkSection(Section):
    modes: Annotated[tuple[ModeName, ...], BeforeValidator(_modes), AfterValidator(distinct)] = (Mode.BLOCK_ALL,)
    allow: Annotated[tuple[AllowRule, ...], _list_of("[{host: example.com}]")] | None = None
    deny: Annotated[tuple[DenyRule, ...], _list_of("[{host: evil.example}]")] = ()
    ports: Ports = DEFAULT_PORTS
    hosts: StaticHosts = Field(default_factory=dict)
    private_addresses: Annotated[
        tuple[PrivateAddressEntry, ...], _list_of("[{host: box.example, cidr: 10.1.2.3/32, ports: [443]}]")
    ] = ()
    inspect: Inspect = Inspect()
    registries: Annotated[Registries, BeforeValidator(_registries, json_schema_input_type=str | Registries)] = (
        Registries()
    )
    upstream: Upstream = Upstream()


def _with_default(value: object, usual: int, lowest: int) -> object:
    """An omitted `default` is the usual one, or the maximum where that is lower. What is out of range is left alone."""
    if isinstance(value, dict) and "default" not in value:
        top = value.get("max")
        if isinstance(top, (int, float)) and not isinstance(top, bool) and lowest <= top < usual:
            return value | {"default": top}
    return value


def _check_order(default: float, top: float) -> None:
    if default > top:
        fault(f"`default` is {default:g}, above `max`, {top:g}", "lower `default` or raise `max`")


_seconds = bounded(MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS, "seconds", whole=False)
_mebibytes = bounded(MIN_MEMORY_MIB, MAX_MEMORY_MIB, "MiB", whole=True)


class TimeoutLimit(Section):
    default: Annotated[float, *_seconds] = float(DEFAULT_TIMEOUT_SECONDS)
    max: Annotated[float, *_seconds] = float(MAX_TIMEOUT_SECONDS)

    @model_validator(mode="before")
    @classmethod
    def _lower_default(cls, value: Any) -> Any:
        return _with_default(value, DEFAULT_TIMEOUT_SECONDS, MIN_TIMEOUT_SECONDS)

    @model_validator(mode="after")
    def _ordered(self) -> TimeoutLimit:
        _check_order(self.default, self.max)
        return self


class MemoryLimit(Section):
    default: Annotated[int, *_mebibytes] = DEFAULT_MEMORY_MIB
    max: Annotated[int, *_mebibytes] = MAX_MEMORY_MIB

    @model_validator(mode="before")
    @classmethod
    def _lower_default(cls, value: Any) -> Any:
        return _with_default(value, DEFAULT_MEMORY_MIB, MIN_MEMORY_MIB)

    @model_validator(mode="after")
    def _ordered(self) -> MemoryLimit:
        _check_order(self.default, self.max)
        return self


class LimitsSection(Section):
    timeout_seconds: TimeoutLimit = TimeoutLimit()
    memory_mib: MemoryLimit = MemoryLimit()
    max_connections: Annotated[int, *bounded(1, _MAX_CONNECTIONS, "connections", whole=True)] = DEFAULT_MAX_CONNECTIONS
    output_mib: Annotated[int, *bounded(1, _MAX_OUTPUT_MIB, "MiB", whole=True)] = DEFAULT_OUTPUT_MIB


class AttemptsSection(Section):
    """How often a call is tried when this side fails, and how long all of it may take beyond the code's own timeout."""

    max: Annotated[int, *bounded(1, _MAX_ATTEMPTS, "attempts", whole=True)] = DEFAULT_ATTEMPTS
    margin_seconds: Annotated[float, *bounded(1, _MAX_MARGIN_SECONDS, "seconds", whole=False)] = DEFAULT_MARGIN_SECONDS


class CallsSection(Section):
    """How long the answer of a call with an idempotency key is kept."""

    keep_hours: Annotated[float, *bounded(1, _MAX_KEEP_HOURS, "hours", whole=False)] = DEFAULT_KEEP_HOURS


class AuditSection(Section):
    """Where the audit log goes. A relative name is taken from the state directory."""

    path: FileName = "audit.jsonl"


class Policy(Section):
    """A policy file, normalised. Equal policies have equal digests, however they were written."""

    version: Version
    name: PolicyName = "unnamed"
    network: NetworkSection = NetworkSection()
    packages: PackagesSection = PackagesSection()
    limits: LimitsSection = LimitsSection()
    attempts: AttemptsSection = AttemptsSection()
    calls: CallsSection = CallsSection()
    audit: AuditSection = AuditSection()
