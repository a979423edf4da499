"""Which hosts are a language's package registry: what the policy names, or what the language's own client would use.

Owns: asking pip (`python_client_facts`, a subprocess; `npm_client` asks npm) and turning an answer into rules (pure).
Must not: know any registry by name. What cannot be found out is an error that says how to write it by hand; nothing is
guessed.

Asking takes up to half a second and nothing is kept: callers ask when a call first needs it, and hold the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.network import Rule
from proxy.packages.model import Ecosystem
from proxy.packages.requests import BaseUrl, InvalidBase, Registry, parse_base
from sandbox.interpreters import this_node
from sandbox.isolation.client import IsolationUnavailable
from sandbox.npm_client import NpmFacts, ask_npm
from sandbox.policy.index_url import IndexUrl, InvalidIndex, parse_index
from sandbox.policy.problems import InvalidPolicy, Problem, shown
from sandbox.policy.schema import Registries

READ_ONLY = ("GET", "HEAD")
_TIMEOUT_SECONDS = 30.0
_BY_HAND = "name the index in the policy: `registries: {python: [https://index.example/simple/]}`"
_NPM_BY_HAND = "name the registry in the policy: `registries: {javascript: [https://registry.example/]}`"
_KEY = "network.registries"


@dataclass(frozen=True, slots=True)
class RegistryHost:
    """One host of a registry, and where it was learned: a sentence for people."""

    rule: str
    host: str
    port: int
    source: str


@dataclass(frozen=True, slots=True)
class RegistryRules:
    """The registry of one language: exact hosts, read-only. `warnings` are for people.

    `registry` is where its paths begin, by which the proxy knows what a request asks for; None where there is none.
    """

    language: str
    rules: tuple[Rule, ...]
    hosts: tuple[RegistryHost, ...]
    registry: Registry | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PythonClientFacts:
    """What pip would do with no option given. `default_index` and `default_files_host` are those built into it."""

    interpreter: str
    pip_version: str
    index: str
    extra_indexes: tuple[str, ...]
    no_index: bool
    default_index: str
    default_files_host: str


def resolve_registries(setting: Registries, language: str) -> RegistryRules:
    """The registry of a language under a policy's `network.registries`. Raises `InvalidPolicy`."""
    if (named := indexes_of(setting, language)) is not None:
        return rules_from_policy(language, named)
    match language:
        case "python":
            return rules_from_client(python_client_facts())
        case "javascript":
            return rules_from_npm(npm_facts())
    raise _unknown(f"no package client is known for the language `{shown(language)}`", None)


def indexes_of(setting: Registries, language: str) -> tuple[IndexUrl, ...] | None:
    """What a policy names for a language; None where it leaves that to the language's client."""
    return {"python": setting.python, "javascript": setting.javascript}.get(language)


# From values to rules


def rules_from_policy(language: str, indexes: Sequence[IndexUrl]) -> RegistryRules:
    """The hosts that a policy names for a language, and no others: the first is the index, others have its files."""
    found = [(url, f"`{_KEY}.{language}[{place}]` of the policy") for place, url in enumerate(indexes)]
    warnings = tuple(_cleartext(url) for url in indexes if url.scheme == "http")
    return _rules(language, found, warnings)


def rules_from_client(facts: PythonClientFacts) -> RegistryRules:
    """The host of the one index that pip is configured for and, for its built-in one, the host of that index's files.

    Extra indexes are not added: a name that two indexes have could be answered by either. Raises `InvalidPolicy`.
    """
    pip = f"pip {facts.pip_version} of `{facts.interpreter}`"
    if facts.no_index:
        raise _unknown(f"{pip} is configured to use no index (`no-index`)", _BY_HAND)
    index = _configured(facts.index, f"the index that {pip} is configured for", _BY_HAND)
    built_in = _configured(facts.default_index, f"the index built into {pip}", _BY_HAND)
    if (index.host, index.port, index.scheme) == (built_in.host, built_in.port, built_in.scheme):
        try:
            files = parse_index(facts.default_files_host)
        except InvalidIndex as error:
            raise _unknown(f"the host of the files of the index built into {pip} is unreadable", _BY_HAND) from error
        found = [(index, f"the index built into {pip}")]
        found.append((files, f"the host of that index's files, built into {pip}"))
    else:
        found = [(index, f"`index-url` that {pip} is configured with")]
    warnings = _surprises(index)
    if facts.extra_indexes:
        warnings.append(
            f"{len(facts.extra_indexes)} extra index(es) of pip's configuration are not allowed: one index only"
        )
    return _rules("python", found, tuple(warnings))


def rules_from_npm(facts: NpmFacts) -> RegistryRules:
    """The host of the one registry that npm is configured for. Raises `InvalidPolicy`."""
    npm = f"npm {facts.npm_version}"
    if facts.registry is None:
        message = f"{npm} does not tell the registry that it is configured for, as with a password in its address"
        raise _unknown(message, _NPM_BY_HAND)
    registry = _configured(facts.registry, f"the registry that {npm} is configured for", _NPM_BY_HAND)
    warnings = _surprises(registry)
    if facts.scopes:
        scopes = ", ".join(f"`{shown(scope)}`" for scope in facts.scopes)
        warnings.append(f"the registries that npm's configuration names for {scopes} are not allowed: one only")
    return _rules("javascript", [(registry, f"the registry of {npm}")], tuple(warnings))


def _configured(text: str, what: str, hint: str) -> IndexUrl:
    if not text.lower().startswith(("http://", "https://")):
        raise _unknown(f"{what} is no web address", hint)
    try:
        index = parse_index(text)
    except InvalidIndex as error:
        raise _unknown(f"{what} is no web address: {error}", hint) from error
    if index.host.address is not None:
        raise _unknown(f"{what} is given by an IP address", hint)
    return index


def _surprises(index: IndexUrl) -> list[str]:
    warnings = []
    if index.scheme == "http":
        warnings.append(_cleartext(index))
    if index.has_credentials:
        warnings.append("the configured index has a user name or password; code in the sandbox is given neither")
    return warnings


def _rules(language: str, found: Sequence[tuple[IndexUrl, str]], warnings: tuple[str, ...]) -> RegistryRules:
    rules: list[Rule] = []
    hosts: list[RegistryHost] = []
    for host, port, source in ((url.host, url.port, source) for url, source in found):
        if any(rule.host == host and rule.ports == (port,) for rule in rules):
            continue
        name = f"registries.{language}[{len(rules)}]"
        rules.append(Rule(id=name, host=host, subdomains=False, ports=(port,), methods=READ_ONLY))
        hosts.append(RegistryHost(name, host.text, port, source))
    index, *files = (_base(url, source) for url, source in found)
    registry = Registry(
        id=f"registries.{language}[0]", ecosystem=Ecosystem.of_language(language), index=index, files=tuple(files)
    )
    return RegistryRules(language, tuple(rules), tuple(hosts), registry, warnings)


def _base(url: IndexUrl, source: str) -> BaseUrl:
    try:
        return parse_base(str(url))
    except InvalidBase as error:
        raise _unknown(f"{source} cannot be used: {error}", None) from error


def _cleartext(url: IndexUrl) -> str:
    return f"the index at `{url.host}` is read without TLS: whoever is on the way can change packages"


def _unknown(message: str, hint: str | None) -> InvalidPolicy:
    return InvalidPolicy([Problem("registries", None, _KEY, message, hint)])


# Asking the clients


def npm_facts() -> NpmFacts:
    """Ask npm. Raises `InvalidPolicy` when it is not there, or does not answer."""
    try:
        answer = ask_npm(this_node())
    except IsolationUnavailable as error:
        answer = str(error).partition("\n")[0]
    if isinstance(answer, str):
        raise _unknown(f"npm could not be asked which registry it uses ({answer})", _NPM_BY_HAND)
    return answer


# Run by the interpreter that is asked. pip's own option parser merges its files, its environment and its defaults, so
# what comes out is what `pip install` would use. The answer is the last line: plugins and warnings may print before it.
_QUESTION = """
import json
import pip
from pip._internal.commands import create_command
from pip._internal.models.index import PyPI
options, _ = create_command("install").parser.parse_args([])
print()
print(json.dumps({
    "pip_version": pip.__version__,
    "index": options.index_url,
    "extra_indexes": list(options.extra_index_urls),
    "no_index": bool(options.no_index),
    "default_index": PyPI.simple_url,
    "default_files_host": PyPI.file_storage_domain,
}))
"""


def python_client_facts(interpreters: Sequence[str] | None = None) -> PythonClientFacts:
    """Ask pip: that of this interpreter, else that of the one its virtual environment was made from.

    Raises `InvalidPolicy` when neither has one, or it does not answer.
    """
    failures = []
    for interpreter in dict.fromkeys(interpreters if interpreters is not None else _interpreters()):
        answer = _ask(interpreter)
        if isinstance(answer, PythonClientFacts):
            return answer
        failures.append(f"`{interpreter}`: {answer}")
    raise _unknown(f"pip could not be asked which index it uses ({'; '.join(failures)})", _BY_HAND)


def _interpreters() -> list[str]:
    base = getattr(sys, "_base_executable", None)  # what `venv` was started with; private, and as old as venv itself
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [sys.executable, *([base] if base else []), str(Path(sys.base_prefix) / "bin" / name)]


def _ask(interpreter: str) -> PythonClientFacts | str:
    """The facts, or why there are none. `-P` keeps a `pip` of the working directory from passing for the real one."""
    try:
        done = subprocess.run(
            [interpreter, "-P", "-c", _QUESTION],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_SECONDS, cwd="/",
            env=os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or "it cannot be started").lower()
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        # pip quotes the faulty line of a configuration file, which may hold a password.
        return "it has no pip" if "No module named 'pip" in last else f"pip ended with status {done.returncode}"
    try:
        facts = json.loads(done.stdout.decode().rstrip().rsplit("\n", 1)[-1])
        return PythonClientFacts(
            interpreter=interpreter,
            pip_version=str(facts["pip_version"]),
            index=str(facts["index"]),
            extra_indexes=tuple(str(url) for url in facts["extra_indexes"]),
            no_index=facts["no_index"] is True,
            default_index=str(facts["default_index"]),
            default_files_host=str(facts["default_files_host"]),
        )
    except (ValueError, KeyError, TypeError):
        return "its answer was not understood"
