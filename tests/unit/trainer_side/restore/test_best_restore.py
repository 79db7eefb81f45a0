"""`restore(best=…)`: the best good checkpoint of the store, the next best after damage, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigError, DamageError, StoreMissing
from holdfast.image.best_rule import BestRule
from holdfast.image.manifest import State, manifest_name
from holdfast.store.posix import PosixStore
from tests.support.restoring import Ranks, ThreadPeers, publish
from trainer_side.restore.choice import WantedBest, parse_best
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions

RULE = BestRule(metric="loss", mode="min")
LOSSES: dict[int, dict[str, Any]] = {
    1: {"loss": 0.3, "acc": 0.5},
    2: {"loss": 0.1},
    3: {"loss": 0.2},
    4: {"loss": 0.9},
    5: {},
}


def add(root: Path, step: int, metrics: dict[str, float], attempt: int = 1, **changes: Any) -> None:
    manifest = publish(root, step, {"x": torch.full((1000,), float(step))}, attempt=attempt, ranks=2)
    manifest = manifest.model_copy(update={"metrics": metrics, **changes})
    (root / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step, metrics in LOSSES.items():
        add(tmp_path / "run", step, metrics, best=RULE)
    return tmp_path / "run"


def restored(root: Path, metric: str = "loss", ranks: int = 2, **more: Any) -> list[tuple[int, float]]:
    """Step and value that each rank has then."""

    def one(peers: ThreadPeers) -> tuple[int, float]:
        state = {"x": torch.zeros(1000)}
        found = restore(
            state,
            PosixStore(root),
            peers,
            events=None,
            options=RestoreOptions(best=WantedBest(metric, **more)),
        )
        assert found is not None
        assert bool((state["x"] == state["x"][0]).all())
        return found.step, float(state["x"][0])

    return Ranks(ranks).run(one)


def test_the_best_is_restored_on_every_rank(root: Path) -> None:
    assert restored(root) == [(2, 2.0), (2, 2.0)]
    assert restored(root, mode="max", ranks=1) == [(4, 4.0)]


def test_a_later_attempt_of_the_same_step_is_another_checkpoint(root: Path) -> None:
    add(root, 2, {"loss": 0.5}, attempt=2)
    assert restored(root, ranks=1) == [(2, 2.0)]


def test_damage_leads_to_the_next_best(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(root, 2, {"loss": 0.1}, state=State.BAD, note="read back and found bad")
    file = root / "step-000000003.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert restored(root, ranks=1) == [(1, 1.0)]
    assert "trying step 1 (attempt 1) instead" in caplog.text


def test_a_doubtful_one_is_restored_for_want_of_another(root: Path) -> None:
    add(root, 2, {"loss": 0.1}, state=State.DURABLE, doubt="step 2 may be torn", best=RULE)
    assert restored(root, ranks=1) == [(3, 3.0)]
    for step in (1, 3, 4):
        (root / f"step-00000000{step}.json").unlink()
    assert restored(root, ranks=1) == [(2, 2.0)]


def test_restore_is_refused_where_none_has_the_metric_or_nobody_says_the_mode(root: Path) -> None:
    with pytest.raises(StoreMissing, match=r"has the metric los; the metrics of this run are acc, loss\."):
        restored(root, "los", ranks=1)
    with pytest.raises(ConfigError, match="lowest or the highest acc is best"):
        restored(root, "acc", ranks=1)
    assert restored(root, "acc", ranks=1, mode="max") == [(1, 1.0)]
    with pytest.raises(StoreMissing, match="none has metrics"):
        restored(root.parent / "empty", ranks=1)


def test_damage_of_every_one_with_the_metric_is_an_error(tmp_path: Path) -> None:
    add(tmp_path, 1, {"loss": 0.1}, best=RULE)
    add(tmp_path, 2, {}, best=RULE)
    (tmp_path / "step-000000001.pt").write_bytes(bytes((tmp_path / "step-000000001.pt").stat().st_size))
    with pytest.raises(DamageError, match="none of 1 checkpoints can be used"):
        restored(tmp_path, ranks=1)


@pytest.mark.parametrize(
    ("best", "mode", "step"),
    [("", None, None), (5, None, None), (None, "min", None), ("a", "least", None), ("a", None, 3)],
)
def test_wanted_best_refuses_what_does_not_go_together(best: Any, mode: Any, step: Any) -> None:
    with pytest.raises(ConfigError, match=r"restore\(\)"):
        parse_best(best, mode, step)
