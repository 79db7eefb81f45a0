"""`torch.save` and fsync by rank 0 in the training thread, as most scripts do today."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.complete import require_same
from benchmarks.peers import Slots, load
from benchmarks.workload import Workload

__all__ = ["TorchSave", "write_synced"]


def write_synced(state: Any, path: Path) -> None:
    """Write by `torch.save`, and return when the file is synced to disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


class TorchSave:
    """Saves on rank 0; the other ranks do nothing, and wait for rank 0 in their next collective."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._rank = workload, rank
        self._slots = Slots(folder, "torch")

    def save(self, step: int) -> None:  # noqa: ARG002 - the slots count
        if self._rank == 0:
            write_synced(self._workload.state_dict(), self._slots.next())

    @property
    def newest(self) -> Path:
        """Path of the last save."""
        return self._slots.newest

    def before_update(self) -> None:
        """Do nothing: `save` has waited."""

    def done(self) -> bool:
        return True

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        if self._rank:
            return 0
        return require_same(self._workload.state_dict(), load(self._slots.newest), what="torch.save")

    def clean(self) -> None:
        if self._rank == 0:
            self._slots.remove()

    def close(self) -> None:
        """Do nothing."""
