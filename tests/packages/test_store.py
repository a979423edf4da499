"""The store: built once, shared, read-only, whole at any moment, and never pruned under who uses it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from proxy.packages.model import Ecosystem
from sandbox.packages.manifest import Artifact, Contents, Facts, Manifest, RequestRecord
from sandbox.packages.store import FileConflict, Store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLATFORM = "cpython-313-x86_64"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def artifact(name: str, *, places: tuple[str, ...] = ("",), size: int = 1000) -> Artifact:
    return Artifact(
        name=name, version="1.0", url="https://x.test/x", filename=f"{name}-1.0-py3-none-any.whl", algorithm="sha256",
        digest=name.encode().hex().ljust(64, "0"), places=places, requested=True, facts=Facts(),
        contents=Contents(name=name, version="1.0", bytes=size, files=1),
    )  # fmt: skip


def manifest(*artifacts: Artifact) -> Manifest:
    return Manifest(ecosystem=Ecosystem.PYPI, platform=PLATFORM, created_at=NOW, artifacts=artifacts)


def put(store: Store, one: Artifact, files: Mapping[str, str]) -> None:
    with store.staging() as staging:
        tree = staging / "tree"
        for path, text in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
            (tree / path).chmod(0o444)
        store.publish_artifact(one.key(Ecosystem.PYPI, PLATFORM), tree, one.contents)


def build(store: Store, *names: str, size: int = 1000) -> Manifest:
    made = manifest(*(artifact(name, size=size) for name in names))
    for one in made.artifacts:
        put(store, one, {f"{one.name}/__init__.py": f"NAME = '{one.name}'\n"})
    store.build(made)
    return made


def record(snapshot: str) -> RequestRecord:
    return RequestRecord(
        snapshot=snapshot, resolved_at=NOW, expires_at=NOW, policy_revision="r", specifiers=("a==",)
    )  # fmt: skip


def used_at(store: Store, made: Manifest, when: datetime) -> None:
    os.utime(store.snapshots / made.id, (when.timestamp(), when.timestamp()))


def test_a_snapshot_is_hard_links_to_its_artifacts_and_cannot_be_written(store: Store) -> None:
    made = build(store, "a", "b")
    lease = store.lease(made.id)
    assert lease is not None
    with lease:
        assert (lease.tree / "a/__init__.py").read_text() == "NAME = 'a'\n"
        assert (lease.tree / "b/__init__.py").stat().st_nlink == 2
        for place, directories, files in os.walk(lease.tree):
            assert os.stat(place).st_mode & 0o777 == 0o555
            assert all(os.stat(Path(place, name)).st_mode & 0o222 == 0 for name in (*directories, *files))


def test_two_snapshots_share_the_files_that_they_have_alike(store: Store) -> None:
    build(store, "a", "b")
    build(store, "a", "c")
    one = store.artifact_tree(artifact("a").key(Ecosystem.PYPI, PLATFORM)) / "a/__init__.py"
    assert one.stat().st_nlink == 3


def test_a_snapshot_is_named_by_what_is_in_it_and_where() -> None:
    base = manifest(artifact("a"), artifact("b"))
    assert manifest(artifact("b"), artifact("a")).id == base.id
    assert base.model_copy(update={"created_at": NOW + timedelta(days=1)}).id == base.id
    assert manifest(artifact("a")).id != base.id
    assert manifest(artifact("a", places=("x",)), artifact("b")).id != base.id
    assert base.model_copy(update={"platform": "cpython-312-x86_64"}).id != base.id


def test_an_artifact_may_stand_in_several_places(store: Store) -> None:
    one = artifact("a", places=("a", "b/node_modules/a"))
    put(store, one, {"index.js": "1"})
    made = manifest(one)
    store.build(made)
    assert (store.snapshots / made.id / "tree/b/node_modules/a/index.js").read_text() == "1"


@pytest.mark.parametrize(
    ("first", "second"),
    [({"x": "1"}, {"x": "2"}), ({"x": "1"}, {"x/y": "1"}), ({"x/y": "1"}, {"x": "1"})],
)
def test_what_two_packages_have_differently_is_a_conflict(
    store: Store, first: dict[str, str], second: dict[str, str]
) -> None:
    put(store, artifact("a"), first)
    put(store, artifact("b"), second)
    with pytest.raises(FileConflict):
        store.build(manifest(artifact("a"), artifact("b")))
    assert list(store.snapshots.iterdir()) == []
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("victim.py", "victim/__init__.py"),
        ("victim/__init__.py", "victim.cpython-313-x86_64-linux-gnu.so"),
        ("victim.py", "victim.abi3.so"),
        ("victim/core.py", "victim/core/__init__.py"),
        ("victim.cpython-313-x86_64-linux-gnu.so", "victim.py"),
        ("victim.py", "victim.pyc"),
    ],
)
def test_one_module_in_two_forms_of_two_packages_is_a_conflict(store: Store, first: str, second: str) -> None:
    """The fault: Python imports one of them, so that one package took the place of the other's module."""
    put(store, artifact("a"), {first: "A"})
    put(store, artifact("b"), {second: "B"})
    with pytest.raises(FileConflict, match="in another form"):
        store.build(manifest(artifact("a"), artifact("b")))
    put(store, artifact("c"), {first: "A", second: "B"})
    store.build(manifest(artifact("c")))  # within one package it is its own affair


def test_namespaces_and_data_are_shared(store: Store) -> None:
    put(store, artifact("a"), {"space/a.py": "", "bin/tool": "", "a-1.0.dist-info/METADATA": "", "one.txt": ""})
    put(store, artifact("b"), {"space/b.py": "", "bin/other": "", "b-1.0.dist-info/METADATA": "", "one/x.txt": ""})
    store.build(manifest(artifact("a"), artifact("b")))


def test_what_they_have_alike_is_none(store: Store) -> None:
    put(store, artifact("a"), {"shared/__init__.py": "", "shared/a.py": ""})
    put(store, artifact("b"), {"shared/__init__.py": "", "shared/b.py": ""})
    made = manifest(artifact("a"), artifact("b"))
    store.build(made)
    assert sorted(os.listdir(store.snapshots / made.id / "tree/shared")) == ["__init__.py", "a.py", "b.py"]


def test_who_publishes_second_changes_nothing(store: Store) -> None:
    made = build(store, "a")
    before = (store.snapshots / made.id / "tree/a/__init__.py").stat().st_ino
    put(store, artifact("a"), {"a/__init__.py": "OTHER = 1\n"})
    store.build(made)
    assert (store.snapshots / made.id / "tree/a/__init__.py").stat().st_ino == before
    assert list((store.root / "tmp").iterdir()) == []


def test_a_request_is_kept_and_replaced(store: Store) -> None:
    assert store.request("k") is None
    store.put_request("k", record("one"))
    store.put_request("k", record("two"))
    found = store.request("k")
    assert found is not None
    assert found.snapshot == "two"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"snapshot": 1}', '{"unknown": 1}'])
def test_a_record_that_cannot_be_read_is_none(store: Store, text: str) -> None:
    (store.root / "requests" / "k.json").write_text(text)
    assert store.request("k") is None


# What was torn, and what is known newly

TORN = ["", "{", "[]", '{"unknown": 1}', None]


def tear(path: Path, text: str | None) -> None:
    path.unlink() if text is None else path.write_text(text)


@pytest.mark.parametrize("text", TORN)
def test_a_torn_entry_is_replaced(store: Store, text: str | None) -> None:
    """It stood in the way of its successor for good: whoever published came second, and what was first was no use."""
    made = build(store, "a")
    key = made.artifacts[0].key(Ecosystem.PYPI, PLATFORM)
    tear(store.root / "artifacts" / key / "artifact.json", text)
    tear(store.snapshots / made.id / "manifest.json", text)
    assert (store.artifact(key), store.lease(made.id), store.entries()) == (None, None, [])
    put(store, made.artifacts[0], {"a/__init__.py": "NEW = 1\n"})
    store.build(made)
    assert store.artifact(key) == made.artifacts[0].contents
    lease = store.lease(made.id)
    assert lease is not None
    with lease:
        assert (lease.tree / "a/__init__.py").read_text() == "NEW = 1\n"
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("left", ["", None, "NAME = 'a'\n"])
def test_files_that_a_stopped_host_has_emptied_are_noticed_after_its_start(store: Store, left: str | None) -> None:
    """Nothing waits for files to be on the disk: what was last used before the host's start is counted once.

    The control: a tree that has all of its bytes is used as it is.
    """
    text = "NAME = 'a'\n"
    contents = Contents(name="a", version="1.0", bytes=len(text), files=1)
    one = artifact("a").model_copy(update={"contents": contents})
    put(store, one, {"a/__init__.py": text})
    made = manifest(one)
    store.build(made)
    entry = store.root / "artifacts" / one.key(Ecosystem.PYPI, PLATFORM)
    file = entry / "tree/a/__init__.py"
    file.parent.chmod(0o755)
    file.chmod(0o644)
    tear(file, left)
    for path in (entry, store.snapshots / made.id):
        os.utime(path, (0, 0))
    lease = store.lease(made.id)
    assert (lease is not None) == (left == text)
    if lease is not None:
        lease.close()
        assert (store.snapshots / made.id).stat().st_mtime > 0, "it is not counted again"
        return
    with pytest.raises(FileNotFoundError):  # its maker then fetches what is missing
        store.build(made)
    put(store, one, {"a/__init__.py": text})
    store.build(made)
    assert (store.snapshots / made.id / "tree/a/__init__.py").read_text() == text


@pytest.mark.parametrize("text", TORN)
def test_torn_entries_are_pruned_and_others_stay(store: Store, text: str | None) -> None:
    torn, whole = build(store, "a"), build(store, "b")
    key = torn.artifacts[0].key(Ecosystem.PYPI, PLATFORM)
    tear(store.root / "artifacts" / key / "artifact.json", text)
    tear(store.snapshots / torn.id / "manifest.json", text)
    assert store.prune(10**9).snapshots == ()
    assert [path.name for path in store.snapshots.iterdir()] == [whole.id]
    assert len(list((store.root / "artifacts").iterdir())) == 1


def test_a_snapshot_is_given_what_is_known_newly_and_never_what_was_known_before(store: Store) -> None:
    """Its facts were those of its first preparation for good."""
    made = build(store, "a")

    def known(when: datetime, *, yanked: bool) -> bool:
        facts = Facts(yanked=yanked)
        artifacts = tuple(one.model_copy(update={"facts": facts}) for one in made.artifacts)
        store.build(made.model_copy(update={"created_at": when, "artifacts": artifacts}))
        lease = store.lease(made.id)
        assert lease is not None
        with lease:
            return lease.manifest.artifacts[0].facts.yanked

    assert known(NOW + timedelta(days=1), yanked=True)
    assert known(NOW + timedelta(hours=1), yanked=False), "who has asked before comes late"
    assert not known(NOW + timedelta(days=2), yanked=False)
    assert list((store.root / "tmp").iterdir()) == []


# Removal


def test_the_least_recently_used_goes_first_until_the_rest_is_within_the_budget(store: Store) -> None:
    made = [build(store, name) for name in ("a", "b", "c")]
    for age, one in zip((3, 1, 2), made, strict=True):
        used_at(store, one, NOW - timedelta(days=age))
    store.put_request("k", record(made[0].id))
    pruned = store.prune(2000)
    assert pruned.snapshots == (made[0].id,)
    assert (pruned.artifacts, pruned.freed_bytes, pruned.left_bytes) == (1, 1000, 2000)
    assert store.request("k") is None, "a request leads to what was removed"
    assert [entry.id for entry in store.entries()] == [made[1].id, made[2].id]


def test_what_another_snapshot_has_too_stays(store: Store) -> None:
    first, second = build(store, "a", "b"), build(store, "b", "c")
    used_at(store, first, NOW - timedelta(days=2))
    pruned = store.prune(2000)
    assert pruned.snapshots == (first.id,)
    lease = store.lease(second.id)
    assert lease is not None
    with lease:
        assert (lease.tree / "b/__init__.py").read_text() == "NAME = 'b'\n"
    assert store.artifact(artifact("a").key(Ecosystem.PYPI, PLATFORM)) is None
    assert store.artifact(artifact("b").key(Ecosystem.PYPI, PLATFORM)) is not None


def test_what_no_snapshot_has_goes_before_any_that_does(store: Store) -> None:
    made = build(store, "a")
    put(store, artifact("loose"), {"x": "1"})
    assert store.prune(1000).snapshots == ()
    assert store.artifact(artifact("loose").key(Ecosystem.PYPI, PLATFORM)) is None
    assert [entry.id for entry in store.entries()] == [made.id]


def test_a_snapshot_in_use_is_never_taken(store: Store) -> None:
    made = build(store, "a")
    lease = store.lease(made.id)
    assert lease is not None
    assert [entry.in_use for entry in store.entries()] == [True]
    assert store.prune(0, unused_since=NOW + timedelta(days=10_000)).snapshots == ()
    assert (lease.tree / "a/__init__.py").read_text() == "NAME = 'a'\n"
    lease.close()
    assert store.prune(0).snapshots == (made.id,)
    assert store.lease(made.id) is None
    assert store.size_bytes() == 0


def test_what_was_not_used_since_goes_within_the_budget_too(store: Store) -> None:
    old, new = build(store, "a"), build(store, "b")
    used_at(store, old, NOW - timedelta(days=40))
    used_at(store, new, NOW - timedelta(days=10))
    assert store.prune(10**9, unused_since=NOW - timedelta(days=30)).snapshots == (old.id,)


def test_leasing_counts_as_using(store: Store) -> None:
    old, other = build(store, "a"), build(store, "b")
    for one in (old, other):
        used_at(store, one, datetime.now(UTC) - timedelta(seconds=5))
    lease = store.lease(old.id)
    assert lease is not None
    lease.close()
    assert [entry.id for entry in store.entries()] == [old.id, other.id]


# Other processes, and their deaths

CHILD = """
import os, sys
from pathlib import Path
from tests.packages.test_store import *
store = Store(Path(sys.argv[1]))
def say(text):
    os.write(1, text.encode() + b"\\n")
"""


def start(store: Store, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + textwrap.dedent(code), str(store.root)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def heard(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "the child says nothing"
    return process.stdout.readline().decode().strip()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_a_lease_of_another_process_holds_and_ends_with_it(store: Store) -> None:
    made = build(store, "a")
    child = start(store, f"lease = store.lease({made.id!r}); say('leased'); sys.stdin.read()")
    try:
        assert heard(child) == "leased"
        assert store.prune(0).snapshots == ()
    finally:
        kill(child)
    assert store.prune(0).snapshots == (made.id,)


# Each is stopped where the call named is about to be made for the second argument's time.
STAGES = {
    "a tree is being made": "with store.staging() as staging:\n    (staging / 'x').mkdir(); (staging / 'x/y').write_text('z'); say('here'); sys.stdin.read()",
    "an artifact is about to appear": "Store._publish = lambda *a, **k: (say('here'), sys.stdin.read())\nput(store, artifact('a'), {'x': '1'})",
    "a snapshot is about to appear": "put(store, artifact('a'), {'x': '1'})\nStore._publish = lambda *a, **k: (say('here'), sys.stdin.read())\nstore.build(manifest(artifact('a')))",
    "a snapshot is being removed": "build(store, 'a')\nimport sandbox.packages.store as s\ns._remove = lambda *a: (say('here'), sys.stdin.read())\nstore.prune(0)",
    "a request is locked": "import asyncio\nasync def go():\n    async with store.request_lock('k'):\n        say('here'); sys.stdin.read()\nasyncio.run(go())",
}


@pytest.mark.parametrize("stage", STAGES)
def test_who_is_killed_leaves_nothing_that_a_start_does_not_remove(store: Store, stage: str) -> None:
    child = start(store, STAGES[stage])
    try:
        assert heard(child) == "here"
        Store(store.root)  # another process starts meanwhile: it takes nothing from who still works
        if stage == "a tree is being made":
            assert [path.name for path in (store.root / "tmp").glob("*/x")] == ["x"]
    finally:
        kill(child)
    again = Store(store.root)
    assert list((again.root / "tmp").iterdir()) == []
    for entry in again.entries():
        assert list((again.snapshots / entry.id / "tree").iterdir())
    made = build(again, "a", "b")
    assert again.lease(made.id) is not None

    async def lock() -> None:
        async with asyncio.timeout(30), again.request_lock("k"):
            pass

    asyncio.run(lock())


def test_one_request_is_one_piece_of_work_at_a_time(store: Store) -> None:
    """Within a process and across processes."""
    child = start(store, STAGES["a request is locked"])
    order: list[str] = []

    async def work(name: str) -> None:
        async with store.request_lock("k"):
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    async def go() -> None:
        tasks = [asyncio.create_task(work(name)) for name in ("a", "b", "c")]
        other = asyncio.create_task(work_on_other())
        await other
        assert order == [], "the other process has the lock"
        kill(child)
        await asyncio.gather(*tasks)

    async def work_on_other() -> None:
        async with store.request_lock("another"):
            await asyncio.sleep(0.2)

    assert heard(child) == "here"
    asyncio.run(go())
    assert [order[place : place + 2] for place in (0, 2, 4)] == [[f"{n} in", f"{n} out"] for n in ("a", "b", "c")]


def test_waiting_for_a_lock_can_be_cancelled(store: Store) -> None:
    async def go() -> None:
        async with store.request_lock("k"):
            waiting = asyncio.create_task(hold())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(30), store.request_lock("k"):
            pass

    async def hold() -> None:
        async with store.request_lock("k"):
            pass

    asyncio.run(go())
