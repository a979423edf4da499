"""What the `packages:` section says that it can't mean, or that may surprise. Pure.

Owns: these findings. Must not: judge packages, or look whether files are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from proxy.packages.policy import NameMode
from sandbox.policy.packages import NpmExemption, PackagesSection, PypiExemption, package_policy
from sandbox.policy.problems import Finding, KeyPath, key_text

_MAX_TRAVELLING_BYTES = 60_000  # the policy is part of every attempt's grant, which is one message
_SHORT_PREFIX = 3


def package_findings(section: PackagesSection, *, read: bool, now: datetime | None) -> Iterator[Finding]:
    """`read`: some mode of the policy reads a registry. Without `now`, nothing is said of what has expired."""
    if section != PackagesSection() and not section.prepare and not read:
        yield _warning((), "no call may bring packages or read the registry, so this is never read",
                       "add `prepare: true`, or `registry-default` to `network.modes`")  # fmt: skip
    yield from _names(section)
    yield from _similarity(section)
    yield from _advisories(section)
    if now is not None:
        yield from _expired(section, now)
    yield from _exemptions(section)
    size = len(package_policy(section).model_dump_json())
    if size > _MAX_TRAVELLING_BYTES:
        message = f"it takes {size} bytes, and {_MAX_TRAVELLING_BYTES} can travel with an attempt"
        yield Finding(
            ("packages",), message, "list fewer names; `internal_prefixes` covers many by one line", error=True
        )


def _warning(path: KeyPath, message: str, hint: str | None = None) -> Finding:
    return Finding(("packages", *path), message, hint, error=False)


def _names(section: PackagesSection) -> Iterator[Finding]:
    names = section.names
    if names.mode is NameMode.ALLOWLIST and not names.allow.pypi and not names.allow.npm:
        yield _warning(("names", "mode"), "the list `allow` is empty, so no package is allowed",
                       "list the packages in `names.allow`, or write `mode: denylist`")  # fmt: skip
    for ecosystem, allow, deny, prefixes in (
        ("pypi", names.allow.pypi, names.deny.pypi, names.internal_prefixes.pypi),
        ("npm", names.allow.npm, names.deny.npm, names.internal_prefixes.npm),
    ):
        denied = {name.folded: place for place, name in enumerate(deny)}
        for place, name in enumerate(allow):
            if (at := denied.get(name.folded)) is not None:
                where = key_text(("packages", "names", "deny", ecosystem, at))
                message = f"`{name}` is never allowed: `{where}` denies it, and a deny wins"
                yield _warning(("names", "allow", ecosystem, place), message, "drop one of the two")
        for place, prefix in enumerate(prefixes):
            if len(prefix.removeprefix("@")) < _SHORT_PREFIX:
                message = f"every name that begins with `{prefix}` is taken for one of your own"
                yield _warning(("names", "internal_prefixes", ecosystem, place), message, "write a longer beginning")


def _similarity(section: PackagesSection) -> Iterator[Finding]:
    similarity = section.similarity
    if similarity.popular_top > similarity.ignore_top:
        message = f"names among the first {similarity.popular_top} can be taken for misspellings of one another"
        yield _warning(("similarity", "ignore_top"), message, f"write at least {similarity.popular_top}")


def _advisories(section: PackagesSection) -> Iterator[Finding]:
    advisories = section.advisories
    if advisories.db_dir is None and advisories != type(advisories)():
        yield _warning(("advisories",), "no database is named, so this is never read",
                       "write `db_dir: /var/lib/osv`")  # fmt: skip


def _expired(section: PackagesSection, now: datetime) -> Iterator[Finding]:
    for place, entry in enumerate(section.advisories.ignore):
        if entry.until <= now:
            yield _warning(("advisories", "ignore", place), f"it has expired: `{entry.id}` holds again", "drop it")
    for path, exemption in _all_exemptions(section):
        if exemption.until <= now:
            message = f"it has expired: `{exemption.version}` of `{exemption.package}` is judged as any other"
            yield _warning(path, message, "drop it")


def _exemptions(section: PackagesSection) -> Iterator[Finding]:
    denied = {name for lists in (section.names.deny.pypi, section.names.deny.npm) for name in lists}
    for path, entry in _all_exemptions(section):
        if entry.package in denied:
            message = f"`{entry.package}` is denied by its name, which no exemption lifts"
            yield _warning(path, message, "drop one of the two")


def _all_exemptions(section: PackagesSection) -> Iterator[tuple[KeyPath, PypiExemption | NpmExemption]]:
    for place, pypi in enumerate(section.exemptions.pypi):
        yield ("exemptions", "pypi", place), pypi
    for place, npm in enumerate(section.exemptions.npm):
        yield ("exemptions", "npm", place), npm
