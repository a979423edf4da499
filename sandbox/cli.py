"""The command `sluicegate`: its subcommands put together, `doctor`, and the outermost frame."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from sandbox.audit_commands import app as audit_app
from sandbox.doctor import examine
from sandbox.mcp_commands import mcp
from sandbox.package_commands import app as packages_app
from sandbox.policy_commands import app as policy_app
from sandbox.policy_file import InvalidPolicy, default_policy_path
from sandbox.run_commands import EXIT_INVALID, EXIT_OUR_FAULT, POLICY_HELP, call, calls, run, schema
from sandbox.serve_commands import serve
from sandbox.state import InvalidSettings
from sandbox.token_commands import token

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(policy_app, name="policy")
app.add_typer(audit_app, name="audit")
app.add_typer(packages_app, name="packages")


for _command in (run, call, schema, calls, serve, mcp, token):
    app.command()(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sluicegate {version('sluicegate')}")
        raise typer.Exit


@app.callback()
def _every_command(
    _: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="say it")] = False,
) -> None:
    """Run an agent's code in a fresh sandbox, with the network a policy allows and no other."""


@app.command()
def doctor(
    policy: Annotated[Path | None, typer.Option(help=POLICY_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Check what the confinement needs, prove it by probes, and name the remedy for what is missing."""
    try:
        report = asyncio.run(examine(policy or default_policy_path()))
    except (InvalidPolicy, InvalidSettings) as error:
        typer.echo(f"sluicegate: {error}", err=True)
        raise typer.Exit(EXIT_INVALID) from error
    typer.echo(report.to_json() if as_json else report.to_text().rstrip("\n"))
    raise typer.Exit(0 if report.ok else 1)


def main() -> None:
    """The console script. An error that is nobody else's is ours: it gets a reference and exit status 3."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # closed: what is opened next would take its place, and be written to
            os.open(os.devnull, os.O_RDWR)
    try:
        app()
    except Exception as error:  # the edge: what is nobody else's fault is ours
        reference = secrets.token_hex(4)
        logging.getLogger("sluicegate").exception("internal error %s", reference)
        typer.echo(f"sluicegate: internal error {reference}: {type(error).__name__}: {error}", err=True)
        sys.exit(EXIT_OUR_FAULT)


if __name__ == "__main__":
    main()
