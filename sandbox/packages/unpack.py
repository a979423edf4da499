"""Wheels and npm tarballs, read by our own code with every path and size checked before anything is made of it.

Runs inside the preparation sandbox: archives are hostile, and what parses them has no network that matters, no
privilege, and nothing to take. Nothing is written here: members are handed out one after the other, in order.
Owns: what of an archive becomes a file. Must not: import anything but the standard library and `paths`, run anything
that an archive holds, or follow a link.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, cast

from sandbox.packages.paths import PathSet, UnsafePath, safe_path

_RATIO_SLACK = 16 * 1024 * 1024  # a small archive may well be mostly zeros
_MAX_METADATA = 4 * 1024 * 1024
_TAR_OVERHEAD = 4 * 1024  # per file: headers and padding
_MAX_HEADERS = 1024 * 1024  # of one file of a tarball: its long name, its attributes; `tarfile` keeps them in memory
_ZIP_ENTRY = 256  # of a wheel's directory, per file, of which most take 150
_MAX_TAIL = 128 * 1024  # after a wheel's directory: its end, and a comment
_UNREADABLE = (
    zipfile.BadZipFile, tarfile.TarError, NotImplementedError, ValueError, EOFError, OSError, zlib.error,
    RecursionError,
)  # fmt: skip
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

# The values of `PackageReason`; this runs where `proxy` is not.
UNSAFE = "unsafe_archive_path"
MISMATCH = "metadata_mismatch"
TOO_LARGE = "closure_too_large"


class RefusedArchive(Exception):
    """The archive is not unpacked. `reason` is the value of a `PackageReason`; the message says what is wrong."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one archive may become. `ratio` bounds the expanded size by that of the archive."""

    files: int = 60_000
    bytes: int = 1_500_000_000
    ratio: int = 200


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file. `read(n)` gives its next bytes, and must be drained before the next member is taken."""

    path: str
    size: int
    executable: bool
    read: Callable[[int], bytes]


def _guarded(path: str, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """`read`, whose errors are the archive's fault."""

    def guarded(size: int) -> bytes:
        try:
            return read(size)
        except _UNREADABLE as error:
            raise RefusedArchive(UNSAFE, f"{shown(path)}: it cannot be unpacked: {error}") from error

    return guarded


class _Account:
    """Paths and sizes of what was handed out so far."""

    def __init__(self, bounds: Bounds, archive_bytes: int) -> None:
        self._bounds = bounds
        self._paths = PathSet()
        self._files = 0
        self._bytes = 0
        self.limit = min(bounds.bytes, bounds.ratio * archive_bytes + _RATIO_SLACK)

    def admit(self, path: str, size: int) -> None:
        self._files += 1
        self._bytes += size
        if self._files > self._bounds.files:
            raise RefusedArchive(TOO_LARGE, f"it has more than {self._bounds.files} files")
        if size < 0 or self._bytes > self.limit:
            raise RefusedArchive(TOO_LARGE, f"it expands to more than {self.limit} bytes")
        try:
            self._paths.add(safe_path(path))
        except UnsafePath as error:
            raise RefusedArchive(UNSAFE, f"{shown(path)}: {error}") from error


def shown(text: str) -> str:
    """Hostile text for a message: short, ASCII, in one line."""
    return f"`{ascii(text)[1:-1][:120]}`"


def size_of(file: IO[bytes]) -> int:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


# Wheels


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that was opened. `name` and `version` are what its METADATA says."""

    name: str
    version: str
    members: Iterator[Member]


class _Directory:
    """A file of which no one read takes more than a limit: `zipfile` reads an archive's directory by one."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._limit = source, limit
        self.seek, self.tell, self.seekable = source.seek, source.tell, source.seekable

    def read(self, size: int = -1) -> bytes:
        if size > self._limit:
            raise RefusedArchive(TOO_LARGE, f"its directory has {size} bytes, where {self._limit} are taken")
        data = self._source.read(size if size >= 0 else self._limit + 1)
        if len(data) > self._limit:
            raise RefusedArchive(TOO_LARGE, f"its directory has more than {self._limit} bytes")
        return data


def open_wheel(file: IO[bytes], bounds: Bounds) -> Wheel:
    """Check the whole directory of a wheel, and hand out its files where they would be installed.

    `purelib`, `platlib` and `data` of a `.data` directory go to the root, `scripts` to `bin`, headers nowhere: as
    installers do for a target directory. Bytecode that a wheel brings is left out, since it need not be of the source
    beside it. Raises `RefusedArchive`, here and while members are taken.
    """
    try:
        archive = zipfile.ZipFile(cast("IO[bytes]", _Directory(file, bounds.files * _ZIP_ENTRY + _MAX_TAIL)))
        entries = [entry for entry in archive.infolist() if not _is_directory(entry)]
        account = _Account(bounds, size_of(file))
        for entry in entries:
            _check_entry(entry)
            account.admit(entry.filename, entry.file_size)
        stem = _dist_info([entry.filename for entry in entries])
        placed = _placed(entries, stem, bounds)
        name, version = _identity(_read_small(archive, f"{stem}.dist-info/METADATA"))
    except _UNREADABLE as error:
        raise RefusedArchive(UNSAFE, f"it is not a readable wheel: {error}") from error
    return Wheel(name, version, _wheel_members(archive, placed))


def _is_directory(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith("/") and entry.file_size == 0 and _file_type(entry) in (0, 0o040000)


def _file_type(entry: zipfile.ZipInfo) -> int:
    """The S_IFMT bits of a Unix entry; 0 where another system made it, or where it has none."""
    return (entry.external_attr >> 16) & 0o170000


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = shown(entry.filename)
    if entry.orig_filename != entry.filename:
        raise RefusedArchive(UNSAFE, f"{shown(entry.orig_filename)}: it has a NUL or another separator")
    if _file_type(entry) not in (0, 0o100000):
        raise RefusedArchive(UNSAFE, f"{name}: it is a link or a device, not a file")
    if entry.flag_bits & 0x1:
        raise RefusedArchive(UNSAFE, f"{name}: it is encrypted")
    if entry.compress_type not in _PLAIN:
        raise RefusedArchive(UNSAFE, f"{name}: it is compressed in a way that wheels don't use")


def _dist_info(paths: list[str]) -> str:
    tops = {path.partition("/")[0] for path in paths if "/" in path}
    stems = {top.removesuffix(".dist-info") for top in tops if top.endswith(".dist-info")}
    if len(stems) != 1:
        raise RefusedArchive(MISMATCH, f"it has {len(stems)} `.dist-info` directories, where a wheel has one")
    return stems.pop()


def _placed(entries: list[zipfile.ZipInfo], stem: str, bounds: Bounds) -> list[tuple[str, zipfile.ZipInfo]]:
    """Where each entry is installed; checked again, since two places of the archive may be one there."""
    account = _Account(bounds, bounds.bytes)
    placed = []
    for entry in entries:
        top, _, rest = entry.filename.partition("/")
        path: str | None = entry.filename
        if top == f"{stem}.data":
            scheme, _, inner = rest.partition("/")
            roots = {"purelib": inner, "platlib": inner, "data": inner, "scripts": f"bin/{inner}", "headers": None}
            if scheme not in roots or not inner:
                raise RefusedArchive(UNSAFE, f"{shown(entry.filename)}: `.data` has no such part")
            path = roots[scheme]
        elif top.endswith(".data") and rest:
            raise RefusedArchive(MISMATCH, f"{shown(top)} is the data of another wheel")
        if path is None or "__pycache__" in path.split("/")[:-1]:
            continue
        account.admit(path, entry.file_size)
        placed.append((path, entry))
    return placed


def _read_small(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        entry = archive.getinfo(name)
    except KeyError:
        raise RefusedArchive(MISMATCH, f"it has no {shown(name)}") from None
    if entry.file_size > _MAX_METADATA:
        raise RefusedArchive(MISMATCH, "its METADATA is too large")
    return archive.read(entry)


def _identity(metadata: bytes) -> tuple[str, str]:
    """`Name` and `Version`, each there once (core metadata, header fields before the first empty line)."""
    found: dict[str, list[str]] = {"name": [], "version": []}
    for line in metadata.decode("utf-8", "replace").replace("\r\n", "\n").split("\n"):
        if not line:
            break
        key, colon, value = line.partition(":")
        if colon and key.lower() in found:
            found[key.lower()].append(value.strip())
    if any(len(values) != 1 for values in found.values()):
        raise RefusedArchive(MISMATCH, "its METADATA has not one name and one version")
    return found["name"][0], found["version"][0]


def _wheel_members(archive: zipfile.ZipFile, placed: list[tuple[str, zipfile.ZipInfo]]) -> Iterator[Member]:
    for path, entry in placed:
        try:
            with archive.open(entry) as source:
                executable = bool((entry.external_attr >> 16) & 0o111)
                yield Member(path, entry.file_size, executable, _guarded(path, source.read))
        except _UNREADABLE as error:
            raise RefusedArchive(UNSAFE, f"{shown(path)}: it cannot be unpacked: {error}") from error


# npm's tarballs


class _Bounded:
    """The expanded bytes of a gzip file, up to a limit; and up to the next file's start, which is within another."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._left, self._limit = source, limit, limit
        self._until_next = 0
        self.expect(0)

    def expect(self, size: int) -> None:
        """What comes is the content of a file, of this size, and the headers of the next one."""
        self._until_next = size + _MAX_HEADERS

    def read(self, size: int) -> bytes:
        data = self._source.read(min(size, 1 << 20))
        self._left -= len(data)
        if self._left < 0:
            raise RefusedArchive(TOO_LARGE, f"it expands to more than {self._limit} bytes")
        self._until_next -= len(data)
        if self._until_next < 0:
            raise RefusedArchive(TOO_LARGE, f"a header of it has more than {_MAX_HEADERS} bytes")
        return data


def open_tarball(file: IO[bytes], bounds: Bounds) -> Iterator[Member]:
    """Check all entries of an npm tarball, and hand out its files.

    They lie below its one top directory, whatever that is called, as npm has it. Raises `RefusedArchive`, here and
    while members are taken.
    """
    account = _Account(bounds, size_of(file))
    limit = account.limit + bounds.files * _TAR_OVERHEAD
    for entry, path in _entries(file, limit, None):
        account.admit(path, entry.size)
    return _tarball_members(file, limit)


def _tarball_members(file: IO[bytes], limit: int) -> Iterator[Member]:
    sources: list[IO[bytes]] = []
    for entry, path in _entries(file, limit, sources):
        yield Member(path, entry.size, bool(entry.mode & 0o111), _guarded(path, sources.pop().read))


def _entries(file: IO[bytes], limit: int, sources: list[IO[bytes]] | None) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """The files of a tarball, from its start on, each with its path; `sources` gets the reader of each, if given."""
    file.seek(0)
    try:
        plain = _Bounded(cast("IO[bytes]", gzip.GzipFile(fileobj=file)), limit)
        with tarfile.open(fileobj=cast("IO[bytes]", plain), mode="r|", errorlevel=2) as archive:
            for entry in archive:
                plain.expect(entry.size if entry.isreg() else 0)
                if entry.isdir():
                    continue
                if not entry.isreg() or entry.issparse():
                    raise RefusedArchive(UNSAFE, f"{shown(entry.name)}: it is a link or a device, not a file")
                top, _, path = entry.name.removeprefix("./").partition("/")
                if entry.name.startswith("/") or top in ("", "..") or not path:
                    raise RefusedArchive(UNSAFE, f"{shown(entry.name)}: it does not lie in the archive's directory")
                if sources is not None:
                    source = archive.extractfile(entry)
                    assert source is not None  # a regular file's
                    sources.append(source)
                yield entry, path
    except _UNREADABLE as error:
        raise RefusedArchive(UNSAFE, f"it is not a readable tarball: {error}") from error
