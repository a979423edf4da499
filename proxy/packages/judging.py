"""Requests to registries, judged as far as possible before a registry is asked: what is asked for, and its name. Pure.

Owns: the decision, and what the log calls it. Must not: fetch; a file itself is judged once its page is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from proxy.network import Decision, Reason, Request, RequestLayer, allow, deny
from proxy.packages.judge import PackageVerdict, PolicyData, judge_file, judge_name
from proxy.packages.model import FileFacts, PackageFacts, purl
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Asked, RegistryGrant, RegistryRequest, Unknown, recognise

RULE = "packages"


def _as_asked(request: Request, target: str) -> Asked:
    """The request as far as it matters to a registry. `target` is its path with the query."""
    return Asked(
        method=request.method or "",
        host=request.host,
        port=request.port,
        target=target,
        tls=request.tls,
        has_body=request.has_body,
        upgrade=request.upgrade,
    )


def recognise_request(grant: RegistryGrant, request: Request, target: str) -> tuple[Request, RegistryRequest | Unknown]:
    """What is asked for, and the request of the layer `package` that names it."""
    found = recognise(grant.registries, _as_asked(request, target))
    here = replace(request, layer=RequestLayer.PACKAGE)
    if isinstance(found, Unknown):
        return here, found
    version = None if found.version is None else found.version.text
    return replace(here, package=purl(found.name), version=version), found


def unknown(found: Unknown) -> Decision:
    """The answer to what was not recognised."""
    return deny(Reason.REGISTRY_REQUEST_UNKNOWN, found.why, RULE)


def decide_name(grant: RegistryGrant, found: RegistryRequest, now: datetime, data: PolicyData) -> Decision:
    """The answer to what no page is needed for."""
    verdict = judge_name(grant.policy, found.name, now, data, requested=False)
    return to_decision(verdict, found, f"the name `{found.name}` is allowed")


def to_decision(verdict: PackageVerdict, found: RegistryRequest, detail: str) -> Decision:
    """A package verdict as the decision on a request. `detail` is what an allow says."""
    if verdict.reason is not None:
        return deny(verdict.reason, verdict.message, verdict.rule, verdict.hint)
    warnings = "".join(f"; {one.reason.value}: {one.message}" for one in verdict.warnings)
    return allow(detail + warnings, found.registry.id)


def is_the_same(found: RegistryRequest, other: RegistryRequest) -> bool:
    """Whether two grants take a request for the same one, of the same registry."""
    return (
        (found.kind, found.name, found.version, found.filename, found.location)
        == (other.kind, other.name, other.version, other.filename, other.location)
        and (found.registry.ecosystem, found.registry.index) == (other.registry.ecosystem, other.registry.index)
    )  # fmt: skip


def judge_file_by_all(
    judges: Sequence[tuple[PackagePolicy, PolicyData]], file: FileFacts, package: PackageFacts, now: datetime
) -> PackageVerdict:
    """One file under several policies: the first refusal, or an allow with the warnings of all."""
    verdicts = [judge_file(policy, file, package, now, data) for policy, data in judges]
    if (refusal := next((verdict for verdict in verdicts if not verdict.allowed), None)) is not None:
        return refusal
    warnings = dict.fromkeys(warning for verdict in verdicts for warning in verdict.warnings)
    return replace(verdicts[0], warnings=tuple(warnings))


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """What names are judged by besides a grant, for who explains a request that is not made."""

    data: PolicyData
    now: datetime


def explain_package(
    grant: RegistryGrant, request: Request, target: str, judged_by: JudgedBy | None
) -> tuple[Request, Decision | None]:
    """What would be said before the registry is asked; None where that takes data that is not given."""
    here, found = recognise_request(grant, request, target)
    if isinstance(found, Unknown):
        return here, unknown(found)
    return here, None if judged_by is None else decide_name(grant, found, judged_by.now, judged_by.data)


__all__ = [
    "RULE",
    "JudgedBy",
    "decide_name",
    "explain_package",
    "is_the_same",
    "judge_file_by_all",
    "recognise_request",
    "to_decision",
    "unknown",
]
