"""What an attempt may do now: what its grant allows, and every grant that was put beside it since allows too. Pure.

A policy that is loaded anew narrows the attempts that run: what they may do from then on is what their own grant AND
the new one allow. Amendments add up, so nothing widens a running attempt, and one after which nothing is left stays.

Owns: asking all of the grants, for every question that is asked of one. Must not: judge; `decide` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from proxy.destinations import Host
from proxy.network import (
    Decision,
    Grant,
    Mode,
    Reason,
    Request,
    StaticHost,
    decide,
    deny,
    inspects,
    registry_host,
)
from proxy.packages.requests import RegistryGrant

_CHANGED = "the policy was changed while the code ran"


def group_of(*grants: Grant) -> str:
    """The same for attempts that have the same grants, but for whose they are: what is read for one does for all.

    Tenants share nothing: the tenant stays in it.
    """
    anonymous = (grant.model_copy(update={"call_id": "", "attempt_id": ""}) for grant in grants)
    return hashlib.sha256("\n".join(grant.model_dump_json() for grant in anonymous).encode()).hexdigest()


def revoked(later: Decision) -> Decision:
    """The denial of what an attempt's own grant allows, and a later one does not."""
    by = later.reason.value if later.rule is None else f"{later.reason.value}, `{later.rule}`"
    return deny(Reason.POLICY_REVOKED, f"{_CHANGED}: {later.detail} ({by})", later.rule)


@dataclass(frozen=True)
class RegistryView:
    """One grant's registries, for a request that is to one of them. `amended`: not the attempt's own grant's."""

    grant: RegistryGrant
    amended: bool

    def as_said(self, decision: Decision) -> Decision:
        """A decision by this grant, as the attempt's."""
        return revoked(decision) if self.amended and not decision.allowed else decision


@dataclass(frozen=True)
class Standing:
    """An attempt's grant, and those beside it. `newest` is the last that was given: whose name and digest are told.

    `nothing`: what is left of the grants is nothing, for good.
    """

    own: Grant
    beside: tuple[Grant, ...] = ()
    nothing: bool = False
    newest: Grant | None = None

    def amended(self, grant: Grant | None) -> Standing:
        """With one more grant beside the others; None: without anything that is allowed.

        One that says what another says already changes no answer, and is not kept: policies are loaded anew often.
        """
        if grant is None:
            return replace(self, nothing=True)
        mine = {"call_id": self.own.call_id, "attempt_id": self.own.attempt_id, "tenant": self.own.tenant}
        grant = grant.model_copy(update=mine)
        if any(_says_the_same(grant, other) for other in self.grants):
            return replace(self, newest=grant)
        return replace(self, beside=(*self.beside, grant), newest=grant)

    def allows_as_much_as(self, other: Standing) -> bool:
        """Whether nothing was narrowed between the two."""
        return (self.beside, self.nothing) == (other.beside, other.nothing)

    @property
    def grants(self) -> tuple[Grant, ...]:
        return (self.own, *self.beside)

    @property
    def told(self) -> Grant:
        """The grant whose policy is in force: what the log and refusals name."""
        return self.own if self.newest is None else self.newest

    def decide(self, request: Request) -> Decision:
        """The own grant's answer where it is a denial, or where no other grant denies; else the newest denial."""
        decision = decide(self.own, request)
        if not decision.allowed:
            return decision
        if self.nothing:
            return deny(Reason.POLICY_REVOKED, f"{_CHANGED}: nothing is allowed any more")
        for grant in reversed(self.beside):
            later = decide(grant, request)
            if not later.allowed:
                return revoked(later)
        return decision

    def inspects(self, host: Host, port: int) -> bool:
        """Whether TLS to this destination is opened: where any of the grants has it opened."""
        return any(inspects(grant, host, port) for grant in self.grants)

    @cached_property
    def asks_what_is_spoken(self) -> bool:
        """Whether raw TCP is looked at before it passes: under `unrestricted` it may be HTTP, which is read."""
        return any(grant.mode is Mode.UNRESTRICTED for grant in self.grants)

    @cached_property
    def max_connections(self) -> int:
        return min(grant.max_connections for grant in self.grants)

    @cached_property
    def hosts(self) -> tuple[StaticHost, ...]:
        """The static answers. Where several grants have one for a name, what they agree on, which may be nothing."""
        if not self.beside:
            return self.own.hosts
        answers: dict[Host, StaticHost] = {}
        for grant in self.grants:
            for host, entry in _first_answers(grant).items():
                known = answers.get(host, entry)
                both = tuple(address for address in known.addresses if address in entry.addresses)
                answers[host] = StaticHost(host=host, addresses=both)
        return tuple(answers.values())

    def registries(self, request: Request) -> tuple[RegistryView, ...]:
        """The grants by which a request is one to a registry, each of which judges it. Empty: it is to none."""
        return tuple(
            RegistryView(grant.packages, place > 0)
            for place, grant in enumerate(self.grants)
            if grant.packages is not None and registry_host(grant, request) is not None
        )

    @cached_property
    def group(self) -> str:
        return group_of(*self.grants)


def _says_the_same(one: Grant, other: Grant) -> bool:
    anonymous = {"call_id": "", "attempt_id": "", "policy_name": "", "policy_digest": ""}
    return one.model_copy(update=anonymous) == other.model_copy(update=anonymous)


def _first_answers(grant: Grant) -> Mapping[Host, StaticHost]:
    """By name: of two answers for one name the first stands, as in a grant alone."""
    return {entry.host: entry for entry in reversed(grant.hosts)}


__all__ = ["RegistryView", "Standing", "group_of", "revoked"]
