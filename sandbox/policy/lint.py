"""What a policy says that it can't mean: rules that can't work, or that say more than they seem to. Pure.

Owns: weighing the keys of a policy against one another. An *error* is a rule that can never do what it is for, or that
is far wider than it looks; a *warning* is one that is legal and may surprise. Must not: judge traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network

from proxy.destinations import METADATA_ADDRESSES, AddressClass, Host, IPAddress, IPNetwork, classify_address
from proxy.network import NEVER_DIALLED, Mode
from sandbox.policy.packages_lint import package_findings
from sandbox.policy.problems import Finding, KeyPath, key_text
from sandbox.policy.rules import AllowRule, DenyRule
from sandbox.policy.rules_lint import (
    ByHost,
    allow_findings,
    deny_findings,
    error,
    mode_findings,
    speaks_of,
    warning,
)
from sandbox.policy.schema import Policy, PrivateAddressEntry
from sandbox.policy.suffixes import Suffix, suffix_kind
from sandbox.policy.tenants_lint import code_exec_findings, tenant_findings


def lint(policy: Policy, now: datetime | None = None) -> list[Finding]:
    """All findings, in no particular order. Without `now`, nothing is said of what has expired."""
    network = policy.network
    return [
        *mode_findings(_ALLOW, network.modes, network.allow),
        *allow_findings(_ALLOW, network.allow or (), [(_DENY, ByHost(network.deny))], network),
        *deny_findings(_DENY, network.deny),
        *_passthrough(policy),
        *_hosts(policy),
        *_private_addresses(policy),
        *_registries(policy),
        *tenant_findings(policy),
        *code_exec_findings(policy),
        *package_findings(policy.packages, read=Mode.REGISTRY_DEFAULT in policy.network.modes, now=now),
    ]


_ALLOW: KeyPath = ("network", "allow")
_DENY: KeyPath = ("network", "deny")
_PRIVATE: KeyPath = ("network", "private_addresses")


def _passthrough(policy: Policy) -> Iterator[Finding]:
    network = policy.network
    rules: list[tuple[KeyPath, AllowRule | DenyRule]] = [
        *(((*_ALLOW, at), rule) for at, rule in enumerate(network.allow or ())),
        *(((*_DENY, at), rule) for at, rule in enumerate(network.deny)),
    ]
    for tenant, section in enumerate(policy.tenants):
        home: KeyPath = ("tenants", tenant, "network")
        rules += [((*home, "allow", at), rule) for at, rule in enumerate(section.network.allow or ())]
        rules += [((*home, "deny", at), rule) for at, rule in enumerate(section.network.deny)]
    for place, host in enumerate(network.inspect.passthrough):
        path: KeyPath = ("network", "inspect", "passthrough", place)
        if suffix_kind(host) is Suffix.PUBLIC:
            yield error(path, f"`{host}` is a public suffix: no site below it would be inspected", "write the site")
        judged = [
            key_text(where)
            for where, rule in rules
            if (rule.methods is not None or rule.paths is not None) and speaks_of(rule, host)
        ]
        if judged:
            yield error(
                path,
                f"`{judged[0]}` judges methods or paths of `{host}`, which can't be seen unless TLS is opened",
                "drop `methods` and `paths` from the rule, or the host from `passthrough`",
            )
        covered = network.allow is None or any(speaks_of(rule, host) for rule in network.allow)
        if not covered:
            yield warning(path, f"no rule of `network.allow` covers `{host}`", "add one, or drop it here")


def _hosts(policy: Policy) -> Iterator[Finding]:
    for name, addresses in policy.network.hosts.items():
        path: KeyPath = ("network", "hosts", name)
        host = Host(name)
        for address in addresses:
            kind = classify_address(address)
            if kind in NEVER_DIALLED:
                yield error(path, f"{address} is a {kind.value} address, which is never dialled", "drop the line")
            elif kind is not AddressClass.PUBLIC and not any(
                _opens(entry, host, address) for entry in policy.network.private_addresses
            ):
                yield warning(
                    path,
                    f"{address} is a {kind.value} address, and no entry of `network.private_addresses` opens it",
                    f"add `{{host: {name}, cidr: {address}/{address.max_prefixlen}, ports: [443]}}` there",
                )


def _opens(entry: PrivateAddressEntry, host: Host, address: IPAddress) -> bool:
    named = entry.registries or (entry.host is not None and entry.host.covers(host))
    return named and address.version == entry.cidr.version and address in entry.cidr


_WIDEST = {4: 8, 6: 7}  # the widest networks of one owner: 10.0.0.0/8 (RFC 1918), fc00::/7 (RFC 4193)


def _private_addresses(policy: Policy) -> Iterator[Finding]:
    network = policy.network
    for place, entry in enumerate(network.private_addresses):
        path: KeyPath = (*_PRIVATE, place)
        for at in range(place):
            if network.private_addresses[at] == entry:
                yield error(path, f"it says the same as `{key_text((*_PRIVATE, at))}`", "drop one of the two")
                break
        yield from _private_network((*path, "cidr"), entry.cidr)
        host = entry.host
        if host is not None and host.address is not None:
            if host.address.version != entry.cidr.version or host.address not in entry.cidr:
                yield error((*path, "host"), f"{host} is not in {entry.cidr}", "write the network it is in as `cidr`")
        elif host is not None:
            if suffix_kind(host) is Suffix.PUBLIC:
                yield error((*path, "host"), f"`{host}` is a public suffix", "write the name that is meant")
            if network.allow is not None and not any(speaks_of(rule, host) for rule in network.allow):
                yield warning((*path, "host"), f"no rule of `network.allow` covers `{host}`", "add one, or drop this")
        if entry.registries and Mode.REGISTRY_DEFAULT not in network.modes:
            yield warning(path, "no call may ask for `registry-default`, so this is never read", "drop it")


def _private_network(path: KeyPath, cidr: IPNetwork) -> Iterator[Finding]:
    first, last = classify_address(cidr[0]), classify_address(cidr[-1])
    if first is last and first in NEVER_DIALLED:
        yield error(path, f"{cidr} is {first.value}: such addresses are never dialled", "drop the entry")
    elif cidr.prefixlen < _WIDEST[cidr.version]:
        yield error(path, f"{cidr} is wider than any private network", "write the network that the host is in")
    elif first is last is AddressClass.PUBLIC:
        yield warning(path, f"{cidr} is public, so it needs no entry", "drop the entry")
    else:
        inside = [str(a) for a in METADATA_ADDRESSES if a.version == cidr.version and a in cidr]
        inside += [str(n) for n in _LINK_LOCAL if n.version == cidr.version and n.overlaps(cidr)]
        if inside:
            yield warning(
                path, f"it holds {', '.join(sorted(inside))}, never dialled all the same", "write a narrower network"
            )


_LINK_LOCAL: tuple[IPNetwork, ...] = (IPv4Network("169.254.0.0/16"), IPv6Network("fe80::/10"))


def _registries(policy: Policy) -> Iterator[Finding]:
    denied = ByHost(policy.network.deny)
    registries = policy.network.registries
    named = [
        (language, place, url)
        for language, urls in (("python", registries.python), ("javascript", registries.javascript))
        for place, url in enumerate(urls or ())
    ]
    for language, place, url in named:
        path: KeyPath = ("network", "registries", language, place)
        if url.scheme == "http":
            yield warning(
                path, f"`{url}` is read without TLS: whoever is on the way can change packages", "use `https`"
            )
        for at, deny in denied.covering(url.host, subdomains=False):
            if deny.methods is None and deny.paths is None and (deny.ports is None or url.port in deny.ports):
                yield error(
                    path, f"`{key_text((*_DENY, at))}` denies `{url.host}`, and a deny wins", "drop one of the two"
                )
                break
