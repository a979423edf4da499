"""`sluicegate policy`: check a policy file, explain it, run its cases, print its schema. An edge.

Exit status: 0 yes; 1 no (the request is denied, a case fails); 2 the file or the arguments are none.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from proxy.explain import InvalidTarget, Step, Target, parse_target
from proxy.network import Mode, RequestLayer
from proxy.packages.data_files import InvalidData, load_policy_data
from proxy.packages.judging import JudgedBy
from sandbox.call_parsing import parse_call
from sandbox.contract import InvalidCall
from sandbox.policy.packages import package_policy
from sandbox.policy.problems import shown
from sandbox.policy_cases import Asked, Outcome, check_cases, outcome_of, parse_cases
from sandbox.policy_file import (
    InvalidPolicy,
    LoadedPolicy,
    default_policy_path,
    load_policy,
    policy_schema,
    read_policy_text,
)
from sandbox.registries import RegistryRules, resolve_registries
from sandbox.tenants import UnknownTenant, of_tenant

EXIT_NO = 1
EXIT_INVALID = 2

app = typer.Typer(help="Check, explain and test policy files.", no_args_is_help=True)

PolicyFile = Annotated[Path | None, typer.Option("--policy", help="The policy file; the shipped default otherwise.")]


@app.command("check")
def check_command(file: Annotated[Path, typer.Argument(help="The policy file.")]) -> None:
    """Say whether a policy file is one, and what in it may surprise."""
    loaded = _load(file)
    for warning in loaded.warnings:
        _warn(f"warning: {warning}")
    modes = ", ".join(mode.value for mode in loaded.policy.network.modes)
    tenants = ", ".join(tenant.name for tenant in loaded.policy.tenants)
    whose = f"; tenants: {tenants}" if tenants else ""
    _say(f"{file}: policy `{loaded.policy.name}` is valid; it allows {modes}{whose}\n{loaded.digest}")


@app.command("explain")
def explain_command(
    target: Annotated[str, typer.Argument(metavar="URL|HOST:PORT", help="What the code would ask for.")],
    policy: PolicyFile = None,
    allow_network: Annotated[
        bool,
        typer.Option("--allow-network", help="The call's network is on: registry-default, unless domains are named."),
    ] = False,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", metavar="HOST", help="A host that the call names; repeatable.")
    ] = None,
    unrestricted: Annotated[bool, typer.Option("--unrestricted", help="The call asks for any destination.")] = False,
    method: Annotated[str, typer.Option("--method", help="The request's method.")] = "GET",
    language: Annotated[str, typer.Option("--language", help="The call's language.")] = "python",
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME", help="Whose call it is; the operator's own without it.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The answer as a JSON object.")] = False,
) -> None:
    """Say what the proxy would do with a request, layer by layer. No name is looked up and nothing is sent."""
    loaded = _of_tenant(_load(policy or default_policy_path()), tenant)
    asked = _asked(allow_network, domain, unrestricted, language)
    if method != method.upper():
        _fail(
            f"`{shown(method)}` is no method: methods are in capitals\nhint: write `--method {shown(method.upper())}`"
        )
    try:
        parsed = parse_target(target)
    except InvalidTarget as error:
        _fail(
            f"`{target[:200]!a}` cannot be explained: {error}\nhint: write `https://example.com/` or `example.com:5432`"
        )
    registries = None
    if asked.mode is Mode.REGISTRY_DEFAULT and Mode.REGISTRY_DEFAULT in loaded.policy.network.modes:
        try:
            registries = resolve_registries(loaded.policy.network.registries, language)
        except InvalidPolicy as error:
            _fail(str(error))
    outcome = outcome_of(
        loaded, registries, asked, parsed, method=method, language=language, judged_by=_judged_by(loaded)
    )
    if as_json:
        _say(json.dumps(_as_json(loaded, registries, asked, parsed, method, outcome), indent=2))
    else:
        _print_explanation(loaded, registries, asked, parsed, method, outcome)
    raise typer.Exit(0 if outcome.verdict == "allow" else EXIT_NO)


@app.command("test")
def test_command(file: Annotated[Path, typer.Argument(help="A file of cases, such as `default.cases.yaml`.")]) -> None:
    """Hold the cases beside a policy against it."""
    try:
        cases = parse_cases(read_policy_text(file), str(file))
    except InvalidPolicy as error:
        _fail(str(error))
    if cases.policy is None and not file.name.endswith(".cases.yaml"):
        _fail(f"{file}: it does not say which policy it is about\nhint: write `policy: default.yaml`")
    name = cases.policy if cases.policy is not None else file.name.removesuffix(".cases.yaml") + ".yaml"
    loaded = _load(file.parent / name)
    results = check_cases(loaded, cases)
    failed = [result for result in results if result.differences]
    for result in failed:
        _say(f"FAILED cases[{result.place}] {result.title}")
        for difference in result.differences:
            _say(f"       {difference}")
    _say(f"{file}: {len(results) - len(failed)} of {len(results)} cases hold for policy `{loaded.policy.name}`")
    raise typer.Exit(EXIT_NO if failed else 0)


def _judged_by(loaded: LoadedPolicy) -> JudgedBy:
    """What the names of packages are judged by: the policy's lists, read now."""
    try:
        return JudgedBy(load_policy_data(package_policy(loaded.policy.packages)), datetime.now(UTC))
    except InvalidData as error:
        _fail(str(error))


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of policy files, for editors."""
    _say(json.dumps(policy_schema(), indent=2))


def _asked(allow_network: bool, domains: list[str] | None, unrestricted: bool, language: str) -> Asked:
    """The call's network setting, under the same contract as a call's."""
    if unrestricted and domains:
        _fail("`--unrestricted` and `--domain` exclude one another\nhint: give one of them")
    names = [] if unrestricted else domains or None
    data = {"code": "pass", "language": language, "allow_network": allow_network or names is not None, "domains": names}
    try:
        call = parse_call(data)
    except InvalidCall as error:
        _fail("\n".join(error.problems))
    return Asked(call.allow_network, None if call.domains is None else tuple(call.domains))


# Printing


def _print_explanation(
    loaded: LoadedPolicy, registries: RegistryRules | None, asked: Asked, target: Target, method: str, outcome: Outcome
) -> None:
    request = str(target) if target.raw else f"{method} {target}"
    _say(f"{outcome.verdict}: {request}")
    _say(f"  {outcome.detail}")
    _say(f"  reason {outcome.reason}, rule {outcome.rule or '-'}")
    if outcome.hint:
        _say(f"  hint: {outcome.hint}")
    whose = f", tenant {loaded.tenant}" if loaded.tenant else ""
    _say(f"policy {loaded.policy.name} ({loaded.path}){whose}, mode {asked.mode.value}")
    for host in registries.hosts if registries is not None else ():
        _say(f"  {host.rule}: {host.host}:{host.port} - {host.source}")
    for warning in registries.warnings if registries is not None else ():
        _say(f"  warning: {warning}")
    if outcome.verdict == "refused":
        _say("the call is refused before any attempt")
    for step in outcome.steps:
        _say(f"  {step.request.layer.value:8}{_step(step)}")
    if outcome.verdict == "allow" and not any(step.request.layer is RequestLayer.DIAL for step in outcome.steps):
        _say(f"  {RequestLayer.DIAL.value:8}{_UNRESOLVED}")


_UNRESOLVED = "not looked up here; each address the name resolves to is vetted before it is dialled"


def _step(step: Step) -> str:
    at = f" {step.request.address}" if step.request.address is not None else ""
    if step.decision is None:
        return f"{step.note}{at}"
    decision = step.decision
    return f"{decision.verdict.value}{at} ({decision.reason.value}, {decision.rule or 'no rule'}) {decision.detail}"


def _as_json(
    loaded: LoadedPolicy, registries: RegistryRules | None, asked: Asked, target: Target, method: str, outcome: Outcome
) -> dict[str, Any]:
    return {
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "rule": outcome.rule,
        "detail": outcome.detail,
        "hint": outcome.hint,
        "target": str(target),
        "method": None if target.raw else method,
        "mode": asked.mode.value,
        "policy": {"name": loaded.policy.name, "digest": loaded.digest, "path": str(loaded.path)},
        "tenant": loaded.tenant or None,
        "registries": [
            {"rule": host.rule, "host": host.host, "port": host.port, "source": host.source}
            for host in (registries.hosts if registries is not None else ())
        ],
        "registry_warnings": list(registries.warnings) if registries is not None else [],
        "layers": [
            {
                "layer": step.request.layer.value,
                "verdict": None if step.decision is None else step.decision.verdict.value,
                "reason": None if step.decision is None else step.decision.reason.value,
                "rule": None if step.decision is None else step.decision.rule,
                "detail": step.note if step.decision is None else step.decision.detail,
                "address": None if step.request.address is None else str(step.request.address),
            }
            for step in outcome.steps
        ],
    }


def _load(path: Path) -> LoadedPolicy:
    try:
        return load_policy(path)
    except InvalidPolicy as error:
        _fail(str(error))


def _of_tenant(loaded: LoadedPolicy, name: str) -> LoadedPolicy:
    try:
        return of_tenant(loaded, name)
    except UnknownTenant as error:
        names = ", ".join(f"`{tenant.name}`" for tenant in loaded.policy.tenants)
        _fail(f"{error}\nhint: " + (f"it has {names}" if names else "it has none: leave `--tenant` out"))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _warn(text: str) -> None:
    sys.stderr.write(text + "\n")


def _fail(text: str) -> NoReturn:
    _warn(text)
    raise typer.Exit(EXIT_INVALID)
