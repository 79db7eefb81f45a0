"""The modules for frameworks put the gradient scaler itself into the state, so that `save()` need not wait for its
numbers (tests/gpu/test_scaler.py)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_side.state.tree import collect


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning warns about this machine, such as about `srun`
def test_lightning_gives_the_scaler_of_mixed_precision() -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision

    from trainer_side.frameworks.lightning import HoldfastCallback, _state

    class Scaled(MixedPrecision):
        """A plugin with a `state_dict` of its own."""

        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1}

    def of(plugin: MixedPrecision) -> Any:
        trainer = Trainer(accelerator="cpu", plugins=[plugin], logger=False, enable_checkpointing=False)
        return _state(trainer, LightningModule(), HoldfastCallback())["precision"]

    plugin = MixedPrecision("16-mixed", "cpu")
    assert of(plugin) is plugin.scaler
    assert collect({"precision": plugin.scaler}) == collect({"precision": plugin})
    for other in (MixedPrecision("bf16-mixed", "cpu"), Scaled("16-mixed", "cpu")):
        assert of(other) is other


@pytest.mark.parametrize(
    ("scaled", "own"),
    [(True, False), (False, False), (True, True)],
    ids=["fp16", "fp32", "in the script's state"],
)
def test_trainer_gives_the_scaler_of_fp16(
    scaled: bool, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer, TrainingArguments

    from trainer_side.frameworks import transformers

    given: dict[str, Any] = {}
    lacking: list[str] = []

    class Recorder:
        """Replaces the `Checkpointer`: records the state, and finds no checkpoint."""

        def __init__(self, state: dict[str, Any], **_: Any) -> None:
            given.update(state)

        def restore(self, *, may_lack: Collection[str]) -> int:
            lacking.extend(may_lack)
            return 0

    monkeypatch.setattr(transformers, "Checkpointer", Recorder)
    trainer = Trainer(torch.nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    trainer.accelerator.scaler = scaler  # Accelerate only makes one on a device
    more = {"scaler": torch.amp.GradScaler("cpu")} if own else {}
    assert transformers.HoldfastCallback(state=more).restore(trainer) is None
    assert given.get("scaler") is more.get("scaler", scaler)
    assert ("scaler" in given) is scaled
    assert lacking == (["scaler"] if scaled and not own else []), "checkpoints from before have none"
