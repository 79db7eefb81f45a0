"""examples/train_accelerate.py, watched: `python digits_accelerate.py OUT PAUSE_AT …`."""

from __future__ import annotations

import torch

from examples.train_accelerate import arguments, train
from tests.integration.jobs.digits import Watcher

_watcher = Watcher()


def watch(step: int, loss: float, labels: list[int]) -> None:
    _watcher.begin(torch.distributed.get_rank())
    _watcher.step(step + 1, loss=loss.hex(), labels=labels)


state = train(arguments().parse_args(), watch)
names = ("model", "optimizer", "scheduler", "registered", "data")
_watcher.end(**{name: state[name].state_dict() for name in names}, random=torch.rand(4))
torch.distributed.destroy_process_group()
