"""The event log: whole lines, never an exception, several writers to one file."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.telemetry.events import EventLog


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_who_when_and_what(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    log = EventLog(path, role="trainer", rank=3, clock=lambda: 1234.5678901)
    log.emit("staged", {"pgt1_seconds": 0.25}, step=7)
    log.emit("bye")
    log.close()
    assert lines_of(path) == [
        {
            "time": 1234.56789,
            "event": "staged",
            "role": "trainer",
            "rank": 3,
            "step": 7,
            "pgt1_seconds": 0.25,
        },
        {"time": 1234.56789, "event": "bye", "role": "trainer", "rank": 3},
    ]
    assert path.stat().st_mode & 0o077 == 0


def test_lines_that_were_there_stay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"old"}\n')
    log = EventLog(path, role="stager")
    log.emit("new", {"newline": "a\nb", "path": Path("/x")})
    log.close()
    assert [line["event"] for line in lines_of(path)] == ["old", "new"]


def test_lines_of_many_threads_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    logs = [EventLog(path, role="flusher", rank=rank) for rank in range(4)]

    def emit(log: EventLog) -> None:
        for step in range(50):
            log.emit("tick", {"padding": "x" * 500}, step=step)

    threads = [threading.Thread(target=emit, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    seen = {(line["rank"], line["step"]) for line in lines_of(path)}
    assert seen == {(rank, step) for rank in range(4) for step in range(50)}


def test_a_full_disk_is_told_but_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    log = EventLog(full, role="flusher")
    with caplog.at_level(logging.WARNING, logger="holdfast.events"):
        log.emit("durable", step=1)
    log.close()
    assert "No space left" in caplog.text


def test_a_line_cut_by_a_full_disk_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, role="flusher")
    whole = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, data: whole(fd, data[:10])
    )  # as write(2) does on the last page
    log.emit("durable", step=1)
    monkeypatch.undo()
    log.emit("durable", step=2)
    log.emit("durable", step=3)
    log.close()
    torn, *lines = path.read_text().splitlines()
    assert len(torn) == 10
    assert [json.loads(line)["step"] for line in lines] == [2, 3]


def test_a_full_disk_at_the_start_is_tried_again_and_a_wrong_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    with monkeypatch.context() as patch:

        def no_room(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "open", no_room)
        log = EventLog(path, role="flusher")
        log.emit("durable", step=1)
    log.emit("durable", step=2)
    log.close()
    assert [line["step"] for line in lines_of(path)] == [2]
    with pytest.raises(ConfigError, match="name another file"):
        EventLog(path / "below-a-file" / "events.jsonl", role="flusher")


def test_without_a_file_it_only_mirrors(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(None, role="tool")
    with caplog.at_level(logging.DEBUG, logger="holdfast.events"):
        log.emit("looked")
    log.close()
    log.close()
    assert '"event":"looked"' in caplog.text


def test_after_close_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, role="tool")
    log.close()
    # The closed descriptor's number may be another file's by now.
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    log.emit("late")
    os.close(other)
    assert path.read_bytes() == b""
    assert (tmp_path / "other").read_bytes() == b""
