"""What an archive may become: every path, size and kind is checked before anything is made of it."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import IO

import pytest

from sandbox.packages import outlet
from sandbox.packages.paths import MAX_DEPTH, PathSet, UnsafePath, safe_path
from sandbox.packages.receive import TooLarge, Tree, receive
from sandbox.packages.records import InvalidOutlet
from sandbox.packages.unpack import Bounds, RefusedArchive, open_tarball, open_wheel
from tests.registry.build import Entry, npm_tarball, tar_archive, wheel, zip_archive

SMALL = Bounds(files=20, bytes=1_000_000)
INFO = "thing-1.0.dist-info/METADATA"
METADATA = b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n\nName: other\n"


def as_file(data: bytes) -> IO[bytes]:
    return io.BytesIO(data)


def read_wheel(data: bytes, bounds: Bounds = SMALL) -> dict[str, bytes]:
    return {one.path: one.read(one.size) if one.size else b"" for one in open_wheel(as_file(data), bounds).members}


def read_tarball(data: bytes, bounds: Bounds = SMALL) -> dict[str, tuple[bytes, bool]]:
    return {one.path: (one.read(one.size), one.executable) for one in open_tarball(as_file(data), bounds)}


def zipped(*entries: Entry) -> bytes:
    return zip_archive([*entries, Entry(INFO, METADATA)])


def pax_bomb(size: int) -> bytes:
    """A tarball whose first header announces so many bytes of attributes, and has them."""
    header = tarfile.TarInfo("package/PaxHeaders/x")
    header.type, header.size = tarfile.XHDTYPE, size
    return gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(size))


def test_a_tarballs_headers_are_bounded_before_they_are_read() -> None:
    """The fault: `tarfile` took as much memory as a header said, and the whole preparation failed as ours."""
    with pytest.raises(RefusedArchive, match="header") as caught:
        list(open_tarball(as_file(pax_bomb(8_000_000)), SMALL))
    assert caught.value.reason == "closure_too_large"
    large = Entry("package/a", bytes(900_000))
    assert read_tarball(tar_archive([large, Entry("package/" + "b/" * 20 + "c" * 200)]))  # the control: content is not


def test_a_directory_between_does_not_make_room_for_headers() -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        directory = tarfile.TarInfo("package/d")
        directory.type, directory.size = tarfile.DIRTYPE, 8_000_000
        archive.addfile(directory)
    head = plain.getvalue()[:512]
    with pytest.raises(RefusedArchive, match="header"):
        list(open_tarball(as_file(gzip.compress(head + gzip.decompress(pax_bomb(8_000_000)))), SMALL))


def test_a_wheels_directory_is_bounded_before_it_is_read() -> None:
    """The fault: a directory of millions of entries, each of them the same, took all memory."""
    data = zipped(*(Entry(f"d/{number}", b"") for number in range(10)))
    end = data.rfind(b"PK\5\6")
    size, start = struct.unpack("<II", data[end + 12 : end + 20])
    directory = data[start : start + size] * 2000
    bomb = (
        data[:start] + directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 22_000, 22_000, len(directory), start, 0)
    )
    assert len(zipfile.ZipFile(io.BytesIO(bomb)).infolist()) == 22_000, "the control: it is what it says"
    with pytest.raises(RefusedArchive, match="directory") as caught:
        read_wheel(bomb)
    assert caught.value.reason == "closure_too_large"


@pytest.mark.parametrize("path", ["a", "a/b.py", "a/.hidden", "a b/c", "ä/ö", "a..b", "...", "a/" + "b" * 255])
def test_a_plain_relative_path_is_safe(path: str) -> None:
    assert safe_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/etc/passwd", "..", "../a", "a/..", "a/../b", "a//b", "a/", "./a", "a/./b", "a\\b", "a\0b", "a\nb", "\x7f",
        "C:/a", "c:a", "a/" + "b" * 256, "a/" * MAX_DEPTH + "a", "x" * 2000, "\udc80",
    ],
)  # fmt: skip
def test_every_other_path_is_not(path: str) -> None:
    with pytest.raises(UnsafePath):
        safe_path(path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "a"),
        ("a", "A"),
        ("a/b", "A/c"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("a/b", "A"),
        ("\u00e9", "e\u0301"),
        ("stra\u00dfe", "STRASSE"),
    ],
)
def test_two_paths_that_some_file_system_takes_for_one_are_refused(one: str, other: str) -> None:
    paths = PathSet()
    paths.add(one)
    with pytest.raises(UnsafePath):
        paths.add(other)


def test_different_paths_of_one_directory_go_together() -> None:
    paths = PathSet()
    for path in ("a/b", "a/c", "a/d/e", "b", "ab"):
        paths.add(path)


# Wheels


def test_a_wheel_is_read_with_its_own_name_and_version() -> None:
    built = wheel("Some.Thing", "1.0", files={"some_thing/__init__.py": "X = 1\n"})
    opened = open_wheel(as_file(built.data), SMALL)
    assert (opened.name, opened.version) == ("Some.Thing", "1.0")
    assert {one.path: one.read(one.size) for one in opened.members}["some_thing/__init__.py"] == b"X = 1\n"


def test_the_parts_of_a_data_directory_go_where_installers_put_them() -> None:
    found = read_wheel(
        zipped(
            Entry("thing-1.0.data/purelib/a.py", b"a"),
            Entry("thing-1.0.data/platlib/b.so", b"b"),
            Entry("thing-1.0.data/data/share/c", b"c"),
            Entry("thing-1.0.data/scripts/run", b"d"),
            Entry("thing-1.0.data/headers/e.h", b"e"),
        )
    )
    assert sorted(found) == ["a.py", "b.so", "bin/run", "share/c", INFO]


def test_bytecode_that_a_wheel_brings_is_left_out() -> None:
    """It would be run in place of the source beside it."""
    assert sorted(read_wheel(zipped(Entry("a.py", b""), Entry("__pycache__/a.cpython-313.pyc", b"evil")))) == [
        "a.py",
        INFO,
    ]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([Entry("../x", b"")], "unsafe_archive_path"),
        ([Entry("/x", b"")], "unsafe_archive_path"),
        ([Entry("a/../../x", b"")], "unsafe_archive_path"),
        ([Entry("a", b""), Entry("A", b"")], "unsafe_archive_path"),
        ([Entry("a", b""), Entry("a/b", b"")], "unsafe_archive_path"),
        ([Entry("a", kind="symlink", target="/etc/passwd")], "unsafe_archive_path"),
        ([Entry("thing-1.0.data/data/../x", b"")], "unsafe_archive_path"),
        ([Entry("thing-1.0.data/other/x", b"")], "unsafe_archive_path"),
        # Two entries of the archive that would be one file once they are installed.
        ([Entry("x", b""), Entry("thing-1.0.data/purelib/x", b"")], "unsafe_archive_path"),
        ([Entry("other-2.0.data/purelib/x", b"")], "metadata_mismatch"),
        ([Entry("other-2.0.dist-info/METADATA", METADATA)], "metadata_mismatch"),
        ([Entry(f"f{n}", b"") for n in range(30)], "closure_too_large"),
        ([Entry("zeros", bytes(2_000_000))], "closure_too_large"),
    ],
)
def test_a_wheel_with_one_bad_entry_is_refused_whole(entries: list[Entry], reason: str) -> None:
    with pytest.raises(RefusedArchive) as caught:
        open_wheel(as_file(zipped(*entries)), SMALL)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "metadata",
    [b"", b"Name: thing\n", b"Name: a\nName: b\nVersion: 1\n", b"\nName: thing\nVersion: 1.0\n"],
)
def test_metadata_without_one_name_and_one_version_is_refused(metadata: bytes) -> None:
    with pytest.raises(RefusedArchive) as caught:
        open_wheel(as_file(zip_archive([Entry(INFO, metadata)])), SMALL)
    assert caught.value.reason == "metadata_mismatch"


def test_an_entry_that_lies_about_its_size_is_refused() -> None:
    """What the directory of a zip file says is small is not read beyond that."""
    data = bytearray(zipped(Entry("big", b"0123456789" * 1000)))
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        place = data.index(b"PK\x01\x02")
        assert archive.infolist()[0].file_size == 10_000
    data[place + 24 : place + 28] = (5).to_bytes(4, "little")  # the uncompressed size, in the central directory
    with pytest.raises(RefusedArchive):
        read_wheel(bytes(data))


@pytest.mark.parametrize("data", [b"", b"PK", b"not an archive" * 100, wheel("thing", "1.0").data[:-30]])
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedArchive):
        open_wheel(as_file(data), SMALL)
    with pytest.raises(RefusedArchive):
        read_tarball(data)


def test_a_small_archive_may_not_become_a_huge_one() -> None:
    """The ratio bounds it long before the policy's size does."""
    pieces = [Entry(f"zeros{n}", bytes(16 * 1024 * 1024)) for n in range(3)]
    with pytest.raises(RefusedArchive) as caught:
        open_wheel(as_file(zipped(*pieces)), Bounds(files=100, bytes=10**12, ratio=10))
    assert caught.value.reason == "closure_too_large"


# npm's tarballs


def test_a_tarball_is_read_below_its_directory_whatever_that_is_called() -> None:
    data = tar_archive([Entry("anything/package.json", b"{}"), Entry("./anything/bin/x", b"#!", mode=0o755)])
    assert read_tarball(data) == {"package.json": (b"{}", False), "bin/x": (b"#!", True)}


@pytest.mark.parametrize(
    "entry",
    [
        Entry("package/../../x"),
        Entry("../x"),
        Entry("/package/x"),
        Entry("x"),
        Entry("package/a", kind="symlink", target="/etc"),
        Entry("package/a", kind="hardlink", target="package/index.js"),
        Entry("package/a", kind="device"),
        Entry("package/INDEX.js"),
        Entry("package/index.js/x"),
    ],
)
def test_a_tarball_with_one_bad_entry_is_refused_before_any_file_is_handed_out(entry: Entry) -> None:
    data = npm_tarball({"name": "thing", "version": "1.0.0"}, extra=[entry])
    with pytest.raises(RefusedArchive) as caught:
        open_tarball(as_file(data), SMALL)
    assert caught.value.reason == "unsafe_archive_path"


def test_a_tarball_that_expands_without_end_is_left_at_its_bound() -> None:
    data = tar_archive([Entry("package/zeros", bytes(3_000_000))])
    with pytest.raises(RefusedArchive) as caught:
        open_tarball(as_file(data), SMALL)
    assert caught.value.reason == "closure_too_large"


# What comes out of the sandbox


def streams(*records: bytes, number: int = 1) -> list[bytes]:
    return list(outlet.frames(number, b"".join(records)))


def file_record(path: str, data: bytes, *, executable: bool = False) -> bytes:
    return outlet.record({"file": path, "size": len(data), "executable": executable}) + data


DONE = outlet.record({"done": {"name": "thing"}})


def taken(tmp_path: Path, pieces: list[bytes], bounds: Bounds = SMALL) -> Tree:
    tree = Tree(tmp_path / "tree", bounds)
    receive(pieces, [tree])
    return tree


def test_what_is_handed_out_becomes_a_tree_of_plain_read_only_files(tmp_path: Path) -> None:
    records = [file_record("a/b", b"x" * 100_000), file_record("run", b"", executable=True), DONE]
    tree = taken(tmp_path, streams(*records))
    done = tree.finish()
    assert done is not None
    assert done.facts == {"name": "thing"}
    assert (tree.root / "a/b").read_bytes() == b"x" * 100_000
    assert [(tree.root / path).stat().st_mode & 0o7777 for path in ("a/b", "run")] == [0o444, 0o555]
    assert tree.files == {"a/b": 100_000, "run": 0}


def test_pieces_may_be_cut_anywhere(tmp_path: Path) -> None:
    stream = file_record("a", b"one\ntwo\n") + file_record("b", b"") + DONE
    frames = b"".join(frame for byte in stream for frame in streams(bytes([byte])))
    tree = taken(tmp_path, [frames[at : at + 7] for at in range(0, len(frames), 7)])
    assert tree.finish() is not None
    assert (tree.root / "a").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(
    "records",
    [
        [file_record("../x", b"")],
        [file_record("/etc/x", b"")],
        [file_record("a", b""), file_record("a", b"")],
        [file_record("a", b""), file_record("a/b", b"")],
        [file_record("a", b""), file_record("A", b"")],
        [outlet.record({"file": "a", "size": -1, "executable": False})],
        [outlet.record({"file": "a", "size": True, "executable": False})],
        [outlet.record({"file": "a", "size": 1, "executable": False, "mode": 0o4755})],
        [outlet.record({"link": "a", "target": "/etc"})],
        [b"not json\n"],
        [b"[]\n"],
        [b"x" * 20_000],
        [DONE, file_record("a", b"")],
        [DONE, DONE],
    ],
)
def test_whoever_writes_the_stream_cannot_leave_its_tree(tmp_path: Path, records: list[bytes]) -> None:
    """The process inside that reads a hostile archive is not believed."""
    tree = taken(tmp_path, streams(*records, DONE))
    assert tree.finish() is None
    assert isinstance(tree.fault, (InvalidOutlet, UnsafePath))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "records", [[file_record(f"f{n}", b"") for n in range(30)], [file_record("a", bytes(1_000_001))]]
)
def test_a_tree_has_its_bounds_outside_too(tmp_path: Path, records: list[bytes]) -> None:
    tree = taken(tmp_path, streams(*records, DONE))
    assert isinstance(tree.fault, TooLarge)


def test_a_stream_that_comes_to_no_end_makes_no_tree(tmp_path: Path) -> None:
    assert taken(tmp_path, streams(file_record("a", b"x"))).finish() is None


@pytest.mark.parametrize(
    "data",
    [
        outlet.HEAD.pack(1, 5)[:7],
        outlet.HEAD.pack(1, 5),
        outlet.HEAD.pack(1, 5) + b"x",
        outlet.HEAD.pack(1, 0),
        outlet.HEAD.pack(1, outlet.PIECE_BYTES + 1) + bytes(outlet.PIECE_BYTES + 1),
        outlet.HEAD.pack(1, 2**32 - 1),
        outlet.HEAD.pack(2, 1) + b"x",
        outlet.HEAD.pack(2**32 - 1, 1) + b"x",
    ],
)
def test_a_frame_of_another_form_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidOutlet):
        taken(tmp_path, [*streams(file_record("a", b"x"), DONE), data])


def test_the_report_is_apart_from_all_trees(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree", SMALL)
    report = receive([*streams(DONE), *streams(json.dumps({"x": 1}).encode(), number=outlet.REPORT)], [tree])
    assert json.loads(report) == {"x": 1}
