"""`make run`: one guarded attempt that tries an allowed and several denied things, and what the log says of it.

The registry's index is not named here: it is the one that the host's own client is configured for.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from proxy.audit_reader import Line, read
from sandbox import CodeCall, Settings, Status, SyncExecutor, ToolResult
from sandbox.policy_file import default_policy_path, load_policy
from sandbox.registries import python_client_facts

CODE = """\
import os, socket, urllib.error, urllib.request

def attempt(what, act):
    try:
        print(f"{what:34} ->", act())
    except urllib.error.HTTPError as error:
        print(f"{what:34} -> {error.code}", error.reason.removeprefix('Blocked by sluicegate: ')[:74])
    except OSError as error:
        print(f"{what:34} -> {type(error).__name__}: {str(error)[:70]}")

def get(url, **options):
    request = urllib.request.Request(url, headers={"Accept": "text/html"}, **options)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return f"{answer.status}, {len(answer.read())} bytes"

def raw(host, port):
    with socket.create_connection((host, port), 5) as s:
        s.sendall(b"secret")
        return s.recv(1) or "closed by the other side"

index = os.environ["INDEX_URL"]
attempt("GET an index page", lambda: get(index + "six/"))
attempt("POST to the index", lambda: get(index, data=b"secret"))
attempt("GET another host", lambda: get("https://example.com/?secret"))
attempt("the cloud's metadata service", lambda: get("http://169.254.169.254/"))
attempt("a name with a secret in it", lambda: socket.getaddrinfo("secret.example.com", 443))
attempt("raw TCP to a private address", lambda: raw("10.0.0.1", 22))
attempt("a file of the host", lambda: open("/etc/shadow").read())
"""

_COLUMNS = {"time": 12, "layer": 10, "verdict": 9, "destination": 28, "request": 18, "reason": 18, "rule": 24}


def main() -> int:
    console = Console(width=120)
    policy = load_policy(default_policy_path())
    index = python_client_facts().index.rstrip("/") + "/"
    with tempfile.TemporaryDirectory(prefix="sluicegate-demo-") as directory:
        log = Path(directory) / "audit.jsonl"
        console.rule("the code")
        console.print(Syntax(CODE, "python", background_color="default"))
        with SyncExecutor(policy, settings=Settings(audit_log=log)) as executor:
            result = executor.run(
                CodeCall(language="python", code=CODE, allow_network=True, env={"INDEX_URL": index}, timeout=60)
            )
        console.rule("its output")
        console.print(Text(result.stdout + result.stderr))
        console.rule("the result")
        console.print(_summary(result))
        console.rule("the audit log, one event a row")
        console.print(_events(log, result.call_id))
    fetched = result.network.allowed >= 1 and "-> 200" in result.stdout
    contained = result.stdout.count("-> ") == 7 and result.stdout.count("-> 200") == 1
    if result.status is Status.SUCCESS and fetched and contained:
        console.print("The index page was fetched. Everything else was refused, and the log says why.")
        return 0
    console.print(
        "[bold]Not as it should be:[/bold] `sluicegate doctor` checks this host; the rows above say what was decided."
    )
    return 1


def _summary(result: ToolResult) -> Text:
    usage = result.usage
    memory = "?" if usage.peak_memory_bytes is None else f"{usage.peak_memory_bytes / 2**20:.0f} MiB"
    failure = f"\n{result.error.code}: {result.error.message}" if result.error is not None else ""
    return Text(
        f"status {result.status}, exit code {result.exit_code}, {usage.wall_seconds:.2f} s, peak memory {memory}; "
        f"network {result.network.mode}: {result.network.allowed} allowed, {result.network.denied} denied" + failure
    )


def _events(log: Path, call_id: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column, width in _COLUMNS.items():
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=width)
    for line in read(log, call_id=call_id):
        if not isinstance(line, Line):
            continue
        fields = {name: "" if value is None else str(value) for name, value in line.fields.items()}
        kind = fields["event"]
        verdict = {"decision": "decision", "connection": "outcome", "attempt": "phase"}.get(kind, "what")
        port = f":{fields['port']}" if fields.get("port") else ""
        table.add_row(
            fields["time"][11:23], fields.get("layer") or kind, fields.get(verdict, ""),
            Text(fields.get("host", "") + port), Text(f"{fields.get('method', '')} {fields.get('path', '')}".strip()),
            fields.get("reason") or fields.get("status", ""), Text(fields.get("rule", "")),
            style="red" if fields.get("decision") == "deny" else "",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
