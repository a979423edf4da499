"""`sluicegate packages list`, `show` and `prune`: the store of prepared packages. An edge.

Exit status: 0; 1 a snapshot is not there; 2 the arguments are none.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, NoReturn

import typer

from sandbox.packages.manifest import Artifact
from sandbox.packages.store import DEFAULT_BUDGET_BYTES, SnapshotEntry, Store, store_directory
from sandbox.state import InvalidSettings, state_dir

EXIT_MISSING = 1
EXIT_INVALID = 2
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SPANS = {"m": 60, "h": 3600, "d": 86_400}
_ID_SHOWN = 16

AsJson = Annotated[bool, typer.Option("--json", help="The answer as a JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the three commands to `sluicegate packages`."""
    app.command("list")(list_command)
    app.command("show")(show_command)
    app.command("prune")(prune_command)


def list_command(as_json: AsJson = False) -> None:
    """List the snapshots, the one used last first."""
    store = _store()
    entries = store.entries()
    if as_json:
        _say(json.dumps({"size_bytes": store.size_bytes(), "snapshots": [_as_json(one) for one in entries]}, indent=2))
        return
    for entry in entries:
        asked = " ".join(sorted(f"{one.name}@{one.version}" for one in entry.manifest.artifacts if one.requested))
        used = entry.last_used_at.strftime("%Y-%m-%d %H:%M")
        state_text = "in use" if entry.in_use else "      "
        _say(f"{entry.id[:_ID_SHOWN]}  {used}  {state_text}  {_size(entry.manifest.bytes):>8}  {asked}")
    _say(f"{len(entries)} snapshots, {_size(store.size_bytes())} on disk")


def show_command(
    snapshot: Annotated[str, typer.Argument(help="The snapshot's id, or how it begins.")],
    as_json: AsJson = False,
) -> None:
    """Show what is in a snapshot: every package, its file and its digest."""
    found = [entry for entry in _store().entries() if entry.id.startswith(snapshot)]
    if len(found) != 1 or not snapshot:
        what = "there is no snapshot" if not found else f"there are {len(found)} snapshots"
        _fail(
            f"{what} whose id begins with `{ascii(snapshot)[1:-1][:64]}`\nhint: see `sluicegate packages list`",
            EXIT_MISSING,
        )
    [entry] = found
    if as_json:
        _say(entry.manifest.model_dump_json(indent=2))
        return
    manifest = entry.manifest
    _say(f"{entry.id}\n{manifest.ecosystem.language}, {manifest.platform}, made {manifest.created_at:%Y-%m-%d %H:%M}")
    for one in manifest.artifacts:
        _say(_line(one))


def prune_command(
    budget: Annotated[
        str, typer.Option("--budget", metavar="SIZE", help="What the store may hold, such as `5G`; `0` removes all.")
    ] = f"{DEFAULT_BUDGET_BYTES // 10**9}G",
    unused: Annotated[
        str | None, typer.Option("--unused", metavar="TIME", help="Also what was not used for so long, such as `30d`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the snapshots that were not used for longest, until the rest is within the budget. Those in use stay."""
    since = None if unused is None else datetime.now(UTC) - timedelta(seconds=_span(unused))
    pruned = _store().prune(_bytes(budget), unused_since=since)
    if as_json:
        _say(
            json.dumps(
                {
                    "snapshots": pruned.snapshots,
                    "artifacts": pruned.artifacts,
                    "freed_bytes": pruned.freed_bytes,
                    "left_bytes": pruned.left_bytes,
                },
                indent=2,
            )
        )
        return
    _say(
        f"removed {len(pruned.snapshots)} snapshots and {pruned.artifacts} unpacked packages, "
        f"{_size(pruned.freed_bytes)}; {_size(pruned.left_bytes)} are left"
    )


def _store() -> Store:
    try:
        return Store(store_directory(state_dir()))
    except InvalidSettings as error:
        _fail(str(error), EXIT_INVALID)
    except OSError as error:
        _fail(f"the store of packages cannot be opened: {error}", EXIT_INVALID)


def _as_json(entry: SnapshotEntry) -> dict[str, object]:
    return {
        "id": entry.id,
        "language": entry.manifest.ecosystem.language,
        "last_used_at": entry.last_used_at.isoformat(),
        "in_use": entry.in_use,
        "bytes": entry.manifest.bytes,
        "files": entry.manifest.files,
        "packages": [
            {"name": one.name, "version": one.version, "requested": one.requested} for one in entry.manifest.artifacts
        ],
    }


def _line(one: Artifact) -> str:
    notes = [*one.contents.notes, *(f"{finding.reason}: {finding.detail}" for finding in one.contents.findings)]
    if one.contents.install_scripts:
        notes.append(f"has install scripts, which were not run: {', '.join(one.contents.install_scripts)}")
    head = f"{'' if one.requested else '  '}{one.name} {one.version}  {one.filename}  {one.algorithm}:{one.digest}"
    return "\n".join([head, *(f"      {note}" for note in notes)])


def _size(size_bytes: int) -> str:
    for unit in ("T", "G", "M", "K"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.1f} {unit}B"
    return f"{size_bytes} B"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)B?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        _fail(
            f"`{ascii(text)[1:-1][:40]}` is no size\nhint: write a number with K, M, G or T, such as `5G`", EXIT_INVALID
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def _span(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([mhd])", text, re.ASCII)
    if match is None:
        _fail(
            f"`{ascii(text)[1:-1][:40]}` is no time\nhint: write a number with m, h or d, such as `30d`", EXIT_INVALID
        )
    return int(match[1]) * _SPANS[match[2]]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _fail(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"sluicegate: {message}\n")
    raise typer.Exit(status)
