"""What rules about hosts say that they can't mean: one that repeats another, or is wider than it looks. Pure.

Owns: weighing the rules of one list against one another, and against the deny rules that hold beside it. Must not: know
whose list it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from proxy.destinations import Host
from proxy.network import Mode
from sandbox.policy.problems import Finding, KeyPath, key_text
from sandbox.policy.rules import AllowRule, DenyRule
from sandbox.policy.schema import NetworkSection
from sandbox.policy.suffixes import Suffix, suffix_kind


def error(path: KeyPath, message: str, hint: str | None = None, *rests_on: KeyPath) -> Finding:
    return Finding(path, message, hint, error=True, rests_on=rests_on)


def warning(path: KeyPath, message: str, hint: str | None = None) -> Finding:
    return Finding(path, message, hint, error=False)


def mode_findings(
    home: KeyPath, modes: Sequence[Mode], allow: Sequence[AllowRule] | None, *rests_on: KeyPath
) -> Iterator[Finding]:
    """What stands against an allow list at `home` under modes, which `rests_on` says."""
    if allow is None:
        return
    if Mode.UNRESTRICTED in modes:
        yield error(
            home,
            "calls may ask for `unrestricted`, which no allow list limits",
            "drop `unrestricted` from `modes`, or drop `allow`; `deny` holds in every mode",
            *rests_on,
        )
    elif Mode.NAMED not in modes:
        yield warning(home, "no call may name hosts, so this is never read", "add `named` to `modes`, or drop `allow`")
    if not allow and Mode.NAMED in modes:
        yield warning(home, "the list is empty: calls may name hosts, but none is allowed", "drop `named` from `modes`")


def allow_findings(
    home: KeyPath, rules: tuple[AllowRule, ...], denied: Sequence[tuple[KeyPath, ByHost[DenyRule]]],
    network: NetworkSection,
) -> Iterator[Finding]:  # fmt: skip
    """What stands against the rules of an allow list. `denied`: the deny rules beside it, with where each list is."""
    seen, hosts = ByHost(rules), {rule.host.text for rule in rules}
    for place, rule in enumerate(rules):
        path: KeyPath = (*home, place)
        if rule.subdomains:
            yield from breadth((*path, "host"), rule.host, known=rule.host.text in network.hosts)
        if (shadow := _shadow(rule, denied, network.ports)) is not None:
            yield warning(
                path, f"`{rule.host}` is never allowed: `{key_text(shadow)}` denies all of it, and a deny wins",
                "drop one of the two",
            )  # fmt: skip
        yield from _repeated(home, place, rule, seen, network.ports)
        apex = rule.host.text.removeprefix("www.")
        if apex != rule.host.text and apex not in hosts:
            yield warning(
                (*path, "host"),
                f"it covers `{rule.host}` and names below it, not `{apex}`",
                f"write `{apex}` if both are meant",
            )


def _shadow(
    rule: AllowRule, denied: Sequence[tuple[KeyPath, ByHost[DenyRule]]], usual: tuple[int, ...]
) -> KeyPath | None:
    """Where a deny rule stands that leaves nothing of an allow rule."""
    ports = frozenset(rule.ports or usual)
    for home, rules in denied:
        for at, deny in rules.covering(rule.host, subdomains=rule.subdomains):
            if deny.methods is None and deny.paths is None and (deny.ports is None or ports.issubset(deny.ports)):
                return (*home, at)
    return None


def breadth(path: KeyPath, host: Host, *, known: bool) -> Iterator[Finding]:
    """Of a name that is meant with all names below it. `known`: it is one of the policy's own `hosts`."""
    kind = suffix_kind(host)
    if kind is Suffix.PUBLIC:
        yield error(
            path,
            f"`{host}` is a public suffix: it would cover every site registered below it",
            f"write the site, such as `example.{host}`",
        )
    elif kind is Suffix.SHARED:
        yield warning(
            path,
            f"`{host}` is shared hosting: anyone can get a name below it, and this covers all of them",
            f"write the one name that is meant, such as `team.{host}`, or add `subdomains: false`",
        )
    elif "." not in host.text and not known:
        yield warning(
            path,
            f"`{host}` is a single label, and this covers every name that ends in `.{host}`",
            "write the full name, or add `subdomains: false`",
        )


def deny_findings(home: KeyPath, rules: tuple[DenyRule, ...]) -> Iterator[Finding]:
    """What stands against the rules of a deny list."""
    seen = ByHost(rules)
    for place, rule in enumerate(rules):
        if rule.host is not None:
            yield from _repeated(home, place, rule, seen, None)
        elif rule in rules[:place]:
            same = key_text((*home, rules.index(rule)))
            yield error((*home, place), f"it says the same as `{same}`", "drop one of the two")


def _repeated[R: (AllowRule, DenyRule)](
    home: KeyPath, place: int, rule: R, seen: ByHost[R], usual: tuple[int, ...] | None
) -> Iterator[Finding]:
    """A rule that an earlier one of its list repeats, or that any other makes needless."""
    assert rule.host is not None
    path: KeyPath = (*home, place)
    for at, other in seen.covering(rule.host, subdomains=rule.subdomains):
        if at == place:
            continue
        if other == rule:
            if at < place:
                yield error(path, f"it says the same as `{key_text((*home, at))}`", "drop one of the two")
                return
        elif _within(rule, other, usual):
            if (
                at > place
                and _within(other, rule, usual)
                and (other.host, other.subdomains) == (rule.host, rule.subdomains)
            ):
                continue  # they say the same in other words: the later one is the needless one
            yield warning(path, f"it adds nothing to `{key_text((*home, at))}`, which covers it", "drop it")
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


class ByHost[R: (AllowRule, DenyRule)]:
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


def speaks_of(rule: AllowRule | DenyRule, host: Host) -> bool:
    """Whether the rule covers the host, or names below it."""
    return rule.host is not None and (host.covers(rule.host) or (rule.subdomains and rule.host.covers(host)))
