"""The store of snapshots: unpacked artifacts and the trees made of them, by their content, on one file system.

    artifacts/<key>/tree, artifact.json     one unpacked artifact, read-only
    snapshots/<id>/tree, manifest.json      hard links to artifacts' files, read-only; `tree` is what attempts mount
    requests/<key>.json                     what a set of specifiers was last resolved to
    tmp/<random>/                           what is being made, or removed: whoever does it holds a lock on it
    locks/                                  one file for each request, and `store` for the whole

Everything appears by a rename of a complete directory, and disappears by one: whoever is killed at any point leaves
entries of `tmp/` alone, which the next start removes. Who uses a snapshot holds a shared lock on its directory (a
lease), which ends with the process at the latest; removal needs the exclusive one, so it never takes one in use.

A file has one inode in all snapshots: nothing that runs hostile code may write here. Attempts see snapshots through
read-only mounts and, where the launcher was started as root, under a uid that owns nothing here.
Owns: the directory. Must not: know policies, registries or archives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from proxy.directories import make_private
from proxy.packages.model import Ecosystem
from sandbox.packages.manifest import Artifact, Contents, Manifest, RequestRecord
from sandbox.packages.scan import module_of

DEFAULT_BUDGET_BYTES = 10 * 10**9
_PARTS = ("artifacts", "snapshots", "requests", "tmp", "locks")
_RECORDS: dict[type[BaseModel], str] = {Contents: "artifact.json", Manifest: "manifest.json"}
_DIRECTORY_MODE = 0o555
_POLL_SECONDS = 0.05  # between looks at a lock that another process holds: flock has no way to wait and be cancelled
_NO_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP})


def store_directory(state_dir: Path) -> Path:
    """Where the store of a state directory lies."""
    return state_dir / "package-store"


class FileConflict(Exception):
    """Two packages have a file of the same path and of different content, or a module of the same name."""

    def __init__(self, path: str, artifact: Artifact, how: str = "another package's too, with other content") -> None:
        super().__init__(f"`{path}` of `{artifact.name}` is {how}")
        self.path, self.artifact = path, artifact


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """A snapshot as it stands in the store. `last_used_at` is when it was last leased."""

    id: str
    manifest: Manifest
    last_used_at: datetime
    in_use: bool


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, and what is left. Bytes are of artifacts, each counted once: snapshots are links to them."""

    snapshots: tuple[str, ...]
    artifacts: int
    freed_bytes: int
    left_bytes: int


class Lease:
    """A snapshot in use: it is not removed before this is closed."""

    def __init__(self, snapshot_id: str, manifest: Manifest, tree: Path, descriptor: int) -> None:
        self.id, self.manifest, self.tree = snapshot_id, manifest, tree
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store:
    """Opening it makes what is missing, and removes what the killed left. Raises `OSError`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_private(root)
        for part in _PARTS:
            (root / part).mkdir(exist_ok=True, mode=0o700)
        # Attempts' launcher mounts this one, under a uid that may own nothing here.
        (root / "snapshots").chmod(0o755)
        self._queues: dict[str, asyncio.Lock] = {}
        self.sweep()

    @property
    def snapshots(self) -> Path:
        """The directory that a launcher must be able to show."""
        return self.root / "snapshots"

    # What is being made

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty directory of this process's own. What is still in it at the end is removed."""
        path, lock = self._make_staging()
        try:
            yield path
        finally:
            _remove(path)
            os.close(lock)

    def _make_staging(self) -> tuple[Path, int]:
        while True:
            path = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
            with contextlib.suppress(FileNotFoundError, BlockingIOError):  # swept before it was locked
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    raise
                if _same(lock, path):
                    return path, lock
                os.close(lock)

    def sweep(self) -> None:
        """Remove what nobody holds any more."""
        for path in (self.root / "tmp").iterdir():
            with contextlib.suppress(OSError), _exclusive(path) as held:
                if held:
                    _remove(path)

    # Requests

    @contextlib.asynccontextmanager
    async def request_lock(self, key: str) -> AsyncIterator[None]:
        """For one preparation of a request at a time, on this host."""
        queue = self._queues.setdefault(key, asyncio.Lock())
        async with queue:
            path = self.root / "locks" / key
            while (descriptor := _try_lock_file(path)) is None:  # noqa: ASYNC110 - another process has no event of ours
                await asyncio.sleep(_POLL_SECONDS)
            try:
                yield
            finally:
                os.unlink(path)  # by the holder alone; whoever waits on the old inode notices (`_try_lock_file`)
                os.close(descriptor)

    def request(self, key: str) -> RequestRecord | None:
        return _read(RequestRecord, self.root / "requests" / f"{key}.json")

    def put_request(self, key: str, record: RequestRecord) -> None:
        with self.staging() as staging:
            path = staging / "record"
            path.write_text(record.model_dump_json(), encoding="utf-8")  # a torn one is none, and asked for anew
            path.rename(self.root / "requests" / f"{key}.json")

    # Artifacts

    def artifact(self, key: str) -> Contents | None:
        return _read(Contents, self.root / "artifacts" / key / _RECORDS[Contents])

    def artifact_tree(self, key: str) -> Path:
        return self.root / "artifacts" / key / "tree"

    def publish_artifact(self, key: str, tree: Path, contents: Contents) -> None:
        """Take over a tree that lies in a staging directory. If it is there already, this one is dropped."""
        with self.staging() as staging:
            made = staging / "artifact"
            made.mkdir()
            tree.rename(made / "tree")
            _close_directories(made / "tree")
            _write(made / _RECORDS[Contents], contents)
            self._publish(made, self.root / "artifacts" / key, Contents)

    # Snapshots

    def build(self, manifest: Manifest) -> None:
        """Make a snapshot of artifacts that are here. If it is there already, it is given what is known now.

        Raises `FileConflict`; `FileNotFoundError` if an artifact has gone meanwhile.
        """
        target = self.snapshots / manifest.id
        with self._locked(fcntl.LOCK_SH), self.staging() as staging:
            known = self._manifest(manifest.id)
            if known is not None and not self._is_torn(Manifest, target):
                if known.created_at < manifest.created_at:
                    _write(staging / "manifest", manifest)
                    (staging / "manifest").rename(target / _RECORDS[Manifest])
                return
            made = staging / "snapshot"
            made.mkdir()
            tree = _Links(made / "tree", modules=manifest.ecosystem is Ecosystem.PYPI)
            for artifact in manifest.artifacts:
                key = artifact.key(manifest.ecosystem, manifest.platform)
                source = self.artifact_tree(key)
                if not self._is_whole(key):
                    self._take_out(source.parent)
                for place in artifact.places:
                    tree.add(source, place, artifact)
            _close_directories(made / "tree")
            _write(made / _RECORDS[Manifest], manifest)
            made.chmod(0o755)
            self._publish(made, target, Manifest)

    def _manifest(self, snapshot_id: str) -> Manifest | None:
        return _read(Manifest, self.snapshots / snapshot_id / _RECORDS[Manifest])

    def _is_torn(self, kind: type[Contents] | type[Manifest], entry: Path) -> bool:
        """Whether an entry has no record, or lacks bytes. Raises `OSError`."""
        if _has_no_record(kind, entry):
            return True
        if kind is Contents:
            return not self._is_whole(entry.name)
        manifest = self._manifest(entry.name)
        return manifest is None or not self._is_made_whole(manifest, entry.stat())

    def _is_made_whole(self, manifest: Manifest, state: os.stat_result) -> bool:
        """`state` is the snapshot's. An artifact that is newer was made anew, so the snapshot has links to another."""
        return not _is_of_earlier_boot(state) or all(
            self._is_whole(key) and (self.root / "artifacts" / key).stat().st_mtime <= state.st_mtime
            for key in manifest.artifact_keys()
        )

    def _is_whole(self, key: str) -> bool:
        """Whether an artifact has all of its bytes, where it may have lost some: files are not waited for when they
        are written (it takes a second for a thousand), so a host that stops may keep their names alone.
        """
        entry = self.root / "artifacts" / key
        try:
            if not _is_of_earlier_boot(entry.stat()):
                return True
        except FileNotFoundError:
            return False
        contents = self.artifact(key)
        sizes = [os.stat(f"{at}/{name}").st_size for at, _, names in os.walk(entry / "tree") for name in names]
        return contents is not None and (len(sizes), sum(sizes)) == (contents.files, contents.bytes)

    def _publish(self, made: Path, target: Path, kind: type[Contents] | type[Manifest]) -> None:
        """Whoever comes second loses, and its copy goes with its staging directory.

        What is there and cannot be read was torn when the host stopped, or is of another version of ours: it goes.
        """
        if target.exists() and self._is_torn(kind, target):
            self._take_out(target)
        _sync(made)
        try:
            made.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def lease(self, snapshot_id: str) -> Lease | None:
        """Use a snapshot; None if it is not there. It counts as used now."""
        path = self.snapshots / snapshot_id
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # whoever has it alone has it for a moment
            manifest = self._manifest(snapshot_id)
            if manifest is None or not _same(descriptor, path):  # it was removed before the lock was had
                raise FileNotFoundError
            if not self._is_made_whole(manifest, os.fstat(descriptor)):
                raise FileNotFoundError
            os.utime(descriptor)
        except OSError:
            os.close(descriptor)
            return None
        return Lease(snapshot_id, manifest, path / "tree", descriptor)

    def entries(self) -> list[SnapshotEntry]:
        """All snapshots, the one that was used last first."""
        found = []
        for path in self.snapshots.iterdir():
            manifest = self._manifest(path.name)
            with contextlib.suppress(OSError):
                used = datetime.fromtimestamp(path.stat().st_mtime, UTC)
                if manifest is not None:
                    with _exclusive(path) as free:
                        found.append(SnapshotEntry(path.name, manifest, used, not free))
        return sorted(found, key=lambda entry: entry.last_used_at, reverse=True)

    # Removal

    def size_bytes(self) -> int:
        """Of all artifacts, each counted once."""
        return sum(contents.bytes for _, contents in self._artifacts())

    def prune(self, budget_bytes: int, *, unused_since: datetime | None = None) -> Pruned:
        """Remove what was not used for longest until the rest is within the budget; what is in use stays in any case.

        `unused_since`: also every snapshot that was not used since then.
        """
        removed: list[str] = []
        with self._locked(fcntl.LOCK_EX):
            self._take_out_unreadable()
            before = {path: contents.bytes for path, contents in self._artifacts()}
            total = sum(before.values())
            needed: dict[str, int] = {}  # artifact -> snapshots that have it
            entries = self.entries()
            for entry in entries:
                for key in entry.manifest.artifact_keys():
                    needed[key] = needed.get(key, 0) + 1
            sizes = {path.name: size for path, size in before.items()}
            # What no snapshot has goes first, the oldest before the others.
            loose = sorted((path for path in before if path.name not in needed), key=lambda path: path.stat().st_mtime)
            gone = 0
            for path in loose:
                if total > budget_bytes and self._take_out(path):
                    total -= sizes[path.name]
                    gone += 1
            for entry in reversed(entries):
                old = unused_since is not None and entry.last_used_at < unused_since
                if not (old or total > budget_bytes) or not self._take_out(self.snapshots / entry.id):
                    continue
                removed.append(entry.id)
                for key in entry.manifest.artifact_keys():
                    needed[key] -= 1
                    if needed[key] == 0 and key in sizes and self._take_out(self.root / "artifacts" / key):
                        total -= sizes[key]
                        gone += 1
            self._drop_requests(set(removed))
        return Pruned(tuple(removed), gone, sum(before.values()) - total, total)

    def _take_out_unreadable(self) -> None:
        """What no version of ours can use, and nothing would ever count: see `_publish`."""
        for path in (self.root / "artifacts").iterdir():
            if _has_no_record(Contents, path):
                self._take_out(path)
        for path in self.snapshots.iterdir():
            if _has_no_record(Manifest, path):
                self._take_out(path)

    def _artifacts(self) -> Iterator[tuple[Path, Contents]]:
        for path in (self.root / "artifacts").iterdir():
            contents = _read(Contents, path / _RECORDS[Contents])
            if contents is not None:
                yield path, contents

    def _take_out(self, path: Path) -> bool:
        """Whether it was removed: what is in use is not."""
        with self.staging() as staging, contextlib.suppress(OSError), _exclusive(path) as free:
            if free:
                path.rename(staging / "removed")
                return True
        return False

    def _drop_requests(self, snapshots: set[str]) -> None:
        for path in (self.root / "requests").iterdir():
            record = _read(RequestRecord, path)
            if record is None or record.snapshot in snapshots or not (self.snapshots / record.snapshot).is_dir():
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Builders share the store; removal has it alone, so that no artifact goes while it is linked from."""
        descriptor = os.open(self.root / "locks" / "store", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)


class _Links:
    """A tree of hard links. What two artifacts have alike is one file; what they have differently is a conflict.

    `modules`: so is one module's name in two forms, `a.py` of one and `a/` or `a.so` of another, since Python imports
    the one and never says that there is the other.

    Paths are text: there are thousands, and those of `pathlib` take longer than the links.
    """

    def __init__(self, root: Path, *, modules: bool) -> None:
        self._root = str(root)
        self._made: set[str] = set()
        self._modules = modules
        self._forms: dict[str, dict[str, set[str]]] = {}  # a module's path -> the paths that are it -> whose they are
        self._make(self._root)

    def add(self, source: Path, place: str, artifact: Artifact) -> None:
        top = f"{self._root}/{place}" if place else self._root
        self._make(top)
        for directory, directories, files in os.walk(source, onerror=_raise):
            here = top + directory.removeprefix(str(source))
            for name in directories:
                self._claim(here, name, name, artifact)
                self._make(f"{here}/{name}")
            for name in files:
                self._claim(here, module_of(name), name, artifact)
                if not self._link(f"{directory}/{name}", f"{here}/{name}"):
                    raise FileConflict(f"{here}/{name}".removeprefix(f"{self._root}/"), artifact)

    def _claim(self, here: str, module: str | None, name: str, artifact: Artifact) -> None:
        if not self._modules or module is None or here.endswith("/__pycache__"):
            return
        forms = self._forms.setdefault(f"{here}/{module}", {})
        forms.setdefault(name, set()).add(artifact.digest)
        if len(forms) > 1 and len(set[str]().union(*forms.values())) > 1:
            how = f"the module `{module}`, which another package has in another form"
            raise FileConflict(f"{here}/{name}".removeprefix(f"{self._root}/"), artifact, how)

    def _make(self, path: str) -> None:
        if path in self._made:
            return
        if path != self._root:
            self._make(path.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):  # then it is a file, and what follows fails
            os.mkdir(path, 0o700)
        self._made.add(path)

    def _link(self, source: str, target: str) -> bool:
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return _equal(source, target)
        except NotADirectoryError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copy2(source, target, follow_symlinks=False)
        return True


def _raise(error: OSError) -> None:
    raise error


def _equal(one: str, other: str) -> bool:
    if not os.path.isfile(other) or os.path.getsize(one) != os.path.getsize(other):
        return False
    return Path(one).read_bytes() == Path(other).read_bytes()


def _write(path: Path, value: BaseModel) -> None:
    """To the disk: after the host has stopped, the entry's record is whole, or the entry is not there."""
    path.write_text(value.model_dump_json(), encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _close_directories(root: Path) -> None:
    """No directory of a published tree can be written to. Its files never could."""
    for directory, _, _ in os.walk(root, topdown=False):
        os.chmod(directory, _DIRECTORY_MODE)


def _remove(path: Path) -> None:
    """A tree whose directories may be read-only. Files are links to others': only directories are opened up."""
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Whether nobody else holds the directory; while the context lasts, nobody else can. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield _same(descriptor, path)
    finally:
        os.close(descriptor)


def _try_lock_file(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _same(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to what was opened."""
    try:
        ours, there = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _has_no_record(kind: type[Contents] | type[Manifest], entry: Path) -> bool:
    """Whether its record is not there, or is none. What only cannot be read now is there."""
    try:
        kind.model_validate_json((entry / _RECORDS[kind]).read_bytes())
    except (FileNotFoundError, ValidationError):
        return True
    except OSError:
        return False
    return False


def _is_of_earlier_boot(state: os.stat_result) -> bool:
    """Whether what was made, or last found whole, at that time has outlived a stop of the host."""
    return state.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _read[Model: BaseModel](kind: type[Model], path: Path) -> Model | None:
    """None if it is not there, or was written by a version of ours that knew another form."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
