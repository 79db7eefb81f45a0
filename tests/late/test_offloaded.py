"""Moments that an optimizer keeps in host memory, beside a model on a device, are restored to host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.late.control import LateMachine
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.restore.test_restore import bring_back
from trainer_side.save.host_memory import locked_buffer

pytestmark = pytest.mark.late("lazy")
LARGE = 1 << 16


class Offloading(torch.optim.SGD):
    """Like third-party offloading optimizers: updates run on the host, where the moments lie, nested or not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moments"] = {"first": torch.zeros(parameter.shape)}
                    state["second"] = torch.zeros(parameter.shape)
                state["moments"]["first"] += 1
                state["second"] += 2


def job(device: str, *, steps: int, kind: type[torch.optim.Optimizer] = Offloading) -> dict[str, Any]:
    model = torch.nn.Linear(LARGE, 1, device=device)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    return [one for of in state["optimizer"].state.values() for one in (of["second"], of["moments"]["first"])]


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_offloaded_moments_stay_in_host_memory(
    steps: int, is_locked: bool, tmp_path: Path, late: LateMachine
) -> None:
    """For an optimizer without a state, the file tells where moments belong."""
    publish_named(tmp_path, 3, job("cuda", steps=2))
    fresh = job("cuda", steps=steps)
    before = late.device_bytes()
    peak_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bring_back(fresh, tmp_path, allocate_pinned=locked_buffer if is_locked else None)
    assert [(one.device.type, one.flatten()[0].item()) for one in moments(fresh)] == [
        ("cpu", 4),
        ("cpu", 2),
    ] * 2
    assert torch.cuda.max_memory_allocated() - peak_before < 2 * 4 * LARGE, "moments were on the device, too"
    assert before
    fresh["optimizer"].step()


def test_a_live_state_on_the_host_counts_in_a_file_of_another_place(tmp_path: Path) -> None:
    publish_named(tmp_path, 3, job("cpu", steps=2))
    fresh, stepped = job("cuda", steps=0), job("cuda", steps=1)
    bring_back(stepped, tmp_path)
    assert {one.device.type for one in moments(stepped)} == {"cpu"}
    bring_back(fresh, tmp_path)
    assert {one.device.type for one in moments(fresh)} == {"cuda"}, (
        "as torch loads what a job on the CPU has saved"
    )


def test_moments_on_the_device_go_there(tmp_path: Path) -> None:
    publish_named(tmp_path, 3, job("cuda", steps=2, kind=torch.optim.AdamW))
    for steps in (0, 1):
        fresh = job("cuda", steps=steps, kind=torch.optim.AdamW)
        bring_back(fresh, tmp_path)
        state = fresh["optimizer"].state[fresh["model"].weight]
        assert {name: one.device.type for name, one in state.items()} == {
            "step": "cpu",
            "exp_avg": "cuda",
            "exp_avg_sq": "cuda",
        }
