"""A training job that writes its step number into every tensor, so that a checkpoint with two steps is detected.

`python fingerprint.py SAVES [--no-gate] [--layers] [--sharded]`: train at full speed and save after every step, until
SAVES are staged. As in any data-parallel training, the ranks meet once per step. `--layers`: the optimizer updates
layer by layer while the rest is still being copied. `--sharded`: each rank has a part of each tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.support.changes import see_nothing
from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

TENSORS, NUMEL, STEPS_MAX = 120, 8 * 1024, 20_000


class Stamp(torch.optim.Optimizer):
    """Writes the number of its update into every parameter and its state, as a very fast training."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state: dict[str, Any] = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["moment"] = torch.zeros_like(parameter)
            state["step"] += 1
            state["moment"].fill_(float(state["step"]))
            parameter.fill_(float(state["step"]))
        return None


def main() -> None:
    saves, gated = int(sys.argv[1]), "--no-gate" not in sys.argv
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    zeros: Callable[[], torch.Tensor] = functools.partial(torch.zeros, NUMEL)
    if "--sharded" in sys.argv:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor import zeros as zeros_on

        mesh = init_device_mesh("cpu", (ranks,))
        zeros = functools.partial(zeros_on, NUMEL, device_mesh=mesh, placements=[Shard(0)])
    else:
        do_without_compiler()
    model = torch.nn.ParameterList(torch.nn.Parameter(zeros()) for _ in range(TENSORS))
    model.register_buffer("seen", torch.zeros(1))
    seen = model.get_buffer("seen")
    optimizer: torch.optim.Optimizer = Stamp(list(model))
    if "--layers" in sys.argv:
        optimizer = torch.optim.SGD(list(model), lr=1.0, momentum=1.0)
        for parameter in model:
            parameter.grad = torch.full_like(parameter, -1.0)
    progress = {"updates": 0}
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer, "progress": progress})
    if not gated:
        see_nothing()  # otherwise a torn copy is withdrawn
        checkpointer._copier.gate.remove()
    for step in range(STEPS_MAX):
        optimizer.step()
        seen.fill_(float(step + 1))
        progress["updates"] = step + 1
        checkpointer.save(step)
        staged = checkpointer.stats.saved - len(checkpointer._parts.areas.in_flight())
        enough = torch.tensor([int(rank == 0 and staged >= saves)])
        torch.distributed.all_reduce(enough)
        if enough:
            break
    else:
        sys.exit(f"rank {rank}: only {staged} checkpoints were staged in {STEPS_MAX} steps")
    optimizer.step()
    checkpointer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
