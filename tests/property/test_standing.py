"""What holds of amended grants, whichever they are, and for every request."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from proxy.network import Grant, Reason, Request, decide
from proxy.standing import Standing
from tests.property.test_decide import generous, grants, requests

many = settings(max_examples=400)
some = st.lists(generous | grants, max_size=3)


def amended(own: Grant, *more: Grant | None) -> Standing:
    standing = Standing(own)
    for grant in more:
        standing = standing.amended(grant)
    return standing


@many
@given(generous | grants, some, requests())
def test_what_is_allowed_each_of_the_grants_allows_and_what_each_allows_is_allowed(
    own: Grant, more: list[Grant], request: Request
) -> None:
    decision = amended(own, *more).decide(request)
    event(f"{decision.verdict.value} of {len(more) + 1}")
    assert decision.allowed is all(decide(grant, request).allowed for grant in (own, *more))


@many
@given(generous | grants, some, generous | grants | st.none(), requests())
def test_no_amendment_turns_a_deny_into_an_allow(
    own: Grant, more: list[Grant], next_: Grant | None, request: Request
) -> None:
    before = amended(own, *more)
    assert before.decide(request).allowed or not before.amended(next_).decide(request).allowed


@many
@given(generous | grants, some, some, requests())
def test_after_a_revocation_nothing_is_allowed_whatever_comes(
    own: Grant, more: list[Grant], later: list[Grant], request: Request
) -> None:
    decision = amended(own, *more, None, *later).decide(request)
    assert not decision.allowed
    assert (decision.reason is Reason.POLICY_REVOKED) is decide(own, request).allowed


@many
@given(generous | grants, some, requests())
def test_a_denial_is_the_attempts_own_or_says_that_the_policy_was_changed(
    own: Grant, more: list[Grant], request: Request
) -> None:
    decision, mine = amended(own, *more).decide(request), decide(own, request)
    if not mine.allowed:
        assert decision == mine
    elif not decision.allowed:
        assert decision.reason is Reason.POLICY_REVOKED
        later = [decide(grant, request) for grant in more]
        assert (decision.rule in {answer.rule for answer in later if not answer.allowed}) is True
