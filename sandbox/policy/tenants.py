"""The `tenants:` section of the policy file: who may use the service, each with a narrower policy of its own. Pure.

Owns: the keys of one tenant. Must not: weigh a tenant against the rest of the policy, which is
`sandbox.policy.tenants_lint`, or narrow the policy to it, which is `sandbox.tenants`.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema, model_validator

from sandbox.owners import InvalidUser, check_user
from sandbox.policy.limits import MEBIBYTES, SECONDS, check_order
from sandbox.policy.problems import shown
from sandbox.policy.rules import AllowRule, DenyRule, Modes, Section, list_of
from sandbox.policy.scalars import Flag, bounded, fault, kind_of

DEFAULT_CONCURRENCY = 4
DEFAULT_QUEUE = 32
DEFAULT_BURST = 20
_MAX_CONCURRENCY = 10_000
_MAX_QUEUE = 100_000
_MAX_PER_MINUTE = 1_000_000

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)


def _name(value: object) -> str:
    """It becomes the name of a directory, and part of the names of rules."""
    if not isinstance(value, str):
        fault(f"a name is expected, not {kind_of(value)}", "put it in quotation marks")
    if not _NAME.match(value):
        fault(
            f"`{shown(value)}` is not a name",
            "write up to 64 small letters, digits, `.`, `_`, `-`, a letter or a digit first, such as `acme`",
        )
    return value


def _sha256(value: object) -> str:
    """The value itself is never shown: people put the token where its hash belongs."""
    if not isinstance(value, str) or not _SHA256.match(value.lower()):
        what = "this is a token where its hash belongs" if str(value).startswith("sgt_") else (
            "this is not a SHA-256 of 64 hexadecimal digits"
        )  # fmt: skip
        fault(what, "`sluicegate token` makes a token, and prints the line to put here")
    return value.lower()


def _user(value: object) -> str:
    if not isinstance(value, str):
        fault(f"a user's name is expected, not {kind_of(value)}", "put it in quotation marks")
    try:
        return check_user(value)
    except InvalidUser as error:
        _, _, hint = str(error).partition("\nhint: ")
        fault(f"`{shown(value)}` is not a user's name", hint or None)


TenantName = Annotated[
    str, PlainValidator(_name), WithJsonSchema({"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,63}$"})
]
TokenHash = Annotated[str, PlainValidator(_sha256), WithJsonSchema({"type": "string", "pattern": "^[0-9A-Fa-f]{64}$"})]
UserName = Annotated[
    str, PlainValidator(_user), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$"})
]


class Token(Section):
    """One token of a tenant's: its hash, never itself. `user` fixes whose calls are made with it.

    `admin`: calls of the code_exec tool may work in `code_exec.working_directories`.
    """

    name: TenantName
    sha256: TokenHash
    admin: Flag = False
    user: UserName | None = None


class TenantNetwork(Section):
    """None: what the operator allows."""

    modes: Modes | None = None
    allow: Annotated[tuple[AllowRule, ...], list_of("[{host: example.com}]")] | None = None
    deny: Annotated[tuple[DenyRule, ...], list_of("[{host: evil.example}]")] = ()


class TenantTimeout(Section):
    """None: the operator's."""

    default: Annotated[float, *SECONDS] | None = None
    max: Annotated[float, *SECONDS] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> TenantTimeout:
        if self.default is not None and self.max is not None:
            check_order(self.default, self.max)
        return self


class TenantMemory(Section):
    """None: the operator's."""

    default: Annotated[int, *MEBIBYTES] | None = None
    max: Annotated[int, *MEBIBYTES] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> TenantMemory:
        if self.default is not None and self.max is not None:
            check_order(self.default, self.max)
        return self


class TenantLimits(Section):
    timeout_seconds: TenantTimeout = TenantTimeout()
    memory_mib: TenantMemory = TenantMemory()


class TenantPackages(Section):
    """None: what the operator says."""

    prepare: Flag | None = None


class Rate(Section):
    """Requests that begin work: so many a minute in the long run, and `burst` of them at once."""

    per_minute: Annotated[int, *bounded(1, _MAX_PER_MINUTE, "requests a minute", whole=True)]
    burst: Annotated[int, *bounded(1, _MAX_PER_MINUTE, "requests", whole=True)] = DEFAULT_BURST


class Tenant(Section):
    """Who may use the service with these tokens, and what of the operator's policy holds for them.

    `concurrency` bounds the calls of it that are worked on at once, `queue` those that wait.
    """

    name: TenantName
    tokens: Annotated[tuple[Token, ...], list_of("[{name: ci, sha256: …}]")] = ()
    network: TenantNetwork = TenantNetwork()
    limits: TenantLimits = TenantLimits()
    packages: TenantPackages = TenantPackages()
    concurrency: Annotated[int, *bounded(1, _MAX_CONCURRENCY, "calls", whole=True)] = DEFAULT_CONCURRENCY
    queue: Annotated[int, *bounded(0, _MAX_QUEUE, "calls", whole=True)] = DEFAULT_QUEUE
    rate: Rate | None = None
