"""`sluicegate run`, `call` and `calls`: a call decoded, run, and its result encoded; and what the ledger has of calls.

Exit status of `run` and `call`: the code's own; 128 + N when signal N ended it, or this command; 124 on timeout, 137
when killed, 2 when the call or the policy is refused, 3 when our side failed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from proxy.control import ProxyUnavailable
from sandbox import results
from sandbox.call_parsing import parse_call
from sandbox.contract import MAX_CODE_CHARS, Cause, CodeCall, InvalidCall, Status, ToolResult
from sandbox.executor import Executor
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import Ledger, LedgerUnavailable
from sandbox.owners import Owner
from sandbox.passthrough import Passthrough, printable
from sandbox.policy_file import InvalidPolicy, default_policy_path
from sandbox.settings import Settings
from sandbox.state import InvalidSettings, state_dir
from sandbox.strict_json import read_json

EXIT_INVALID = 2
EXIT_OUR_FAULT = 3
EXIT_TIMEOUT = 124
EXIT_KILLED = 137

POLICY_HELP = "the policy file; the shipped default otherwise"
_AUDIT_HELP = "where the audit log goes, not where the policy says"
_MAX_CODE_BYTES = 4 * MAX_CODE_CHARS  # what is longer is refused, and need not be read to its end
_MAX_CALL_BYTES = 32 * 1024 * 1024  # every field at its limit, each character escaped
_ENDINGS = {".py": "python", ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript"}


def run(
    file: Annotated[Path | None, typer.Argument(help="the program; `-` for standard input", show_default=False)] = None,
    code: Annotated[str | None, typer.Option(help="the program's text")] = None,
    language: Annotated[str | None, typer.Option(help="python or javascript; else by the file's ending")] = None,
    policy: Annotated[Path | None, typer.Option(help=POLICY_HELP)] = None,
    allow_network: Annotated[bool, typer.Option("--allow-network", help="registry-default without `--domain`")] = False,
    domain: Annotated[list[str] | None, typer.Option(help="a host to allow, with its subdomains; repeatable")] = None,
    unrestricted: Annotated[bool, typer.Option("--unrestricted", help="any public destination")] = False,
    timeout: Annotated[float | None, typer.Option(help="seconds, 1 to 300")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="MiB, 128 to 2048")] = None,
    env: Annotated[list[str] | None, typer.Option(help="K=V, repeatable")] = None,
    package: Annotated[list[str] | None, typer.Option(help="`requests==2.32.3`, `lodash@4`; repeatable")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="with the same key and request: the first answer")] = None,
    audit_log: Annotated[Path | None, typer.Option(help=_AUDIT_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result object instead of the output")] = False,
) -> None:  # fmt: skip
    """Run one program and exit with its status."""

    def decode() -> CodeCall:
        data = _call_data(file, code, allow_network, domain, unrestricted, env)
        given = {
            "language": language or _language(file), "timeout": timeout, "memory_mib": memory_mib,
            "idempotency_key": idempotency_key, "packages": package or [],
        }  # fmt: skip
        return parse_call(data | given)

    result, replayed = _answer(decode, policy, audit_log, as_json=as_json)
    if not as_json:
        for line in _notes(result, replayed=replayed):
            _say(line)
    raise typer.Exit(exit_status(result))


def call(
    file: Annotated[Path, typer.Argument(help="a call as a JSON object; `-` for standard input", show_default=False)],
    policy: Annotated[Path | None, typer.Option(help=POLICY_HELP)] = None,
    audit_log: Annotated[Path | None, typer.Option(help=_AUDIT_HELP)] = None,
) -> None:
    """Answer one call of the Code Execution tool: its JSON object in, the result's JSON object out."""
    result, _ = _answer(lambda: _read_call(file), policy, audit_log, as_json=True)
    raise typer.Exit(exit_status(result))


class Part(StrEnum):
    CALL = "call"
    RESULT = "result"


def schema(part: Annotated[Part, typer.Argument(help="which object", show_default=False)]) -> None:
    """Print the JSON Schema of calls or of results."""
    _print(json.dumps(json_schema(part), indent=2))


def json_schema(part: Part) -> dict[str, Any]:
    """The published schema of one of the two objects. It cannot say all that `docs/calls.md` says of a call."""
    of_result = ToolResult.model_json_schema(mode="serialization")
    fields = CodeCall.model_json_schema() if part is Part.CALL else of_result
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | fields


def calls(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line, answers included")] = False,
    forget: Annotated[
        str | None, typer.Option(help="drop what is kept under this key, which may then run again")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="of this tenant's calls of the service alone")] = None,
    user: Annotated[str | None, typer.Option(help="of this user's calls of the service alone")] = None,
) -> None:
    """Show what the ledger has: calls that run, that were lost with their executor, and answers that are kept."""
    try:
        if forget is not None and not asyncio.run(_forget(forget, Owner(tenant or "", user or ""))):
            _fail(
                EXIT_INVALID,
                f"nothing is kept under the key `{printable(forget)}`, or its call runs\n"
                "hint: a key of the service is one of a `--user`, and with tenants of a `--tenant`",
            )
        rows = asyncio.run(_ledger_rows(tenant, user))
    except (InvalidSettings, LedgerUnavailable) as error:
        _fail(EXIT_INVALID, str(error))
    if not rows:
        of_whom = "" if tenant is None and user is None else " of these"
        _say(f"no call{of_whom} runs, none was lost, and no answer is kept")
    for row in rows:
        whose = "/".join(printable(row[part]) for part in ("tenant", "user") if row[part])
        how = "" if row["status"] is None else f" ({row['status']})"
        line = f"{row['started_at']}  {row['call_id']}  {row['state']}{how}{'  ' if whose else ''}{whose}"
        if row["idempotency_key"] is not None:
            line += f"  key `{row['idempotency_key']}`"
        _print(json.dumps(row) if as_json else line)


async def _forget(key: str, owner: Owner) -> bool:
    ledger = await Ledger.open(state_dir() / "calls", keep_seconds=None)
    try:
        return await ledger.forget(key, owner)
    finally:
        await ledger.close()


async def _ledger_rows(tenant: str | None, user: str | None) -> list[dict[str, Any]]:
    ledger = await Ledger.open(state_dir() / "calls", keep_seconds=None)
    try:
        entries = await ledger.entries()
    finally:
        await ledger.close()
    return [
        {
            "call_id": entry.call_id,
            "state": entry.state.value,
            "status": entry.status,
            "tenant": entry.owner.tenant,
            "user": entry.owner.user,
            "kind": None if entry.recording is None else entry.recording.kind,
            "started_at": datetime.fromtimestamp(entry.started_at, UTC).isoformat(timespec="milliseconds"),
            "idempotency_key": entry.idempotency_key,
            "result": None if entry.result is None else entry.result.model_dump(mode="json"),
        }
        for entry in entries
        if tenant in (None, entry.owner.tenant) and user in (None, entry.owner.user)
    ]


def exit_status(result: ToolResult) -> int:
    """The exit status that stands for a result; see the module's docstring."""
    if result.cause in (Cause.POLICY_REFUSED, Cause.INVALID_CALL):
        return EXIT_INVALID
    if result.status is Status.TIMEOUT:
        return EXIT_TIMEOUT
    if result.status is Status.KILLED:
        return EXIT_KILLED
    if result.exit_code is not None:
        return result.exit_code
    number = result.attempts[-1].signal if result.attempts else None
    return 128 + number if number is not None else EXIT_OUR_FAULT


def _answer(
    decode: Callable[[], CodeCall], policy: Path | None, audit_log: Path | None, *, as_json: bool
) -> tuple[ToolResult, bool]:
    """Decode and answer a call, and whether it had been answered before. With `as_json` the result is printed, else the
    output as it comes.
    """
    course = _Course()
    try:
        result = asyncio.run(
            _run(decode(), policy or default_policy_path(), audit_log, course, passthrough=not as_json)
        )
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
    except LedgerUnavailable as error:
        _refuse(EXIT_OUR_FAULT, "ledger_unavailable", [str(error)], as_json=as_json)
    except OSError as error:  # such as too few descriptors
        _refuse(EXIT_OUR_FAULT, "isolation_unavailable", [f"this process cannot start: {error}"], as_json=as_json)
    except asyncio.CancelledError:
        if course.number is None:
            raise
        result = results.cancelled("", "")  # it had not begun
    if as_json:
        _print(result.model_dump_json(indent=2))
    if course.error is not None and not isinstance(course.error, BrokenPipeError):
        _fail(EXIT_OUR_FAULT, f"the output could not be written: {course.error.strerror}")
    if course.number is not None:
        raise typer.Exit(128 + course.number)
    return result, bool(result.attempts) and result.call_id != course.call_id


class _Course:
    """How the call of this command went, besides its result.

    `number` is that of the signal that stops it early; `error` says that its output can be written no more.
    """

    call_id: str = ""
    number: int | None = None
    error: OSError | None = None


async def _run(
    call: CodeCall, policy: Path, audit_log: Path | None, course: _Course, *, passthrough: bool
) -> ToolResult:
    """Run one call. When this command is to stop, the call is cancelled, and its answer is what it came to."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancel: Callable[[], object] = task.cancel

    def end(number: int) -> None:
        if course.number is None:
            course.number = number
            cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)

    def gone() -> None:
        loop.call_soon_threadsafe(end, signal.SIGPIPE)

    streams = (Passthrough(1, gone), Passthrough(2, gone)) if passthrough else ()
    try:
        settings = Settings(audit_log=None if audit_log is None else _absolute(audit_log), warm_sandboxes=0)
        async with Executor(policy, settings=settings) as executor:
            progress = _Progress() if sys.stderr.isatty() else None
            running = executor.submit(call, streams[0] if streams else None, streams[1] if streams else None, progress)
            course.call_id, cancel = running.call_id, running.cancel
            return await running.result()
    finally:
        for stream in streams:
            stream.close()
            course.error = course.error or stream.error
            if stream.dropped_bytes:
                _say(f"{stream.dropped_bytes} bytes of output were dropped: whoever reads it was too slow")


class _Progress:
    """One line on a terminal, written anew; and gone when the code runs."""

    def __call__(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[Ksluicegate: {printable(text)}" if text else "\r\x1b[K")
        sys.stderr.flush()


# What a call is made from


def _call_data(
    file: Path | None, code: str | None, allow_network: bool, domains: list[str] | None, unrestricted: bool,
    env: list[str] | None,
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
            code = _read(file, _MAX_CODE_BYTES, f"more than {MAX_CODE_CHARS} characters")
        except ValueError as error:
            problems.append(f"code: {error}")
    if problems:
        raise InvalidCall(problems)
    return {
        "code": code,
        "env": pairs,
        "allow_network": allow_network or unrestricted or bool(domains),
        "domains": [] if unrestricted else (domains or None),
    }


def _language(file: Path | None) -> str:
    """By the file's ending; Python where there is none to go by."""
    if file is None or str(file) == "-" or not file.suffix:
        return "python"
    if (language := _ENDINGS.get(file.suffix.lower())) is None:
        known = ", ".join(f"`{ending}`" for ending in _ENDINGS)
        raise InvalidCall([f"language: `{file.name[:80]!a}` ends in none of {known}; write `--language NAME`"])
    return language


def _read_call(file: Path) -> CodeCall:
    """The call in a file of JSON. Raises `InvalidCall`."""
    try:
        data = read_json(_read(file, _MAX_CALL_BYTES, f"more than {_MAX_CALL_BYTES} bytes"))
    except ValueError as error:
        raise InvalidCall([f"call: {error}; give one JSON object, such as {_EXAMPLE}"]) from error
    return parse_call(data)


_EXAMPLE = '`{"language": "python", "code": "print(1)"}`'


def _read(file: Path, limit: int, too_much: str) -> str:
    """A file's text, or that of standard input. Raises `ValueError` that says what is wrong."""
    try:
        with open(0, "rb", closefd=False) if str(file) == "-" else file.open("rb") as source:
            data = source.read(limit + 1)
    except OSError as error:
        raise ValueError(f"`{file}` cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise ValueError(f"`{file}` has {too_much}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"`{file}` is not UTF-8 at byte {error.start}") from error


# What is told


def _notes(result: ToolResult, *, replayed: bool) -> list[str]:
    """What a person should know besides the code's own output."""
    notes = []
    if replayed:
        notes.append(f"answered before, as {result.call_id}: its output is not printed again; `--json` shows it")
    notes += [
        f"attempt {number} failed on our side ({attempt.code}), and the program was started anew: "
        "output above may be of both"
        for number, attempt in enumerate(result.attempts[:-1], 1)
    ]
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
    """Say why there is no result, with `as_json` also in the form of one."""
    if as_json:
        _print(results.invalid(code, problems).model_dump_json(indent=2))
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
