"""The service as a process: from its start, over reloads, to its end.

Theory of operation. The socket is bound first, so that a second server is told before anything is started. Then come
the executor (with launcher and proxy), the service, MCP and the application; when all of it is there, the socket
listens and one line on standard output says where. SIGHUP and changes of the policy file put the new policy in force,
or leave the old one and say why. SIGTERM and SIGINT drain: nothing more is begun (503), what runs may end within
`drain_seconds`, and is cancelled then; a second signal does not wait. While it drains, the service still answers
questions. Then connections end, the service, and the executor with its processes.

Owns: that order. Must not: answer requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sandbox.executor import Executor
from sandbox.policy_file import LoadedPolicy, load_policy
from sandbox.policy_watch import PolicyWatch
from sandbox.service.address import Address, Bound
from sandbox.service.app import Guest, build_app, visits_of
from sandbox.service.auth import Door
from sandbox.service.connections import KEEP_ALIVE_SECONDS, MAX_HEAD_BYTES, Connection
from sandbox.service.listening import Listener
from sandbox.service.mcp_http import mcp_asgi
from sandbox.service.metrics import Metrics
from sandbox.service.places import Places
from sandbox.service.readiness import Inspection
from sandbox.service.reloads import Reloads
from sandbox.service.service import Service
from sandbox.service.supervisor import READY, STOPPING, notify
from sandbox.settings import Settings

_CLOSE_SECONDS = 5  # for answers that are being sent when all calls have ended
_log = logging.getLogger("sluicegate.service")


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator chooses of a service."""

    policy: Path
    address: Address
    settings: Settings = field(default_factory=Settings)
    drain_seconds: float = 30.0


async def serve(options: Options, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `say` is told where it listens, once it does.

    Raises `InvalidPolicy`, `InvalidSettings`, `CannotListen`, and what the executor's start raises.
    """
    loaded = load_policy(options.policy)
    options.address.check(loaded)
    door = options.address.door()
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    with Signals() as signals:
        try:
            with options.address.bound() as bound:
                async with _running(options, loaded, door, bound, signals) as running:
                    policy = loaded.policy.name
                    _log.info("policy `%s`, `%s`, in `%s`", policy, loaded.digest, options.settings.state_dir)
                    say(f"listening on {bound.name}")
                    notify(READY)
                    signals.started()
                    await running.end_when_told(signals, options.drain_seconds)
        except asyncio.CancelledError:
            if not signals.stop.is_set():
                raise  # else a signal broke the start off
    _log.info("ended")


class Signals:
    """What this process is told from outside. `stop` is set by the first signal, `now` by a second one."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self.on_hangup: Callable[[], None] | None = None
        self._starting = asyncio.current_task()

    def started(self) -> None:
        """From now on a signal begins the end; before, it breaks the start off."""
        self._starting = None

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    def _end(self, number: int) -> None:
        if self.stop.is_set():
            self.now.set()
            return
        _log.info("%s: nothing more is begun", signal.Signals(number).name)
        notify(STOPPING)
        self.stop.set()
        if self._starting is not None:
            self._starting.cancel()

    def _hang_up(self) -> None:
        if self.on_hangup is not None:
            self.on_hangup()


@dataclass(frozen=True, slots=True)
class _Running:
    """A service that runs, to be ended."""

    service: Service
    server: HttpServer
    serving: asyncio.Task[None]
    mcp: Guest
    sessions: contextlib.AsyncExitStack

    async def end_when_told(self, signals: Signals, drain_seconds: float) -> None:
        """Wait for a signal, let what runs end, or end it, and then the connections."""
        await _first(signals.stop.wait(), self.serving)
        if self.serving.done():
            self.serving.result()
            raise RuntimeError("the HTTP server ended by itself")
        draining = asyncio.create_task(self.service.drain(drain_seconds))
        await _first(draining, signals.now.wait())
        if not draining.done():
            _log.warning("a second signal: what runs is cancelled")
            draining.cancel()
            await asyncio.wait({draining})
            await self.service.drain(0)
            self.server.force_exit = True
        self.mcp.open = False
        await self.sessions.aclose()  # else their streams would be waited for
        self.server.should_exit = True
        await self.serving


async def _first(*works: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Return when the first is done. Tasks that were given run on."""
    own = [asyncio.ensure_future(work) for work in works if not isinstance(work, asyncio.Task)]
    try:
        await asyncio.wait({*own, *(w for w in works if isinstance(w, asyncio.Task))}, return_when="FIRST_COMPLETED")
    finally:
        for work in own:
            work.cancel()


@contextlib.asynccontextmanager
async def _running(
    options: Options, loaded: LoadedPolicy, door: Door, bound: Bound, signals: Signals
) -> AsyncIterator[_Running]:  # fmt: skip
    """Everything, started in its order; what is left when this ends, ends in the other."""
    metrics, address = Metrics(), options.address
    places = Places(loaded.policy.service.max_connections, trusting=not loaded.policy.tenants)
    protected = [path for path in (address.uds, *(address.tls or ())) if path is not None]
    async with (
        Executor(loaded, settings=options.settings) as executor,
        Service(executor, protected=protected, observer=metrics) as service,
        Inspection(service, options.policy) as inspection,
    ):
        if executor.lost:
            _log.warning("calls that were lost with the service before this one: %d", len(executor.lost))
        metrics.watch(lambda: _gauges(service, places), lambda: service.loaded)
        mcp = mcp_asgi(service)
        guest = Guest("/mcp", mcp)
        visits = visits_of(service)
        app = build_app(
            service, ready=inspection.readiness, metrics=metrics, door=door, guests=[guest], visits=visits
        )  # fmt: skip

        def loaded_anew(policy: LoadedPolicy) -> None:
            places.most = policy.policy.service.max_connections
            places.trusting = not policy.policy.tenants  # over TCP there are some
            mcp.recheck()
            visits.recheck()

        watch = PolicyWatch(options.policy, loaded)
        reloads = Reloads(watch, service, metrics, check=address.check, loaded=loaded_anew)
        signals.on_hangup = reloads.ask
        async with contextlib.AsyncExitStack() as sessions:
            await sessions.enter_async_context(mcp.run())
            server = HttpServer(app, bound, places)
            serving, reloading = asyncio.create_task(server.serve()), asyncio.create_task(reloads.follow())
            try:
                yield _Running(service, server, serving, guest, sessions)
            finally:
                reloading.cancel()
                server.should_exit = server.force_exit = True
                await asyncio.wait({serving, reloading})


def _gauges(service: Service, places: Places) -> Iterator[tuple[str, str, float]]:
    waiting, running = service.open_calls
    executor = service.executor
    yield "calls_waiting", "Calls that wait for their turn.", waiting
    yield "calls_running", "Calls that are worked on.", running
    yield "connections", "Connections that are open.", places.taken
    yield "connections_refused", "Connections that were one too many, since the start.", places.refused
    yield "connections_displaced", "Connections that made room for a newer one, since the start.", places.displaced
    yield "launcher_up", "1 while there is a launcher.", executor.launcher_pid is not None
    yield "proxy_up", "1 while there is a proxy.", executor.proxy_pid is not None
    yield "draining", "1 while nothing is begun any more.", service.draining


class HttpServer(uvicorn.Server):
    """uvicorn, with our connections, at our socket, and with nothing to say about signals."""

    def __init__(self, app: ASGIApp, bound: Bound, places: Places) -> None:
        """Listens from now on. Raises `CannotListen`."""
        config = uvicorn.Config(
            app, lifespan="off", ws="none", interface="asgi3", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=_CLOSE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )  # fmt: skip
        super().__init__(config)
        self._listener = Listener(
            bound.socket, bound.tls, places, lambda place: Connection(config, self.server_state, place)
        )  # fmt: skip
        self._listener.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [self._listener]  # type: ignore[list-item]  # only `close` and `wait_closed` are asked of it
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
