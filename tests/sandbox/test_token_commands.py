"""`sluicegate token`: the token and its line, which a policy file takes as it is."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sandbox.cli import app
from sandbox.policy_file import parse_policy
from sandbox.tokens import Bearer, TokenTable


def made(*arguments: str) -> tuple[str, Bearer | None]:
    """The token, and whose it is under a policy with the line that was printed."""
    result = CliRunner().invoke(app, ["token", *arguments])
    assert result.exit_code == 0
    token, line = result.stdout.splitlines()
    text = f"version: 1\ncode_exec: {{working_directories: [/srv/projects]}}\ntenants:\n  - name: acme\n    tokens:\n      {line}\n"
    assert token not in line
    loaded = parse_policy(text)
    assert loaded.warnings == ()
    return token, TokenTable(loaded.policy).find(token)


@pytest.mark.parametrize(
    ("arguments", "name", "admin", "user"),
    [
        (["--name", "ci"], "ci", False, ""),
        (["--name", "1e5", "--user", "7"], "1e5", False, "7"),
        (["--name", "null", "--user", "true"], "null", False, "true"),
        (["--name", "root", "--admin", "--user", "a@b.example"], "root", True, "a@b.example"),
    ],
)
def test_the_line_lets_the_token_in(arguments: list[str], name: str, admin: bool, user: str) -> None:
    """Also where a name would be a number, or nothing, to YAML."""
    _, bearer = made(*arguments)
    assert bearer == Bearer("acme", name, admin, user)


def test_each_token_is_another_and_has_a_name_of_its_own() -> None:
    found = [made() for _ in range(3)]
    assert len({token for token, _ in found}) == 3
    assert len({bearer.token_name for _, bearer in found if bearer is not None}) == 3


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--name", "Ci"], "`--name`"),
        (["--name", ""], "`--name`"),
        (["--user", "../x"], "`--user`"),
        (["--user", ""], "`--user`"),
        (["--user", "a\nb"], "`--user`"),
    ],
)
def test_a_name_that_is_none_makes_no_token(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, ["token", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(option)
    assert "hint: write up to" in result.stderr
