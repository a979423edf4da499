"""Claims about the writer of the audit log: whole lines, one chain, and no failure that goes unnoticed."""

import fcntl
import itertools
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.audit import DEFAULT_KEEP, GENESIS, AuditLog, AuditUnavailable
from proxy.audit_reader import Line, read, verify
from proxy.events import ProxyEvent


def event(detail: str = "x") -> ProxyEvent:
    return ProxyEvent(time=1.0, what="test", detail=detail)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def whats(path: Path) -> list[object]:
    return [fields["what"] for fields in lines(path)]


def details(path: Path) -> list[str]:
    """The details of the test's own events, through all files."""
    entries = [entry for entry in read(path) if isinstance(entry, Line) and entry.fields["what"] == "test"]
    return [str(entry.fields["detail"]) for entry in entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "deep" / "audit.jsonl"


def fill(path: Path, count: int = 5) -> None:
    with AuditLog(path) as log:
        for number in range(count):
            log.write(event(str(number)))


PRELUDE = """
import os, sys
from pathlib import Path
from proxy.audit import AuditLog, AuditUnavailable
from proxy.events import ProxyEvent
def event(detail="x"):
    return ProxyEvent(time=1.0, what="test", detail=detail)
"""
TOP = Path(__file__).parents[2]


def in_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=TOP,
    )


def test_each_line_has_its_number_and_the_hash_of_the_line_before(path: Path) -> None:
    fill(path, 3)
    written = lines(path)
    assert [fields["seq"] for fields in written] == [1, 2, 3]
    assert written[0]["prev"] == GENESIS
    assert len({str(fields["prev"]) for fields in written}) == 3
    assert verify(path).ok


def test_the_log_is_for_its_owner_only_and_so_are_directories_made_for_it(path: Path) -> None:
    old = os.umask(0)
    try:
        fill(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_a_log_is_continued_not_begun_again(path: Path) -> None:
    fill(path, 2)
    fill(path, 2)
    assert [fields["seq"] for fields in lines(path)] == [1, 2, 3, 4]
    assert verify(path).ok


def plant_link(path: Path) -> None:
    (path.parent / "target").touch()
    path.symlink_to(path.parent / "target")


def plant_shared(path: Path) -> None:
    path.touch()
    path.chmod(0o622)


def plant_text(path: Path) -> None:
    path.write_text("dear diary\n")
    path.chmod(0o600)


@pytest.mark.parametrize(
    "plant",
    [plant_link, plant_shared, plant_text, os.mkfifo, Path.mkdir],
    ids=["a link", "writable by others", "another text", "a FIFO", "a directory"],
)
def test_what_is_no_log_of_ours_is_refused_and_left_as_it_is(path: Path, plant: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True)
    plant(path)
    before = path.read_text() if path.is_file() else None
    with pytest.raises(AuditUnavailable, match="cannot be written"), AuditLog(path) as log:
        log.write(event())
    assert before is None or path.read_text() == before


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AuditUnavailable, match="not a directory"):
        AuditLog(tmp_path / "file" / "audit.jsonl")


def test_a_line_that_a_crash_cut_short_is_ended_and_named_and_the_chain_goes_on(path: Path) -> None:
    fill(path, 3)
    with path.open("ab") as file:
        file.write(b'{"seq":4,"time":"2026')
    fill(path, 1)
    written = path.read_bytes().splitlines()
    assert [json.loads(line)["what"] for line in (written[4], written[5])] == ["recovered", "test"]
    assert [json.loads(line)["seq"] for line in (written[4], written[5])] == [5, 6]
    report = verify(path)
    assert report.ok
    assert [line.number for line in report.incomplete] == [4]


def test_a_crash_within_the_very_first_line_is_recovered_from(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"seq":1,"ti')
    path.chmod(0o600)
    fill(path, 1)
    assert verify(path).ok
    assert verify(path).incomplete[0].number == 1


def test_a_line_cut_short_by_another_process_is_recovered_from_while_the_log_is_open(path: Path) -> None:
    with AuditLog(path) as log:
        log.write(event())
        with path.open("ab") as file:
            file.write(b'{"seq":2')
        log.write(event())
    assert verify(path).ok
    assert [line.number for line in verify(path).incomplete] == [2]


def test_a_full_disk_is_a_failure_and_leaves_no_part_of_a_line(path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel take part of a line and refuse the rest, as a full disk does."""
    done = in_process(
        """
import resource
path = Path(sys.argv[1])
with AuditLog(path) as log:
    log.write(event())
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            log.write(event())
        except AuditUnavailable as error:
            print(str(error).rpartition(": ")[2], path.stat().st_size == size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.write(event("after"))
""",
        str(path),
    )
    assert done.stdout == "file too large True\nfile too large True\n", done.stderr
    report = verify(path)
    assert (report.ok, report.lines, report.incomplete) == (True, 2, ())


def test_a_log_moved_away_is_begun_anew_and_the_new_one_continues_its_chain(path: Path) -> None:
    """What logrotate does. Put back as the older file, the chain is whole."""
    with AuditLog(path) as log:
        log.write(event())
        path.rename(path.with_name("elsewhere"))
        log.write(event())
        log.write(event())
    assert whats(path) == ["replaced", "test", "test"]
    path.with_name("elsewhere").rename(path.with_name("audit.jsonl.1"))
    report = verify(path)
    assert (report.ok, report.lines, report.from_beginning) == (True, 4, True)


def test_a_log_rotated_by_others_under_our_names_is_an_ordinary_rotation(path: Path) -> None:
    with AuditLog(path) as log:
        log.write(event())
        path.rename(path.with_name("audit.jsonl.1"))
        log.write(event())
    assert whats(path) == ["rotated", "test"]
    assert verify(path).ok


def test_a_log_removed_leaves_a_gap_that_shows(path: Path) -> None:
    with AuditLog(path) as log:
        for _ in range(7):
            log.write(event())
        path.unlink()
        log.write(event())
    first = lines(path)[0]
    assert first["what"] == "replaced"
    assert "7 lines" in str(first["detail"])
    assert first["prev"] != GENESIS
    assert not verify(path).from_beginning


def test_a_log_exchanged_for_another_is_noticed(path: Path) -> None:
    other = path.with_name("other")
    fill(other, 2)
    with AuditLog(path) as log:
        log.write(event())
        other.rename(path)
        log.write(event())
    assert whats(path) == ["test", "test", "replaced", "test"]


def test_lines_cut_off_under_us_break_the_chain_at_the_next_line(path: Path) -> None:
    with AuditLog(path) as log:
        for _ in range(5):
            log.write(event())
        kept = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
        os.truncate(path, len(kept))
        log.write(event())
    assert whats(path) == ["test", "test", "shortened", "test"]
    bad = verify(path).bad
    assert bad is not None
    assert bad.number == 3


def test_a_log_emptied_under_us_breaks_the_chain(path: Path) -> None:
    """logrotate's copytruncate: what was cut off is not in this file, and the log says so."""
    with AuditLog(path) as log:
        log.write(event())
        os.truncate(path, 0)
        log.write(event())
    assert whats(path) == ["shortened", "test"]
    assert not verify(path).ok


def test_a_log_whose_directory_is_gone_is_a_failure_until_it_is_back(path: Path) -> None:
    with AuditLog(path) as log:
        log.write(event())
        path.parent.rename(path.parent.with_name("moved"))
        for _ in range(2):
            with pytest.raises(AuditUnavailable, match="no such file"):
                log.write(event())
        assert not path.parent.exists()
        path.parent.mkdir()
        log.write(event())
    assert whats(path) == ["replaced", "test"]
    assert lines(path)[0]["prev"] != GENESIS


def test_a_path_that_becomes_something_else_is_a_failure(path: Path) -> None:
    with AuditLog(path) as log:
        log.write(event())
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
        with pytest.raises(AuditUnavailable, match="symbolic links"):
            log.write(event())


def test_a_full_file_is_rotated_and_the_chain_runs_through_all(path: Path) -> None:
    with AuditLog(path, max_bytes=2000, keep=DEFAULT_KEEP) as log:
        for number in range(40):
            log.write(event(str(number)))
    files = sorted(path.parent.iterdir())
    assert len(files) > 3
    assert all(file.stat().st_size <= 2000 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    report = verify(path)
    assert (report.ok, report.files, report.from_beginning) == (True, len(files), True)
    assert details(path) == [str(number) for number in range(40)]


def test_no_more_rotated_files_are_kept_than_asked_for(path: Path) -> None:
    with AuditLog(path, max_bytes=1000, keep=5) as log:
        for _ in range(60):
            log.write(event())
    with AuditLog(path, max_bytes=1000, keep=2) as log:
        for _ in range(60):
            log.write(event())
    assert sorted(file.name for file in path.parent.iterdir()) == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    report = verify(path)
    assert (report.ok, report.from_beginning) == (True, False)


@pytest.mark.parametrize("step", ["between the numbers", "before the new file"])
def test_a_crash_within_a_rotation_loses_nothing(path: Path, step: str) -> None:
    with AuditLog(path, max_bytes=1000) as log:
        for _ in range(12):
            log.write(event())
    numbered = [path.with_name(f"audit.jsonl.{n}") for n in range(1, 9)]
    present = max(n for n, file in enumerate(numbered) if file.exists())
    if step == "between the numbers":
        numbered[present].rename(numbered[present + 1])
    else:
        for n in range(present, -1, -1):
            numbered[n].rename(numbered[n + 1])
        path.rename(numbered[0])
    assert verify(path).ok
    before = verify(path).lines
    with AuditLog(path, max_bytes=1000) as log:
        for _ in range(12):
            log.write(event())
    assert verify(path).ok
    assert verify(path).from_beginning
    assert verify(path).lines >= before + 12


def test_processes_that_share_a_log_write_one_chain_through_its_rotations(path: Path) -> None:
    code = (
        PRELUDE
        + """
with AuditLog(Path(sys.argv[1]), max_bytes=100_000, keep=100) as log:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(1000):
        log.write(event(sys.argv[2] + str(number)))
"""
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TOP
        )
        for name in "abc"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    report = verify(path)
    assert report.ok, report.bad
    assert report.from_beginning
    assert report.files > 3
    seen = details(path)
    assert sum(one[0] != two[0] for one, two in itertools.pairwise(seen)) > 10, "the writers did not overlap"
    for name in "abc":
        assert [text for text in seen if text.startswith(name)] == [f"{name}{number}" for number in range(1000)]


def test_threads_that_share_a_log_write_one_chain(path: Path) -> None:
    with AuditLog(path) as log:

        def write_many() -> None:
            for _ in range(100):
                log.write(event())

        threads = [threading.Thread(target=write_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = verify(path)
    assert (report.ok, report.lines) == (True, 400)


def test_a_forked_child_and_its_parent_write_one_chain(path: Path) -> None:
    done = in_process(
        """
with AuditLog(Path(sys.argv[1])) as log:
    log.write(event())
    child = os.fork()
    for _ in range(200):
        log.write(event())
    if child == 0:
        os._exit(0)
    print(os.waitpid(child, 0)[1])
""",
        str(path),
    )
    assert done.stdout == "0\n", done.stderr
    report = verify(path)
    assert (report.ok, report.lines) == (True, 401)


def test_a_lock_that_is_never_released_is_a_failure_not_a_wait_for_ever(path: Path) -> None:
    with AuditLog(path) as log, path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(AuditUnavailable, match="another process holds its lock"):
            log.write(event())
        assert time.monotonic() - started < 1  # the proxy does nothing else meanwhile
        fcntl.flock(other, fcntl.LOCK_UN)
        log.write(event())
    assert verify(path).lines == 1


def test_a_closed_log_opens_again_at_the_next_line(path: Path) -> None:
    log = AuditLog(path)
    log.close()
    log.write(event())
    log.close()
    log.close()
    assert verify(path).lines == 1


def test_a_log_synced_at_each_line_rotates_as_well(path: Path) -> None:
    with AuditLog(path, max_bytes=1000, fsync=True) as log:
        for _ in range(10):
            log.write(event())
    assert verify(path).ok
    assert verify(path).files > 1


def test_at_least_one_rotated_file_is_kept(path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        AuditLog(path, keep=0)
