"""Experiment trackers at a Checkpointer: checkpoints carry the trackers' runs; no real library."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.image.manifest import manifest_name
from holdfast.image.save_record import SaveRecord
from holdfast.integrations.trackers import (
    Mark,
    StartPoint,
    Tracker,
    start_mlflow,
    start_tensorboard,
    start_wandb,
)
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.link.job_state import JobState

CONFIG = TrainerConfig(events=None, on_not_durable="warn", close_seconds_max=0.1)
STARTS = {"wandb": start_wandb, "tensorboard": start_tensorboard, "mlflow": start_mlflow}


class Kept(Tracker):
    """A tracker that records its calls.

    Attributes:
        start: With which it was begun.
    """

    kind = "kept"

    def __init__(self, start: StartPoint, run_id: str = "run-1") -> None:
        self.start, self.run_id = start, run_id
        self.marks: list[Mark] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def mark(self, marks: Sequence[Mark]) -> None:
        self.marks += marks


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLink:
    found = FakeLink()
    found.job = JobState(0, 1, store_url=str(tmp_path), chunk_bytes=1 << 20, attempt=2)
    monkeypatch.setattr(joining, "connect_stager", found.meet)
    return found


def _state() -> dict[str, object]:
    return {"model": torch.nn.Linear(8, 8), "note": [1]}


@pytest.mark.parametrize("kind", STARTS)
def test_a_tracker_is_refused_before_the_restore(link: FakeLink, kind: str) -> None:
    with (
        Checkpointer(_state(), config=CONFIG) as checkpointer,
        pytest.raises(ConfigError, match=r"before restore\(\)"),
    ):
        STARTS[kind](checkpointer)


@pytest.mark.parametrize("kind", STARTS)
def test_a_missing_tracker_is_named_with_what_to_install(
    link: FakeLink, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == kind or name.startswith(f"{kind}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, kind, None)
    with Checkpointer(_state(), config=CONFIG, fresh=True) as checkpointer:
        with pytest.raises(ConfigError, match=rf"trackers needs {kind}.*pip install {kind} .*\[trackers\]"):
            STARTS[kind](checkpointer)
        assert checkpointer._mark_sender is None


def test_a_tracker_on_another_rank_does_nothing(link: FakeLink) -> None:
    link.job = JobState(1, 2, store_url=link.job.store_url, chunk_bytes=1 << 20, attempt=2)
    with Checkpointer(_state(), config=CONFIG, fresh=True) as checkpointer:
        tracker = start_wandb(checkpointer, project="gpt")
        tracker.log({"loss": 1.0}, 0)
        assert tracker.run is None


def test_a_save_has_the_runs_of_its_trackers_and_its_marks_reach_them(link: FakeLink) -> None:
    with Checkpointer(_state(), config=CONFIG, fresh=True) as checkpointer:
        assert checkpointer.save(0)
        link.bytes_of(0)
        checkpointer.wait_copied()
        link.stage(0)
        tracker = checkpointer.track(Kept)
        assert checkpointer.save(1)
        link.bytes_of(1)
    assert [link.offers[step][0].record.trackers for step in (0, 1)] == [None, {"kept": "run-1"}]
    assert isinstance(tracker, Kept)
    assert tracker.start == StartPoint(0, 2)
    assert [(mark.name, mark.step) for mark in tracker.marks] == [("attempt", 0), ("stall_seconds", 1)]


def test_a_tracker_whose_run_has_no_room_in_a_record_is_refused(link: FakeLink) -> None:
    with (
        Checkpointer(_state(), config=CONFIG, fresh=True) as checkpointer,
        pytest.raises(ConfigError, match="at most 1024 characters"),
    ):
        checkpointer.track(lambda start: Kept(start, "x" * 1025))


def test_a_restored_checkpoint_says_in_which_runs_it_goes_on(link: FakeLink, tmp_path: Path) -> None:
    record = {"ranks": {"0": SaveRecord(trackers={"kept": "run-7"}).to_json()}}
    manifest = publish_named(tmp_path, 29, _state()).model_copy(update={"record": record})
    (tmp_path / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
    with Checkpointer(_state(), config=CONFIG) as checkpointer:
        assert checkpointer.restore() == 30
        tracker = checkpointer.track(Kept)
        assert checkpointer.restored is not None
        assert checkpointer.restored.trackers == {"kept": "run-7"}
    assert isinstance(tracker, Kept)
    text = f"attempt 2 resumed from step 29 of attempt 1, read from {link.job.store_url}"
    assert tracker.start == StartPoint(30, 2, {"kept": "run-7"}, text)
    assert tracker.marks == [Mark("attempt", 30, 2, text)]


@pytest.mark.parametrize(("step", "branched"), [(None, False), (29, True)])
def test_a_script_that_chooses_its_step_begins_another_branch(
    link: FakeLink, tmp_path: Path, step: int | None, branched: bool
) -> None:
    """Steps that the older run has are then trained otherwise: their points must not be left out."""
    publish_named(tmp_path, 29, _state())
    with Checkpointer(_state(), config=CONFIG) as checkpointer:
        checkpointer.restore(step=step)
        tracker = checkpointer.track(Kept)
    assert isinstance(tracker, Kept)
    assert tracker.start.branched == branched
