"""The Code Execution contract: the call, the result, and their bounds. Pure.

The bounds are those of the published *Code Execution* tool contract. Strict: unknown keys, wrong types and values out
of range are refused, all together.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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


class CodeCall(BaseModel):
    """One call. `timeout` in seconds and `memory_mib` fall to the policy's defaults when omitted.

    Network: `allow_network` false is block-all. True with `domains` omitted or None is registry-default, with `[]`
    unrestricted, with names those hosts and their subdomains.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    language: Literal["python"] = "python"
    code: Annotated[str, Field(min_length=1, max_length=MAX_CODE_CHARS)]
    timeout: Annotated[float, Field(ge=1, le=MAX_TIMEOUT_SECONDS)] | None = None
    memory_mib: Annotated[int, Field(ge=MIN_MEMORY_MIB, le=MAX_MEMORY_MIB)] | None = None
    env: Annotated[dict[str, str], Field(max_length=MAX_ENV)] = Field(default_factory=dict)
    allow_network: bool = False
    domains: Annotated[list[str], Field(max_length=MAX_DOMAINS)] | None = None

    @field_validator("code")
    @classmethod
    def _code_is_text(cls, code: str) -> str:
        if "\0" in code:
            raise ValueError("it contains a NUL character")
        try:
            code.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it has a lone surrogate at character {error.start}") from error
        return code

    @field_validator("env")
    @classmethod
    def _env_is_settable(cls, env: dict[str, str]) -> dict[str, str]:
        faults = []
        for name, value in env.items():
            if not _ENV_NAME.match(name):
                faults.append(f"`{name[:80]!a}` is not a variable name: letters, digits and `_`, no digit first")
            elif name.upper() in RESERVED_ENV or name.upper().startswith(RESERVED_ENV_PREFIXES):
                faults.append(f"`{name}` is set by sluicegate and cannot be given")
            elif "\0" in value or len(value) > MAX_ENV_CHARS or not _encodable(value):
                faults.append(f"the value of `{name}` is not text of at most {MAX_ENV_CHARS} characters without NUL")
        if faults:
            raise ValueError("; ".join(faults))
        return env

    @field_validator("domains")
    @classmethod
    def _domains_are_names(cls, domains: list[str] | None) -> list[str] | None:
        faults = []
        for place, domain in enumerate(domains or []):
            if (fault := _domain_fault(domain)) is not None:
                faults.append(f"[{place}] `{domain[:80]}` {fault}")
        if faults:
            raise ValueError("; ".join(faults))
        return domains

    @model_validator(mode="after")
    def _domains_need_network(self) -> CodeCall:
        if self.domains is not None and not self.allow_network:
            raise ValueError("`domains` is given without `allow_network: true`")
        return self


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


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_call(data: object) -> CodeCall:
    """A call from decoded JSON. Raises `InvalidCall` with every problem and its path."""
    try:
        return CodeCall.model_validate(data)
    except ValidationError as error:
        raise InvalidCall(
            [
                f"{'.'.join(map(str, p['loc'])) or 'call'}: {p['msg'].removeprefix('Value error, ')}"
                for p in error.errors()
            ]
        ) from error


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Truncated(_Result):
    stdout: bool = False
    stderr: bool = False


class OutputChars(_Result):
    """Characters the program wrote, including those that were cut."""

    stdout: int = 0
    stderr: int = 0


class CallError(_Result):
    """`code` is one of the codes in `docs/`; `message` is for people and models."""

    code: str
    message: str


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
    """What the attempt asked of the network, as the proxy counted it. At most 100 destinations are listed."""

    mode: str
    allowed: int = 0
    denied: int = 0
    destinations: list[DestinationCount] = Field(default_factory=list)


class AttemptRecord(_Result):
    """One run in one fresh sandbox. Times are seconds since the epoch, UTC."""

    attempt_id: str
    started_at: float
    ended_at: float
    status: Status
    cause: str
    exit_code: int | None = None
    signal: int | None = None
    memory_method: str | None = None
    isolation: list[str] = Field(default_factory=list)


class ToolResult(_Result):
    """The one terminal answer to a call. It reports what was observed and proves no external effect."""

    call_id: str
    status: Status
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    truncated: Truncated = Field(default_factory=Truncated)
    output_chars: OutputChars = Field(default_factory=OutputChars)
    error: CallError | None = None
    return_value: None = None
    attempts: list[AttemptRecord] = Field(default_factory=list)
    usage: Usage = Field(default_factory=Usage)
    network: NetworkReport
