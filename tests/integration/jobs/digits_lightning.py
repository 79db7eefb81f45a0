"""examples/train_lightning.py, watched: `python digits_lightning.py OUT PAUSE_AT …`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from examples.train_lightning import arguments, train
from tests.integration.jobs.digits import Watcher

_watcher = Watcher()


class Watching(Callback):
    """After the callback that saves: ordinary callbacks come before it."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _watcher.begin(trainer.global_rank)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch[1].tolist()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _watcher.step(
            trainer.global_step,
            loss=outputs["loss"].item().hex(),
            labels=batch[1].tolist(),
            epoch=trainer.current_epoch,
            batch=batch_idx,
        )


stopping = EarlyStopping("loss", patience=1000, check_on_train_epoch_end=False)
trainer = train(arguments().parse_args(), Watching(), stopping)
_watcher.end(
    model=trainer.lightning_module.state_dict(),
    optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
    schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    loops=trainer.fit_loop.state_dict(),
    stopping=stopping.state_dict(),
    loss=trainer.callback_metrics["loss"],  # from the validation at the end of the last epoch
    random=torch.rand(4),
)
torch.distributed.destroy_process_group()
