"""Tokens: whoever sends one is a tenant, and perhaps one user of it.

Owns: making tokens, their hashes, and finding whose a token is. Must not: keep a token, or know headers.

A token is 256 random bits, so a plain SHA-256 of it is enough: there is nothing to guess, and a slow hash would only
make every request slow. The policy has hashes alone, so whoever reads it can call as nobody.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from sandbox.policy.schema import Policy

PREFIX = "sgt_"  # so that scanners for secrets find tokens that were left lying about
_BYTES = 32


@dataclass(frozen=True, slots=True)
class Bearer:
    """Whose a token is. `user` is empty where the token fixes none; `admin` as in `sandbox.owners.Caller`."""

    tenant: str
    token_name: str
    admin: bool = False
    user: str = ""


def new_token() -> str:
    """A new token: `sgt_` and 43 characters of A-Z, a-z, 0-9, `-` and `_`."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def hash_token(token: str) -> str:
    """What the policy has of a token: SHA-256 over its text, in small hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class TokenTable:
    """The tokens of one policy. Made anew when the policy is."""

    def __init__(self, policy: Policy) -> None:
        self._bearers = {
            token.sha256: Bearer(tenant.name, token.name, token.admin, token.user or "")
            for tenant in policy.tenants
            for token in tenant.tokens
        }

    def __len__(self) -> int:
        return len(self._bearers)

    def find(self, token: str) -> Bearer | None:
        """Whose the token is; None when it is nobody's.

        Any text is hashed, and the hash is looked up. How long that takes says at most something of how the hash of
        what was sent compares with hashes in the table. Nobody can choose a text for the beginning of its hash at any
        useful length, and who knew a whole hash would still not know its token; so the lookup needs no comparison in
        constant time.
        """
        return self.find_hash(hash_token(token))

    def find_hash(self, sha256: str) -> Bearer | None:
        """Whose the token with this hash is."""
        return self._bearers.get(sha256)
