"""`sluicegate mcp`: the tools over standard input and output, for one client that starts the command.

Exit status: 0 when the client is done, 2 when the policy or the arguments are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sandbox.executor import Executor
from sandbox.owners import DEFAULT_USER, Caller
from sandbox.passthrough import printable
from sandbox.policy_file import InvalidPolicy, LoadedPolicy, default_policy_path, load_policy
from sandbox.run_commands import EXIT_INVALID, POLICY_HELP
from sandbox.settings import Settings
from sandbox.state import InvalidSettings
from sandbox.tenants import tenant_named

if TYPE_CHECKING:
    from sandbox.service.service import Service

_WORKING_DIR_HELP = "where `code_exec` works; the current directory otherwise"
_TENANT_HELP = "whose calls these are, where the policy has tenants"


def mcp(
    policy: Annotated[Path | None, typer.Option(help=POLICY_HELP)] = None,
    working_dir: Annotated[Path | None, typer.Option(help=_WORKING_DIR_HELP)] = None,
    tenant: Annotated[str | None, typer.Option(help=_TENANT_HELP)] = None,
) -> None:
    """Serve the tools to one MCP client, over standard input and output."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="sluicegate: %(message)s")
    try:
        loaded = load_policy(policy or default_policy_path())
        name = _tenant(loaded, tenant)
        directory = _directory(working_dir)
        settings = Settings()
    except (InvalidPolicy, InvalidSettings) as error:
        _fail(str(error))
    caller = Caller(name, DEFAULT_USER, admin=True, directory=directory)
    asyncio.run(_serve(loaded, settings, caller, chosen=working_dir is not None))


def _tenant(loaded: LoadedPolicy, name: str | None) -> str:
    """Whose calls these are. Raises `InvalidSettings`."""
    known = ", ".join(f"`{tenant.name}`" for tenant in loaded.policy.tenants)
    if name is None:
        if known:
            raise InvalidSettings(f"the policy has tenants\nhint: say whose calls these are: `--tenant` with {known}")
        return ""
    if tenant_named(loaded, name) is None:
        hint = f"give one of {known}" if known else "leave out `--tenant`: the policy has none"
        raise InvalidSettings(f"the policy has no tenant `{printable(name[:80])}`\nhint: {hint}")
    return name


def _directory(given: Path | None) -> Path:
    """Where the client works. Raises `InvalidSettings` for what is no directory."""
    try:
        place = (given or Path()).absolute()
    except FileNotFoundError as error:
        raise InvalidSettings("the current directory is gone\nhint: give `--working-dir DIR`") from error
    if not place.is_dir():
        raise InvalidSettings(f"`{printable(str(place))}` is no directory\nhint: give another by `--working-dir`")
    return place


async def _serve(loaded: LoadedPolicy, settings: Settings, caller: Caller, *, chosen: bool) -> None:
    from sandbox.service.mcp_local import LocalService, diverted, end_on_signals

    ended = asyncio.Event()
    with end_on_signals(ended), diverted() as (source, target):
        async with LocalService(lambda: _service(loaded, settings, caller, chosen=chosen), _say) as local:
            await asyncio.to_thread(importlib.import_module, "sandbox.service.mcp_server")  # takes as long as the start
            from sandbox.service.mcp_server import make_server
            from sandbox.service.mcp_stdio import serve_stdio

            await serve_stdio(make_server(local.get, lambda _: caller), source, target, ended)


@contextlib.asynccontextmanager
async def _service(
    loaded: LoadedPolicy, settings: Settings, caller: Caller, *, chosen: bool
) -> AsyncIterator[Service]:  # fmt: skip
    """The service of one client. Where the current directory is none that code may have, and no other was chosen, the
    client's own directory in the state directory takes its place, and every answer says so.
    """
    from sandbox.service.service import Service

    async with Executor(loaded, settings=settings) as executor:
        async with contextlib.AsyncExitStack() as stack:
            try:
                service = await stack.enter_async_context(Service(executor, local_directory=caller.directory))
            except InvalidSettings as error:
                if chosen:
                    raise
                _say(f"{error}\nhint: until then `code_exec` works in a directory of its own")
                service = await stack.enter_async_context(Service(executor))
            yield service


def _say(text: str) -> None:
    typer.echo(f"sluicegate: {text}", err=True)


def _fail(text: str) -> NoReturn:
    _say(text)
    raise typer.Exit(EXIT_INVALID)
