"""`torch.save` and fsync by rank 0, in the training thread: what most training scripts do today."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.peers import fresh
from benchmarks.workload import Workload

__all__ = ["TorchSave"]


class TorchSave:
    """Saves on rank 0; the other ranks have nothing to do, and would wait for it in their next collective."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._folder, self._rank = workload, folder, rank

    def _path(self, step: int) -> Path:
        return self._folder / f"torch-{step}.pt"

    def save(self, step: int) -> None:
        if self._rank:
            return
        with fresh(self._path(step)).open("wb") as file:
            torch.save(self._workload.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    def before_update(self) -> None:
        """Nothing is left to wait for."""

    def done(self) -> bool:
        return True

    def marks(self) -> dict[str, float]:
        return {}

    def clean(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""
