"""The executor's side: what the proxy says reaches the caller, and a proxy that ends or fails is told as that."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from proxy import control
from proxy.control import AttemptEnd, AttemptStart, Proxy, ProxyConfig, ProxyUnavailable
from proxy.network import Mode
from tests.proxy.rig import Peers, Rig, ask, get, grant, rule

END = AttemptEnd("success", "exit", 0, 1.0)


def config(directory: Path) -> ProxyConfig:
    return ProxyConfig(directory / "authority", directory / "audit.jsonl")


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


class TestStarting:
    def test_the_certificate_is_there_before_the_proxy_is_ready(self, tmp_path: Path) -> None:
        async def work() -> None:
            proxy = await Proxy.start(config(tmp_path))
            certificate = await proxy.certificate()
            assert certificate.read_text().startswith("-----BEGIN CERTIFICATE-----")
            await proxy.ready()
            await proxy.close()

        run(work)

    def test_a_config_survives_its_message(self, tmp_path: Path) -> None:
        for ca_file in (None, tmp_path / "ca.pem"):
            one = ProxyConfig(tmp_path / "a", tmp_path / "b", ca_file)
            assert ProxyConfig.from_message(one.to_message()) == one

    @pytest.mark.parametrize(
        "command", [("/nonexistent",), ("false",), ("true",), (sys.executable, "-c", "raise SystemExit(3)")]
    )
    def test_a_proxy_that_does_not_start_is_told(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        async def start() -> None:
            proxy = await Proxy.start(config(tmp_path), command=command)
            try:
                await proxy.ready()
            finally:
                await proxy.close()

        with pytest.raises(ProxyUnavailable):
            run(start)

    def test_why_it_does_not_start_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "audit.jsonl").mkdir()

        async def work() -> None:
            proxy = await Proxy.start(config(tmp_path))
            with pytest.raises(ProxyUnavailable, match="audit log"):
                await proxy.ready()
            await proxy.close()

        run(work)


class TestRunning:
    def test_counts_come_with_the_end(self, rig: Rig, peers: Peers) -> None:
        attempt = rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts))
        for name in ("allowed.test", "other.test", "other.test"):
            ask(attempt.explicit(), get(name, target=f"http://{name}/"))
        counts = attempt.end()
        assert (counts.allowed, counts.denied) == (1, 2)
        assert counts.destinations == [
            {"host": "other.test", "port": 80, "decision": "deny", "reason": "host_not_allowed", "count": 2},
            {"host": "allowed.test", "port": 80, "decision": "allow", "reason": "allowed", "count": 1},
        ]

    def test_start_and_end_are_in_the_log(self, rig: Rig) -> None:
        attempt = rig.explicit(grant(mode=Mode.BLOCK_ALL))
        attempt.end()
        start, end = attempt.events(event="attempt")
        assert (start["phase"], start["mode"], start["language"]) == ("start", "block-all", "python")
        assert (end["phase"], end["status"], end["cause"], end["exit_code"]) == ("end", "success", "exit", 0)

    def test_a_large_grant_arrives(self, rig: Rig, peers: Peers) -> None:
        rules = [rule(f"n{number}.test") for number in range(5000)]
        with rig.explicit(grant(*rules, rule("allowed.test"), hosts=peers.hosts)) as attempt:
            assert ask(attempt.explicit(), get("allowed.test", target="http://allowed.test/")).status == 200

    def test_many_requests_at_once_are_each_answered(self, rig: Rig) -> None:
        grants = [grant(mode=Mode.BLOCK_ALL) for _ in range(40)]

        async def work() -> None:
            async def one(number: int) -> None:
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    await rig.proxy.attach(grants[number], [("explicit", listener)], AttemptStart("python", None))
                counts = await rig.proxy.detach(grants[number].attempt_id, END)
                assert (counts.allowed, counts.denied) == (0, 0)

            await asyncio.gather(*(one(number) for number in range(40)))

        rig.call(work())

    def test_an_error_of_the_proxys_is_told(self, rig: Rig) -> None:
        with pytest.raises(ProxyUnavailable, match="refused `detach`"):
            rig.call(rig.proxy.detach("unknown", END))


class TestLosing:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_proxy_that_is_killed_is_lost_at_once(
        self, directory: Path, peers: Peers, number: signal.Signals
    ) -> None:
        own = Rig(directory / number.name, peers.ca_file)
        attempt = own.explicit(grant(rule("allowed.test"), hosts=peers.hosts))
        sock = attempt.explicit()
        assert ask(sock, get("allowed.test", target="http://allowed.test/")).status == 200
        os.kill(own.proxy.pid, number)
        own.call(own.proxy.lost.wait())
        with peers.silence(), pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(sock, get("allowed.test", target="http://allowed.test/"))
        with pytest.raises(ProxyUnavailable, match="ended"):
            attempt.end()
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ProxyUnavailable):
            own.attach(grant(), [("explicit", listener)])
        attempt.close_clients()
        own.close()

    def test_a_request_under_way_is_told_of_the_loss(self, directory: Path, peers: Peers) -> None:
        own = Rig(directory / "stopped", peers.ca_file)
        os.kill(own.proxy.pid, signal.SIGSTOP)

        async def work() -> None:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                attaching = asyncio.create_task(
                    own.proxy.attach(grant(), [("explicit", listener)], AttemptStart("python", None))
                )
                await asyncio.sleep(0)  # it has been sent
                os.kill(own.proxy.pid, signal.SIGKILL)
                with pytest.raises(ProxyUnavailable):
                    await attaching

        own.call(work())
        own.close()


BUSY = """
import time
from proxy import server
attach = server.Server._attach
async def attach_after_much_work(self, message, fds):
    until = time.monotonic() + 4
    while time.monotonic() < until:
        pass
    await attach(self, message, fds)
server.Server._attach = attach_after_much_work
server.main()
"""


class TestPatience:
    """A proxy that is busy is waited for; one that hangs is ended."""

    def test_a_busy_proxy_is_waited_for(self, directory: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "_REPLY_SECONDS", 2.0)
        own = Rig(directory / "busy", peers.ca_file, BUSY)
        with own.explicit(grant(mode=Mode.BLOCK_ALL)) as attempt:
            assert ask(attempt.explicit(), get("other.test", target="http://other.test/")).status == 403
        own.close()

    def test_one_that_hangs_is_ended(self, directory: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "_REPLY_SECONDS", 2.0)
        own = Rig(directory / "hanging", peers.ca_file)
        os.kill(own.proxy.pid, signal.SIGSTOP)
        with pytest.raises(ProxyUnavailable, match="took longer than 2 s to answer `attach`"):
            own.explicit(grant(mode=Mode.BLOCK_ALL))
        assert own.proxy.lost.is_set()
        own.close()
