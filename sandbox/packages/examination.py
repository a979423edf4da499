"""What came out of a preparation sandbox for one artifact: the tree that was locked, or the reason why not.

Owns: holding a tree to its lock, and scanning it. Must not: publish it, or decide what a policy allows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from proxy.packages.model import Ecosystem, InvalidName, InvalidVersion, parse_name, parse_version
from proxy.packages.reasons import AVAILABILITY_HINTS, Availability, PackageReason, hint_for
from sandbox.packages.diagnosis import excerpt
from sandbox.packages.locked import Fault, LockedArtifact
from sandbox.packages.manifest import Contents, Finding
from sandbox.packages.receive import TooLarge, Tree
from sandbox.packages.records import InvalidOutlet
from sandbox.packages.scan import Scan, identity_of, scan_npm, scan_python


def examine(locked: LockedArtifact, tree: Tree) -> Contents | Fault:
    """What a tree is, or why it is none of this artifact. Raises `OSError`."""
    done = tree.finish()
    if isinstance(tree.fault, TooLarge):
        return fault_with(locked, PackageReason.CLOSURE_TOO_LARGE, str(tree.fault))
    if done is None:
        why = str(tree.fault) if tree.fault is not None else "the process that unpacked it came to no end"
        return fault_with(locked, PackageReason.UNSAFE_ARCHIVE_PATH, why)
    if done.failed:
        return _of_failure(locked, done.facts)
    if locked.name.ecosystem is Ecosystem.PYPI:
        identity = (str(done.facts.get("name")), str(done.facts.get("version")))
        scan = scan_python(locked.name.normal, tree.files, stdlib=sys.stdlib_module_names)
    else:
        package_json = (tree.root / "package.json").read_bytes() if "package.json" in tree.files else b""
        named = identity_of(package_json)
        identity = named if named is not None else ("", "")
        scan = scan_npm(locked.name.normal, tree.files, package_json=package_json)
    if not _is_of(locked, *identity):
        name, version = (ascii(text)[1:-1][:100] for text in identity)
        return fault_with(locked, PackageReason.METADATA_MISMATCH, f"its own metadata is of `{name}` `{version}`")
    for hook in scan.hooks:
        tree.leave_out(hook)
    return _contents(locked, tree, scan)


def known_as(locked: LockedArtifact, contents: Contents) -> Fault | None:
    """What is wrong with taking what is known by this digest: it may be another package's, or another version."""
    if _is_of(locked, contents.name, contents.version):
        return None
    detail = f"the file of its digest is known to be `{contents.name}` `{contents.version}`"
    return fault_with(locked, PackageReason.METADATA_MISMATCH, detail)


def _contents(locked: LockedArtifact, tree: Tree, scan: Scan) -> Contents:
    return Contents(
        name=locked.name.normal,
        version=locked.version.text,
        bytes=tree.bytes,
        files=len(tree.files),
        findings=tuple(
            Finding(reason=fault.reason, detail=fault.detail)
            for fault in scan.faults
            if isinstance(fault.reason, PackageReason)
        ),
        install_scripts=scan.install_scripts,
        notes=scan.notes,
    )


def _is_of(locked: LockedArtifact, name: str, version: str) -> bool:
    ecosystem = locked.name.ecosystem
    try:
        return parse_name(ecosystem, name) == locked.name and parse_version(ecosystem, version) == locked.version
    except (InvalidName, InvalidVersion):
        return False


def _of_failure(locked: LockedArtifact, facts: Mapping[str, object]) -> Fault:
    """Why an artifact was not fetched or not unpacked."""
    message = str(facts.get("message", ""))
    if "reason" in facts:
        try:
            reason = PackageReason(str(facts["reason"]))
        except ValueError as error:  # not the archive's: whoever says it is none of our parsers
            raise InvalidOutlet(f"an artifact failed for an unknown reason: {error}"[:300]) from error
        return fault_with(locked, reason, excerpt(message))
    if facts.get("status") == 403:
        try:
            answer = json.loads(message)
            reason = PackageReason(answer["reason"])
        except (ValueError, KeyError, TypeError):
            return unavailable(locked, excerpt(message))
        fault = fault_with(locked, reason, excerpt(str(answer.get("detail", answer.get("message", "")))))
        return replace(fault, rule=None if answer.get("rule") is None else str(answer["rule"]))
    return unavailable(locked, excerpt(message) or f"status {facts.get('status')}")


def fault_with(locked: LockedArtifact, reason: PackageReason, detail: str) -> Fault:
    return Fault(reason, locked.name.normal, detail, locked.version.text, hint=hint_for(reason, locked.name.normal))


def unavailable(locked: LockedArtifact, detail: str) -> Fault:
    reason = Availability.REGISTRY_UNAVAILABLE
    return Fault(reason, locked.name.normal, detail, locked.version.text, hint=AVAILABILITY_HINTS[reason])
