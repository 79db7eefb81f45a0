"""Python calls of `save()` for each tensor from the third save on, with and without comparison of replicas."""

from __future__ import annotations

import pytest
import torch

from holdfast.config import TrainerConfig
from tests.support.calls import calls_here
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer

SAVES = 4
COUNTS = 40, 440
# Each parameter has a dictionary of its own in the optimizer's state, with three tensors; torch makes a new tensor of
# each parameter for `state_dict()`.
CALLS_PER_PARAMETER_MAX = 18


def _calls(count: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    link = FakeLink()
    link.job.ranks = ranks
    link.job.chunk_bytes = 1 << 20
    monkeypatch.setattr(joining, "connect_stager", link.meet)
    parameters = torch.nn.ParameterList(torch.zeros(61) for _ in range(count))
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    optimizer.step()
    config = TrainerConfig(events=None, copy_inside_ms_max=0, in_flight_max=1, on_not_durable="warn")
    with Checkpointer({"model": parameters, "optimizer": optimizer}, config=config) as checkpointer:
        for step in range(SAVES):
            calls = calls_here(lambda step=step: checkpointer.save(step))  # type: ignore[misc]
            assert step in link.offers
            optimizer.step()
            link.bytes_of(step)
            link.stage(step)
    return calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_runs_next_to_nothing_for_each_tensor(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (_calls(count, ranks, monkeypatch) for count in COUNTS)
    assert (many - few) / (COUNTS[1] - COUNTS[0]) <= CALLS_PER_PARAMETER_MAX
