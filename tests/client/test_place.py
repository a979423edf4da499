"""Where a client goes, what it carries there, and where it will not carry a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox import InvalidSettings
from sandbox.client import Client
from sandbox.client.place import choose_place
from sandbox.state import default_socket
from tests.client.conftest import Connect
from tests.client.scripted import Scripted, answer
from tests.client.test_operations import ID, RECORD


def test_without_an_address_it_is_the_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert choose_place().socket == "/run/user/7/sluicegate/sluicegate.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("SLUICEGATE_STATE_DIR", "/var/lib/sluicegate")
    assert choose_place().socket == "/var/lib/sluicegate/run/sluicegate.sock"
    assert default_socket({"HOME": "/h", "XDG_RUNTIME_DIR": "relative"}) == Path(
        "/h/.local/state/sluicegate/run/sluicegate.sock"
    )


def test_who_speaks_is_in_every_request(connect: Connect, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_TOKEN", "from-the-environment")
    with Scripted(place / "s", *[answer(200, RECORD)] * 2) as service:
        connect(uds=place / "s", token="given", user="alice", working_directory="/srv/café").record(ID)
        connect(uds=place / "s").record(ID)
        given, bare = service.asked
    assert given.headers["authorization"] == "Bearer given"
    assert given.headers["sluicegate-user"] == "alice"
    assert given.headers["sluicegate-working-directory"] == "/srv/café"
    assert bare.headers["authorization"] == "Bearer from-the-environment"
    assert "sluicegate-user" not in bare.headers
    assert "sluicegate-working-directory" not in bare.headers


def test_a_proxy_of_the_environment_is_not_used(connect: Connect, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see the token."""
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Scripted(place / "s", answer(200, RECORD)):
        assert connect(uds=place / "s").record(ID).call_id == ID


def test_a_redirect_is_not_followed(connect: Connect, place: Path) -> None:
    """Nor is the token carried to where it points: the answer is none of the service's."""
    with Scripted(place / "s", answer(307, {}, location="http://127.0.0.1:9/"), answer(200, RECORD)) as service:
        with pytest.raises(Exception, match="cannot be read"):
            connect(uds=place / "s").record(ID)
        assert len(service.asked) == 1


@pytest.mark.parametrize("url", ["http://service.example:8080", "http://192.0.2.7", "http://[2001:db8::1]:1"])
def test_a_token_goes_to_no_other_machine_without_tls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings, match="without TLS"):
        Client(url, token="sgt_x")
    monkeypatch.setenv("SLUICEGATE_TOKEN", "sgt_x")
    with pytest.raises(InvalidSettings, match="without TLS"):
        Client(url)
    assert choose_place(url, send_token_in_plaintext=True).base_url == url
    monkeypatch.delenv("SLUICEGATE_TOKEN")
    assert choose_place(url).headers == {}


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:1", "https://a.example"])
def test_a_token_may_go_over_loopback_or_tls(url: str) -> None:
    assert choose_place(f"{url}/", token="sgt_x").base_url == url


@pytest.mark.parametrize(
    ("base_url", "address", "said"),
    [
        ("http://127.0.0.1", {"uds": "/s"}, "two addresses"),
        ("127.0.0.1:80", {}, "https://host:port"),
        ("ftp://a", {}, "https://host:port"),
        ("https://", {}, "https://host:port"),
        ("https://a/?b", {}, "https://host:port"),
        ("https://user:pass@a", {}, "has a user"),
        (None, {"token": "a\nb"}, "`token`"),
        (None, {"token": "é"}, "`token`"),
        (None, {"user": "a\r\nx: y"}, "`user`"),
        (None, {"working_directory": "relative"}, "absolute"),
        (None, {"working_directory": "/a\nb"}, "`working_directory`"),
    ],
)
def test_an_address_that_cannot_be_is_told(base_url: str | None, address: Any, said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        choose_place(base_url, **address)


def test_a_token_is_in_no_text_of_a_client() -> None:
    place = choose_place(uds="/s", token="sgt_secret")
    assert "sgt_secret" not in f"{place!r} {place}"
    with pytest.raises(InvalidSettings) as caught:
        choose_place(uds="/s", token="sgt_secret\n")
    assert "sgt_secret" not in str(caught.value)
