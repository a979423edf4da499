"""A closure, judged: every artifact of it by what the registry said, and by what its tree holds. Pure.

The same function judges what was just resolved and a manifest of long ago, so a policy that changes takes effect on
snapshots without a network. Owns: the order. Must not: have rules of its own; `proxy.packages.judge` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from proxy.packages.judge import (
    PackageVerdict,
    PolicyData,
    is_exempt,
    judge_alias,
    judge_closure,
    judge_file,
    judge_name,
)
from proxy.packages.model import FileFacts, InvalidName, PackageFacts, PackageName, PackageVersion, parse_name
from proxy.packages.policy import Action, HookAction, PackagePolicy
from proxy.packages.reasons import PackageReason, hint_for
from sandbox.packages.locked import Fault
from sandbox.packages.manifest import Finding, Manifest


@dataclass(frozen=True, slots=True)
class Rules:
    """What is judged by, at what time."""

    policy: PackagePolicy
    data: PolicyData
    now: datetime


def fault_of(verdict: PackageVerdict, name: PackageName, version: PackageVersion | None = None) -> Fault | None:
    """The fault that a verdict means; None if it allows."""
    if verdict.reason is None:
        return None
    text = None if version is None else version.text
    return Fault(verdict.reason, name.normal, verdict.message, text, verdict.rule, verdict.hint, verdict.retry_after)


def judge_package(rules: Rules, name: PackageName, version: PackageVersion, *, requested: bool) -> Fault | None:
    """By its name alone."""
    return fault_of(judge_name(rules.policy, name, rules.now, rules.data, requested=requested), name, version)


def judge_artifact(rules: Rules, file: FileFacts, package: PackageFacts, *, requested: bool) -> Fault | None:
    """By its name, then by what is said of it."""
    verdict = judge_name(rules.policy, file.name, rules.now, rules.data, requested=requested)
    if verdict.allowed:
        verdict = judge_file(rules.policy, file, package, rules.now, rules.data)
    return fault_of(verdict, file.name, file.version)


def judge_size(rules: Rules, *, packages: int, size_bytes: int, files: int) -> Fault | None:
    verdict = judge_closure(rules.policy, packages, size_bytes, files)
    if verdict.reason is None:
        return None
    return Fault(verdict.reason, "all packages together", verdict.message, None, verdict.rule, verdict.hint)


def judge_manifest(rules: Rules, manifest: Manifest) -> tuple[Fault, ...]:
    """All that stands against a snapshot, under these rules, now."""
    found: list[Fault | None] = [
        judge_size(
            rules, packages=len(manifest.artifacts), size_bytes=manifest.bytes, files=manifest.files
        )
    ]  # fmt: skip
    for artifact in manifest.artifacts:
        file, package = manifest.facts_of(artifact)
        found.append(judge_artifact(rules, file, package, requested=artifact.requested))
        found += judge_findings(rules, file.name, file.version, artifact.contents.findings)
        found += _judge_aliases(rules, file, artifact.places)
    return tuple(fault for fault in found if fault is not None)


def _judge_aliases(rules: Rules, file: FileFacts, places: Iterable[str]) -> Iterator[Fault]:
    """By the names that code imports it by, which a dependency may choose. A wheel has none of its own: `("",)`."""
    for text in sorted({place.rpartition("/node_modules/")[2] for place in places} - {"", file.name.normal}):
        try:
            alias = parse_name(file.name.ecosystem, text)
        except InvalidName as error:
            raise ValueError(f"the place of `{file.name}`: {error}") from error
        if fault := fault_of(judge_alias(rules.policy, alias), file.name, file.version):
            yield replace(fault, detail=f"it would be installed under another name: {fault.detail}")


def judge_findings(
    rules: Rules, name: PackageName, version: PackageVersion, findings: Iterable[Finding]
) -> Iterator[Fault]:
    """What a tree holds is refused unless the policy lets it be; that is inert in an attempt all the same."""
    policy = rules.policy
    denied = {
        PackageReason.STARTUP_HOOK: policy.artifacts.startup_hooks is HookAction.DENY,  # if not, it is left out
        PackageReason.BUNDLED_PACKAGE: policy.artifacts.bundled is Action.DENY,
        PackageReason.STDLIB_NAME: policy.names.stdlib is Action.DENY,
    }
    rules_of = {
        PackageReason.STARTUP_HOOK: "packages.artifacts.startup_hooks",
        PackageReason.BUNDLED_PACKAGE: "packages.artifacts.bundled",
        PackageReason.STDLIB_NAME: "packages.names.stdlib",
    }
    for finding in findings:
        rule = rules_of.get(finding.reason)
        if denied.get(finding.reason, True) and not is_exempt(policy, name, version, finding.reason, rules.now):
            hint = hint_for(finding.reason, name.normal)
            yield Fault(finding.reason, name.normal, finding.detail, version.text, rule, hint)
