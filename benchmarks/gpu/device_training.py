"""The training of all phases on one device, and the ways to save it: holdfast with each strategy, DCP, not at all."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.measured import Sizes

__all__ = ["STRATEGIES", "DeviceTraining", "Saver", "saved_by"]

_DONE_SECONDS_MAX = 60.0
_POLL_SECONDS = 1e-3
_HEADS = 8
_PARTS = 4  # a parameter, its gradient and its two moments
_PLENTY = 1 << 40
# Name ─► (local tier, device_bytes_max). A tier in memory is itself the staging area: strategy D.
STRATEGIES: dict[str, tuple[str, int | None]] = {
    "default": ("memory", None),
    "slot_mirror": ("memory", _PLENTY),
    "slot_gate": ("memory", 0),
    "area_mirror": ("file", _PLENTY),
    "area_gate": ("file", 0),
}


class _DeviceBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class DeviceTraining:
    """A transformer with a fused AdamW on the current device, always on the same tokens.

    Args:
        sizes: Of the model. It has fewer layers where `free_bytes` have no room for four checkpoints.
        free_bytes: Of the folder that checkpoints go to.
        compiled: Through torch.compile(mode="reduce-overhead"): the device replays recorded graphs.
    """

    def __init__(self, sizes: Sizes, free_bytes: int, *, compiled: bool = False) -> None:
        torch.manual_seed(20)
        width, layers = sizes.width, sizes.layers
        layer_bytes = _PARTS * 4 * 12 * width * width
        ends_bytes = _PARTS * 4 * 2 * sizes.vocabulary * width
        device_bytes, _ = torch.cuda.mem_get_info()
        for free in (free_bytes // 4, device_bytes // 3):
            layers = max(1, min(layers, (free - ends_bytes) // layer_bytes))
        self.layers = layers
        self.model = nn.Sequential(
            nn.Embedding(sizes.vocabulary, width),
            *(_DeviceBlock(width) for _ in range(layers)),
            nn.LayerNorm(width),
            nn.Linear(width, sizes.vocabulary, bias=False),
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._run: Any = torch.compile(self.model, mode="reduce-overhead") if compiled else self.model
        self._compiled = compiled
        generator = torch.Generator().manual_seed(20)
        tokens = torch.randint(
            0, sizes.vocabulary, (sizes.batch, sizes.context + 1), generator=generator
        ).cuda()
        self._inputs, self._labels = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1).contiguous()
        self.step()

    @property
    def state_bytes(self) -> int:
        """Of one checkpoint."""
        moments = (value for of in self.optimizer.state.values() for value in of.values())
        tensors = [
            *self.model.state_dict().values(),
            *(one for one in moments if isinstance(one, torch.Tensor)),
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def step(self) -> None:
        """Queue one iteration; nothing waits for it."""
        if self._compiled:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast("cuda", torch.bfloat16):
            logits = self._run(self._inputs)
        loss = functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Saver(Protocol):
    """One way to save."""

    def save(self, step: int) -> bool:
        """Begin a checkpoint; whether it was begun."""
        ...

    def before_update(self) -> None:
        """Wait for whatever must be over before the state may change."""
        ...

    def wait_done(self) -> None:
        """Until the last one is where it goes."""
        ...


class _Nobody:
    def save(self, step: int) -> bool:  # noqa: ARG002
        return True

    def before_update(self) -> None:
        """Nothing is read."""

    def wait_done(self) -> None:
        """Nothing is written."""


class _ByHoldfast:
    def __init__(self, training: DeviceTraining, folder: Path, strategy: str, more: dict[str, Any]) -> None:
        from holdfast.config import TrainerConfig
        from trainer_side import Checkpointer

        tier, device_bytes_max = STRATEGIES[strategy]
        (folder / "tier").mkdir()
        config = TrainerConfig.from_sources(
            store=str(folder / "store"),
            tiers=[f"{tier}:{folder / 'tier'}"],
            device_bytes_max=device_bytes_max,
            on_full="skip",
        )
        state = {"model": training.model, "optimizer": training.optimizer, **more}
        self.checkpointer = Checkpointer(state, config=config, every=0)
        self.checkpointer.restore()
        self._step = -1

    def save(self, step: int) -> bool:
        taken = self.checkpointer.save(step)
        self._step = step if taken else self._step
        return taken

    def before_update(self) -> None:
        """The optimizer's own hook waits, if anything has to."""

    def wait_done(self) -> None:
        deadline = time.monotonic() + _DONE_SECONDS_MAX
        while self.checkpointer.kept_step < self._step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step} was not kept: {self.checkpointer.stats}")
            time.sleep(_POLL_SECONDS)


class _ByDcp:
    """torch.distributed.checkpoint.async_save as it serves best: pinned memory that is kept, staged by a thread."""

    def __init__(self, training: DeviceTraining, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._training, self._folder = training, folder
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=True,
            )
        )
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> bool:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        model, optimizer = self._training.model.state_dict(), self._training.optimizer.state_dict()
        response = async_save(
            {"model": model, "optimizer": optimizer},
            storage_writer=FileSystemWriter(self._folder / f"dcp-{step}", thread_count=2, sync_files=False),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staged, self._written = response.staging_completion, response.upload_completion
        return True

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result(_DONE_SECONDS_MAX)

    def wait_done(self) -> None:
        if self._written is not None:
            self._written.result(_DONE_SECONDS_MAX)
        for written in self._folder.glob("dcp-*"):
            shutil.rmtree(written)

    def close(self) -> None:
        self._stager.close()


@contextmanager
def saved_by(way: str, training: DeviceTraining, folder: Path, **more: Any) -> Iterator[Any]:
    """A way to save: `none`, `dcp`, or one of `STRATEGIES`. What it has written is gone afterwards.

    Args:
        way: Its name.
        training: What is saved.
        folder: For what it writes.
        more: Other objects of the state.
    """
    join_alone()
    mine = folder / way
    shutil.rmtree(mine, ignore_errors=True)
    mine.mkdir()
    try:
        if way == "none":
            yield _Nobody()
        elif way == "dcp":
            peer = _ByDcp(training, mine)
            try:
                yield peer
            finally:
                peer.before_update()
                peer.wait_done()
                peer.close()
        else:
            saver = _ByHoldfast(training, mine, way, more)
            with saver.checkpointer:
                yield saver
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def join_alone() -> None:
    """Make this process a job of one rank, as torchrun would. A second call does nothing."""
    from trainer_side import init_torch_distributed

    if torch.distributed.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    init_torch_distributed("gloo")
