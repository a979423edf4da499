"""The policy narrowed to one attempt: what the call asks for, under what the operator allows. Pure.

Owns: making the grant and the limits, or refusing the call before any attempt with the layer and the rule that refuse.
Must not: read files, ask package clients, judge traffic.

Effective = operator AND tenant AND call. A call that asks for more than the policy's ceiling is refused rather than cut
down: code that runs with less than it asked for fails later, and less plainly. Where operator and tenant both refuse,
the operator is named: what the tenant's section says would not help.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from proxy.destinations import Host, InvalidHost, parse_host
from proxy.network import Grant, Mode, PrivateAddress, Rule, RuleLayer, StaticHost
from proxy.packages.requests import Purpose, RegistryGrant
from sandbox.contract import MIN_MEMORY_MIB
from sandbox.policy.limits import MIN_TIMEOUT_SECONDS
from sandbox.policy.packages import package_policy
from sandbox.policy.problems import shown
from sandbox.policy.rules import AllowRule, DenyRule
from sandbox.policy.schema import NetworkSection, Policy
from sandbox.policy.suffixes import Suffix, suffix_kind
from sandbox.policy_file import LoadedPolicy
from sandbox.registries import RegistryRules

ALLOW_KEY = "network.allow"
DENY_KEY = "network.deny"
CALL_LAYER = "call.domains"


class Refused(Exception):
    """The call asks for more than the policy allows. `layer` says whose rule refuses it, `rule` which one."""

    def __init__(self, code: str, message: str, *, layer: str, rule: str, hint: str | None = None) -> None:
        text = f"{message} (refused by {layer}: `{rule}`)"
        super().__init__(f"{text}\nhint: {hint}" if hint else text)
        self.layer, self.rule, self.code, self.message, self.hint = layer, rule, code, message, hint


@dataclass(frozen=True, slots=True)
class Limits:
    """What one attempt may use. `timeout_seconds` is wall-clock time; `output_mib` is of both streams together."""

    timeout_seconds: float
    memory_mib: int
    output_mib: int

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 1024 * 1024


def whose_rule(loaded: LoadedPolicy, key: str, *, operator_allows: bool) -> tuple[str, str]:
    """The layer of what refuses by a key of the policy, and the rule's name: the tenant's if the operator allows it."""
    if operator_allows and loaded.tenant:
        return "tenant", f"tenants.{loaded.tenant}.{key}"
    return "operator", key


def preparing_rule(loaded: LoadedPolicy) -> tuple[str, str]:
    """The layer and the rule by which calls may bring no packages, where they may not."""
    return whose_rule(loaded, "packages.prepare", operator_allows=_operator(loaded).packages.prepare)


def _operator(loaded: LoadedPolicy) -> Policy:
    return loaded.policy if loaded.narrowing is None else loaded.narrowing.operator


def narrow_limits(loaded: LoadedPolicy, *, timeout: float | None, memory_mib: int | None) -> Limits:
    """The call's limits, or the policy's defaults for those it omits. Raises `Refused` above the policy's maximum."""
    limits, operators = loaded.policy.limits, _operator(loaded).limits
    seconds = limits.timeout_seconds.default if timeout is None else timeout
    memory = limits.memory_mib.default if memory_mib is None else memory_mib
    for asked, lowest, highest, operators_highest, unit, key in (
        (seconds, MIN_TIMEOUT_SECONDS, limits.timeout_seconds.max, operators.timeout_seconds.max, "s",
         "limits.timeout_seconds.max"),
        (memory, MIN_MEMORY_MIB, limits.memory_mib.max, operators.memory_mib.max, " MiB", "limits.memory_mib.max"),
    ):  # fmt: skip
        # Written so that a number that compares with nothing is refused too.
        if not lowest <= asked <= highest:
            code = "timeout_not_allowed" if unit == "s" else "memory_not_allowed"
            layer, rule = whose_rule(loaded, key, operator_allows=lowest <= asked <= operators_highest)
            raise Refused(
                code,
                f"the call asks for {asked:g}{unit}, and the policy allows {lowest:g} to {highest:g}{unit}",
                layer=layer, rule=rule, hint=f"ask for at most {highest:g}{unit}",
            )  # fmt: skip
    return Limits(seconds, memory, limits.output_mib)


def mode_of(*, allow_network: bool, domains: Sequence[str] | None) -> Mode:
    """The mode that a call's network setting asks for."""
    if not allow_network:
        return Mode.BLOCK_ALL
    if domains is None:
        return Mode.REGISTRY_DEFAULT
    return Mode.NAMED if domains else Mode.UNRESTRICTED


def narrow(
    loaded: LoadedPolicy,
    registries: RegistryRules | None,
    *,
    call_id: str,
    attempt_id: str,
    language: str,
    allow_network: bool,
    domains: Sequence[str] | None,
) -> Grant:
    """The grant of one attempt. `registries` are the language's, and needed in the mode `registry-default` alone.

    Raises `Refused`; `ValueError` when the registries are needed and missing.
    """
    mode = mode_of(allow_network=allow_network, domains=domains)
    operator, *tenants = _authorities(loaded)
    _check_mode(loaded, operator, mode)
    hosts = _parsed(domains or ()) if mode is Mode.NAMED else {}
    _check_hosts(operator, hosts)
    for tenant in tenants:
        _check_mode(loaded, tenant, mode)
        _check_hosts(tenant, hosts)
    if mode is Mode.REGISTRY_DEFAULT:
        if registries is None or registries.language != language:
            raise ValueError(f"the registries of {language} are needed")
        return _reading(loaded, registries, Purpose.ATTEMPT, call_id, attempt_id)
    layers = _named(loaded, hosts) if mode is Mode.NAMED else ()
    return _grant(loaded, mode, layers, call_id, attempt_id)


def narrow_preparation(loaded: LoadedPolicy, registries: RegistryRules, *, call_id: str) -> Grant:
    """The grant of what prepares a call's packages: reading the registry, whatever the call itself may reach."""
    return _reading(loaded, registries, Purpose.PREPARATION, call_id, call_id)


def _reading(loaded: LoadedPolicy, registries: RegistryRules, purpose: Purpose, call_id: str, attempt_id: str) -> Grant:
    layer = RuleLayer(name=f"registries.{registries.language}", rules=registries.rules)
    grant = _grant(loaded, Mode.REGISTRY_DEFAULT, (layer,), call_id, attempt_id)
    if registries.registry is None:
        return grant
    packages = package_policy(loaded.policy.packages)
    reading = RegistryGrant(registries=(registries.registry,), policy=packages, purpose=purpose)
    return grant.model_copy(update={"packages": reading})


def _grant(loaded: LoadedPolicy, mode: Mode, layers: tuple[RuleLayer, ...], call_id: str, attempt_id: str) -> Grant:
    network = loaded.policy.network
    return Grant(
        call_id=call_id,
        attempt_id=attempt_id,
        policy_name=loaded.policy.name,
        policy_digest=loaded.digest,
        mode=mode,
        layers=layers,
        deny=tuple(rule for authority in _authorities(loaded) for rule in _deny_rules(authority)),
        ports=network.ports,
        hosts=tuple(StaticHost(host=Host(name), addresses=found) for name, found in network.hosts.items()),
        private_addresses=_private_addresses(network),
        passthrough=network.inspect.passthrough,
        max_connections=loaded.policy.limits.max_connections,
        tenant=loaded.tenant,
    )


def _check_mode(loaded: LoadedPolicy, authority: _Authority, mode: Mode) -> None:
    if mode in authority.modes:
        return
    network = loaded.policy.network
    allowed = ", ".join(f"`{one}`" for one in network.modes) or "none"
    raise Refused(
        "mode_not_allowed",
        f"the call asks for the network mode `{mode}`, and policy `{loaded.policy.name}` allows{authority.whom} "
        + allowed,
        layer=authority.layer, rule=authority.name("network.modes"), hint=_mode_hint(mode, network),
    )  # fmt: skip


def _mode_hint(mode: Mode, network: NetworkSection) -> str | None:
    if mode is Mode.UNRESTRICTED and Mode.NAMED in network.modes:
        return "name the hosts in `domains`"
    if Mode.BLOCK_ALL not in network.modes and mode is Mode.BLOCK_ALL:
        return "set `allow_network`"
    return "run without the network, or ask the operator to allow the mode" if mode is not Mode.BLOCK_ALL else None


# The call's domains


def _parsed(domains: Sequence[str]) -> dict[Host, int]:
    """The hosts named and the place of each one's first mention: spellings of one name are one."""
    hosts: dict[Host, int] = {}
    for place, text in enumerate(domains):
        try:
            host = parse_host(text)
        except InvalidHost as error:
            raise _refused_domain("invalid_domain", f"`{shown(text)}` is not a host name: {error}", place) from error
        if host.address is not None:
            raise _refused_domain("invalid_domain", f"`{host}` is an address where a host name belongs", place)
        if suffix_kind(host) is Suffix.PUBLIC:
            raise _refused_domain(
                "domain_too_broad",
                f"`{host}` is a public suffix: naming it would allow every site registered below it",
                place, hint=f"name the site, such as `example.{host}`",
            )  # fmt: skip
        hosts.setdefault(host, place)
    return hosts


def _refused_domain(code: str, message: str, place: int, hint: str | None = None) -> Refused:
    return Refused(code, message, layer="call", rule=f"{CALL_LAYER}[{place}]", hint=hint)


def _named(loaded: LoadedPolicy, hosts: dict[Host, int]) -> tuple[RuleLayer, ...]:
    authorities = _authorities(loaded)
    layers = tuple(
        RuleLayer(name=authority.name(ALLOW_KEY), rules=_allow_rules(authority, authority.allow))
        for authority in authorities
        if authority.allow is not None
    )
    call = tuple(Rule(id=f"{CALL_LAYER}[{place}]", host=host) for host, place in hosts.items())
    # Under the operator's list the call's own narrows the hosts, and leaves ports, methods, paths and protocol to it.
    # Without one the call's list is of the full kind, whatever a tenant's list says: a tenant opens no port.
    return (*layers, RuleLayer(name=CALL_LAYER, rules=call, names_only=authorities[0].allow is not None))


@dataclass(frozen=True, slots=True)
class _Authority:
    """Who allows and denies beside the call itself: the operator first, and the tenant where there is one."""

    tenant: str
    modes: tuple[Mode, ...]
    allow: tuple[AllowRule, ...] | None
    deny: tuple[DenyRule, ...]

    @property
    def layer(self) -> str:
        return "tenant" if self.tenant else "operator"

    @property
    def whom(self) -> str:
        """Whom what it says is about, as the end of a sentence."""
        return f" tenant `{self.tenant}`" if self.tenant else ""

    def name(self, key: str) -> str:
        return f"tenants.{self.tenant}.{key}" if self.tenant else key


def _authorities(loaded: LoadedPolicy) -> tuple[_Authority, ...]:
    network = _operator(loaded).network
    operator = _Authority("", network.modes, network.allow, network.deny)
    if loaded.narrowing is None:
        return (operator,)
    own = loaded.narrowing.section.network
    modes = network.modes if own.modes is None else own.modes
    return (operator, _Authority(loaded.tenant, modes, own.allow, own.deny))


def _check_hosts(authority: _Authority, hosts: Collection[Host]) -> None:
    for host in hosts:
        _check_denied(authority, host)
    for host in hosts:
        _check_allowed(authority, host)


def _check_denied(authority: _Authority, host: Host) -> None:
    for place, rule in enumerate(authority.deny):
        if rule.host is None or rule.ports is not None or rule.methods is not None or rule.paths is not None:
            continue  # it leaves something of the host: decided request by request
        if rule.host == host or (rule.subdomains and rule.host.covers(host)):
            raise Refused(
                "domain_denied", f"the call names `{host}`, which the policy denies{authority.whom}",
                layer=authority.layer, rule=authority.name(f"{DENY_KEY}[{place}]"), hint="leave it out",
            )  # fmt: skip


def _check_allowed(authority: _Authority, host: Host) -> None:
    rules = authority.allow
    if rules is None or any(rule.host == host or (rule.subdomains and rule.host.covers(host)) for rule in rules):
        return
    below = sorted({rule.host.text for rule in rules if host.covers(rule.host)})
    raise Refused(
        "domain_not_allowed", f"the call names `{host}`, which the policy does not allow{authority.whom}",
        layer=authority.layer, rule=authority.name(ALLOW_KEY),
        hint="of the names below it the policy allows " + ", ".join(f"`{name}`" for name in below[:5]) if below
        else "leave it out, or ask the operator to allow it",
    )  # fmt: skip


# The policy's rules as the proxy knows them


def _allow_rules(authority: _Authority, rules: tuple[AllowRule, ...]) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            id=authority.name(f"{ALLOW_KEY}[{place}]"), host=rule.host, subdomains=rule.subdomains, ports=rule.ports,
            methods=rule.methods, paths=rule.paths, protocol=rule.protocol,
        )
        for place, rule in enumerate(rules)
    )  # fmt: skip


def _deny_rules(authority: _Authority) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            id=authority.name(f"{DENY_KEY}[{place}]"), host=rule.host, cidr=rule.cidr, subdomains=rule.subdomains,
            ports=rule.ports, methods=rule.methods, paths=rule.paths,
        )
        for place, rule in enumerate(authority.deny)
    )  # fmt: skip


def _private_addresses(network: NetworkSection) -> tuple[PrivateAddress, ...]:
    return tuple(
        PrivateAddress(
            id=f"network.private_addresses[{place}]", host=entry.host, registries=entry.registries, cidr=entry.cidr,
            ports=entry.ports,
        )
        for place, entry in enumerate(network.private_addresses)
    )  # fmt: skip
