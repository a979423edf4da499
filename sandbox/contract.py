"""The Code Execution contract: the call, the result, and their bounds. Pure.

The bounds are those of the published *Code Execution* tool contract. Strict: unknown keys, wrong types and values out
of range are refused. Characters are Unicode code points. `call_parsing` tells all faults of a call together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from proxy.destinations import InvalidHost, parse_host

MAX_CODE_CHARS = 100_000
MAX_STDOUT_CHARS = 1_000_000
MAX_STDERR_CHARS = 100_000
MAX_TIMEOUT_SECONDS = 300
MIN_MEMORY_MIB = 128
MAX_MEMORY_MIB = 2048
MAX_ENV = 50
MAX_ENV_CHARS = 32_768
MAX_DOMAINS = 256
MAX_PACKAGES = 50
MIN_SPECIFIER_CHARS = 3
MAX_SPECIFIER_CHARS = 214
MAX_KEY_CHARS = 200

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


class InvalidCall(Exception):
    """The caller's request is not one. `problems` has every fault, each with its path."""

    code = "invalid_call"

    def __init__(self, problems: list[str], code: str = "invalid_call") -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.code = code


class Status(StrEnum):
    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    KILLED = "killed"


class Cause(StrEnum):
    """Why a call or an attempt ended as it did, from evidence: `docs/results.md` says which evidence."""

    EXIT = "exit"
    SIGNAL = "signal"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    WALL_CLOCK = "wall_clock"
    CANCELLED = "cancelled"
    OUTPUT_FLOOD = "output_flood"
    NO_REPORT = "no_report"
    POLICY_REFUSED = "policy_refused"
    INVALID_CALL = "invalid_call"
    PACKAGE_UNAVAILABLE = "package_unavailable"
    INFRASTRUCTURE = "infrastructure"


type Language = Literal["python", "javascript"]


DOMAINS_WITHOUT_NETWORK = "`domains` is given without `allow_network: true`"
_DELIMITERS: Mapping[str, tuple[str, str]] = {
    "python": ("==", "requests==2.32.3"),
    "javascript": ("@", "lodash@4.17.21"),
}

RESERVED_ENV = frozenset(
    {
        "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL", "PWD",
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "FTP_PROXY",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT",
        "NODE_EXTRA_CA_CERTS", "NODE_OPTIONS", "NODE_USE_ENV_PROXY", "NPM_CONFIG_CAFILE",
        "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP",
    }
)  # fmt: skip
RESERVED_ENV_PREFIXES = ("LD_", "SLUICEGATE_", "MITMPROXY_")


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("it contains a NUL character")
    return value  # a lone surrogate is refused before


def _env_name(name: str) -> str:
    if not _ENV_NAME.match(name):
        raise ValueError("it is not a variable name: letters, digits and `_`, no digit first")
    if name.upper() in RESERVED_ENV or name.upper().startswith(RESERVED_ENV_PREFIXES):
        raise ValueError("it is set by sluicegate and cannot be given")
    return name


def _domain(text: str) -> str:
    if (fault := _domain_fault(text)) is not None:
        raise ValueError(f"`{text[:80]}` {fault}")
    return text


def _plain(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise ValueError("it has characters other than printable ASCII")
    return key


def specifier_fault(language: object, specifier: object) -> str | None:
    """Why a text is no specifier at all: it has no version delimiter. More is not looked at here."""
    if not isinstance(language, str) or language not in _DELIMITERS or not isinstance(specifier, str):
        return None
    delimiter, example = _DELIMITERS[language]
    if delimiter in specifier[1:]:
        return None
    any_version = example.partition(delimiter)[0] + delimiter
    return f"it has no version delimiter; write it as `{example}`, or as `{any_version}` for any version"


class CodeCall(BaseModel):
    """One call. `timeout` in seconds and `memory_mib` fall to the policy's defaults when omitted.

    Network: `allow_network` false is block-all. True with `domains` omitted or None is registry-default, with `[]`
    unrestricted, with names those hosts and their subdomains.

    `idempotency_key`: the same key with the same request gets the first answer, and runs nothing again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    language: Language
    code: Annotated[str, Field(min_length=1, max_length=MAX_CODE_CHARS), AfterValidator(_text)]
    packages: Annotated[
        list[
            Annotated[str, Field(min_length=MIN_SPECIFIER_CHARS, max_length=MAX_SPECIFIER_CHARS), AfterValidator(_text)]
        ],
        Field(max_length=MAX_PACKAGES),
    ] = Field(default_factory=list)
    timeout: Annotated[float, Field(ge=1, le=MAX_TIMEOUT_SECONDS)] | None = None
    memory_mib: Annotated[int, Field(ge=MIN_MEMORY_MIB, le=MAX_MEMORY_MIB)] | None = None
    env: Annotated[
        dict[
            Annotated[str, AfterValidator(_env_name)],
            Annotated[str, Field(max_length=MAX_ENV_CHARS), AfterValidator(_text)],
        ],
        Field(max_length=MAX_ENV),
    ] = Field(default_factory=dict)
    allow_network: bool = False
    domains: Annotated[list[Annotated[str, AfterValidator(_domain)]], Field(max_length=MAX_DOMAINS)] | None = None
    idempotency_key: Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS), AfterValidator(_plain)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CodeCall:
        if self.domains is not None and not self.allow_network:
            raise ValueError(DOMAINS_WITHOUT_NETWORK)
        for place, specifier in enumerate(self.packages):
            if (fault := specifier_fault(self.language, specifier)) is not None:
                raise ValueError(f"packages.{place}: {fault}")
        return self


def _domain_fault(text: str) -> str | None:
    """Why a text is no domain that a call can name, with the form to write; None when it is one."""
    _, scheme, rest = text.partition("://")
    if scheme:
        return f"is a URL; write the host alone: `{rest.partition('/')[0].partition(':')[0]}`"
    name, colon, port = text.partition(":")
    if colon and port.isdigit():
        return f"has a port; write the host alone: `{name}` (which ports are allowed is the policy's to say)"
    if text.startswith("*."):
        return f"has a wildcard; write `{text[2:]}`, which covers its subdomains"
    try:
        host = parse_host(text)
    except InvalidHost as error:
        return f"is not a host name: {error}"
    return "is an address where a host name belongs" if host.address is not None else None


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PerStream(_Result):
    """One truth for each stream."""

    stdout: bool = False
    stderr: bool = False


class OutputChars(_Result):
    """Characters the program wrote, including those that were cut."""

    stdout: int = 0
    stderr: int = 0


class PackageFault(_Result):
    """Why one package is not had. `reason` is one of those in `docs/packages.md`; `package` is as it was asked for, or
    the name of one that is needed by it. `retry_after` is the time, in seconds since the epoch, after which the answer
    is another.
    """

    package: str
    version: str | None = None
    reason: str
    rule: str | None = None
    message: str
    hint: str | None = None
    retry_after: float | None = None


class CallError(_Result):
    """`code` is one of the codes in `docs/results.md`; `message` is for people and models.

    `reason` and `rule` are the policy's, where it refused; `packages` has every package that is not had.
    `retry_after_seconds` is set where trying again may help.
    """

    code: str
    message: str
    reason: str | None = None
    rule: str | None = None
    retry_after_seconds: float | None = None
    packages: list[PackageFault] = Field(default_factory=list)


class Usage(_Result):
    """Of all attempts together. `cpu_seconds` and `peak_memory_bytes` are None where they could not be measured."""

    wall_seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None


class DestinationCount(_Result):
    host: str
    port: int | None
    decision: Literal["allow", "deny"]
    reason: str
    count: int


class NetworkReport(_Result):
    """What the attempts asked of the network, as the proxy counted it. At most 100 destinations are listed."""

    mode: str
    allowed: int = 0
    denied: int = 0
    destinations: list[DestinationCount] = Field(default_factory=list)


class FullDisk(_Result):
    """A writable file system that was full when the program ended, and of what: `bytes` or `inodes`."""

    path: str
    exhausted: Literal["bytes", "inodes"]
    limit: int


class Evidence(_Result):
    """The numbers behind a cause. None where this host could not measure it, or the attempt did not come so far."""

    wall_limit_seconds: float
    memory_limit_bytes: int
    memory_kills: int = 0
    peak_memory_bytes: int | None = None
    cpu_seconds: float | None = None
    process_limit: int | None = None
    process_limit_hits: int = 0
    full_disks: list[FullDisk] = Field(default_factory=list)
    output_bytes: int = 0
    output_limit_bytes: int


class AttemptRecord(_Result):
    """One run in one fresh sandbox. Times are seconds since the epoch, UTC. `code` is finer than `cause`."""

    attempt_id: str
    started_at: float
    ended_at: float
    status: Status
    cause: Cause
    code: str
    exit_code: int | None = None
    signal: int | None = None
    memory_method: str | None = None
    isolation: list[str] = Field(default_factory=list)
    evidence: Evidence


class ToolResult(_Result):
    """The one terminal answer to a call. It reports what was observed and proves no external effect."""

    call_id: str
    status: Status
    cause: Cause
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    truncated: PerStream = Field(default_factory=PerStream)
    replaced: PerStream = Field(default_factory=PerStream)
    output_chars: OutputChars = Field(default_factory=OutputChars)
    error: CallError | None = None
    return_value: None = None
    attempts: list[AttemptRecord] = Field(default_factory=list)
    usage: Usage = Field(default_factory=Usage)
    network: NetworkReport
