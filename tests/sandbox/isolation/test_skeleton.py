"""The root directory of every sandbox, before anything is mounted over it."""

from __future__ import annotations

import marshal
import stat
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

from sandbox.isolation import skeleton
from sandbox.isolation.plan import INIT

PEM = "-----BEGIN CERTIFICATE-----\nMIIBours\n-----END CERTIFICATE-----"


def test_it_has_every_mount_point_and_a_small_etc(tmp_path: Path) -> None:
    """And nothing that says who the host is."""
    content = skeleton.gather(PEM)
    skeleton.write(content, tmp_path)
    for name in ("usr", "proc", "dev", "tmp", "workspace", "opt/python", "opt/packages"):
        assert list((tmp_path / name).iterdir()) == []
    assert (tmp_path / "etc/resolv.conf").read_text().splitlines()[0] == "nameserver 127.0.0.1"
    assert {line.split(":")[0] for line in (tmp_path / "etc/passwd").read_text().splitlines()} == {"sandbox", "nobody"}
    assert not {"shadow", "machine-id", "fstab", "ssh"} & {path.name for path in (tmp_path / "etc").iterdir()}
    assert (tmp_path / "etc/hostname").read_text() == "sandbox\n"


def test_everyone_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    """The launcher is another user than the one who wrote it."""
    skeleton.write(skeleton.gather(None), tmp_path)
    for path in tmp_path.rglob("*"):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o755 if path.is_dir() or path.parent == tmp_path / "run/python" else 0o644), path


def test_our_authority_is_added_to_the_public_roots(tmp_path: Path) -> None:
    """At the end of the bundle, once, and alone in a file of its own."""
    content = skeleton.gather(PEM)
    bundle = content.files["etc/ssl/certs/ca-certificates.crt"].decode()
    assert bundle.endswith(PEM + "\n")
    assert bundle.count("MIIBours") == 1
    assert bundle.count("BEGIN CERTIFICATE") > 1
    assert content.files["etc/ssl/certs/sluicegate-ca.pem"].decode() == PEM + "\n"


def test_pid_1_is_bytecode_of_this_interpreter_that_is_never_checked_against_a_source() -> None:
    """Its file name is that in the sandbox, so no message names the host's."""
    data = skeleton.gather(None).files[INIT[1:]]
    assert data[:4] == MAGIC_NUMBER
    assert int.from_bytes(data[4:8], "little") == 0b01
    code = marshal.loads(data[16:])
    assert isinstance(code, CodeType)
    assert code.co_filename == "/run/init.py"
