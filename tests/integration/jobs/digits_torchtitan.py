"""examples/train_torchtitan.py, watched: `python digits_torchtitan.py OUT PAUSE_AT …`."""

from __future__ import annotations

import torch

from examples.train_torchtitan import Trainer, arguments
from tests.integration.jobs.digits import Watcher

_watcher = Watcher()
trainer = Trainer(arguments().parse_args())
_watcher.begin(torch.distributed.get_rank())
trainer.train(lambda step, loss, labels: _watcher.step(step, loss=loss.hex(), labels=labels))
_watcher.end(
    model=trainer.model_parts[0].state_dict(),
    optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
    scheduler=trainer.lr_schedulers.state_dict(),
    train_state=trainer.state_dict(),
    data=trainer.dataloader.state_dict(),
    random=torch.rand(4),
)
trainer.close()
