"""Nightly, more of tests/integration/test_changes.py: every training of tests/support/changes.py, 200 saves each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from holdfast.errors import StateError
from tests.integration.jobs import changing
from tests.integration.test_changes import RANKS, Outcome
from tests.integration.test_changes import SAVES as FEW_SAVES
from tests.support import changes
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import collect

pytestmark = [pytest.mark.mpi]
SAVES = int(os.environ.get("TORN_SAVES", "200"))


@pytest.mark.timeout(300 + 2 * SAVES)
@pytest.mark.parametrize("kind", changing.kinds())
def test_a_published_file_is_the_saved_instant(tmp_path: Path, kind: str) -> None:
    if kind in changes.PACKAGES:
        pytest.importorskip(kind.partition(":")[0])
    outcome = Outcome(tmp_path, kind, SAVES)
    outcome.is_whole()
    print(f"{kind}: {len(outcome.published)} published, {len(outcome.withdrawn)} withdrawn")
    if kind in {training.__name__ for training in changes.WAITING}:
        assert not outcome.withdrawn


@pytest.mark.timeout(300 + 2 * SAVES)
@pytest.mark.parametrize("kind", [training.__name__ for training in changes.TEARING])
def test_without_detection_a_torn_file_is_published(tmp_path: Path, kind: str) -> None:
    """Shows that the test above can fail."""
    assert Outcome(tmp_path, kind, 20, "--blind").torn


def test_quantised_moments_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torchao: one tensor has several storages, and holdfast cannot prove that a copy of it is whole."""
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # else its update is compiled
    model = torch.nn.Linear(256, 256)
    optimizer = torchao.AdamW8bit(model.parameters(), lr=0.01, block_size=64)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(StateError, match=r"optimizer/state/0/exp_avg is a quantised tensor \(torchao"):
        table(state, collect(state), rank=0, ranks=2)


def test_a_few_bytes_changed_by_hand_tear_nothing(tmp_path: Path) -> None:
    """From the first step on: the comparison before the first update detects them, and every save waits."""
    outcome = Outcome(tmp_path, "RowsByNumpy", FEW_SAVES, HOLDFAST_COPY_INSIDE_MS_MAX="0")
    outcome.is_whole()
    assert outcome.published == list(range(FEW_SAVES))
    assert not any(manifest.doubt for manifest in outcome.manifests.values())
    assert outcome.said.count("in a way that torch does not count") >= 1
    for step in range(1, FEW_SAVES):
        assert outcome.inside(step) == [True] * RANKS


def test_without_the_comparison_a_few_bytes_are_published_torn(tmp_path: Path) -> None:
    """Shows that the tests with the comparison can fail."""
    options = ["--uncompared", "--drawn", "1000"]
    outcome = Outcome(tmp_path, "RowsThroughData", FEW_SAVES, *options, HOLDFAST_COPY_INSIDE_MS_MAX="0")
    assert outcome.torn
    assert not any(outcome.manifests[step].doubt for step in outcome.torn), "nobody knows"
