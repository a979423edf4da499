"""Claims of `docs/threat-model.md` that need an attack of their own, each with the control in which it succeeds."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import secrets
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandbox import Executor, Settings
from sandbox.contract import CodeCall, ToolResult
from tests.escape.conftest import Confined
from tests.escape.test_escape import prove
from tests.lab import BLOCK, NAMED, OPEN, PRELUDE, STRANGER, STRANGER_V6, Call, Lab, Outside, parse_seen, unconfined

# Ways of opening a TCP connection that are not `connect` on a fresh socket. Each returns what the peer said.
FORMS = """
FAST_OPEN = 0x20000000
IP_OPTIONS, IP_FREEBIND, IP_TRANSPARENT, SO_MARK, SO_BINDTODEVICE, TCP_FASTOPEN_CONNECT = 4, 15, 19, 36, 25, 30

def attempt(prepare, family=socket.AF_INET, host="HOST4", port=8080):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE)
            prepare(sock, (host, port))
            return text(sock.recv(65536))
    except OSError as error:
        return repr(error)

def plain(sock, to): sock.connect(to); sock.sendall(b"CANARY")
def fast_open(sock, to): sock.settimeout(None); sock.sendto(b"CANARY", FAST_OPEN, to)
def fast_open_connect(sock, to): sock.setsockopt(6, TCP_FASTOPEN_CONNECT, 1); plain(sock, to)
def source_route(sock, to): sock.settimeout(1); sock.setsockopt(0, IP_OPTIONS, b"\\x83\\x07\\x04" + socket.inet_aton(to[0]) + b"\\0"); plain(sock, to)
def marked(sock, to): sock.setsockopt(1, SO_MARK, 1); plain(sock, to)
def on_device(sock, to): sock.setsockopt(1, SO_BINDTODEVICE, b"lo\\0"); plain(sock, to)
def foreign_source(sock, to): sock.setsockopt(0, IP_FREEBIND, 1); sock.bind(("9.9.9.9", 0)); plain(sock, to)
def transparent_source(sock, to): sock.setsockopt(0, IP_TRANSPARENT, 1); sock.bind(("9.9.9.9", 0)); plain(sock, to)
def own_address(sock, to): sock.bind((to[0], 0)); plain(sock, to)
def without_delay(sock, to): sock.setsockopt(6, 1, 1); sock.setsockopt(1, 13, struct.pack("ii", 1, 0)); plain(sock, to)
def mapped(sock, to): sock.setsockopt(41, 26, 0); sock.connect(("::ffff:" + to[0], to[1])); sock.sendall(b"CANARY")

forms = {form.__name__: attempt(form) for form in (plain, fast_open, fast_open_connect, source_route, marked, on_device,
         foreign_source, transparent_source, own_address, without_delay)}
forms["mapped"] = attempt(mapped, socket.AF_INET6)
forms["fast_open_v6"] = attempt(fast_open, socket.AF_INET6, "HOST6")
report(leaked=sorted(name for name, answer in forms.items() if "recorded" in answer))
""".replace("HOST4", STRANGER).replace("HOST6", STRANGER_V6)


@pytest.mark.parametrize("call", [BLOCK, NAMED], ids=["block-all", "named"])
def test_no_form_of_connecting_goes_round_the_capture(confined: Confined, outside: Outside, call: Call) -> None:
    """Fast open, source routes, marks, devices, foreign sources and mapped addresses are captured like any connection."""
    with outside.silence():
        run = confined(FORMS, call)
    assert run.only["leaked"] == []
    assert len(run.denials) >= 4
    assert {"plain", "fast_open", "mapped", "fast_open_v6"} <= set(unconfined(FORMS)[0]["leaked"])


def test_multicast_and_broadcast_reach_nobody(confined: Confined, outside: Outside) -> None:
    """A datagram to everybody reaches nobody, not even with the socket options that permit it."""
    probe = """
leaked = []
for host in ("255.255.255.255", "224.0.0.1", "239.1.2.3", "ff02::1%lo", "ff0e::1"):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        try:
            if ":" not in host:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            sock.sendto(b"CANARY", (host, 9999))
            if select.select([sock], [], [], 0.3)[0] and sock.recv(100):
                leaked.append(host)
        except OSError:
            pass
report(leaked=leaked)
"""
    for call in (BLOCK, NAMED, OPEN):
        with outside.silence():
            assert confined(probe, call).only["leaked"] == []
    outside.forget()
    unconfined(probe)  # which cannot be answered from such an address
    assert any(not recorder.untouched for recorder in outside.udp)


def test_what_the_host_side_keeps_is_not_there(lab: Lab, confined: Confined) -> None:
    """The policy, the log, the state directory and the program's own source can be neither read nor written by path."""
    state = sorted(path for path in (lab.log.parent / "state").rglob("*") if path.is_file())
    paths = [lab.log, lab.policy, *state, Path(__file__), Path(sys.modules["sandbox"].__file__ or "")]
    probe = f"""
leaked = []
for path in {[str(path) for path in paths]}:
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_PATH):
        try:
            os.close(os.open(path, flags))
            leaked.append(path)
        except OSError:
            pass
    try:
        os.listdir(os.path.dirname(path))
        leaked.append(os.path.dirname(path))
    except OSError:
        pass
report(leaked=leaked)
"""
    prove(confined, probe, re.escape(lab.log.name))


def test_the_hosts_name_is_not_seen(confined: Confined) -> None:
    """The host's name is in no place where programs look for it."""
    name = f"host-{secrets.token_hex(4)}"
    rename = f"os.unshare(os.CLONE_NEWUTS if os.getuid() == 0 else os.CLONE_NEWUSER | os.CLONE_NEWUTS); socket.sethostname('{name}')\n"
    probe = """
leaked = [n for n in (os.uname().nodename, socket.gethostname(), open("/proc/sys/kernel/hostname").read().strip()) if n != "sandbox"]
for path in ("/etc/hostname", "/etc/hosts"):
    if NAME in open(path).read():
        leaked.append(path)
report(leaked=leaked)
"""
    prove(confined, f'NAME = "{socket.gethostname()}"\n' + probe, name, setup=rename)


def test_descriptors_of_the_caller_are_not_inherited(lab: Lab) -> None:
    """A descriptor that the process which runs the command has open, and would hand on, is not the program's."""
    with tempfile.TemporaryFile() as secret:
        fd = secret.fileno()
        link = os.readlink(f"/proc/self/fd/{fd}")
        probe = f"""
import os
names = {{str({fd}), *os.listdir("/proc/self/fd")}}
print("@@SEEN", '{{"leaked": %d}}' % any(os.path.islink("/proc/self/fd/" + n) and os.readlink("/proc/self/fd/" + n) == {link!r} for n in names))
"""
        inside = _command(lab, ["--code", probe], pass_fds=[fd])
        outside = subprocess.run(
            [sys.executable, "-c", probe], pass_fds=[fd], capture_output=True, text=True, check=True
        )
    assert parse_seen(inside) == [{"leaked": 0}]
    assert parse_seen(outside.stdout) == [{"leaked": 1}]


def test_the_operators_terminal_is_not_the_programs(lab: Lab) -> None:
    """Run from a terminal, the program has none: it cannot open it, nor find out its size through a stream."""
    probe = """
import fcntl, os
leaked = 0
try:
    os.close(os.open("/dev/tty", os.O_RDWR)); leaked |= 1
except OSError: pass
for fd in (0, 1, 2):
    if os.isatty(fd): leaked |= 2
print("@@SEEN", '{"leaked": %d}' % leaked)
"""
    command = [sys.executable, "-m", "sandbox.cli", "run", "--policy", str(lab.policy), "--code", probe]
    assert _on_terminal(command, lab) == [{"leaked": 0}]
    assert _on_terminal([sys.executable, "-c", probe], lab) == [{"leaked": 3}]


def test_what_the_command_says_of_hostile_names_is_printable(lab: Lab) -> None:
    """Escape sequences in a name that was asked for do not reach the operator's terminal by the command's own words."""
    probe = r"""
label = b"\x1b]0;owned\x07"
name = bytes([len(label)]) + label + b"\x04test\x00"
query = b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + name + b"\x00\x01\x00\x01"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(PATIENCE); sock.connect(("127.0.0.1", 53)); sock.send(query); sock.recv(512)
through_proxy("GET http://x\x1b[2J\u009b31m.test/ HTTP/1.1\r\nHost: x\r\n\r\n")
print("\x1b[2J")
"""
    done = subprocess.run(
        [sys.executable, "-m", "sandbox.cli", "run", "--policy", str(lab.policy), "-"],
        input=(Path(__file__).parents[1] / "inside.py").read_text() + probe,
        env={**os.environ, "SLUICEGATE_STATE_DIR": str(lab.log.parent / "cli")},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "sluicegate: denied" in done.stderr
    assert "owned" in done.stderr, "the control: the name is told"
    assert all(character.isprintable() or character == "\n" for character in done.stderr), done.stderr
    assert "\x1b" in done.stdout, "the program's own output is its own: it is passed on as it is"


def test_a_flood_in_one_attempt_is_not_anothers(lab: Lab, outside: Outside) -> None:
    """While one attempt holds nearly all the connections it may have and asks for names without end, another is served as ever."""
    flood = f"""
held = []
for _ in range(250):
    sock = proxy_socket()
    sock.sendall(b"GET http://allowed.test/ HTTP/1.1\\r\\nHost: allo")
    held.append(sock)
import threading
def ask_on():
    while True:
        dns("other.test")
for _ in range(4):
    threading.Thread(target=ask_on, daemon=True).start()
report(done=fetch("{lab.hold_url}")["status"])
"""

    probe = """
report(allowed=[fetch("https://allowed.test/echo")["status"] for _ in range(5)], denied=fetch("http://other.test/")["status"])
"""
    outside.forget()

    async def main() -> tuple[ToolResult, ToolResult]:
        root = lab.log.parent
        settings = Settings(state_dir=root / "flood", audit_log=root / "flood.jsonl")
        async with Executor(lab.policy, settings=settings) as executor:
            domains = ["local.test", "allowed.test"]
            flooding = asyncio.ensure_future(
                executor.run(
                    CodeCall(language="python", code=PRELUDE + flood, allow_network=True, domains=domains, timeout=100)
                )
            )
            await asyncio.to_thread(lab.held)
            served = await executor.run(
                CodeCall(language="python", code=PRELUDE + probe, allow_network=True, domains=["allowed.test"])
            )
            outside.local.release()
            return await flooding, served

    flooding, served = asyncio.run(main())
    assert parse_seen(served.stdout) == [{"allowed": [200] * 5, "denied": 403}], served.stderr
    assert parse_seen(flooding.stdout) == [{"done": 200}], flooding.stderr
    assert flooding.network.denied > 100, "the control: it did flood"


def test_a_flood_of_requests_costs_no_neighbour_its_attempt(lab: Lab, outside: Outside) -> None:
    """Nor the proxy, nor more than a moment: calls beside it start, are served and end, each with one attempt."""
    flood = """
import select, time
requests = b"GET http://a.test/ HTTP/1.1\\r\\nHost: a.test\\r\\n\\r\\n" * 5000
crumbs = b"POST http://a.test/ HTTP/1.1\\r\\nHost: a.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n" + b"1\\r\\na\\r\\n" * 20000
poll, socks, sent = select.poll(), {}, 0
print("flooding", flush=True)
until = time.monotonic() + 10
while time.monotonic() < until:
    while len(socks) < 250:
        sock = proxy_socket()
        sock.setblocking(False)
        socks[sock.fileno()] = (sock, crumbs if len(socks) % 2 else requests)
        poll.register(sock, select.POLLIN | select.POLLOUT)
    for number, ready in poll.poll(100):
        sock, payload = socks[number]
        try:
            if ready & select.POLLIN and not sock.recv(1 << 20):
                raise ConnectionError
            sent += sock.send(payload)
        except BlockingIOError:
            pass
        except OSError:
            poll.unregister(number)
            socks.pop(number)[0].close()
report(sent=sent)
"""
    probe = """
import time
def seconds():
    started = time.monotonic()
    assert fetch("https://allowed.test/echo")["status"] == 200
    return time.monotonic() - started
report(longest=max(seconds() for _ in range(5)))
"""

    async def main() -> tuple[ToolResult, ToolResult, list[ToolResult], bool]:
        root = lab.log.parent
        settings = Settings(state_dir=root / "flood-requests", audit_log=root / "flood-requests.jsonl")
        async with Executor(lab.policy, settings=settings) as executor:
            begun = asyncio.Event()
            proxy = executor.proxy_pid
            sleeping = executor.submit(CodeCall(language="python", code="import time; time.sleep(8)", timeout=60))
            flooding = executor.submit(
                CodeCall(language="python", code=PRELUDE + flood, timeout=60), lambda _data: begun.set()
            )
            await asyncio.wait_for(begun.wait(), 30)
            call = CodeCall(language="python", code=PRELUDE + probe, allow_network=True, domains=["allowed.test"])
            beside = [await executor.run(call) for _ in range(3)]
            return await flooding.result(), await sleeping.result(), beside, executor.proxy_pid == proxy

    flooding, sleeping, beside, same_proxy = asyncio.run(main())
    assert same_proxy
    assert [len(result.attempts) for result in (flooding, sleeping, *beside)] == [1] * 5
    for result in beside:
        (seen,) = parse_seen(result.stdout)
        assert isinstance(seen["longest"], float)
        assert seen["longest"] < 2
    (seen,) = parse_seen(flooding.stdout.partition("\n")[2])
    assert isinstance(seen["sent"], int)
    assert seen["sent"] > 10_000_000, "the control: it did flood"
    assert flooding.network.denied > 100


def _command(lab: Lab, arguments: list[str], pass_fds: list[int]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sandbox.cli", "run", "--policy", str(lab.policy), *arguments],
        env={**os.environ, "SLUICEGATE_STATE_DIR": str(lab.log.parent / "cli")},
        pass_fds=pass_fds, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def _on_terminal(command: list[str], lab: Lab) -> list[dict[str, object]]:
    """What a command reports that has a terminal of its own as its controlling terminal and as its streams."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["SLUICEGATE_STATE_DIR"] = str(lab.log.parent / "cli")
        os.execv(command[0], command)
    data = b""
    try:
        while select.select([terminal], [], [], 60)[0]:
            data += os.read(terminal, 65536)
    except OSError:
        pass  # the other side has ended
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, data
    return parse_seen(data.decode().replace("\r\n", "\n"))
