"""The experiment `accuracy`, small: two real trainings, one of them killed and resumed after the tenth epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experiments.accuracy import equal_epochs, run

EPOCHS, WIDTH = 12, 256


@pytest.mark.mpi
def test_a_training_that_is_restarted_is_as_accurate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    document = run(tmp_path, EPOCHS, WIDTH, lambda _: None)
    (kill,) = document["kills"]
    assert kill["lost_steps"] > 0
    assert kill["resumed_from"] >= 0
    assert equal_epochs(document) == EPOCHS, document["curves"]
    assert document["checkpoints"]["compared"] > 0
    assert document["checkpoints"]["differences"] == []
    last = document["curves"]["killed"][-1]
    assert last["right"] > 0.8 * last["of"], "it has learnt nothing, so equal curves show nothing"
