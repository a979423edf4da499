"""Sluicegate runs on Pythons that were built elsewhere, for an older C library than the host's.

Such builds (python-build-standalone, as uv installs it: built for glibc 2.17) lack names of the standard library that
others have. A use of one fails at import, or when it is reached.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
MODULES = {"os", "posix", "fcntl", "socket", "select", "signal", "_signal", "mmap", "time"}
# Of a build of 3.12 against one on Debian 12. `hasattr` tells no more: which names there are is settled at the build.
MISSING = frozenset(
    """
    CLONE_NEWCGROUP CLONE_NEWTIME GRND_NONBLOCK GRND_RANDOM P_PIDFD copy_file_range getrandom memfd_create pidfd_open
    timerfd_create timerfd_settime timerfd_gettime
    MFD_ALLOW_SEALING MFD_CLOEXEC MFD_HUGETLB RWF_APPEND RWF_DSYNC RWF_HIPRI RWF_NOWAIT RWF_SYNC
    FICLONE FICLONERANGE F_ADD_SEALS F_GET_SEALS F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW
    F_SEAL_GROW F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_WRITE F_SEAL_FUTURE_WRITE
    AF_QIPCRTR AF_VSOCK IPPROTO_MPTCP IPV6_DONTFRAG IPV6_PATHMTU IPV6_RECVPATHMTU IP_BIND_ADDRESS_NO_PORT
    SO_INCOMING_CPU TCP_CC_INFO TCP_FASTOPEN_CONNECT TCP_INQ TCP_NOTSENT_LOWAT TCP_SAVED_SYN TCP_SAVE_SYN TCP_ULP
    VMADDR_CID_ANY VMADDR_CID_HOST EPOLLEXCLUSIVE pidfd_send_signal MADV_FREE CLOCK_TAI
    """.split()
)


def uses(text: str) -> Iterator[tuple[int, str]]:
    """Names of these modules that a text uses, by line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from ((node.lineno, alias.name) for alias in node.names)


@pytest.mark.parametrize("package", ["proxy", "sandbox", "tests", "benchmarks", "tools"])
def test_no_name_is_used_that_such_a_build_lacks(package: str) -> None:
    found = [
        f"{path.relative_to(TOP)}:{line}: {name}"
        for path in sorted((TOP / package).rglob("*.py"))
        for line, name in uses(path.read_text())
        if name in MISSING
    ]
    assert found == []


def test_a_use_would_be_found() -> None:
    text = "import os\nfrom signal import pidfd_send_signal\ndef late() -> None:\n    os.memfd_create('x')\n"
    assert {(line, name) for line, name in uses(text) if name in MISSING} == {
        (2, "pidfd_send_signal"), (4, "memfd_create"),
    }  # fmt: skip
    used = {name for path in (TOP / "sandbox").rglob("*.py") for _, name in uses(path.read_text())}
    assert {"waitid", "posix_spawn", "fork"} <= used


def test_descriptors_are_not_closed_one_by_one_up_to_the_largest_number() -> None:
    """Without the C library's `close_range` a Python tries each, which takes minutes for a billion."""
    large = [
        f"{path.relative_to(TOP)}:{node.lineno}"
        for package in ("proxy", "sandbox")
        for path in sorted((TOP / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "closerange"
        if ast.unparse(node.args[1]) != "os.sysconf('SC_OPEN_MAX')"
    ]
    assert large == []
