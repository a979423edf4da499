"""What is made for private things is its owner's alone, all the way down."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from proxy.directories import make_private

TOP = Path(__file__).parents[2]


def test_every_directory_that_was_missing_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask; one that was there keeps its mode."""
    (tmp_path / "there").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        make_private(tmp_path / "there/a/b/c")
        make_private(tmp_path / "there/a/b/c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / "there" / name).stat().st_mode) for name in ("", "a", "a/b", "a/b/c")]
    assert modes[1:] == [0o700] * 3
    assert modes[0] == 0o755 & ~before


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "file/below")


def test_no_other_way_to_make_parents_is_given_a_mode() -> None:
    """`Path.mkdir` gives its `mode` to the last directory only."""
    lines = [
        f"{path.relative_to(TOP)}: {line.strip()}"
        for package in ("proxy", "sandbox")
        for path in (TOP / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if ".mkdir(" in line and "parents=True" in line and "mode=" in line and "`" not in line
    ]
    assert lines == []
