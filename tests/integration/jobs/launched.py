"""A typical script for torchrun, with a `Checkpointer`."""

from __future__ import annotations

import torch

from trainer_side import Checkpointer

torch.distributed.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
with Checkpointer({"model": model}, every=1) as checkpointer:
    checkpointer.step(checkpointer.restore())
