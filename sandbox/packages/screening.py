"""A call's specifiers, screened: every one allowed, or all the refusals together. Pure.

Owns: reading them, and what can be judged before a registry is asked. Must not: ask one, or judge by rules of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from proxy.events import clean_text
from proxy.packages.judge import PackageVerdict, PackageWarning, PolicyData, judge_name, judge_selector
from proxy.packages.model import Ecosystem, PackageName, Specifier
from proxy.packages.policy import PackagePolicy
from proxy.packages.reasons import PackageReason, SyntaxDetail, hint_for
from sandbox.packages.specifiers import SyntaxFault, parse_specifier, specifier_text

_SHOWN = 214


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that stands against one specifier. `specifier` is as the call wrote it, fit to print; empty for a
    refusal of the call as a whole. `details` are those of `specifier_syntax`."""

    specifier: str
    reason: PackageReason
    rule: str | None
    message: str
    hint: str | None
    retry_after: datetime | None = None
    details: tuple[SyntaxDetail, ...] = ()

    @property
    def code(self) -> str:
        """The reason, with its detail: `specifier_syntax/whitespace`."""
        return f"{self.reason}/{self.details[0]}" if self.details else str(self.reason)


@dataclass(frozen=True, slots=True)
class Screening:
    """What became of a call's specifiers. `allowed` are those against which nothing stands, each once."""

    allowed: tuple[Specifier, ...]
    refusals: tuple[Refusal, ...]
    warnings: tuple[PackageWarning, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.refusals


def screen(
    policy: PackagePolicy, ecosystem: Ecosystem, texts: Sequence[str], now: datetime, data: PolicyData
) -> Screening:
    """Screen the specifiers of one call. Without any there is nothing to refuse."""
    if not texts:
        return Screening((), ())
    refusals = list(_of_the_call(policy, texts))
    allowed: list[Specifier] = []
    warnings: list[PackageWarning] = []
    seen: dict[PackageName, Specifier] = {}
    for text in texts[: policy.max_specifiers]:
        shown = clean_text(text, _SHOWN)
        read = parse_specifier(ecosystem, text)
        if isinstance(read, SyntaxFault):
            refusals.append(_syntax(shown, read))
            continue
        if (earlier := seen.setdefault(read.name, read)) is not read:
            if earlier != read:
                refusals.append(_conflict(shown, earlier, read))
            continue
        verdicts = (judge_name(policy, read.name, now, data), judge_selector(policy, read, now))
        against = [_refusal(shown, verdict) for verdict in verdicts if not verdict.allowed]
        warnings += [warning for verdict in verdicts for warning in verdict.warnings]
        refusals += against
        if not against:
            allowed.append(read)
    return Screening(tuple(allowed), tuple(refusals), tuple(warnings))


def _of_the_call(policy: PackagePolicy, texts: Sequence[str]) -> list[Refusal]:
    found = []
    if not policy.prepare:
        reason = PackageReason.PACKAGES_NOT_ALLOWED
        message = "the policy lets calls bring no packages"
        found.append(Refusal("", reason, "packages.prepare", message, hint_for(reason)))
    if len(texts) > policy.max_specifiers:
        reason = PackageReason.TOO_MANY_PACKAGES
        message = f"{len(texts)} packages are asked for, and the policy allows {policy.max_specifiers}"
        found.append(Refusal("", reason, "packages.max_specifiers", message, hint_for(reason)))
    return found


def _syntax(shown: str, fault: SyntaxFault) -> Refusal:
    return Refusal(shown, PackageReason.SPECIFIER_SYNTAX, None, fault.message, fault.hint, details=fault.details)


def _conflict(shown: str, earlier: Specifier, later: Specifier) -> Refusal:
    reason = PackageReason.CONFLICTING_SPECIFIERS
    message = f"`{later.name}` is asked for twice: `{specifier_text(earlier)}` and `{specifier_text(later)}`"
    return Refusal(shown, reason, None, message, hint_for(reason, later.name.normal))


def _refusal(shown: str, verdict: PackageVerdict) -> Refusal:
    assert verdict.reason is not None
    return Refusal(shown, verdict.reason, verdict.rule, verdict.message, verdict.hint, verdict.retry_after)
