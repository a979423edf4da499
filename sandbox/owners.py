"""Whose a call is: the tenant, the user in it, and what who asks may do beside that. Pure.

Owns: the form of users' names, which become names of directories. Must not: know tokens or transports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_USER = "default"
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}\Z", re.ASCII)


class InvalidUser(ValueError):
    """A text that is no user's name, with the form to write."""


def check_user(name: str) -> str:
    """The name, if it is one. Raises `InvalidUser`."""
    if not _USER.match(name):
        raise InvalidUser(
            f"`{name[:80]!a}` is not a user's name\nhint: write up to 128 letters, digits and `._@+-`, a letter or a "
            "digit first"
        )
    return name


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose calls, tasks and files these are. `tenant` is empty where the policy has no tenants."""

    tenant: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `admin` is also true of a single-user run: no tenants, and no user named.

    `directory` is the client's own working directory, where it told one that it may work in.
    """

    tenant: str = ""
    user: str = DEFAULT_USER
    admin: bool = False
    directory: Path | None = None

    @property
    def owner(self) -> Owner:
        return Owner(self.tenant, self.user)
