"""What a host lacks is named, with the way to get it."""

from __future__ import annotations

import resource

import pytest

from sandbox.isolation import probe


def test_this_host_passes_every_check() -> None:
    """Or else no other test of isolation means anything. The checks are what `doctor` shows first."""
    checks = probe.check_host()
    assert [check.name for check in checks] == ["bubblewrap", "libseccomp", "descriptors", "namespaces", "capture"]
    assert [check for check in checks if not check.ok] == []
    assert all(check.detail for check in checks)


@pytest.mark.parametrize(
    ("message", "settings", "words"),
    [
        ("bwrap: No permissions", {"/proc/sys/user/max_user_namespaces": "0"}, "user.max_user_namespaces=10000"),
        (
            "bwrap: setting up uid map",
            {"/proc/sys/kernel/unprivileged_userns_clone": "0"},
            "unprivileged_userns_clone=1",
        ),
        (
            "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
            {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "/etc/apparmor.d/bwrap",
        ),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", {}, "systempaths=unconfined"),
        ("bwrap: Creating new namespace failed: Operation not permitted", {}, "seccomp=<profile"),
    ],
)
def test_a_refusal_is_explained_by_what_refused_it(message: str, settings: dict[str, str], words: str) -> None:
    """By the setting that says so, or else by bubblewrap's words."""
    assert words in probe.explain_refusal(message, settings.get)


def test_a_missing_bubblewrap_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its remedy names the package, and the checks that need it are not tried."""
    monkeypatch.setattr(probe, "_BWRAP_PATH", "/nonexistent")
    checks = probe.check_host()
    assert [(check.name, check.ok) for check in checks] == [
        ("bubblewrap", False), ("libseccomp", True), ("descriptors", True),
    ]  # fmt: skip
    assert "bubblewrap" in checks[0].remedy


def test_a_low_limit_of_descriptors_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code inside could then keep every launch from working."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    check = probe.check_descriptors()
    assert (check.ok, "LimitNOFILE" in check.remedy) == (False, True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert probe.check_descriptors().ok
