"""The policy file's schema, version 1, as frozen values. Pure.

Owns: sections, keys and defaults. Must not: weigh keys against one another beyond one entry; that is
`sandbox.policy.lint`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator

from proxy.network import DEFAULT_PORTS, Mode
from sandbox.policy.limits import LimitsSection
from sandbox.policy.packages import PackagesSection
from sandbox.policy.rules import AllowRule, DenyRule, Modes, Section, list_of
from sandbox.policy.scalars import (
    AbsoluteFileName,
    FileName,
    Flag,
    Index,
    Network,
    PlainName,
    PolicyName,
    Ports,
    StaticHosts,
    Subject,
    Version,
    bounded,
    distinct,
    fault,
    kind_of,
)
from sandbox.policy.service import CodeExecSection, ServiceSection
from sandbox.policy.tenants import Tenant

DEFAULT_ATTEMPTS = 2
DEFAULT_MARGIN_SECONDS = 120.0
DEFAULT_KEEP_HOURS = 24.0
DEFAULT_KEEP_MIB = 1024
_MAX_ATTEMPTS = 3
_MAX_MARGIN_SECONDS = 3_600
_MAX_KEEP_HOURS = 24 * 365
_MAX_KEEP_MIB = 1024 * 1024


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


class Inspect(Section):
    """Which TLS is not opened: it is judged by host, port and server name alone."""

    passthrough: Annotated[tuple[PlainName, ...], list_of("[pinned.example]"), AfterValidator(distinct)] = ()


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


class NetworkSection(Section):
    modes: Modes = (Mode.BLOCK_ALL,)
    allow: Annotated[tuple[AllowRule, ...], list_of("[{host: example.com}]")] | None = None
    deny: Annotated[tuple[DenyRule, ...], list_of("[{host: evil.example}]")] = ()
    ports: Ports = DEFAULT_PORTS
    hosts: StaticHosts = Field(default_factory=dict)
    private_addresses: Annotated[
        tuple[PrivateAddressEntry, ...], list_of("[{host: box.example, cidr: 10.1.2.3/32, ports: [443]}]")
    ] = ()
    inspect: Inspect = Inspect()
    registries: Annotated[Registries, BeforeValidator(_registries, json_schema_input_type=str | Registries)] = (
        Registries()
    )
    upstream: Upstream = Upstream()


class AttemptsSection(Section):
    """How often a call is tried when this side fails, and how long all of it may take beyond the code's own timeout."""

    max: Annotated[int, *bounded(1, _MAX_ATTEMPTS, "attempts", whole=True)] = DEFAULT_ATTEMPTS
    margin_seconds: Annotated[float, *bounded(1, _MAX_MARGIN_SECONDS, "seconds", whole=False)] = DEFAULT_MARGIN_SECONDS


class CallsSection(Section):
    """How long records of calls, tasks and answers under idempotency keys are kept, and how much disk they may take."""

    keep_hours: Annotated[float, *bounded(1, _MAX_KEEP_HOURS, "hours", whole=False)] = DEFAULT_KEEP_HOURS
    keep_mib: Annotated[int, *bounded(1, _MAX_KEEP_MIB, "MiB", whole=True)] = DEFAULT_KEEP_MIB


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
    code_exec: CodeExecSection = CodeExecSection()
    service: ServiceSection = ServiceSection()
    tenants: Annotated[tuple[Tenant, ...], list_of("[{name: acme, tokens: […]}]")] = ()
