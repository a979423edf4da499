"""`sluicegate serve`: the service beside an agent host, until a signal ends it.

Exit status: 0 when a signal ended it; 2 when the policy or an option is refused; 3 when it cannot start.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from proxy.control import ProxyUnavailable
from sandbox.isolation.client import IsolationUnavailable
from sandbox.ledger import LedgerUnavailable
from sandbox.policy_file import InvalidPolicy, default_policy_path
from sandbox.run_commands import EXIT_INVALID, EXIT_OUR_FAULT, POLICY_HELP
from sandbox.settings import Settings
from sandbox.state import InvalidSettings, default_socket

_MAX_DRAIN_SECONDS = 3600.0
_DEFAULT: dict[str, Any] = {one.name: one.default for one in fields(Settings)}


def serve(
    policy: Annotated[Path | None, typer.Option(help=POLICY_HELP)] = None,
    uds: Annotated[Path | None, typer.Option(help="the unix socket to listen at; a default one otherwise")] = None,
    host: Annotated[str | None, typer.Option(help="the address to listen at over TCP; needs `tenants`")] = None,
    port: Annotated[int | None, typer.Option(help="its port; 0 for any that is free")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="the certificate, with its chain, in PEM form")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its key")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="a name that clients use in `Host`; repeatable")
    ] = None,
    accept_tokens_in_plaintext: Annotated[
        bool, typer.Option("--accept-tokens-in-plaintext", help="listen beyond loopback without TLS")
    ] = False,
    drain_seconds: Annotated[float, typer.Option(help="how long running calls may take to end")] = 30.0,
    max_concurrency: Annotated[int, typer.Option(help="calls worked on at once")] = _DEFAULT["max_concurrency"],
    max_waiting: Annotated[int, typer.Option(help="calls that wait for their turn")] = _DEFAULT["max_waiting"],
    warm: Annotated[int, typer.Option(help="sandboxes that wait for the next call")] = _DEFAULT["warm_sandboxes"],
    log_json: Annotated[bool, typer.Option("--log-json", help="log JSON lines")] = False,
) -> None:  # fmt: skip
    """Serve calls over HTTP and MCP, on a unix socket or a TCP port."""
    from sandbox.service.address import Address  # takes half a second, which no other command should
    from sandbox.service.listening import CannotListen
    from sandbox.service.logs import log_to_stderr
    from sandbox.service.server import Options
    from sandbox.service.server import serve as serve_until_told

    log_to_stderr(as_json=log_json)
    try:
        if not 0 <= drain_seconds <= _MAX_DRAIN_SECONDS:
            raise InvalidSettings(f"`--drain-seconds` is `{drain_seconds:g}`\nhint: give 0 to {_MAX_DRAIN_SECONDS:g}")
        over_tcp = _over_tcp(uds, host, port, tls_cert, tls_key)
        address = Address(
            uds=None if over_tcp else (uds or default_socket()).absolute(),
            host=host or "127.0.0.1", port=port or 0,
            tls=None if tls_cert is None or tls_key is None else (tls_cert, tls_key),
            allowed_hosts=tuple(allowed_host or ()), accept_tokens_in_plaintext=accept_tokens_in_plaintext,
        )  # fmt: skip
        settings = Settings(max_concurrency=max_concurrency, max_waiting=max_waiting, warm_sandboxes=warm)
        options = Options((policy or default_policy_path()).absolute(), address, settings, drain_seconds)
        asyncio.run(serve_until_told(options, _say))
    except (InvalidPolicy, InvalidSettings) as error:
        _fail(EXIT_INVALID, str(error))
    except (CannotListen, IsolationUnavailable, ProxyUnavailable, LedgerUnavailable) as error:
        _fail(EXIT_OUR_FAULT, str(error))
    except OSError as error:  # such as a state directory that cannot be written
        _fail(EXIT_OUR_FAULT, f"this process cannot start: {error}")


def _over_tcp(
    uds: Path | None, host: str | None, port: int | None, tls_cert: Path | None, tls_key: Path | None
) -> bool:
    """Whether it is to be TCP. Raises `InvalidSettings` for options that exclude one another."""
    over_tcp = host is not None or port is not None
    if over_tcp and uds is not None:
        raise InvalidSettings("`--uds` and `--host` or `--port` are two places\nhint: start one service for each")
    if (tls_cert is None) != (tls_key is None):
        raise InvalidSettings("TLS needs `--tls-cert` and `--tls-key`\nhint: give both")
    if tls_cert is not None and not over_tcp:
        raise InvalidSettings("TLS is for TCP\nhint: give `--host` and `--port`")
    if over_tcp and not 0 <= (port or 0) <= 65_535:
        raise InvalidSettings(f"`--port` is `{port}`\nhint: give 0 to 65535")
    return over_tcp


def _say(text: str) -> None:
    typer.echo(text)


def _fail(status: int, text: str) -> NoReturn:
    typer.echo(f"sluicegate: {text}", err=True)
    raise typer.Exit(status)
