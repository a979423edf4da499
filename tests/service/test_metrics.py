"""What is counted: the calls that end, whatever asked for them, under labels that nobody outside can multiply."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sandbox import results
from sandbox.owners import Caller
from sandbox.policy_file import parse_policy
from sandbox.service.metrics import Metrics
from sandbox.service.model import Kind
from tests.service.serving import Service, detach, ended, run

DOCS = Path(__file__).parents[2] / "docs" / "service.md"
type Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(text: str) -> dict[Sample, float]:
    """Every sample that Prometheus would read."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def count(found: dict[Sample, float], name: str, /, **labels: str) -> float:
    return sum(value for (one, has), value in found.items() if one == name and labels.items() <= dict(has).items())


@dataclass
class Ended:
    caller: Caller = field(default_factory=lambda: Caller("acme", "alice"))
    kind: Kind = "code_exec"
    submitted_at: float = 0.0
    begun_at: float | None = None


def test_calls_are_counted_by_how_they_ended(single: Service) -> None:
    with single.client(sluicegate_user="counted") as client:
        before = samples(client.get("/metrics").text)
        run(client, "print(1)")
        run(client, "raise SystemExit(1)")
        client.post("/v1/code_exec", json={"code": "print(1)"})
        ended(client, detach(client, "print(1)"))
        run(client, "print(1)", allow_network=True, domains=[])
        after = samples(client.get("/metrics").text)

    def more(name: str, **labels: str) -> float:
        return count(after, name, **labels) - count(before, name, **labels)

    total = "sluicegate_calls_total"
    assert more(total, kind="code_execution", status="success", cause="exit", tenant="") == 2
    assert more(total, kind="code_execution", status="error", cause="exit") == 1
    assert more(total, kind="code_exec", status="success") == 1
    assert more(total, cause="policy_refused") == 1
    assert more("sluicegate_call_seconds_count", kind="code_execution") == 4
    assert more("sluicegate_call_wait_seconds_count") == 4, "the one that was refused had no turn"
    assert more("sluicegate_http_requests_total", route="/v1/calls", method="POST", status="200") == 3
    assert more("sluicegate_http_requests_total", route="/v1/calls", method="POST", status="202") == 1
    assert count(after, "sluicegate_launcher_up") == count(after, "sluicegate_proxy_up") == 1
    assert count(after, "sluicegate_calls_running") == count(after, "sluicegate_calls_waiting") == 0


def test_what_anybody_can_make_up_makes_no_new_label(client: httpx.Client) -> None:
    """No path, method, call or user."""
    client.get("/metrics")
    before = samples(client.get("/metrics").text)
    for n in range(5):
        client.get(f"/made-up-{n}")
        client.get(f"/v1/calls/call-{n:016x}")
        client.request(f"MADEUP{n}", "/v1/calls")
        client.get("/v1/calls", headers={"sluicegate-user": f"made-up-{n}"})
        client.get("/v1/calls", params={"limit": f"made-up-{n}"})
    text = client.get("/metrics").text
    new = samples(text).keys() - before.keys()
    assert len(new) <= 5
    assert "made-up" not in text
    assert "MADEUP" not in text


def test_the_policy_in_force_is_told_with_its_digest(client: httpx.Client, single: Service) -> None:
    digest = parse_policy(single.policy.read_text()).digest
    found = samples(client.get("/metrics").text)
    assert count(found, "sluicegate_policy_info", name="tests-service", digest=digest) == 1


def test_a_call_without_an_answer_is_counted_too() -> None:
    metrics = Metrics()
    metrics.ended(Ended(), None)
    metrics.ended(Ended(begun_at=1.0), results.cancelled("call-1", "block-all"))
    metrics.refused("acme", "busy")
    found = samples(metrics.text().decode())
    assert count(found, "sluicegate_calls_total", status="none", cause="none", tenant="acme") == 1
    assert count(found, "sluicegate_calls_total", status="killed", cause="cancelled") == 1
    assert count(found, "sluicegate_calls_refused_total", tenant="acme", code="busy") == 1
    assert count(found, "sluicegate_call_wait_seconds_count") == 1


def test_two_services_of_one_process_count_for_themselves() -> None:
    one, other = Metrics(), Metrics()
    one.refused("", "draining")
    assert count(samples(other.text().decode()), "sluicegate_calls_refused_total") == 0


def test_every_metric_is_explained_and_no_other(client: httpx.Client) -> None:
    """Those of the process are not ours to explain."""
    text = client.get("/metrics").text
    counted = {family.name for family in text_string_to_metric_families(text) if family.name.startswith("sluicegate_")}
    explained = set(re.findall(r"^\| `(sluicegate_\w+?)(?:_total)?`", DOCS.read_text(), re.MULTILINE))
    assert counted == explained


def test_the_text_is_what_prometheus_reads(client: httpx.Client) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "_created" not in answer.text
