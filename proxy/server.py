"""The proxy process: mitmproxy embedded, attempts attached and detached over an inherited socket.

Started by the executor as `python -m proxy.server FD`. It ends when the socket does, whatever happened to the other
side; with it go all connections, and since nothing else can reach out of a sandbox, no attempt has network then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from proxy.audit import AuditLog, AuditUnavailable
from proxy.authority import AuthorityUnavailable, ensure_authority
from proxy.channel import Channel, ChannelClosed, Message
from proxy.control import ProxyConfig
from proxy.events import AttemptEvent, ProxyEvent
from proxy.network import Grant
from proxy.resolver import Lookup, PinnedLoop, Resolver, system_lookup

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005  # the loop serves everybody: pages that are read on threads meanwhile must not hold it up
_CERTIFICATES_KEPT = 2000
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_LAST_CAPABILITY = 63


class _Served:
    """One attached attempt: its state and the servers on its listeners."""

    def __init__(self, attempt: Any, servers: list[Any], datagrams: list[Any], started: float) -> None:
        self.attempt = attempt
        self.servers = servers
        self.datagrams = datagrams
        self.started = started

    async def stop(self) -> None:
        self.attempt.over = True
        for datagram in self.datagrams:
            datagram.close()
        await asyncio.gather(*(server._stop() for server in self.servers))


class Server:
    """Serves the control channel."""

    def __init__(self, link: Channel, config: ProxyConfig, audit: AuditLog, lookup: Lookup) -> None:
        # mitmproxy takes half a second to import; the certificate authority is announced before that
        from proxy import embedding

        self._link = link
        self._audit = audit
        self._served: dict[str, _Served] = {}
        self._resolver = Resolver(lookup)
        self._mitmproxy = embedding.Embedding(config, self._resolver, _CERTIFICATES_KEPT)

    async def serve(self) -> None:
        """Handle messages until the channel closes. None waits for another: the end of an attempt may take a while."""
        answering: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.create_task(self._answer(*await self._link.receive()), name="control message")
                answering.add(task)
                task.add_done_callback(answering.discard)
        except ChannelClosed:
            pass
        finally:
            for task in answering:
                task.cancel()
            for served in list(self._served.values()):
                await served.stop()
            self._mitmproxy.close()
            self._resolver.close()

    async def _answer(self, message: Message, fds: list[int]) -> None:
        with contextlib.suppress(ChannelClosed):  # `serve` learns of it as well
            await self._link.send(await self._handle(message, fds))

    async def _handle(self, message: Message, fds: list[int]) -> Message:
        reply: Message = {"type": "reply", "id": message.get("id")}
        try:
            match message.get("type"):
                case "attach":
                    taken, fds = fds, []
                    await self._attach(message, taken)
                case "amend":
                    reply["attached"] = await self._amend(message)
                case "detach":
                    reply |= await self._detach(message)
                case "facts":
                    grant = Grant.model_validate_json(_json(message["grant"]))
                    wanted = message["wanted"]
                    assert isinstance(wanted, dict)
                    reply["pages"] = self._mitmproxy.facts(grant, str(message["registry"]), wanted)
                case other:
                    reply["error"] = f"`{other}` is not a message"
        except AuditUnavailable as error:
            reply["error"] = f"the audit log cannot be written: {error}"
        except Exception as error:  # the edge: the executor is told, and other attempts are served on
            logger.exception("a control message failed")
            reply["error"] = f"{type(error).__name__}: {error}"
        finally:
            for fd in fds:
                os.close(fd)
        return reply

    async def _attach(self, message: Message, fds: list[int]) -> None:
        sockets: list[socket.socket] = []
        try:
            for place, fd in enumerate(fds):
                try:
                    sockets.append(socket.socket(fileno=fd))
                except OSError:
                    for rest in fds[place:]:
                        os.close(rest)
                    raise
            grant = Grant.model_validate_json(_json(message["grant"]))
            if grant.attempt_id in self._served:
                raise ValueError(f"attempt `{grant.attempt_id}` is attached already")
            kinds = message["kinds"]
            assert isinstance(kinds, list)
            domains = message["domains"]
            self._audit.write(
                AttemptEvent(
                    time=time.time(), call_id=grant.call_id, attempt_id=grant.attempt_id, tenant=grant.tenant,
                    phase="start", mode=grant.mode.value, language=str(message["language"]),
                    domains=tuple(str(d) for d in domains) if isinstance(domains, list) else None,
                    policy_name=grant.policy_name, policy_digest=grant.policy_digest,
                )
            )  # fmt: skip
            attempt, servers, datagrams = await self._mitmproxy.serve(
                grant, self._audit, [(str(kind), sock) for kind, sock in zip(kinds, sockets, strict=True)]
            )
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        self._served[grant.attempt_id] = _Served(attempt, servers, datagrams, time.monotonic())

    async def _amend(self, message: Message) -> bool:
        """Whether the attempt is attached. Where its new grant can't be had from the message, it has none any more."""
        served = self._served.get(str(message.get("attempt_id")))
        if served is None:
            return False
        try:
            given = message["grant"]
            grant = None if given is None else Grant.model_validate_json(_json(given))
            await self._mitmproxy.amend(served.attempt, grant)
        except BaseException:
            self._mitmproxy.revoke(served.attempt)
            raise
        return True

    async def _detach(self, message: Message) -> Message:
        served = self._served.pop(str(message.get("attempt_id")), None)
        if served is None:  # as when it could not be attached
            return {"error": "no such attempt is attached"}
        await served.stop()
        attempt, grant = served.attempt, served.attempt.standing.told
        exit_code, duration = message["exit_code"], message["duration_seconds"]
        self._audit.write(
            AttemptEvent(
                time=time.time(), call_id=grant.call_id, attempt_id=grant.attempt_id, tenant=grant.tenant, phase="end",
                mode=grant.mode.value, status=str(message["status"]), cause=str(message["cause"]),
                exit_code=exit_code if isinstance(exit_code, int) else None,
                duration_seconds=float(duration) if isinstance(duration, (int, float)) else None,
                allowed=attempt.allowed, denied=attempt.denied,
                policy_name=grant.policy_name, policy_digest=grant.policy_digest,
            )
        )  # fmt: skip
        return {"allowed": attempt.allowed, "denied": attempt.denied, "destinations": attempt.destinations()}


def _json(value: object) -> str:
    import json

    return json.dumps(value)


def _confine() -> None:
    """Give up what a proxy never needs: core dumps, being traced, and, where it has any, capabilities to regain.

    As root the process stays root, since the authority and the log are root's files, but without capabilities.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.geteuid() == 0:
        for capability in range(_LAST_CAPABILITY + 1):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        none = (ctypes.c_uint32 * 6)()
        if libc.capset(header, none) != 0:
            raise OSError(ctypes.get_errno(), "the proxy could not drop its capabilities")


class _RootsUnavailable(Exception):
    """The certificates that upstream servers are verified with cannot be read."""


def _check_roots(path: Path | None) -> None:
    """Told at the start: later it would be a fault at every connection. Raises `_RootsUnavailable`."""
    if path is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # `SSLError` is one
        raise _RootsUnavailable(f"the upstream certificates in `{path}` cannot be read: {error}") from error


async def _run(sock: socket.socket, lookup: Lookup) -> None:
    link = Channel(sock)
    try:
        message, _ = await link.receive()
        config = ProxyConfig.from_message(message)
        try:
            _check_roots(config.upstream_ca_file)
            certificate = ensure_authority(config.authority_dir)
            await link.send({"type": "authority", "certificate": str(certificate)})
            with AuditLog(config.audit_path) as audit:
                audit.write(ProxyEvent(time=time.time(), what="start", detail=f"pid {os.getpid()}"))
                server = Server(link, config, audit, lookup)
                await link.send({"type": "ready"})
                await server.serve()
                with contextlib.suppress(AuditUnavailable):
                    audit.write(ProxyEvent(time=time.time(), what="stop", detail=f"pid {os.getpid()}"))
        except (AuthorityUnavailable, _RootsUnavailable) as error:
            await link.send({"type": "failed", "error": str(error)})
        except AuditUnavailable as error:
            await link.send({"type": "failed", "error": f"the audit log cannot be written: {error}"})
    except ChannelClosed:
        pass


def main(argv: list[str] | None = None, *, lookup: Lookup = system_lookup) -> NoReturn:
    """Run until the control socket closes, and end the process. `lookup` replaces the host's resolver, for tests."""
    arguments = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, format="sluicegate proxy: %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the executor decides when the proxy ends
    os.umask(0o077)  # whatever the caller's is: what is made here is the authority and the log
    sock = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(sock.fileno(), False)
    _confine()
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=PinnedLoop) as runner:
        runner.run(_run(sock, lookup))
    logging.shutdown()
    os._exit(0)  # an ordinary exit would wait for look-ups, and one can hang in the C library for as long as it likes


if __name__ == "__main__":
    main()
