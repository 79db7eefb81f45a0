"""The training of all phases on one device, its tensors by name, and holdfast's ways to save it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.measured import ModelSizes

__all__ = [
    "STRATEGIES",
    "ByHoldfast",
    "DeviceTraining",
    "ManySmallTensors",
    "Way",
    "differing",
    "join_alone",
    "paths_of",
    "saved_by",
    "tensors_of",
]

_DONE_SECONDS_MAX = 60.0
_POLL_SECONDS = 1e-3
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
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class DeviceTraining:
    """A transformer with a fused AdamW on the current device, trained on the same tokens in every step.

    Args:
        sizes: Sizes of the model, which gets fewer layers if `free_bytes` are too few for four checkpoints.
    """

    def __init__(self, sizes: ModelSizes, free_bytes: int) -> None:
        torch.manual_seed(20)
        width, layers = sizes.width, sizes.layers
        layer_bytes = _PARTS * 4 * 12 * width * width
        ends_bytes = _PARTS * 4 * 2 * sizes.vocabulary * width
        device_bytes, _ = torch.cuda.mem_get_info()
        for free in (free_bytes // 4, device_bytes // 3):
            layers = max(1, min(layers, (free - ends_bytes) // layer_bytes))
        self.layers = layers
        try:
            with torch.device("cuda"):  # a billion random numbers would take seconds on the CPU
                self.model = _layers(sizes, layers)
        except RuntimeError:  # the rehearsal's device has none
            self.model = _layers(sizes, layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(20)
        tokens = torch.randint(
            0, sizes.vocabulary, (sizes.batch, sizes.context + 1), generator=generator
        ).cuda()
        self._inputs, self._labels = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1).contiguous()
        self.step()

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return sum(tensor.nbytes for tensor in tensors_of(self))

    def step(self) -> None:
        """Queue one iteration on the device, without waiting for it."""
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(self._inputs)
        loss = functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class ManySmallTensors(DeviceTraining):
    """Small parameters, and an optimizer without state that updates all of them at once."""

    def __init__(self, count: int, nbytes: int) -> None:
        numbers = max(1, nbytes // count // 4)
        self.model = nn.ParameterList(torch.ones(numbers, device="cuda") for _ in range(count))  # type: ignore[assignment]
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=True)  # type: ignore[assignment]
        self.step()

    def step(self) -> None:
        self.optimizer.step()


def _layers(sizes: ModelSizes, layers: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(sizes.vocabulary, sizes.width),
        *(_DeviceBlock(sizes.width, sizes.heads) for _ in range(layers)),
        nn.LayerNorm(sizes.width),
        nn.Linear(sizes.width, sizes.vocabulary, bias=False),
    )


def paths_of(training: DeviceTraining) -> list[tuple[Any, ...]]:
    """Return the paths of the state's tensors in the state dicts, in the order of `tensors_of`."""
    state = training.optimizer.state
    return [
        *(("model", name) for name, _ in training.model.named_parameters()),
        *(
            ("optimizer", "state", number, key)
            for number, parameter in enumerate(training.model.parameters())
            for key in sorted(state.get(parameter, ()))
        ),
    ]


def tensors_of(training: DeviceTraining) -> list[torch.Tensor]:
    """Return the parameters, and the optimizer's state of each."""
    state, parameters = training.optimizer.state, list(training.model.parameters())
    return [*parameters, *(state[one][key] for one in parameters for key in sorted(state.get(one, ())))]


def differing(
    paths: Sequence[tuple[Any, ...]], found: Sequence[torch.Tensor], clones: Sequence[torch.Tensor]
) -> list[str]:
    """Return the paths of tensors that differ from their clones in any bit."""
    return [
        ".".join(map(str, path))
        for path, one, clone in zip(paths, found, clones, strict=True)
        if not torch.equal(_bits(one), _bits(clone))
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cuda").contiguous().reshape(-1).view(torch.uint8)


class Way:
    """One way to save. This base class saves nothing.

    Attributes:
        keeps: How later updates are kept out of the copy.
        warm_ups: Number of saves until all memory of the way has been used.
        blocks: Whether `save()` returns only when all is done, so that its call is the stall.
    """

    keeps = ""
    warm_ups = 1
    blocks = False

    def save(self, step: int) -> bool:  # noqa: ARG002
        """Begin a checkpoint; return whether one was begun."""
        return True

    def before_update(self) -> None:
        """Wait until the optimizer may change the state."""

    def after_update(self) -> None:
        """Called when the optimizer has changed the state."""

    def copied(self) -> bool:
        """Whether the last checkpoint is complete in host memory."""
        return True

    def wait_done(self) -> None:
        """Wait until the last checkpoint has reached its destination."""

    def wait_made(self) -> None:
        """Wait for memory that is made in the background."""

    def host_bytes(self) -> int:
        """Return the bytes of host memory in use."""
        return 0

    def found(self, paths: Sequence[tuple[Any, ...]], step: int) -> tuple[list[torch.Tensor], float]:
        """Return the last checkpoint's tensors, and the seconds that reading them took."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all resources."""


class ByHoldfast(Way):
    """holdfast with a local tier and no stager, by one of `STRATEGIES`."""

    keeps = (
        "a copy on the device that save() queues on the training's stream (from the second save on, where there is "
        "room); without room the hook of optimizer.step() waits"
    )
    warm_ups = 3  # the first save has no mirror, and both slots must be used

    def __init__(self, training: DeviceTraining, folder: Path, strategy: str, more: dict[str, Any]) -> None:
        from holdfast import Checkpointer
        from holdfast.config import TrainerConfig

        tier, device_bytes_max = STRATEGIES[strategy]
        self._tier = folder / "tier"
        self._tier.mkdir()
        config = TrainerConfig.from_sources(
            store=str(folder / "store"),
            tiers=[f"{tier}:{self._tier}"],
            device_bytes_max=device_bytes_max,
            on_full="skip",
        )
        self._training = training
        state = {"model": training.model, "optimizer": training.optimizer, **more}
        self.checkpointer = Checkpointer(state, config=config, every=0)
        self.checkpointer.restore()
        self._step = -1

    def save(self, step: int) -> bool:
        taken = self.checkpointer.save(step)
        self._step = step if taken else self._step
        return taken

    def copied(self) -> bool:
        return self.checkpointer.kept_step >= self._step

    def wait_done(self) -> None:
        deadline = time.monotonic() + _DONE_SECONDS_MAX
        while not self.copied():
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step} was not kept: {self.checkpointer.stats}")
            time.sleep(_POLL_SECONDS)

    def wait_made(self) -> None:
        """Wait for the pages of all slots."""
        deadline = time.monotonic() + _DONE_SECONDS_MAX
        files = [path for path in self._tier.rglob("*") if path.is_file()]
        while any(path.stat().st_blocks * 512 < path.stat().st_size for path in files):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the slots were not made: {files}")
            time.sleep(_POLL_SECONDS)

    def host_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self._tier.rglob("*") if path.is_file())

    def found(self, paths: Sequence[tuple[Any, ...]], step: int) -> tuple[list[torch.Tensor], float]:  # noqa: ARG002
        """Restore the step into the training; return its tensors and the seconds."""
        torch.cuda.synchronize()
        begun = time.monotonic()
        self.checkpointer.restore(step=step)
        torch.cuda.synchronize()
        return tensors_of(self._training), time.monotonic() - begun


@contextmanager
def saved_by(strategy: str, training: DeviceTraining, folder: Path, **more: Any) -> Iterator[ByHoldfast]:
    """Yield holdfast with one of `STRATEGIES`, and remove its files at the end."""
    join_alone()
    mine = folder / strategy
    shutil.rmtree(mine, ignore_errors=True)
    mine.mkdir()
    try:
        saver = ByHoldfast(training, mine, strategy, more)
        with saver.checkpointer:
            yield saver
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def join_alone() -> None:
    """Make this process a job of one rank, as torchrun would; later calls do nothing."""
    from holdfast import init_torch_distributed

    if torch.distributed.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    init_torch_distributed("gloo")
