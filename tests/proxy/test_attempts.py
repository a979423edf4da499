"""What an attempt decides it also writes, or denies; and it counts what it decided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.attempts import Attempt, Connection, Exchange
from proxy.audit import AuditLog, AuditUnavailable
from proxy.destinations import Unparsed, parse_host
from proxy.network import Mode, Reason, Request, RequestLayer, deny
from tests.proxy.rig import grant, rule

ALLOWED = Request(
    RequestLayer.HTTP, parse_host("allowed.test"), 443, claims=((parse_host("allowed.test"), None),), method="GET"
)
DENIED = Request(RequestLayer.HTTP, parse_host("other.test"), 443, method="GET")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AuditLog]:
    with AuditLog(tmp_path / "audit.jsonl") as log:
        yield log


@pytest.fixture
def attempt(log: AuditLog) -> Attempt:
    return Attempt(grant(rule("allowed.test"), max_connections=4), log)


def lines(log: AuditLog) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.path.read_bytes().splitlines()]


def break_log(log: AuditLog) -> None:
    log.path.unlink()
    log.path.mkdir()


class TestJudging:
    def test_a_decision_is_written_with_its_connection(self, attempt: Attempt, log: AuditLog) -> None:
        assert attempt.judge(ALLOWED, Connection("connect", "c1")).allowed
        assert not attempt.judge(DENIED, Connection("proxy", "c2")).allowed
        written = [(line["connection_id"], line["protocol"], line["decision"], line["host"]) for line in lines(log)]
        assert written == [("c1", "connect", "allow", "allowed.test"), ("c2", "proxy", "deny", "other.test")]

    def test_what_cannot_be_written_is_denied(self, attempt: Attempt, log: AuditLog) -> None:
        break_log(log)
        decision = attempt.judge(ALLOWED, Connection("proxy"))
        assert (decision.allowed, decision.reason) == (False, Reason.AUDIT_UNAVAILABLE)

    def test_an_attempt_has_a_share_of_the_log_in_bytes_too(self, attempt: Attempt, log: AuditLog) -> None:
        """Long paths of characters that need escapes make long lines: the log must not roll over within few of them."""
        share = 16 * 1024 * 1024
        long = Request(RequestLayer.HTTP, parse_host("other.test"), 443, method="GET", path="/" + "\U0001f300" * 1000)
        reasons = [attempt.judge(long, Connection("proxy")).reason for _ in range(3000)]
        assert reasons[0] is Reason.HOST_NOT_ALLOWED
        assert reasons[-1] is Reason.LIMIT_EXCEEDED
        assert share <= log.path.stat().st_size <= share + 64 * 1024
        assert [line["reason"] for line in lines(log)].count("limit_exceeded") == 1

    def test_a_quiet_allow_is_left_out_and_a_quiet_denial_is_not(self, attempt: Attempt, log: AuditLog) -> None:
        assert attempt.judge(ALLOWED, Connection("proxy"), quiet=True).allowed
        attempt.judge(DENIED, Connection("proxy"), quiet=True)
        assert [line["decision"] for line in lines(log)] == ["deny"]

    def test_after_the_end_everything_is_denied(self, attempt: Attempt) -> None:
        attempt.over = True
        assert attempt.judge(ALLOWED, Connection("proxy")).reason is Reason.ATTEMPT_OVER
        assert attempt.judge_silently(ALLOWED).reason is Reason.ATTEMPT_OVER

    def test_an_end_that_cannot_be_written_is_an_error(self, attempt: Attempt, log: AuditLog) -> None:
        break_log(log)
        with pytest.raises(AuditUnavailable):
            attempt.write_end(Connection("proxy"))


class TestCounting:
    def test_denials_are_counted_and_allows_where_they_are_final(self, attempt: Attempt) -> None:
        attempt.judge(ALLOWED, Connection("proxy"))
        attempt.judge(ALLOWED, Connection("proxy"), final=True)
        attempt.judge(DENIED, Connection("proxy"))
        attempt.refuse(DENIED, deny(Reason.LIMIT_EXCEEDED, "too many"), Connection("proxy"))
        attempt.repeat(DENIED, deny(Reason.LIMIT_EXCEEDED, "too many"), Connection("proxy"))
        assert (attempt.allowed, attempt.denied) == (1, 2)
        assert {(row["host"], row["reason"], row["count"]) for row in attempt.destinations()} == {
            ("allowed.test", "allowed", 1),
            ("other.test", "host_not_allowed", 1),
            ("other.test", "limit_exceeded", 1),
        }

    def test_a_flood_of_destinations_does_not_grow_without_bound(self, log: AuditLog) -> None:
        attempt = Attempt(grant(mode=Mode.BLOCK_ALL), log)
        for number in range(3000):
            attempt.count(Request(RequestLayer.DNS, Unparsed(f"n{number}" * 1000, "")), deny(Reason.NETWORK_OFF, ""))
        assert attempt.denied == 3000
        assert len(attempt.destinations()) <= 100


class TestSyntheticAddresses:
    def test_each_name_has_its_own_and_it_leads_back(self, attempt: Attempt) -> None:
        first, second = (attempt.synthetic_address(parse_host(name)) for name in ("a.test", "b.test"))
        assert first is not None
        assert second is not None
        assert first != second
        assert attempt.synthetic_address(parse_host("a.test")) == first
        assert attempt.name_behind(str(first)) == "a.test"
        assert attempt.name_behind("198.19.255.255") == "198.19.255.255"

    def test_another_attempts_addresses_mean_nothing(self, attempt: Attempt, log: AuditLog) -> None:
        address = attempt.synthetic_address(parse_host("a.test"))
        assert Attempt(grant(), log).name_behind(str(address)) == str(address)


class TestExchanges:
    def test_an_end_has_what_was_sent_and_received(self, attempt: Attempt, log: AuditLog) -> None:
        exchange = Exchange(ALLOWED)
        assert exchange.count_sent(b"abc") == b"abc"
        assert exchange.count_received(b"abcde") == b"abcde"
        exchange.status = 200
        attempt.write_end(Connection("connect", "c1"), exchange, address="20.0.0.1")
        (line,) = lines(log)
        assert (line["event"], line["outcome"], line["status"]) == ("connection", "completed", 200)
        assert (line["bytes_out"], line["bytes_in"], line["address"]) == (3, 5, "20.0.0.1")

    def test_an_end_says_whether_it_failed_or_was_cut(self, attempt: Attempt, log: AuditLog) -> None:
        attempt.write_end(Connection("connect"), error="tls_failed: x")
        attempt.write_end(Connection("connect", aborted=True))
        attempt.write_end(Connection("connect"), Exchange(ALLOWED, given_up=True), error="client_closed: x")
        assert [line["outcome"] for line in lines(log)] == ["failed", "aborted", "aborted"]


class TestConnections:
    def test_a_crowd_is_refused_in_one_line(self, attempt: Attempt, log: AuditLog) -> None:
        for number in range(4):
            assert attempt.admit(Connection("proxy"))
            attempt.connections[str(number)] = Connection("proxy")
        assert [attempt.admit(Connection("proxy")) for _ in range(50)] == [False] * 50
        assert [line["reason"] for line in lines(log)] == ["limit_exceeded"]

    def test_one_that_leaves_and_comes_back_is_no_new_crowd(self, attempt: Attempt, log: AuditLog) -> None:
        for number in range(4):
            attempt.connections[str(number)] = Connection("proxy")
        for _ in range(20):
            assert not attempt.admit(Connection("proxy"))
            del attempt.connections["0"]
            assert attempt.admit(Connection("proxy"))
            attempt.connections["0"] = Connection("proxy")
        assert len(lines(log)) == 1
