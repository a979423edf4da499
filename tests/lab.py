"""What the black-box tests share: the peers outside, the policy that speaks of them, and a way to run probes.

Owns: the names and addresses of the outside, the main policy's text. Must not: look into the product; only its
library, its command and its log are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import trustme

from sandbox import SyncExecutor
from sandbox.contract import CodeCall, ToolResult
from tests import world
from tests.servers import (
    PATIENCE,
    BannerTcp,
    Dns,
    Http,
    Http2,
    Https,
    Loop,
    Peer,
    RecordingTcp,
    RecordingUdp,
    TlsBannerTcp,
    index_page,
    packument,
)

PRELUDE = (Path(__file__).parent / "inside.py").read_text()
MARK = "@@SEEN "

STRANGER = world.public_address()  # an address that no name leads to and nobody allows
STRANGER_V6 = world.public_address_v6()
STRANGER_PORTS = (22, 80, 443, 3306, 5432, 6379, 8080, 9418)
UDP_PORTS = (443, 9999)

type Call = Mapping[str, Any]
BLOCK: Call = {}
REGISTRY: Call = {"allow_network": True}
OPEN: Call = {"allow_network": True, "domains": []}


def named(*domains: str) -> Call:
    return {"allow_network": True, "domains": list(domains)}


NAMED = named("allowed.test")

# Names that lead to addresses which are not public. The answer is the DNS server's own.
PRIVATE_NAMES = {
    "loop.test": ["127.0.0.1"],
    "loop2.test": ["127.8.8.8"],
    "loop6.test": ["::1"],
    "zero.test": ["0.0.0.0"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "nat64.test": ["64:ff9b::7f00:1"],
    "sixtofour.test": ["2002:7f00:1::1"],
    "metadata.test": ["169.254.169.254"],
    "metadata6.test": ["fd00:ec2::254"],
    "linklocal.test": ["169.254.7.7"],
    "ten.test": ["10.1.2.3"],
    "seventeen.test": ["172.20.1.1"],
    "oneninetwo.test": ["192.168.3.4"],
    "cgnat.test": ["100.64.1.1"],
    "ula.test": ["fd12:3456::1"],
    "reserved.test": ["240.0.0.1"],
    "own.test": [world.OWN_ADDRESS],
    "mixed.test": ["127.0.0.1", "10.1.2.3"],
}


class Outside:
    """All peers, their names in the DNS, and the authority that vouches for them."""

    def __init__(self, loop: Loop, directory: Path) -> None:
        self.authority = trustme.CA()
        self.ca_file = directory / "upstream-ca.pem"
        self.ca_file.write_bytes(self.authority.cert_pem.bytes())
        self.dns = Dns(loop)
        issue = self.authority
        good, good6 = world.public_address(), world.public_address_v6()
        names = ["allowed.test", "sub.allowed.test", good]
        self.allowed = Http(loop, good, 80)
        self.allowed_tls = Https(loop, good, 443, issue, names)
        self.allowed_port = Http(loop, good, 8080)
        self.allowed_unlisted = [RecordingTcp(loop, good, port) for port in (22, 8081, 6379)]
        self.six = Http(loop, good6, 80)
        self.six_tls = Https(loop, good6, 443, issue, ["six.test"])
        bad = world.public_address()
        self.other = Http(loop, bad, 80)
        self.other_tls = Https(loop, bad, 443, issue, ["other.test", "*.other.test", "denied.test", "*.denied.test"])
        self.readonly = Http(loop, world.public_address(), 80)
        self.readonly_tls = Https(loop, self.readonly.address, 443, issue, ["readonly.test", "paths.test"])
        self.h2 = Http2(loop, world.public_address(), 443, issue, ["h2.test"])
        self.pinned = Https(loop, world.public_address(), 443, issue, ["pinned.test"])
        self.mail = BannerTcp(loop, world.public_address(), 2525)
        self.mail_tls = TlsBannerTcp(loop, self.mail.address, 4650, issue, ["mail.test"])
        self.mail_unlisted = BannerTcp(loop, self.mail.address, 2526)
        self.untrusted = Https(loop, world.public_address(), 443, trustme.CA(), ["untrusted.test"])
        self.index = Https(loop, world.public_address(), 443, issue, ["index.test"])
        self.npm = Https(loop, world.public_address(), 443, issue, ["modules.test"])
        self.index.page, self.npm.page = index_page, packument
        self.local = Http(loop, "127.0.0.1", 0)
        self.local_unlisted = RecordingTcp(loop, "127.0.0.1", 0)
        # Everything else at every address: whatever is dialled by mistake arrives here.
        self.strangers: list[Peer] = [
            kind
            for port in STRANGER_PORTS
            for kind in (RecordingTcp(loop, "0.0.0.0", port), RecordingTcp(loop, "::", port))
        ]
        self.udp = [RecordingUdp(loop, address, port) for port in UDP_PORTS for address in ("0.0.0.0", "::")]
        self.dns.zone.update(
            {
                "allowed.test": [good],
                "sub.allowed.test": [good],
                "six.test": [good6],
                "other.test": [bad],
                "denied.test": [bad],
                "sub.denied.test": [bad],
                "denied.other.test": [bad],
                "mitm.it": [bad],
                "readonly.test": [self.readonly.address],
                "paths.test": [self.readonly.address],
                "h2.test": [self.h2.address],
                "pinned.test": [self.pinned.address],
                "mail.test": [self.mail.address],
                "untrusted.test": [self.untrusted.address],
                "index.test": [self.index.address],
                "modules.test": [self.npm.address],
                "nobody.test": [world.public_address()],
                **PRIVATE_NAMES,
            }
        )
        self.dns.broken.add("broken.test")

    @property
    def peers(self) -> list[Peer]:
        named = [peer for peer in vars(self).values() if isinstance(peer, Peer)]
        return [*named, *self.allowed_unlisted, *self.strangers]

    def forget(self) -> None:
        for peer in self.peers:
            peer.forget()
        for recorder in self.udp:
            recorder.forget()
        self.dns.forget()

    def touched(self) -> dict[str, str]:
        """Every peer that has seen anything since the last `forget`."""
        seen = {
            f"{peer.address}:{peer.port}": f"{peer.journal.connections} connections, {bytes(peer.journal.received)!r:.200}"
            for peer in self.peers
            if not peer.untouched
        }
        seen |= {f"udp {one.address}:{one.port}": repr(one.datagrams) for one in self.udp if not one.untouched}
        return seen

    @contextlib.contextmanager
    def silence(self, *, lookups: bool = False) -> Iterator[None]:
        """Nothing at all leaves the sandboxes meanwhile: no peer is touched, no connection opened, no name asked.

        With `lookups` the product may ask the DNS: where a name's address is what it is denied for.
        """
        self.forget()
        before = world.traffic()
        yield
        sent = world.traffic() - before
        assert self.touched() == {}, "a peer was reached"
        assert sent.tcp_opened == 0, "a connection was opened to somewhere"
        if not lookups:
            assert self.dns.queries == [], "a name was asked for outside"
            assert sent.udp_sent == 0, "a datagram was sent to somewhere"

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        for recorder in self.udp:
            recorder.close()
        self.dns.close()


@dataclass(frozen=True)
class Run:
    """A call's result, what its probes reported, and the lines of the audit log that bear its attempts."""

    result: ToolResult
    seen: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def only(self) -> dict[str, Any]:
        """What the one probe saw."""
        assert len(self.seen) == 1, f"{self.result.status}: {self.result.stdout}{self.result.stderr}"
        return self.seen[0]

    @property
    def denials(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("decision") == "deny"]

    @property
    def reasons(self) -> set[str]:
        return {event["reason"] for event in self.denials}


def parse_seen(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(MARK)) for line in stdout.split("\n") if line.startswith(MARK)]


def read_events(log: Path) -> list[dict[str, Any]]:
    """All whole lines of an audit log. Each must be a JSON object."""
    if not log.exists():
        return []
    *lines, _rest = log.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


@dataclass
class Lab:
    """One executor under one policy, with the log it writes.

    `unrestricted` is another one for the calls that ask for every public host, which no policy with an allow list gives.
    """

    executor: SyncExecutor
    policy: Path
    log: Path
    outside: Outside
    unrestricted: Lab | None = None

    @property
    def proxy_pid(self) -> int:
        pid = self.executor.executor.proxy_pid
        assert pid is not None
        return pid

    @property
    def launcher_pid(self) -> int:
        pid = self.executor.executor.launcher_pid
        assert pid is not None
        return pid

    def run(self, code: str, *calls: Call, prelude: bool = True, **more: Any) -> Run:
        """Run `code`, with the probes of `tests.inside` before it, under the call's fields."""
        fields: dict[str, Any] = {"language": "python"}
        for some in calls:
            fields |= some
        if self.unrestricted is not None and fields.get("domains") == []:
            return self.unrestricted.run(code, fields, prelude=prelude, **more)
        call = CodeCall(code=(PRELUDE + "\n" + code) if prelude else code, **(fields | more))
        result = self.executor.run(call)
        ids = {attempt.attempt_id for attempt in result.attempts}
        events = [event for event in read_events(self.log) if event.get("attempt_id") in ids]
        return Run(result, parse_seen(result.stdout), events)

    def during[T](self, code: str, act: Callable[[], T], *calls: Call, **more: Any) -> tuple[Run, T]:
        """Run `code`, and `act` in another thread meanwhile; `act` waits itself for what it needs, such as `held`."""
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act)
            run = self.run(code, *calls, **more)
            return run, acting.result(PATIENCE)

    @property
    def hold_url(self) -> str:
        """What an attempt fetches to wait for the test. Needs the name `local.test`."""
        return f"http://local.test:{self.outside.local.port}/hold"

    def held(self) -> None:
        """Return once an attempt has asked for `hold_url`. The test has called `outside.forget` before."""
        self.outside.local.wait(lambda journal: any(seen.target == "/hold" for seen in journal.requests))


def unconfined(code: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The positive control: the same probe without any confinement, in the same world."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PRELUDE + "\n" + code],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return parse_seen(done.stdout)


def descriptors(pid: int) -> int:
    """How many a process has open; 0 where nobody but root may know, as of a process that hides its memory."""
    try:
        return psutil.Process(pid).num_fds()
    except psutil.AccessDenied:
        return 0


def main_policy(outside: Outside, *, attempts: int = 1) -> str:
    """The policy of most tests: it names every peer, so that the call's own request decides.

    A call has one attempt, unless the test is about more: what one attempt comes to is then plain.
    """
    allow = [
        {"host": "allowed.test"},
        {"host": "six.test"},
        {"host": "other.test"},
        {"host": "h2.test"},
        {"host": "pinned.test"},
        {"host": "untrusted.test"},
        {"host": "index.test"},
        {"host": "nobody.test", "ports": [8443]},
        {"host": "broken.test"},
        {"host": "rebind.test"},
        {"host": "readonly.test", "methods": ["GET", "HEAD"]},
        {"host": "paths.test", "paths": ["/public/**"]},
        {"host": "mail.test", "ports": [2525, 4650], "protocol": "tcp"},
        {"host": "local.test", "ports": [outside.local.port]},
        *({"host": name} for name in PRIVATE_NAMES),
    ]
    network = {
        "modes": ["block-all", "registry-default", "named"],
        "allow": allow,
        "ports": [80, 443, 8080],
        "inspect": {"passthrough": ["pinned.test"]},
        "registries": {"python": ["https://index.test/simple/"], "javascript": ["https://modules.test/"]},
    }
    return _policy("tests-main", outside, network, attempts)


def unrestricted_policy(outside: Outside) -> str:
    """The policy of the tests that ask for every public host."""
    return _policy("tests-unrestricted", outside, {"modes": ["unrestricted"]})


def _policy(name: str, outside: Outside, network: dict[str, Any], attempts: int = 1) -> str:
    port = outside.local.port
    document = {
        "version": 1,
        "name": name,
        "attempts": {"max": attempts},
        "network": {
            **network,
            "deny": [{"host": "denied.test"}, {"host": "denied.other.test"}],
            "hosts": {"local.test": "127.0.0.1"},
            "private_addresses": [{"host": "local.test", "cidr": "127.0.0.1/32", "ports": [port]}],
            "upstream": {"ca_file": str(outside.ca_file)},
        },
        "limits": {"timeout_seconds": {"default": 60, "max": 300}, "memory_mib": {"default": 512, "max": 2048}},
    }
    return json.dumps(document, indent=1)  # JSON is YAML
