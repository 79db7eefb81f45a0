"""A Stateful of torch.distributed.checkpoint can be passed to a Checkpointer unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from tests.support.restoring import CountingStore, Ranks
from tests.unit.trainer_side.assemble import assembled, make_plan, sent, taken
from tests.unit.trainer_side.restore.test_restore import assert_same
from tests.unit.trainer_side.restore.test_restore_files import CHUNK_BYTES, describe
from trainer_side.restore.restore import restore
from trainer_side.state.tree import classify, collect


class AppState(Stateful):
    """Model and optimizer in one object, as in DCP's tutorial."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.seen = state_dict["seen"]

    def train(self, steps: int) -> list[str]:
        """Train; return the exact losses."""
        losses = []
        for _ in range(steps):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.seen))
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.seen += 1
            losses.append(loss.item().hex())
        return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stateful_is_saved_restored_and_goes_on_the_same(tmp_path: Path, ranks: int) -> None:
    before = AppState(1)
    before.train(3)
    state = {"app": before}
    frames = []
    for rank in range(2):
        skeleton = make_plan(state, rank=rank, ranks=2, chunk_bytes=CHUNK_BYTES, reserve=1 << 16)
        frames.append(sent(skeleton, taken(state, skeleton)))
    (tmp_path / "step-000000001.pt").write_bytes(assembled(skeleton.layout, frames))
    describe(tmp_path, skeleton.layout, ranks=2)
    fresh = [AppState(10 + rank) for rank in range(ranks)]
    Ranks(ranks).run(
        lambda peers: restore({"app": fresh[peers.rank]}, CountingStore(tmp_path), peers, events=None)
    )
    for app in fresh:
        assert_same(app.state_dict(), before.state_dict())
    expected = before.train(2)
    assert [app.train(2) for app in fresh] == [expected] * ranks


def test_a_stateful_does_not_wait_behind_the_gate() -> None:
    """The gate does not know its optimizer and could not delay it, so save() copies everything before it returns."""
    app = AppState(1)
    app.train(1)
    state = {"app": app}
    owned = classify(state, collect(state)).values()
    assert {one.gated for one in owned} == {False}
