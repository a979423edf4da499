"""A memory file is closed on exec, can be written until it is sealed, and by nobody after that."""

from __future__ import annotations

import fcntl
import os

import pytest

from proxy import memory_file


def test_it_is_written_then_sealed_and_stays_as_it_is() -> None:
    with open(memory_file.create("test"), "w+b", buffering=0) as file:
        assert fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        file.write(b"before")
        memory_file.seal(file.fileno())
        for change in (lambda: os.pwrite(file.fileno(), b"x", 0), lambda: file.truncate(0), lambda: file.truncate(99)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):  # not even the seals
            memory_file.seal(file.fileno())
        file.seek(0)
        assert file.read() == b"before"


def test_what_cannot_be_made_or_sealed_is_said() -> None:
    with pytest.raises(OSError, match="memfd_create"):
        memory_file.create("n" * 300)
    with open(os.devnull, "rb") as file, pytest.raises(PermissionError):
        memory_file.seal(file.fileno())
