"""Claims about where things lie."""

from pathlib import Path

import pytest

from sandbox.state import InvalidSettings, audit_path, shipped_policies, state_dir


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLUICEGATE_STATE_DIR": "/s", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/s"),
        ({"SLUICEGATE_STATE_DIR": "", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/sluicegate"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/sluicegate"),
        ({"HOME": "/h"}, "/h/.local/state/sluicegate"),
    ],
)
def test_the_state_directory_is_ours_then_xdg_s_then_the_home_s(environment: dict[str, str], expected: str) -> None:
    assert state_dir(environment) == Path(expected)


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "relative"}, {"SLUICEGATE_STATE_DIR": "here"}])
def test_no_state_directory_follows_the_working_directory(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings, match="SLUICEGATE_STATE_DIR"):
        state_dir(environment)


def test_the_state_directory_is_that_of_this_process_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_STATE_DIR", "/from/the/environment")
    assert state_dir() == Path("/from/the/environment")
    assert audit_path() == Path("/from/the/environment/audit.jsonl")


def test_a_policy_s_audit_path_is_relative_to_the_state_directory() -> None:
    assert audit_path("team/log.jsonl", Path("/state")) == Path("/state/team/log.jsonl")
    assert audit_path("/var/log/sluicegate.jsonl", Path("/state")) == Path("/var/log/sluicegate.jsonl")
    assert audit_path(None, Path("/state")) == Path("/state/audit.jsonl")


def test_the_shipped_policies_are_found_in_a_checkout() -> None:
    assert shipped_policies() == Path(__file__).parents[2] / "configs" / "policies"
