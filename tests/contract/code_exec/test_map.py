"""The list of the manual's sentences in the package's docstring is whole, and has every test and none that isn't there."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import tests.contract.code_exec
from tests.contract.code_exec.test_runs import EXAMPLES

HERE = Path(__file__).parent
MANUAL_SHA256 = "31b77311cea683f4ba367ea295e6210a1530d41a5c747d3ec1c7fc08d02cb7e5"  # of the published text's words, with one space between them


def listed() -> Iterator[tuple[str, list[str] | None]]:
    """Each heading, with None, and each sentence, with its tests."""
    _, _, table = (tests.contract.code_exec.__doc__ or "").partition("--- manual ---\n")
    sentence: list[str] = []
    names: list[str] = []
    for line in [*table.splitlines(), "end"]:
        depth = len(line) - len(line.lstrip())
        if sentence and (depth == 0 or (depth == 4 and names)) and line:
            yield " ".join(sentence), names
            sentence, names = [], []
        if depth == 4:
            sentence.append(line.strip())
        elif depth == 8:
            names += re.findall(r"\w+", line)
        elif line and line != "end":
            yield line, None


def present() -> dict[str, str | None]:
    """The tests beside this file, each with its claim."""
    return {
        node.name: ast.get_docstring(node)
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_no_sentence_of_the_manual_is_left_out_or_altered() -> None:
    """The headings and sentences of the list, one after another, are the published text."""
    words = " ".join(" ".join(text for text, _ in listed()).split())
    assert hashlib.sha256(words.encode()).hexdigest() == MANUAL_SHA256


def test_every_sentence_has_tests_that_exist() -> None:
    """None is without one, and none names one that isn't there."""
    found = present()
    sentences = {text: names for text, names in listed() if names is not None}
    assert len(sentences) > 25
    assert [text for text, names in sentences.items() if not names] == []
    assert {name for names in sentences.values() for name in names} - found.keys() == set()


def test_every_test_holds_a_sentence_and_has_a_claim() -> None:
    """No test is without a sentence, and each says what it holds."""
    named = {name for _, names in listed() for name in names or ()}
    assert present().keys() - named == set()
    assert [name for name, claim in present().items() if not claim] == []


def test_the_examples_that_are_run_are_the_published_ones() -> None:
    """To the letter, but for how many spaces stand side by side."""
    sentences = {text for text, _ in listed()}
    assert [
        example for example in EXAMPLES if " ".join(example.split()) not in {" ".join(s.split()) for s in sentences}
    ] == []
