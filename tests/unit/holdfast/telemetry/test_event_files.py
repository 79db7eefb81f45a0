"""The files of an event log: when the next one begins, which stay, and how readers continue."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.telemetry.event_files import NUMBERED_MAX, hold_append_lock, numbered_files, rotate
from holdfast.telemetry.event_follower import Follower
from holdfast.telemetry.event_reading import read_logs
from holdfast.telemetry.events import RECORD_BYTES_MAX, EventLog, encode_event
from tests.support.events import read_events

_FILE_BYTES = 4096
_RECORDS = 300  # of about 60 bytes: four files and more


def _emit(path: Path, numbers: range, *, role: str = "stager") -> None:
    log = EventLog(path, role=role, file_bytes_max=_FILE_BYTES)
    for number in numbers:
        log.emit("tick", {"number": number})
    log.close()


def _numbers(path: Path) -> list[int]:
    return [line["number"] for line in read_events(path)]


def test_a_full_file_is_followed_by_the_next_and_readers_see_one_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    _emit(path, range(_RECORDS))
    sizes = [one.stat().st_size for _, one in numbered_files(path)]
    assert len(sizes) >= 3
    assert all(_FILE_BYTES <= size < _FILE_BYTES + 200 for size in sizes)
    assert _numbers(path) == list(range(_RECORDS))
    log = read_logs([path])
    assert [event.fields["number"] for event in log.events] == list(range(_RECORDS))
    assert (log.unreadable, log.unfinished) == (0, [])
    assert len(read_logs(sorted(tmp_path.glob("events.jsonl*"))).events) == _RECORDS, "each once"
    assert len(read_logs([tmp_path]).events) == _RECORDS


def test_only_so_many_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    _emit(path, range(1000))
    kept = [number for number, _ in numbered_files(path)]
    assert kept == list(range(kept[-1] - NUMBERED_MAX + 1, kept[-1] + 1))
    assert kept[0] > 1, "older ones were there"
    assert _numbers(path) == list(range(_numbers(path)[0], 1000))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < (NUMBERED_MAX + 1) * (_FILE_BYTES + 200)


def test_another_log_beside_it_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in ("events.jsonl.1", "events.jsonl.000001.gz", "events.jsonl.old", "x.events.jsonl.000001"):
        (tmp_path / name).write_text("x")
    assert numbered_files(path) == []
    _emit(path, range(1000))
    assert (tmp_path / "events.jsonl.1").read_text() == "x"


_WRITER = """
import sys
from pathlib import Path
from holdfast.telemetry.events import EventLog
log = EventLog(Path(sys.argv[1]), role=sys.argv[2], file_bytes_max=int(sys.argv[3]))
for number in range(int(sys.argv[4])):
    log.emit("tick", {"number": number})
"""


def _writer(path: Path, role: str, count: int, file_bytes: int = 65536) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(path), role, str(file_bytes), str(count)])


def test_several_processes_share_a_log_and_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower, followed = Follower(path), list[dict[str, object]]()
    writers = [_writer(path, f"role{number}", 1500) for number in range(3)]
    while any(writer.poll() is None for writer in writers):
        followed += follower.read()
        time.sleep(0.01)
    while more := list(follower.read()):
        followed += more
    follower.close()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert numbered_files(path)  # how many, says who held the lock when a file was full
    for lines in (read_events(path), followed):
        for number in range(3):
            of_one = [line["number"] for line in lines if line["role"] == f"role{number}"]
            assert of_one == list(range(1500))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_killed_while_it_begins_the_next_file_loses_nothing(
    tmp_path: Path, moment: str
) -> None:
    path = tmp_path / "events.jsonl"
    script = (
        f"""
import os, signal, sys
from pathlib import Path
rename = Path.rename
def killed(self, target):
    if {moment!r} == "after":
        rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = killed
"""
        + _WRITER
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), "stager", str(_FILE_BYTES), "1000"], check=False
    )
    assert done.returncode == -signal.SIGKILL
    before = _numbers(path)
    assert before == list(range(len(before)))
    assert len(numbered_files(path)) == (moment == "after")
    assert len(read_logs([path]).events) == len(before)
    _emit(path, range(len(before), _RECORDS))
    assert _numbers(path) == list(range(_RECORDS))


def test_killed_at_any_moment_it_loses_at_most_a_line_that_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for seconds in (0.001, 0.004, 0.016):
        writer = _writer(path, "stager", 1_000_000, _FILE_BYTES * 8)
        while not read_events(path):
            assert writer.poll() is None
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        log = read_logs([path])
        assert log.unreadable <= 1
        numbers = [event.fields["number"] for event in log.events]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for file in tmp_path.iterdir():
            file.unlink()


def test_the_first_rename_of_a_full_log_serves_all_writers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 100)
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    rotate(one, path, bytes_max=100)
    path.write_bytes(b"y" * 100)
    rotate(other, path, bytes_max=100)
    assert [file.read_bytes()[:1] for _, file in numbered_files(path)] == [b"x"], (
        "the next file was not its own"
    )
    assert path.exists()
    os.close(one)
    os.close(other)


def test_a_file_is_not_renamed_while_a_line_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 100)
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    with hold_append_lock(one, 100):
        rotate(other, path, bytes_max=100)
        assert numbered_files(path) == []
    rotate(other, path, bytes_max=100)
    assert len(numbered_files(path)) == 1
    os.close(one)
    os.close(other)


def test_where_files_cannot_be_locked_the_log_only_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "events.jsonl"
    _emit(path, range(_RECORDS))
    assert numbered_files(path) == []
    assert _numbers(path) == list(range(_RECORDS))


def test_a_log_that_is_removed_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, role="stager")
    follower = Follower(path)
    log.emit("one")
    assert [line["event"] for line in follower.read()] == ["one"]
    path.unlink()
    log.emit("two")
    assert [line["event"] for line in follower.read()] == ["two"]
    log.close()
    follower.close()


def test_threads_that_share_one_log_lose_nothing_over_its_files(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, role="stager", file_bytes_max=_FILE_BYTES)

    def emit() -> None:
        for number in range(100):
            log.emit("tick", {"number": number})

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted(_numbers(path)) == sorted(list(range(100)) * 4)


def test_a_record_of_ten_thousand_ranks_is_cut_and_says_so() -> None:
    ranks = {str(rank): {"copy_seconds": 0.125, "slice_bytes": 1 << 30} for rank in range(10_000)}
    said = {
        "time": 1.0,
        "event": "durable",
        "step": 7,
        "record": {"stager": {"pgt1_seconds": 2.0}, "ranks": ranks},
    }
    line = encode_event(said)
    assert RECORD_BYTES_MAX // 3 < len(line) <= RECORD_BYTES_MAX
    kept = json.loads(line)
    assert (kept["event"], kept["step"], kept["cut"]) == ("durable", 7, ["record.ranks"])
    assert kept["record"]["stager"] == {"pgt1_seconds": 2.0}
    assert kept["record"]["ranks"] == {
        name: ranks[name] for name in list(ranks)[: len(kept["record"]["ranks"])]
    }
    assert len(ranks) == 10_000, "the caller's own is whole"


@pytest.mark.parametrize(
    "fields",
    [
        {"reason": "x" * 300_000},
        {"tensors": [f"layer.{n}" for n in range(50_000)]},
        {"deep": [[[["y" * 100_000]]], 1]},
        {"k" * 100_000: 1},
        {str(n): n for n in range(30_000)},
        {"a": "é" * 70_000, "b": ["z" * 70_000], "c": {str(n): None for n in range(20_000)}},
    ],
)
def test_no_record_is_longer_than_the_limit(fields: dict[str, object]) -> None:
    line = encode_event({"time": 1.0, "event": "e", "role": "stager", **fields})
    assert len(line) <= RECORD_BYTES_MAX
    assert line.endswith(b"\n")
    kept = json.loads(line)
    assert (kept["time"], kept["event"], kept["role"]) == (1.0, "e", "stager")
    assert kept["cut"]


def test_a_fitting_record_is_written_as_it_is() -> None:
    assert (
        encode_event({"time": 1.0, "event": "e", "path": Path("/x")})
        == b'{"time":1.0,"event":"e","path":"/x"}\n'
    )
