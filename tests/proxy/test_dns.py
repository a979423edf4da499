"""Names are answered by the attempt's own resolver, from inside, and nothing is asked outside."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.attempts import Attempt as State
from proxy.attempts import Connection
from proxy.audit import AuditLog
from proxy.destinations import Host, Unparsed
from proxy.dns import answer, parse_question
from proxy.network import Mode
from tests import world
from tests.proxy.rig import (
    Attempt,
    DnsAnswer,
    Peers,
    Rig,
    dns_query,
    get,
    grant,
    read_answer,
    read_dns,
    read_exactly,
    rule,
)
from tests.servers import Dns

NOERROR, FORMERR, NXDOMAIN, REFUSED = 0, 1, 3, 5
A, NS, AAAA, TXT, HTTPS, ANY = 1, 2, 28, 16, 65, 255


@pytest.fixture(scope="module")
def attempt(rig: Rig, peers: Peers) -> Attempt:
    return rig.captured(grant(rule("allowed.test"), hosts=peers.hosts))


def udp(attempt: Attempt, query: bytes, server: str = "192.0.2.53") -> DnsAnswer:
    assert attempt.sandbox is not None
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with attempt.sandbox.open(family, socket.SOCK_DGRAM) as sock:
        sock.connect((server, 53))  # the kernel then drops what comes from another address
        sock.send(query)
        return read_dns(sock.recv(4096))


def tcp(attempt: Attempt, query: bytes, server: str = "192.0.2.53") -> DnsAnswer:
    with attempt.dial(server, 53) as sock:
        sock.sendall(struct.pack("!H", len(query)) + query)
        (size,) = struct.unpack("!H", read_exactly(sock, 2))
        return read_dns(read_exactly(sock, size))


@pytest.mark.parametrize("ask", [udp, tcp])
@pytest.mark.parametrize("server", ["127.0.0.1", "8.8.8.8", "192.0.2.53", "::1", "2001:4860:4860::8888"])
class TestRoads:
    """Whatever server is asked, over whatever protocol and family, the answer comes from the address that was asked."""

    def test_an_allowed_name_has_a_synthetic_address(self, attempt: Attempt, ask: object, server: str) -> None:
        assert callable(ask)
        (address,) = ask(attempt, dns_query("allowed.test"), server).addresses
        assert address.startswith("198.18.")

    def test_a_denied_name_does_not_exist(self, attempt: Attempt, ask: object, server: str) -> None:
        assert callable(ask)
        assert ask(attempt, dns_query("secret.other.test"), server) == DnsAnswer(
            0x1234, NXDOMAIN, (), dns_query("secret.other.test")[12:]
        )


class TestAnswers:
    def test_an_address_stands_for_its_name(self, attempt: Attempt, peers: Peers) -> None:
        (address,) = udp(attempt, dns_query("allowed.test")).addresses
        sock = attempt.dial(address, 80)
        sock.sendall(get("allowed.test"))
        assert read_answer(sock).json["nonce"] == peers.allowed.nonce

    def test_a_name_keeps_its_address_and_another_has_another(self, attempt: Attempt) -> None:
        first, again, other = (
            udp(attempt, dns_query(name)).addresses for name in ("allowed.test", "ALLOWED.test", "www.allowed.test")
        )
        assert first == again != other

    def test_the_question_comes_back_in_its_own_spelling(self, attempt: Attempt) -> None:
        """Resolvers that vary the case to thwart spoofing compare it."""
        query = dns_query("aLLoWeD.tEsT", ident=0xBEEF)
        assert udp(attempt, query).question == query[12:]
        assert udp(attempt, query).ident == 0xBEEF

    @pytest.mark.parametrize("kind", [AAAA, TXT, NS, HTTPS, ANY])
    def test_other_types_of_an_allowed_name_are_empty(self, attempt: Attempt, kind: int) -> None:
        answered = udp(attempt, dns_query("allowed.test", kind))
        assert (answered.code, answered.addresses) == (NOERROR, ())

    @pytest.mark.parametrize("kind", [A, AAAA, TXT, ANY])
    def test_no_type_of_a_denied_name_exists(self, attempt: Attempt, kind: int) -> None:
        assert udp(attempt, dns_query("other.test", kind)).code == NXDOMAIN

    def test_an_address_is_no_name(self, attempt: Attempt) -> None:
        assert udp(attempt, dns_query("127.0.0.1")).code == NXDOMAIN

    def test_edns_is_understood_as_far_as_to_be_left_out(self, attempt: Attempt) -> None:
        option = b"\0" + struct.pack("!HHIH", 41, 4096, 0, 0)
        assert len(udp(attempt, dns_query("allowed.test", tail=option)).addresses) == 1

    def test_queries_in_one_tcp_stream_are_answered_in_turn(self, attempt: Attempt) -> None:
        queries = [dns_query("allowed.test", ident=ident) for ident in range(5)]
        with attempt.dial("192.0.2.53", 53) as sock:
            sock.sendall(b"".join(struct.pack("!H", len(query)) + query for query in queries))
            for ident in range(5):
                (size,) = struct.unpack("!H", read_exactly(sock, 2))
                assert read_dns(read_exactly(sock, size)).ident == ident

    def test_without_network_no_name_exists(self, rig: Rig, peers: Peers) -> None:
        with rig.captured(grant(mode=Mode.BLOCK_ALL, hosts=peers.hosts)) as blocked:
            assert udp(blocked, dns_query("allowed.test")).code == NXDOMAIN
        assert blocked.denials() == ["network_off"]

    def test_nothing_is_asked_outside(self, rig: Rig, peers: Peers) -> None:
        """Not for a denied name, and not for an allowed one until it is connected to."""
        dns = Dns(peers.loop)
        try:
            dns.zone["allowed.test"] = [peers.allowed.address]
            with rig.captured(grant(rule("allowed.test"))) as attempt:
                before = world.traffic()
                (address,) = udp(attempt, dns_query("allowed.test")).addresses
                udp(attempt, dns_query("secret.other.test"))
                assert dns.queries == []
                assert (world.traffic() - before).udp_sent == 0
                sock = attempt.dial(address, 80)
                sock.sendall(get("allowed.test"))
                assert read_answer(sock).json["nonce"] == peers.allowed.nonce
                assert dns.names() == {"allowed.test"}
        finally:
            dns.close()


MALFORMED = {
    "no question": dns_query("")[:12].replace(b"\0\1\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0"),
    "two questions": struct.pack("!HHHHHH", 1, 0x100, 2, 0, 0, 0) + dns_query("allowed.test")[12:] * 2,
    "an answer in the query": struct.pack("!HHHHHH", 1, 0x100, 1, 1, 0, 0) + dns_query("allowed.test")[12:],
    "an update": dns_query("allowed.test", flags=0x2800),
    "a name without an end": dns_query(b"\x07allowed"),
    "a name that is cut short": dns_query("allowed.test")[:20],
    "a name that points to itself": dns_query(b"\xc0\x0c"),
    "a name that points behind itself": dns_query(b"\x01a\xc0\x20"),
    "a label of 64 bytes": dns_query(b"\x40" + b"a" * 64 + b"\0"),
    "a name of 256 bytes": dns_query((b"\x3f" + b"a" * 63) * 4 + b"\0"),
}

ODD_NAMES = {
    "a label with a dot": b"\x0callowed.test\0",
    "a label with a NUL": b"\x08allowed\0\x04test\0",
    "bytes above 127": b"\x07\xe1llowed\x04test\0",
    "UTF-8": b"\x08\xc3\xa1llowed\x04test\0",
    "white space": b"\x08allowed \x04test\0",
    "the root": b"\0",
    "an escape": b"\x03\x1b[2\x04test\0",
}


class TestHostileQueries:
    @pytest.mark.parametrize("query", MALFORMED.values(), ids=MALFORMED)
    def test_what_is_no_query_for_one_name_is_a_format_error(self, attempt: Attempt, query: bytes) -> None:
        before = len(attempt.denials())
        assert udp(attempt, query).code == FORMERR
        assert tcp(attempt, query).code == FORMERR
        assert attempt.denials()[before:] == ["malformed_request"] * 2

    @pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
    def test_what_is_no_host_name_does_not_exist(self, attempt: Attempt, name: bytes) -> None:
        assert udp(attempt, dns_query(name)).code == NXDOMAIN

    @pytest.mark.parametrize("data", [b"", b"x", b"\0" * 11, dns_query("allowed.test", flags=0x8180)])
    def test_what_is_no_query_at_all_is_not_answered(self, attempt: Attempt, data: bytes) -> None:
        assert attempt.sandbox is not None
        with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as sock:
            sock.connect(("192.0.2.53", 53))
            sock.send(data)
            sock.send(dns_query("allowed.test", ident=77))
            assert read_dns(sock.recv(4096)).ident == 77

    def test_64_kib_over_tcp_are_a_format_error(self, attempt: Attempt) -> None:
        assert tcp(attempt, bytes(0xFFFF)).code == FORMERR

    def test_a_tcp_stream_that_is_no_dns_is_ended(self, attempt: Attempt) -> None:
        with attempt.dial("192.0.2.53", 53) as sock:
            sock.sendall(b"\0\0")
            assert sock.recv(10) == b""

    def test_a_burst_is_answered(self, attempt: Attempt) -> None:
        assert attempt.sandbox is not None
        with attempt.sandbox.open(kind=socket.SOCK_DGRAM) as sock:
            sock.connect(("192.0.2.53", 53))
            for ident in range(100):
                sock.send(dns_query("allowed.test", ident=ident))
            assert {read_dns(sock.recv(4096)).ident for _ in range(100)} == set(range(100))


@pytest.fixture(scope="module")
def state(directory: Path) -> State:
    """An attempt's state with a log of its own, for what needs no process."""
    return State(grant(mode=Mode.UNRESTRICTED), AuditLog(directory / "dns.jsonl"))


class TestParsing:
    @given(st.binary(max_size=300))
    def test_any_bytes_have_an_answer_or_none_and_never_an_address(self, state: State, data: bytes) -> None:
        response = answer(state, Connection("dns-udp"), data)
        if response is not None:
            assert response[:2] == data[:2]
            assert len(response) <= len(data) + 16

    @given(st.lists(st.binary(min_size=1, max_size=63), min_size=1, max_size=3))
    def test_only_names_of_letters_digits_and_hyphens_are_hosts(self, labels: list[bytes]) -> None:
        question = parse_question(dns_query(b"".join(bytes([len(label)]) + label for label in labels) + b"\0"))
        assert question is not None
        if isinstance(question.host, Host) and question.host.address is None:
            assert question.host.text == b".".join(labels).decode("ascii").lower()
        else:
            assert isinstance(question.host, (Host, Unparsed))

    def test_names_run_out_and_then_none_has_an_address(self, directory: Path) -> None:
        many = State(grant(mode=Mode.UNRESTRICTED), AuditLog(directory / "many.jsonl"))
        codes = []
        for number in range(10_001):
            response = answer(many, Connection("dns-udp"), dns_query(f"n{number}.test"))
            assert response is not None
            codes.append(read_dns(response).code)
        assert set(codes[:10_000]) == {NOERROR}
        assert codes[10_000] == REFUSED
        again = answer(many, Connection("dns-udp"), dns_query("n0.test"))
        assert again is not None
        assert read_dns(again).addresses == ("198.18.0.1",)
