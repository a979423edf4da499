"""Names that many people use, and names that look like them. Pure.

Owns: the list in its order, and finding a name within one edit of those at its top. Must not: read files, or judge.

One edit is one letter put in, left out, changed, or swapped with its neighbour (Damerau-Levenshtein distance 1): most
misspellings, and most names that wait for one. Finding a neighbour takes a few dozen look-ups, whatever the list's
length: every name of the top is kept under each of the texts that one left-out letter makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

# In shorter names one edit is a quarter of the name and says nothing: most of them are words of their own.
MIN_LENGTH = 4


class PopularNames:
    """Names in order of use, the most used first; folded forms, without repetition."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = tuple(dict.fromkeys(name.lower() for name in names))
        self._near: dict[int, dict[str, tuple[str, ...]]] = {}

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def is_among(self, folded: str, top: int) -> bool:
        """Whether a name is one of the first `top`."""
        rank = self._ranks.get(folded)
        return rank is not None and rank < top

    def lookalike(self, folded: str, top: int) -> str | None:
        """The most used of the first `top` names that is one edit away from this one; None if there is none."""
        if len(folded) < MIN_LENGTH:
            return None
        index = self._near.get(top)
        if index is None:
            index = self._near[top] = _neighbourhood(self.names[:top])
        found = {
            name
            for key in (folded, *_shorter(folded))
            for name in index.get(key, ())
            if name != folded and one_edit_apart(folded, name)
        }
        return min(found, key=self._ranks.__getitem__) if found else None


def _neighbourhood(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    index: dict[str, tuple[str, ...]] = {}
    for name in names:
        if len(name) < MIN_LENGTH:
            continue
        for key in {name, *_shorter(name)}:
            index[key] = (*index.get(key, ()), name)
    return index


def _shorter(text: str) -> Iterator[str]:
    for place in range(len(text)):
        yield text[:place] + text[place + 1 :]


def one_edit_apart(one: str, other: str) -> bool:
    """Whether one edit makes one text of the other."""
    if len(one) > len(other):
        one, other = other, one
    if len(other) - len(one) > 1 or one == other:
        return False
    at = 0
    while at < len(one) and one[at] == other[at]:
        at += 1
    if len(one) < len(other):
        return one[at:] == other[at + 1 :]
    changed = one[at + 1 :] == other[at + 1 :]
    swapped = one[at : at + 2] == other[at : at + 2][::-1] and one[at + 2 :] == other[at + 2 :]
    return changed or swapped
