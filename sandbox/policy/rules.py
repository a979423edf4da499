"""Rules about hosts, as a policy's lists have them: what is allowed, and what is denied. Pure.

Owns: the keys of one rule, and the form that every section has. Must not: weigh rules against one another.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from proxy.network import Protocol
from sandbox.policy.scalars import (
    AllowName,
    DenyName,
    Flag,
    Methods,
    ModeName,
    Network,
    Paths,
    Ports,
    ProtocolName,
    distinct,
    fault,
    kind_of,
)

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


def list_of(example: str) -> BeforeValidator:
    """A list, which may be empty. `example` is the form to write."""

    def check(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            fault(f"a list is expected, not {kind_of(value)}", f"write `{example}`")
        if len(value) > _MAX_RULES:
            fault(f"there are more than {_MAX_RULES} entries")
        return value

    return BeforeValidator(check)


def _modes(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        fault(f"a list is expected, not {kind_of(value)}", "write `[block-all]`")
    if not value:
        fault("the list is empty, so no call could run", "write `[block-all]` to let calls run without a network")
    return value


Modes = Annotated[tuple[ModeName, ...], BeforeValidator(_modes), AfterValidator(distinct)]
