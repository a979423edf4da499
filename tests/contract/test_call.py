"""The inputs of a call and their bounds: what the contract's table says of each, at the bound and one beyond."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.call_parsing import parse_call
from sandbox.contract import CodeCall, InvalidCall
from tests.contract.conftest import Runs, said
from tests.contract.programs import ENVIRONMENT, HANG, HELLO, pair
from tests.contract.schema import faults
from tests.lab import Lab

DELIMITER = {"python": "==", "javascript": "@"}


def call(language: str = "python", **fields: Any) -> dict[str, Any]:
    return {"language": language, "code": "1", **fields}


def problems(data: object) -> list[str]:
    """The faults of what is no call."""
    with pytest.raises(InvalidCall) as caught:
        parse_call(data)
    assert caught.value.problems
    return caught.value.problems


def paths(data: object) -> set[str]:
    """Where the faults of what is no call are."""
    return {problem.partition(": ")[0] for problem in problems(data)}


def specifier(language: str, length: int) -> str:
    """A specifier of that many characters with a version delimiter."""
    end = DELIMITER[language] + ("1" if length >= len("a" + DELIMITER[language] + "1") else "")
    return "a" * (length - len(end)) + end


# Language


def test_the_language_is_python_or_javascript(run: Runs) -> None:
    """Language: `python` or `javascript`. Both run."""
    assert run(HELLO).result.stdout == "hello\n"


@pytest.mark.parametrize("language", ["", "Python", "PYTHON", "python3", "py", "js", "typescript", "node", " python", None, 3, ["python"], True])  # fmt: skip
def test_there_is_no_third_language(language: object) -> None:
    """Language: one of those two names, as written."""
    assert paths({"language": language, "code": "1"}) == {"language"}


def test_language_and_code_must_be_given() -> None:
    """What has no default in the table is required; both faults are told."""
    assert paths({}) == {"language", "code"}
    assert paths({"language": "python"}) == {"code"}
    assert paths({"code": "1"}) == {"language"}


# Source code


@pytest.mark.parametrize("character", ["a", "é", "\u4e2d", "😀", "\U0010ffff"])
@pytest.mark.parametrize("count", [1, 99_999, 100_000])
def test_source_code_may_have_100000_characters(language: str, character: str, count: int) -> None:
    """Source code: at most 100,000 characters; a character outside the basic plane is one."""
    assert parse_call(call(language, code=character * count)).code == character * count


@pytest.mark.parametrize("character", ["a", "é", "\u4e2d", "😀"])
@pytest.mark.parametrize("count", [100_001, 200_000])
def test_source_code_may_not_have_more_than_100000_characters(language: str, character: str, count: int) -> None:
    """Source code: one more is refused, however short it is in bytes or long."""
    assert paths(call(language, code=character * count)) == {"code"}


def test_the_longest_source_code_runs(run: Runs) -> None:
    """Source code: what is within the bound is run as it is, to its last character."""

    def padded(start: str, end: str) -> str:
        return start + "😀" * (100_000 - len(start) - len(end)) + end

    program = pair(padded("#", "\nprint('last')"), padded("//", "\nconsole.log('last')"))
    assert {len(code) for code in program.values()} == {100_000}
    assert run(program).result.stdout == "last\n"


def test_source_code_is_not_empty(language: str) -> None:
    """No code is no call."""
    assert paths(call(language, code="")) == {"code"}


@pytest.mark.parametrize("code", ["\0", "a\0b", "\ud800", "x\udfff", "\udc80" * 3, "\ude00\ud83d"])
def test_source_code_is_text(language: str, code: str) -> None:
    """A NUL or a lone surrogate is no character of a program: a fault of the call, said in text that can be written."""
    found = problems(call(language, code=code))
    assert {problem.partition(": ")[0] for problem in found} == {"code"}
    "; ".join(found).encode()


# Packages


@pytest.mark.parametrize("count", [0, 1, 49, 50])
def test_there_may_be_50_packages(language: str, count: int) -> None:
    """Packages: at most 50 dependencies."""
    names = [f"a{place}{DELIMITER[language]}1" for place in range(count)]
    assert parse_call(call(language, packages=names)).packages == names


def test_there_may_not_be_51_packages(language: str) -> None:
    """Packages: the 51st is refused."""
    assert paths(call(language, packages=[f"a{place}{DELIMITER[language]}1" for place in range(51)])) == {"packages"}


@pytest.mark.parametrize("length", [3, 4, 213, 214])
def test_a_specifier_has_3_to_214_characters(language: str, length: int) -> None:
    """Packages: each specifier is 3 to 214 characters."""
    name = specifier(language, length)
    assert len(name) == length
    assert parse_call(call(language, packages=[name])).packages == [name]


@pytest.mark.parametrize("name", ["", "a", "a@", "==", "a" * 210 + "==1.0"])
def test_a_specifier_has_no_fewer_and_no_more(language: str, name: str) -> None:
    """Packages: 2 characters are too few, 215 too many; the place in the list is named."""
    assert len(name) in (0, 1, 2, 215)
    good = specifier(language, 8)
    assert "packages.1" in paths(call(language, packages=[good, name, good]))


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("python", "requests"),
        ("python", "requests=2.0"),
        ("python", "requests 2.0"),
        ("javascript", "lodash"),
        ("javascript", "@scope/name"),
        ("javascript", "lodash 4.0.0"),
    ],
)
def test_a_specifier_contains_a_version_delimiter(language: str, name: str) -> None:
    """Packages: each specifier contains a version delimiter; one without is a fault of the call at its place."""
    assert paths(call(language, packages=[specifier(language, 8), name])) == {"packages.1"}


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("python", "requests=="),
        ("python", "requests==*"),
        ("python", "requests==2.*"),
        ("python", "requests==2.32.3"),
        ("javascript", "lodash@"),
        ("javascript", "lodash@*"),
        ("javascript", "lodash@4.17.21"),
        ("javascript", "@scope/name@"),
        ("javascript", "@scope/name@1.0.0"),
    ],
)
def test_empty_and_wildcard_version_selectors_are_in_the_grammar(language: str, name: str) -> None:
    """The package grammar accepts empty and wildcard version selectors, as it does exact ones."""
    assert parse_call(call(language, packages=[name])).packages == [name]


def test_a_valid_dependency_can_be_refused(contract: Lab, language: str) -> None:
    """A dependency that is valid by its syntax can still be refused: before any attempt, and the reason is named."""
    result = contract.run("1", prelude=False, language=language, packages=[f"a{DELIMITER[language]}1.0"]).result
    assert (result.status, result.attempts, result.exit_code) == ("error", [], None)
    assert result.error is not None
    assert result.error.reason == "packages_not_allowed"


# Timeout


@pytest.mark.parametrize("seconds", [1, 1.0, 1.001, 30, 299.999, 300, 300.0])
def test_a_timeout_is_1_to_300_seconds(language: str, seconds: float) -> None:
    """Timeout: 1 to 300 seconds, both included; parts of a second count."""
    assert parse_call(call(language, timeout=seconds)).timeout == seconds


@pytest.mark.parametrize(
    "seconds",
    [0.999, 0, -1, 300.001, 301, 1e300, 10**400, -(10**400), math.inf, -math.inf, math.nan, True, False, "30", "", [30], {}],
)  # fmt: skip
def test_a_timeout_is_nothing_else(language: str, seconds: object) -> None:
    """Timeout: neither below 1 nor above 300; and only a number is one."""
    assert paths(call(language, timeout=seconds)) == {"timeout"}


def test_the_timeout_is_30_seconds_when_omitted(run: Runs) -> None:
    """Timeout: 30 seconds when omitted."""
    (attempt,) = run(HELLO).result.attempts
    assert attempt.evidence.wall_limit_seconds == 30


@pytest.mark.parametrize("seconds", [1, 2.5, 300])
def test_the_timeout_given_is_the_timeout_in_force(run: Runs, seconds: float) -> None:
    """Timeout: the call's own, at its bounds too."""
    (attempt,) = run(HELLO, timeout=seconds).result.attempts
    assert attempt.evidence.wall_limit_seconds == seconds


def test_the_timeout_is_kept(run: Runs) -> None:
    """The time of an attempt is controlled: it ends at its timeout, not before and not long after."""
    result = run(HANG, timeout=2).result
    (attempt,) = result.attempts
    assert result.status == "timeout"
    assert (
        2 <= attempt.ended_at - attempt.started_at < 2 + 2
    )  # the bound is 1 s; the rest is for a busy machine


# Memory


@pytest.mark.parametrize("mib", [128, 129, 512, 2047, 2048])
def test_memory_is_128_to_2048_mib(language: str, mib: int) -> None:
    """Working memory limit: 128 to 2,048 MiB, both included."""
    assert parse_call(call(language, memory_mib=mib)).memory_mib == mib


@pytest.mark.parametrize(
    "mib", [127, 0, -1, 2049, 10**30, 512.5, 127.9, math.nan, math.inf, True, False, "512", [512], {}]
)
def test_memory_is_nothing_else(language: str, mib: object) -> None:
    """Working memory limit: neither less nor more; and only a whole number is one."""
    assert paths(call(language, memory_mib=mib)) == {"memory_mib"}


def test_memory_is_512_mib_when_omitted(run: Runs) -> None:
    """Working memory limit: 512 MiB when omitted."""
    (attempt,) = run(HELLO).result.attempts
    assert attempt.evidence.memory_limit_bytes == 512 << 20


@pytest.mark.parametrize("mib", [128, 2048])
def test_the_memory_given_is_the_memory_in_force(run: Runs, mib: int) -> None:
    """Working memory limit: the call's own; a program starts within the least, and the most is given."""
    run_ = run(HELLO, memory_mib=mib)
    (attempt,) = run_.result.attempts
    assert run_.result.status == "success"
    assert attempt.evidence.memory_limit_bytes == mib << 20


def test_memory_within_the_limit_can_be_used_and_no_more(run: Runs) -> None:
    """The memory of an attempt is controlled: what fits is had, what doesn't ends the attempt."""
    touch = pair(
        "x = bytearray(b'x') * ({0} << 20)\nprint(len(x) >> 20)",
        "const x = Buffer.alloc({0} * 2 ** 20, 'x'); console.log(x.length / 2 ** 20)",
    )
    for mib, status in ((150, "success"), (400, "killed")):
        program = {language: code.format(mib) for language, code in touch.items()}
        result = run(program, memory_mib=256).result
        assert result.status == status, result.model_dump_json()
        assert result.cause == ("exit" if status == "success" else "memory")


# Environment variables


@pytest.mark.parametrize("count", [0, 1, 49, 50])
def test_there_may_be_50_environment_variables(run: Runs, count: int) -> None:
    """Environment variables: at most 50 string values; each is there as it was given."""
    given = {f"MINE_{place}": f"value {place} é😀\n=" for place in range(count)}
    seen = said(run(ENVIRONMENT, env=given))
    assert {name: value for name, value in seen.items() if name.startswith("MINE_")} == given


def test_there_may_not_be_51_environment_variables(language: str) -> None:
    """Environment variables: the 51st is refused."""
    assert paths(call(language, env={f"MINE_{place}": "" for place in range(51)})) == {"env"}


@pytest.mark.parametrize("value", [1, 1.5, True, None, ["x"], {"x": "y"}])
def test_values_of_environment_variables_are_strings(language: str, value: object) -> None:
    """Environment variables: string values; nothing else is turned into one, and the variable is named."""
    assert paths(call(language, env={"GOOD": "x", "BAD": value})) == {"env.BAD"}


@pytest.mark.parametrize("value", ["\0", "a\0", "\ud800", "\udfff!"])
def test_values_of_environment_variables_are_text(language: str, value: str) -> None:
    """A NUL or a lone surrogate in a value is a fault of the call."""
    found = problems(call(language, env={"BAD": value}))
    assert all(problem.startswith("env") and "BAD" in problem for problem in found)
    "; ".join(found).encode()


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A-B", "É", "A\0", "A\n", "😀", "\ud800"])
def test_names_of_environment_variables_are_names(language: str, name: str) -> None:
    """Letters, digits and `_`: what else is given is a fault of the call, said in text that can be written."""
    found = problems(call(language, env={name: "x"}))
    assert all(problem.startswith("env") for problem in found)
    "; ".join(found).encode()


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "HTTP_PROXY", "https_proxy", "SLUICEGATE_CALL_ID", "SLUICEGATE_ATTEMPT", "LD_PRELOAD", "NODE_OPTIONS"]
)  # fmt: skip
def test_the_environment_is_the_platforms_to_control(language: str, name: str) -> None:
    """The platform controls the environment variables: its own cannot be given by a call."""
    found = problems(call(language, env={name: "x"}))
    assert all(problem.startswith("env") and name in problem for problem in found)


# Network


@pytest.mark.parametrize("value", [0, 1, "true", "false", "", [], {}, None, 1.0])
def test_allow_network_is_true_or_false(language: str, value: object) -> None:
    """Network: `allow_network` is a boolean, and nothing is taken for one."""
    assert paths(call(language, allow_network=value)) == {"allow_network"}


@pytest.mark.parametrize("value", ["allowed.test", "", 0, False, True, {}, {"allowed.test": True}])
def test_domains_are_null_or_a_list(language: str, value: object) -> None:
    """Network: the domain setting is null or a list; an empty text is no empty list, which would open everything."""
    assert "domains" in paths(call(language, allow_network=True, domains=value))


@pytest.mark.parametrize("value", [1, None, True, ["a.test"]])
def test_a_domain_is_a_string(language: str, value: object) -> None:
    """Network: a list of host names; the place of what is none is named."""
    assert paths(call(language, allow_network=True, domains=["a.test", value])) == {"domains.1"}


@pytest.mark.parametrize(
    "name", ["", " ", "*", "*.a.test", "https://a.test", "a.test:443", "a.test/x", "1.2.3.4", "::1", "a..test", "a b", "\0", "\ud800", "."]
)  # fmt: skip
def test_a_domain_is_a_host_name(language: str, name: str) -> None:
    """Network: host names; neither patterns nor addresses nor URLs."""
    found = problems(call(language, allow_network=True, domains=["a.test", name]))
    assert all(problem.startswith("domains") for problem in found)
    assert "1" in found[0]
    "; ".join(found).encode()


@pytest.mark.parametrize("domains", [[], ["a.test"]])
@pytest.mark.parametrize("network", [{}, {"allow_network": False}])
def test_domains_without_the_network_are_contradictory(
    language: str, network: dict[str, Any], domains: list[str]
) -> None:
    """Block-all has no domain setting: a call that gives one without `allow_network` is refused, not guessed at."""
    (problem,) = problems(call(language, **network, domains=domains))
    assert "domains" in problem
    assert "allow_network" in problem


# The whole call


@pytest.mark.parametrize("name", ["langauge", "Language", "network", "memory", "timeout_seconds", "stdin", "", "__class__", "\ud800", "a.b"])  # fmt: skip
def test_unknown_fields_are_refused(language: str, name: str) -> None:
    """The tool accepts the values of the table and no others."""
    (problem,) = problems(call(language, **{name: None}))
    problem.encode()
    if name.isidentifier():
        assert problem.startswith(f"{name}: ")


@pytest.mark.parametrize("data", [None, True, 1, 1.5, "", "{}", [], [{}], [["language", "python"], ["code", "1"]]])
def test_a_call_is_an_object(data: object) -> None:
    """Nothing else is one."""
    assert problems(data)


def test_all_faults_are_told_together_each_with_its_path() -> None:
    """Every request is kept within the bounds, and whoever sends one that isn't learns of all faults at once."""
    found = paths(
        {
            "language": "ruby",
            "code": "x" * 100_001,
            "packages": ["a", 5, "b" * 215],
            "timeout": 0.5,
            "memory_mib": "512",
            "env": {"A": 1, "B": None},
            "allow_network": "no",
            "domains": [1, "a.test", None],
            "idempotency_key": "",
            "more": 1,
        }
    )
    assert found == {
        "language", "code", "packages.0", "packages.1", "packages.2", "timeout", "memory_mib", "env.A", "env.B",
        "allow_network", "domains.0", "domains.2", "idempotency_key", "more",
    }  # fmt: skip


def test_a_contradiction_is_told_beside_other_faults() -> None:
    """All faults at once: also the one that is about two fields."""
    found = problems({"language": "python", "code": "", "domains": ["a.test"], "timeout": 301})
    assert {problem.partition(": ")[0] for problem in found} >= {"code", "timeout"}
    assert any("domains" in problem and "allow_network" in problem for problem in found)


def test_faults_of_text_are_told_together() -> None:
    """All faults at once: those of characters, too, and of every name in a field."""
    found = problems(
        call(code="\0", env={"A-B": "x", "PATH": "x", "C": "\0"}, allow_network=True, domains=["*.a.test", "1.2.3.4"])
    )
    text = "; ".join(found)
    for word in ("code", "A-B", "PATH", "env.C", "*.a.test", "1.2.3.4"):
        assert word in text


def test_a_fault_of_type_hides_no_fault_of_value() -> None:
    """All faults at once: also where one entry of a field has the wrong type and another the wrong value."""
    text = "; ".join(
        problems(call(env={"A": 1, "B-C": "x"}, allow_network=True, domains=[5, "*.a.test"], packages=[7, "a"]))
    )
    for word in ("env.A", "B-C", "domains.0", "*.a.test", "packages.0", "packages.1"):
        assert word in text


@pytest.mark.parametrize("where", ["call", "env"])
def test_a_name_that_is_no_text_hides_no_other_fault(where: str) -> None:
    """All faults at once: a lone surrogate in the name of a field or a variable is one of them."""
    data = call(timeout=0) | {"\ud800": 1} if where == "call" else call(timeout=0, env={"\ud800": "x", "A-B": "x"})
    found = problems(data)
    "; ".join(found).encode()
    assert len(found) >= 2
    assert any(problem.startswith("timeout: ") for problem in found)
    assert any("ud800" in problem for problem in found)


@pytest.mark.parametrize("field", ["", "language", "code", "packages", "timeout", "memory_mib", "env", "allow_network", "domains", "more"])  # fmt: skip
@pytest.mark.parametrize("kind", ["list", "object"])
def test_deep_nesting_is_refused(kind: str, field: str) -> None:
    """Whatever is sent, however deep: a fault, not a crash."""
    value: Any = "x"
    for _ in range(100_000):
        value = [value] if kind == "list" else {"a": value}
    found = problems(call() | {field: value} if field else value)
    if field:
        assert all(problem.startswith((field, "call: `domains`")) for problem in found)


@pytest.mark.parametrize("key", ["k", "k" * 200, "a b:~!", None])
def test_an_idempotency_key_may_be_given(language: str, key: str | None) -> None:
    """An optional key, of 1 to 200 printable ASCII characters."""
    assert parse_call(call(language, idempotency_key=key)).idempotency_key == key


@pytest.mark.parametrize("key", ["", "k" * 201, "é", "a\nb", "\0", "\x7f", "\ud800", 5, True, []])
def test_an_idempotency_key_is_nothing_else(language: str, key: object) -> None:
    """Neither empty nor longer, nor anything that could not stand in a header."""
    assert paths(call(language, idempotency_key=key)) == {"idempotency_key"}


def _json(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4), max_leaves=12
    )


_TEXT = st.text(st.characters(categories=None), max_size=8)
_ANY = _json(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT | st.sampled_from([10**400, "\0", "\ud800"])
)
_CALL_LIKE = st.fixed_dictionaries(
    {"language": st.sampled_from(["python", "javascript"]) | _ANY, "code": _TEXT | _ANY},
    optional={
        "packages": st.lists(_TEXT | st.just("a==1"), max_size=3) | _ANY,
        "timeout": st.integers(-1, 302) | st.floats(0, 301) | _ANY,
        "memory_mib": st.integers(126, 2050) | _ANY,
        "env": st.dictionaries(_TEXT | st.sampled_from(["A", "PATH"]), _TEXT, max_size=3) | _ANY,
        "allow_network": st.booleans() | _ANY,
        "domains": st.none() | st.lists(_TEXT | st.sampled_from(["a.test", "*", "\ud800"]), max_size=3) | _ANY,
        "idempotency_key": _TEXT | _ANY,
    },
)


@given(_ANY | _CALL_LIKE)
def test_any_json_is_a_call_or_is_refused(data: object) -> None:
    """Whatever is sent: a call, or `InvalidCall` with faults that can be written down. Nothing else is raised."""
    parsed: CodeCall | None = None
    refused: InvalidCall | None = None
    try:
        parsed = parse_call(data)
    except InvalidCall as error:
        refused = error
    if refused is not None:
        assert refused.problems
        "\n".join([*refused.problems, str(refused)]).encode()
    else:
        assert isinstance(data, dict)
        assert parsed == CodeCall.model_validate_json(json.dumps(data))


def test_what_is_a_call_is_one_by_the_published_schema(schemas: dict[str, Any]) -> None:
    """The published bounds and those in force are the same: at each bound the schema says what the parser says."""
    values: dict[str, list[Any]] = {
        "language": ["python", "javascript", "ruby", None],
        "code": ["", "x", "😀" * 100_000, "😀" * 100_001],
        "packages": [[], ["a=="], ["a="], ["a==1"] * 50, ["a==1"] * 51, ["a" * 211 + "==1"], ["a" * 212 + "==1"]],
        "timeout": [0.999, 1, 300, 300.001, True, "30"],
        "memory_mib": [127, 128, 2048, 2049, True, "512", 512.5],
        "env": [{}, {"A": "x"}, {"A": 1}, {f"A{n}": "" for n in range(50)}, {f"A{n}": "" for n in range(51)}],
        "allow_network": [True, False, 1, "true", None],
        "domains": [None, "a.test", [1]],
        "more": [None],
    }  # fmt: skip
    wrong = []
    for name, some in values.items():
        for value in some:
            data = call(**{name: value})
            try:
                parse_call(data)
                accepted = True
            except InvalidCall:
                accepted = False
            if accepted != (faults(data, schemas["call"]) == []):
                wrong.append((name, repr(value)[:40], accepted))
    assert wrong == []
