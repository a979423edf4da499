"""Request paths and the patterns of rules. Pure.

Owns: when a path can be read in one way only, and what a pattern matches. Must not: know rules or hosts.

A path that two servers could read differently has no normal form. An allow rule with paths never matches it; a deny
rule with paths always does.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

MAX_PATH = 8192  # longer ones have no normal form; common servers refuse request lines above 8 KiB

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%(?:2f|5c|25|00)", re.IGNORECASE | re.ASCII)


def normalise_path(path: str | None) -> str | None:
    """The path that a rule is matched against: percent-decoded once; None when servers could read it in two ways.

    Two ways: dot segments, with or without parameters or trailing dots and spaces; an encoded slash or backslash; a
    double or a broken encoding; a control character; bytes that are not UTF-8; an empty segment; a character that
    compatibility normalisation turns into one of those (a full-width full stop).
    """
    if path is None or not path.startswith("/") or len(path) > MAX_PATH or _BAD_ESCAPE.search(path):
        return None
    decoded = unquote(path, errors="replace")
    if any(unicodedata.category(c) in ("Cc", "Cs") or c == "\ufffd" for c in decoded):
        return None
    if _ambiguous(decoded):
        return None
    folded = unicodedata.normalize("NFKC", decoded)
    if folded != decoded and (_ambiguous(folded) or folded.count("/") != decoded.count("/")):
        return None
    return decoded


def path_allowed(patterns: tuple[str, ...], path: str | None) -> bool:
    """Whether the path is certainly one of these.

    It must match also as read by a server that ends a path at a decoded `?` or `#`, or a segment at its parameters
    (`;x`), unless the pattern has that mark itself.
    """
    normal = normalise_path(path)
    if normal is None:
        return False
    return any(
        _compiled(pattern).matches(normal) and _compiled(pattern).matches(_shortened(normal, pattern))
        for pattern in patterns
    )


def path_denied(patterns: tuple[str, ...], path: str | None) -> bool:
    """Whether the path could be one of these on some server.

    Held to match: what has no normal form, what differs in case or by compatibility characters, and what matches once
    it is cut at a decoded `?` or `#`, or the parameters (`;x`) or the trailing dots and spaces of its segments are
    taken away.
    """
    normal = normalise_path(path)
    if normal is None:
        return True
    folded = _fold(normal)
    texts: set[str] = set()
    for text in (folded, _shortened(folded, ";")):
        texts |= {text, "/".join(segment.split(";")[0].rstrip(" .") for segment in text.split("/"))}
    return any(_compiled(_fold(pattern)).matches(text) for pattern in patterns for text in texts)


def _shortened(path: str, pattern: str) -> str:
    """The path without what some servers do not count as one, but for the marks that the pattern itself has."""
    for mark in "?#":
        if mark not in pattern:
            path = path.partition(mark)[0]
    return path if ";" in pattern else "/".join(segment.partition(";")[0] for segment in path.split("/"))


def _ambiguous(path: str) -> bool:
    if "\\" in path or "//" in path or "%" in path:
        return True
    return any(segment and not segment.split(";")[0].strip(" .") for segment in path.split("/"))


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A glob as an automaton of one bit per position: linear in the path, whatever the pattern and the path are.

    A regular expression would backtrack: the path is the sandboxed program's to choose, and `**` may stand many times.
    """

    literals: dict[str, int]  # character -> the positions it leads on from
    within: int  # positions that any character but a slash leaves where they are: `*`
    across: int  # positions that any character leaves where they are: `**`
    final: int

    def matches(self, path: str) -> bool:
        active = 1
        for character in path:
            stay = self.across if character == "/" else self.across | self.within
            active = (active & self.literals.get(character, 0)) << 1 | active & stay
            if not active:
                return False
        return bool(active & self.final)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> _Pattern:
    """`*` stays within a segment, `**` crosses them; nothing else is special. Anchored at both ends."""
    literals: dict[str, int] = {}
    within = across = place = 0
    for part in re.split(r"(\*\*|\*)", pattern):
        if part == "**":
            across |= 1 << place
        elif part == "*":
            within |= 1 << place
        else:
            for character in part:
                literals[character] = literals.get(character, 0) | 1 << place
                place += 1
    return _Pattern(literals, within, across, 1 << place)
