"""Numbers on a device are awaited where the pickle is made, and not earlier."""

from __future__ import annotations

from typing import Any

import torch

from trainer_side.state.recall import snapshot
from trainer_side.state.survey import Outline
from trainer_side.state.tree import PendingNumber, resolve_pending, scaler_state


def _tree(scale: Any) -> dict[str, Any]:
    return {"scaler": {"scale": scale, "growth_interval": 2000}, "step": 3}


def test_a_number_that_arrives_is_a_plain_value_of_a_tree_and_of_its_snapshot() -> None:
    arriving = PendingNumber(torch.tensor(8.0))
    found = Outline.of(_tree(4.0))
    assert found is not None
    walked = found[0].walk(_tree(arriving))
    assert walked is not None
    assert walked.is_exact
    taken = snapshot(_tree(arriving), {})
    assert taken is not None
    resolve_pending(taken.tree)
    assert taken.tree == _tree(8.0)


def test_the_state_of_a_scaler_is_torchs_own() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    assert scaler_state(scaler) == scaler.state_dict()
    scaler.scale(torch.ones(1))
    assert scaler_state(scaler) == scaler.state_dict()
    assert scaler_state(torch.amp.GradScaler("cpu", enabled=False)) == {}


def test_a_scaler_of_another_kind_says_its_state_itself() -> None:
    class Other(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1}

    assert scaler_state(Other("cpu")) == {"mine": 1}
