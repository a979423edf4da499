"""Why a package is refused, and, apart from that, why it could not be had. Pure.

Owns: the codes, and the form of the hint of each. Must not: judge.

A `PackageReason` is the policy's word: the package is there, or may be, and is not allowed. An `Availability` is the
registry's: nothing forbids the package, and it can't be had. They are two enumerations, without a value in common, so
that one can't be taken for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class PackageReason(StrEnum):
    """Why a policy refuses a package. `docs/packages.md` has a line for each."""

    # what the call asked for
    SPECIFIER_SYNTAX = "specifier_syntax"
    PACKAGES_NOT_ALLOWED = "packages_not_allowed"
    TOO_MANY_PACKAGES = "too_many_packages"
    CONFLICTING_SPECIFIERS = "conflicting_specifiers"
    # the name
    NAME_DENIED = "name_denied"
    NAME_NOT_ALLOWED = "name_not_allowed"
    INTERNAL_NAME = "internal_name"
    STDLIB_NAME = "stdlib_name"
    MALICIOUS_PACKAGE = "malicious_package"
    TYPOSQUAT_SUSPECT = "typosquat_suspect"
    # what of it
    EXTRAS_DENIED = "extras_denied"
    UNPINNED_VERSION = "unpinned_version"
    DIST_TAG_DENIED = "dist_tag_denied"
    PRERELEASE_DENIED = "prerelease_denied"
    LOCAL_VERSION_DENIED = "local_version_denied"
    # the version, and its files
    VERSION_DENIED = "version_denied"
    VERSION_YANKED = "version_yanked"
    VERSION_DEPRECATED = "version_deprecated"  # warns only
    KNOWN_VULNERABILITY = "known_vulnerability"
    VERSION_TOO_NEW = "version_too_new"
    PACKAGE_TOO_NEW = "package_too_new"
    RELEASE_TIME_UNKNOWN = "release_time_unknown"
    NO_WHEEL = "no_wheel"
    INSTALL_SCRIPT_REQUIRED = "install_script_required"
    PROJECT_QUARANTINED = "project_quarantined"
    # all that is installed together
    NON_REGISTRY_SOURCE = "non_registry_source"
    BUNDLED_PACKAGE = "bundled_package"
    CLOSURE_TOO_LARGE = "closure_too_large"
    # what was fetched
    HASH_MISMATCH = "hash_mismatch"
    METADATA_MISMATCH = "metadata_mismatch"
    UNSAFE_ARCHIVE_PATH = "unsafe_archive_path"
    STARTUP_HOOK = "startup_hook"
    FILE_CONFLICT = "file_conflict"
    # what is judged by
    ADVISORIES_STALE = "advisories_stale"


class Availability(StrEnum):
    """Why a package that no rule forbids can't be had. Never a policy's doing."""

    PACKAGE_NOT_FOUND = "package_not_found"
    VERSION_NOT_FOUND = "version_not_found"
    NO_COMPATIBLE_ARTIFACT = "no_compatible_artifact"
    RESOLUTION_CONFLICT = "resolution_conflict"
    REGISTRY_UNAVAILABLE = "registry_unavailable"


class SyntaxDetail(StrEnum):
    """What is wrong with a specifier: the detail of `specifier_syntax`."""

    LENGTH = "length"
    CONTROL_CHARACTER = "control_character"
    NON_ASCII = "non_ascii"
    WHITESPACE = "whitespace"
    OPTION_LIKE = "option_like"
    URL_OR_PROTOCOL = "url_or_protocol"
    PATH_LIKE = "path_like"
    ENVIRONMENT_MARKER = "environment_marker"
    ARBITRARY_EQUALITY = "arbitrary_equality"
    RANGE_OPERATOR = "range_operator"
    NO_VERSION_DELIMITER = "no_version_delimiter"
    BAD_VERSION = "bad_version"
    RESERVED_NAME = "reserved_name"
    MALFORMED = "malformed"


# What to do about each, where nothing better is known of the case at hand. `{name}` stands for the package.
_HINTS = {
    PackageReason.SPECIFIER_SYNTAX: "write `name==version` for Python, `name@version` for JavaScript",
    PackageReason.PACKAGES_NOT_ALLOWED: "use the standard library; or the operator sets `packages.prepare: true`",
    PackageReason.TOO_MANY_PACKAGES: "ask for fewer; the operator can raise `packages.max_specifiers`",
    PackageReason.CONFLICTING_SPECIFIERS: "write one specifier for `{name}`",
    PackageReason.NAME_DENIED: "use another package: the operator means it",
    PackageReason.NAME_NOT_ALLOWED: "use a package of the list; or the operator adds `{name}` to "
    "`packages.names.allow`",
    PackageReason.INTERNAL_NAME: "names with this prefix are the operator's own, and a public registry's would be "
    "somebody else's; if it is meant, the operator adds `{name}` to `packages.names.allow`",
    PackageReason.STDLIB_NAME: "drop it: the module comes with the language",
    PackageReason.MALICIOUS_PACKAGE: "use another package, and check where the name came from",
    PackageReason.TYPOSQUAT_SUSPECT: "check the spelling; if `{name}` is meant, the operator adds it to "
    "`packages.names.allow`",
    PackageReason.EXTRAS_DENIED: "leave the extras out",
    PackageReason.UNPINNED_VERSION: "write an exact version",
    PackageReason.DIST_TAG_DENIED: "write a version, or `latest` where the policy has it",
    PackageReason.PRERELEASE_DENIED: "write a final version",
    PackageReason.LOCAL_VERSION_DENIED: "write the version without what stands after the `+`",
    PackageReason.VERSION_DENIED: "write another version",
    PackageReason.VERSION_YANKED: "write another version: its publisher took this one back",
    PackageReason.VERSION_DEPRECATED: "see what its publisher advises instead",
    PackageReason.KNOWN_VULNERABILITY: "write a version in which it is mended",
    PackageReason.VERSION_TOO_NEW: "write an older version, or wait",
    PackageReason.PACKAGE_TOO_NEW: "use a package that has been there for longer, or wait",
    PackageReason.RELEASE_TIME_UNKNOWN: "the registry doesn't say when it was published; the operator can set "
    "`packages.age.unknown: allow`",
    PackageReason.NO_WHEEL: "write a version that has a wheel: source is not built here",
    PackageReason.INSTALL_SCRIPT_REQUIRED: "use a package without install scripts; the operator can exempt this "
    "version, and the script is not run even then",
    PackageReason.PROJECT_QUARANTINED: "use another package: the registry has taken this one out of use",
    PackageReason.NON_REGISTRY_SOURCE: "use packages whose dependencies are all on the registry",
    PackageReason.BUNDLED_PACKAGE: "use a package that doesn't carry others inside",
    PackageReason.CLOSURE_TOO_LARGE: "ask for fewer or smaller packages; the operator can raise `packages.max_closure`",
    PackageReason.HASH_MISMATCH: "try again; if it stays so, the registry or a mirror serves a changed file",
    PackageReason.METADATA_MISMATCH: "use another version: this file is not what its name says",
    PackageReason.UNSAFE_ARCHIVE_PATH: "use another package, and report this one to its registry",
    PackageReason.STARTUP_HOOK: "use another package: this one would run code at every start",
    PackageReason.FILE_CONFLICT: "leave one of the packages out: they have a file of the same name",
    PackageReason.ADVISORIES_STALE: "the operator refreshes the files of `packages.advisories.db_dir`",
}
HINTS: Mapping[PackageReason, str] = MappingProxyType(_HINTS)

_AVAILABILITY_HINTS = {
    Availability.PACKAGE_NOT_FOUND: "check the spelling: the registry has no such package",
    Availability.VERSION_NOT_FOUND: "write a version that the registry has",
    Availability.NO_COMPATIBLE_ARTIFACT: "write a version that has a file for this platform and interpreter",
    Availability.RESOLUTION_CONFLICT: "ask for versions that go together, or leave the selectors empty",
    Availability.REGISTRY_UNAVAILABLE: "try again later: the registry didn't answer",
}
AVAILABILITY_HINTS: Mapping[Availability, str] = MappingProxyType(_AVAILABILITY_HINTS)


def hint_for(reason: PackageReason, name: str = "") -> str:
    """What to do about a refusal of the package `name`."""
    return HINTS[reason].replace("{name}", name or "the package")
