"""`sluicegate packages`: what a policy says of packages, and the lists that it judges by. An edge.

Exit status of `check`: 0 all are allowed; 1 the policy refuses some; 2 some are no specifiers, or the policy or the
arguments are none. Nothing is installed, and no registry is asked.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from proxy.directories import make_private
from proxy.packages.data_files import InvalidData, list_text, load_policy_data, read_list
from proxy.packages.judge import policy_revision
from proxy.packages.model import Ecosystem, purl
from proxy.packages.reasons import PackageReason
from sandbox import package_store_commands
from sandbox.packages.screening import Refusal, Screening, screen
from sandbox.packages.specifiers import installer_argument, specifier_text
from sandbox.policy.packages import package_policy
from sandbox.policy.problems import shown
from sandbox.policy_file import InvalidPolicy, LoadedPolicy, default_policy_path, load_policy
from sandbox.state import InvalidSettings, state_dir

EXIT_REFUSED = 1
EXIT_INVALID = 2

app = typer.Typer(help="Say what a policy makes of packages.", no_args_is_help=True)
package_store_commands.register(app)

Language = Annotated[str, typer.Option("--language", help="`python` or `javascript`.")]


@app.command("check")
def check_command(
    specifiers: Annotated[list[str], typer.Argument(metavar="SPEC...", help="`name==version`, `name@version`.")],
    language: Language,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="The policy file; the shipped default otherwise.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as a JSON object.")] = False,
) -> None:
    """Say of each package whether a call may bring it. Nothing is installed, and no registry is asked."""
    ecosystem = _ecosystem(language)
    try:
        loaded = load_policy(policy or default_policy_path())
        rules = package_policy(loaded.policy.packages)
        data = load_policy_data(rules)
    except (InvalidPolicy, InvalidData) as error:
        _fail(str(error))
    screening = screen(rules, ecosystem, specifiers, datetime.now(UTC), data)
    if as_json:
        _say(json.dumps(_as_json(screening, ecosystem, loaded, policy_revision(rules, data)), indent=2))
    else:
        _print(screening)
    invalid = any(refusal.reason in _NOT_VALID for refusal in screening.refusals)
    raise typer.Exit(EXIT_INVALID if invalid else 0 if screening.ok else EXIT_REFUSED)


# These are faults of the call, whatever the policy.
_NOT_VALID = frozenset({PackageReason.SPECIFIER_SYNTAX, PackageReason.CONFLICTING_SPECIFIERS})


@app.command("popular")
def popular_command(
    file: Annotated[Path, typer.Argument(help="One name a line, the most used first.")],
    language: Language,
    source: Annotated[str | None, typer.Option("--source", help="Where the list is from.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file to write; in the state directory otherwise.")
    ] = None,
) -> None:
    """Check a list of popular names, and put it where a policy can name it."""
    ecosystem = _ecosystem(language)
    try:
        found = read_list(file, ecosystem)
        target = out.absolute() if out is not None else state_dir() / "packages" / f"popular-{ecosystem}.txt"
    except (InvalidData, InvalidSettings) as error:
        _fail(str(error))
    date = found.header.get("date") or datetime.now(UTC).date().isoformat()
    origin = source or found.header.get("source") or file.name
    try:
        if out is None:
            make_private(target.parent)
        _write(target, list_text(ecosystem, found.names, date=date, source=origin))
    except OSError as error:
        _fail(f"{target}: it cannot be written: {(error.strerror or str(error)).lower()}")
    _say(f"{target}: {len(found.names)} names of {date}, from {shown(origin)}")
    _say(f"hint: write `similarity: {{list_files: {{{ecosystem}: {target}}}}}` in the policy's `packages`")


def _write(target: Path, text: str) -> None:
    """All of it, or what was there before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _ecosystem(language: str) -> Ecosystem:
    try:
        return Ecosystem.of_language(language)
    except ValueError:
        _fail(f"`{shown(language)}` is no language that has packages\nhint: write `python` or `javascript`")


# Printing


def _print(screening: Screening) -> None:
    for specifier in screening.allowed:
        _say(f"allowed  {specifier_text(specifier)}")
    for refusal in screening.refusals:
        _say(f"refused  {refusal.specifier or 'the call'}")
        _say(f"  {refusal.message}")
        _say(f"  reason {refusal.code}, rule {refusal.rule or '-'}")
        if refusal.hint:
            _say(f"  hint: {refusal.hint}")
    for warning in screening.warnings:
        _say(f"warning: {warning.message} ({warning.reason}, {warning.rule})")


def _as_json(screening: Screening, ecosystem: Ecosystem, loaded: LoadedPolicy, revision: str) -> dict[str, Any]:
    return {
        "ok": screening.ok,
        "language": ecosystem.language,
        "policy": {"name": loaded.policy.name, "digest": loaded.digest, "path": str(loaded.path)},
        "revision": revision,
        "allowed": [
            {
                "specifier": specifier_text(specifier),
                "purl": purl(specifier.name, specifier.selector.version),
                "installer_argument": installer_argument(specifier),
            }
            for specifier in screening.allowed
        ],
        "refusals": [_refusal(refusal) for refusal in screening.refusals],
        "warnings": [
            {"reason": warning.reason, "rule": warning.rule, "message": warning.message}
            for warning in screening.warnings
        ],
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {
        "specifier": refusal.specifier,
        "reason": refusal.reason,
        "details": list(refusal.details),
        "rule": refusal.rule,
        "message": refusal.message,
        "hint": refusal.hint,
        "retry_after": None if refusal.retry_after is None else refusal.retry_after.isoformat(),
    }


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(text: str) -> NoReturn:
    sys.stderr.write(text + "\n")
    raise typer.Exit(EXIT_INVALID)
