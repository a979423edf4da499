"""Claims about reading the audit log: no damage to the chain goes unnoticed, and no content breaks the reader."""

import fcntl
import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.audit import GENESIS, MAX_LINE_BYTES, AuditLog, AuditUnavailable
from proxy.audit_reader import BadLine, Line, read, verify
from proxy.events import AttemptEvent, DecisionEvent


def decision(call_id: str = "c1", verdict: str = "allow") -> DecisionEvent:
    return DecisionEvent(
        time=1.0,
        call_id=call_id,
        attempt_id="a1",
        layer="http",
        protocol="http",
        host="example.com",
        port=443,
        decision=verdict,
        reason="allowed",
        policy_name="p",
        policy_digest="d",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        for number in range(6):
            log.write(decision(f"c{number % 2}", "deny" if number % 3 == 0 else "allow"))
    return path


def append(path: Path, raw: bytes) -> None:
    with path.open("ab") as file:
        file.write(raw)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_in_any_line_but_the_last_breaks_the_chain(path: Path, data: st.DataObject) -> None:
    whole = path.read_bytes()
    covered = len(whole) - len(whole.splitlines(keepends=True)[-1])
    place = data.draw(st.integers(0, covered - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[place]))
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        assert verify(path).bad is not None
    finally:
        path.write_bytes(whole)


def remove_first(lines: list[bytes]) -> None:
    del lines[0]


def remove_middle(lines: list[bytes]) -> None:
    del lines[2]


def repeat(lines: list[bytes]) -> None:
    lines.insert(2, lines[2])


def exchange(lines: list[bytes]) -> None:
    lines[2], lines[3] = lines[3], lines[2]


def insert_blank(lines: list[bytes]) -> None:
    lines.insert(2, b"\n")


def renumber_without(lines: list[bytes]) -> None:
    """Remove a line and number the rest anew, as a forger would who does not compute hashes."""
    del lines[2]
    for number, line in enumerate(lines):
        lines[number] = json.dumps({**json.loads(line), "seq": number + 1}).encode() + b"\n"


@pytest.mark.parametrize(
    "forge", [remove_first, remove_middle, repeat, exchange, insert_blank, renumber_without], ids=lambda f: f.__name__
)
def test_a_line_removed_added_or_moved_breaks_the_chain(path: Path, forge: Callable[[list[bytes]], None]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    forge(lines)
    path.write_bytes(b"".join(lines))
    assert not verify(path).ok


def test_the_first_bad_line_is_named_with_its_file(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"seq":3,"time":"1970', b'"seq":3,"time":"1971'))
    bad = verify(path).bad
    assert bad is not None
    assert str(bad) == f"{path}:4: its `prev` is not the hash of the line before: it was changed, or lines are missing"


def test_a_damaged_line_is_innocent_only_when_the_writer_noted_it(path: Path) -> None:
    append(path, b"cut sh")
    report = verify(path)
    assert (report.ok, [line.number for line in report.incomplete]) == (True, [7])
    append(path, b"ort\n")
    bad = verify(path).bad
    assert bad is not None
    assert bad.number == 7


def test_a_rotated_file_that_is_missing_breaks_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    with AuditLog(path, max_bytes=1500) as log:
        for _ in range(20):
            log.write(decision())
    files = verify(path).files
    assert files >= 4
    path.with_name("audit.jsonl.2").unlink()
    bad = verify(path).bad
    assert bad is not None
    assert (bad.file.name, bad.number) == ("audit.jsonl.1", 1)
    path.with_name("audit.jsonl.1").unlink()
    assert not verify(path).ok


def test_a_log_cut_at_its_old_end_says_that_its_beginning_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    with AuditLog(path, max_bytes=1500) as log:
        for _ in range(20):
            log.write(decision())
    oldest = max(path.parent.iterdir(), key=lambda file: file.name)
    assert verify(path).from_beginning
    oldest.unlink()
    assert (verify(path).ok, verify(path).from_beginning) == (True, False)


def test_an_empty_log_is_intact(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.touch()
    report = verify(path)
    assert (report.ok, report.lines, report.files) == (True, 0, 1)


@pytest.mark.parametrize("plant", [lambda path: None, os.mkfifo, Path.mkdir], ids=["nothing", "a FIFO", "a directory"])
def test_what_is_no_file_cannot_be_read(tmp_path: Path, plant: Callable[[Path], object]) -> None:
    path = tmp_path / "audit.jsonl"
    plant(path)
    with pytest.raises(AuditUnavailable, match="cannot be read"):
        verify(path)
    with pytest.raises(AuditUnavailable, match="cannot be read"):
        list(read(path))


def test_events_are_read_by_call_and_by_verdict(path: Path) -> None:
    def numbers(**wanted: object) -> list[int]:
        return [entry.number for entry in read(path, **wanted)]  # type: ignore[arg-type]

    assert numbers() == [1, 2, 3, 4, 5, 6]
    assert numbers(call_id="c1") == [2, 4, 6]
    assert numbers(denied=True) == [1, 4]
    assert numbers(call_id="c1", denied=True) == [4]
    assert numbers(call_id="none") == []


HOSTILE = {
    "deep nesting": b"[" * 200_000 + b"]" * 200_000,
    "a deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a huge number": b'{"seq":' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"a":"\xff\xfe"}',
    "NULs": b"\0" * 4096,
    "not an object": b"[1]",
    "blank": b"",
    "a line without end": b'{"a":"' + b"x" * (2 * MAX_LINE_BYTES) + b'"}',
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_no_event_is_reported_and_what_follows_is_read(path: Path, raw: bytes) -> None:
    append(path, raw + b"\n" + b'{"seq":8}\n')
    entries = list(read(path, call_id="c1"))
    assert [entry.number for entry in entries if isinstance(entry, BadLine)] == [7]
    assert isinstance(list(read(path))[-1], Line)
    bad = verify(path).bad
    assert bad is not None
    assert bad.number == 7


@given(st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_can_be_read_without_an_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "any"
    path.write_bytes(raw)
    verify(path)
    assert len(list(read(path))) == len(raw.removesuffix(b"\n").split(b"\n")) if raw else True


def test_a_line_of_any_length_takes_bounded_memory(path: Path) -> None:
    append(path, b"x" * (40 * MAX_LINE_BYTES) + b"\n")
    tracemalloc.start()
    try:
        list(read(path))
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()


def test_the_longest_event_is_well_below_the_bound_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        log.write(
            AttemptEvent(
                time=1.0,
                call_id="\U0001f600" * 200,
                attempt_id="é" * 200,
                phase="start",
                mode="\x00" * 400,
                domains=("ü" * 400,) * 300,
                policy_name="\U0001f600" * 400,
                policy_digest="d",
            )
        )
    assert path.stat().st_size < MAX_LINE_BYTES / 1.5
    assert verify(path).ok


def test_a_log_from_before_there_were_tenants_is_read_and_goes_on(tmp_path: Path) -> None:
    """Its lines have no such key. They are nobody's, and the chain leads from them to those that have it."""
    path = tmp_path / "audit.jsonl"
    old = {"seq": 1, "time": "2026-01-01T00:00:00.000000Z", "event": "decision", "call_id": "c0", "decision": "deny"}
    path.write_text(json.dumps({**old, "prev": GENESIS}, separators=(",", ":")) + "\n")
    path.chmod(0o600)
    with AuditLog(path) as log:
        log.write(replace(decision("c1"), tenant="acme"))
        log.write(replace(decision("c2"), tenant="acme-two"))
        log.write(decision("c3"))
    assert verify(path).ok

    def calls(tenant: str | None = None) -> list[object]:
        return [entry.fields["call_id"] for entry in read(path, tenant=tenant) if isinstance(entry, Line)]

    assert calls() == ["c0", "c1", "c2", "c3"]
    assert calls(tenant="acme") == ["c1"]
    assert calls(tenant="") == ["c0", "c3"]


def test_a_log_that_is_being_written_is_read_up_to_a_line_s_end(path: Path) -> None:
    """The reader takes the writers' lock for a moment, so that it never sees a line in the making."""
    with path.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(AuditUnavailable, match="another process holds its lock"):
            verify(path)
    assert verify(path).ok


def test_reading_goes_on_through_a_rotation_that_happens_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    with AuditLog(path, max_bytes=2000) as log:
        for number in range(4):
            log.write(decision(f"c{number}"))
        entries = read(path)
        first = next(entries)
        for number in range(4, 30):
            log.write(decision(f"c{number}"))
        rest = list(entries)
    calls = [entry.fields.get("call_id") for entry in [first, *rest] if isinstance(entry, Line)]
    assert calls == ["c0", "c1", "c2", "c3"]
