"""The data that packages are judged by, read from files once: popular names, standard-library names, advisories.

Owns: these files' forms, and refusing what is none of them, with every fault at once. Must not: judge.

Lists of names have one name a line, the most used first, after a header of `# key: value` lines with the `date` and the
`source`. Advisories are a directory of OSV documents: `*.json`, and `*.zip` of such, at any depth.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO

from proxy.events import clean_text
from proxy.packages.advisories import Advisories, Document, build, read_document
from proxy.packages.judge import PolicyData
from proxy.packages.model import Ecosystem, InvalidName, parse_name
from proxy.packages.policy import PackagePolicy
from proxy.packages.popular import PopularNames

_DATA = Path(__file__).resolve().parent / "data"
_STDLIB = {Ecosystem.PYPI: "stdlib-python.txt", Ecosystem.NPM: "stdlib-javascript.txt"}
_MAX_LIST_BYTES = 16 * 2**20
_MAX_NAMES = 200_000
_MAX_DOCUMENT_BYTES = 8 * 2**20
_MAX_DOCUMENTS = 2_000_000
_MAX_FAULTS = 20


class InvalidData(Exception):
    """A file is not what it should be. `problems` has the faults, the first of them in full."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        shown = self.problems[:_MAX_FAULTS]
        more = len(self.problems) - len(shown)
        super().__init__("\n".join([*shown, *([f"… and {more} more"] if more else [])]))


@dataclass(frozen=True, slots=True)
class NameList:
    """A list of popular names, with what its header says."""

    names: tuple[str, ...]
    header: Mapping[str, str]


def shipped_list(ecosystem: Ecosystem) -> Path:
    """The list of popular names that came with the program."""
    return _DATA / f"popular-{ecosystem}.txt"


def load_policy_data(policy: PackagePolicy, now: datetime | None = None) -> PolicyData:
    """All that a policy is judged with. Raises `InvalidData`: without its data a policy can't be kept to."""
    popular = {eco: _popular(policy.similarity.list_files.get(eco, shipped_list(eco)), eco) for eco in Ecosystem}
    advisories, database = None, "none"
    if policy.advisories.db_dir is not None:
        advisories, database = load_advisories(policy.advisories.db_dir, now)
    parts = [hashlib.sha256("\n".join(popular[eco].names).encode()).hexdigest() for eco in Ecosystem]
    digest = hashlib.sha256(" ".join([*parts, database]).encode()).hexdigest()
    return PolicyData(popular, {eco: stdlib_names(eco) for eco in Ecosystem}, advisories, f"sha256:{digest}")


@cache
def stdlib_names(ecosystem: Ecosystem) -> frozenset[str]:
    """The top-level modules of the standard library of the ecosystem's language."""
    lines = (_DATA / _STDLIB[ecosystem]).read_text("ascii").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


# Names


def _popular(path: Path, ecosystem: Ecosystem) -> PopularNames:
    return _shipped(ecosystem) if path == shipped_list(ecosystem) else PopularNames(read_list(path, ecosystem).names)


@cache
def _shipped(ecosystem: Ecosystem) -> PopularNames:
    return PopularNames(read_list(shipped_list(ecosystem), ecosystem).names)


def read_list(path: Path, ecosystem: Ecosystem) -> NameList:
    """Read a list of popular names. Raises `InvalidData` with every line that is none."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_LIST_BYTES + 1)
    except OSError as error:
        raise InvalidData([f"{path}: it cannot be read: {_why(error)}"]) from error
    if len(content) > _MAX_LIST_BYTES:
        raise InvalidData([f"{path}: it is larger than {_MAX_LIST_BYTES // 2**20} MiB"])
    return parse_list(content.decode("utf-8", "replace"), ecosystem, str(path))


def parse_list(text: str, ecosystem: Ecosystem, file: str) -> NameList:
    """As `read_list`, of a text; `file` is how messages call it."""
    header: dict[str, str] = {}
    names: dict[str, None] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip("\r ")
        if line.startswith("#"):
            key, colon, value = line[1:].partition(":")
            if colon and not names:
                header.setdefault(key.strip(), value.strip())
        elif line:
            try:
                names[parse_name(ecosystem, line).normal] = None
            except InvalidName as error:
                problems.append(f"{file}:{number}: `{clean_text(line, 80)}` is no {ecosystem} name: {error}")
    if header.get("ecosystem", ecosystem) != ecosystem:
        problems.insert(0, f"{file}: it is a list of `{clean_text(header['ecosystem'], 40)}`, not of `{ecosystem}`")
    if not names and not problems:
        problems.append(f"{file}: there is no name in it\nhint: write one name a line, the most used first")
    if len(names) > _MAX_NAMES:
        problems.append(f"{file}: there are more than {_MAX_NAMES} names")
    if problems:
        raise InvalidData(problems)
    return NameList(tuple(names), header)


def list_text(ecosystem: Ecosystem, names: Iterable[str], *, date: str, source: str) -> str:
    """A list in the form that `read_list` reads."""
    head = [f"# ecosystem: {ecosystem}", f"# date: {date}", f"# source: {clean_text(source, 200)}"]
    return "\n".join([*head, *names]) + "\n"


# Advisories


def load_advisories(directory: Path, now: datetime | None = None) -> tuple[Advisories, str]:
    """The advisories of a directory, and a digest of it. Raises `InvalidData` for documents that are not OSV.

    The digest is over the names, sizes and times of the files: a refresh changes it.
    """
    if not directory.is_dir():
        raise InvalidData([f"{directory}: there is no such directory\nhint: unpack an OSV database there"])
    try:
        files = {path: path.stat() for path in advisory_files(directory)}
    except OSError as error:
        raise InvalidData([f"{error.filename or directory}: it cannot be read: {_why(error)}"]) from error
    if not files:
        raise InvalidData([f"{directory}: there are no OSV documents\nhint: put `*.json` or `*.zip` files there"])
    digest = hashlib.sha256()
    for path, state in files.items():
        digest.update(f"{path.relative_to(directory)} {state.st_size} {state.st_mtime_ns}\n".encode())
    problems: list[str] = []
    advisories = build(_documents(list(files), problems), now or datetime.now(UTC))
    if problems:
        raise InvalidData(problems)
    return advisories, digest.hexdigest()


def advisory_files(directory: Path) -> list[Path]:
    """What may be OSV documents, at any depth, behind links too. Raises `OSError`: none is passed over."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    seen: set[str] = set()
    for place, directories, names in os.walk(directory, onerror=fail, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # a circle of links
            directories.clear()
            continue
        seen.add(real)
        for path in (Path(place, name) for name in names):
            if path.suffix in (".json", ".zip"):
                found.append(path)
            elif path.is_symlink():
                path.stat()  # to a directory, it would be among those: what is it that cannot be had?
    return sorted(found)


def _documents(files: list[Path], problems: list[str]) -> Iterator[Document]:
    """Every document that is one; what is wrong with the others goes to `problems`."""
    count = 0
    for path in files:
        for where, content in _contents(path, problems):
            count += 1
            if count > _MAX_DOCUMENTS:
                problems.append(f"{where}: there are more than {_MAX_DOCUMENTS} documents")
                return
            document = _document(where, content, problems)
            if document is not None:
                yield document


def _contents(path: Path, problems: list[str]) -> Iterator[tuple[str, bytes]]:
    try:
        if path.suffix == ".json":
            with path.open("rb") as file:
                yield str(path), file.read(_MAX_DOCUMENT_BYTES + 1)
            return
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".json"):
                    with archive.open(member) as inside:
                        yield f"{path}!{clean_text(member.filename, 120)}", _read(inside)
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        problems.append(f"{path}: it cannot be read: {_why(error)}")


def _read(file: IO[bytes]) -> bytes:
    return file.read(_MAX_DOCUMENT_BYTES + 1)


def _document(where: str, content: bytes, problems: list[str]) -> Document | None:
    if len(content) > _MAX_DOCUMENT_BYTES:
        problems.append(f"{where}: it is larger than {_MAX_DOCUMENT_BYTES // 2**20} MiB")
        return None
    try:
        return read_document(json.loads(content))
    except (ValueError, RecursionError) as error:
        problems.append(f"{where}: it is no OSV document: {clean_text(str(error), 200)}")
        return None


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return clean_text(str(error), 200)
