"""torch.distributed.checkpoint over gloo: `save`, and `async_save` with its fastest options on this machine:

- one stager kept for all saves, so that its staging buffers are allocated once and reused;
- staging in a background thread, awaited before the optimizer step (a copy that overlaps computation);
- plans cached from save to save; replicated tensors spread over the ranks; two writer threads; files synced;
- writing in a thread of the rank, or in a separate process with the staging buffers in shared memory (both measured).

A tied output embedding is left out of the state, as DCP would write it twice. A save waits for the previous upload, as
DCP's documentation demands.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from benchmarks.complete import IncompleteError, leaves, require_same
from benchmarks.workload import Workload

__all__ = ["AsyncSave", "Save"]

_WRITER_THREADS = 2


class _Files:
    """Two folders in turn, and the common part of both ways."""

    def __init__(self, workload: Workload, folder: Path, rank: int, name: str) -> None:
        self._workload, self._rank = workload, rank
        self._paths = (folder / f"{name}-0", folder / f"{name}-1")
        self._count = 0

    def _next(self) -> FileSystemWriter:
        self._count += 1
        return FileSystemWriter(self.newest, thread_count=_WRITER_THREADS)

    @property
    def newest(self) -> Path:
        """Folder of the last save, finished or not."""
        return self._paths[self._count % 2]

    def verify(self) -> int:
        """Load and compare the whole state on every rank. Collective."""
        state = self._workload.state_dict(tied=False)
        if not (self.newest / ".metadata").exists():
            raise IncompleteError(f"dcp: {self.newest} has no .metadata: it was never finished")
        loaded = {path: torch.zeros_like(v) for path, v in leaves(state) if isinstance(v, torch.Tensor)}
        copy = _like(state, loaded)
        load(copy, storage_reader=FileSystemReader(self.newest), no_dist=True)
        return require_same(state, copy, what="dcp")

    def marks(self) -> dict[str, float]:
        return {}

    def clean(self) -> None:
        if self._rank == 0:
            for path in self._paths:
                shutil.rmtree(path, ignore_errors=True)


def _like(tree: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """Return the tree with its tensors replaced from `tensors`."""
    if isinstance(tree, dict):
        return {key: _like(value, tensors, f"{path}/{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [_like(value, tensors, f"{path}/{index}") for index, value in enumerate(tree)]
    return tensors.get(path, tree)


class Save(_Files):
    """DCP `save`: the training thread waits until it is done."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        super().__init__(workload, folder, rank, "save")

    def save(self, step: int) -> None:  # noqa: ARG002 - the folders count
        save(
            self._workload.state_dict(tied=False),
            storage_writer=self._next(),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )

    def before_update(self) -> None:
        """Do nothing: `save` has waited."""

    def done(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing."""


class AsyncSave(_Files):
    """DCP `async_save`; one instance per variant, on every rank."""

    def __init__(self, workload: Workload, folder: Path, rank: int, *, process: bool) -> None:
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        super().__init__(workload, folder, rank, self._type.value)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # needs CUDA
                use_shared_memory=process,
                use_async_staging=True,
                use_non_blocking_copy=False,  # needs CUDA
            )
        )
        self._staged: Future[None] | None = None
        self._written: Future[Any] | None = None
        self._marks: dict[str, float] = {}
        if not dist.is_initialized():
            dist.init_process_group("gloo")  # address, rank and size come from the environment

    def save(self, step: int) -> None:  # noqa: ARG002
        if self._written is not None:
            self._written.result()
        self._marks = {}
        response = async_save(
            self._workload.state_dict(tied=False),
            storage_writer=self._next(),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staged, self._written = response.staging_completion, response.upload_completion
        self._staged.add_done_callback(lambda _: self._marks.update(copied=time.monotonic()))

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def done(self) -> bool:
        if self._written is None:
            return True
        if not self._written.done():
            return False
        self._written.result()  # raises what went wrong
        return True

    def marks(self) -> dict[str, float]:
        return dict(self._marks)

    def close(self) -> None:
        self._stager.close()
