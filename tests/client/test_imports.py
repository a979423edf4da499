"""An agent host that speaks to the service loads no part of what runs calls."""

from __future__ import annotations

import subprocess
import sys

_PRINT = "import sys, sandbox.client; print(*sys.modules)"
OURS = {
    "proxy", "proxy.destinations", "sandbox", "sandbox.call_parsing", "sandbox.code_exec", "sandbox.contract",
    "sandbox.service", "sandbox.service.model", "sandbox.state",
}  # fmt: skip
HEAVY = {"cryptography", "fastapi", "h2", "mcp", "mitmproxy", "ruamel", "sqlalchemy", "starlette", "typer", "uvicorn"}


def test_the_client_loads_the_models_and_httpx_and_no_more() -> None:
    done = subprocess.run([sys.executable, "-c", _PRINT], capture_output=True, text=True, check=True, timeout=60)
    modules = set(done.stdout.split())
    assert "httpx" in modules
    ours = {name for name in modules if name.partition(".")[0] in ("proxy", "sandbox")}
    assert {name for name in ours if not name.startswith("sandbox.client")} == OURS
    assert modules & HEAVY == set()
