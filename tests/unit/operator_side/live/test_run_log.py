"""The logs of a run that is still growing."""

from __future__ import annotations

import json
from pathlib import Path

from operator_side.live.run_log import RunLog


def launched(path: Path, number: int) -> None:
    with path.open("a") as log:
        line = {
            "time": 1_800_000_000.0 + number,
            "event": "launched",
            "role": "supervisor",
            "attempt": number,
        }
        log.write(json.dumps(line) + "\n")


def test_logs_are_read_again_when_they_have_grown(tmp_path: Path) -> None:
    now = [0.0]
    logs = tmp_path / "logs"
    log = RunLog("r", [logs, tmp_path / "rank-0.jsonl"], clock=lambda: now[0])
    assert log.read() is None
    logs.mkdir()
    assert log.read() is None
    launched(logs / "status.jsonl", 1)
    first = log.read()
    assert first is not None
    assert len(first.attempts) == 1
    assert log.read() is first, "it is not read again while nothing has changed"
    launched(logs / "status.jsonl", 2)
    second = log.read()
    assert second is not None
    assert len(second.attempts) == 2


def test_a_log_that_takes_long_is_read_for_a_tenth_of_the_time(tmp_path: Path) -> None:
    now, each = [0.0], 3.0

    def clock() -> float:
        now[0] += each
        return now[0]

    path = tmp_path / "status.jsonl"
    launched(path, 1)
    log = RunLog("r", [path], clock=clock)
    first = log.read()
    launched(path, 2)
    assert log.read() is first
    now[0] += 100
    again = log.read()
    assert again is not None
    assert len(again.attempts) == 2
