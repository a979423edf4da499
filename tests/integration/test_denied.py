"""What no attempt may reach. Each case is proved three ways: the peer saw nothing, nothing was opened or asked for
outside, and the log says why; and each has a control in which the same probe does arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from proxy.network import Reason
from tests import world
from tests.lab import (
    BLOCK,
    NAMED,
    OPEN,
    PRIVATE_NAMES,
    REGISTRY,
    STRANGER,
    STRANGER_PORTS,
    STRANGER_V6,
    UDP_PORTS,
    Call,
    Lab,
    Outside,
    named,
    unconfined,
)

OTHER = named("other.test")
BOTH = named("allowed.test", "other.test")


@dataclass(frozen=True)
class Case:
    """`probe` under `call` is denied with one of `reasons`; under `control` (None: unconfined) it, or `allowed`, arrives.

    `at` names the attributes of `Outside` one of which the control's probe reaches.
    """

    name: str
    call: Call
    probe: str
    reasons: frozenset[Reason]
    control: Call | None
    at: tuple[str, ...]
    allowed: str | None = None


def case(
    name: str,
    call: Call,
    probe: str,
    reasons: Reason | set[Reason],
    control: Call | None,
    at: str,
    allowed: str | None = None,
) -> Case:
    some = frozenset({reasons}) if isinstance(reasons, Reason) else frozenset(reasons)
    return Case(name, call, probe, some, control, tuple(at.split()), allowed)


GET_OTHER = "GET http://other.test/echo HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n"
NOT_ALLOWED = Reason.HOST_NOT_ALLOWED


def by_every_way(host: str) -> str:
    """GET from one host in the six ways a client has: proxy and capture, with and without TLS, CONNECT, SOCKS5."""
    return f"""
def tunnelled(sock, code):
    with sock:
        if code not in (0, 200):
            return {{"refused": code}}
        try:
            with tls(sock, "{host}") as inner:
                return ask(inner, "GET /echo HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n")
        except OSError as error:
            return {{"refused": repr(error)}}

answer, sock = connect("{host}:443")
code, other = socks5("{host}", 443)
report(
    proxied=through_proxy("GET http://{host}/echo HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n"),
    captured=exchange("{host}", 80, b"GET /echo HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n"),
    captured_tls=https("{host}", "{host}", "{host}"),
    connect=tunnelled(sock, answer["status"]),
    socks5=tunnelled(other, code),
    urllib=[fetch("http://{host}/echo"), fetch("https://{host}/echo")],
)
"""


CASES = [
    case("http-to-another-name-by-proxy", NAMED, f'report(seen=through_proxy("{GET_OTHER}"))', NOT_ALLOWED, OTHER, "other"),
    case("http-to-another-name-by-urllib", NAMED, 'report(seen=fetch("http://other.test/echo"))', NOT_ALLOWED, OTHER, "other"),
    case("https-to-another-name", NAMED, 'report(seen=fetch("https://other.test/echo"))', NOT_ALLOWED, OTHER, "other_tls"),
    case("a-sibling-is-no-subdomain", named("sub.allowed.test"), 'report(seen=fetch("http://allowed.test/"))',
         NOT_ALLOWED, NAMED, "allowed"),
    case("every-way-to-another-name", NAMED, by_every_way("other.test"), NOT_ALLOWED, OTHER, "other other_tls"),
    case("every-way-under-block-all", BLOCK, by_every_way("allowed.test"), Reason.NETWORK_OFF, NAMED, "allowed allowed_tls"),
    case("every-way-under-registry-default", REGISTRY, by_every_way("allowed.test"), NOT_ALLOWED, NAMED,
         "allowed allowed_tls"),
    case("every-way-to-a-denied-name", OPEN, by_every_way("denied.test"), Reason.HOST_DENIED, OPEN, "other other_tls",
         by_every_way("other.test")),
    case("every-way-below-a-denied-name", OPEN, by_every_way("sub.denied.test"), Reason.HOST_DENIED, OPEN,
         "other other_tls", by_every_way("other.test")),
    case("every-way-to-a-denied-name-below-a-named-one", OTHER, by_every_way("denied.other.test"), Reason.HOST_DENIED, OTHER,
         "other other_tls", by_every_way("other.test")),
    # TLS names
    case("another-sni", NAMED, 'report(seen=https("allowed.test", "other.test", "allowed.test", verify=False))',
         Reason.SNI_MISMATCH, NAMED, "allowed_tls", 'report(seen=https("allowed.test", "allowed.test", "allowed.test"))'),
    case("another-sni-even-if-both-are-allowed", BOTH,
         'report(seen=https("allowed.test", "other.test", "allowed.test", verify=False))', Reason.SNI_MISMATCH, BOTH,
         "other_tls", 'report(seen=https("other.test", "other.test", "other.test"))'),
    case("no-sni", NAMED, 'report(seen=https("allowed.test", None, "allowed.test"))', Reason.SNI_MISSING, NAMED,
         "allowed_tls", 'report(seen=https("allowed.test", "allowed.test", "allowed.test"))'),
    case("another-host-inside-tls", NAMED, 'report(seen=https("allowed.test", "allowed.test", "other.test"))',
         Reason.HOST_MISMATCH, NAMED, "allowed_tls", 'report(seen=https("allowed.test", "allowed.test", "allowed.test"))'),
    case("another-host-inside-tls-even-if-both-are-allowed", BOTH,
         'report(seen=https("allowed.test", "allowed.test", "other.test"))', Reason.HOST_MISMATCH, BOTH,
         "allowed_tls", 'report(seen=https("allowed.test", "allowed.test", "allowed.test"))'),
    case("another-sni-inside-connect", NAMED, """
answer, sock = connect("allowed.test:443")
try:
    with tls(sock, "other.test", verify=False) as inner:
        report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
except OSError as error:
    report(seen=repr(error))
""", Reason.SNI_MISMATCH, NAMED, "allowed_tls", """
answer, sock = connect("allowed.test:443")
with tls(sock, "allowed.test") as inner:
    report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
"""),
    case("another-sni-inside-socks5", NAMED, """
code, sock = socks5("allowed.test", 443)
try:
    with tls(sock, "other.test", verify=False) as inner:
        report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
except OSError as error:
    report(seen=repr(error))
""", Reason.SNI_MISMATCH, NAMED, "allowed_tls", """
code, sock = socks5("allowed.test", 443)
with tls(sock, "allowed.test") as inner:
    report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
"""),
    case("another-sni-of-a-passthrough-host", named("pinned.test"),
         'report(seen=https("pinned.test", "other.test", "pinned.test", verify=False))', Reason.SNI_MISMATCH,
         named("pinned.test"), "pinned", 'report(seen=https("pinned.test", "pinned.test", "pinned.test", verify=False))'),
    # HTTP names
    case("absolute-uri-to-another-name", NAMED,
         'report(seen=through_proxy("GET http://other.test/echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))',
         {NOT_ALLOWED, Reason.HOST_MISMATCH}, OTHER, "other", f'report(seen=through_proxy("{GET_OTHER}"))'),
    case("absolute-uri-with-another-host", NAMED,
         'report(seen=through_proxy("GET http://allowed.test/echo HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n"))',
         Reason.HOST_MISMATCH, NAMED, "allowed",
         'report(seen=through_proxy("GET http://allowed.test/echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))'),
    case("captured-with-another-host", NAMED,
         'report(seen=exchange("allowed.test", 80, b"GET /echo HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n"))',
         Reason.HOST_MISMATCH, NAMED, "allowed",
         'report(seen=exchange("allowed.test", 80, b"GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))'),
    case("captured-with-an-absolute-uri-to-another-name", NAMED,
         'report(seen=exchange("allowed.test", 80, b"GET http://other.test/echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))',
         {Reason.HOST_MISMATCH, NOT_ALLOWED, Reason.MALFORMED_REQUEST}, NAMED, "allowed",
         'report(seen=exchange("allowed.test", 80, b"GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))'),
    case("host-with-another-port", NAMED,
         'report(seen=through_proxy("GET http://allowed.test/echo HTTP/1.1\\r\\nHost: allowed.test:22\\r\\n\\r\\n"))',
         Reason.HOST_MISMATCH, NAMED, "allowed",
         'report(seen=through_proxy("GET http://allowed.test/echo HTTP/1.1\\r\\nHost: allowed.test:80\\r\\n\\r\\n"))'),
    # Ports
    *(
        case(f"port-{port}-of-the-allowed-name-by-proxy", NAMED,
             f'report(seen=through_proxy("GET http://allowed.test:{port}/ HTTP/1.1\\r\\nHost: allowed.test:{port}\\r\\n\\r\\n"))',
             Reason.PORT_NOT_ALLOWED, NAMED, "allowed_port",
             'report(seen=through_proxy("GET http://allowed.test:8080/ HTTP/1.1\\r\\nHost: allowed.test:8080\\r\\n\\r\\n"))')
        for port in (22, 6379, 8081)
    ),
    case("ports-of-the-allowed-name-by-capture", NAMED,
         'report(seen=[exchange("allowed.test", port, b"GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n") for port in (22, 6379, 8081)])',
         Reason.PORT_NOT_ALLOWED, NAMED, "allowed_port",
         'report(seen=exchange("allowed.test", 8080, b"GET / HTTP/1.1\\r\\nHost: allowed.test:8080\\r\\n\\r\\n"))'),
    case("ports-of-the-allowed-name-by-connect", NAMED, """
for port in (22, 6379, 8081):
    answer, sock = connect(f"allowed.test:{port}")
    with sock:
        report(seen=ask(sock, "GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n") if answer["status"] == 200 else answer)
""", Reason.PORT_NOT_ALLOWED, NAMED, "allowed_port", """
answer, sock = connect("allowed.test:8080")
report(seen=ask(sock, "GET / HTTP/1.1\\r\\nHost: allowed.test:8080\\r\\n\\r\\n"))
"""),
    case("ports-of-the-allowed-name-by-socks5", NAMED, """
for port in (22, 6379, 8081):
    code, sock = socks5("allowed.test", port)
    with sock:
        report(seen=ask(sock, "GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n") if code == 0 else code)
""", Reason.PORT_NOT_ALLOWED, NAMED, "allowed_port", """
code, sock = socks5("allowed.test", 8080)
report(seen=ask(sock, "GET / HTTP/1.1\\r\\nHost: allowed.test:8080\\r\\n\\r\\n"))
"""),
    case("an-unlisted-port-of-a-raw-tcp-host", named("mail.test"), 'report(seen=exchange("mail.test", 2526))',
         Reason.PORT_NOT_ALLOWED, named("mail.test"), "mail", 'report(seen=exchange("mail.test", 2525, b"HELO\\r\\n"))'),
    # Not HTTP
    case("raw-bytes-to-the-allowed-name", NAMED, 'report(seen=[exchange("allowed.test", port, b"CANARY\\r\\n\\r\\n") for port in (80, 443, 8080)])',
         {Reason.PROTOCOL_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, None, "allowed allowed_port"),
    case("raw-bytes-to-an-unrestricted-name", OPEN, 'report(seen=[exchange("allowed.test", port, b"CANARY\\r\\n\\r\\n") for port in (80, 443)])',
         {Reason.PROTOCOL_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, None, "allowed"),
    case("raw-bytes-inside-connect", NAMED, """
answer, sock = connect("allowed.test:443")
report(connected=answer["status"], seen=ask(sock, b"CANARY\\r\\n\\r\\n"))
""", {Reason.PROTOCOL_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, NAMED, "allowed_tls", """
answer, sock = connect("allowed.test:443")
with tls(sock, "allowed.test") as inner:
    report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
"""),
    case("binary-inside-connect", NAMED, """
answer, sock = connect("allowed.test:80")
report(connected=answer["status"], seen=ask(sock, bytes(range(256)) * 16))
""", {Reason.PROTOCOL_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, NAMED, "allowed", """
answer, sock = connect("allowed.test:80")
report(seen=ask(sock, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
"""),
    case("raw-bytes-inside-socks5", NAMED, """
code, sock = socks5("allowed.test", 443)
report(code=code, seen=ask(sock, b"CANARY\\r\\n\\r\\n"))
""", {Reason.PROTOCOL_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, NAMED, "allowed_tls", """
code, sock = socks5("allowed.test", 443)
with tls(sock, "allowed.test") as inner:
    report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
"""),
    *(
        case(f"raw-bytes-inside-tls-{where}", NAMED, f"""
{opening}
with tls(sock, "allowed.test") as inner:
    report(seen=ask(inner, b"\\x00CANARY\\x01\\r\\n\\r\\n"))
""", {Reason.PROTOCOL_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, NAMED, "allowed_tls", f"""
{opening}
with tls(sock, "allowed.test") as inner:
    report(seen=ask(inner, "GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
""")
        for where, opening in (
            ("inside-connect", 'sock = connect("allowed.test:443")[1]'),
            ("captured", 'sock = socket.create_connection(("allowed.test", 443), PATIENCE)'),
        )
    ),
    # Raw sockets to addresses: the controls are unconfined
    *(
        case(f"raw-socket-{family}-{mode}", call, f"""
report(seen=[exchange("{address}", port, family=socket.{family}) for port in {STRANGER_PORTS}])
""", {Reason.NETWORK_OFF} if mode == "block-all" else {NOT_ALLOWED, Reason.PROTOCOL_NOT_ALLOWED, Reason.PORT_NOT_ALLOWED,
      Reason.MALFORMED_REQUEST}, None, "strangers")
        for mode, call in (("block-all", BLOCK), ("registry-default", REGISTRY), ("named", NAMED))
        for family, address in (("AF_INET", STRANGER), ("AF_INET6", STRANGER_V6))
    ),
    *(
        case(f"http-to-an-address-{mode}", call, f"""
report(seen=[
    exchange("{STRANGER}", 80, b"GET / HTTP/1.1\\r\\nHost: {STRANGER}\\r\\n\\r\\n"),
    exchange("{STRANGER_V6}", 80, b"GET / HTTP/1.1\\r\\nHost: [{STRANGER_V6}]\\r\\n\\r\\n", socket.AF_INET6),
    exchange("{STRANGER}", 80, b"GET / HTTP/1.0\\r\\n\\r\\n"),
])
""", {Reason.NETWORK_OFF} if mode == "block-all" else {NOT_ALLOWED, Reason.MALFORMED_REQUEST}, None, "strangers")
        for mode, call in (("block-all", BLOCK), ("named", NAMED))
    ),
    case("socks5-and-connect-to-an-address", NAMED, f"""
for host, target in (("{STRANGER}", "{STRANGER}:443"), ("{STRANGER_V6}", "[{STRANGER_V6}]:443")):
    code, sock = socks5(host, 443)
    report(seen=ask(sock, b"CANARY\\r\\n\\r\\n") if code == 0 else code)
    answer, sock = connect(target)
    report(seen=ask(sock, b"CANARY\\r\\n\\r\\n") if answer["status"] == 200 else answer)
""", {NOT_ALLOWED, Reason.PROTOCOL_NOT_ALLOWED}, None, "strangers",
         f'report(seen=[exchange("{STRANGER}", 443), exchange("{STRANGER_V6}", 443, family=socket.AF_INET6)])'),
    # Read-only rules
    *(
        case(f"{method}-under-a-read-only-rule", named("readonly.test"),
             f'report(seen=fetch("https://readonly.test/echo", "{method}"))', Reason.METHOD_NOT_ALLOWED,
             named("readonly.test"), "readonly_tls", 'report(seen=fetch("https://readonly.test/echo"))')
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")
    ),
    case("a-body-under-a-read-only-rule", named("readonly.test"), """
report(seen=fetch("http://readonly.test/echo", "GET", b"CANARY"))
report(seen=through_proxy("GET http://readonly.test/ HTTP/1.1\\r\\nHost: readonly.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n6\\r\\nCANARY\\r\\n0\\r\\n\\r\\n"))
""", Reason.BODY_NOT_ALLOWED, named("readonly.test"), "readonly", 'report(seen=fetch("http://readonly.test/echo"))'),
    case("a-websocket-under-a-read-only-rule", named("readonly.test"), """
report(seen=through_proxy(
    "GET http://readonly.test/ws HTTP/1.1\\r\\nHost: readonly.test\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n"
    "Sec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\\r\\n\\r\\n"))
""", Reason.METHOD_NOT_ALLOWED, named("readonly.test"), "readonly", 'report(seen=fetch("http://readonly.test/echo"))'),
    *(
        case(f"path-{name}-outside-the-rule", named("paths.test"),
             f'report(seen=through_proxy("GET http://paths.test{path} HTTP/1.1\\r\\nHost: paths.test\\r\\n\\r\\n"))',
             {Reason.PATH_NOT_ALLOWED, Reason.MALFORMED_REQUEST}, named("paths.test"), "readonly",
             'report(seen=fetch("http://paths.test/public/a/b?c=/../d"))')
        for name, path in (
            ("other", "/private"), ("dots", "/public/../private"), ("encoded-dots", "/public/%2e%2e/private"),
            ("encoded-slash", "/public/..%2fprivate"), ("double-encoded", "/public/%252e%252e/private"),
            ("backslash", "/public/..\\\\private"), ("empty-segment", "//public/x"), ("prefix", "/publicity"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_denied(lab: Lab, outside: Outside, case: Case) -> None:
    """Nothing of the denied probe leaves, the log has its reason, and the control arrives."""
    with outside.silence():
        run = lab.run(case.probe, case.call)
    assert run.result.status == "success", run.result.stderr
    assert run.seen
    assert run.reasons & case.reasons, run.events
    assert not [event for event in run.denials if event["reason"] == Reason.INTERNAL_ERROR]
    assert run.result.network.denied > 0

    outside.forget()
    if case.control is None:
        assert unconfined(case.allowed or case.probe)
    else:
        assert lab.run(case.allowed or case.probe, case.control).result.status == "success"
    reached = [
        peer for name in case.at for peer in (outside.strangers if name == "strangers" else [getattr(outside, name)])
    ]
    assert any(not peer.untouched for peer in reached), "the control did not arrive, so the denial proves nothing"
    if case.control is not None:
        assert any(peer.journal.received for peer in reached)


@pytest.mark.parametrize("how", ["sendto", "sendmsg", "connect"])
@pytest.mark.parametrize("call", [BLOCK, NAMED, OPEN], ids=["block-all", "named", "unrestricted"])
def test_no_datagram_leaves(lab: Lab, outside: Outside, call: Call, how: str) -> None:
    """UDP reaches nobody in any mode, to addresses and to allowed names, over both families."""
    hosts = (STRANGER, STRANGER_V6, "127.0.0.1", "8.8.8.8")
    targets = [(host, port) for host in hosts for port in UDP_PORTS]
    probe = f"report(answers=datagrams({targets}, {how!r}), named=datagrams([('allowed.test', 9999)], {how!r}))"
    with outside.silence():
        run = lab.run(probe, call)
    assert run.only == {"answers": [], "named": []}

    seen = unconfined(probe)[0]
    assert len(seen["answers"]) == len(targets)
    assert seen["named"] in [[recorder.nonce] for recorder in outside.udp]


def test_multipath_tcp_is_tcp(lab: Lab, outside: Outside) -> None:
    """Multipath TCP, which some languages use for every connection, is captured and judged like TCP."""
    probe = f"""
seen = []
for host in ("{STRANGER}", "HOST"):
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) as sock:
            sock.settimeout(PATIENCE)
            sock.connect((host, 80))
            seen.append(ask(sock, f"GET /echo HTTP/1.1\\r\\nHost: {{host}}\\r\\n\\r\\n"))
    except OSError as error:
        seen.append({{"status": None, "error": repr(error)}})
report(seen=seen)
"""
    with outside.silence():
        run = lab.run(probe.replace("HOST", "other.test"), NAMED)
    assert [one["status"] for one in run.only["seen"]] in ([403, None], [None, None])
    allowed = lab.run(probe.replace("HOST", "allowed.test"), NAMED).only["seen"][1]
    assert allowed["status"] == 200 or "rotocol" in allowed["error"], "works, where the kernel has it"


SPELLINGS = {
    "127.0.0.1": "loopback", "127.1": "short", "127.0.1": "three parts", "2130706433": "decimal",
    "0x7f000001": "hexadecimal", "0x7f.1": "mixed", "0177.0.0.1": "octal", "00000177.1": "long octal",
    "127.0.0.2": "another loopback", "127.255.255.254": "the last loopback", "0.0.0.0": "unspecified",
    "0": "short unspecified", "[::1]": "v6 loopback", "[::]": "v6 unspecified", "[0:0:0:0:0:0:0:1]": "long v6",
    "[::ffff:127.0.0.1]": "mapped", "[::ffff:7f00:1]": "mapped in hexadecimal", "[::127.0.0.1]": "compatible",
    "[64:ff9b::7f00:1]": "NAT64", "[2002:7f00:1::]": "6to4", "[::1%25lo]": "with a zone",
    "localhost": "a name", "localhost.": "with a dot", "LOCALHOST": "in capitals",
    "169.254.169.254": "metadata", "2852039166": "metadata in decimal", "0xa9fea9fe": "metadata in hexadecimal",
    "0251.0376.0251.0376": "metadata in octal", "[fd00:ec2::254]": "metadata over v6", "[::ffff:a9fe:a9fe]": "mapped metadata",
    "10.0.0.1": "private", "172.16.0.1": "private", "192.168.0.1": "private", "100.64.0.1": "carrier-grade NAT",
    "100.100.100.200": "metadata in CGNAT", "[fc00::1]": "unique local", "[fe80::1]": "link-local", "[fec0::1]": "site-local",
    "224.0.0.1": "multicast", "[ff02::1]": "v6 multicast", "255.255.255.255": "broadcast", "240.0.0.1": "reserved",
    "198.18.0.1": "benchmarking, which the proxy uses itself", "192.0.2.1": "documentation", "198.51.100.1": "documentation",
    world.OWN_ADDRESS: "this host's own", f"[::ffff:{world.OWN_ADDRESS}]": "this host's own, mapped",
}  # fmt: skip


@pytest.mark.parametrize("call", [OPEN, NAMED, BLOCK], ids=["unrestricted", "named", "block-all"])
@pytest.mark.parametrize("way", ["proxied", "connect", "socks5"])
def test_no_spelling_of_an_address_that_is_not_public_is_reached(
    lab: Lab, outside: Outside, call: Call, way: str
) -> None:
    """Loopback, private, metadata and this host's own addresses are denied however they are written."""
    probe = f"""
for host in {list(SPELLINGS)}:
    get = f"GET / HTTP/1.1\\r\\nHost: {{host}}:8080\\r\\n\\r\\n"
    if "{way}" == "proxied":
        answer = through_proxy(get.replace("GET /", f"GET http://{{host}}:8080/"))
    elif "{way}" == "connect":
        answer, sock = connect(f"{{host}}:8080")
        with sock:
            if answer["status"] == 200:
                answer = ask(sock, get)
    else:
        code, sock = socks5(host.strip("[]"), 8080)
        with sock:
            answer = ask(sock, get) if code == 0 else {{"status": code}}
    report(host=host, status=answer["status"])
"""
    with outside.silence(lookups=call is OPEN):
        run = lab.run(probe, call)
    assert [one["host"] for one in run.seen] == list(SPELLINGS), run.result.stderr
    assert not [one for one in run.seen if one["status"] == 200]
    known = {Reason.ADDRESS_NOT_PUBLIC, Reason.MALFORMED_REQUEST, Reason.HOST_NOT_ALLOWED, Reason.NETWORK_OFF}
    assert run.reasons <= known
    if call is OPEN:
        assert Reason.ADDRESS_NOT_PUBLIC in run.reasons
        literals = len([host for host in SPELLINGS if "%" not in host])
        assert len([e for e in run.denials if e["reason"] == Reason.ADDRESS_NOT_PUBLIC]) >= literals
        public = lab.run(
            f'report(seen=through_proxy("GET http://{outside.other.address}/ HTTP/1.1\\r\\nHost: {outside.other.address}\\r\\n\\r\\n"))',
            OPEN,
        )
        assert public.only["seen"]["json"]["nonce"] == outside.other.nonce, (
            "a public address is reached under the same grant"
        )


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_an_allowed_name_with_a_private_address_is_denied(lab: Lab, outside: Outside, name: str) -> None:
    """A name that the policy allows is not reached at an address that is not public, in any way."""
    for call in (named(name), OPEN):
        with outside.silence(lookups=True):
            run = lab.run(by_every_way(name), call)
        assert run.result.status == "success", run.result.stderr
        assert Reason.ADDRESS_NOT_PUBLIC in run.reasons, run.events
        assert run.only["proxied"]["status"] == 403
        assert run.only["proxied"]["json"]["reason"]
        addresses = {event["address"] for event in run.denials if event["reason"] == Reason.ADDRESS_NOT_PUBLIC}
        assert addresses & {*PRIVATE_NAMES[name], *(a.removeprefix("::ffff:") for a in PRIVATE_NAMES[name])}


def test_a_private_address_that_the_policy_lists_is_reached(lab: Lab, outside: Outside) -> None:
    """The control of the private addresses: what `private_addresses` lists is reached, at its port, and no other port."""
    port = outside.local.port
    run = lab.run(f'report(seen=fetch("http://local.test:{port}/echo"))', named("local.test"))
    assert run.only["seen"]["json"]["nonce"] == outside.local.nonce
    with outside.silence():
        run = lab.run(f'report(seen=fetch("http://local.test:{outside.local_unlisted.port}/"))', named("local.test"))
    assert Reason.PORT_NOT_ALLOWED in run.reasons
    with outside.silence():  # in the mode that allows any port the address is what it is denied for
        run = lab.run(f'report(seen=fetch("http://local.test:{outside.local_unlisted.port}/"))', OPEN)
    assert run.reasons & {Reason.ADDRESS_NOT_PUBLIC, Reason.PORT_NOT_ALLOWED}


def test_a_name_with_one_private_address_among_public_ones_is_not_reached_there(lab: Lab, outside: Outside) -> None:
    """Every address of an answer is vetted, not the first one."""
    outside.dns.zone["rebind.test"] = [outside.other.address, "127.0.0.1", "10.1.1.1"]
    outside.forget()
    run = lab.run(by_every_way("rebind.test"), named("rebind.test"))
    assert run.result.status == "success"
    assert all(peer.untouched for peer in outside.strangers)
    assert outside.local.untouched


def test_a_dialled_address_does_not_matter_under_a_named_grant(lab: Lab, outside: Outside) -> None:
    """What is captured on its way to an address goes to the allowed name it claims, never to that address."""
    outside.forget()
    run = lab.run(
        f"""
report(plain=exchange("{STRANGER}", 80, b"GET /echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n"))
report(tls=https("{STRANGER}", "allowed.test", "allowed.test"))
report(evil=https("{outside.other.address}", "allowed.test", "other.test"))
report(sni=https("{outside.other.address}", "other.test", "allowed.test", verify=False))
""",
        NAMED,
    )
    assert len(run.seen) == 4, run.result.stderr
    assert all(peer.untouched for peer in outside.strangers)
    assert outside.other.untouched
    assert outside.other_tls.untouched
    assert run.seen[2]["evil"]["status"] in (403, None)
    assert run.seen[3]["sni"]["status"] in (403, None)
    assert run.reasons & {Reason.HOST_MISMATCH, Reason.HOST_NOT_ALLOWED}


def test_http2_authority_must_be_the_destination(lab: Lab, outside: Outside) -> None:
    """The right name dialled and in the SNI, another one in `:authority`: denied, per request."""
    probe = """
import h2.connection, h2.config, h2.events
def get(authority, host=None):
    with socket.create_connection(("h2.test", 443), PATIENCE) as raw, tls(raw, "h2.test", "h2") as sock:
        c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False))
        c.initiate_connection()
        extra = [("host", host)] if host else []
        c.send_headers(1, [(":method", "GET"), (":scheme", "https"), (":authority", authority), (":path", "/echo"), *extra], True)
        sock.sendall(c.data_to_send())
        status, body = None, b""
        while data := sock.recv(65536):
            for event in c.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    status = dict(event.headers)[":status"]
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset, h2.events.ConnectionTerminated)):
                    return {"status": status, "json": as_json(body)}
            sock.sendall(c.data_to_send())
        return {"status": status, "json": None}
"""
    with outside.silence():
        run = lab.run(
            probe + 'report(seen=get("other.test"))\nreport(seen=get("other.test:443"))', named("h2.test", "other.test")
        )
    assert [one["seen"]["status"] for one in run.seen] == ["403", "403"], run.result.stderr
    assert Reason.HOST_MISMATCH in run.reasons
    with outside.silence():
        run = lab.run(probe + 'report(seen=get("h2.test", "other.test"))', named("h2.test"))
    assert run.only["seen"]["status"] != "200"
    run = lab.run(probe + 'report(seen=get("h2.test"))', named("h2.test"))
    assert run.only["seen"]["json"]["nonce"] == outside.h2.nonce


@pytest.mark.parametrize("way", ["proxied", "captured", "tls"])
def test_each_request_of_a_connection_is_judged(lab: Lab, outside: Outside, way: str) -> None:
    """A second request with another Host on a connection that was allowed is denied."""
    opening = {
        "proxied": "sock = proxy_socket()",
        "captured": 'sock = socket.create_connection(("allowed.test", 80), PATIENCE)',
        "tls": 'sock = tls(socket.create_connection(("allowed.test", 443), PATIENCE), "allowed.test")',
    }[way]
    target = "http://{}/echo" if way == "proxied" else "/echo"
    outside.forget()
    run = lab.run(
        f"""
{opening}
for host in ("allowed.test", "other.test"):
    report(seen=ask(sock, "GET {target} HTTP/1.1\\r\\nHost: HOST\\r\\n\\r\\n".replace("{{}}", host).replace("HOST", host)))
""",
        NAMED,
    )
    first, second = (one["seen"] for one in run.seen)
    assert first["json"]["nonce"] in (outside.allowed.nonce, outside.allowed_tls.nonce)
    assert second["status"] == 403
    assert second["json"]["reason"]
    assert outside.other.untouched
    assert len(outside.allowed.journal.requests) + len(outside.allowed_tls.journal.requests) == 1
    assert run.reasons & {Reason.HOST_MISMATCH, Reason.HOST_NOT_ALLOWED}


NAME_SPELLINGS = ["DENIED.TEST", "denied.test.", "Denied.Test.", "[denied.test]", "sub.DENIED.test."]


@pytest.mark.parametrize("name", NAME_SPELLINGS)
def test_a_denied_name_is_denied_in_any_spelling(lab: Lab, outside: Outside, name: str) -> None:
    """Case, a trailing dot and brackets change nothing in a verdict."""
    with outside.silence():
        run = lab.run(
            f"""
report(seen=through_proxy("GET http://{name}/ HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n"))
report(seen=connect("{name}:443")[0])
report(seen=socks5("{name}", 443)[0])
report(seen=resolve("{name}"))
""",
            OPEN,
        )
    assert run.seen[0]["seen"]["status"] in (400, 403)
    assert run.seen[3]["seen"]["addresses"] == []
    assert run.reasons <= {Reason.HOST_DENIED, Reason.MALFORMED_REQUEST}
    assert run.reasons


@pytest.mark.parametrize("name", ["ALLOWED.TEST", "allowed.test.", "Sub.Allowed.Test."])
def test_an_allowed_name_is_inspected_in_any_spelling(lab: Lab, outside: Outside, name: str) -> None:
    """A spelling gets the same verdict and the same inspection: the request inside TLS is in the log."""
    run = lab.run(
        f'report(seen=fetch("http://{name}/echo"))\nreport(seen=https("{name}", "{name.rstrip(".")}", "{name}"))', NAMED
    )
    assert [one["seen"]["status"] for one in run.seen] == [200, 200], run.seen
    judged = [e for e in run.events if e.get("layer") == "http" and e.get("decision") == "allow"]
    assert {event["host"] for event in judged} == {name.lower().rstrip(".")}
    assert {event["path"] for event in judged} == {"/echo"}


SMUGGLES = {
    "content-length-and-transfer-encoding": "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "two-content-lengths": "Content-Length: 6\r\nContent-Length: 60\r\n\r\nCANARYGET /smuggled HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a-list-of-content-lengths": "Content-Length: 6, 60\r\n\r\nCANARYGET /smuggled HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a-signed-content-length": "Content-Length: +6\r\n\r\nCANARY",
    "an-unknown-transfer-encoding": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "a-padded-transfer-encoding": "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "space-before-the-colon": "Content-Length : 6\r\n\r\nCANARYGET /smuggled HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "two-hosts": "Host: other.test\r\n\r\n",
    "a-nul-in-a-header": "X: a\0b\r\n\r\n",
    "obs-fold": "X: a\r\n b\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("way", ["proxied", "captured", "tls"])
@pytest.mark.parametrize("smuggle", SMUGGLES)
def test_an_ambiguous_request_is_refused(lab: Lab, outside: Outside, smuggle: str, way: str) -> None:
    """What two parsers could read in two ways is refused and reaches nobody."""
    opening = {
        "proxied": "sock = proxy_socket()",
        "captured": 'sock = socket.create_connection(("allowed.test", 80), PATIENCE)',
        "tls": 'sock = tls(socket.create_connection(("allowed.test", 443), PATIENCE), "allowed.test")',
    }[way]
    target = "http://allowed.test/echo" if way == "proxied" else "/echo"

    def probe(rest: str) -> str:
        request = f"POST {target} HTTP/1.1\r\nHost: allowed.test\r\n{rest}"
        return f"{opening}\nreport(seen=ask(sock, {request!r}))"

    outside.forget()
    run = lab.run(probe(SMUGGLES[smuggle]), NAMED)
    requests = [*outside.allowed.journal.requests, *outside.allowed_tls.journal.requests]
    if (
        smuggle == "obs-fold" and requests
    ):  # it may be made one line, as RFC 9112 section 5.2 allows, but never passed on
        received = bytes(outside.allowed.journal.received + outside.allowed_tls.journal.received)
        assert b"\r\n " not in received
    else:
        assert requests == []
        assert run.only["seen"]["status"] in (400, 403, None), run.only
    assert not [r for r in requests if "smuggled" in r.target]

    allowed = lab.run(probe("Content-Length: 6\r\n\r\nCANARY"), NAMED)
    assert allowed.only["seen"]["json"]["body_bytes"] == 6


@pytest.mark.parametrize(
    "line",
    ["GET http://allowed.test/\n\n", "GET http://allowed.test/ HTTP/1.1\nHost: allowed.test\n\n", "GET  http://allowed.test/ HTTP/1.1\r\n\r\n",
     "GET http://allowed.test/ HTTP/1.1\rHost: allowed.test\r\r\n\r\n", "GET http://allowed.test/ HTTP/9.9\r\nHost: allowed.test\r\n\r\n",
     "GET http://allowed.test:x@other.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "GET http://allowed.test@other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
     "GET http://other.test#@allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "GET http://other.test\\@allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "GET http://allowed.test%2f@other.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test:x@other.test\r\n\r\n",
     "GET http://allowed.test\x00.other.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "GET gopher://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "GET ftp://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
     "GET file:///etc/passwd HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "CONNECT other.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\n\r\n",
     "CONNECT allowed.test HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "CONNECT allowed.test:0 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "CONNECT allowed.test:99999 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
     "CONNECT http://other.test:443 HTTP/1.1\r\nHost: other.test\r\n\r\n",
     "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: other.test\r\n\r\n", "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n"],
)  # fmt: skip
def test_an_odd_request_line_reaches_nobody_but_the_allowed_host(lab: Lab, outside: Outside, line: str) -> None:
    """Whatever a request line says, the other host is not reached, and the proxy lives on."""
    outside.forget()
    before = lab.proxy_pid
    run = lab.run(
        f"""
with proxy_socket() as sock:
    answer = ask(sock, {line!r})
    sock.sendall(b"GET /second HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n") if answer["status"] == 200 else None
report(status=answer["status"])
report(after=fetch("http://allowed.test/echo"))
""",
        NAMED,
    )
    assert run.result.status == "success", run.result.stderr
    assert outside.other.untouched
    assert outside.other_tls.untouched
    assert "other.test" not in outside.dns.names()
    assert not [r for r in outside.allowed.journal.requests if "other" in (r.header("host") or "")]
    assert run.seen[1]["after"]["json"]["nonce"] == outside.allowed.nonce
    assert lab.proxy_pid == before


@pytest.mark.parametrize(
    "header",
    ["User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/140.0 Safari/537.36", "Referer: http://allowed.test/",
     "X-Forwarded-Host: allowed.test", "Forwarded: host=allowed.test", "X-Original-URL: http://allowed.test/", "X-Host: allowed.test",
     "Proxy-Authorization: Basic YWRtaW46YWRtaW4=", "X-Sluicegate-Attempt: other", "Via: 1.1 sluicegate", "Origin: http://allowed.test"],
)  # fmt: skip
def test_no_header_exempts_a_request(lab: Lab, outside: Outside, header: str) -> None:
    """The verdict does not depend on what a client says of itself."""
    with outside.silence():
        run = lab.run(
            f"""
report(seen=through_proxy("GET http://other.test/ HTTP/1.1\\r\\nHost: other.test\\r\\n{header}\\r\\n\\r\\n"))
report(seen=through_proxy("CONNECT other.test:8080 HTTP/1.1\\r\\nHost: other.test:8080\\r\\n{header}\\r\\n\\r\\n"))
""",
            NAMED,
        )
    assert [one["seen"]["status"] for one in run.seen] == [403, 403]
    assert run.reasons == {Reason.HOST_NOT_ALLOWED}


def test_a_proxy_credential_never_goes_upstream(lab: Lab, outside: Outside) -> None:
    """Headers that are for the proxy end at the proxy."""
    outside.forget()
    run = lab.run(
        'report(seen=through_proxy("GET http://allowed.test/echo HTTP/1.1\\r\\nHost: allowed.test\\r\\n'
        'Proxy-Authorization: Basic c2VjcmV0\\r\\nProxy-Connection: keep-alive\\r\\n\\r\\n"))',
        NAMED,
    )
    assert run.only["seen"]["status"] == 200
    assert outside.allowed.journal.requests[0].header("Proxy-Authorization") is None


def test_mitmproxys_own_site_is_not_served(lab: Lab, outside: Outside) -> None:
    """`mitm.it` is a name like any other: denied where it is not named, the real host's where all are allowed."""
    with outside.silence():
        run = lab.run('report(seen=fetch("http://mitm.it/cert/pem"))', NAMED)
    assert run.reasons == {Reason.HOST_NOT_ALLOWED}
    run = lab.run('report(seen=fetch("http://mitm.it/cert/pem"))', OPEN)
    assert run.only["seen"]["json"]["nonce"] == outside.other.nonce


@pytest.mark.parametrize("call", [NAMED, OPEN], ids=["named", "unrestricted"])
def test_the_proxy_does_not_serve_itself(lab: Lab, outside: Outside, call: Call) -> None:
    """The proxy's own port, asked for through the proxy in any spelling, is denied and makes no loop."""
    with outside.silence(lookups=True):
        run = lab.run(
            """
port = proxy_address()[1]
for host in ("127.0.0.1", "localhost", "127.0.0.2", "0.0.0.0", "127.1", "2130706433", "[::1]", "[::]", "[::ffff:127.0.0.1]"):
    report(status=through_proxy(f"GET http://{host}:{port}/ HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n")["status"])
    answer, sock = connect(f"{host}:{port}")
    with sock:  # a name is looked up when something is to be dialled, so only what is inside the tunnel is denied
        if answer["status"] == 200:
            answer = ask(sock, f"GET / HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n")
    report(status=answer["status"])
report(status=ask(proxy_socket(), f"GET / HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\n\\r\\n")["status"])
report(status=ask(proxy_socket(), "GET / HTTP/1.1\\r\\n\\r\\n")["status"])
""",
            call,
        )
    assert len(run.seen) == 20, run.result.stderr
    assert {one["status"] for one in run.seen} <= {400, 403}
    assert run.reasons <= {
        Reason.ADDRESS_NOT_PUBLIC,
        Reason.HOST_NOT_ALLOWED,
        Reason.MALFORMED_REQUEST,
        Reason.PORT_NOT_ALLOWED,
    }


def test_an_http2_upgrade_in_clear_text_is_not_passed_on(lab: Lab, outside: Outside) -> None:
    """`Upgrade: h2c` would open a protocol that no rule is judged in."""
    outside.forget()
    run = lab.run(
        'report(seen=through_proxy("GET http://allowed.test/echo HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: Upgrade, HTTP2-Settings\\r\\n'
        'Upgrade: h2c\\r\\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\\r\\n\\r\\n"))',
        NAMED,
    )
    assert run.only["seen"]["status"] in (200, 400, 403)
    for seen in outside.allowed.journal.requests:
        assert seen.header("Upgrade") is None
        assert seen.header("HTTP2-Settings") is None


def test_an_upstream_with_an_untrusted_certificate_is_not_spoken_to(lab: Lab, outside: Outside) -> None:
    """The proxy verifies whom it speaks to, also when the client would not. That is a failure, not a denial."""
    outside.forget()
    run = lab.run(
        'report(seen=https("untrusted.test", "untrusted.test", "untrusted.test", verify=False))',
        named("untrusted.test"),
    )
    assert run.only["seen"]["status"] in (502, None)
    assert outside.untrusted.journal.requests == []
    assert run.denials == []
    failed = [event for event in run.events if event.get("outcome") == "failed"]
    assert failed, run.events


def test_a_deny_of_one_port_denies_that_port_only(
    open_lab: Callable[[str], AbstractContextManager[Lab]], outside: Outside
) -> None:
    """A deny rule with a port beats every allow at that port, and says nothing of the others."""
    text = """
version: 1
name: one-port
network:
  modes: [named, unrestricted]
  deny:
    - {host: allowed.test, ports: [8080]}
"""
    probe = 'report(seen=[fetch("http://allowed.test:%s/echo" % port)["status"] for port in (80, 8080)])'
    with open_lab(text.replace("modes: [named", "ports: [80, 8080]\n  modes: [named")) as lab:
        for call in (named("allowed.test"), OPEN):
            outside.forget()
            run = lab.run(probe, call)
            assert run.only["seen"] == [200, 403]
            assert run.reasons == {Reason.HOST_DENIED}
            assert outside.allowed_port.untouched


@pytest.mark.parametrize("where", ["nosuchname.allowed.test:8080", "broken.test:8080", "nobody.test:8443"])
def test_a_failure_upstream_is_no_denial(lab: Lab, outside: Outside, where: str) -> None:
    """A name that does not resolve, a resolver that fails, a port at which nobody listens: the log calls none denied."""
    run = lab.run(f'report(seen=fetch("http://{where}/"))', named("allowed.test", "broken.test", "nobody.test"))
    assert run.only["seen"]["status"] in (502, 504), run.only
    assert run.denials == []
    assert run.result.network.denied == 0
    assert [event for event in run.events if event.get("outcome") == "failed"], run.events
