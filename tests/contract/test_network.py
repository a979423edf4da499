"""The network: off unless it is asked for, and each meaning of the domain setting, by who is reached and who is not.

Each denial stands beside a control: under another setting the same request does reach the same peer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests import world
from tests.contract.conftest import Runs, said
from tests.contract.programs import HELLO, ask
from tests.lab import STRANGER, Lab, Outside
from tests.servers import Http

REGISTRY_HOST = {"python": "index.test", "javascript": "modules.test"}
OTHER_REGISTRY_HOST = {"python": "modules.test", "javascript": "index.test"}
DIAL = f"DIAL {STRANGER}:5432"
# Names that contain an allowed one and are not below it.
LOOK_ALIKES = ("notallowed.test", "allowed.test.other.test", "allowed-test.other.test", "test")


@pytest.fixture(autouse=True)
def look_alikes(outside: Outside) -> Iterator[None]:
    """The names of `LOOK_ALIKES` lead to the peer that nobody may reach; and nobody has been reached yet."""
    for name in LOOK_ALIKES:
        outside.dns.zone[name] = [outside.other.address]
    outside.forget()
    yield
    for name in LOOK_ALIKES:
        del outside.dns.zone[name]


def registry(outside: Outside, language: str) -> Http:
    return {"python": outside.index, "javascript": outside.npm}[language]


def stranger(outside: Outside) -> str:
    """The nonce of who answers at `DIAL`."""
    (one,) = [peer for peer in outside.strangers if (peer.address, peer.port) == ("0.0.0.0", 5432)]
    return one.nonce


def page(language: str) -> str:
    """The page of a project that nobody asked for before: the proxy keeps pages for a minute."""
    name = f"project-{secrets.token_hex(6)}"
    return {"python": f"https://index.test/simple/{name}/", "javascript": f"https://modules.test/{name}"}[language]


def everywhere(language: str) -> list[str]:
    """One request to each kind of destination."""
    return [
        f"GET {page(language)}",
        "GET http://allowed.test/echo",
        "GET https://sub.allowed.test/echo",
        f"GET http://{LOOK_ALIKES[0]}/echo",
        DIAL,
    ]


# Off, and on


@pytest.mark.parametrize("fields", [{}, {"allow_network": False}, {"allow_network": False, "domains": None}])
def test_network_is_off_unless_it_is_enabled(
    run: Runs, outside: Outside, language: str, fields: dict[str, Any]
) -> None:
    """Outbound access starts off for every run, and `allow_network=false` blocks all: nothing leaves, by no way."""
    with outside.silence():
        tried = run(ask(*everywhere(language)), **fields)
    assert said(tried) == [None] * 5
    assert tried.result.network.mode == "block-all"


def test_network_starts_off_again_after_a_run_that_had_it(run: Runs, outside: Outside, language: str) -> None:
    """It is off for every run: what one call enabled is not enabled for the next."""
    request = f"GET {page(language)}"
    assert said(run(ask(request), allow_network=True)) == [registry(outside, language).nonce]
    with outside.silence():
        assert said(run(ask(request))) == [None]


def test_allow_network_false_is_the_only_block_all(run: Runs) -> None:
    """`allow_network=false` is the only setting that blocks all: with true, no domain setting does, nor the empty list."""
    modes = {
        "off": run(HELLO, allow_network=False),
        "omitted": run(HELLO, allow_network=True),
        "null": run(HELLO, allow_network=True, domains=None),
        "empty": run(HELLO, allow_network=True, domains=[]),
        "named": run(HELLO, allow_network=True, domains=["allowed.test"]),
    }
    assert {setting: run.result.network.mode for setting, run in modes.items()} == {
        "off": "block-all",
        "omitted": "registry-default",
        "null": "registry-default",
        "empty": "unrestricted",
        "named": "named",
    }


# The three meanings of the domain setting


@pytest.mark.parametrize("fields", [{}, {"domains": None}], ids=["omitted", "null"])
def test_without_domains_the_registry_is_reached_and_nothing_else(
    run: Runs, outside: Outside, language: str, fields: dict[str, Any]
) -> None:
    """Domains omitted or null: access is restricted to the package registry of the runtime's language."""
    tried = run(
        ask(
            *everywhere(language),
            f"GET https://{OTHER_REGISTRY_HOST[language]}/echo",
            f"GET https://sub.{REGISTRY_HOST[language]}/echo",
        ),
        allow_network=True,
        **fields,
    )
    assert said(tried) == [registry(outside, language).nonce, *[None] * 6]
    assert outside.touched().keys() == {f"{registry(outside, language).address}:443"}


def test_the_registry_is_read_only(run: Runs, outside: Outside, language: str) -> None:
    """Registry-default access is for fetching packages: what would write there is refused before it arrives."""
    own = page(language)
    tried = run(ask(f"GET {own}", f"POST {own}", f"DELETE {own}"), allow_network=True)
    assert said(tried) == [registry(outside, language).nonce, None, None]
    assert [seen.method for seen in registry(outside, language).journal.requests] == ["GET"]


def test_an_empty_list_is_unrestricted(run: Runs, outside: Outside, language: str) -> None:
    """An empty list: unrestricted outbound access, to any name, with any method, and over any protocol."""
    tried = run(ask(*everywhere(language), "POST http://other.test/echo"), allow_network=True, domains=[])
    assert said(tried) == [
        registry(outside, language).nonce,
        outside.allowed.nonce,
        outside.allowed_tls.nonce,
        outside.other.nonce,
        stranger(outside),
        outside.other.nonce,
    ]


def test_a_list_reaches_the_named_hosts_and_their_subdomains_and_nothing_else(
    run: Runs, outside: Outside, language: str
) -> None:
    """A list of domains: access is restricted to the named hosts and their subdomains; the registry is not among them."""
    tried = run(
        ask(*everywhere(language), "POST http://allowed.test/echo"), allow_network=True, domains=["allowed.test"]
    )
    assert said(tried) == [
        None,
        outside.allowed.nonce,
        outside.allowed_tls.nonce,
        None,
        None,
        outside.allowed.nonce,
    ]
    assert outside.touched().keys() == {f"{outside.allowed.address}:{port}" for port in (80, 443)}


def test_names_that_look_like_a_named_host_are_not_below_it(run: Runs, outside: Outside, language: str) -> None:
    """Subdomains are those below a name by its labels: no name that merely contains it, and none above it."""
    requests = [f"GET http://{name}/echo" for name in LOOK_ALIKES]
    assert said(run(ask(*requests), allow_network=True, domains=["allowed.test"])) == [None] * len(LOOK_ALIKES)
    assert outside.touched() == {}
    control = run(ask(*requests), allow_network=True, domains=[])
    assert said(control) == [outside.other.nonce] * len(LOOK_ALIKES)


def test_a_named_subdomain_does_not_open_what_is_above_it(run: Runs, outside: Outside) -> None:
    """The named host, and below: its parent is another host."""
    requests = ["GET http://sub.allowed.test/echo", "GET http://allowed.test/echo"]
    assert said(run(ask(*requests), allow_network=True, domains=["sub.allowed.test"])) == [outside.allowed.nonce, None]


def test_each_named_host_is_reached(run: Runs, outside: Outside) -> None:
    """A list may have several; spelling does not matter."""
    requests = ["GET http://allowed.test/echo", "GET http://other.test/echo", "GET http://readonly.test/echo"]
    tried = run(ask(*requests), allow_network=True, domains=["ALLOWED.test", "other.test."])
    assert said(tried) == [outside.allowed.nonce, outside.other.nonce, None]
    assert outside.readonly.untouched


def test_every_public_destination_does_not_mean_this_host(run: Runs, outside: Outside) -> None:
    """Unrestricted outbound access is outbound: this host's own services and private networks are no part of it."""
    requests = ["GET http://loop.test/echo", "GET http://own.test/echo", "GET http://ten.test/echo"]
    before = world.traffic()
    assert said(run(ask(*requests), allow_network=True, domains=[])) == [None] * 3
    assert (world.traffic() - before).tcp_opened == 0
    assert outside.touched() == {}


def test_what_is_denied_is_in_the_report_and_in_the_log(run: Runs, contract: Lab) -> None:
    """Network access is explicit, and so is its refusal: destination and reason are told."""
    tried = run(ask("GET http://other.test/echo"), allow_network=True, domains=["allowed.test"])
    assert tried.result.network.denied >= 1
    assert {(one.host, one.decision, one.reason) for one in tried.result.network.destinations} == {("other.test", "deny", "host_not_allowed")}  # fmt: skip
    assert tried.reasons == {"host_not_allowed"}
