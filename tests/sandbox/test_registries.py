"""A registry is what the policy names, or what pip or npm itself would use; when neither can be known, nothing is guessed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.npm_client import NpmFacts, ask_npm
from sandbox.policy.index_url import InvalidIndex, parse_index
from sandbox.policy.problems import InvalidPolicy
from sandbox.policy.schema import Registries
from sandbox.registries import (
    PythonClientFacts,
    RegistryRules,
    npm_facts,
    python_client_facts,
    resolve_registries,
    rules_from_client,
    rules_from_npm,
    rules_from_policy,
)
from sandbox.runtimes.javascript import Node

FACTS = PythonClientFacts(
    interpreter="/usr/bin/python3",
    pip_version="99.0",
    index="https://built-in.test/simple/",
    extra_indexes=(),
    no_index=False,
    default_index="https://built-in.test/simple",
    default_files_host="files.built-in.test",
)


def hosts(found: RegistryRules) -> list[tuple[str, int]]:
    return [(host.host, host.port) for host in found.hosts]


# Index addresses


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("https://Index.TEST/simple/", "https://index.test/simple/"),
        ("HTTPS://index.test.:8443", "https://index.test:8443/"),
        ("https://index.test:443/x", "https://index.test/x"),
        ("http://index.test", "http://index.test/"),
        ("index.test", "https://index.test/"),
        ("https://[::1]:8443/simple/", "https://[::1]:8443/simple/"),
    ],
)
def test_an_index_address_is_normalised(text: str, normal: str) -> None:
    assert str(parse_index(text)) == normal
    assert str(parse_index(normal)) == normal


@pytest.mark.parametrize(
    "text",
    ["", "index.test/simple", "index.test:8443", "u@index.test", "ftp://index.test/", "file:///srv/index", "/srv/index", "https://",
     "https:///simple", "https://index.test:0/", "https://index.test:x/", "https://a b/", "https://index.test/?x", "https://index.test/#x",
     "https://index.test\\@evil.test/", "https://ındex\u2028.test/", "https://[::1/", "https://a..b/", "https://" + "a" * 2000],
)  # fmt: skip
def test_what_is_no_index_address_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(InvalidIndex) as caught:
        parse_index(text)
    assert not text or text not in str(caught.value)


def test_the_credentials_of_an_index_are_noticed_and_dropped() -> None:
    for text in (
        "https://user:secret@index.test/simple/",
        "https://token@index.test/simple/",
        "https://@index.test/simple/",
    ):
        url = parse_index(text)
        assert url.has_credentials
        assert str(url) == "https://index.test/simple/"


# Rules


def test_rules_are_exact_read_only_and_on_the_index_s_own_port() -> None:
    found = rules_from_policy("python", [parse_index("https://index.test:8443/simple/"), parse_index("files.test")])
    assert [(rule.id, str(rule.host), rule.ports) for rule in found.rules] == [
        ("registries.python[0]", "index.test", (8443,)), ("registries.python[1]", "files.test", (443,)),
    ]  # fmt: skip
    assert all(rule.methods == ("GET", "HEAD") and not rule.subdomains for rule in found.rules)
    assert found.warnings == ()
    assert found.hosts[0].source == "`network.registries.python[0]` of the policy"


def test_one_host_named_twice_is_one_rule() -> None:
    urls = [parse_index("https://index.test/simple/"), parse_index("https://index.test/files/")]
    assert hosts(rules_from_policy("python", urls)) == [("index.test", 443)]


def test_the_index_built_into_pip_comes_with_the_host_of_its_files() -> None:
    found = rules_from_client(FACTS)
    assert hosts(found) == [("built-in.test", 443), ("files.built-in.test", 443)]
    assert "built into pip 99.0" in found.hosts[0].source


CONFIGURED: list[tuple[dict[str, Any], list[tuple[str, int]], str]] = [
    ({"index": "https://mirror.test/simple/"}, [("mirror.test", 443)], ""),
    ({"index": "https://mirror.test:8443/simple/"}, [("mirror.test", 8443)], ""),
    ({"index": "http://mirror.test/simple/"}, [("mirror.test", 80)], "without TLS"),
    ({"index": "http://built-in.test/simple/"}, [("built-in.test", 80)], "without TLS"),
    ({"index": "https://u:secret@mirror.test/simple/"}, [("mirror.test", 443)], "password"),
    ({"extra_indexes": ("https://extra.test/simple/",)}, [("built-in.test", 443), ("files.built-in.test", 443)], "1 extra index"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "expected", "warning"), CONFIGURED)
def test_a_configured_index_stands_alone(
    changed: dict[str, Any], expected: list[tuple[str, int]], warning: str
) -> None:
    found = rules_from_client(replace(FACTS, **changed))
    assert hosts(found) == expected
    assert warning in " ".join(found.warnings)
    assert bool(found.warnings) is bool(warning)
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    "changed",
    [
        {"no_index": True},
        {"index": "/srv/index"},
        {"index": "file:///srv/index"},
        {"index": ""},
        {"index": "https://10.0.0.1/simple/"},
        {"index": "https://u:secret@/"},
        {"default_index": "?"},
        {"default_files_host": "a b"},
    ],
)
def test_what_pip_says_and_cannot_be_used_is_an_error_that_says_what_to_write(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        rules_from_client(replace(FACTS, **changed))
    problem = caught.value.problems[0]
    assert problem.key == "network.registries"
    assert "registries: {python:" in (problem.hint or "")
    assert "secret" not in str(caught.value)


# Asking pip: the real one, of the interpreter that runs the tests


@pytest.fixture
def pip_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration of this machine's; the path of one for the test to write."""
    config = tmp_path / "pip.conf"
    config.write_text("")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    # pip reads the file of `PIP_CONFIG_FILE` last, so what it sets wins over this machine's files.
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    return config


def test_pip_answers_with_its_configuration_file_s_index(pip_environment: Path) -> None:
    pip_environment.write_text(
        "[global]\nindex-url = https://mirror.test/simple/\nextra-index-url =\n    https://x.test/s/\n    https://y.test/s/\n"
    )
    facts = python_client_facts()
    assert facts.index == "https://mirror.test/simple/"
    assert facts.extra_indexes == ("https://x.test/s/", "https://y.test/s/")
    assert facts.interpreter == sys.executable
    assert facts.pip_version
    assert hosts(rules_from_client(facts)) == [("mirror.test", 443)]


def test_the_environment_wins_over_the_file_as_it_does_for_pip(
    pip_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_environment.write_text("[global]\nindex-url = https://mirror.test/simple/\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment.test/simple/")
    assert python_client_facts().index == "https://environment.test/simple/"


def test_what_the_file_says_of_installing_wins_over_what_it_says_of_everything(pip_environment: Path) -> None:
    pip_environment.write_text(
        "[install]\nindex-url = https://install.test/simple/\n[global]\nindex-url = https://mirror.test/simple/\n"
    )
    assert python_client_facts().index == "https://install.test/simple/"


def test_a_file_that_says_no_index_is_believed(pip_environment: Path) -> None:
    pip_environment.write_text("[global]\nno-index = true\n")
    with pytest.raises(InvalidPolicy, match="no-index"):
        resolve_registries(Registries(), "python")


def test_the_built_in_index_comes_from_pip_itself(pip_environment: Path) -> None:
    pip_environment.write_text("[global]\nindex-url = https://mirror.test/simple/\n")
    facts = python_client_facts()
    built_in = rules_from_client(replace(facts, index=facts.default_index, extra_indexes=()))
    assert len(built_in.rules) == 2
    assert all(rule.ports == (443,) for rule in built_in.rules)


def test_a_broken_configuration_is_an_error_that_quotes_none_of_it(pip_environment: Path) -> None:
    pip_environment.write_text("index-url = https://u:secret@mirror.test/\n")
    with pytest.raises(InvalidPolicy) as caught:
        python_client_facts()
    assert "secret" not in str(caught.value)
    assert "registries: {python:" in (caught.value.problems[0].hint or "")


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_without_pip_gives_way_to_the_next(tmp_path: Path, pip_environment: Path) -> None:
    bare = _script(tmp_path / "bare", "raise ModuleNotFoundError(\"No module named 'pip'\")")
    facts = python_client_facts([str(tmp_path / "none"), bare, sys.executable])
    assert facts.interpreter == sys.executable


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ModuleNotFoundError(\"No module named 'pip'\")", "it has no pip"),
        ("print('hello')", "not understood"),
        ("print('{}')", "not understood"),
        ("print('[1]')", "not understood"),
        ("import sys; sys.exit(3)", "status 3"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_says_what_to_write(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidPolicy, match=reason) as caught:
        python_client_facts([_script(tmp_path / "python", text)])
    assert "registries: {python:" in (caught.value.problems[0].hint or "")


def test_a_pip_in_the_working_directory_is_not_asked(
    tmp_path: Path, pip_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert python_client_facts().pip_version


# npm: what it says, and the real one, beside the Node.js that attempts run on


NPM = NpmFacts("99.0", "https://npm.test/", ())

NPM_CONFIGURED: list[tuple[dict[str, Any], list[tuple[str, int]], str]] = [
    ({}, [("npm.test", 443)], ""),
    ({"registry": "https://mirror.test:8443/npm/"}, [("mirror.test", 8443)], ""),
    ({"registry": "http://mirror.test/"}, [("mirror.test", 80)], "without TLS"),
    ({"registry": "https://secret@mirror.test/"}, [("mirror.test", 443)], "password"),
    ({"scopes": ("@shop",)}, [("npm.test", 443)], "`@shop`"),
]


@pytest.mark.parametrize(("changed", "expected", "warning"), NPM_CONFIGURED)
def test_the_one_registry_of_npm_is_allowed(
    changed: dict[str, Any], expected: list[tuple[str, int]], warning: str
) -> None:
    found = rules_from_npm(replace(NPM, **changed))
    assert hosts(found) == expected
    assert [rule.id for rule in found.rules] == ["registries.javascript[0]"]
    assert all(rule.methods == ("GET", "HEAD") and not rule.subdomains for rule in found.rules)
    assert warning in " ".join(found.warnings)
    assert bool(found.warnings) is bool(warning)
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    "registry", [None, "", "/srv/npm", "file:///srv/npm", "${NOPE}", "https://10.0.0.1/", "https://u:secret@/"]
)
def test_what_npm_says_and_cannot_be_used_is_an_error_that_says_what_to_write(registry: str | None) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        rules_from_npm(replace(NPM, registry=registry))
    assert "registries: {javascript:" in (caught.value.problems[0].hint or "")
    assert "secret" not in str(caught.value)


@pytest.fixture
def npm_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration of this machine's; the path of the user's own for the test to write."""
    for name in list(os.environ):
        if name.lower().startswith("npm_config_"):
            monkeypatch.delenv(name)
    config = tmp_path / "home" / ".npmrc"
    config.parent.mkdir()
    config.write_text("")
    (tmp_path / "global").write_text("")
    monkeypatch.setenv("HOME", str(config.parent))
    monkeypatch.setenv("NPM_CONFIG_GLOBALCONFIG", str(tmp_path / "global"))
    return config


def test_npm_answers_with_the_registry_that_it_is_configured_for(
    npm_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By file; and by environment, which wins, as it does for npm."""
    npm_environment.write_text(
        "registry=https://mirror.test/npm/\n@shop:registry=https://shop.test/\n//mirror.test/:_authToken=secret\n"
    )
    facts = npm_facts()
    assert (facts.registry, facts.scopes) == ("https://mirror.test/npm/", ("@shop",))
    assert hosts(resolve_registries(Registries(), "javascript")) == [("mirror.test", 443)]
    assert "secret" not in repr(facts)
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://environment.test/")
    assert hosts(resolve_registries(Registries(), "javascript")) == [("environment.test", 443)]


def test_without_configuration_npm_has_a_registry_of_its_own(npm_environment: Path) -> None:
    rules = resolve_registries(Registries(), "javascript")
    assert [rule.ports for rule in rules.rules] == [(443,)]
    assert rules.warnings == ()


def test_a_registry_with_a_password_is_an_error_that_does_not_show_it(npm_environment: Path) -> None:
    npm_environment.write_text("registry=https://u:secret@mirror.test/\n")
    with pytest.raises(InvalidPolicy, match="password") as caught:
        resolve_registries(Registries(), "javascript")
    assert "secret" not in str(caught.value)


def test_no_project_is_asked_which_registry_npm_uses(
    npm_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what a caller has every Node.js load run in npm."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "package.json").write_text("{}")
    (project / ".npmrc").write_text("registry=https://planted.test/\n")
    (project / "planted.js").write_text("process.exit(9)")
    npm_environment.write_text("registry=https://mirror.test/\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("NODE_OPTIONS", f"--require={project}/planted.js")
    assert npm_facts().registry == "https://mirror.test/"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\nexit 3\n", "status 3"),
        ("#!/bin/sh\necho hello\n", "not understood"),
        ("#!/bin/sh\necho '[1]'\n", "not understood"),
        ("#!/nonexistent\n", "no such file"),
    ],
)
def test_an_npm_that_does_not_answer_is_an_error_that_says_why(tmp_path: Path, script: str, reason: str) -> None:
    node = tmp_path / "bin" / "node"
    node.parent.mkdir()
    node.write_text(script)
    node.chmod(0o755)
    answer = ask_npm(Node(str(tmp_path), "99.0.0"))
    assert isinstance(answer, str)
    assert reason in answer


# Resolving


def test_a_policy_that_names_the_index_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    found = resolve_registries(Registries.model_validate({"python": ["https://index.test/simple/"]}), "python")
    assert hosts(found) == [("index.test", 443)]


def test_each_language_has_what_the_policy_names_for_it_and_auto_for_the_rest(
    pip_environment: Path, npm_environment: Path
) -> None:
    pip_environment.write_text("[global]\nindex-url = https://mirror.test/simple/\n")
    setting = Registries.model_validate({"javascript": ["https://npm.test/"]})
    assert hosts(resolve_registries(setting, "javascript")) == [("npm.test", 443)]
    assert hosts(resolve_registries(setting, "python")) == [("mirror.test", 443)]


def test_auto_is_what_pip_says(pip_environment: Path) -> None:
    pip_environment.write_text("[global]\nindex-url = https://mirror.test/simple/\n")
    assert hosts(resolve_registries(Registries(), "python")) == [("mirror.test", 443)]


def test_a_language_without_a_client_has_no_registry() -> None:
    with pytest.raises(InvalidPolicy, match="ruby"):
        resolve_registries(Registries(), "ruby")
