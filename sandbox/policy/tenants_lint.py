"""What a policy says of tenants and of the `code_exec` tool that it can't mean, or that may surprise. Pure.

Owns: holding these sections against the operator's. A tenant that is given more than the operator has is an *error*:
it would not get it, and whoever wrote it believes that it does. Must not: narrow; `sandbox.tenants` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from proxy.network import Mode
from proxy.packages.model import Ecosystem
from sandbox.packages.specifiers import SyntaxFault, parse_specifier
from sandbox.policy.problems import Finding, KeyPath, key_text
from sandbox.policy.rules import AllowRule
from sandbox.policy.rules_lint import (
    ByHost,
    allow_findings,
    breadth,
    deny_findings,
    error,
    mode_findings,
    warning,
)
from sandbox.policy.schema import NetworkSection, Policy
from sandbox.policy.service import CodeExecSection
from sandbox.policy.tenants import Tenant

_MODES: KeyPath = ("network", "modes")


def tenant_findings(policy: Policy) -> Iterator[Finding]:
    """All that stands against the tenants."""
    yield from _repeated_names(policy)
    denied = (("network", "deny"), ByHost(policy.network.deny))
    reach = _Reach(policy.network)
    for place, tenant in enumerate(policy.tenants):
        path: KeyPath = ("tenants", place)
        home: KeyPath = (*path, "network")
        own = tenant.network
        yield from _tokens(path, tenant, policy.code_exec)
        yield from _modes(home, tenant, policy)
        beside = [denied, ((*home, "deny"), ByHost(own.deny))]
        yield from allow_findings((*home, "allow"), own.allow or (), beside, policy.network)
        yield from reach.findings((*home, "allow"), own.allow or ())
        yield from deny_findings((*home, "deny"), own.deny)
        yield from _limits(path, tenant, policy)
        if tenant.packages.prepare and not policy.packages.prepare:
            yield error(
                (*path, "packages", "prepare"),
                "the operator's `packages.prepare` is `false`, and a tenant has no more than the operator",
                "leave it out, or write `packages: {prepare: true}` for all", ("packages", "prepare"),
            )  # fmt: skip
        yield from _code_exec_of(path, tenant, policy)


def _repeated_names(policy: Policy) -> Iterator[Finding]:
    tenants: dict[str, KeyPath] = {}
    hashes: dict[str, KeyPath] = {}
    for place, tenant in enumerate(policy.tenants):
        path: KeyPath = ("tenants", place)
        if (earlier := tenants.setdefault(tenant.name, path)) != path:
            yield error((*path, "name"), f"`{key_text(earlier)}` has this name, too", "give each tenant its own")
        names: dict[str, KeyPath] = {}
        for at, token in enumerate(tenant.tokens):
            here: KeyPath = (*path, "tokens", at)
            if (earlier := names.setdefault(token.name, here)) != here:
                yield error((*here, "name"), f"`{key_text(earlier)}` has this name, too", "give each token its own")
            if (earlier := hashes.setdefault(token.sha256, here)) != here:
                yield error(
                    (*here, "sha256"), f"`{key_text(earlier)}` is the same token, and a token is of one tenant",
                    "`sluicegate token` makes another one",
                )  # fmt: skip


def _tokens(path: KeyPath, tenant: Tenant, code_exec: CodeExecSection) -> Iterator[Finding]:
    if not tenant.tokens:
        yield warning(path, "it has no token, so nobody can call as it", "`sluicegate token` makes one")
    for at, token in enumerate(tenant.tokens):
        if token.admin and not code_exec.working_directories:
            yield warning(
                (*path, "tokens", at, "admin"), "`code_exec.working_directories` is empty, so this changes nothing",
                "list there where its calls may work, or drop it",
            )  # fmt: skip


def _modes(home: KeyPath, tenant: Tenant, policy: Policy) -> Iterator[Finding]:
    own, operators = tenant.network.modes, policy.network.modes
    path: KeyPath = (*home, "modes")
    for at, mode in enumerate(own or ()):
        if mode not in operators:
            yield error(
                (*path, at), f"the operator's `network.modes` does not have `{mode}`, and a tenant has no more",
                "drop it here, or add it there", _MODES,
            )  # fmt: skip
    modes = [mode for mode in operators if own is None or mode in own]
    yield from mode_findings((*home, "allow"), modes, tenant.network.allow, _MODES, path)


class _Reach:
    """Which names, ports and protocols the operator lets calls name."""

    def __init__(self, network: NetworkSection) -> None:
        self._network = network
        self._covering = ByHost(network.allow or ())
        self._below: defaultdict[str, list[AllowRule]] = defaultdict(list)
        for rule in network.allow or ():
            labels = rule.host.text.split(".")
            for start in range(1, len(labels)):
                self._below[".".join(labels[start:])].append(rule)

    def findings(self, home: KeyPath, rules: tuple[AllowRule, ...]) -> Iterator[Finding]:
        """Of a tenant's rules, those that the operator's leave nothing of."""
        for at, rule in enumerate(rules):
            beside = self._beside(rule)
            if any(self._meet(rule, other) for other in beside):
                continue
            if self._network.allow is None:
                ports = ", ".join(map(str, self._network.ports))
                message = f"the operator allows HTTP at {ports} and no more, so this is never allowed"
            elif beside:
                message = f"the operator allows `{rule.host}` at other ports, by other methods or protocols"
            else:
                message = f"no rule of `network.allow` covers `{rule.host}`, so it is never allowed"
            yield warning((*home, at), message, "drop it here, or add to the operator's rules")

    def _beside(self, rule: AllowRule) -> list[AllowRule]:
        """The operator's rules that speak of some name that the tenant's does."""
        if self._network.allow is None:
            return [AllowRule.model_validate({"host": rule.host.text})]
        found = [other for _, other in self._covering.covering(rule.host, subdomains=False)]
        return found + self._below[rule.host.text] if rule.subdomains else found

    def _meet(self, rule: AllowRule, other: AllowRule) -> bool:
        ports = set(rule.ports or self._network.ports) & set(other.ports or self._network.ports)
        methods = rule.methods is None or other.methods is None or set(rule.methods) & set(other.methods)
        return bool(ports and methods) and rule.protocol is other.protocol


def _limits(path: KeyPath, tenant: Tenant, policy: Policy) -> Iterator[Finding]:
    for key in ("timeout_seconds", "memory_mib"):
        own, top = getattr(tenant.limits, key), getattr(policy.limits, key).max
        for word in ("max", "default"):
            value = getattr(own, word)
            if value is not None and value > top:
                yield error(
                    (*path, "limits", key, word), f"it is {value:g}, above the operator's `limits.{key}.max`, {top:g}",
                    "a tenant has no more than the operator: lower it", ("limits", key),
                )  # fmt: skip


def _code_exec_of(path: KeyPath, tenant: Tenant, policy: Policy) -> Iterator[Finding]:
    """What makes every call of the `code_exec` tool of this tenant's a refused one."""
    section, network = policy.code_exec, tenant.network
    refused = "so every call of the `code_exec` tool is refused this tenant"
    if network.modes is not None and section.network not in network.modes:
        yield warning(
            (*path, "network", "modes"), f"`code_exec.network` is `{section.network}`, {refused}",
            f"add `{section.network}`",
        )  # fmt: skip
    elif section.network is Mode.NAMED:
        allow = ByHost(network.allow or ())
        for host in section.domains:
            if network.allow is not None and not any(allow.covering(host, subdomains=False)):
                yield warning(
                    (*path, "network", "allow"), f"no rule covers `{host}` of `code_exec.domains`, {refused}", "add one"
                )
    if section.packages and tenant.packages.prepare is False:
        yield warning(
            (*path, "packages", "prepare"), f"`code_exec.packages` has some, {refused}", "drop it"
        )  # fmt: skip


# The tool, for the operator


def code_exec_findings(policy: Policy) -> Iterator[Finding]:
    """All that stands against the `code_exec` section: mostly what would make every call of the tool a refused one."""
    section, modes = policy.code_exec, policy.network.modes
    home: KeyPath = ("code_exec",)
    network: KeyPath = (*home, "network")
    if section.network not in modes:
        message = f"`network.modes` does not have `{section.network}`, so every call of the tool is refused"
        hint = f"add `{section.network}` there, or write another mode here"
        if section.network is not Mode.BLOCK_ALL:
            yield error(network, message, hint, _MODES)
        elif section != CodeExecSection() or policy.tenants:
            yield warning(network, message, hint)
    yield from _domains(policy)
    yield from _packages(policy)
    for place, directory in enumerate(section.working_directories):
        for at, other in enumerate(section.working_directories):
            if at != place and directory.is_relative_to(other):
                where = key_text((*home, "working_directories", at))
                yield warning((*home, "working_directories", place), f"it is below `{where}`", "drop one of the two")
                break


def _domains(policy: Policy) -> Iterator[Finding]:
    section, operator = policy.code_exec, policy.network
    home: KeyPath = ("code_exec", "domains")
    network: KeyPath = ("code_exec", "network")
    if section.network is not Mode.NAMED:
        if section.domains:
            yield error(
                home, f"calls in the mode `{section.network}` name no hosts",
                "write `network: named`, or drop it", network,
            )  # fmt: skip
        return
    if not section.domains:
        yield error(home, "calls in the mode `named` name hosts, and there are none", "write `[example.com]`", home)
    allow, denied = ByHost(operator.allow or ()), ByHost(operator.deny)
    for place, host in enumerate(section.domains):
        yield from (found for found in breadth((*home, place), host, known=True) if found.error)
        for at, rule in denied.covering(host, subdomains=False):
            if rule.ports is None and rule.methods is None and rule.paths is None:
                where = key_text(("network", "deny", at))
                yield error(
                    (*home, place), f"`{where}` denies `{host}`, so every call of the tool is refused",
                    "drop one of the two", ("network", "deny"),
                )  # fmt: skip
                break
        if operator.allow is not None and not any(allow.covering(host, subdomains=False)):
            yield error(
                (*home, place), f"no rule of `network.allow` covers `{host}`, so every call of the tool is refused",
                "add one there, or drop it here", ("network", "allow"),
            )  # fmt: skip


def _packages(policy: Policy) -> Iterator[Finding]:
    texts, packages = policy.code_exec.packages, policy.packages
    home: KeyPath = ("code_exec", "packages")
    if not texts:
        return
    if not packages.prepare:
        yield error(
            home, "`packages.prepare` is `false`, so no call may have packages", "write `packages: {prepare: true}`",
            ("packages", "prepare"),
        )  # fmt: skip
    if len(texts) > packages.max_specifiers:
        message = f"there are {len(texts)}, and `packages.max_specifiers` is {packages.max_specifiers}"
        yield error(home, message, "raise it, or list fewer", ("packages", "max_specifiers"))
    seen: dict[str, int] = {}
    for place, text in enumerate(texts):
        read = parse_specifier(Ecosystem.PYPI, text)
        if isinstance(read, SyntaxFault):
            continue  # the schema has said so
        if (earlier := seen.setdefault(read.name.normal, place)) != place:
            where = key_text((*home, earlier))
            yield error((*home, place), f"`{where}` is the same package", "keep one of them")
