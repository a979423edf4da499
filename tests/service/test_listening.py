"""The service's socket is its user's alone, replaces what a dead server left and nothing else; and places are counted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from sandbox.service import listening as module
from sandbox.service.address import Address
from sandbox.service.listening import CannotListen, UnixSocket, tcp_socket, tls_context
from sandbox.service.places import Places
from sandbox.state import InvalidSettings
from tests.service.listening import Peer, listening
from tests.service.test_connections import App

# The unix socket


def test_the_socket_is_its_users_alone_from_the_first_moment(root: Path) -> None:
    """So is every directory that was made for it; whatever the umask."""
    before = os.umask(0)
    try:
        made = UnixSocket(root / "a" / "b" / "s.sock")
    finally:
        os.umask(before)
    with closing(made):
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(made.path.parent.parent.stat().st_mode) == 0o700


def test_nothing_is_left_of_it(root: Path) -> None:
    UnixSocket(root / "s.sock").close()
    assert list(root.iterdir()) == []


def test_what_a_dead_server_left_is_replaced(root: Path) -> None:
    """It was killed, so that its file is still there, and nobody listens."""
    program = (
        "import sys; from pathlib import Path; from sandbox.service.listening import UnixSocket\n"
        "made = UnixSocket(Path(sys.argv[1])); made.socket.listen(); print('bound', flush=True); sys.stdin.read()"
    )
    dead = subprocess.Popen(
        [sys.executable, "-c", program, str(root / "s.sock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with dead:
        assert dead.stdout is not None
        assert dead.stdout.readline() == b"bound\n"
        dead.send_signal(signal.SIGKILL)
        dead.wait()
    assert (root / "s.sock").exists()
    with closing(UnixSocket(root / "s.sock")) as made:
        made.socket.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(root / "s.sock"))


def test_a_server_that_lives_is_left_alone(root: Path) -> None:
    with closing(UnixSocket(root / "s.sock")) as first:
        for _ in range(2):
            with pytest.raises(CannotListen, match="another server listens"):
                UnixSocket(root / "s.sock")
        first.socket.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(root / "s.sock"))


def test_a_server_of_another_kind_is_left_alone_too(root: Path) -> None:
    """It knows nothing of our lock."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(root / "s.sock"))
        other.listen()
        with pytest.raises(CannotListen, match="another server listens"):
            UnixSocket(root / "s.sock")
        assert (root / "s.sock").exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(root: Path, kind: str) -> None:
    path = root / "s.sock"
    if kind == "file":
        path.write_text("kept")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(root / "nowhere")
    with pytest.raises(CannotListen, match="is no socket"):
        UnixSocket(path)
    assert path.is_symlink() or path.exists()


def test_a_file_that_took_its_place_is_left_alone(root: Path) -> None:
    made = UnixSocket(root / "s.sock")
    made.path.unlink()
    made.path.write_text("another's")
    made.close()
    assert (root / "s.sock").read_text() == "another's"


def test_a_path_that_is_too_long_is_refused_by_name(root: Path) -> None:
    with pytest.raises(InvalidSettings, match="more than 107 bytes"):
        UnixSocket(root / ("x" * 108))


def test_a_directory_that_others_write_to_is_refused(root: Path) -> None:
    """Unless they can't remove what isn't theirs, as in `/tmp`."""
    shared = root / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidSettings, match="others may replace"):
        UnixSocket(shared / "s.sock")
    shared.chmod(0o1777)
    UnixSocket(shared / "s.sock").close()


# TCP and TLS


@pytest.mark.parametrize("host", ["example.com", "", "1.2.3", "::1%lo", "-"])
def test_an_address_is_an_address(host: str) -> None:
    with pytest.raises(InvalidSettings, match="is no address"):
        tcp_socket(host, 0)


def test_a_port_that_is_taken_is_told_by_name() -> None:
    with tcp_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(CannotListen, match="cannot be listened at"):
            tcp_socket("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("fault", ["missing", "not PEM", "another key"])
def test_a_certificate_that_cannot_be_used_is_told_by_name(root: Path, fault: str) -> None:
    certificate, key = root / "cert.pem", root / "key.pem"
    issued, other = trustme.CA().issue_cert("a.test"), trustme.CA().issue_cert("a.test")
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    (other if fault == "another key" else issued).private_key_pem.write_to_path(str(key))
    if fault == "missing":
        key.unlink()
    elif fault == "not PEM":
        certificate.write_text("hello")
    with pytest.raises(InvalidSettings, match="cannot be used for TLS"):
        tls_context(certificate, key)


def policy(*, tenants: bool) -> Any:
    from sandbox.policy_file import parse_policy
    from tests.service.serving import Token, policy_text

    entry = {"name": "acme", "tokens": [Token("ci").entry]}
    return parse_policy(policy_text(**({"tenants": [entry]} if tenants else {})))


@pytest.mark.parametrize(
    ("address", "tenants", "refusal"),
    [
        (Address(Path("/s")), False, None),
        (Address(Path("/s")), True, None),
        (Address(), False, "the policy has no `tenants`"),
        (Address(), True, None),
        (Address(host="localhost"), True, None),
        (Address(host="::1"), True, None),
        (Address(host="0.0.0.0"), True, "tokens could be read on the way"),
        (Address(host="::"), True, "tokens could be read on the way"),
        (Address(host="10.0.0.1"), True, "tokens could be read on the way"),
        (Address(host="10.0.0.1", tls=(Path("/c"), Path("/k"))), True, None),
        (Address(host="10.0.0.1", accept_tokens_in_plaintext=True), True, None),
        (Address(host="10.0.0.1", tls=(Path("/c"), Path("/k"))), False, "the policy has no `tenants`"),
        (Address(host="nonesuch host"), True, "is no address"),
    ],
)
def test_where_it_may_listen_is_the_policys_to_say(address: Address, tenants: bool, refusal: str | None) -> None:
    if refusal is None:
        address.check(policy(tenants=tenants))
    else:
        with pytest.raises(InvalidSettings, match=refusal):
            address.check(policy(tenants=tenants))


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="`--allowed-host`"):
        Address(allowed_hosts=("a b",)).door()


# Places


def test_one_connection_too_many_is_told_so_and_closed(root: Path) -> None:
    """While something is asked on each of the others. Its place is free again when one ends."""
    places = Places(2)

    async def scenario() -> None:
        async with listening(App(), root / "s", places):
            with Peer(root / "s") as first, Peer(root / "s") as second:
                for peer in (first, second):
                    await peer.say(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                    await peer.until(b"HTTP/1.1 200 OK")
                    await peer.say(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 1\r\n")
                    await peer.say(b"Expect: 100-continue\r\n\r\n")
                    await peer.until(b"HTTP/1.1 100")
                with Peer(root / "s") as third:
                    said = await third.rest()
                assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                assert b"retry-after: 1\r\n" in said
                assert b'"code":"too_many_connections"' in said
                assert (places.taken, places.refused) == (2, 1)
                await first.say(b"x")
                await first.rest()
                with Peer(root / "s") as fourth:
                    await fourth.say(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                    assert b"HTTP/1.1 200 OK" in await fourth.rest()

    asyncio.run(scenario())


def test_who_does_not_shake_hands_holds_a_place_and_only_for_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is counted from when it is accepted, and given back whatever becomes of the handshake: it may have to
    make room for a newer one, or the time for it may be over.
    """
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 3)  # longer than the moment that each has
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("a.test").configure_cert(context)
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    places = Places(2, trusting=False)

    async def ask() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(root / "s"), ssl=trusting, server_hostname="a.test")
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        said = await reader.read()
        writer.close()
        return said

    async def scenario() -> None:
        async with listening(App(), root / "s", places, context):
            with Peer(root / "s") as first, Peer(root / "s") as wrong, Peer(root / "s") as silent:
                assert await first.rest() == b"", "without TLS nothing can be said"
                assert (places.taken, places.refused, places.displaced) == (2, 0, 1)
                await wrong.say(b"GET / HTTP/1.1\r\n\r\n")
                await wrong.rest()
                await silent.rest()
            assert places.taken == 0
            assert b"HTTP/1.1 200 OK" in await ask()

    asyncio.run(scenario())


def test_it_survives_running_out_of_descriptors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections wait meanwhile."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(24, "Too many open files"), ConnectionAbortedError()]

        async def failing(sock: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", failing)
        async with listening(App(), root / "s"):
            with Peer(root / "s") as peer:
                await peer.say(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert b"HTTP/1.1 200 OK" in await peer.rest()
        assert failures == []

    asyncio.run(scenario())


def test_a_closed_server_accepts_no_more_and_lets_the_others_end(root: Path) -> None:
    async def scenario() -> None:
        app = App()
        async with listening(app, root / "s") as server:
            with Peer(root / "s") as peer:
                await peer.say(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nx")
                await app.begun.wait()
                server.should_exit = True
                while True:
                    try:
                        Peer(root / "s").close()
                    except ConnectionRefusedError:
                        break
                    await asyncio.sleep(0.01)
                await peer.say(b"x")
                assert b"HTTP/1.1 200 OK" in await peer.rest()

    asyncio.run(scenario())
