"""A policy file is taken as a whole or refused with every fault, its place, and the form to write."""

from __future__ import annotations

import json
import os
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.destinations import parse_host
from proxy.network import Mode, Protocol
from sandbox.policy.positions import MAX_BYTES
from sandbox.policy.schema import Policy
from sandbox.policy_file import (
    InvalidPolicy,
    LoadedPolicy,
    default_policy_path,
    digest_of,
    load_policy,
    parse_policy,
    policy_schema,
    to_yaml,
)

ISSUE = """\
version: 1
name: team-default
network:
  modes: [block-all, registry-default, named]
  allow:
    - host: example.com
      ports: [443]
      methods: [GET, HEAD]
      paths: ["/public/**"]
  deny:
    - host: evil.example
  ports: [80, 443]
  hosts: {allowed.test: 127.0.0.1}
  private_addresses:
    - {host: allowed.test, cidr: 127.0.0.1/32, ports: [8080]}
  inspect: {passthrough: [pinned.example]}
  registries: auto
limits:
  timeout_seconds: {default: 30, max: 300}
  memory_mib: {default: 512, max: 2048}
audit:
  path: audit.jsonl
"""


def refused(text: str) -> InvalidPolicy:
    with pytest.raises(InvalidPolicy) as caught:
        parse_policy(text, file="p.yaml")
    return caught.value


def network(fields: dict[str, Any], **top: Any) -> str:
    return json.dumps({"version": 1, "network": fields} | top)  # JSON is YAML


def faults(text: str) -> dict[str, str]:
    """The faults by key, each with its hint; empty when the policy is valid."""
    try:
        parse_policy(text, file="p.yaml")
    except InvalidPolicy as error:
        return {p.key: f"{p.message} | {p.hint}" for p in error.problems}
    return {}


def warnings(text: str) -> dict[str, str]:
    return {p.key: f"{p.message} | {p.hint}" for p in parse_policy(text, file="p.yaml").warnings}


# What is valid


def test_the_example_of_the_reference_is_read_to_values() -> None:
    policy = parse_policy(ISSUE).policy
    rule = (policy.network.allow or ())[0]
    assert (policy.version, policy.name) == (1, "team-default")
    assert policy.network.modes == (Mode.BLOCK_ALL, Mode.REGISTRY_DEFAULT, Mode.NAMED)
    assert (rule.host, rule.ports, rule.methods, rule.paths) == (
        parse_host("example.com"), (443,), ("GET", "HEAD"), ("/public/**",),
    )  # fmt: skip
    assert policy.network.hosts == {"allowed.test": (ip_address("127.0.0.1"),)}
    assert policy.network.registries.python is None
    assert policy.limits.timeout_seconds.max == 300
    assert policy.audit.path == "audit.jsonl"


def test_a_policy_that_says_nothing_lets_nothing_out() -> None:
    policy = parse_policy("version: 1").policy
    assert policy.network.modes == (Mode.BLOCK_ALL,)
    assert policy.network.private_addresses == ()
    assert policy.network.deny == ()
    assert (policy.limits.timeout_seconds.default, policy.limits.memory_mib.default) == (30, 512)


def test_an_allow_list_left_out_is_not_an_empty_one() -> None:
    assert parse_policy(network({"modes": ["named"]})).policy.network.allow is None
    assert parse_policy(network({"modes": ["named"], "allow": []})).policy.network.allow == ()


def test_names_are_normalised_as_traffic_is() -> None:
    policy = parse_policy(network({"modes": ["named"], "allow": [{"host": "BÜCHER.Example."}]})).policy
    assert policy.network.allow is not None
    assert policy.network.allow[0].host.text == "xn--bcher-kva.example"


@pytest.mark.parametrize("form", ["https://index.test/simple/", ["https://index.test/simple/", "files.test"]])
def test_a_registry_is_one_address_or_several(form: str | list[str]) -> None:
    found = parse_policy(network({"registries": {"python": form}})).policy.network.registries.python
    assert found is not None
    assert [str(url) for url in found] == ["https://index.test/simple/", "https://files.test/"][: len(found)]


@pytest.mark.parametrize(("top", "default"), [(10, 10), (30, 30), (300, 30)])
def test_an_omitted_default_is_the_usual_one_or_the_maximum_below_it(top: int, default: int) -> None:
    limits = parse_policy(json.dumps({"version": 1, "limits": {"timeout_seconds": {"max": top}}})).policy.limits
    assert limits.timeout_seconds.default == default


def test_scalars_are_those_of_yaml_1_2() -> None:
    """`yes`, `010` and a date are text; in YAML 1.1 they were a boolean, a number and a date."""
    assert "`yes`" in faults("version: 1\nnetwork: {modes: [named], allow: [{host: a.test, subdomains: yes}]}")[
        "network.allow[0].subdomains"
    ]  # fmt: skip
    assert "network.ports[0]" in faults("version: 1\nnetwork: {ports: [010]}")
    assert parse_policy("version: 1\nname: 2026-01-01").policy.name == "2026-01-01"


# What is not


def test_every_fault_is_reported_at_once_in_the_order_of_the_text() -> None:
    error = refused(
        'version: 2\nnetwork:\n  modes: [all]\n  allow:\n    - host: "*.a.test"\n    - host: co.uk\n  ports: ["443"]\nlimit: {}\n'
    )
    places = [(p.mark.line, p.mark.column) for p in error.problems if p.mark is not None]
    assert [p.key for p in error.problems] == [
        "version", "network.modes[0]", "network.allow[0].host", "network.allow[1].host", "network.ports[0]", "limit",
    ]  # fmt: skip
    assert places == [(1, 1), (3, 11), (5, 7), (6, 7), (7, 11), (8, 1)]
    assert str(error).startswith("p.yaml:1:1: `version`: `2` is no version of the policy file that is known\n  hint: ")


WRONG: list[tuple[str, str, str, str]] = [
    # network fields as YAML, key, part of the message, part of the hint
    ("modes: []", "network.modes", "empty", "block-all"),
    ("modes: named", "network.modes", "a list is expected", "[block-all]"),
    ("modes: [named, named]", "network.modes", "twice", "keep one"),
    ("modes: [open]", "network.modes[0]", "`open`", "`unrestricted`"),
    ("allow:", "network.allow", "neither nothing nor anything", "allow: []"),
    ("allow: null", "network.allow", "neither nothing nor anything", "allow: []"),
    ("allow: ~", "network.allow", "neither nothing nor anything", "allow: []"),
    ("allow: a.test", "network.allow", "a list is expected", "[{host:"),
    ("allow: [a.test]", "network.allow[0]", "a mapping is expected", "- host: a.test"),
    ("allow: [{}]", "network.allow[0].host", "missing", "host"),
    ("allow: [{host: }]", "network.allow[0].host", "no value", "give one"),
    ("allow: [{host: 5}]", "network.allow[0].host", "not a number", "example.com"),
    ("allow: [{host: '*'}]", "network.allow[0].host", "`*`", "leave `allow` out"),
    ("allow: [{host: '*.a.test'}]", "network.allow[0].host", "*.a.test", "`a.test`"),
    ("allow: [{host: .a.test}]", "network.allow[0].host", ".a.test", "`a.test`"),
    ("allow: [{host: 'a.*.test'}]", "network.allow[0].host", "wildcard", "subdomains"),
    ("allow: [{host: 'https://a.test/x'}]", "network.allow[0].host", "address of a page", "`a.test`"),
    ("allow: [{host: 'a.test/x'}]", "network.allow[0].host", "not a host name", "paths"),
    ("allow: [{host: 'a.test:8080'}]", "network.allow[0].host", "has a port", "ports: [8080]"),
    ("allow: [{host: 93.184.216.34}]", "network.allow[0].host", "an address", "`hosts`"),
    ("allow: [{host: '0x7f.1'}]", "network.allow[0].host", "an address", "`hosts`"),
    ("allow: [{host: 10.0.0.0/8}]", "network.allow[0].host", "a network", "`hosts`"),
    ("allow: [{cidr: 10.0.0.0/8}]", "network.allow[0].cidr", "no such key", "`hosts`"),
    ("allow: [{host: a b}]", "network.allow[0].host", "not a host name", ""),
    ("allow: [{host: a..test}]", "network.allow[0].host", "not a host name", ""),
    ("allow: [{host: co.uk}]", "network.allow[0].host", "public suffix", "example.co.uk"),
    ("allow: [{host: com}]", "network.allow[0].host", "public suffix", "example.com"),
    ("allow: [{host: CO.UK.}]", "network.allow[0].host", "public suffix", "example.co.uk"),
    ("allow: [{host: рф}]", "network.allow[0].host", "public suffix", ""),
    ("allow: [{host: a.test, hosts: x}]", "network.allow[0].hosts", "no such key", "`host`"),
    ("allow: [{host: a.test, port: 443}]", "network.allow[0].port", "no such key", "ports: [443]"),
    ("allow: [{host: a.test}, {host: A.test.}]", "network.allow[1]", "the same as `network.allow[0]`", "drop"),
    ("allow: [{host: a.test, ports: []}]", "network.allow[0].ports", "empty", "[443]"),
    ("allow: [{host: a.test, ports: 443}]", "network.allow[0].ports", "a list", "[443]"),
    ("allow: [{host: a.test, ports: ['443']}]", "network.allow[0].ports[0]", "text", "`443`"),
    ("allow: [{host: a.test, ports: ['*']}]", "network.allow[0].ports[0]", "no wildcards", "list them"),
    ("allow: [{host: a.test, ports: [1-100]}]", "network.allow[0].ports[0]", "no ranges", "list them"),
    ("allow: [{host: a.test, ports: [0]}]", "network.allow[0].ports[0]", "`0`", "1 to 65535"),
    ("allow: [{host: a.test, ports: [65536]}]", "network.allow[0].ports[0]", "`65536`", "1 to 65535"),
    ("allow: [{host: a.test, ports: [-1]}]", "network.allow[0].ports[0]", "`-1`", "1 to 65535"),
    ("allow: [{host: a.test, ports: [443.0]}]", "network.allow[0].ports[0]", "whole number", "`443`"),
    ("allow: [{host: a.test, ports: [true]}]", "network.allow[0].ports[0]", "whole number", "`443`"),
    ("allow: [{host: a.test, ports: [443, 443]}]", "network.allow[0].ports", "twice", "keep one"),
    ("allow: [{host: a.test, methods: []}]", "network.allow[0].methods", "empty", "[GET, HEAD]"),
    ("allow: [{host: a.test, methods: [get]}]", "network.allow[0].methods[0]", "capitals", "`GET`"),
    ("allow: [{host: a.test, methods: ['*']}]", "network.allow[0].methods[0]", "wildcard", "leave"),
    ("allow: [{host: a.test, methods: [CONNECT]}]", "network.allow[0].methods[0]", "tunnels", "leave it out"),
    ("allow: [{host: a.test, paths: [a]}]", "network.allow[0].paths[0]", "slash", '"/a"'),
    ("allow: [{host: a.test, paths: ['/a?b']}]", "network.allow[0].paths[0]", "query", "alone"),
    ("allow: [{host: a.test, paths: ['/%61']}]", "network.allow[0].paths[0]", "percent-encoded", "decoded"),
    ("allow: [{host: a.test, paths: ['/a/../b']}]", "network.allow[0].paths[0]", "dot segment", ""),
    ("allow: [{host: a.test, paths: ['/a//b']}]", "network.allow[0].paths[0]", "dot segment", ""),
    ("allow: [{host: a.test, protocol: udp}]", "network.allow[0].protocol", "`udp`", "`http` or `tcp`"),
    ("allow: [{host: a.test, protocol: tcp}]", "network.allow[0]", "names its ports", "ports: [5432]"),
    ("allow: [{host: a.test, protocol: tcp, ports: [1], methods: [GET]}]", "network.allow[0]", "neither methods", ""),
    ("allow: [{host: a.test, protocol: tcp, ports: [1], paths: [/]}]", "network.allow[0]", "neither methods", ""),
    ("modes: [named, unrestricted]\n  allow: []", "network.allow", "`unrestricted`, which no allow list limits", "drop"),
    ("deny: [{host: 93.184.216.34}]", "network.deny[0].host", "an address", "cidr: 93.184.216.34/32"),
    ("deny: [{host: '::1'}]", "network.deny[0].host", "an address", "cidr: ::1/128"),
    ("deny: [{host: 10.0.0.0/8}]", "network.deny[0].host", "a network", "cidr: 10.0.0.0/8"),
    ("deny: [{}]", "network.deny[0]", "either a `host` or a `cidr`", "evil.example"),
    ("deny: [{host: a.test, cidr: 10.0.0.0/8}]", "network.deny[0]", "either a `host` or a `cidr`", ""),
    ("deny: [{cidr: 10.0.0.1/8}]", "network.deny[0].cidr", "bits beyond", "`10.0.0.0/8`"),
    ("deny: [{cidr: 10.0.0.1}]", "network.deny[0].cidr", "prefix length", "`10.0.0.1/32`"),
    ("deny: [{cidr: '::ffff:10.0.0.0/104'}]", "network.deny[0].cidr", "holds IPv4", ""),
    ("deny: [{cidr: any}]", "network.deny[0].cidr", "not a network", "10.1.2.0/24"),
    ("deny: [{host: a.test, protocol: http}]", "network.deny[0].protocol", "no such key", "every protocol"),
    ("deny: [{host: a.test}, {host: a.test}]", "network.deny[1]", "the same", "drop"),
    ("deny: [{cidr: 9.0.0.0/8}, {cidr: 9.0.0.0/8}]", "network.deny[1]", "the same", "drop"),
    ("ports: []", "network.ports", "empty", "[443]"),
    ("ports:", "network.ports", "no value", ""),
    ("hosts: {a.test: 10.0.0.256}", "network.hosts.a.test", "not an IP address", "in full"),
    ("hosts: {a.test: b.test}", "network.hosts.a.test", "not an IP address", "in full"),
    ("hosts: {a.test: 0177.0.0.1}", "network.hosts.a.test", "not an IP address", "in full"),
    ("hosts: {a.test: []}", "network.hosts.a.test", "empty", ""),
    ("hosts: {10.0.0.1: 10.0.0.1}", "network.hosts.10.0.0.1", "an address where a host name belongs", ""),
    ("hosts: {a.test: 1.1.1.1, A.TEST: 1.1.1.1}", "network.hosts", "same host", "keep one"),
    ("hosts: {a.test: 169.254.169.254}", "network.hosts.a.test", "metadata", "drop"),
    ("hosts: {A.test.: 0.0.0.0}", "network.hosts.A.test.", "unspecified", "drop"),
    ("hosts: [a.test]", "network.hosts", "a mapping is expected", "127.0.0.1"),
    ("private_addresses: [{cidr: 10.0.0.0/8}]", "network.private_addresses[0]", "either a `host` or", ""),
    ("private_addresses: [{host: a.test}]", "network.private_addresses[0].cidr", "missing", "cidr"),
    ("private_addresses: [{host: a.test, registries: true, cidr: 10.0.0.0/8}]", "network.private_addresses[0]", "either", ""),
    ("private_addresses: [{host: a.test, cidr: 169.254.169.254/32}]", "network.private_addresses[0].cidr", "metadata", ""),
    ("private_addresses: [{host: a.test, cidr: 169.254.0.0/16}]", "network.private_addresses[0].cidr", "link-local", ""),
    ("private_addresses: [{host: a.test, cidr: 'fe80::/10'}]", "network.private_addresses[0].cidr", "link-local", ""),
    ("private_addresses: [{host: a.test, cidr: 0.0.0.0/0}]", "network.private_addresses[0].cidr", "wider", "the host is in"),
    ("private_addresses: [{host: a.test, cidr: '::/0'}]", "network.private_addresses[0].cidr", "wider", ""),
    ("private_addresses: [{host: 10.0.0.1, cidr: 10.1.0.0/16}]", "network.private_addresses[0].host", "not in", ""),
    ("private_addresses: [{host: com, cidr: 10.1.0.0/16}]", "network.private_addresses[0].host", "public suffix", ""),
    ("inspect: {passthrough: [10.0.0.1]}", "network.inspect.passthrough[0]", "an address", ""),
    ("inspect: {passthrough: [a.test, A.test]}", "network.inspect.passthrough", "twice", ""),
    ("inspect: {passthrough: [com]}", "network.inspect.passthrough[0]", "public suffix", ""),
    (
        "modes: [named]\n  allow: [{host: a.test, methods: [GET]}]\n  inspect: {passthrough: [a.test]}",
        "network.inspect.passthrough[0]", "judges methods or paths", "drop",
    ),
    (
        "deny: [{host: test, paths: [/x]}]\n  inspect: {passthrough: [a.test]}",
        "network.inspect.passthrough[0]", "`network.deny[0]`", "drop",
    ),
    ("registries: pypi", "network.registries", "says no index", "auto"),
    ("registries: {}", "network.registries", "empty", "auto"),
    ("registries:", "network.registries", "no value", ""),
    ("registries: {python: []}", "network.registries.python", "says no index", "auto"),
    ("registries: {ruby: x.test}", "network.registries.ruby", "no such key", "`python`"),
    ("registries: {javascript: []}", "network.registries.javascript", "says no index", "auto"),
    ("registries: {javascript: 'ftp://a.test/'}", "network.registries.javascript", "not an `https://`", "https://"),
    ("registries: {javascript: a.test}\n  deny: [{host: test}]", "network.registries.javascript", "denies `a.test`", "drop"),
    ("registries: {python: 'ftp://a.test/'}", "network.registries.python", "not an `https://`", "https://"),
    ("registries: {python: 'https://u:secret@a.test/'}", "network.registries.python", "password", "without"),
    ("registries: {python: 'https://10.0.0.1/'}", "network.registries.python", "IP address", "`hosts`"),
    ("registries: {python: a.test}\n  deny: [{host: test}]", "network.registries.python", "denies `a.test`", "drop"),
    ("upstream: {ca_file: ca.pem}", "network.upstream.ca_file", "absolute", "/etc/ssl"),
    ("upstream: {ca_file: /nonexistent/ca.pem}", "network.upstream.ca_file", "does not exist", "PEM"),
    ("passthrough: [a.test]", "network.passthrough", "no such key", "network.inspect"),
    ("mode: [named]", "network.mode", "no such key", "`modes`"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "key", "message", "hint"), WRONG, ids=[row[0].replace("\n", ";") for row in WRONG])
def test_what_cannot_work_is_refused_where_it_stands(fields: str, key: str, message: str, hint: str) -> None:
    found = faults(f"version: 1\nnetwork:\n  {fields}\n")
    assert list(found) == [key]
    assert message in found[key].partition(" | ")[0]
    assert hint in found[key].partition(" | ")[2]
    assert "secret" not in found[key]


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ("timeout_seconds: {max: 301}", "limits.timeout_seconds.max"),
        ("timeout_seconds: {default: 0}", "limits.timeout_seconds.default"),
        ("timeout_seconds: {default: .nan}", "limits.timeout_seconds.default"),
        ("timeout_seconds: {default: .inf}", "limits.timeout_seconds.default"),
        ("timeout_seconds: {default: 30s}", "limits.timeout_seconds.default"),
        ("timeout_seconds: {default: 20, max: 10}", "limits.timeout_seconds"),
        ("timeout_seconds: 30", "limits.timeout_seconds"),
        ("memory_mib: {max: 127}", "limits.memory_mib.max"),
        ("memory_mib: {max: 2049}", "limits.memory_mib.max"),
        ("memory_mib: {max: 17179869184G}", "limits.memory_mib.max"),
        ("memory_mib: {max: 99999999999999999999999999999999}", "limits.memory_mib.max"),
        ("memory_mib: {default: -512}", "limits.memory_mib.default"),
        ("memory_mib: {default: 0}", "limits.memory_mib.default"),
        ("memory_mib: {default: 512.5}", "limits.memory_mib.default"),
        ("memory_mib: {default: true}", "limits.memory_mib.default"),
        ("memory_mib: {default: 1024, max: 512}", "limits.memory_mib"),
        ("max_connections: 0", "limits.max_connections"),
        ("max_connections: 1e9", "limits.max_connections"),
        ("cpu: 1", "limits.cpu"),
    ],
)
def test_limits_stay_within_the_contract(limits: str, key: str) -> None:
    assert list(faults(f"version: 1\nlimits:\n  {limits}\n")) == [key]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", "", "empty"),
        ("# nothing\n", "", "empty"),
        ("[1]", "", "a mapping"),
        ("block-all", "", "a mapping"),
        ("name: x", "version", "missing"),
        ("version: '1'", "version", "`1`"),
        ("version: 1.0", "version", "`1.0`"),
        ("version: true", "version", "`true`"),
        ("version: 1\nname: ''", "name", "not a name"),
        ("version: 1\nname: a b", "name", "not a name"),
        ("version: 1\nname: \"a\\nb\"", "name", "not a name"),
        ("version: 1\naudit: {path: ''}", "audit.path", "not a file name"),
        ("version: 1\naudit: {path: \"a\\0b\"}", "audit.path", "not a file name"),
        ("version: 1\naudit: x.jsonl", "audit", "a mapping"),
        ("version: 1\nmodes: [named]", "modes", "no such key"),
        ("version: 1\nversion: 1", "version", "twice"),
        ("version: 1\nnetwork: {deny: [], deny: []}", "network.deny", "twice"),
        ("version: 1\n---\nversion: 1", "", "second document"),
        ("version: &a 1", "", "anchors"),
        ("version: *a", "", "anchors"),
        ("a: &a [x]\nb: *a", "", "anchors"),
        ("version: !!int 1", "", "tags"),
        ("version: 1\nname: !x y", "", "tags"),
        ("version: 1\n\tname: x", "", "not YAML"),
        ("version: [1", "", "not YAML"),
        ("version: 1\nname: \"\\ud800\"", "", ""),
        ("? [a]\n: 1", "", "plain text"),
        ("\0", "", "not YAML"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused(text: str, key: str, message: str) -> None:
    error = refused(text)
    assert [p.key for p in error.problems] == [key]
    assert message in error.problems[0].message


def test_what_does_not_end_is_shown_where_it_begins() -> None:
    (problem,) = refused("version: 1\nname: [x\n").problems
    assert problem.mark is not None
    assert (problem.mark.line, problem.mark.column) == (2, 7)


def test_one_wrong_entry_does_not_hide_what_is_wrong_with_the_others() -> None:
    found = faults(
        network({"modes": ["named"], "allow": [{"host": 1}, {"host": "b.test", "ports": [0]}, {"host": "com"}],
                 "deny": [{"host": "a.test"}, {}, {"host": "a.test"}]})
    )  # fmt: skip
    assert list(found) == ["network.allow[0].host", "network.allow[1].ports[0]", "network.allow[2].host",
                           "network.deny[1]", "network.deny[2]"]  # fmt: skip
    assert "`network.deny[0]`" in found["network.deny[2]"]


# What may surprise


WARNED: list[tuple[dict[str, Any], str, str]] = [
    ({"modes": ["named"], "allow": [{"host": "github.io"}]}, "network.allow[0].host", "shared hosting"),
    ({"modes": ["named"], "allow": [{"host": "intranet"}]}, "network.allow[0].host", "single label"),
    ({"modes": ["named"], "allow": [{"host": "www.a.test"}]}, "network.allow[0].host", "not `a.test`"),
    ({"modes": ["named"], "allow": [{"host": "a.test"}, {"host": "x.a.test"}]}, "network.allow[1]", "adds nothing"),
    ({"modes": ["named"], "allow": [{"host": "x.a.test"}, {"host": "a.test"}]}, "network.allow[0]", "adds nothing"),
    (
        {"modes": ["named"], "allow": [{"host": "a.test"}, {"host": "a.test", "ports": [443], "methods": ["GET"]}]},
        "network.allow[1]", "adds nothing",
    ),
    (
        {"modes": ["named"], "allow": [{"host": "a.test"}, {"host": "a.test", "ports": [443, 80]}]},
        "network.allow[1]", "adds nothing",
    ),
    ({"modes": ["named"], "allow": [{"host": "a.test"}], "deny": [{"host": "test"}]}, "network.allow[0]", "never allowed"),
    (
        {"modes": ["named"], "allow": [{"host": "a.test", "ports": [443]}], "deny": [{"host": "a.test", "ports": [443, 80]}]},
        "network.allow[0]", "never allowed",
    ),
    ({"modes": ["named"], "allow": []}, "network.allow", "none is allowed"),
    ({"modes": ["block-all"], "allow": [{"host": "a.test"}]}, "network.allow", "never read"),
    ({"deny": [{"host": "a.test"}, {"host": "x.a.test", "ports": [1]}]}, "network.deny[1]", "adds nothing"),
    (
        {"modes": ["named"], "allow": [{"host": "a.test"}], "inspect": {"passthrough": ["b.test"]}},
        "network.inspect.passthrough[0]", "no rule of `network.allow` covers",
    ),
    ({"hosts": {"a.test": "10.0.0.1"}}, "network.hosts.a.test", "no entry of `network.private_addresses`"),
    ({"private_addresses": [{"host": "a.test", "cidr": "8.8.8.0/24"}]}, "network.private_addresses[0].cidr", "is public"),
    ({"private_addresses": [{"host": "a.test", "cidr": "100.64.0.0/10"}]}, "network.private_addresses[0].cidr", "100.100.100.200"),
    ({"private_addresses": [{"registries": True, "cidr": "10.0.0.0/8"}]}, "network.private_addresses[0]", "never read"),
    (
        {"modes": ["named"], "allow": [{"host": "a.test"}], "private_addresses": [{"host": "b.test", "cidr": "10.0.0.0/8"}]},
        "network.private_addresses[0].host", "no rule of `network.allow` covers",
    ),
    ({"registries": {"python": "http://a.test/"}}, "network.registries.python", "without TLS"),
    ({"registries": {"javascript": "http://a.test/"}}, "network.registries.javascript", "without TLS"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "key", "message"), WARNED)
def test_what_is_legal_and_may_surprise_is_a_warning(fields: dict[str, Any], key: str, message: str) -> None:
    found = warnings(network(fields))
    assert list(found) == [key]
    assert message in found[key]


@pytest.mark.parametrize(
    "fields",
    [
        {"modes": ["named"], "allow": [{"host": "a.test"}, {"host": "a.test", "ports": [5432], "protocol": "tcp"}]},
        {"modes": ["named"], "allow": [{"host": "a.test", "subdomains": False}, {"host": "x.a.test"}]},
        {"modes": ["named"], "allow": [{"host": "a.test"}], "deny": [{"host": "x.a.test"}]},
        {"modes": ["named"], "allow": [{"host": "a.test"}], "deny": [{"host": "a.test", "subdomains": False}]},
        {"modes": ["named"], "allow": [{"host": "a.test"}], "deny": [{"host": "a.test", "methods": ["POST"]}]},
        {"modes": ["named"], "allow": [{"host": "a.test"}], "deny": [{"host": "a.test", "ports": [80]}]},
        {"modes": ["named"], "allow": [{"host": "www.a.test"}, {"host": "a.test", "methods": ["GET"]}]},
        {"modes": ["named"], "allow": [{"host": "github.io", "subdomains": False}, {"host": "me.github.io"}]},
        {"modes": ["named"], "allow": [{"host": "intra"}], "hosts": {"intra": "1.1.1.1"}},
        {"deny": [{"host": "zip"}, {"host": "github.io"}, {"host": "com", "ports": [25]}]},
        {"hosts": {"a.test": ["10.0.0.1", "::1"]},
         "private_addresses": [{"host": "a.test", "cidr": "10.0.0.0/8"}, {"host": "test", "cidr": "::1/128"}]},
        {"modes": ["unrestricted"], "private_addresses": [{"host": "10.0.0.1", "cidr": "10.0.0.1/32"}]},
        {"inspect": {"passthrough": ["a.test"]}, "deny": [{"host": "b.test", "paths": ["/x"]}]},
    ],
)  # fmt: skip
def test_what_is_meant_is_not_warned_of(fields: dict[str, Any]) -> None:
    assert warnings(network(fields)) == {}


def test_a_warning_says_where_it_stands() -> None:
    loaded = parse_policy(
        "version: 1\nnetwork:\n  hosts:\n    ok.test: 1.1.1.1\n    A.test.: 10.0.0.1\n", file="p.yaml"
    )
    assert [str(w).splitlines()[0] for w in loaded.warnings] == [
        (
            "p.yaml:5:5: `network.hosts.A.test.`: 10.0.0.1 is a private address, and no entry of "
            "`network.private_addresses` opens it"
        )
    ]


# Files


def test_a_file_is_read_with_its_name_in_every_message(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 3\n")
    with pytest.raises(InvalidPolicy, match=r"p\.yaml:1:1: `version`"):
        load_policy(path)
    path.write_text(ISSUE)
    loaded = load_policy(path)
    assert isinstance(loaded, LoadedPolicy)
    assert loaded.path == path


def test_what_is_no_readable_file_is_an_invalid_policy(tmp_path: Path) -> None:
    pipe, binary, large = tmp_path / "pipe", tmp_path / "binary", tmp_path / "large"
    os.mkfifo(pipe)
    binary.write_bytes(b"version: \xff")
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    for path, message in (
        (tmp_path / "none", "no such file"), (tmp_path, "not a file"), (pipe, "not a file"), (binary, "not UTF-8"),
        (large, "larger than 256 KiB"), (Path("/dev/zero"), "not a file"), (Path("a\0b"), "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(InvalidPolicy, match=message):
            load_policy(path)


def test_the_certificate_file_must_have_certificates(tmp_path: Path) -> None:
    text = network({"upstream": {"ca_file": str(tmp_path / "ca.pem")}})
    (tmp_path / "ca.pem").write_text("no certificate")
    assert "no certificates" in faults(text)["network.upstream.ca_file"]
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    assert parse_policy(text).policy.network.upstream.ca_file == tmp_path / "ca.pem"


def test_the_default_policy_is_where_it_is_looked_for() -> None:
    assert load_policy(default_policy_path()).policy.name == "default"


HOSTILE = [
    "[" * 100_000,
    "{a: " * 50_000,
    "- " * 100_000,
    "a:\n" + " a:\n" * 50_000,
    "version: 1\nnetwork: {ports: [" + "1," * 100_000 + "]}",
    "x: '" + "a" * 250_000 + "'",
    "a" * 250_000,
    "&a " * 80_000,
    "? " * 100_000,
    "%TAG ! x\n" * 20_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:12] for text in HOSTILE])
def test_a_hostile_file_is_refused_in_bounded_time(text: str) -> None:
    started = time.monotonic()
    error = refused(text[:MAX_BYTES])
    assert time.monotonic() - started < 30
    assert len(str(error)) < 65_536


def test_thousands_of_rules_are_weighed_in_reasonable_time() -> None:
    rules = [{"host": f"h{n}.a{n % 50}.test"} for n in range(2000)]
    text = "\n".join(
        [
            "version: 1",
            "network:",
            "  modes: [named]",
            "  allow:",
            *(f"  - {{host: {r['host']}}}" for r in rules),
            "  deny:",
        ]
        + [f"  - {{host: x.{r['host']}}}" for r in rules]
    )
    started = time.monotonic()
    loaded = parse_policy(text)
    assert time.monotonic() - started < 30
    assert len(loaded.policy.network.deny) == 2000
    assert loaded.warnings == ()


# Meaning


def test_the_digest_is_that_of_the_meaning() -> None:
    same = parse_policy(
        "# a comment\nnetwork: {modes: [named], 'allow': [{subdomains: true, host: A.TEST.}]}\nversion: 1\nname: 'unnamed'\n"
    )
    other = parse_policy("version: 1\nnetwork:\n  modes:\n  - named\n  allow:\n  - host: a.test\n")
    assert same.digest == other.digest == digest_of(same.policy)
    assert same.digest.startswith("sha256:")
    assert parse_policy("version: 1").digest != same.digest
    assert (
        parse_policy(network({"modes": ["named"]})).digest
        != parse_policy(network({"modes": ["named"], "allow": []})).digest
    )


def test_a_policy_cannot_be_changed_once_loaded() -> None:
    policy = parse_policy("version: 1").policy
    with pytest.raises(ValueError, match="frozen"):
        policy.network = policy.network


labels = st.sampled_from(["a", "b-c", "xn--bcher-kva", "x1", "null", "true", "on", "0x1", "1e5"])
host_names = st.builds(lambda parts: ".".join([*parts, "example"]), st.lists(labels, min_size=1, max_size=3))
ports = st.lists(st.integers(1, 65535), min_size=1, max_size=3, unique=True)
methods = st.lists(st.sampled_from(["GET", "HEAD", "POST", "M-SEARCH"]), min_size=1, unique=True)
paths = st.lists(
    st.sampled_from(["/", "/a b/**", "/*.json", "/é", "/~x:y#z"[:4], "/'\"", "/null"]), min_size=1, unique=True
)
flags = st.booleans()


def fields(required: dict[str, st.SearchStrategy[Any]], optional: dict[str, st.SearchStrategy[Any]]) -> Any:
    return st.fixed_dictionaries(required, optional=optional)


allow_rules = fields(
    {"host": host_names}, {"subdomains": flags, "ports": ports, "methods": methods, "paths": paths}
) | fields({"host": host_names, "ports": ports, "protocol": st.just("tcp")}, {"subdomains": flags})
cidrs = st.ip_addresses().map(lambda address: f"{address}/{address.max_prefixlen}")
deny_rules = fields({"host": host_names}, {"ports": ports, "methods": methods, "paths": paths}) | fields(
    {"cidr": st.sampled_from(["10.0.0.0/8", "fd00::/8", "1.1.1.1/32"])}, {"ports": ports}
)
documents = fields(
    {"version": st.just(1)},
    {
        "name": st.text(alphabet="aZ09._-", min_size=1, max_size=10)
        | st.sampled_from(["null", "1", "1e3", "true", "~"[:0] or "-"]),
        "network": fields(
            {},
            {
                "modes": st.lists(st.sampled_from([str(mode) for mode in Mode]), min_size=1, unique=True),
                "allow": st.lists(allow_rules, max_size=3),
                "deny": st.lists(deny_rules, max_size=3),
                "ports": ports,
                "hosts": st.dictionaries(
                    host_names, st.ip_addresses().map(str) | st.just(["10.0.0.1", "::1"]), max_size=2
                ),
                "private_addresses": st.lists(
                    fields({"host": host_names, "cidr": cidrs}, {"ports": ports})
                    | fields({"registries": st.just(True), "cidr": cidrs}, {}),
                    max_size=2,
                ),
                "inspect": fields({}, {"passthrough": st.lists(host_names, max_size=2, unique=True)}),
                "registries": st.just("auto")
                | fields(
                    {},
                    {
                        "python": st.just(["https://index.example/simple/", "files.example"]),
                        "javascript": st.just(["https://registry.example/"]),
                    },
                ).filter(bool),
            },
        ),
        "limits": fields(
            {},
            {
                "timeout_seconds": fields({}, {"default": st.floats(1, 30), "max": st.integers(30, 300)}),
                "memory_mib": fields({}, {"default": st.integers(128, 512), "max": st.integers(512, 2048)}),
                "max_connections": st.integers(1, 1000),
            },
        ),
        "audit": fields({}, {"path": st.text(alphabet="a/.: #-'\"é", min_size=1, max_size=8)}),
    },
)


@settings(max_examples=150)
@given(documents)
def test_policy_to_text_to_policy_is_the_identity(document: dict[str, Any]) -> None:
    try:
        loaded = parse_policy(json.dumps(document))
    except InvalidPolicy:
        return  # a drawn policy may say something twice or against itself
    text = to_yaml(loaded.policy)
    again = parse_policy(text)
    assert again.policy == loaded.policy
    assert again.digest == loaded.digest
    assert to_yaml(again.policy) == text


@settings(max_examples=300)
@given(
    st.text(max_size=80)
    | st.text(alphabet="version: 1\nnetwork[]{},-'\"#&*!|>%@?", max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
            ["version", "name", "network", "modes", "allow", "deny", "hosts", "limits", "host", "ports", "registries", "x"]
        ), inner, max_size=4),
        max_leaves=12,
    ).map(json.dumps)
)  # fmt: skip
def test_any_text_is_a_policy_or_an_invalid_one(text: str) -> None:
    try:
        policy = parse_policy(text).policy
    except InvalidPolicy as error:
        problems = error.problems
        policy = None
    if policy is None:
        assert problems
        assert all(problem.message and "\n" not in problem.message for problem in problems)
    else:
        assert isinstance(policy, Policy)


# Schema


def test_the_json_schema_has_every_key_and_offers_no_null() -> None:
    schema = policy_schema()
    text = json.dumps(schema)
    assert '"null"' not in text
    assert set(schema["properties"]) == {
        "version",
        "name",
        "network",
        "packages",
        "limits",
        "attempts",
        "calls",
        "audit",
        "code_exec",
        "service",
        "tenants",
    }
    assert set(schema["$defs"]["NetworkSection"]["properties"]) == {
        "modes", "allow", "deny", "ports", "hosts", "private_addresses", "inspect", "registries", "upstream",
    }  # fmt: skip
    assert set(schema["$defs"]["AllowRule"]["properties"]) == {
        "host", "subdomains", "ports", "methods", "paths", "protocol",
    }  # fmt: skip
    assert all(part.get("additionalProperties") is False for part in schema["$defs"].values())
    assert schema["$defs"]["AllowRule"]["properties"]["ports"]["minItems"] == 1
    assert Protocol.TCP.value in schema["$defs"]["AllowRule"]["properties"]["protocol"]["enum"]
