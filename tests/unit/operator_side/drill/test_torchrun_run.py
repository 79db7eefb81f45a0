from __future__ import annotations

from typing import Any

from operator_side.drill.torchrun_run import StartTracker

RANKS = 2


def line(rank: int, pid: int, at: float, **more: Any) -> dict[str, Any]:
    return {"time": at, "attempt": 0, "rank": rank, "pid": pid, **more}


def steps(first: int, pids: tuple[int, int], at: float) -> list[dict[str, Any]]:
    return [line(rank, pid, at, step=first) for rank, pid in enumerate(pids)]


def test_training_is_said_once_when_every_rank_has_done_a_step() -> None:
    starts = StartTracker(RANKS)
    assert starts.derive_status([line(0, 10, 1.0, begins=True), line(0, 10, 2.0, step=0)], []) == []
    (said,) = starts.derive_status([line(1, 11, 3.0, step=0)], [])
    assert (said["event"], said["time"]) == ("training", 3.0)
    assert starts.derive_status(steps(1, (10, 11), 4.0), []) == []


def test_new_processes_are_a_new_start_and_train_again() -> None:
    starts = StartTracker(RANKS)
    starts.derive_status(steps(0, (10, 11), 1.0), [])
    lines = steps(1, (20, 21), 5.0)
    event = {"event": "restore", "step": 0, "time": 4.0, "role": "trainer"}
    said = starts.derive_status(lines, [event, {**event, "time": 4.5}])
    assert [(one["event"], one.get("step")) for one in said] == [("restored", 0), ("training", None)]
    assert [one["attempt"] for one in lines] == [2, 2]


def test_late_lines_of_a_killed_process_belong_to_its_own_start() -> None:
    starts = StartTracker(RANKS)
    starts.derive_status(steps(0, (10, 11), 1.0), [])
    late = [line(1, 11, 2.0, step=1), line(0, 20, 2.5, begins=True), line(0, 20, 3.0, step=1)]
    assert starts.derive_status(late, []) == [], "rank 1 has not begun again"
    assert [one["attempt"] for one in late] == [1, 2, 2]
    (said,) = starts.derive_status([line(1, 21, 4.0, step=1)], [])
    assert said["event"] == "training"
