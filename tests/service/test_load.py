"""Many clients at once: each call has exactly one answer, no error but the announced one, and memory does not grow."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.service.serving import Service, policy_text

CLIENTS, CALLS_EACH = 50, 20
GROWTH_BYTES = 48 * 1024 * 1024


def ask(
    service: Service, client: int, answered: Counter[tuple[int, bool]], seen: list[str], lock: threading.Lock
) -> None:  # fmt: skip
    """One client's calls, one after the other; what is refused for a full queue is asked again."""
    with service.client(sluicegate_user=f"user{client % 7}") as http:
        for number in range(CALLS_EACH):
            want = f"{client}.{number}"
            while True:
                response = http.post("/v1/calls", json={"language": "python", "code": f"print('{want}')"}, timeout=300)
                if response.status_code != 503:
                    break
                assert response.json()["error"]["code"] == "queue_full"
                assert int(response.headers["retry-after"]) >= 1
                time.sleep(0.1)  # less than it says: it may be asked at any time
            with lock:
                answered[response.status_code, response.json()["stdout"].strip() == want] += 1
                seen.append(response.json()["call_id"])


def round_of_calls(service: Service) -> list[str]:
    """A thousand calls: the ids of their answers."""
    answered: Counter[tuple[int, bool]] = Counter()
    seen: list[str] = []
    lock = threading.Lock()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda client: ask(service, client, answered, seen, lock), range(CLIENTS)))
    assert answered == {(200, True): CLIENTS * CALLS_EACH}
    return seen


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_calls_of_fifty_clients_have_one_answer_each(root: Path) -> None:
    """Twice: in the second round the service has what it needs, and takes no more. Each call was begun once."""
    with Service(root, policy_text(), "--max-concurrency", "8", "--max-waiting", "30") as service:
        first = round_of_calls(service)
        before = psutil.Process(service.pid).memory_info().rss
        second = round_of_calls(service)
        grown = psutil.Process(service.pid).memory_info().rss - before
        metrics = service.client().get("/metrics").text
    ids = first + second
    assert len(set(ids)) == len(ids) == 2 * CLIENTS * CALLS_EACH
    assert grown < GROWTH_BYTES, f"{grown / 2**20:.0f} MiB more"
    assert 'sluicegate_http_requests_total{method="POST",route="/v1/calls",status="500"}' not in metrics
    with sqlite3.connect(root / "state" / "calls" / "calls.sqlite") as ledger:
        kept = ledger.execute("SELECT count(*), count(DISTINCT call_id), sum(status = 'success') FROM calls").fetchone()
    assert kept == (len(ids),) * 3
