"""CheckFreq's way (Mohan et al., FAST 2021, sections 4.1 and 4.2), written by us from the paper: a baseline, not
their code.

    save() ─► snapshot: copy of the whole state in memory, beside the computation ─► persist: torch.save, fsync
    before_update() waits for the snapshot; the next save() waits for the persist: one checkpoint at a time

Faster than their code: the copy goes to buffers that are allocated and touched once. Only rank 0 saves, as in theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.complete import require_same
from benchmarks.peers import Slots, load
from benchmarks.peers.background import Background
from benchmarks.peers.torch_save import write_synced
from benchmarks.workload import Workload

__all__ = ["CheckFreq", "Snapshot"]


class Snapshot:
    """Copies states into buffers that are reused; tied tensors stay tied."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def take(self, tree: Any) -> Any:
        """Return the tree with copies of its tensors, which are valid until the next call."""
        return self._take(tree, set())

    def _take(self, tree: Any, taken: set[tuple[int, torch.Size, torch.dtype]]) -> Any:
        if isinstance(tree, dict):
            return {key: self._take(value, taken) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self._take(value, taken) for value in tree]
        if not isinstance(tree, torch.Tensor):
            return tree
        key = (tree.data_ptr(), tree.shape, tree.dtype)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = torch.empty_like(tree)
        if key not in taken:
            taken.add(key)
            copy.copy_(tree.detach())
        return copy


class CheckFreq:
    """Saves in two phases: snapshot, persist."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._rank = workload, rank
        self._slots = Slots(folder, "checkfreq")
        self._snapshot = Snapshot()
        self._copied, self._persisted = Background(), Background()

    def save(self, step: int) -> None:  # noqa: ARG002
        if self._rank:
            return
        self._copied.wait()
        self._persisted.wait()
        state, path = self._workload.state_dict(), self._slots.next()

        def copy() -> None:
            snapshot = self._snapshot.take(state)
            self._persisted.start(lambda: write_synced(snapshot, path))

        self._copied.start(copy)

    def before_update(self) -> None:
        self._copied.wait()

    def done(self) -> bool:
        return self._copied.done() and self._persisted.done()

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        if self._rank:
            return 0
        return require_same(self._workload.state_dict(), load(self._slots.newest), what="checkfreq")

    def clean(self) -> None:
        if self._rank == 0:
            self._slots.remove()

    def close(self) -> None:
        self._copied.wait()
        self._persisted.wait()
        self._snapshot = Snapshot()
