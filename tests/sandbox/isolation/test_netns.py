"""Every address that a program dials is a listener of ours."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from sandbox.isolation import netns
from sandbox.isolation.client import KillReason
from tests.sandbox.isolation.conftest import PATIENCE_SECONDS, Rig, accept

KINDS = ["explicit", "tcp4", "dns-udp4", "dns-tcp4", "tcp6", "dns-udp6", "dns-tcp6"]


def test_the_listeners_are_the_agreed_ones_and_live_in_the_sandbox(rig: Rig) -> None:
    """Seven, non-blocking, at their ports; the same ports on this side are another network's."""

    async def scenario() -> list[tuple[str, tuple[object, ...], bool]]:
        async with rig.prepared("pass") as sandbox:
            return [(kind, s.getsockname()[:2], s.getblocking()) for kind, s in sandbox.listeners]

    listeners = rig.do(scenario())
    assert [kind for kind, _, _ in listeners] == KINDS
    assert {kind: place for kind, place, _ in listeners} == {
        "explicit": ("127.0.0.1", 3128),
        "tcp4": ("0.0.0.0", netns.CATCH_PORT),
        "dns-udp4": ("0.0.0.0", 53),
        "dns-tcp4": ("0.0.0.0", 53),
        "tcp6": ("::", netns.CATCH_PORT),
        "dns-udp6": ("::", 53),
        "dns-tcp6": ("::", 53),
    }


DIALLED = [
    ("tcp4", "203.0.113.9", 443),
    ("tcp4", "203.0.113.9", 1),
    ("tcp4", "10.0.0.1", 22),
    ("tcp4", "169.254.169.254", 80),
    ("tcp4", "1.1.1.1", 65535),
    ("tcp4", "198.18.0.7", 3128),
    ("tcp4", "192.168.1.1", 8080),
    ("explicit", "127.0.0.1", 3128),
    ("dns-tcp4", "9.9.9.9", 53),
    ("dns-tcp4", "127.0.0.1", 53),
    ("tcp6", "2001:db8::1", 443),
    ("tcp6", "fd00:ec2::254", 80),
    ("tcp6", "64:ff9b::7f00:1", 22),
    ("tcp6", "fe80::1", 8443),
    ("dns-tcp6", "2620:fe::fe", 53),
]


@pytest.mark.parametrize(("kind", "address", "port"), DIALLED)
def test_a_dialled_address_arrives_with_its_own_name(rig: Rig, kind: str, address: str, port: int) -> None:
    """Accepted on the listener of its family, `getsockname` is what was dialled, and bytes go both ways."""
    target = (address, port, 0, 1) if address.startswith("fe80") else (address, port)

    async def scenario() -> tuple[tuple[object, ...], tuple[object, ...], bytes, str]:
        code = (
            "import socket\n"
            f"s = socket.socket(socket.AF_INET{'6' if ':' in address else ''}, socket.SOCK_STREAM)\n"
            f"s.connect({target!r})\n"
            "s.sendall(b'ping')\nprint(s.recv(9).decode(), s.getpeername()[:2])\n"
        )
        async with rig.prepared(code) as sandbox:
            await sandbox.release()
            connection, dialled = await accept(dict(sandbox.listeners)[kind])
            with connection:
                connection.setblocking(False)
                loop = asyncio.get_running_loop()
                data = await loop.sock_recv(connection, 9)
                await loop.sock_sendall(connection, b"pong")
                peer = connection.getpeername()
                await sandbox.ended()
            return dialled, peer, data, os.read(sandbox.stdout, 999).decode()

    dialled, _, data, printed = rig.do(scenario())
    assert dialled[:2] == (address, port)
    assert data == b"ping"
    assert printed == f"pong {(address, port)!r}\n"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.8.8.8"])
def test_loopback_is_the_programs_own(rig: Rig, address: str) -> None:
    """A port that nobody inside listens on is refused, not captured; the host's loopback is another."""
    with socket.create_server(("::" if ":" in address else "0.0.0.0", 0), family=_family(address)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((address, port), PATIENCE_SECONDS):
            pass  # the positive control: on this side it answers
        outcome = rig.run(f"import socket\nsocket.create_connection(({address!r}, {port}), 20)")
    assert outcome.stderr.splitlines()[-1] == "ConnectionRefusedError: [Errno 111] Connection refused"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@pytest.mark.parametrize("address", ["203.0.113.53", "127.0.0.1", "2001:db8::53"])
def test_a_dns_datagram_arrives_and_is_answered_from_the_address_that_was_asked(rig: Rig, address: str) -> None:
    """By packet information, so that a connected socket accepts the answer."""
    family = _family(address)

    async def scenario() -> str:
        code = (
            "import socket\n"
            f"s = socket.socket(socket.{family.name}, socket.SOCK_DGRAM)\n"
            f"s.connect(({address!r}, 53))\ns.send(b'who')\nprint(s.recv(99).decode())\n"
        )
        async with rig.prepared(code) as sandbox:
            listener = dict(sandbox.listeners)["dns-udp6" if family == socket.AF_INET6 else "dns-udp4"]
            await sandbox.release()
            ready = asyncio.Event()
            asyncio.get_running_loop().add_reader(listener, ready.set)
            await ready.wait()
            asyncio.get_running_loop().remove_reader(listener)
            data, ancillary, _, peer = listener.recvmsg(99, 999)
            # The kernel's own note of where it arrived says where the answer must come from.
            level, kind, info = ancillary[0]
            source = info[:4] + info[8:12] + info[8:12] if family == socket.AF_INET else info
            listener.sendmsg([b"answer to " + data], [(level, kind, source)], 0, peer)
            await sandbox.ended()
            return os.read(sandbox.stdout, 999).decode()

    assert rig.do(scenario()) == "answer to who\n"


def test_other_datagrams_are_refused_at_once(rig: Rig) -> None:
    """There is nobody at any other UDP port, and the program hears of it."""
    outcome = rig.run(
        "import socket\nfor address in ('203.0.113.9', '2001:db8::9'):\n"
        "    s = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    s.connect((address, 443))\n    s.send(b'x')\n"
        "    try: s.recv(9)\n    except ConnectionRefusedError: print('refused')\n"
    )
    assert outcome.stdout == "refused\nrefused\n"


def test_when_the_listeners_are_closed_there_is_no_network(rig: Rig) -> None:
    """What the proxy does not serve, because it died, is refused."""
    outcome = rig.run(
        "import socket\nfor place in (('203.0.113.9', 443), ('127.0.0.1', 3128), ('2001:db8::9', 443)):\n"
        "    try: socket.create_connection(place, 20)\n    except OSError as e: print(type(e).__name__)\n"
    )
    assert set(outcome.stdout.split()) <= {"ConnectionRefusedError", "ConnectionResetError", "TimeoutError"}
    assert len(outcome.stdout.split()) == 3


def test_the_program_cannot_change_its_network(rig: Rig) -> None:
    """Routes, addresses, rules and the interface answer EPERM; our listeners cannot be taken from us."""
    code = (
        "import fcntl, socket, struct\n"
        "def attempt(action):\n"
        "    try: action()\n"
        "    except OSError as e: print(e.errno)\n"
        "    else: print('WORKED')\n"
        "route = struct.pack('=IHHII', 28, 25, 0x305, 1, 0) + struct.pack('=8BI', 2, 0, 0, 0, 255, 0, 0, 0, 0)\n"
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\n"
        "s.send(route)\n"
        "print(-struct.unpack_from('=i', s.recv(999), 16)[0])\n"
        "t = socket.socket()\n"
        "attempt(lambda: fcntl.ioctl(t, 0x8914, struct.pack('16sH14x', b'lo', 0)))\n"
        "attempt(lambda: t.bind(('0.0.0.0', 1)))\n"
        "attempt(lambda: t.bind(('127.0.0.1', 3128)))\n"
        "attempt(lambda: t.setsockopt(socket.IPPROTO_IP, 19, 1))\n"
        "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12))\n"
    )

    async def scenario() -> str:
        async with rig.prepared(code) as sandbox:  # the listeners stay open, as the proxy has them
            await sandbox.release()
            await sandbox.ended()
            return os.read(sandbox.stdout, 999).decode()

    assert rig.do(scenario()).split() == [
        "1",
        "1",
        "13",
        "98",
        "1",
        "1",
    ]  # EPERM twice, EACCES, EADDRINUSE, EPERM twice


def test_a_sandbox_that_was_killed_leaves_no_listener(rig: Rig) -> None:
    """Ours are closed by `close`; a client on the other end sees the end."""

    async def scenario() -> bool:
        code = "import socket\nsocket.create_connection(('203.0.113.9', 80)).recv(1)"
        async with rig.prepared(code) as sandbox:
            await sandbox.release()
            connection, _ = await accept(dict(sandbox.listeners)["tcp4"])
            with connection:
                connection.setblocking(False)
                await sandbox.kill(KillReason.CANCELLED)
                await sandbox.ended()
                try:
                    return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
                except ConnectionResetError:
                    return True

    assert rig.do(scenario())


def test_waiting_for_an_interface_that_never_rises_ends_by_timeout() -> None:
    """In a namespace whose `lo` stays down."""
    code = (
        "import os\n"
        "from sandbox.isolation import netns\n"
        "os.unshare(os.CLONE_NEWNET if os.geteuid() == 0 else os.CLONE_NEWUSER | os.CLONE_NEWNET)\n"
        "try: netns.wait_for_loopback(0.05)\n"
        "except TimeoutError as e: print(e)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert answer.stdout == "the sandbox's loopback interface did not come up\n"
