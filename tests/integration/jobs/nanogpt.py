"""A loop of examples/nanogpt/, watched: `python nanogpt.py OUT PAUSE_AT train|train_resumable …`."""

from __future__ import annotations

import importlib
import sys

import torch

from holdfast.crc import crc32
from tests.integration.jobs.digits import Watcher
from tests.support.no_compiler import do_without_compiler

do_without_compiler()
_watcher = Watcher()


def watch(step: int, loss: float, batch: torch.Tensor) -> None:
    _watcher.begin(torch.distributed.get_rank())
    _watcher.step(step + 1, loss=loss.hex(), batch=crc32(batch.contiguous().numpy().data))


script = importlib.import_module(f"examples.nanogpt.{sys.argv.pop(1)}")
model = script.train(script.arguments().parse_args(), watch)
_watcher.end(model=model.state_dict(), random=torch.rand(4))
torch.distributed.destroy_process_group()
