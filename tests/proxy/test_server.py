"""The proxy process: what it gives up, what it answers to nonsense, and that it ends with the executor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy import channel
from proxy.channel import ChannelClosed, Message
from proxy.network import Grant, Mode
from tests.proxy.rig import PATIENCE, Peers, Rig, ask, get, grant, is_cut, rule, tcp_rule
from tests.servers import BannerTcp, Dns, Http


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


class TestConfinement:
    def test_it_has_no_capability_and_gains_none(self, rig: Rig) -> None:
        seen = status(rig.proxy.pid)
        assert {int(seen[key], 16) for key in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert seen["NoNewPrivs"] == "1"

    def test_it_dumps_no_core_and_cannot_be_traced(self, rig: Rig) -> None:
        limits = Path(f"/proc/{rig.proxy.pid}/limits").read_text()
        (core,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core.split()[-3:-1] == ["0", "0"]

    def test_it_has_descriptors_for_many_attempts(self, rig: Rig) -> None:
        limits = Path(f"/proc/{rig.proxy.pid}/limits").read_text()
        (files,) = (line.split() for line in limits.splitlines() if line.startswith("Max open files"))
        assert files[3] == files[4]

    def test_its_environment_is_its_own(self, rig: Rig) -> None:
        """No setting of the executor's, such as a proxy or a CA bundle, steers it."""
        try:
            environment = Path(f"/proc/{rig.proxy.pid}/environ").read_bytes()
        except PermissionError:
            pytest.skip("the process is not dumpable, and this user is not root")
        names = {entry.partition(b"=")[0].decode() for entry in environment.split(b"\0") if entry}
        assert names <= {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "LC_CTYPE"}


class Raw:
    """A proxy spoken to over its socket by hand."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.sock, theirs = channel.pair()
        self.sock.settimeout(PATIENCE)
        os.set_inheritable(theirs.fileno(), True)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "proxy.server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.send({
            "type": "start",
            "authority_dir": str(directory / "authority"),
            "audit_path": str(directory / "audit.jsonl"),
            "upstream_ca_file": None,
            **config,
        })  # fmt: skip

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        channel.send(self.sock, message, fds)

    def receive(self) -> Message:
        message, fds = channel.receive(self.sock)
        assert fds == []
        return message

    def request(self, message: Message, fds: Sequence[int] = ()) -> Message:
        self.send({"id": 7, **message}, fds)
        reply = self.receive()
        assert (reply["type"], reply["id"]) == ("reply", 7)
        return reply

    def open_files(self) -> list[str]:
        directory = f"/proc/{self.process.pid}/fd"
        return sorted(os.readlink(f"{directory}/{fd}").partition(":")[0] for fd in os.listdir(directory))

    def close(self) -> None:
        self.sock.close()
        self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Raw]:
    raw = Raw(tmp_path)
    assert raw.receive()["type"] == "authority"
    assert raw.receive()["type"] == "ready"
    yield raw
    raw.close()


def attach(grant_: object, **more: object) -> Message:
    return {"type": "attach", "grant": grant_, "kinds": ["explicit"], "language": "python", "domains": None, **more}


def dumped(grant_: Grant) -> dict[str, Any]:
    document = json.loads(grant_.model_dump_json())
    assert isinstance(document, dict)
    return document


GARBAGE: dict[str, Message] = {
    "no grant": attach(None),
    "an empty grant": attach({}),
    "a grant with an unknown key": attach({**dumped(grant()), "also": 1}),
    "a grant with an unknown mode": attach({**dumped(grant()), "mode": "open"}),
    "a grant with a rule that has no host": attach({**dumped(grant()), "deny": [{"id": "x"}]}),
    "a grant whose host is none": attach({**dumped(grant()), "deny": [{"id": "x", "host": "a..b"}]}),
    "too few kinds": attach(dumped(grant()), kinds=[]),
    "too many kinds": attach(dumped(grant()), kinds=["explicit", "tcp4"]),
    "kinds that are no list": attach(dumped(grant()), kinds="explicit"),
    "an unknown message": {"type": "open-sesame"},
    "no type": {},
    "the end of an unknown attempt": {
        "type": "detach", "attempt_id": "unknown", "status": "success", "cause": "exit", "exit_code": 0,
        "duration_seconds": 1,
    },
    "an end without its fields": {"type": "detach"},
}  # fmt: skip


class TestNonsense:
    @pytest.mark.parametrize("message", GARBAGE.values(), ids=GARBAGE)
    def test_it_is_answered_with_an_error_and_leaves_nothing(self, raw: Raw, message: Message) -> None:
        before = raw.open_files()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert raw.request(message, [listener.fileno()])["error"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert raw.open_files() == before
        assert "error" not in self.attach_well(raw), "it serves on"

    def attach_well(self, raw: Raw) -> Message:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return raw.request(attach(dumped(grant(mode=Mode.UNRESTRICTED))), [listener.fileno()])

    def test_descriptors_that_are_no_sockets(self, raw: Raw, tmp_path: Path) -> None:
        before = raw.open_files()
        with open(tmp_path / "file", "wb") as file, socket.create_server(("127.0.0.1", 0)) as listener:
            message = attach(dumped(grant()), kinds=["explicit", "explicit"])
            for fds in ([file.fileno(), listener.fileno()], [listener.fileno(), file.fileno()]):
                assert raw.request(message, fds)["error"]
        assert raw.open_files() == before

    def test_the_same_attempt_twice(self, raw: Raw) -> None:
        once = dumped(grant(mode=Mode.UNRESTRICTED))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            assert "error" not in raw.request(attach(once), [listener.fileno()])
            before = raw.open_files()
            assert "attached already" in str(raw.request(attach(once), [listener.fileno()])["error"])
        assert raw.open_files() == before

    def test_the_end_of_what_was_never_attached_is_no_fault(self, raw: Raw) -> None:
        """So it is after an attempt that could not be attached."""
        assert raw.request(attach(None))["error"]
        assert raw.request(GARBAGE["the end of an unknown attempt"])["error"] == "no such attempt is attached"
        raw.sock.close()
        raw.process.wait(PATIENCE)
        assert raw.process.stderr is not None
        told = raw.process.stderr.read()
        assert told.count(b"Traceback") == 1, "of the attempt that could not be attached"

    def test_bytes_that_are_no_message_end_it(self, raw: Raw) -> None:
        raw.sock.send(b"Jnonsense")
        assert raw.process.wait(PATIENCE) == 0


class TestStart:
    def test_a_log_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "audit.jsonl").mkdir()
        raw = Raw(tmp_path)
        try:
            assert raw.receive()["type"] == "authority"
            failed = raw.receive()
            assert failed["type"] == "failed"
            assert "audit log" in str(failed["error"])
            assert raw.process.wait(PATIENCE) == 0
        finally:
            raw.close()

    def test_an_authority_that_cannot_be_made_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "authority").write_text("a file")
        raw = Raw(tmp_path)
        try:
            failed = raw.receive()
            assert failed["type"] == "failed"
            assert "hint:" in str(failed["error"])
        finally:
            raw.close()

    @pytest.mark.parametrize("content", [None, "no certificate"])
    def test_upstream_certificates_that_cannot_be_read_are_told(self, tmp_path: Path, content: str | None) -> None:
        path = tmp_path / "roots.pem"
        if content is not None:
            path.write_text(content)
        raw = Raw(tmp_path, upstream_ca_file=str(path))
        try:
            failed = raw.receive()
            assert failed["type"] == "failed"
            assert str(path) in str(failed["error"])
        finally:
            raw.close()


class TestTheEndOfTheExecutor:
    def test_all_connections_die_with_the_channel(self, directory: Path, peers: Peers) -> None:
        own = Rig(directory / "end", peers.ca_file)
        with BannerTcp(peers.loop, peers.other.address, 2525) as mail:
            hosts = {"mail.test": mail.address, **peers.hosts}
            attempt = own.captured(grant(tcp_rule("mail.test", 2525), rule("allowed.test"), hosts=hosts))
            raw = attempt.tunnel("mail.test", 2525)
            assert raw.recv(3) == b"220"
            idle = attempt.https("allowed.test")
            assert ask(idle, get("allowed.test")).status == 200
            own.call(shut(own))
            raw.settimeout(PATIENCE)
            assert b"250" not in raw.recv(100)
            assert is_cut(idle)
            assert own.proxy._process.wait(PATIENCE) == 0
        own.close()
        (end,) = [event for event in own.events() if event["event"] == "proxy" and event["what"] == "stop"]
        assert str(own.proxy.pid) in end["detail"]

    def test_a_slow_look_up_does_not_keep_it(self, directory: Path, peers: Peers) -> None:
        begun = directory / "begun"
        os.mkfifo(begun)
        code = (
            "import sys, threading; from proxy import server\n"
            f"def lookup(name): open({str(begun)!r}, 'w').close(); threading.Event().wait()\n"
            "server.main(lookup=lookup)"
        )
        own = Rig(directory / "slow", peers.ca_file, code)
        attempt = own.explicit(grant(rule("slow.test")))
        sock = attempt.explicit()
        sock.sendall(get("slow.test", target="http://slow.test/"))
        begun.read_bytes()
        own.call(shut(own))
        assert is_cut(sock)
        assert own.proxy._process.wait(PATIENCE / 3) == 0
        own.close()

    def test_a_terminal_does_not_end_it(self, rig: Rig, peers: Peers) -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(rig.proxy.pid, number)
        with rig.explicit(grant(rule("allowed.test"), hosts=peers.hosts)) as attempt:
            assert ask(attempt.https("allowed.test"), get("allowed.test")).status == 200


async def shut(rig: Rig) -> None:
    """What the executor's death does."""
    rig.proxy._link._sock.shutdown(socket.SHUT_RDWR)
    await asyncio.wait_for(rig.proxy.lost.wait(), PATIENCE)


class TestRebinding:
    """A name whose answer changes between look-ups is vetted at each, and the address vetted is the one dialled."""

    @pytest.fixture(scope="class")
    @classmethod
    def forgetful(cls, directory: Path, peers: Peers) -> Iterator[Rig]:
        """A proxy that keeps no answer, so that every use of a name is a look-up."""
        code = (
            "import sys; from proxy import resolver, server\n"
            "resolver.Resolver.__init__.__kwdefaults__['ttl_seconds'] = 0.0\n"
            "server.main()"
        )
        rig = Rig(directory / "forgetful", peers.ca_file, code)
        yield rig
        rig.close()

    @pytest.fixture
    def dns(self, peers: Peers) -> Iterator[Dns]:
        dns = Dns(peers.loop)
        yield dns
        dns.close()

    @pytest.mark.parametrize("inside", ["169.254.169.254", "127.0.0.1", "10.0.0.1"])
    def test_between_the_request_and_the_dial(self, forgetful: Rig, peers: Peers, dns: Dns, inside: str) -> None:
        dns.zone["rebind.test"] = lambda asked: [peers.allowed.address] if asked == 0 else [inside]
        with forgetful.explicit(grant(rule("rebind.test"))) as attempt, peers.silence():
            answer = ask(attempt.explicit(), get("rebind.test", target="http://rebind.test/"))
        assert (answer.status, answer.code) == (403, "address_not_public")
        assert attempt.denials() == ["address_not_public"]

    def test_between_two_requests(self, forgetful: Rig, peers: Peers, dns: Dns) -> None:
        dns.zone["rebind.test"] = lambda asked: [peers.allowed.address] if asked < 2 else ["169.254.169.254"]
        with forgetful.explicit(grant(rule("rebind.test"))) as attempt:
            request = get("rebind.test", target="http://rebind.test/")
            assert ask(attempt.explicit(), request).status == 200
            assert ask(attempt.explicit(), request).code == "address_not_public"

    def test_at_a_raw_connection(self, forgetful: Rig, peers: Peers, dns: Dns) -> None:
        dns.zone["rebind.test"] = ["127.0.0.1"]
        with BannerTcp(peers.loop, "127.0.0.1", 2525) as mail:
            with forgetful.explicit(grant(tcp_rule("rebind.test", 2525))) as attempt:
                assert is_cut(attempt.tunnel("rebind.test", 2525))
            assert mail.untouched

    def test_of_mixed_answers_only_the_public_ones_are_dialled(self, rig: Rig, peers: Peers, dns: Dns) -> None:
        dns.zone["mixed.test"] = ["127.0.0.1", "10.0.0.1", peers.allowed.address, "::1"]
        with BannerTcp(peers.loop, "127.0.0.1", 80) as inside, rig.explicit(grant(rule("mixed.test"))) as attempt:
            answer = ask(attempt.explicit(), get("mixed.test", target="http://mixed.test/"))
            assert answer.json["nonce"] == peers.allowed.nonce
            assert inside.untouched
        (dial,) = attempt.events(layer="dial")
        assert (dial["decision"], dial["address"]) == ("allow", peers.allowed.address)

    def test_an_address_that_does_not_answer_is_followed_by_the_next(self, rig: Rig, peers: Peers, dns: Dns) -> None:
        dns.zone["two.test"] = ["20.250.0.9", peers.allowed.address]
        with (
            Http(peers.loop, peers.allowed.address, 3107) as peer,  # a port where no other peer of these tests listens
            rig.explicit(grant(rule("two.test", 3107))) as attempt,
        ):
            answer = ask(attempt.explicit(), get("two.test:3107", target="http://two.test:3107/"))
        assert answer.json["nonce"] == peer.nonce

    def test_a_public_address_of_this_host_itself_is_not_dialled(self, rig: Rig, peers: Peers) -> None:
        from tests import world
        from tests.servers import Http

        with Http(peers.loop, world.OWN_ADDRESS, 80) as own, rig.explicit(grant(mode=Mode.UNRESTRICTED)) as attempt:
            answer = ask(attempt.explicit(), get(world.OWN_ADDRESS, target=f"http://{world.OWN_ADDRESS}/"))
            assert answer.code == "address_not_public"
            assert own.untouched


def test_a_closed_channel_says_so() -> None:
    ours, theirs = channel.pair()
    theirs.close()
    with ours, pytest.raises(ChannelClosed):
        channel.receive(ours)
