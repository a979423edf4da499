"""The list of rules in the package's docstring has every test, and no test that doesn't exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import tests.contract

HERE = Path(__file__).parent


def test_the_list_of_rules_is_that_of_the_tests() -> None:
    """Each test holds a rule of the list, each name in the list is a test, and each has a claim."""
    listed = set(re.findall(r"\btest_\w+\b(?!\.py)", tests.contract.__doc__ or ""))
    found = {
        node.name: ast.get_docstring(node)
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(found) > 80
    assert listed == found.keys()
    assert [name for name, claim in found.items() if not claim] == []
