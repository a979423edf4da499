"""A token is found by its hash, and says whose it is; the policy never has the token itself."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.policy_file import parse_policy
from sandbox.tokens import Bearer, TokenTable, hash_token, new_token

TOKENS = [new_token() for _ in range(3)]
POLICY = f"""\
version: 1
code_exec: {{working_directories: [/srv/projects]}}
tenants:
  - name: acme
    tokens:
      - {{name: ci, sha256: "{hash_token(TOKENS[0])}"}}
      - {{name: root, sha256: "{hash_token(TOKENS[1]).upper()}", admin: true, user: alice}}
  - name: other
    tokens: [{{name: ci, sha256: "{hash_token(TOKENS[2])}"}}]
"""
TABLE = TokenTable(parse_policy(POLICY).policy)


def test_a_token_is_of_one_tenant() -> None:
    assert [TABLE.find(token) for token in TOKENS] == [
        Bearer("acme", "ci"), Bearer("acme", "root", admin=True, user="alice"), Bearer("other", "ci"),
    ]  # fmt: skip
    assert len(TABLE) == 3


@pytest.mark.parametrize(
    "token",
    ["", "sgt_", TOKENS[0][:-1], TOKENS[0] + " ", TOKENS[0].upper(), hash_token(TOKENS[0]), "\ud800", "x" * 10**6],
    ids=[
        "empty",
        "prefix",
        "cut",
        "space",
        "capitals",
        "hash",
        "surrogate",
        "long",
    ],  # each process makes its own tokens
)
def test_what_is_not_exactly_a_token_is_nobodys(token: str) -> None:
    assert TABLE.find(token) is None


@given(st.text())
def test_any_text_is_looked_up(text: str) -> None:
    assert TABLE.find(text) is None


def test_a_policy_without_tenants_has_no_tokens() -> None:
    assert TokenTable(parse_policy("version: 1").policy).find(TOKENS[0]) is None


def test_a_new_token_has_256_bits_and_its_hash_is_the_plain_sha_256() -> None:
    made = {new_token() for _ in range(1000)}
    assert len(made) == 1000
    assert all(re.fullmatch(r"sgt_[A-Za-z0-9_-]{43}", token) for token in made)
    assert hash_token(TOKENS[0]) == hashlib.sha256(TOKENS[0].encode()).hexdigest()
