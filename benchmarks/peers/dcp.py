"""torch.distributed.checkpoint's `async_save` over gloo, with the options that serve it best on this machine:

- one stager kept for all saves, so that its staging buffers are allocated once and reused;
- staging in a background thread, awaited before the optimizer step (a copy that overlaps computation);
- plans cached from save to save; replicated tensors spread over the ranks; two writer threads; files synced;
- writing in a thread of the rank, or in a process of its own with the staging buffers in shared memory: both
  are measured.

The tied output embedding is left out of the state, as DCP would write it twice.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from benchmarks.workload import Workload

__all__ = ["AsyncSave"]

_WRITER_THREADS = 2


class AsyncSave:
    """DCP async_save; one instance per variant, on every rank."""

    def __init__(self, workload: Workload, folder: Path, rank: int, *, process: bool) -> None:
        self._workload, self._folder, self._rank = workload, folder, rank
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
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

    def _path(self, step: int) -> Path:
        return self._folder / f"{self._type.value}-{step}"

    def save(self, step: int) -> None:
        self._marks = {}
        response = async_save(
            self._workload.state_dict(tied=False),
            storage_writer=FileSystemWriter(self._path(step), thread_count=_WRITER_THREADS),
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
        if self._written is None or not self._written.done():
            return False
        self._written.result()  # raises what went wrong
        return True

    def marks(self) -> dict[str, float]:
        return dict(self._marks)

    def clean(self, step: int) -> None:
        if self._rank == 0:
            shutil.rmtree(self._path(step), ignore_errors=True)

    def close(self) -> None:
        self._stager.close()
