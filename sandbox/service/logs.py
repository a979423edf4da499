"""The service's log on standard error: one line an entry, as text or as JSON.

Owns: its form. Must not: decide what is told. Tokens, code and what programs print are never given to it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_QUIET = {"uvicorn": logging.ERROR, "mcp": logging.ERROR, "httpx": logging.WARNING, "asyncio": logging.WARNING}


class JsonLines(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, and `trace` with an exception's."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": _time(record), "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class TextLines(logging.Formatter):
    """The same for people. A message of several lines has them indented, so that an entry can be told from the next."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text.replace("\n", "\n    ")


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def log_to_stderr(*, as_json: bool) -> None:
    """Set up logging for this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
