"""`sluicegate token`: a new token for a tenant, and the line of the policy file that lets it in. An edge.

Exit status: 0; 2 the arguments are none.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from sandbox.policy.problems import shown
from sandbox.policy.tenants import Token
from sandbox.tokens import hash_token, new_token

EXIT_INVALID = 2


def token(
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What the log calls the token; made up without it.")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="The one user whose calls are made with it.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Its calls may work in `code_exec.working_directories`; it sees metrics.")
    ] = False,
) -> None:
    """Make a token for a tenant. It is printed once, with the line to put into the policy file, and kept nowhere."""
    made = new_token()
    digest = hash_token(made)
    fields = {"name": f"token-{digest[:8]}" if name is None else name, "sha256": digest, "admin": admin, "user": user}
    try:
        entry = Token.model_validate(fields)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            context = fault.get("ctx") or {}
            option = f"--{fault['loc'][0]}"
            hint = context.get("hint")
            sys.stderr.write(f"`{option}`: {context.get('message', shown(fault['msg']))}\n")
            sys.stderr.write(f"hint: {hint}\n" if hint else "")
        raise typer.Exit(EXIT_INVALID) from error
    sys.stderr.write("the token, shown this once, and its line for `tokens` of a tenant in the policy file:\n")
    sys.stdout.write(f"{made}\n{policy_line(entry)}\n")


def policy_line(entry: Token) -> str:
    """The entry as it stands in a policy file. Names are quoted, since YAML would take some for numbers."""
    parts = [f"name: {json.dumps(entry.name)}", f'sha256: "{entry.sha256}"']
    parts += ["admin: true"] * entry.admin
    parts += [] if entry.user is None else [f"user: {json.dumps(entry.user)}"]
    return f"- {{{', '.join(parts)}}}"
