"""Cases beside a policy: what a call under it may and may not do, as a table that a machine can check. Pure.

Owns: the form of a cases file, and holding each case against the policy. Must not: decide: `narrow` and `decide` are
asked, as they are for a real call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError, model_validator

from proxy.destinations import IPAddress
from proxy.explain import InvalidTarget, Step, Target, explain, parse_target, verdict
from proxy.network import Grant, Mode, Reason
from proxy.packages.judging import JudgedBy
from proxy.packages.reasons import PackageReason
from sandbox.narrowing import Refused, mode_of, narrow
from sandbox.policy.positions import read_document
from sandbox.policy.problems import InvalidPolicy, Problem, shown
from sandbox.policy.rules import Section
from sandbox.policy.scalars import Address, FileName, Index, distinct, fault, kind_of
from sandbox.policy.wording import translate
from sandbox.policy_file import LoadedPolicy
from sandbox.registries import RegistryRules, indexes_of, rules_from_policy
from sandbox.tenants import UnknownTenant, of_tenant


@dataclass(frozen=True, slots=True)
class Asked:
    """The network setting of a call."""

    allow_network: bool
    domains: tuple[str, ...] | None

    @property
    def mode(self) -> Mode:
        return mode_of(allow_network=self.allow_network, domains=self.domains)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request: `allow`, `deny`, or `refused` when the call itself was, before any attempt."""

    verdict: str
    reason: str
    rule: str | None
    detail: str
    hint: str | None = None
    layer: str | None = None
    steps: tuple[Step, ...] = ()
    grant: Grant | None = None


def outcome_of(
    loaded: LoadedPolicy, registries: RegistryRules | None, asked: Asked, target: Target, *,
    method: str = "GET", language: str = "python", addresses: Sequence[IPAddress] = (),
    judged_by: JudgedBy | None = None,
) -> Outcome:  # fmt: skip
    """What would become of one request of a call under a policy, layer by layer."""
    try:
        grant = narrow(
            loaded, registries, call_id="explain", attempt_id="explain.1", language=language,
            allow_network=asked.allow_network, domains=asked.domains,
        )  # fmt: skip
    except Refused as refused:
        return Outcome("refused", refused.code, refused.rule, refused.message, refused.hint, refused.layer)
    steps = explain(grant, target, method, addresses, judged_by)
    answer = verdict(steps)
    return Outcome(
        answer.verdict.value, answer.reason.value, answer.rule, answer.detail, steps=steps, grant=grant
    )  # fmt: skip


# The file


def _asked(value: object) -> Asked:
    if isinstance(value, list):
        if not value or not all(isinstance(name, str) for name in value):
            fault("a list here names the hosts of the call", "write `[example.com]`, or `unrestricted`")
        return Asked(True, tuple(value))
    modes = {"block-all": Asked(False, None), "registry-default": Asked(True, None), "unrestricted": Asked(True, ())}
    if not isinstance(value, str) or value not in modes:
        fault(
            f"`{shown(value)}` is no call", "write `block-all`, `registry-default`, `unrestricted` or `[example.com]`"
        )
    return modes[value]


def _request(value: object) -> tuple[str, Target]:
    if not isinstance(value, str):
        fault(f"a request is text, not {kind_of(value)}", "write `GET https://example.com/`")
    method, space, rest = value.strip().partition(" ")
    if not space:
        method, rest = "GET", method
    try:
        return method, parse_target(rest.strip())
    except InvalidTarget as error:
        fault(f"`{shown(value)}` is no request: {error}", "write `GET https://example.com/`, or `example.com:5432`")


def _verdict(value: object) -> str:
    if value not in ("allow", "deny", "refused"):
        fault(f"`{shown(value)}` is no verdict", "write `allow`, `deny` or `refused`")
    return str(value)


def _language(value: object) -> str:
    if value not in ("python", "javascript"):
        fault(f"`{shown(value)}` is no language of calls", "write `python` or `javascript`")
    return str(value)


def _word(value: object) -> str:
    if not isinstance(value, str) or not value:
        fault(f"text is expected, not {kind_of(value)}")
    return value


Word = Annotated[str, PlainValidator(_word)]


class Case(Section):
    """One line of the table. `address` is what the name resolves to; without it the dial is not looked at.

    `tenant` is whose call it is; without it the operator's own.
    """

    name: Word | None = None
    tenant: Word | None = None
    call: Annotated[Asked, PlainValidator(_asked)]
    language: Annotated[str, PlainValidator(_language)] = "python"
    request: Annotated[tuple[str, Target], PlainValidator(_request)]
    address: Address | None = None
    verdict: Annotated[str, PlainValidator(_verdict)]
    reason: Word | None = None
    rule: Word | None = None

    @model_validator(mode="after")
    def _denials_have_reasons(self) -> Case:
        if self.verdict == "deny":
            if self.reason is None:
                fault("a denial is expected without its reason", "write `reason: host_not_allowed`")
            if self.reason not in (*Reason, *PackageReason):
                fault(f"`{shown(self.reason)}` is no reason", "write one of those in docs/policy.md")
        return self


def _some(value: object) -> object:
    if not isinstance(value, list) or not value:
        fault("there are no cases", "write at least one")
    return value


class Cases(Section):
    """A file of cases. `registries` stands in for `auto`, in either language, so that cases hold on every machine."""

    policy: FileName | None = None
    registries: Annotated[tuple[Index, ...], AfterValidator(distinct)] = ()
    cases: Annotated[tuple[Case, ...], BeforeValidator(_some), Field(max_length=10_000)]


@dataclass(frozen=True, slots=True)
class Checked:
    """A case with what came of it; `differences` is empty when it holds."""

    place: int
    title: str
    differences: tuple[str, ...]


def parse_cases(text: str, file: str) -> Cases:
    """Read a cases file. Raises `InvalidPolicy` with every fault."""
    document = read_document(text, file)
    if document.broken or document.problems:
        raise InvalidPolicy(document.problems)
    if not isinstance(document.data, dict):
        raise InvalidPolicy([Problem(file, None, "", "it is no file of cases", "begin with `cases:`")])
    try:
        return Cases.model_validate(document.data)
    except ValidationError as error:
        raise InvalidPolicy(translate(error.errors(include_url=False), Cases, document, file)) from error


def check_cases(loaded: LoadedPolicy, cases: Cases) -> list[Checked]:
    """Hold every case against the policy."""
    checked = []
    for place, case in enumerate(cases.cases):
        method, target = case.request
        title = case.name or f"{_called(case)}: {method} {target}"
        try:
            narrowed = of_tenant(loaded, case.tenant or "")
        except UnknownTenant as error:
            checked.append(Checked(place, title, (str(error),)))
            continue
        addresses = () if case.address is None else (case.address,)
        indexes = indexes_of(loaded.policy.network.registries, case.language) or cases.registries
        registries = rules_from_policy(case.language, indexes) if indexes else RegistryRules(case.language, (), ())
        outcome = outcome_of(
            narrowed, registries, case.call, target, method=method, language=case.language, addresses=addresses
        )
        differences = [
            f"{what} is `{got}`, not `{want}`"
            for what, want, got in (
                ("verdict", case.verdict, outcome.verdict),
                ("reason", case.reason, outcome.reason),
                ("rule", case.rule, outcome.rule),
            )
            if want is not None and want != got
        ]
        if differences:
            differences.append(outcome.detail)
        checked.append(Checked(place, title, tuple(differences)))
    return checked


def _called(case: Case) -> str:
    asked = ", ".join(case.call.domains) if case.call.domains else case.call.mode.value
    return f"{case.tenant}, {asked}" if case.tenant else asked
