"""`Trainer(enable_checkpointing=False)` with a HoldfastCallback: Lightning saves nothing, and holdfast does. SIGTERM is
holdfast's as well.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.job import environment
from tests.support.torchrun import torchrun_command

SECONDS_MAX = 250.0
_SCRIPT = """
import os
import signal
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from trainer_side.frameworks.lightning import HoldfastCallback, HoldfastEnvironment

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def on_train_batch_start(self, *_):
        if steps == "6" and self.trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        print("begins at", self.trainer.global_step, flush=True)

steps, *more = sys.argv[1:]
Trainer(
    accelerator="cpu",
    devices=1,
    plugins=[HoldfastEnvironment("gloo")],
    callbacks=[HoldfastCallback(every=2), *([ModelCheckpoint("best")] if more else [])],
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
    max_steps=int(steps),
).fit(Model(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4))
torch.distributed.destroy_process_group()
"""


def test_holdfast_saves_and_lightning_does_not(tmp_path: Path) -> None:
    script, disk = tmp_path / "script.py", tmp_path / "disk"
    script.write_text(_SCRIPT)
    disk.mkdir()

    def fit(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {"HOLDFAST_TIERS": f"file:{disk}", "HOLDFAST_STORE": str(tmp_path / "store")}
        return subprocess.run(
            torchrun_command(1, [str(script), *arguments]),
            env=environment(tmp_path / "runtime", **env),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    done = fit("4")
    assert done.returncode == 0, done.stderr
    assert "begins at 0" in done.stdout
    done = fit("6")
    assert done.returncode == 0, done.stderr
    assert "begins at 4" in done.stdout
    # SIGTERM was a notice: Lightning's own handler would have ended the training, and on several ranks waited for all.
    assert "rank 0 received a preemption notice" in done.stderr
    assert "Received SIGTERM" not in done.stderr
    assert not [*tmp_path.rglob("*.ckpt")]
    # What Lightning saves itself is still switched off by name.
    done = fit("8", "and its own")
    assert done.returncode != 0
    assert "MisconfigurationException" in done.stderr
