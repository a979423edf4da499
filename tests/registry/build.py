"""Packages made in memory from a few words: wheels, source distributions, npm tarballs. Deterministic.

    wheel("good", "1.0", requires=["other>=1"], files={"good/__init__.py": "X = 1\n"})
    wheel("escape", "1.0", extra=[Entry("../../out.py", b"x")])          # members no tool would make
    sdist("old", "1.0", {"setup.py": "..."})
    npm_tarball({"name": "@scope/x", "version": "1.0.0"}, {"index.js": "module.exports = 1"})

What is hostile is made of the same parts: an `Entry` may be a link, a device, or have any path, and metadata may say
what is not so. `Markers` are the traces of code that ran. The packages of the tests by name are in `cast.py`.

Owns: the formats of archives. Must not: know an index.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import io
import json
import os
import re
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

type Files = Mapping[str, str | bytes]
type Kind = Literal["file", "directory", "symlink", "hardlink", "device", "fifo"]

ZEROS = bytes(16 << 20)  # what bombs are full of: one object, so that its digest and its compressed form are made once
_TAR_KINDS = {
    "file": tarfile.REGTYPE,
    "directory": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
    "fifo": tarfile.FIFOTYPE,
}
_DOS_DATE = (2020 - 1980) << 9 | 1 << 5 | 1
_UTF8_NAME = 0x800
_DEFLATED = 8


@dataclass(frozen=True)
class Entry:
    """One member of an archive, of any kind, with any path. `target` is where a link leads."""

    path: str
    data: bytes = b""
    kind: Kind = "file"
    target: str = ""
    mode: int = 0o644


@dataclass(frozen=True)
class Artifact:
    """One file of a Python release. `metadata` is the wheel's own `METADATA`; a source distribution has none."""

    name: str
    version: str
    filename: str
    data: bytes
    metadata: bytes | None = None
    requires_python: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def project_name(name: str) -> str:
    """PEP 503's normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def module_name(name: str) -> str:
    return project_name(name).replace("-", "_")


def wheel(
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    requires_python: str | None = None,
    files: Files | None = None,
    extra: Sequence[Entry] = (),
    entry_points: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
    says_name: str | None = None,
    says_version: str | None = None,
) -> Artifact:
    """A wheel. Without `files` it has one module of the project's name, whose `VERSION` is the version.

    `entry_points` are console scripts: `{"tool": "module:function"}`. `says_name` and `says_version` are what its
    METADATA says where that is not what its file name says. `extra` members are in its RECORD like all others.
    """
    module = module_name(name)
    info = f"{module}-{version}.dist-info"
    metadata = _metadata(says_name or name, says_version or version, requires, requires_python)
    content = files or {f"{module}/__init__.py": _says(version)}
    entries = [
        Entry(path, _bytes(text), mode=0o755 if ".data/scripts/" in path else 0o644) for path, text in content.items()
    ]
    entries += extra
    entries.append(Entry(f"{info}/METADATA", metadata))
    pure = "true" if tag.endswith("-none-any") else "false"
    about = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    entries.append(Entry(f"{info}/WHEEL", about.encode()))
    if entry_points:
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        entries.append(Entry(f"{info}/entry_points.txt", f"[console_scripts]\n{lines}".encode()))
    rows = [f"{_csv(one.path)},sha256={_record_digest(_Same(one.data))},{len(one.data)}" for one in entries]
    record = "\n".join([*rows, f"{info}/RECORD,,", ""])
    entries.append(Entry(f"{info}/RECORD", record.encode()))
    return Artifact(name, version, f"{module}-{version}-{tag}.whl", zip_archive(entries), metadata, requires_python)


def sdist(name: str, version: str, files: Files, *, extra: Sequence[Entry] = ()) -> Artifact:
    """A source distribution with these files beside its PKG-INFO. Whoever builds it runs what they say."""
    root = f"{module_name(name)}-{version}"
    entries = [Entry(f"{root}/PKG-INFO", _metadata(name, version, (), None))]
    entries += [Entry(f"{root}/{path}", _bytes(text)) for path, text in files.items()]
    return Artifact(name, version, f"{root}.tar.gz", tar_archive([*entries, *extra]))


def npm_tarball(manifest: Mapping[str, Any], files: Files | None = None, *, extra: Sequence[Entry] = ()) -> bytes:
    """An npm package. `files` lie under `package/`; the paths of `extra` are as they are."""
    content: dict[str, str | bytes] = {"package.json": json.dumps(manifest, indent=1)}
    content |= files if files is not None else {"index.js": f"module.exports = {json.dumps(manifest['version'])}\n"}
    return tar_archive([*(Entry(f"package/{path}", _bytes(text)) for path, text in content.items()), *extra])


def zip_archive(entries: Iterable[Entry]) -> bytes:
    """A zip file with exactly these members, in this order. Paths are neither checked nor changed."""
    body, directory, count = bytearray(), bytearray(), 0
    for entry in entries:
        if entry.kind not in {"file", "symlink", "directory"}:
            raise ValueError(f"a zip file has no `{entry.kind}`")
        kind = {"symlink": stat.S_IFLNK, "directory": stat.S_IFDIR}.get(entry.kind, stat.S_IFREG)
        data = entry.target.encode() if entry.kind == "symlink" else entry.data
        checksum, packed = _deflated(_Same(data))
        path = entry.path.encode()
        # version, flags, method, time, date, CRC, sizes, lengths of name and extra field: as in both kinds of header
        common = struct.pack(
            "<HHHHHIIIHH", 20, _UTF8_NAME, _DEFLATED, 0, _DOS_DATE, checksum, len(packed), len(data), len(path), 0
        )
        made_by = 3 << 8 | 20  # Unix, so that the mode is read
        mode = (kind | entry.mode) << 16
        directory += b"PK\1\2" + struct.pack("<H", made_by) + common
        directory += struct.pack("<HHHII", 0, 0, 0, mode, len(body)) + path
        body += b"PK\3\4" + common + path + packed
        count += 1
    shown = min(count, 0xFFFF)
    end = b""
    if count > 0xFFFF:  # zip64: the count does not fit, the sizes do
        end = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(directory), len(body))
        end += b"PK\6\7" + struct.pack("<IQI", 0, len(body) + len(directory), 1)
    end += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, shown, shown, len(directory), len(body), 0)
    return bytes(body + directory) + end


def tar_archive(entries: Iterable[Entry]) -> bytes:
    """A gzipped tar file with exactly these members, in this order. Paths are neither checked nor changed."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            member = _tar_member(entry, len(entry.data))
            archive.addfile(member, io.BytesIO(entry.data) if entry.kind == "file" else None)
    return gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)


def tar_bomb(entries: Iterable[Entry], path: str, zeros: int) -> bytes:
    """A tar file with these members and one of `zeros` times 16 MiB. A gzip file may be many, one after another."""
    head = io.BytesIO()
    with tarfile.open(fileobj=head, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            archive.addfile(_tar_member(entry, len(entry.data)), io.BytesIO(entry.data))
        start = head.tell()
    bomb = _tar_member(Entry(path), zeros * len(ZEROS)).tobuf(tarfile.PAX_FORMAT)
    pieces = [head.getvalue()[:start] + bomb, *([ZEROS] * zeros), bytes(tarfile.BLOCKSIZE * 2)]
    return b"".join(_gzipped(_Same(piece)) for piece in pieces)


@dataclass(frozen=True)
class Markers:
    """Traces that a package's code leaves when it runs: files named `RAN-<nonce>-<what>`, and that name on stderr.

    Code tries every place that it may be able to write: `directory`, its home, its TMPDIR or /tmp, and where it is.
    So a test looks in the directory (`ran`), at what was printed, and for `name(what)` below whatever was published.
    """

    directory: Path
    nonce: str

    def name(self, what: str) -> str:
        return f"RAN-{self.nonce}-{what}"

    def ran(self, what: str) -> bool:
        """The code has run where it could reach this file system."""
        return (self.directory / self.name(what)).exists()

    def forget(self) -> None:
        for path in self.directory.iterdir():
            path.unlink()

    def below(self, root: Path) -> list[Path]:
        """Every marker under a directory, of whatever package."""
        return sorted(
            Path(place, name)
            for place, directories, names in os.walk(root)
            for name in [*directories, *names]
            if name.startswith(f"RAN-{self.nonce}-")
        )

    def python(self, what: str) -> str:
        """One line of Python, which can stand in a `.pth` file too."""
        code = (
            "import os, sys\n"
            f"for place in ({str(self.directory)!r}, os.environ.get('HOME'), os.environ.get('TMPDIR', '/tmp'), '.'):\n"
            f"    try: open(os.path.join(place, {self.name(what)!r}), 'a').close()\n"
            "    except Exception: pass\n"
            f"print({self.name(what)!r}, file=sys.stderr)\n"
        )
        return f"import builtins; exec({code!r})\n"

    def node(self, what: str) -> str:
        """A script for Node, as CommonJS."""
        places = f"{json.dumps(str(self.directory))}, process.env.HOME, process.env.TMPDIR || '/tmp', '.'"
        return (
            f"for (const place of [{places}]) {{\n"
            f"  try {{ require('fs').writeFileSync(place + '/' + {json.dumps(self.name(what))}, '') }} catch {{}}\n"
            "}\n"
            f"console.error({json.dumps(self.name(what))})\n"
        )


class _Same:
    """Bytes as a key of a cache: equal when they are the same object, since to hash 16 MiB each time is not free."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.data is self.data

    def __hash__(self) -> int:
        return id(self.data)


@functools.lru_cache(maxsize=8)
def _deflated(one: _Same) -> tuple[int, bytes]:
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return zlib.crc32(one.data), packer.compress(one.data) + packer.flush()


@functools.lru_cache(maxsize=8)
def _record_digest(one: _Same) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(one.data).digest()).rstrip(b"=").decode()


@functools.lru_cache(maxsize=8)
def _gzipped(one: _Same) -> bytes:
    return gzip.compress(one.data, compresslevel=6, mtime=0)


def _tar_member(entry: Entry, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(entry.path)
    member.type, member.mode, member.linkname = _TAR_KINDS[entry.kind], entry.mode, entry.target
    if entry.kind == "file":
        member.size = size
    if entry.kind == "device":
        member.devmajor, member.devminor = 1, 3  # /dev/null
    return member


def _metadata(name: str, version: str, requires: Sequence[str], requires_python: str | None) -> bytes:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Python: {requires_python}"] if requires_python else []
    extras = {found for one in requires for found in re.findall(r"extra == '([^']+)'", one)}
    lines += [f"Provides-Extra: {extra}" for extra in sorted(extras)]
    return "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), ""]).encode()


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _says(version: str) -> str:
    return f"VERSION = {version!r}\n"


def _csv(path: str) -> str:
    return f'"{path}"' if "," in path else path
