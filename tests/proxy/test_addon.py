"""What the code sends, and what becomes of it: allowed traffic arrives, everything else is answered and goes nowhere."""

from __future__ import annotations

import asyncio
import socket
import ssl
from ipaddress import ip_network

import OpenSSL.SSL
import pytest

from proxy.destinations import parse_host
from proxy.network import Mode, Rule
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
    read_to_end,
    rule,
    tcp_rule,
)
from tests.servers import BannerTcp, Http, Peer, RecordingTcp

READ_ONLY = ("GET", "HEAD")


@pytest.fixture(scope="module")
def attempt(rig: Rig, peers: Peers) -> Attempt:
    """Everything about `allowed.test` and `h2.test` is allowed, and nothing else."""
    return rig.captured(grant(rule("allowed.test"), rule("h2.test"), hosts=peers.hosts))


class TestAllowed:
    """The positive controls: the same roads, open."""

    def test_plain_http_through_the_proxy_port(self, attempt: Attempt, peers: Peers) -> None:
        answer = ask(attempt.explicit(), get("allowed.test", target="http://allowed.test/echo"))
        assert (answer.status, answer.json["nonce"]) == (200, peers.allowed.nonce)

    def test_https_through_connect(self, attempt: Attempt, peers: Peers) -> None:
        answer = ask(attempt.https("allowed.test"), get("allowed.test", "/echo"))
        assert (answer.status, answer.json["nonce"]) == (200, peers.allowed_tls.nonce)

    def test_plain_http_through_connect(self, attempt: Attempt, peers: Peers) -> None:
        answer = ask(attempt.tunnel("allowed.test", 80), get("allowed.test", "/echo"))
        assert answer.json["nonce"] == peers.allowed.nonce

    def test_https_captured(self, attempt: Attempt, peers: Peers) -> None:
        sock = attempt.tls(attempt.dial(synthetic(attempt, "allowed.test"), 443), "allowed.test")
        assert ask(sock, get("allowed.test", "/echo")).json["nonce"] == peers.allowed_tls.nonce

    def test_plain_http_captured(self, attempt: Attempt, peers: Peers) -> None:
        answer = ask(attempt.dial(synthetic(attempt, "allowed.test"), 80), get("allowed.test", "/echo"))
        assert answer.json["nonce"] == peers.allowed.nonce

    @pytest.mark.parametrize("name", ["ALLOWED.test", "allowed.test.", "aLLowed.TEST."])
    def test_a_name_in_any_spelling(self, attempt: Attempt, peers: Peers, name: str) -> None:
        answer = ask(attempt.explicit(), get(name, target=f"http://{name}/echo"))
        assert answer.json["nonce"] == peers.allowed.nonce

    def test_http2_from_end_to_end(self, attempt: Attempt, peers: Peers) -> None:
        """A client that offers only HTTP/2 reaches a server that speaks only HTTP/2."""
        sock = attempt.https("h2.test", alpn=["h2"])
        assert sock.selected_alpn_protocol() == "h2"
        assert Http2Client(sock).get("h2.test", "/echo").json["nonce"] == peers.h2.nonce

    def test_http1_is_preferred_to_http2(self, attempt: Attempt) -> None:
        assert attempt.https("allowed.test", alpn=["h2", "http/1.1"]).selected_alpn_protocol() == "http/1.1"

    def test_an_upload_with_a_length(self, attempt: Attempt) -> None:
        request = get("allowed.test", "/up", "Content-Length: 5", method="POST") + b"hello"
        assert ask(attempt.https("allowed.test"), request).json["body_bytes"] == 5

    def test_an_upload_in_chunks(self, attempt: Attempt) -> None:
        request = get("allowed.test", "/up", "Transfer-Encoding: chunked", method="POST") + b"5\r\nhello\r\n0\r\n\r\n"
        assert ask(attempt.https("allowed.test"), request).json["body_bytes"] == 5

    def test_an_upload_over_http2_without_a_length(self, attempt: Attempt) -> None:
        client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
        stream = client.start(h2_headers("h2.test", "/up", method="POST"), end_stream=False)
        client.connection.send_data(stream, b"hello", end_stream=True)
        client.flush()
        assert client.answer(stream).json["body_bytes"] == 5

    def test_a_client_that_asks_before_it_sends_is_told_to_go_on(self, attempt: Attempt) -> None:
        sock = attempt.https("allowed.test")
        sock.sendall(get("allowed.test", "/up", "Content-Length: 5", "Expect: 100-continue", method="POST"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        assert ask(sock, b"hello").json["body_bytes"] == 5

    def test_empty_lines_before_a_request_are_ignored(self, attempt: Attempt) -> None:
        sock = attempt.https("allowed.test")
        for before in (b"", b"\r\n\r\n"):
            assert ask(sock, before + get("allowed.test")).status == 200

    def test_many_requests_use_one_connection_to_the_server(self, attempt: Attempt, peers: Peers) -> None:
        peers.forget()
        sock = attempt.https("allowed.test")
        for _ in range(50):
            assert ask(sock, get("allowed.test")).status == 200
        assert peers.allowed_tls.journal.connections == 1

    def test_requests_sent_at_once_are_answered_in_turn(self, attempt: Attempt) -> None:
        sock = attempt.https("allowed.test")
        sock.sendall(b"".join(get("allowed.test", f"/{number}") for number in range(20)))
        assert [read_answer(sock).json["target"] for _ in range(20)] == [f"/{number}" for number in range(20)]

    @pytest.mark.parametrize(
        ("connection", "passed", "kept"),
        [
            ("Host, X-Named", None, {"host", "x-other"}),
            ("close, x-named", "close", {"host", "x-other"}),
            ("Keep-Alive, X-NAMED ,x-other", "keep-alive", {"host"}),
            ("connection, Content-Length, Transfer-Encoding, X-Named", None, {"host", "x-other", "content-length"}),
        ],
    )
    def test_what_a_connection_header_names_ends_here(
        self, attempt: Attempt, connection: str, passed: str | None, kept: set[str]
    ) -> None:
        """And what it may not name does not end at the next hop."""
        more = (f"Connection: {connection}", "X-Named: 1", "X-Other: 2", "Content-Length: 3")
        answer = ask(attempt.https("allowed.test"), get("allowed.test", "/", *more, method="POST") + b"abc", "POST")
        headers = {name.lower(): value for name, value in answer.json["headers"]}
        assert answer.status == 200
        assert headers.get("connection") == passed
        assert "x-named" not in headers
        assert kept <= set(headers)

    def test_an_upgrade_to_anything_but_a_websocket_is_not_passed_on(self, attempt: Attempt) -> None:
        more = ("Connection: Upgrade", "Upgrade: CANARY")
        answer = ask(attempt.https("allowed.test"), get("allowed.test", "/", *more))
        assert not {name.lower() for name, _ in answer.json["headers"]} & {"connection", "upgrade"}

    def test_what_is_meant_for_a_proxy_is_not_passed_on(self, attempt: Attempt) -> None:
        more = ("Proxy-Authorization: Basic c2VjcmV0", "Proxy-Connection: keep-alive")
        answer = ask(attempt.explicit(), get("allowed.test", "/", *more, target="http://allowed.test/"))
        names = {name.lower() for name, _ in answer.json["headers"]}
        assert answer.status == 200
        assert not names & {"proxy-authorization", "proxy-connection"}


def synthetic(attempt: Attempt, name: str) -> str:
    """The address that stands for an allowed name, as the attempt's resolver gives it."""
    assert attempt.sandbox is not None
    sock = attempt.sandbox.open(kind=socket.SOCK_DGRAM)
    with sock:
        sock.connect(("192.0.2.53", 53))
        sock.send(dns_query(name))
        (address,) = read_dns(sock.recv(4096)).addresses
    return address


class TestNamesDisagree:
    """The destination, the SNI and every name in the request must be one and the same."""

    def test_another_host_in_plain_http(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.explicit(), get("other.test", target="http://allowed.test/"))
        assert (answer.status, answer.code) == (403, "host_mismatch")

    def test_another_destination_under_an_allowed_host_header(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.explicit(), get("allowed.test", target="http://other.test/"))
        assert (answer.status, answer.code) == (403, "host_not_allowed")

    def test_another_host_in_a_tunnel(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.tunnel("allowed.test", 80), get("other.test"))
        assert answer.code == "host_mismatch"

    def test_another_host_inside_tls(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.https("allowed.test"), get("other.test"))
        assert answer.code == "host_mismatch"

    def test_another_authority_over_http2(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = Http2Client(attempt.https("h2.test", alpn=["h2"])).get("other.test")
        assert (answer.status, answer.code) == (403, "host_mismatch")

    def test_another_host_header_beside_the_right_authority_over_http2(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            with pytest.raises(ConnectionResetError):  # RFC 9113 section 8.3.1: malformed
                client.get("h2.test", "/", ("host", "other.test"))

    @pytest.mark.parametrize("name", ["other.test", "sub.allowed.test", "allowed.test.evil.example"])
    def test_another_sni(self, attempt: Attempt, peers: Peers, name: str) -> None:
        with peers.silence():
            answer = ask(attempt.https("allowed.test", name=name), get("allowed.test"))
        assert (answer.status, answer.code) == (403, "sni_mismatch")

    def test_no_sni(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.tls(attempt.tunnel("allowed.test", 443), None), get("allowed.test"))
        assert answer.code == "sni_missing"

    def test_another_host_in_the_second_of_two_requests(self, attempt: Attempt, peers: Peers) -> None:
        """Each request is judged, also when both came in one segment."""
        peers.forget()
        sock = attempt.https("allowed.test")
        sock.sendall(get("allowed.test", "/first") + get("other.test", "/second"))
        assert read_answer(sock).status == 200
        assert read_answer(sock).code == "host_mismatch"
        assert [seen.target for seen in peers.allowed_tls.journal.requests] == ["/first"]

    def test_two_host_headers(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.https("allowed.test"), get("allowed.test", "/", "Host: other.test"))
        assert answer.status in (400, 403)

    def test_no_host_header(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.https("allowed.test"), b"GET / HTTP/1.1\r\n\r\n")
        assert answer.status in (400, 403)

    def test_no_destination_at_all(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.explicit(), b"GET / HTTP/1.1\r\n\r\n")
        assert (answer.status, answer.code) == (400, "malformed_request")

    @pytest.mark.parametrize(
        "host", ["allowed.test:x@other.test", "allowed.test@other.test", "a b", "allowed.test/x", ""]
    )
    def test_a_host_header_that_is_no_host(self, attempt: Attempt, peers: Peers, host: str) -> None:
        with peers.silence():
            answer = ask(attempt.explicit(), get(host, target="http://allowed.test/"))
        assert answer.status in (400, 403)

    @pytest.mark.parametrize("port", ["81", "443", "0", "99999", "x"])
    def test_another_port_in_the_host_header(self, attempt: Attempt, peers: Peers, port: str) -> None:
        with peers.silence():
            answer = ask(attempt.explicit(), get(f"allowed.test:{port}", target="http://allowed.test/"))
        assert answer.status in (400, 403)

    @pytest.mark.parametrize(
        "target",
        ["http://other.test/", "https://other.test/", "http://allowed.test@other.test/", "http://allowed.test:81/"],
    )
    def test_another_absolute_target_in_a_tunnel(self, attempt: Attempt, peers: Peers, target: str) -> None:
        for sock in (attempt.tunnel("allowed.test", 80), attempt.https("allowed.test")):
            with peers.silence():
                answer = ask(sock, get("allowed.test", target=target))
            assert answer.status in (400, 403)

    def test_a_header_that_only_a_hop_would_read_changes_nothing(self, attempt: Attempt, peers: Peers) -> None:
        more = (
            "X-Forwarded-Host: other.test",
            "Forwarded: host=other.test",
            "Connection: host",
            "Referer: allowed.test",
        )
        with peers.silence():
            answer = ask(attempt.explicit(), get("other.test", "/", *more, target="http://other.test/"))
        assert answer.code == "host_not_allowed"


class TestTunnels:
    """Nothing but TLS with HTTP inside, or HTTP, passes a tunnel that no rule for raw TCP allows."""

    @pytest.mark.parametrize(
        "payload",
        [
            b"CANARY\r\n",
            b"\x00\x01\x02",
            b"SSH-2.0-x\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x15\x03\x01\x00\x02",
        ],
    )
    def test_raw_bytes(self, attempt: Attempt, peers: Peers, payload: bytes) -> None:
        with peers.silence():
            for sock in (
                attempt.tunnel("allowed.test", 443),
                attempt.tunnel("allowed.test", 80),
                attempt.dial(synthetic(attempt, "allowed.test"), 443),
                attempt.dial(synthetic(attempt, "allowed.test"), 80),
            ):
                sock.sendall(payload)
                assert is_cut(sock)

    def test_raw_bytes_inside_tls(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            sock = attempt.https("allowed.test")
            sock.sendall(b"\x00CANARY\r\n")
            assert is_cut(sock)

    def test_raw_bytes_after_http2_was_agreed_on(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            sock = attempt.https("h2.test", alpn=["h2"])
            sock.sendall(b"CANARY" * 100)
            assert b"CANARY" not in read_to_end(sock)

    def test_tls_inside_tls(self, attempt: Attempt, peers: Peers) -> None:
        """A second handshake inside the first one is bytes that are not HTTP."""
        with peers.silence():
            sock = attempt.https("allowed.test")
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400))
            assert is_cut(sock)

    def test_a_connect_inside_a_tunnel(self, attempt: Attempt, peers: Peers) -> None:
        request = b"CONNECT other.test:443 HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
        with peers.silence():
            for sock in (attempt.tunnel("allowed.test", 80), attempt.https("allowed.test")):
                answer = ask(sock, request, "CONNECT")
                assert (answer.status, answer.code) == (400, "malformed_request")

    def test_a_connect_over_http2(self, attempt: Attempt, peers: Peers) -> None:
        headers = h2_headers("h2.test", "/", method="CONNECT")
        with peers.silence():
            client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
            with pytest.raises(ConnectionResetError):  # RFC 9113 section 8.5: a CONNECT has no path
                client.answer(client.start(headers, end_stream=False))

    def test_a_tls_record_cut_short_sends_nothing(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            sock = attempt.tunnel("allowed.test", 443)
            sock.sendall(b"\x16\x03")
            sock.shutdown(socket.SHUT_WR)
            assert is_cut(sock)


class TestDestinations:
    @pytest.mark.parametrize("port", [22, 81, 8080, 5432])
    def test_another_port_of_an_allowed_host(self, attempt: Attempt, peers: Peers, port: int) -> None:
        with peers.silence():
            request = f"CONNECT allowed.test:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            answer = ask(attempt.explicit(), request, "CONNECT")
            assert (answer.status, answer.code) == (403, "port_not_allowed")
            assert attempt.is_reset(synthetic(attempt, "allowed.test"), port)

    def test_a_captured_address_that_no_name_stands_for(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            assert attempt.is_reset(peers.other.address, 22)
            assert attempt.is_reset("2600:9::1", 22)
            assert ask(attempt.dial(peers.other.address, 80), get("allowed.test")).status == 403
            assert ask(attempt.dial("198.18.77.77", 80), get("allowed.test")).status == 403

    def test_the_denial_of_a_tunnel_says_why_in_its_reason_phrase(self, attempt: Attempt) -> None:
        answer = ask(attempt.explicit(), b"CONNECT other.test:8443 HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT")
        assert answer.phrase.startswith("Blocked by sluicegate: host_not_allowed")

    def test_the_denial_of_https_is_readable_inside_tls(self, attempt: Attempt, peers: Peers) -> None:
        with peers.silence():
            answer = ask(attempt.https("other.test"), get("other.test"))
            assert (answer.status, answer.code) == (403, "host_not_allowed")
            sock = attempt.tls(attempt.dial(peers.other.address, 443), "other.test")
            assert ask(sock, get("other.test")).status == 403

    @pytest.mark.parametrize(
        "request_",
        [
            b"CONNECT other.test:8443 HTTP/1.1\r\nHost: x\r\n\r\n",
            get("other.test", target="http://other.test/"),
            get("other.test", "Content-Length: 2", method="POST", target="http://other.test/") + b"hi",
        ],
    )
    def test_after_a_denied_request_the_connection_ends(self, attempt: Attempt, peers: Peers, request_: bytes) -> None:
        """A client that does not take the body would wait for it to end for ever. What was sent ahead goes nowhere."""
        ahead = get("allowed.test", target="http://allowed.test/")
        with peers.silence():
            sock = attempt.explicit()
            sock.sendall(request_ + ahead)
            head, _, _ = read_to_end(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 403 Blocked by sluicegate: ")
        assert b"\r\nConnection: close" in head

    def test_after_a_request_denied_inside_tls_the_connection_ends(self, attempt: Attempt) -> None:
        sock = attempt.https("other.test")
        sock.sendall(get("other.test"))
        assert read_to_end(sock).startswith(b"HTTP/1.1 403 ")

    def test_a_denial_over_http2_has_no_field_that_http2_forbids_and_the_connection_goes_on(
        self, attempt: Attempt, peers: Peers
    ) -> None:
        client = Http2Client(attempt.https("h2.test", alpn=["h2"]))
        for _ in range(2):
            denied = client.get("other.test")
            assert denied.status == 403
            assert "connection" not in denied.headers
        assert client.get("h2.test", "/echo").json["nonce"] == peers.h2.nonce

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]",
         "169.254.169.254", "2852039166", "10.0.0.1", "100.64.0.1", "[fd00:ec2::254]", "[64:ff9b::7f00:1]"],
    )  # fmt: skip
    def test_an_open_grant_reaches_no_address_that_is_not_public(self, rig: Rig, peers: Peers, host: str) -> None:
        """In any spelling, and the proxy's own port is such an address too."""
        with rig.explicit(grant(mode=Mode.UNRESTRICTED)) as open_attempt, peers.silence():
            port = open_attempt.port
            for request in (
                get(f"{host}:{port}", target=f"http://{host}:{port}/"),
                get(host, target=f"http://{host}/"),
                f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
            ):
                answer = ask(open_attempt.explicit(), request, request.split()[0].decode())
                assert answer.code == "address_not_public"
        assert set(open_attempt.denials()) == {"address_not_public"}

    def test_an_open_grant_reaches_no_name_of_such_an_address(self, rig: Rig, peers: Peers) -> None:
        with (
            rig.explicit(grant(mode=Mode.UNRESTRICTED, hosts={"localhost": "127.0.0.1"})) as open_attempt,
            peers.silence(),
        ):
            port = open_attempt.port or 0
            request = get(f"localhost:{port}", target=f"http://localhost:{port}/")
            assert ask(open_attempt.explicit(), request).code == "address_not_public"
            # The tunnel to a name is there before its address is known.
            assert ask(open_attempt.tunnel("localhost", port), get(f"localhost:{port}")).code == "address_not_public"
            assert is_cut(open_attempt.tunnel("localhost", port))  # a silent client's server would be dialled

    def test_mitmproxys_own_pages_are_not_served(self, rig: Rig, peers: Peers) -> None:
        with rig.explicit(grant(mode=Mode.UNRESTRICTED, hosts={"mitm.it": peers.other.address})) as open_attempt:
            answer = ask(open_attempt.explicit(), get("mitm.it", target="http://mitm.it/"))
        assert answer.json["nonce"] == peers.other.nonce

    def test_a_deny_rule_holds_in_an_open_grant_for_every_name_in_the_request(self, rig: Rig, peers: Peers) -> None:
        denied = (rule("other.test"),)
        with rig.explicit(grant(mode=Mode.UNRESTRICTED, hosts=peers.hosts, deny=denied)) as open_attempt:
            with peers.silence():
                for name in ("other.test", "OTHER.test.", "sub.other.test"):
                    assert ask(open_attempt.explicit(), get(name, target=f"http://{name}/")).code == "host_denied"
                mixed = get("other.test", target="http://allowed.test/")
                assert ask(open_attempt.explicit(), mixed).code == "host_denied"

    def test_a_grant_without_network_answers_everything_itself(self, rig: Rig, peers: Peers) -> None:
        with rig.captured(grant(mode=Mode.BLOCK_ALL, hosts=peers.hosts)) as blocked, peers.silence():
            assert ask(blocked.explicit(), get("allowed.test", target="http://allowed.test/")).code == "network_off"
            assert ask(blocked.https("allowed.test"), get("allowed.test")).code == "network_off"
            assert ask(blocked.dial(peers.allowed.address, 80), get("allowed.test")).code == "network_off"
            assert blocked.is_reset(peers.allowed.address, 22)


@pytest.fixture(scope="module")
def reader(rig: Rig, peers: Peers) -> Attempt:
    rules = (rule(name, methods=READ_ONLY) for name in ("allowed.test", "h2.test"))
    return rig.explicit(grant(*rules, hosts=peers.hosts))


class TestReadOnlyRules:
    @pytest.mark.parametrize("method", READ_ONLY)
    def test_reading_is_allowed(self, reader: Attempt, method: str) -> None:
        assert ask(reader.https("allowed.test"), get("allowed.test", method=method), method).status == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
    def test_other_methods_are_not(self, reader: Attempt, peers: Peers, method: str) -> None:
        with peers.silence():
            answer = ask(reader.https("allowed.test"), get("allowed.test", method=method), method)
        assert answer.code == "method_not_allowed"

    @pytest.mark.parametrize("more", ["Content-Length: 6", "Transfer-Encoding: chunked"])
    def test_a_body_is_not(self, reader: Attempt, peers: Peers, more: str) -> None:
        """The answer does not wait for the body."""
        with peers.silence():
            answer = ask(reader.https("allowed.test"), get("allowed.test", "/", more))
        assert answer.code == "body_not_allowed"

    def test_a_body_that_http2_does_not_announce_is_not(self, reader: Attempt, peers: Peers) -> None:
        with peers.silence():
            client = Http2Client(reader.https("h2.test", alpn=["h2"]))
            stream = client.start(h2_headers("h2.test"), end_stream=False)
            client.connection.send_data(stream, b"CANARY", end_stream=True)
            client.flush()
            assert client.answer(stream).code == "body_not_allowed"

    def test_trailers_over_http2_are_not(self, reader: Attempt, peers: Peers) -> None:
        with peers.silence():
            client = Http2Client(reader.https("h2.test", alpn=["h2"]))
            stream = client.start(h2_headers("h2.test"), end_stream=False)
            client.connection.send_headers(stream, [("x-canary", "1")], end_stream=True)
            client.flush()
            assert client.answer(stream).code == "body_not_allowed"

    @pytest.mark.parametrize("protocol", ["websocket", "h2c", "CANARY"])
    def test_an_upgrade_is_not(self, reader: Attempt, peers: Peers, protocol: str) -> None:
        more = ("Connection: upgrade", f"Upgrade: {protocol}", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eHh4")
        with peers.silence():
            answer = ask(reader.https("allowed.test"), get("allowed.test", "/ws", *more))
        assert answer.code == "method_not_allowed"

    def test_a_client_that_asks_before_it_sends_is_answered_at_once(self, reader: Attempt, peers: Peers) -> None:
        request = get("allowed.test", "/", "Content-Length: 1000000000", "Expect: 100-continue", method="POST")
        with peers.silence():
            answer = ask(reader.https("allowed.test"), request)
        assert (answer.status, answer.code) == (403, "method_not_allowed")

    @pytest.mark.parametrize(
        "name",
        ["X-HTTP-Method", "X-HTTP-Method-Override", "X-Method-Override", "x_http_method_override", "X-Original-Method",
         "X-Original-URL", "X-Rewrite-URL", "X-Original-URI", "X-Forwarded-Path", "X-Envoy-Original-Path"],
    )  # fmt: skip
    def test_a_header_that_names_another_method_or_path_is_not(self, reader: Attempt, peers: Peers, name: str) -> None:
        with peers.silence():
            answer = ask(reader.https("allowed.test"), get("allowed.test", "/", f"{name}: DELETE"))
            client = Http2Client(reader.https("h2.test", alpn=["h2"]))
            other = client.get("h2.test", "/", (name.lower(), "/secret"))
        assert (answer.code, other.code) == ("method_not_allowed", "method_not_allowed")

    def test_no_header_of_the_client_changes_that(self, reader: Attempt, peers: Peers) -> None:
        more = ("User-Agent: Mozilla/5.0", "X-HTTP-Method-Override: GET", "Origin: https://allowed.test")
        with peers.silence():
            answer = ask(reader.https("allowed.test"), get("allowed.test", "/", *more, method="POST"))
        assert answer.code == "method_not_allowed"


class TestPathRules:
    def test_only_matching_paths_pass_also_when_they_could_be_read_in_two_ways(self, rig: Rig, peers: Peers) -> None:
        with rig.explicit(grant(rule("allowed.test", paths=("/public/**",)), hosts=peers.hosts)) as reader:
            assert ask(reader.https("allowed.test"), get("allowed.test", "/public/x?q=../../secret")).status == 200
            with peers.silence():
                for path in (
                    "/",
                    "/secret",
                    "/public/../secret",
                    "/public/%2e%2e/secret",
                    "/public/..%2fsecret",
                    "//public/x",
                ):
                    assert ask(reader.https("allowed.test"), get("allowed.test", path)).code == "path_not_allowed"


class TestRawTcp:
    def test_a_rule_for_raw_tcp_lets_a_server_speak_first(self, rig: Rig, peers: Peers) -> None:

        with BannerTcp(peers.loop, peers.other.address, 2525) as mail:
            mail_grant = grant(tcp_rule("mail.test", 2525), hosts={"mail.test": mail.address})
            with rig.captured(mail_grant) as sender:
                roads = (
                    sender.tunnel("mail.test", 2525),
                    sender.dial(synthetic(sender, "mail.test"), 2525),
                    socks5(sender, "mail.test", 2525),
                )
                for sock in roads:
                    assert sock.recv(1000) == f"220 {mail.nonce} ready\r\n".encode()
                    sock.sendall(b"QUIT\r\n")
                    assert sock.recv(1000) == b"250 QUIT\r\n"
        ends = sender.events(event="connection")
        assert [(end["bytes_out"], end["outcome"], end["host"]) for end in ends] == [(6, "aborted", "mail.test")] * 3

    def test_half_a_close_is_passed_on(self, rig: Rig, peers: Peers) -> None:
        with RecordingTcp(peers.loop, peers.other.address, 2600) as sink:
            with rig.captured(grant(tcp_rule("sink.test", 2600), hosts={"sink.test": sink.address})) as sender:
                sock = sender.dial(synthetic(sender, "sink.test"), 2600)
                sock.sendall(b"all of it")
                sock.shutdown(socket.SHUT_WR)
                assert sink.nonce.encode() in read_to_end(sock)
        (end,) = sender.events(event="connection")
        assert (end["outcome"], end["bytes_out"]) == ("completed", 9)

    def test_http_is_not_spoken_where_only_raw_tcp_is_allowed(self, rig: Rig, peers: Peers) -> None:
        with rig.explicit(grant(tcp_rule("allowed.test", 80), hosts=peers.hosts)) as sender, peers.silence():
            answer = ask(sender.explicit(), get("allowed.test", target="http://allowed.test/"))
        assert answer.code == "protocol_not_allowed"

    def test_an_open_grant_passes_raw_bytes_but_on_no_port_of_http(self, rig: Rig, peers: Peers) -> None:

        with (
            BannerTcp(peers.loop, peers.other.address, 2525) as mail,
            RecordingTcp(peers.loop, peers.other.address, 99) as any_,
        ):
            with rig.captured(grant(mode=Mode.UNRESTRICTED)) as open_attempt:
                assert open_attempt.dial(mail.address, 2525).recv(1000).startswith(b"220 ")
                sock = open_attempt.dial(any_.address, 99)
                for _ in range(3):
                    sock.sendall(b"bytes")
                    assert any_.nonce.encode() in sock.recv(1000)
                with peers.silence():
                    for port in (80, 443):
                        sock = open_attempt.dial(peers.other.address, port)
                        sock.sendall(b"bytes")
                        assert is_cut(sock)

    def test_a_long_exchange_on_any_port_of_an_open_grant(self, rig: Rig, peers: Peers) -> None:
        """The wake-up by which a silent client is noticed does not disturb one that has spoken."""

        with Http(peers.loop, peers.other.address, 8000) as server:
            with rig.captured(grant(mode=Mode.UNRESTRICTED)) as open_attempt:
                sock = open_attempt.dial(server.address, 8000)
                sock.sendall(get(f"{server.address}:8000", "/hold"))
                server.wait(lambda journal: bool(journal.requests))
                silent = open_attempt.dial(server.address, 8000)  # its wake-up comes after that of the first
                server.wait(lambda journal: journal.connections == 2)
                server.release()
                assert read_answer(sock).json["nonce"] == server.nonce
                silent.close()


def socks5(attempt: Attempt, host: str, port: int) -> socket.socket:
    sock = attempt.explicit()
    sock.sendall(b"\x05\x01\x00")
    assert sock.recv(2) == b"\x05\x00"
    sock.sendall(b"\x05\x01\x00\x03" + bytes([len(host)]) + host.encode() + port.to_bytes(2))
    reply = sock.recv(10)
    assert reply[:2] == b"\x05\x00", reply
    return sock


class TestPassthrough:
    def test_a_passthrough_host_is_not_opened_and_only_its_name_is_judged(self, rig: Rig, peers: Peers) -> None:
        passing = grant(rule("allowed.test"), hosts=peers.hosts, passthrough=(parse_host("allowed.test"),))
        with rig.explicit(passing) as attempt:
            sock = attempt.tls(attempt.tunnel("allowed.test", 443), "allowed.test", ca=peers.ca_file)
            assert ask(sock, get("allowed.test")).json["nonce"] == peers.allowed_tls.nonce
            with peers.silence():
                tunnel = attempt.tunnel("allowed.test", 443)
                assert ask(attempt.tls(tunnel, "other.test"), get("allowed.test")).code == "sni_mismatch"
        (end,) = attempt.events(event="connection")
        assert end["bytes_out"] > 0
        assert end["sni"] == "allowed.test"
        assert end["method"] is None


@pytest.fixture(scope="module")
def unlucky(rig: Rig, peers: Peers) -> Attempt:
    hosts = {**peers.hosts, "nobody.test": "20.250.0.1", "wrong.test": peers.other.address}
    names = ("allowed.test", "wrong.test", "unknown.test")
    # At the usual ports something may listen on every address of this process's world.
    rules = [rule("nobody.test", 81), *(rule(name) for name in names)]
    return rig.explicit(grant(*rules, hosts=hosts))


class TestFailures:
    """What fails upstream is told as that, and is no denial."""

    def failed(self, unlucky: Attempt, host: str) -> None:
        ends = unlucky.events(event="connection", host=host)
        assert [end["outcome"] for end in ends] == ["failed"]
        assert unlucky.events(event="decision", host=host, decision="deny") == []

    def test_a_port_that_nobody_listens_on(self, unlucky: Attempt) -> None:
        answer = ask(unlucky.explicit(), get("nobody.test:81", target="http://nobody.test:81/"))
        assert (answer.status, answer.code) == (502, "connect_failed")
        self.failed(unlucky, "nobody.test")

    def test_a_name_without_address(self, unlucky: Attempt) -> None:
        answer = ask(unlucky.explicit(), get("unknown.test", target="http://unknown.test/"))
        assert (answer.status, answer.code) == (502, "dns_failed")
        self.failed(unlucky, "unknown.test")

    def test_a_certificate_for_another_name(self, unlucky: Attempt, peers: Peers) -> None:
        peers.forget()
        answer = ask(unlucky.https("wrong.test"), get("wrong.test"))
        assert (answer.status, answer.code) == (502, "tls_failed")
        assert peers.other_tls.journal.requests == []
        self.failed(unlucky, "wrong.test")

    def test_a_client_of_http2_only_and_a_server_without_it(self, unlucky: Attempt, peers: Peers) -> None:
        """Nothing is turned into HTTP/1.1, where a body without a length would be the next request."""
        peers.forget()
        client = Http2Client(unlucky.https("allowed.test", alpn=["h2"]))
        stream = client.start(h2_headers("allowed.test", method="POST"), end_stream=False)
        client.connection.send_data(stream, get("other.test", "/smuggled"), end_stream=True)
        client.flush()
        assert client.answer(stream).status == 502
        assert peers.allowed_tls.journal.requests == []
        assert b"smuggled" not in peers.allowed_tls.journal.received

    @pytest.mark.parametrize(
        "said", [b"", b"HTTP/1.1 2", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
    )
    def test_a_server_that_does_not_answer_in_http(self, rig: Rig, peers: Peers, said: bytes) -> None:
        class Curt(Peer):
            async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(said)
                writer.close()
                await writer.wait_closed()

        with Curt(peers.loop, peers.other.address, 2700) as curt:
            with rig.explicit(grant(rule("curt.test", 2700), hosts={"curt.test": curt.address})) as attempt:
                answer = ask(attempt.explicit(), get("curt.test:2700", target="http://curt.test:2700/"))
        assert (answer.status, answer.code) == (502, "upstream_failed")


def test_the_certificates_of_another_authority_are_not_shown(attempt: Attempt) -> None:
    """The positive control of every test here that trusts the proxy's authority."""
    with pytest.raises(ssl.SSLCertVerificationError):
        attempt.tls(attempt.tunnel("allowed.test", 443), "allowed.test", ca=attempt.rig.config.upstream_ca_file)


def test_a_rule_of_a_network_is_for_addresses_only(rig: Rig, peers: Peers) -> None:
    network = Rule(id="net", cidr=ip_network(peers.allowed.address))
    with rig.explicit(grant(network, hosts=peers.hosts)) as attempt:
        address = peers.allowed.address
        assert ask(attempt.explicit(), get(address, target=f"http://{address}/")).json["nonce"] == peers.allowed.nonce
        with peers.silence():
            assert ask(attempt.explicit(), get("allowed.test", target="http://allowed.test/")).status == 403


class TestServerNames:
    """What stands in a ClientHello as the server's name is the code's to choose, and need not be a name."""

    @pytest.mark.parametrize("name", [b"\xff\xfe", b"a..b", b"a" * 250, b"127.0.0.1", b"allowed.test:443", b"*"])
    def test_one_that_is_none_is_a_readable_denial(self, attempt: Attempt, peers: Peers, name: bytes) -> None:
        with peers.silence():
            connection = open_tls(attempt.tunnel("allowed.test", 443), name)
            connection.sendall(get("allowed.test"))
            assert b"sni_mismatch" in receive_all(connection) or name == b"\xff\xfe"

    def test_the_allowed_one_works_so(self, attempt: Attempt) -> None:
        connection = open_tls(attempt.tunnel("allowed.test", 443), b"allowed.test")
        connection.sendall(get("allowed.test", "/", "Connection: close"))
        assert b"HTTP/1.1 200" in receive_all(connection)


def open_tls(sock: socket.socket, name: bytes) -> OpenSSL.SSL.Connection:
    """TLS with any bytes as the server's name, and without looking at certificates."""
    sock.settimeout(None)  # pyOpenSSL wants it so
    connection = OpenSSL.SSL.Connection(OpenSSL.SSL.Context(OpenSSL.SSL.TLS_CLIENT_METHOD), sock)
    connection.set_tlsext_host_name(name)
    connection.set_connect_state()
    connection.do_handshake()
    return connection


def receive_all(connection: OpenSSL.SSL.Connection) -> bytes:
    data = b""
    try:
        while b"}" not in data:
            data += connection.recv(65536)
    except OpenSSL.SSL.Error:
        pass
    return data
