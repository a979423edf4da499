"""What would become of a request of a call, said so that whoever asks can act on it. Nothing is looked up or sent.

Owns: the wording. Must not: decide; `sandbox.policy_cases` asks what decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.explain import InvalidTarget, Step, parse_target
from proxy.network import Mode
from sandbox.contract import InvalidCall
from sandbox.executor import Executor
from sandbox.policy_cases import Asked, Outcome, outcome_of
from sandbox.policy_file import LoadedPolicy
from sandbox.service import model

NO_OTHER_WAY = (
    "the policy decides this for every tool, address, proxy and protocol, so another route will not help: do without "
    "it, or have the operator allow it"
)
_MAX_SHOWN_CHARS = 200


async def explain_network(
    executor: Executor, tenant: str, target: str, *, language: str, allow_network: bool,
    domains: Sequence[str] | None, method: str,
) -> model.NetworkExplanation:  # fmt: skip
    """The answer of every layer, and the first that denies. Raises `InvalidCall`, `UnknownTenant`, `InvalidPolicy`."""
    loaded = executor.policy_of(tenant)
    problems = []
    if language not in ("python", "javascript"):
        problems.append("language: it is none of 'python' or 'javascript'")
    if not (method.isascii() and method.isalpha() and method.isupper()):
        problems.append("method: it is no method in capitals, such as `GET`")
    if domains is not None and not allow_network:
        problems.append("domains: it is given without `allow_network: true`")
    parsed = None
    try:
        parsed = parse_target(target)
    except InvalidTarget as error:
        problems.append(f"url: {error}; write `https://example.com/` or `example.com:5432`")
    if problems or parsed is None:
        raise InvalidCall(problems)
    asked = Asked(allow_network, None if domains is None else tuple(domains))
    registries = None
    if asked.mode is Mode.REGISTRY_DEFAULT and Mode.REGISTRY_DEFAULT in loaded.policy.network.modes:
        registries = await executor.registries_of(tenant, language)
    outcome = outcome_of(loaded, registries, asked, parsed, method=method, language=language)
    return _said(loaded, asked, str(parsed)[:_MAX_SHOWN_CHARS], outcome)


def _said(loaded: LoadedPolicy, asked: Asked, target: str, outcome: Outcome) -> model.NetworkExplanation:
    name = loaded.policy.name
    match outcome.verdict:
        case "allow":
            message, hint = f"policy `{name}` allows `{target}` to a call in mode `{asked.mode}`", None
        case "refused":
            message = f"policy `{name}` refuses the whole call, before any code runs: {outcome.detail}"
            hint = outcome.hint or NO_OTHER_WAY
        case _:
            message = f"policy `{name}` denies `{target}` to a call in mode `{asked.mode}`: {outcome.detail}"
            hint = outcome.hint or NO_OTHER_WAY
    return model.NetworkExplanation(
        target=target,
        policy=name,
        mode=asked.mode.value,
        verdict=outcome.verdict,  # type: ignore[arg-type]  # one of the three, as `Outcome` says
        reason=outcome.reason,
        rule=outcome.rule,
        message=message if outcome.rule is None else f"{message} (rule `{outcome.rule}`)",
        hint=hint,
        steps=[_step(step) for step in outcome.steps if step.decision is not None],
    )


def _step(step: Step) -> model.Step:
    assert step.decision is not None
    decision = step.decision
    return model.Step(
        layer=step.request.layer.value, verdict=decision.verdict.value, reason=decision.reason.value,
        rule=decision.rule, detail=decision.detail,
    )  # fmt: skip
