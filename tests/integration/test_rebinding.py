"""A name whose answers change between look-ups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from proxy.network import Reason
from tests.lab import Lab, Outside, main_policy, named

REBIND = named("rebind.test")
PROBE = """
for _ in range(4):
    report(plain=fetch("http://rebind.test/echo"))
    report(tls=https("rebind.test", "rebind.test", "rebind.test", verify=False))
"""


def test_what_is_vetted_is_what_is_dialled(
    open_lab: Callable[[str], AbstractContextManager[Lab]], outside: Outside
) -> None:
    """The first answer is public, every later one the metadata service: nothing arrives there."""
    outside.dns.zone["rebind.test"] = lambda asked: [outside.other.address] if asked == 0 else ["169.254.169.254"]
    with open_lab(main_policy(outside)) as lab:
        outside.forget()
        run = lab.run(PROBE, REBIND)
    assert run.seen[0]["plain"]["json"]["nonce"] == outside.other.nonce, "the control: the public answer was reached"
    assert len(run.seen) == 8
    assert all(peer.untouched for peer in outside.strangers)


def test_an_answer_that_turned_private_is_denied_at_the_next_lookup(
    open_lab: Callable[[str], AbstractContextManager[Lab]], outside: Outside
) -> None:
    """Whoever looks the name up after the change is denied, for the address."""
    outside.dns.zone["rebind.test"] = ["169.254.169.254"]
    with open_lab(main_policy(outside)) as lab:
        with outside.silence(lookups=True):
            run = lab.run(PROBE, REBIND)
        assert {one["plain"]["status"] for one in run.seen if "plain" in one} == {403}
        assert run.reasons == {Reason.ADDRESS_NOT_PUBLIC}
        assert {event["address"] for event in run.denials} == {"169.254.169.254"}


def test_alternating_answers_never_reach_the_private_one(
    open_lab: Callable[[str], AbstractContextManager[Lab]], outside: Outside
) -> None:
    """Answers that alternate, over attempts in parallel processes of the same executor: none arrives."""
    outside.dns.zone["rebind.test"] = lambda asked: ["127.0.0.1"] if asked % 2 else [outside.other.address]
    with open_lab(main_policy(outside)) as lab:
        outside.forget()
        for _ in range(3):
            assert lab.run(PROBE, REBIND).result.status == "success"
    assert all(peer.untouched for peer in outside.strangers)
    assert outside.local.untouched
