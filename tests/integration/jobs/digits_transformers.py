"""examples/train_transformers.py, watched: `python digits_transformers.py OUT PAUSE_AT …`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from examples.train_transformers import arguments, train
from tests.integration.jobs.digits import Watcher

_watcher = Watcher()
_batches: list[Any] = []


class Watching(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        _watcher.begin(args.process_index)
        given["model"].register_forward_pre_hook(_note, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _watcher.step(state.global_step, labels=_batches.copy(), epoch=state.epoch)
        _batches.clear()


def _note(model: torch.nn.Module, args: Any, given: dict[str, Any]) -> None:
    if model.training:
        _batches.append(given["labels"].tolist())


trainer: Any = train(arguments().parse_args(), Watching())
_watcher.end(
    model=trainer.model.state_dict(),
    optimizer=trainer.optimizer.optimizer.state_dict(),
    scheduler=trainer.lr_scheduler.state_dict(),
    log=[
        {
            name: value
            for name, value in entry.items()
            if name in ("step", "epoch", "loss", "eval_loss", "grad_norm")
        }
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ],
    random=torch.rand(4),
)
torch.distributed.destroy_process_group()
