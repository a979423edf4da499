"""The command `sluicegate`. An edge: it decodes arguments, calls the story, and encodes the result.

Exit status of `run`: the code's own; 128 + N when signal N ended it; 124 on timeout, 137 when killed, 2 when the call
or the policy is refused, 3 when our side failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from proxy.control import ProxyUnavailable
from sandbox import results
from sandbox.audit_commands import app as audit_app
from sandbox.contract import MAX_CODE_CHARS, CodeCall, InvalidCall, Status, ToolResult, parse_call
from sandbox.doctor import examine
from sandbox.execute import Executor
from sandbox.isolation.client import IsolationUnavailable
from sandbox.passthrough import Passthrough, printable
from sandbox.policy_commands import app as policy_app
from sandbox.policy_file import InvalidPolicy, default_policy_path
from sandbox.settings import Settings
from sandbox.state import InvalidSettings

EXIT_INVALID = 2
EXIT_OUR_FAULT = 3
EXIT_TIMEOUT = 124
EXIT_KILLED = 137

_MAX_CODE_BYTES = 4 * MAX_CODE_CHARS  # what is longer is refused, and need not be read to its end
_POLICY_HELP = "the policy file; the shipped default otherwise"

app = typer.Typer(
    help="Run an agent's code in a fresh sandbox, with the network a policy allows and no other.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
app.add_typer(policy_app, name="policy")
app.add_typer(audit_app, name="audit")


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="the program; `-` for standard input", show_default=False)] = None,
    code: Annotated[str | None, typer.Option(help="the program's text")] = None,
    policy: Annotated[Path | None, typer.Option(help=_POLICY_HELP)] = None,
    allow_network: Annotated[bool, typer.Option("--allow-network", help="registry-default without `--domain`")] = False,
    domain: Annotated[list[str] | None, typer.Option(help="a host to allow, with its subdomains; repeatable")] = None,
    unrestricted: Annotated[bool, typer.Option("--unrestricted", help="any public destination")] = False,
    timeout: Annotated[float | None, typer.Option(help="seconds, 1 to 300")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="MiB, 128 to 2048")] = None,
    env: Annotated[list[str] | None, typer.Option(help="K=V, repeatable")] = None,
    audit_log: Annotated[Path | None, typer.Option(help="where the audit log goes, not where the policy says")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result object instead of the output")] = False,
) -> None:  # fmt: skip
    """Run one program and exit with its status."""
    try:
        call = parse_call(_call_data(file, code, allow_network, domain, unrestricted, timeout, memory_mib, env))
        result = asyncio.run(_run(call, policy or default_policy_path(), audit_log, passthrough=not as_json))
    except InvalidCall as error:
        _refuse(EXIT_INVALID, "invalid_call", error.problems, as_json=as_json)
    except InvalidPolicy as error:
        _refuse(EXIT_INVALID, "invalid_policy", [str(error)], as_json=as_json)
    except InvalidSettings as error:
        _refuse(EXIT_INVALID, "invalid_settings", [str(error)], as_json=as_json)
    except IsolationUnavailable as error:
        _refuse(EXIT_OUR_FAULT, "isolation_unavailable", [str(error)], as_json=as_json)
    except ProxyUnavailable as error:
        _refuse(EXIT_OUR_FAULT, "proxy_unavailable", [str(error)], as_json=as_json)
    except _Stopped as stopped:
        if stopped.error is not None and not isinstance(stopped.error, BrokenPipeError):
            _fail(EXIT_OUR_FAULT, f"the output could not be written: {stopped.error.strerror}")
        raise typer.Exit(128 + stopped.number) from stopped
    if as_json:
        _print(result.model_dump_json(indent=2))
    else:
        for line in _notes(result):
            _say(line)
    raise typer.Exit(exit_status(result))


@app.command()
def doctor(
    policy: Annotated[Path | None, typer.Option(help=_POLICY_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Check what the confinement needs, prove it by probes, and name the remedy for what is missing."""
    try:
        report = asyncio.run(examine(policy or default_policy_path()))
    except (InvalidPolicy, InvalidSettings) as error:
        _fail(EXIT_INVALID, str(error))
    _print(report.to_json() if as_json else report.to_text().rstrip("\n"))
    raise typer.Exit(0 if report.ok else 1)


def exit_status(result: ToolResult) -> int:
    """The exit status that stands for a result; see the module's docstring."""
    if result.error is not None and result.error.code in ("policy_refused", "invalid_call"):
        return EXIT_INVALID
    if result.status is Status.TIMEOUT:
        return EXIT_TIMEOUT
    if result.status is Status.KILLED:
        return EXIT_KILLED
    if result.exit_code is not None:
        return result.exit_code
    number = result.attempts[-1].signal if result.attempts else None
    return 128 + number if number is not None else EXIT_OUR_FAULT


class _Stopped(Exception):
    """A signal asked this command to stop, or its output can be written no more (`error`)."""

    def __init__(self, number: int, error: OSError | None) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number
        self.error = error


async def _run(call: CodeCall, policy: Path, audit_log: Path | None, *, passthrough: bool) -> ToolResult:
    """Run one call; a signal to this command ends the attempt, cleans up, and raises `_Stopped`."""
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    loop = asyncio.get_running_loop()
    streams: tuple[Passthrough, ...] = ()
    if passthrough:

        def gone() -> None:
            loop.call_soon_threadsafe(stop, signal.SIGPIPE)

        streams = (Passthrough(1, gone), Passthrough(2, gone))
    try:
        settings = Settings(audit_log=None if audit_log is None else _absolute(audit_log), warm_sandboxes=0)
        async with Executor(policy, settings=settings) as executor:
            return await executor.run(call, *streams)
    except asyncio.CancelledError:
        if not received:
            raise
        raise _Stopped(received[0], next((s.error for s in streams if s.error is not None), None)) from None
    finally:
        for stream in streams:
            stream.close()
            if stream.dropped_bytes:
                _say(f"{stream.dropped_bytes} bytes of output were dropped: whoever reads it was too slow")


def _call_data(
    file: Path | None, code: str | None, allow_network: bool, domains: list[str] | None, unrestricted: bool,
    timeout: float | None, memory_mib: int | None, env: list[str] | None,
) -> dict[str, object]:  # fmt: skip
    problems = []
    if (file is None) == (code is None):
        problems.append("code: give either a file (`-` for standard input) or `--code TEXT`")
    if unrestricted and domains:
        problems.append("domains: `--unrestricted` and `--domain` exclude one another")
    pairs: dict[str, str] = {}
    for entry in env or []:
        name, equals, value = entry.partition("=")
        if not equals:
            problems.append(f"env: `{name[:80]}` has no `=`; write `--env NAME=VALUE`")
        pairs[name] = value
    if code is None and file is not None:
        try:
            with open(0, "rb", closefd=False) if str(file) == "-" else file.open("rb") as source:
                data = source.read(_MAX_CODE_BYTES + 1)
            if len(data) > _MAX_CODE_BYTES:
                problems.append(f"code: `{file}` has more than {MAX_CODE_CHARS} characters")
            else:
                code = data.decode()
        except OSError as error:
            problems.append(f"code: `{file}` cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            problems.append(f"code: `{file}` is not UTF-8 at byte {error.start}")
    if problems:
        raise InvalidCall(problems)
    return {
        "language": "python",
        "code": code,
        "timeout": timeout,
        "memory_mib": memory_mib,
        "env": pairs,
        "allow_network": allow_network or unrestricted or bool(domains),
        "domains": [] if unrestricted else (domains or None),
    }


def _notes(result: ToolResult) -> list[str]:
    """What a person should know besides the code's own output."""
    notes = []
    if result.error is not None and result.error.code not in ("exit", "signal"):
        notes.append(f"{result.error.code}: {result.error.message}")
    notes += [
        f"{name} was cut: the program wrote {getattr(result.output_chars, name)} characters"
        for name in ("stdout", "stderr")
        if getattr(result.truncated, name)
    ]
    denied = [row for row in result.network.destinations if row.decision == "deny"]
    for row in denied[:5]:
        where = row.host if row.port is None else f"{row.host}:{row.port}"
        notes.append(f"denied {printable(where)} ({row.reason}, {row.count} times)")
    if len(denied) > 5:
        notes.append(f"denied {len(denied) - 5} more destinations; see the audit log")
    return notes


def _refuse(status: int, code: str, problems: list[str], *, as_json: bool) -> NoReturn:
    """Say why there is no result, with `--json` also in the form of one."""
    if as_json:
        _print(results.without_attempt("", "", code, "; ".join(problems)).model_dump_json(indent=2))
    _fail(status, *problems)


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise InvalidSettings(
            f"`{path}` is relative to a directory that is gone\nhint: give an absolute path"
        ) from error


def _print(text: str) -> None:
    try:
        typer.echo(text)
    except OSError as error:
        _fail(EXIT_OUR_FAULT, f"the output could not be written: {error.strerror}")


def _say(text: str) -> None:
    typer.echo(f"sluicegate: {text}", err=True)


def _fail(status: int, *problems: str) -> NoReturn:
    for problem in problems:
        _say(problem)
    raise typer.Exit(status)


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
        _say(f"internal error {reference}: {type(error).__name__}: {error}")
        sys.exit(EXIT_OUR_FAULT)


if __name__ == "__main__":
    main()
