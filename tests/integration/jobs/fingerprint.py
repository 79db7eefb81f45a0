"""A training job whose every tensor says which step it belongs to: a checkpoint that mixes two steps is seen at once.

`python fingerprint.py SAVES [--no-gate]`: train as fast as the machine can, save after every step, until SAVES are
accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from trainer_side import Checkpointer

TENSORS, NUMEL, STEPS_MAX = 120, 8 * 1024, 20_000


class Stamp(torch.optim.Optimizer):
    """Writes the number of its update into every parameter and its state: the fastest training there is."""

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
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(TENSORS))
    model.register_buffer("seen", torch.zeros(1))
    seen = model.get_buffer("seen")
    optimizer = Stamp(list(model))
    progress = {"updates": 0}
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer, "progress": progress})
    if not gated:
        checkpointer._gate.remove()
    for step in range(STEPS_MAX):
        optimizer.step()
        seen.fill_(float(step + 1))
        progress["updates"] = step + 1
        checkpointer.save(step)
        if checkpointer.stats.saved >= saves:
            break
    optimizer.step()
    checkpointer.close()
    if checkpointer.stats.saved < saves:
        sys.exit(f"only {checkpointer.stats.saved} saves were accepted in {STEPS_MAX} steps")


if __name__ == "__main__":
    main()
