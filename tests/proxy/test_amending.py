"""A grant that is amended while the attempt is at work, through the real proxy: what is over, and what goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import websockets.exceptions
import websockets.sync.client

from proxy.control import AttemptEnd, AttemptStart, ProxyUnavailable
from proxy.destinations import parse_host
from proxy.network import Grant, PrivateAddress, StaticHost
from tests import world
from tests.proxy.rig import (
    Attempt,
    Http2Client,
    Peers,
    Rig,
    ask,
    dns_query,
    get,
    grant,
    h2_headers,
    is_cut,
    read_answer,
    read_dns,
    read_exactly,
    read_to_end,
    rule,
    tcp_rule,
)
from tests.remote_executor import until
from tests.servers import BannerTcp, Http, Loop

ALL = ("allowed.test", "other.test", "h2.test", "mail.test")
MAIL_PORT = 2525


@pytest.fixture(scope="module")
def mail(loop: Loop, peers: Peers) -> Iterator[BannerTcp]:
    with BannerTcp(loop, world.public_address(), MAIL_PORT) as server:
        peers.hosts["mail.test"] = server.address
        yield server


@pytest.fixture
def everything(peers: Peers, mail: BannerTcp) -> Grant:
    """What the attempts of these tests begin with."""
    peers.forget()
    mail.forget()
    rules = [rule("allowed.test"), rule("other.test"), rule("h2.test"), tcp_rule("mail.test", MAIL_PORT)]
    return grant(*rules, hosts=peers.hosts)


def only(peers: Peers, *names: str, **more: Any) -> Grant:
    """The same, but of these names only."""
    rules = [tcp_rule(name, MAIL_PORT) if name == "mail.test" else rule(name) for name in names]
    return grant(*rules, hosts=peers.hosts, **more)


def synthetic(attempt: Attempt, name: str) -> str | None:
    assert attempt.sandbox is not None
    with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.53", 53))
        sock.send(dns_query(name))
        return next(iter(read_dns(sock.recv(4096)).addresses), None)


def known_address(attempt: Attempt, name: str) -> str:
    address = synthetic(attempt, name)
    assert address is not None
    return address


def plain(name: str, path: str = "/") -> bytes:
    return get(name, path, target=f"http://{name}{path}")


def cut(sock: socket.socket) -> bool:
    """Whether the connection has ended; what had come before that does not matter."""
    read_to_end(sock)
    return True


class TestNextRequest:
    """What is asked after an amendment is judged by it, at every layer, and is told why it is denied."""

    def test_a_request_on_a_connection_that_was_kept(self, rig: Rig, peers: Peers, everything: Grant) -> None:
        with rig.explicit(everything) as attempt:
            sock = attempt.explicit()
            assert ask(sock, plain("allowed.test")).status == 200
            attempt.amend(only(peers, "other.test", deny=(rule("allowed.test"),)))
            peers.allowed.wait(lambda journal: journal.open == 0)
            with peers.silence():
                answer = ask(sock, plain("allowed.test"))
            assert (answer.status, answer.code) == (403, "policy_revoked")
            assert "host_denied" in answer.json["reason"]
            assert answer.json["rule"] == "rule:allowed.test"
            assert "changed while this code ran" in answer.json["hint"]
            assert answer.headers["x-sluicegate-reason"] == "policy_revoked"
            assert ask(attempt.explicit(), plain("other.test")).status == 200
        assert attempt.denials() == ["policy_revoked"]

    def test_a_request_inside_tls_on_a_connection_that_was_kept(
        self, rig: Rig, peers: Peers, everything: Grant
    ) -> None:
        with rig.explicit(everything) as attempt:
            sock, streams = attempt.https("allowed.test"), Http2Client(attempt.https("h2.test", alpn=["h2"]))
            assert ask(sock, get("allowed.test")).status == 200
            assert streams.get("h2.test").status == 200
            attempt.amend(only(peers, "other.test"))
            for peer in (peers.allowed_tls, peers.h2):
                peer.wait(lambda journal: journal.open == 0)
            with peers.silence():
                assert ask(sock, get("allowed.test")).code == "policy_revoked"
                assert streams.get("h2.test").code == "policy_revoked"

    @pytest.mark.parametrize("name", ["allowed.test", "other.test"])
    def test_every_road(self, rig: Rig, peers: Peers, everything: Grant, name: str) -> None:
        """The name that the new policy keeps is the control of the one that it does not."""
        with rig.captured(everything) as attempt:
            address = known_address(attempt, name)
            attempt.amend(only(peers, "other.test"))
            kept, code = name == "other.test", None if name == "other.test" else "policy_revoked"
            with contextlib.nullcontext() if kept else peers.silence():
                assert (synthetic(attempt, name) is not None) is kept
                for answer in (
                    ask(attempt.explicit(), plain(name)),
                    ask(attempt.https(name), get(name)),
                    ask(attempt.dial(address, 80), get(name)),
                    ask(attempt.tls(attempt.dial(address, 443), name), get(name)),
                ):
                    assert (answer.status, answer.json.get("code")) == (200 if kept else 403, code)
            if not kept:
                connect = f"CONNECT {name}:80 HTTP/1.1\r\nHost: {name}:80\r\n\r\n".encode()
                assert ask(attempt.explicit(), connect, "CONNECT").code == "policy_revoked"
        assert set(attempt.denials()) == (set() if kept else {"policy_revoked"})

    def test_raw_tcp_is_reset(self, rig: Rig, peers: Peers, mail: BannerTcp, everything: Grant) -> None:
        with rig.captured(everything) as attempt:
            address = known_address(attempt, "mail.test")
            assert attempt.dial(address, MAIL_PORT).recv(100).startswith(b"220 ")
            attempt.amend(only(peers, "other.test"))
            mail.wait(lambda journal: journal.open == 0)
            mail.forget()
            assert attempt.is_reset(address, MAIL_PORT)
            assert socks5_reply(attempt, "mail.test", MAIL_PORT) == 2
            assert mail.untouched

    def test_a_method_and_a_path(self, rig: Rig, peers: Peers, everything: Grant) -> None:
        with rig.explicit(everything) as attempt:
            attempt.amend(
                grant(rule("allowed.test", methods=("GET", "HEAD"), paths=("/public/**",)), hosts=peers.hosts)
            )
            sock = attempt.https("allowed.test")
            assert ask(sock, get("allowed.test", "/public/x")).status == 200
            answer = ask(sock, get("allowed.test", "/secret"))
            assert (answer.code, answer.json["rule"]) == ("policy_revoked", "rule:allowed.test")
            answer = ask(attempt.https("allowed.test"), get("allowed.test", "/public/x", method="POST"))
            assert answer.code == "policy_revoked"

    def test_an_address(self, rig: Rig, peers: Peers, loop: Loop) -> None:
        with Http(loop, "127.0.0.1", 0) as local:
            private = PrivateAddress(id="private", host=parse_host("local.test"), cidr=ip_network("127.0.0.0/8"))
            reach = grant(
                rule("local.test", local.port), hosts={"local.test": "127.0.0.1"}, private_addresses=(private,)
            )
            with rig.explicit(reach) as attempt:
                request = get(f"local.test:{local.port}", target=f"http://local.test:{local.port}/")
                sock = attempt.explicit()
                assert ask(sock, request).status == 200
                attempt.amend(reach.model_copy(update={"private_addresses": ()}))
                local.wait(lambda journal: journal.open == 0)
                answer = ask(sock, request)
                assert answer.code == "policy_revoked"
                assert "address_not_public" in answer.json["reason"]
                assert len(local.journal.requests) == 1

    def test_an_address_that_the_new_policy_does_not_give_is_not_dialled(
        self, rig: Rig, peers: Peers, everything: Grant
    ) -> None:
        with rig.explicit(everything) as attempt:
            sock = attempt.explicit()
            assert ask(sock, plain("allowed.test")).status == 200
            moved = only(peers, "allowed.test").model_copy(
                update={"hosts": (StaticHost(host=parse_host("allowed.test"), addresses=(ip_address("20.255.0.1"),)),)}
            )
            attempt.amend(moved)
            peers.allowed.wait(lambda journal: journal.open == 0)
            with peers.silence():
                assert ask(sock, plain("allowed.test")).code == "policy_revoked"

    def test_tls_is_opened_that_was_passed_through(self, rig: Rig, peers: Peers, everything: Grant) -> None:
        through = everything.model_copy(update={"passthrough": (parse_host("allowed.test"),)})
        with rig.explicit(through) as attempt:
            attempt.amend(everything)
            assert ask(attempt.https("allowed.test"), get("allowed.test")).json["nonce"] == peers.allowed_tls.nonce

    def test_more_connections_than_the_smaller_limit(self, rig: Rig, peers: Peers, everything: Grant) -> None:
        with rig.explicit(everything) as attempt:
            held = [attempt.explicit() for _ in range(3)]
            for sock in held:
                assert ask(sock, plain("allowed.test")).status == 200
            attempt.amend(only(peers, *ALL, max_connections=3))
            with contextlib.suppress(ConnectionError):
                assert is_cut(attempt.explicit())
            assert ask(held[0], plain("allowed.test")).status == 200, "those that are open stay"
        assert attempt.denials() == ["limit_exceeded"]


def socks5_reply(attempt: Attempt, host: str, port: int) -> int:
    """The reply code: 2 is `not allowed by ruleset`."""
    sock = attempt.explicit()
    sock.sendall(b"\x05\x01\x00")
    assert read_exactly(sock, 2) == b"\x05\x00"
    sock.sendall(b"\x05\x01\x00\x03" + bytes([len(host)]) + host.encode() + port.to_bytes(2))
    return read_exactly(sock, 10)[1]


@dataclass
class Open:
    """Something that is under way: `goes_on` shows that it still is, `is_over` returns once it has ended."""

    goes_on: Callable[[], object]
    is_over: Callable[[], bool]


def raw_tcp(attempt: Attempt, peers: Peers) -> Open:
    return _lines(attempt.dial(known_address(attempt, "mail.test"), MAIL_PORT))


def raw_tunnel(attempt: Attempt, peers: Peers) -> Open:
    return _lines(attempt.tunnel("mail.test", MAIL_PORT))


def _lines(sock: socket.socket) -> Open:
    assert sock.recv(1000).startswith(b"220 ")

    def line() -> None:
        sock.sendall(b"NOOP\r\n")
        assert read_exactly(sock, 10) == b"250 NOOP\r\n"

    return Open(line, lambda: cut(sock))


def passthrough_tls(attempt: Attempt, peers: Peers) -> Open:
    sock = attempt.tls(attempt.tunnel("allowed.test", 443), "allowed.test", ca=peers.ca_file)

    def request() -> None:
        assert ask(sock, get("allowed.test")).json["nonce"] == peers.allowed_tls.nonce

    request()
    return Open(request, lambda: cut(sock))


def web_socket(attempt: Attempt, peers: Peers) -> Open:
    raw = attempt.tunnel("allowed.test", 80)
    connection = websockets.sync.client.connect(
        "ws://allowed.test/ws",
        sock=raw,
        compression=None,
        ping_interval=None,
        close_timeout=0.1,
        proxy=None,
        legacy=True,
    )

    def message() -> None:
        connection.send("hello")
        assert connection.recv(30) == f"{peers.allowed.nonce} hello"

    def is_over() -> bool:
        with pytest.raises(websockets.exceptions.ConnectionClosedError):
            connection.recv(30)
        return True

    message()
    return Open(message, is_over)


def upload(attempt: Attempt, peers: Peers) -> Open:
    return _upload(attempt.https("allowed.test"), peers.allowed_tls)


def upload_in_plain(attempt: Attempt, peers: Peers) -> Open:
    sock = attempt.explicit()
    return _upload(sock, peers.allowed, "http://allowed.test/up")


def _upload(sock: socket.socket, peer: Http, target: str = "/up") -> Open:
    sock.sendall(get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST", target=target))

    def chunk() -> None:
        before = len(peer.journal.received)
        sock.sendall(b"5\r\nhello\r\n")
        peer.wait(lambda journal: len(journal.received) >= before + 5)

    chunk()
    return Open(chunk, lambda: cut(sock))


def upload_over_http2(attempt: Attempt, peers: Peers) -> Open:
    client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
    stream = client.start(h2_headers("h2.test", "/up", method="POST"), end_stream=False)

    def piece() -> None:
        before = len(peers.h2.journal.received)
        client.connection.send_data(stream, b"hello")
        client.flush()
        peers.h2.wait(lambda journal: len(journal.received) >= before + 5)

    piece()
    return Open(piece, lambda: cut(client.sock))


def response(attempt: Attempt, peers: Peers) -> Open:
    """More than fits into what lies between the server and a client that takes its time."""
    sock = attempt.https("allowed.test")
    sock.sendall(get("allowed.test", "/bytes/50000000"))

    def piece() -> None:
        read_exactly(sock, 100_000)

    piece()
    return Open(piece, lambda: cut(sock))


OPEN = (raw_tcp, raw_tunnel, passthrough_tls, web_socket, upload, upload_in_plain, upload_over_http2, response)


class TestUnderWay:
    """What goes on without being asked again is cut, when its destination is not allowed any more, and only then."""

    def attempt(self, rig: Rig, everything: Grant, kind: Callable[[Attempt, Peers], Open]) -> Attempt:
        if kind is passthrough_tls:
            everything = everything.model_copy(update={"passthrough": (parse_host("allowed.test"),)})
        return rig.captured(everything)

    @pytest.mark.parametrize("narrower", ["another name", "nothing"])
    @pytest.mark.parametrize("kind", OPEN, ids=lambda kind: kind.__name__)
    def test_it_is_cut(
        self, rig: Rig, peers: Peers, mail: BannerTcp, everything: Grant, kind: Callable[..., Open], narrower: str
    ) -> None:
        with self.attempt(rig, everything, kind) as attempt:
            open_ = kind(attempt, peers)
            open_.goes_on()
            attempt.amend(only(peers, "other.test") if narrower == "another name" else None)
            for peer in (*peers.all, mail):
                peer.wait(lambda journal: journal.open == 0)
                peer.forget()
            assert open_.is_over()
            assert all(peer.untouched for peer in (*peers.all, mail))
        assert attempt.denials() == ["policy_revoked"]
        (end,) = [end for end in attempt.events(event="connection") if end["outcome"] == "aborted"]
        assert end["host"] in ALL

    @pytest.mark.parametrize("kind", OPEN, ids=lambda kind: kind.__name__)
    def test_it_goes_on_where_it_is_allowed_still(
        self, rig: Rig, peers: Peers, everything: Grant, kind: Callable[..., Open]
    ) -> None:
        with self.attempt(rig, everything, kind) as attempt:
            open_ = kind(attempt, peers)
            kept = only(peers, "allowed.test", "h2.test", "mail.test", passthrough=attempt.grant.passthrough)
            attempt.amend(kept)
            open_.goes_on()
        assert attempt.denials() == []

    def test_a_request_whose_response_is_there_and_that_is_still_being_sent_is_cut(
        self, rig: Rig, peers: Peers, loop: Loop
    ) -> None:
        class Early(Http):
            """Answers at the head, and reads on."""

            async def serve(self, reader: Any, writer: Any, number: int) -> None:
                self.note(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                while data := await reader.read(65536):
                    self.note(data)

        with Early(loop, peers.allowed.address, 8000) as early:
            reach = grant(rule("allowed.test", 8000), hosts=peers.hosts)
            with rig.explicit(reach) as attempt:
                sock = attempt.tunnel("allowed.test", 8000)
                sock.sendall(get("allowed.test:8000", "/up", "Transfer-Encoding: chunked", method="POST"))
                assert read_answer(sock).status == 200
                before = len(early.journal.received)
                sock.sendall(b"5\r\nhello\r\n")
                early.wait(lambda journal: len(journal.received) > before)
                attempt.amend(grant(rule("allowed.test", 8000, methods=("GET",)), hosts=peers.hosts))
                early.wait(lambda journal: journal.open == 0)
                assert cut(sock)

    def test_tls_that_is_opened_now_is_cut_where_it_passed_through(
        self, rig: Rig, peers: Peers, everything: Grant
    ) -> None:
        through = everything.model_copy(update={"passthrough": (parse_host("allowed.test"),)})
        with rig.captured(through) as attempt:
            open_ = passthrough_tls(attempt, peers)
            attempt.amend(only(peers, *ALL))
            assert open_.is_over()
        assert attempt.denials() == ["policy_revoked"]

    def test_a_dial_that_is_under_way_reaches_nobody(self, rig: Rig, peers: Peers, loop: Loop) -> None:
        """Its server takes connections and answers no handshake: TLS to it is never done."""
        with socket.create_server((world.public_address(), 0)) as silent:
            silent.settimeout(30)
            address, port = silent.getsockname()
            reach = grant(rule("silent.test", port), hosts={"silent.test": address})
            with rig.explicit(reach) as attempt:
                sock = attempt.https("silent.test", port)
                sock.sendall(get(f"silent.test:{port}", "/secret"))
                upstream, _ = silent.accept()
                with upstream:
                    attempt.amend(None)
                    assert cut(sock)
                    assert b"secret" not in read_to_end(upstream)

    def test_a_name_that_is_being_looked_up(self, peers: Peers, directory: Path) -> None:
        """A request that waits for its look-up is not sent after the amendment, which speaks of its path only."""
        gate = directory / "gate"
        own = Rig(directory / "slow", peers.ca_file, SLOW_LOOKUP.format(gate=str(gate), address=peers.allowed.address))
        try:
            with own.explicit(grant(rule("allowed.test"))) as attempt, peers.silence():
                sock = attempt.explicit()
                sock.sendall(plain("allowed.test", "/secret"))
                until(gate.with_suffix(".asked").exists, "the name is looked up")
                attempt.amend(grant(rule("allowed.test", paths=("/public/**",))))
                gate.write_text("")
                assert cut(sock)
            assert attempt.denials() == ["policy_revoked"]
        finally:
            own.close()


SLOW_LOOKUP = """
import ipaddress, pathlib, time
from proxy import server
gate = pathlib.Path({gate!r})
def lookup(name):
    gate.with_suffix(".asked").write_text("")
    while not gate.exists():
        time.sleep(0.005)
    return [ipaddress.ip_address({address!r})]
server.main(lookup=lookup)
"""


class TestNothing:
    def test_none_revokes_everything_and_no_grant_brings_it_back(
        self, rig: Rig, peers: Peers, everything: Grant
    ) -> None:
        with rig.captured(everything) as attempt:
            sock = attempt.explicit()
            assert ask(sock, plain("allowed.test")).status == 200
            attempt.amend(None)
            peers.allowed.wait(lambda journal: journal.open == 0)
            attempt.amend(everything)
            with peers.silence():
                for name in ("allowed.test", "other.test", "h2.test"):
                    assert synthetic(attempt, name) is None
                    assert ask(attempt.https(name), get(name)).code == "policy_revoked"
                assert ask(sock, plain("allowed.test")).code == "policy_revoked"

    def test_an_attempt_that_is_not_attached_is_told_as_that(self, rig: Rig, everything: Grant) -> None:
        assert rig.call(rig.proxy.amend("unknown", everything)) is False
        with rig.explicit(everything) as attempt:
            attempt.end()
            assert rig.call(rig.proxy.amend(everything.attempt_id, None)) is False

    def test_an_amendment_that_is_sent_behind_the_attempt_finds_it(self, rig: Rig, everything: Grant) -> None:
        """Neither is waited for: what is sent first is done first."""

        async def work(listener: socket.socket) -> Any:
            attaching = rig.proxy.attach(everything, [("explicit", listener)], AttemptStart("python", None))
            return await asyncio.gather(attaching, rig.proxy.amend(everything.attempt_id, None))

        with socket.create_server(("127.0.0.1", 0)) as listener:
            assert list(rig.call(work(listener))) == [None, True]
            with socket.create_connection(listener.getsockname(), 30) as sock:
                assert ask(sock, plain("allowed.test")).code == "policy_revoked"
        rig.call(rig.proxy.detach(everything.attempt_id, AttemptEnd("success", "exit", 0, 1.0)))

    def test_one_attempt_is_amended_and_no_other(self, rig: Rig, peers: Peers, everything: Grant) -> None:
        another = everything.model_copy(update={"attempt_id": everything.attempt_id + "-2"})
        with rig.explicit(everything) as attempt, rig.explicit(another) as neighbour:
            attempt.amend(None)
            assert ask(neighbour.explicit(), plain("allowed.test")).status == 200
            assert ask(attempt.explicit(), plain("allowed.test")).code == "policy_revoked"

    def test_the_log_names_the_policy_that_is_in_force(self, rig: Rig, peers: Peers, everything: Grant) -> None:
        own = everything.model_copy(update={"tenant": "acme"})
        with rig.explicit(own) as attempt:
            ask(attempt.explicit(), plain("allowed.test"))
            attempt.amend(only(peers, "allowed.test").model_copy(update={"policy_digest": "new", "tenant": "else"}))
            ask(attempt.explicit(), plain("allowed.test"))
        seen = [(event["policy_digest"], event["tenant"]) for event in attempt.events(event="decision", layer="http")]
        assert seen == [("digest", "acme"), ("new", "acme")]
        assert {event["tenant"] for event in attempt.events()} == {"acme"}


FAULTY = """
from pathlib import Path
from proxy import amending, server
flag = Path({flag!r})
def planted(name):
    function = getattr(amending, name)
    def wrapped(*arguments):
        if flag.read_text() == name:
            raise RuntimeError("planted")
        return function(*arguments)
    setattr(amending, name, wrapped)
for name in {places!r}:
    planted(name)
server.main()
"""
PLACES = ("_objection", "_objection_to_bytes", "_objection_to_dial", "_cut")


@pytest.fixture(scope="module")
def flag(directory: Path) -> Path:
    path = directory / "amending-fault"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def faulty(directory: Path, peers: Peers, flag: Path) -> Iterator[Rig]:
    """A proxy in which the function that the flag's file names fails."""
    rig = Rig(directory / "faulty-amending", peers.ca_file, FAULTY.format(flag=str(flag), places=PLACES))
    yield rig
    rig.close()


class TestFaults:
    """Whatever fails in an amendment, the attempt has nothing left that is allowed."""

    @pytest.mark.parametrize("place", PLACES)
    def test_a_fault_leaves_nothing(
        self, faulty: Rig, flag: Path, peers: Peers, mail: BannerTcp, everything: Grant, place: str
    ) -> None:
        with faulty.captured(everything) as attempt:
            open_ = raw_tcp(attempt, peers)
            flag.write_text(place)
            narrower = only(peers, "other.test") if place == "_cut" else only(peers, *ALL)
            with pytest.raises(ProxyUnavailable, match="planted"):
                attempt.amend(narrower.model_copy(update={"ports": (80, 443, 8080)}))
            flag.write_text("")
            mail.wait(lambda journal: journal.open == 0)
            assert open_.is_over()
            with peers.silence():
                assert ask(attempt.explicit(), plain("other.test")).code == "policy_revoked"
                assert synthetic(attempt, "other.test") is None

    def test_a_grant_that_cannot_be_read_leaves_nothing(self, faulty: Rig, peers: Peers, everything: Grant) -> None:
        unread = Grant.model_construct(**{**dict(everything), "mode": "open"})
        with faulty.captured(everything) as attempt:
            open_ = web_socket(attempt, peers)
            with pytest.raises(ProxyUnavailable, match="refused `amend`"), pytest.warns(UserWarning, match="serial"):
                attempt.amend(unread)
            assert open_.is_over()
            assert ask(attempt.explicit(), plain("other.test")).code == "policy_revoked"

    def test_a_log_that_cannot_be_written_does_not_keep_a_connection(
        self, directory: Path, peers: Peers, mail: BannerTcp, everything: Grant
    ) -> None:
        own = Rig(directory / "unwritten", peers.ca_file)
        attempt = own.captured(everything)
        open_ = raw_tcp(attempt, peers)
        own.audit_path.unlink()
        own.audit_path.mkdir()
        attempt.amend(only(peers, "other.test"))
        mail.wait(lambda journal: journal.open == 0)
        assert open_.is_over()
        own.close()
