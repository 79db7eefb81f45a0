"""Peers that make one file of whole tensors from a state that is split among the ranks.

    DcpToTorch       async_save, each rank its shards ─► dcp_to_torch_save on rank 0: torch.load opens what it writes
    HuggingFace      async_save as safetensors, which rank 0 consolidates into one file: safetensors opens that
    FullStateDict    all shards gathered on rank 0, and torch.save

Once the shards are written, a thread of rank 0 makes the file from them: a process would have to start first. Each file
is synced, and includes the optimizer.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from benchmarks.complete import leaves, require_same
from benchmarks.peers import fresh, load
from benchmarks.peers.background import Background
from benchmarks.peers.torch_save import write_synced
from benchmarks.workload import Workload

__all__ = ["DcpToTorch", "FullStateDict", "HuggingFace"]

_WRITER_THREADS = 2


class _StatePlanner(DefaultSavePlanner):
    """Planner with a class of its own, as DCP caches plans by class and peers have different states."""


class _TensorPlanner(DefaultSavePlanner):
    pass


class _Dcp(ABC):
    """DCP's `async_save`, staged in the background and awaited by the update; then rank 0 makes one file."""

    _planner: type[DefaultSavePlanner] = _StatePlanner

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._rank = workload, rank
        self._folder = folder / type(self).__name__
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # needs CUDA
                use_shared_memory=False,  # needs a writer in a separate process
                use_async_staging=True,
                use_non_blocking_copy=False,  # needs CUDA
            )
        )
        self._response: AsyncSaveResponse | None = None
        self._marks: dict[str, float] = {}
        self._background = Background()

    def save(self, step: int) -> None:  # noqa: ARG002 - there is one at a time
        self._background.wait()
        self._marks = {}
        response = async_save(
            self._state(),
            storage_writer=self._writer(),
            planner=self._planner(enable_plan_caching=True),
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._response = response
        written: Future[Any] = response.upload_completion
        self._background.start(lambda: self._finish(written))

    def before_update(self) -> None:
        if self._response is not None:
            self._response.staging_completion.result()

    def done(self) -> bool:
        return self._background.done()

    def marks(self) -> dict[str, float]:
        return dict(self._marks)

    def clean(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._background.wait()
        self._stager.close()

    def _finish(self, written: Future[Any]) -> None:
        written.result()
        self._marks["written"] = time.monotonic()
        if self._rank == 0:
            self._make_whole()

    def _state(self) -> dict[str, Any]:
        return self._workload.state_dict()

    @abstractmethod
    def _writer(self) -> FileSystemWriter: ...

    @abstractmethod
    def _make_whole(self) -> None: ...


class DcpToTorch(_Dcp):
    """Rank 0 reads the folder of shards, which needs memory for the whole state."""

    def _writer(self) -> FileSystemWriter:
        return FileSystemWriter(self._folder / "shards", thread_count=_WRITER_THREADS)

    def _make_whole(self) -> None:
        dcp_to_torch_save(self._folder / "shards", self._whole)
        _sync(self._whole)

    @property
    def _whole(self) -> Path:
        return self._folder / "whole.pt"

    def verify(self) -> int:
        return require_same(self._workload.state_dict(), load(self._whole), what="dcp_to_torch_save")


class HuggingFace(_Dcp):
    """Saves only tensors: the optimizer's options, some numbers, are left out.

    Tensors without dimensions get one, as torch 2.13 would consolidate them to zeros. `torch.load` cannot open a
    safetensors file, so this peer does less than the others.
    """

    _planner = _TensorPlanner

    def _state(self) -> dict[str, Any]:
        found = leaves(self._workload.state_dict())
        return {
            path: value if value.dim() else value.reshape(1)
            for path, value in found
            if isinstance(value, torch.Tensor)
        }

    def _writer(self) -> FileSystemWriter:
        return HuggingFaceStorageWriter(
            str(self._folder), save_distributed=True, enable_consolidation=True, thread_count=_WRITER_THREADS
        )

    def _make_whole(self) -> None:
        _sync(self._whole)  # the writer has consolidated it

    @property
    def _whole(self) -> Path:
        (path,) = self._folder.glob("*.safetensors")
        return path

    def verify(self) -> int:
        from safetensors.torch import load_file

        return require_same(self._state(), load_file(self._whole), what="HuggingFaceStorageWriter")


class FullStateDict:
    """Gathers the state on rank 0 in the training thread and writes it there, as most scripts do today."""

    def __init__(self, workload: Workload, folder: Path, rank: int) -> None:
        self._workload, self._rank = workload, rank
        self._path = folder / "full.pt"

    def save(self, step: int) -> None:  # noqa: ARG002 - there is one file
        state = self._state(full=True)
        if self._rank == 0:
            write_synced(state, fresh(self._path))

    def before_update(self) -> None:
        """Do nothing: `save` has waited."""

    def done(self) -> bool:
        return True

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        state = self._state(full=False)
        return require_same(state, load(self._path), what="full state dict")

    def clean(self) -> None:
        if self._rank == 0:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing."""

    def _state(self, *, full: bool) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        model, optimizer = self._workload.model, self._workload.optimizer
        return {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
