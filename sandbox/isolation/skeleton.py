"""The skeleton: the read-only root directory of every sandbox of a launcher: its /etc, pid 1's bytecode, Node's gate.

Owns: what is in it. Must not: mount anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from proxy.roots import host_ca_bundle
from sandbox.isolation import init
from sandbox.isolation.plan import (
    GATE,
    INIT,
    NODE_COMMANDS,
    NODE_MODULES,
    PACKAGES,
    PYTHON_COMMANDS,
    SANDBOX_GID,
    SANDBOX_UID,
    UV,
    WORKSPACE,
    ReadOnly,
)

_MOUNT_POINTS = (
    "usr", "proc", "dev", "tmp", "run", "opt/python", "opt/node", NODE_MODULES[1:], PACKAGES[1:], WORKSPACE[1:],
)  # fmt: skip
SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr where that is merged
_COPIED = ("ld.so.cache", "protocols", "services", "mime.types", "os-release")  # say nothing of the host but its kind

# The wheel that Node.js comes in has copies where Node.js has links, and the copies of npm do not find their package.
_NODE_LINKS = {
    "node": "/opt/node/bin/node",
    "npm": "/opt/node/lib/node_modules/npm/bin/npm-cli.js",
    "npx": "/opt/node/lib/node_modules/npm/bin/npx-cli.js",
}

# An interpreter's own `pip` names the place where it was installed, which is another one in here.
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_PIP = f'#!/bin/sh\nexec python{_PYTHON} -m pip "$@"\n'

_ETC = {
    "passwd": f"sandbox:x:{SANDBOX_UID}:{SANDBOX_GID}:sandbox:{WORKSPACE}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"sandbox:x:{SANDBOX_GID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:2 attempts:2\n",
    "fonts/fonts.conf": '<?xml version="1.0"?>\n<!DOCTYPE fontconfig SYSTEM "fonts.dtd">\n'
    "<fontconfig><dir>/usr/share/fonts</dir><cachedir>/tmp/fontconfig</cachedir></fontconfig>\n",
    "gai.conf": "precedence ::ffff:0:0/96 100\n",  # IPv4 first: names are answered with synthetic IPv4 addresses
}


@dataclass(frozen=True, slots=True)
class Skeleton:
    """All that is in it, by path relative to its root, and the mounts of the system that go over it."""

    directories: tuple[str, ...]
    files: dict[str, bytes]
    links: dict[str, str]
    mounts: tuple[ReadOnly, ...]


def gather(authority_certificate: str | None) -> Skeleton:
    """Read from the host what the skeleton has of it.

    `authority_certificate` is PEM text, added to the host's public roots. Raises `OSError`.
    """
    own = (authority_certificate or "").strip() + "\n"
    files = {f"etc/{name}": text.encode() for name, text in _ETC.items()}
    files["etc/ssl/certs/ca-certificates.crt"] = (_public_roots() + own).encode()
    files["etc/ssl/certs/sluicegate-ca.pem"] = own.encode()
    files[INIT.lstrip("/")] = _init_bytecode()
    files[UV.lstrip("/")] = b""  # a mount point
    files[GATE.lstrip("/")] = Path(__file__).with_name("gate.cjs").read_bytes()
    files |= {f"{PYTHON_COMMANDS.lstrip('/')}/{name}": _PIP.encode() for name in ("pip", "pip3", f"pip{_PYTHON}")}
    links = {
        "etc/ssl/cert.pem": "certs/ca-certificates.crt",
        "etc/pki/tls/certs/ca-bundle.crt": "/etc/ssl/certs/ca-certificates.crt",
    }
    links |= {f"{NODE_COMMANDS.lstrip('/')}/{name}": target for name, target in _NODE_LINKS.items()}
    for name in _COPIED:
        with contextlib.suppress(OSError):
            files[f"etc/{name}"] = Path("/etc", name).read_bytes()
    with contextlib.suppress(OSError):  # links from one place in /usr to another
        for entry in os.scandir("/etc/alternatives"):
            if entry.is_symlink():
                links[f"etc/alternatives/{entry.name}"] = os.readlink(entry.path)
    directories, mounts = list(_MOUNT_POINTS), [ReadOnly("/usr", "/usr")]
    for name in SYSTEM_DIRECTORIES:
        host = Path("/", name)
        if host.is_symlink():
            links[name] = os.readlink(host)
        elif host.is_dir():
            directories.append(name)
            mounts.append(ReadOnly(str(host), str(host)))
    return Skeleton(tuple(directories), files, links, tuple(mounts))


def write(skeleton: Skeleton, root: Path) -> None:
    """Fill the empty directory `root`, readable for all. Raises `OSError`."""
    for name in (*skeleton.directories, *{os.path.dirname(path) for path in (*skeleton.files, *skeleton.links)}):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, data in skeleton.files.items():
        (root / name).write_bytes(data)
        (root / name).chmod(0o755 if data.startswith(b"#!") else 0o644)
    for name, target in skeleton.links.items():
        (root / name).symlink_to(target)
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)  # noqa: S103 - for the uid that the launcher becomes


def _public_roots() -> str:
    bundle = host_ca_bundle()
    return "" if bundle is None else bundle.read_text(encoding="ascii", errors="replace").rstrip() + "\n"


def _init_bytecode() -> bytes:
    """Pid 1's program in the form of an unchecked hash-based `.pyc`: never compiled or compared at a start."""
    code = compile(Path(init.__file__).read_bytes(), INIT.removesuffix("c"), "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)
