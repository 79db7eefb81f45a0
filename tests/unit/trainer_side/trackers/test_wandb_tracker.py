"""How marks find rows of a simulated W&B run: they close none, and hide none of the script's."""

from __future__ import annotations

from typing import Any

from trainer_side.trackers.tracker import Mark
from trainer_side.trackers.wandb_tracker import WandbTracker


class PlayedConfig(dict[str, Any]):
    def update(self, said: dict[str, Any], *, allow_val_change: bool) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(said)


class PlayedRun:
    """A run whose rows are closed by a later step, as in W&B.

    Attributes:
        rows: Number → content of the row.
    """

    id = "run-7"

    def __init__(self, step: int = 0) -> None:
        self.step, self.config = step, PlayedConfig()
        self.rows: dict[int, dict[str, Any]] = {}

    def define_metric(self, name: str, **_: Any) -> None:
        return

    def log(self, row: dict[str, Any], *, step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None or commit is False, (
            "a row that is closed here swallows what the script logs next"
        )
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(row)


def _tracker(run: PlayedRun, last_step: int = -1, first_step: int = 0) -> WandbTracker:
    return WandbTracker(run, last_step, first_step)


def test_marks_of_different_names_share_a_row_and_those_of_one_name_wait_for_the_next() -> None:
    run = PlayedRun()
    tracker = _tracker(run)
    tracker.log({"loss": 1.0}, 29)
    tracker.mark([Mark("stall_seconds", 29, 0.5)])
    tracker.mark([Mark("staged_seconds", 19, 1.0), Mark("staged_seconds", 29, 2.0)])
    tracker.mark([])
    tracker.log({"loss": 0.5}, 30)
    tracker.mark([])
    assert run.rows == {
        29: {
            "loss": 1.0,
            "holdfast/stall_seconds": 0.5,
            "holdfast_step/stall_seconds": 29,
            "holdfast/staged_seconds": 1.0,
            "holdfast_step/staged_seconds": 19,
        },
        30: {"loss": 0.5, "holdfast/staged_seconds": 2.0, "holdfast_step/staged_seconds": 29},
    }


def test_marks_that_found_no_row_are_shown_at_the_end_by_the_newest_of_each_name() -> None:
    run = PlayedRun()
    tracker = _tracker(run)
    tracker.mark([Mark("durable_seconds", step, 1.0) for step in (9, 19, 29)])
    tracker.end()
    assert run.rows[0]["holdfast_step/durable_seconds"] == 29


def test_steps_that_the_run_has_are_left_out() -> None:
    run = PlayedRun()
    tracker = _tracker(run, last_step=36)
    for step in (30, 36, 37):
        tracker.log({"loss": 1.0}, step)
    assert [*run.rows] == [37]


def test_marks_before_the_first_row_of_a_resumed_offline_run_are_at_its_first_step() -> None:
    run = PlayedRun()
    _tracker(run, last_step=37, first_step=30).mark([Mark("attempt", 30, 2, "resumed from step 29")])
    assert [*run.rows] == [30]
    assert [*run.config.values()] == ["resumed from step 29"]
