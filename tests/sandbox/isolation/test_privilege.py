"""Who a launcher becomes, and what it can show."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.isolation.privilege import choose_uid

ALL = "         0          0 4294967295\n"


@given(st.integers(1, 1 << 22))
def test_the_uid_is_outside_every_range_that_is_given_out(pid: int) -> None:
    """Above systemd's container range, below its reserved end, and each launcher's own."""
    assert 0x7000_0000 < choose_uid(pid, ALL) <= 0x7FFF_FFFF
    assert choose_uid(pid, ALL) != choose_uid(pid + 1, ALL)


@pytest.mark.parametrize(
    ("uid_map", "uid"),
    [("0 100000 65536\n", 65535), ("0 0 1\n1 100000 1000\n", 1000)],
)
def test_in_a_user_namespace_without_that_uid_it_is_the_highest(uid_map: str, uid: int) -> None:
    """As in a container with remapped ids."""
    assert choose_uid(4711, uid_map) == uid


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes a private root directory")
def test_a_private_root_shows_what_was_added_and_nothing_else(tmp_path: os.PathLike[str]) -> None:
    """In a process of its own: the host's mounts are as before."""
    import subprocess
    import sys

    code = (
        "import os, sys\n"
        "from sandbox.isolation.privilege import PrivateRoot\n"
        "source = sys.argv[1]\nos.mkdir(source + '/in')\nopen(source + '/in/file', 'w').write('seen')\n"
        "root = PrivateRoot()\nroot.add('/proc', '/proc')\nroot.add(source, '/sources/0')\nroot.build()\nroot.enter()\n"
        "print(sorted(n for n in os.listdir('/') if not os.path.islink('/' + n)))\n"
        "print(open(root.locate(source + '/in') + '/file').read(), root.locate(source + '/../' + os.path.basename(source)))\n"
        "try: root.locate('/etc/passwd')\nexcept FileNotFoundError as e: print(e.filename)\n"
        "print(sum(' /tmp' in line for line in open('/proc/self/mounts')))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert answer.stderr == ""
    assert answer.stdout.splitlines() == [
        "['proc', 'skeleton', 'sources', 'tmp']",
        "seen /sources/0",
        "/etc/passwd",
        "0",
    ]
