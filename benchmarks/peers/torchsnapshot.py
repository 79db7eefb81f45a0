"""torchsnapshot's `async_take`, the state replicated over the ranks; its files are synced afterwards, which it
leaves out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.complete import IncompleteError, require_same
from benchmarks.peers.background import Background
from benchmarks.workload import Workload

__all__ = ["AsyncTake"]


class AsyncTake:
    """`async_take` returns when the state is staged in memory; a tied embedding is left out, it would be written
    twice."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        self._snapshot, self._state_dict = Snapshot, StateDict
        self._workload, self._rank = workload, rank
        self._paths = (folder / "torchsnapshot-0", folder / "torchsnapshot-1")
        self._count = 0
        self._background = Background()
        self._group = dist.group.WORLD if dist.is_initialized() else None

    def _app(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"state": self._state_dict(**state)}

    @property
    def _newest(self) -> Path:
        return self._paths[self._count % 2]

    def save(self, step: int) -> None:  # noqa: ARG002
        self._background.wait()
        self._count += 1
        path, rank = self._newest, self._rank
        pending = self._snapshot.async_take(
            str(path), self._app(self._workload.state_dict(tied=False)), replicated=["**"], pg=self._group
        )

        def finish() -> None:
            pending.wait()
            # Each rank syncs every second file, as torchsnapshot does not say which rank wrote which.
            for number, file in enumerate(sorted(path.rglob("*"))):
                if file.is_file() and number % 2 == rank % 2:
                    fd = os.open(file, os.O_RDONLY)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)

        self._background.start(finish)

    def before_update(self) -> None:
        """Do nothing: all is staged when `async_take` returns."""

    def done(self) -> bool:
        return self._background.done()

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        """Load and compare. Collective."""
        state = self._workload.state_dict(tied=False)
        if not (self._newest / ".snapshot_metadata").exists():
            raise IncompleteError(f"torchsnapshot: {self._newest} has no .snapshot_metadata: never finished")
        empty = _zeros(state)
        app = self._app(empty)
        self._snapshot(str(self._newest), pg=self._group).restore(app)
        return require_same(state, dict(app["state"]), what="torchsnapshot")

    def clean(self) -> None:
        if self._rank == 0:
            for path in self._paths:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        self._background.wait()


def _zeros(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _zeros(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_zeros(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else tree
