"""`sluicegate audit`: show the log to people, and verify its chain. An edge.

What is in a log was chosen by code under guard, and the file may have been written by anyone: nothing from it reaches
the terminal but printable ASCII.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TextIO

import typer

from proxy.audit import AuditUnavailable
from proxy.audit_reader import BadLine, VerifyReport, read, verify
from proxy.events import CUT_MARK, clean_text
from sandbox.state import InvalidSettings, audit_path

EXIT_BROKEN = 1
EXIT_UNREADABLE = 2
_MAX_VALUE = 2048

app = typer.Typer(name="audit", help="Show and verify the audit log.", no_args_is_help=True)

LogFile = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="By default `audit.jsonl` in the state directory.", show_default=False),
]


@app.command("show")
def show_command(
    file: LogFile = None,
    call: Annotated[
        str | None,
        typer.Option("--call", metavar="ID", help="Only the events of this call; the beginning of its id will do."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only the events of this tenant's calls.")
    ] = None,
    denied: Annotated[bool, typer.Option("--denied", help="Only denials.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The events as JSON lines.")] = False,
) -> None:
    """Show the events, oldest first, one line each. Lines that can't be read are named on the error output."""
    try:
        path = _path(file)
        shown = 0
        for entry in read(path, call_id=call, tenant=tenant, denied=denied):
            shown += 1
            if isinstance(entry, BadLine):
                _say(sys.stderr, f"warning: {clean_text(str(entry), 4096)}")
            elif as_json:
                _say(sys.stdout, _json(dict(entry.fields)))
            else:
                _say(sys.stdout, format_line(entry.fields))
        sys.stdout.flush()
        if call is not None and not shown:
            _say(sys.stderr, f"no event of a call `{clean_text(call)}`: give its id, or how it begins")
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AuditUnavailable, InvalidSettings) as error:
        _fail(error)


@app.command("verify")
def verify_command(file: LogFile = None) -> None:
    """Check that no line was changed, removed or added. Exit status: 0 intact, 1 broken, 2 unreadable."""
    try:
        report = verify(_path(file))
    except (AuditUnavailable, InvalidSettings) as error:
        _fail(error)
    for line in describe(report):
        _say(sys.stdout, line)
    if not report.ok:
        raise typer.Exit(EXIT_BROKEN)


def describe(report: VerifyReport) -> list[str]:
    """A verification in words, the verdict first."""
    size = f"{_count(report.lines, 'line')} in {_count(report.files, 'file')}"
    if report.bad is not None:
        lines = [f"broken: {_place(report.bad)}", f"the chain holds up to there; {size} read"]
    else:
        lines = [f"intact: {size}"]
    if not report.from_beginning:
        lines.append("older files are gone: the first line continues one that is no longer here")
    lines.extend(f"incomplete: {_place(line)}; a crash or a full disk cut it short" for line in report.incomplete)
    return lines


def _place(line: BadLine) -> str:
    return clean_text(str(line), 4096)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_COLUMNS = (27, 12, 10, 8)  # time, attempt, layer, decision


def format_line(fields: Mapping[str, object]) -> str:
    """One event as one line of printable text: time, attempt, layer, decision, then what it was about and why.

    The fields are as they stood in the file, and need not be of any type.
    """
    kind = fields.get("event")
    head = [_text(fields, "time"), _text(fields, "attempt_id")[:12]]
    match kind:
        case "decision":
            head += [_text(fields, "layer"), _text(fields, "decision")]
            rest = [_destination(fields), _request(fields), _text(fields, "reason"), _rule(fields)]
        case "connection":
            head += ["connection", _text(fields, "outcome")]
            rest = [_destination(fields), _request(fields), *_ending(fields)]
        case "attempt":
            head += ["attempt", _text(fields, "phase")]
            keys = ("call_id", "tenant", "mode", "domains", "status", "cause", "exit_code", "allowed", "denied")
            rest = [f"{key}={_value(fields[key])}" for key in keys if fields.get(key) not in (None, "")]
        case "call":
            head += ["call", _text(fields, "what")]
            rest = [
                f"{key}={_value(fields[key])}"
                for key in ("call_id", "tenant", "started_at")
                if fields.get(key) not in (None, "")
            ]
        case "policy":
            head += ["policy", _text(fields, "what")]
            rest = [
                f"{key}={_value(fields[key])}" for key in ("old_digest", "new_digest") if fields.get(key) is not None
            ]
            rest.append(_text(fields, "detail"))
        case "proxy":
            head += ["proxy", _text(fields, "what")]
            rest = [_text(fields, "detail")]
        case _:
            head += ["?", "?"]
            rest = [f"an event of unknown kind: {_value(kind)}"]
    start = " ".join(cell.ljust(width) for cell, width in zip(head, _COLUMNS, strict=True))
    return " ".join([start, *(cell for cell in rest if cell)]).rstrip()


def _value(value: object) -> str:
    """Any value from a log as printable ASCII: letters that run from right to left or stack up would deceive as well.

    Ours are clean already, and the escapes in them are shown as they are.
    """
    text = value if isinstance(value, str) else _json(value)
    if len(text) > _MAX_VALUE:
        text = text[:_MAX_VALUE] + CUT_MARK
    if text.isascii() and text.isprintable():
        return text
    shown = clean_text(text, 10 * _MAX_VALUE) if not text.isprintable() else text
    return shown.replace(CUT_MARK, "...").encode("ascii", "backslashreplace").decode("ascii")


def _text(fields: Mapping[str, object], key: str) -> str:
    value = fields.get(key)
    return "-" if value is None or value == "" else _value(value)


def _destination(fields: Mapping[str, object]) -> str:
    host = _text(fields, "host")
    port = fields.get("port")
    shown = f"[{host}]" if ":" in host else host
    address = fields.get("address")
    at = f" ({_value(address)})" if address is not None and address != fields.get("host") else ""
    return f"{shown}:{_value(port)}{at}" if port is not None else f"{shown}{at}"


def _request(fields: Mapping[str, object]) -> str:
    return " ".join(_value(fields[key]) for key in ("method", "path") if fields.get(key) is not None)


def _rule(fields: Mapping[str, object]) -> str:
    return "" if fields.get("rule") is None else f"[{_value(fields['rule'])}]"


def _ending(fields: Mapping[str, object]) -> list[str]:
    parts = [f"{key}={_value(fields[key])}" for key in ("status", "error") if fields.get(key) is not None]
    parts += [f"in={_text(fields, 'bytes_in')}", f"out={_text(fields, 'bytes_out')}"]
    seconds = fields.get("duration_seconds")
    return [*parts, f"{seconds:.3f}s"] if isinstance(seconds, float) else parts


def _json(value: object) -> str:
    """JSON of printable ASCII. The file's own lines need not be: JSON lets DEL and all beyond ASCII stand as it is."""
    try:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("\x7f", "\\u007f")
    except (ValueError, RecursionError):
        return '"(too deep or too large to show)"'


def _say(stream: TextIO, text: str) -> None:
    """Print one line whatever the stream's encoding: a terminal in an ASCII locale gets escapes, never a traceback."""
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _path(file: Path | None) -> Path:
    return file if file is not None else audit_path()


def _fail(error: Exception) -> None:
    """Say what is wrong, and end with the status for it."""
    text = "\n".join(clean_text(line, 4096) for line in str(error).splitlines())
    _say(sys.stderr, f"error: {text}")
    raise typer.Exit(EXIT_UNREADABLE)
