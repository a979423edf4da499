"""What a resolver chose: the artifacts of a closure, as values, and what can be wrong with one. Pure.

Owns: `LockedArtifact`, `Fault`. Must not: read a lock; `lock_python` and `lock_npm` do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from proxy.packages.model import PackageName, PackageVersion
from proxy.packages.reasons import AVAILABILITY_HINTS, Availability, PackageReason, hint_for


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a package is not had: the policy's word, or the registry's. `package` is its name, `detail` a sentence.

    `rule` is the policy's key, where one decided; `hint` the reason's, unless another is given; `retry_after` when the
    answer will be another.
    """

    reason: PackageReason | Availability
    package: str
    detail: str
    version: str | None = None
    rule: str | None = None
    hint: str | None = None
    retry_after: datetime | None = None

    def __post_init__(self) -> None:
        if self.hint is None:
            reason = self.reason
            hint = hint_for(reason, self.package) if isinstance(reason, PackageReason) else AVAILABILITY_HINTS[reason]
            object.__setattr__(self, "hint", hint)

    def __str__(self) -> str:
        what = self.package if self.version is None else f"{self.package} {self.version}"
        return f"{self.reason}: `{what}`: {self.detail}"

    @property
    def refused(self) -> bool:
        """Whether a policy refuses it. If not, it cannot be had."""
        return isinstance(self.reason, PackageReason)


class LockRefused(Exception):
    """A lock names what no snapshot may hold. All that is wrong with it, at once."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(map(str, self.faults)))


class LockUnreadable(Exception):
    """A lock is not of the form that its resolver writes."""


@dataclass(frozen=True, slots=True)
class LockedArtifact:
    """One file of one version, by its digest. `digest` is of the strongest algorithm that the lock gives, in hex.

    `places` is where npm installs it, each relative to `node_modules`; a wheel goes to the root, `("",)`.
    `dependencies` are names as the lock has them, empty where it says nothing.
    """

    name: PackageName
    version: PackageVersion
    url: str
    filename: str
    algorithm: str
    digest: str
    size_bytes: int | None = None
    uploaded_at: datetime | None = None
    dependencies: tuple[str, ...] = ()
    places: tuple[str, ...] = ("",)
    has_install_script: bool | None = None
    has_shrinkwrap: bool = False


ALGORITHMS = {"sha512": 64, "sha384": 48, "sha256": 32}  # strongest first, with the bytes of a digest; none weaker


def strongest(hashes: dict[str, str]) -> tuple[str, str] | None:
    """The algorithm and hex digest to hold an artifact to; None if none of them is strong, or one is malformed."""
    for algorithm, size in ALGORITHMS.items():
        digest = hashes.get(algorithm)
        if digest is not None:
            plain = digest.lower()
            if len(plain) == 2 * size and all(char in "0123456789abcdef" for char in plain):
                return algorithm, plain
            return None
    return None
