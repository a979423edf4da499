"""The `code_exec:` and `service:` sections of the policy file. Pure.

Owns: their keys, bounds and defaults. Must not: weigh them against other sections; that is
`sandbox.policy.tenants_lint`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer, PlainValidator, WithJsonSchema

from proxy.network import Mode
from proxy.packages.model import Ecosystem
from sandbox.packages.specifiers import SyntaxFault, parse_specifier
from sandbox.policy.problems import shown
from sandbox.policy.rules import Section, list_of
from sandbox.policy.scalars import ModeName, PlainName, bounded, distinct, fault, kind_of

DEFAULT_USER_DATA_MIB = 1024
DEFAULT_USER_DATA_FILES = 100_000
DEFAULT_BODY_MIB = 4  # what MCP's own server takes
DEFAULT_SERVICE_CONNECTIONS = 256
_MAX_USER_DATA_MIB = 1024 * 1024
_MAX_USER_DATA_FILES = 100_000_000
_MAX_BODY_MIB = 1024
_MAX_SERVICE_CONNECTIONS = 65_535
_MAX_PATH = 1024


def _directory(value: object) -> Path:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > _MAX_PATH:
        fault(f"a directory is expected, not {kind_of(value)}", "write `/srv/projects`")
    if not value.startswith("/"):
        fault(f"`{shown(value)}` is not an absolute directory", "write it from the root on, such as `/srv/projects`")
    path = PurePosixPath(f"/{value.lstrip('/')}")
    if ".." in path.parts:
        fault(f"`{shown(value)}` has a `..` in it", "write the directory that is meant")
    if str(path) == "/":
        fault("`/` is the whole host", "write the one directory that is meant, such as `/srv/projects`")
    if str(path) != value:
        fault(f"`{shown(value)}` is not in its plain form", f"write `{shown(str(path))}`")
    return Path(value)


Directory = Annotated[
    Path,
    PlainValidator(_directory),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^/."}),
]


def _specifier(value: object) -> str:
    if not isinstance(value, str):
        fault(f"a package is text, not {kind_of(value)}", "write `numpy==2.1.3`")
    read = parse_specifier(Ecosystem.PYPI, value)
    if isinstance(read, SyntaxFault):
        fault(read.message, read.hint)
    return value


PythonSpecifier = Annotated[
    str, PlainValidator(_specifier), WithJsonSchema({"type": "string", "description": "`name`, or `name==version`"})
]


class UserDataLimits(Section):
    """What one user's directory may hold."""

    max_mib: Annotated[int, *bounded(1, _MAX_USER_DATA_MIB, "MiB", whole=True)] = DEFAULT_USER_DATA_MIB
    max_files: Annotated[int, *bounded(1, _MAX_USER_DATA_FILES, "files", whole=True)] = DEFAULT_USER_DATA_FILES


class CodeExecSection(Section):
    """What calls of the `code_exec` tool have, since they name neither a network nor packages themselves.

    `domains` are the hosts that such a call names, in the mode `named`.
    """

    network: ModeName = Mode.BLOCK_ALL
    domains: Annotated[tuple[PlainName, ...], list_of("[example.com]"), AfterValidator(distinct)] = ()
    packages: Annotated[tuple[PythonSpecifier, ...], list_of('["numpy==2.1.3"]'), AfterValidator(distinct)] = ()
    user_data: UserDataLimits = UserDataLimits()
    working_directories: Annotated[
        tuple[Directory, ...], list_of("[/srv/projects]"), AfterValidator(distinct)
    ] = ()  # fmt: skip


class ServiceSection(Section):
    """What the service takes from those who connect to it."""

    max_body_mib: Annotated[int, *bounded(1, _MAX_BODY_MIB, "MiB", whole=True)] = DEFAULT_BODY_MIB
    max_connections: Annotated[int, *bounded(1, _MAX_SERVICE_CONNECTIONS, "connections", whole=True)] = (
        DEFAULT_SERVICE_CONNECTIONS
    )
