"""What a policy says that it can't mean: rules that can't work, or that say more than they seem to. Pure.

Owns: weighing the keys of a policy against one another. An *error* is a rule that can never do what it is for, or that
is far wider than it looks; a *warning* is one that is legal and may surprise. Must not: judge traffic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network

from proxy.destinations import METADATA_ADDRESSES, AddressClass, Host, IPAddress, IPNetwork, classify_address
from proxy.network import NEVER_DIALLED, Mode
from sandbox.policy.packages_lint import package_findings
from sandbox.policy.problems import Finding, KeyPath, key_text
from sandbox.policy.schema import AllowRule, DenyRule, Policy, PrivateAddressEntry
from sandbox.policy.suffixes import Suffix, suffix_kind


def lint(policy: Policy, now: datetime | None = None) -> list[Finding]:
    """All findings, in no particular order. Without `now`, nothing is said of what has expired."""
    return [
        *_modes(policy),
        *_allow(policy),
        *_deny(policy),
        *_passthrough(policy),
        *_hosts(policy),
        *_private_addresses(policy),
        *_registries(policy),
        *package_findings(policy.packages, read=Mode.REGISTRY_DEFAULT in policy.network.modes, now=now),
    ]


def _error(path: KeyPath, message: str, hint: str | None = None) -> Finding:
    return Finding(path, message, hint, error=True)


def _warning(path: KeyPath, message: str, hint: str | None = None) -> Finding:
    return Finding(path, message, hint, error=False)


_ALLOW: KeyPath = ("network", "allow")
_DENY: KeyPath = ("network", "deny")
_PRIVATE: KeyPath = ("network", "private_addresses")


def _modes(policy: Policy) -> Iterator[Finding]:
    network = policy.network
    if network.allow is None:
        return
    if Mode.UNRESTRICTED in network.modes:
        yield _error(
            _ALLOW,
            "calls may ask for `unrestricted`, which no allow list limits",
            "drop `unrestricted` from `modes`, or drop `allow`; `deny` holds in every mode",
        )
    elif Mode.NAMED not in network.modes:
        yield _warning(
            _ALLOW, "no call may name hosts, so this is never read", "add `named` to `modes`, or drop `allow`"
        )
    if not network.allow and Mode.NAMED in network.modes:
        yield _warning(
            _ALLOW, "the list is empty: calls may name hosts, but none is allowed", "drop `named` from `modes`"
        )


# Rules


def _allow(policy: Policy) -> Iterator[Finding]:
    rules = policy.network.allow or ()
    denied, seen = _ByHost(policy.network.deny), _ByHost(rules)
    for place, rule in enumerate(rules):
        path: KeyPath = (*_ALLOW, place)
        if rule.subdomains:
            yield from _breadth((*path, "host"), rule.host, known=rule.host.text in policy.network.hosts)
        ports = frozenset(rule.ports or policy.network.ports)
        for at, deny in denied.covering(rule.host, subdomains=rule.subdomains):
            if deny.methods is None and deny.paths is None and (deny.ports is None or ports.issubset(deny.ports)):
                yield _warning(
                    path,
                    f"`{rule.host}` is never allowed: `{key_text((*_DENY, at))}` denies all of it, and a deny wins",
                    "drop one of the two",
                )
                break
        yield from _repeated(path, _ALLOW, place, seen.covering(rule.host, subdomains=rule.subdomains), policy)
        apex = rule.host.text.removeprefix("www.")
        if apex != rule.host.text and not any(other.host.text == apex for other in rules):
            yield _warning(
                (*path, "host"),
                f"it covers `{rule.host}` and names below it, not `{apex}`",
                f"write `{apex}` if both are meant",
            )


def _breadth(path: KeyPath, host: Host, *, known: bool) -> Iterator[Finding]:
    kind = suffix_kind(host)
    if kind is Suffix.PUBLIC:
        yield _error(
            path,
            f"`{host}` is a public suffix: it would cover every site registered below it",
            f"write the site, such as `example.{host}`",
        )
    elif kind is Suffix.SHARED:
        yield _warning(
            path,
            f"`{host}` is shared hosting: anyone can get a name below it, and this covers all of them",
            f"write the one name that is meant, such as `team.{host}`, or add `subdomains: false`",
        )
    elif "." not in host.text and not known:
        yield _warning(
            path,
            f"`{host}` is a single label, and this covers every name that ends in `.{host}`",
            "write the full name, or add `subdomains: false`",
        )


def _deny(policy: Policy) -> Iterator[Finding]:
    rules = policy.network.deny
    seen = _ByHost(rules)
    for place, rule in enumerate(rules):
        path: KeyPath = (*_DENY, place)
        if rule.host is not None:
            yield from _repeated(path, _DENY, place, seen.covering(rule.host, subdomains=rule.subdomains), policy)
        else:
            for at, other in enumerate(rules[:place]):
                if other == rule:
                    yield _error(path, f"it says the same as `{key_text((*_DENY, at))}`", "drop one of the two")
                    break


def _repeated(
    path: KeyPath, home: KeyPath, place: int, covering: Iterator[tuple[int, AllowRule | DenyRule]], policy: Policy
) -> Iterator[Finding]:
    """A rule that an earlier one repeats, or that any other makes needless."""
    rules = policy.network.allow if home == _ALLOW else policy.network.deny
    rule: AllowRule | DenyRule = (rules or ())[place]
    usual = policy.network.ports if home == _ALLOW else None
    for at, other in covering:
        if at == place:
            continue
        if other == rule:
            if at < place:
                yield _error(path, f"it says the same as `{key_text((*home, at))}`", "drop one of the two")
                return
        elif _within(rule, other, usual):
            if (
                at > place
                and _within(other, rule, usual)
                and (other.host, other.subdomains) == (rule.host, rule.subdomains)
            ):
                continue  # they say the same in other words: the later one is the needless one
            yield _warning(path, f"it adds nothing to `{key_text((*home, at))}`, which covers it", "drop it")
            return


def _within(rule: AllowRule | DenyRule, other: AllowRule | DenyRule, usual: tuple[int, ...] | None) -> bool:
    """Whether all that `rule` says of its host, `other` says too. `usual`: the ports of rules without; None: all."""
    if isinstance(rule, AllowRule) and isinstance(other, AllowRule) and rule.protocol is not other.protocol:
        return False
    ports, wider = rule.ports or usual, other.ports or usual
    if wider is not None and (ports is None or not set(ports) <= set(wider)):
        return False
    for narrow, wide in ((rule.methods, other.methods), (rule.paths, other.paths)):
        if wide is not None and (narrow is None or not set(narrow) <= set(wide)):
            return False
    return True


class _ByHost[R: (AllowRule, DenyRule)]:
    """Rules by name, so that finding those that cover a name takes as long as the name has labels."""

    def __init__(self, rules: tuple[R, ...]) -> None:
        self._rules: defaultdict[str, list[tuple[int, R]]] = defaultdict(list)
        for place, rule in enumerate(rules):
            if rule.host is not None:
                self._rules[rule.host.text].append((place, rule))

    def covering(self, host: Host, *, subdomains: bool) -> Iterator[tuple[int, R]]:
        """Rules that speak of this name and, with `subdomains`, of all names below it."""
        labels = host.text.split(".")
        for start in range(len(labels)):
            for place, rule in self._rules.get(".".join(labels[start:]), ()):
                if rule.subdomains or (start == 0 and not subdomains):
                    yield place, rule


# Other sections


def _passthrough(policy: Policy) -> Iterator[Finding]:
    network = policy.network
    rules: list[tuple[KeyPath, AllowRule | DenyRule]] = [
        *(((*_ALLOW, at), rule) for at, rule in enumerate(network.allow or ())),
        *(((*_DENY, at), rule) for at, rule in enumerate(network.deny)),
    ]
    for place, host in enumerate(network.inspect.passthrough):
        path: KeyPath = ("network", "inspect", "passthrough", place)
        if suffix_kind(host) is Suffix.PUBLIC:
            yield _error(path, f"`{host}` is a public suffix: no site below it would be inspected", "write the site")
        judged = [
            key_text(where)
            for where, rule in rules
            if (rule.methods is not None or rule.paths is not None) and _speaks_of(rule, host)
        ]
        if judged:
            yield _error(
                path,
                f"`{judged[0]}` judges methods or paths of `{host}`, which can't be seen unless TLS is opened",
                "drop `methods` and `paths` from the rule, or the host from `passthrough`",
            )
        covered = network.allow is None or any(_speaks_of(rule, host) for rule in network.allow)
        if not covered:
            yield _warning(path, f"no rule of `network.allow` covers `{host}`", "add one, or drop it here")


def _speaks_of(rule: AllowRule | DenyRule, host: Host) -> bool:
    """Whether the rule covers the host, or names below it."""
    return rule.host is not None and (host.covers(rule.host) or (rule.subdomains and rule.host.covers(host)))


def _hosts(policy: Policy) -> Iterator[Finding]:
    for name, addresses in policy.network.hosts.items():
        path: KeyPath = ("network", "hosts", name)
        host = Host(name)
        for address in addresses:
            kind = classify_address(address)
            if kind in NEVER_DIALLED:
                yield _error(path, f"{address} is a {kind.value} address, which is never dialled", "drop the line")
            elif kind is not AddressClass.PUBLIC and not any(
                _opens(entry, host, address) for entry in policy.network.private_addresses
            ):
                yield _warning(
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
                yield _error(path, f"it says the same as `{key_text((*_PRIVATE, at))}`", "drop one of the two")
                break
        yield from _private_network((*path, "cidr"), entry.cidr)
        host = entry.host
        if host is not None and host.address is not None:
            if host.address.version != entry.cidr.version or host.address not in entry.cidr:
                yield _error((*path, "host"), f"{host} is not in {entry.cidr}", "write the network it is in as `cidr`")
        elif host is not None:
            if suffix_kind(host) is Suffix.PUBLIC:
                yield _error((*path, "host"), f"`{host}` is a public suffix", "write the name that is meant")
            if network.allow is not None and not any(_speaks_of(rule, host) for rule in network.allow):
                yield _warning((*path, "host"), f"no rule of `network.allow` covers `{host}`", "add one, or drop this")
        if entry.registries and Mode.REGISTRY_DEFAULT not in network.modes:
            yield _warning(path, "no call may ask for `registry-default`, so this is never read", "drop it")


def _private_network(path: KeyPath, cidr: IPNetwork) -> Iterator[Finding]:
    first, last = classify_address(cidr[0]), classify_address(cidr[-1])
    if first is last and first in NEVER_DIALLED:
        yield _error(path, f"{cidr} is {first.value}: such addresses are never dialled", "drop the entry")
    elif cidr.prefixlen < _WIDEST[cidr.version]:
        yield _error(path, f"{cidr} is wider than any private network", "write the network that the host is in")
    elif first is last is AddressClass.PUBLIC:
        yield _warning(path, f"{cidr} is public, so it needs no entry", "drop the entry")
    else:
        inside = [str(a) for a in METADATA_ADDRESSES if a.version == cidr.version and a in cidr]
        inside += [str(n) for n in _LINK_LOCAL if n.version == cidr.version and n.overlaps(cidr)]
        if inside:
            yield _warning(
                path, f"it holds {', '.join(sorted(inside))}, never dialled all the same", "write a narrower network"
            )


_LINK_LOCAL: tuple[IPNetwork, ...] = (IPv4Network("169.254.0.0/16"), IPv6Network("fe80::/10"))


def _registries(policy: Policy) -> Iterator[Finding]:
    denied = _ByHost(policy.network.deny)
    registries = policy.network.registries
    named = [
        (language, place, url)
        for language, urls in (("python", registries.python), ("javascript", registries.javascript))
        for place, url in enumerate(urls or ())
    ]
    for language, place, url in named:
        path: KeyPath = ("network", "registries", language, place)
        if url.scheme == "http":
            yield _warning(
                path, f"`{url}` is read without TLS: whoever is on the way can change packages", "use `https`"
            )
        for at, deny in denied.covering(url.host, subdomains=False):
            if deny.methods is None and deny.paths is None and (deny.ports is None or url.port in deny.ports):
                yield _error(
                    path, f"`{key_text((*_DENY, at))}` denies `{url.host}`, and a deny wins", "drop one of the two"
                )
                break
