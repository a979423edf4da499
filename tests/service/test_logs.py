"""An entry of the log is told from the next, whatever is in it."""

from __future__ import annotations

import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from sandbox.service.logs import JsonLines, TextLines


def record(message: str, error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("sluicegate.service", logging.WARNING, "", 0, "%s", (message,), info)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_entry_is_one_line_of_json(message: str) -> None:
    line = JsonLines().format(record(message))
    assert "\n" not in line
    assert json.loads(line)["message"] == message
    assert json.loads(line)["level"] == "warning"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_of_several_lines_cannot_pass_for_several_entries(message: str) -> None:
    first, *rest = TextLines().format(record(message)).split("\n")
    assert first[:4].isdigit()
    assert all(line.startswith("    ") for line in rest)


def test_an_exception_comes_with_its_entry() -> None:
    error = OSError("gone")
    assert "OSError: gone" in json.loads(JsonLines().format(record("x", error)))["trace"]
    assert "\n    OSError: gone" in TextLines().format(record("x", error))
