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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from proxy.directories import make_private
from sandbox.packages.manifest import Artifact, Contents, Manifest, RequestRecord

DEFAULT_BUDGET_BYTES = 10 * 10**9
_PARTS = ("artifacts", "snapshots", "requests", "tmp", "locks")
_DIRECTORY_MODE = 0o555
_POLL_SECONDS = 0.05  # between looks at a lock that another process holds: flock has no way to wait and be cancelled
_NO_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP})


def store_directory(state_dir: Path) -> Path:
    """Where the store of a state directory lies."""
    return state_dir / "package-store"


class FileConflict(Exception):
    """Two packages have a file of the same path and of different content."""

    def __init__(self, path: str, artifact: Artifact) -> None:
        super().__init__(f"`{path}` of `{artifact.name}` is another package's too, with other content")
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
            path.write_text(record.model_dump_json(), encoding="utf-8")
            path.rename(self.root / "requests" / f"{key}.json")

    # Artifacts

    def artifact(self, key: str) -> Contents | None:
        return _read(Contents, self.root / "artifacts" / key / "artifact.json")

    def artifact_tree(self, key: str) -> Path:
        return self.root / "artifacts" / key / "tree"

    def publish_artifact(self, key: str, tree: Path, contents: Contents) -> None:
        """Take over a tree that lies in a staging directory. If it is there already, this one is dropped."""
        with self.staging() as staging:
            made = staging / "artifact"
            made.mkdir()
            tree.rename(made / "tree")
            _close_directories(made / "tree")
            (made / "artifact.json").write_text(contents.model_dump_json(), encoding="utf-8")
            _publish(made, self.root / "artifacts" / key)

    # Snapshots

    def build(self, manifest: Manifest) -> None:
        """Make a snapshot of artifacts that are here. If it is there already, nothing is made.

        Raises `FileConflict`; `FileNotFoundError` if an artifact has gone meanwhile.
        """
        target = self.snapshots / manifest.id
        if target.is_dir():
            return
        with self._locked(fcntl.LOCK_SH), self.staging() as staging:
            made = staging / "snapshot"
            made.mkdir()
            tree = _Links(made / "tree")
            for artifact in manifest.artifacts:
                source = self.artifact_tree(artifact.key(manifest.ecosystem, manifest.platform))
                for place in artifact.places:
                    tree.add(source, place, artifact)
            _close_directories(made / "tree")
            (made / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")
            made.chmod(0o755)
            _publish(made, target)

    def lease(self, snapshot_id: str) -> Lease | None:
        """Use a snapshot; None if it is not there. It counts as used now."""
        path = self.snapshots / snapshot_id
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # whoever has it alone has it for a moment
            manifest = _read(Manifest, path / "manifest.json")
            if manifest is None or not _same(descriptor, path):  # it was removed before the lock was had
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
            manifest = _read(Manifest, path / "manifest.json")
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

    def _artifacts(self) -> Iterator[tuple[Path, Contents]]:
        for path in (self.root / "artifacts").iterdir():
            contents = _read(Contents, path / "artifact.json")
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

    Paths are text: there are thousands, and those of `pathlib` take longer than the links.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._made: set[str] = set()
        self._make(self._root)

    def add(self, source: Path, place: str, artifact: Artifact) -> None:
        top = f"{self._root}/{place}" if place else self._root
        self._make(top)
        for directory, directories, files in os.walk(source, onerror=_raise):
            here = top + directory.removeprefix(str(source))
            for name in directories:
                self._make(f"{here}/{name}")
            for name in files:
                if not self._link(f"{directory}/{name}", f"{here}/{name}"):
                    raise FileConflict(f"{here}/{name}".removeprefix(f"{self._root}/"), artifact)

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


def _publish(made: Path, target: Path) -> None:
    """Whoever comes second loses, and its copy goes with its staging directory."""
    try:
        made.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


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


def _read[Model: BaseModel](kind: type[Model], path: Path) -> Model | None:
    """None if it is not there, or was written by a version of ours that knew another form."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
