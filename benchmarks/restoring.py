"""Times a restore of one rank: zeroes the tensors, restores them, and compares them with their old values.

holdfast reads this rank's share from the store or the stager's ring, and gets the rest from the other ranks.
`torch.load` reads the whole file on every rank, as scripts do, and `load_state_dict` copies it into model and
optimizer. `dcp.load` reads each rank's shards into its tensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from benchmarks import memory
from benchmarks.complete import IncompleteError, leaves, local_part
from benchmarks.workload import Workload
from trainer_side.restore.ring_slices import RingSlices

if TYPE_CHECKING:
    from holdfast import Checkpointer

__all__ = ["DCP", "OURS", "RING", "restore"]

OURS, RING, DCP = "holdfast", "holdfast, from the ring", "dcp.load"


def restore(
    how: str,
    workload: Workload,
    checkpointer: Checkpointer | None,
    source: str,
    *,
    compare: bool,
    meet: Callable[[], None],
) -> dict[str, float]:
    """Return seconds, by phase where the restorer reports phases, and the most bytes by which this process grew.

    The clock starts when all ranks have passed `meet`.

    Raises:
        IncompleteError: A restored tensor differs.
        ValueError: `how` is unknown.
    """
    before = _sums(workload) if compare else {}
    with torch.no_grad():
        for _, value in leaves(workload.state_dict()):
            if isinstance(value, torch.Tensor):
                local_part(value).zero_()
    resident_bytes = memory.resident_bytes()
    memory.reset_peak()
    meet()
    begun = time.monotonic()
    if how in {OURS, RING}:
        assert checkpointer is not None
        with _ring(checkpointer, asked=how == RING):
            checkpointer.restore()
    else:
        loaders: dict[str, Callable[[str], Any]] = {
            "torch.load": lambda path: torch.load(path, weights_only=True),
            "torch.load, mmap": lambda path: torch.load(path, weights_only=True, mmap=True),
            "s3torchconnector": _from_s3,
            DCP: lambda folder: _from_dcp(workload, folder),
        }
        state = loaders[how](source)
        workload.model.load_state_dict(state["model"])
        workload.optimizer.load_state_dict(state["optimizer"])
    seconds = time.monotonic() - begun
    figures: dict[str, float] = {"seconds": seconds, "grown_bytes": memory.peak_bytes() - resident_bytes}
    if how in {OURS, RING} and checkpointer is not None and checkpointer.restored is not None:
        phases = checkpointer.restored.seconds
        figures |= {f"{name}_seconds": value for name, value in phases.items()}
        figures["bytes_read"] = checkpointer.restored.bytes_read
    after = _sums(workload) if compare else {}
    for path, value in before.items():
        if after.get(path) != value:
            raise IncompleteError(f"restore by {how}: {path} is not what it was")
    return figures


@contextlib.contextmanager
def _ring(checkpointer: Checkpointer, *, asked: bool) -> Iterator[None]:
    """Restore from the stager's ring, or as if the ring were empty; require that all bytes, or none, came from it."""
    link = checkpointer._link
    if not asked:
        link.fetch = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if not asked:
            del link.fetch  # removes the instance's attribute, which hides the method
    restored = checkpointer.restored
    assert restored is not None
    if any((place == RingSlices.name) != asked for place in restored.sources):
        raise IncompleteError(f"{RING if asked else OURS}: read from {', '.join(restored.sources)}")


def _from_s3(url: str) -> Any:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    client = S3Checkpoint(
        region=os.environ["AWS_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    with client.reader(url) as reader:
        return torch.load(cast("IO[bytes]", reader), weights_only=True)


def _from_dcp(workload: Workload, folder: str) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = workload.state_dict()
    load(state, storage_reader=FileSystemReader(folder))
    return state


def _sums(workload: Workload) -> dict[str, int]:
    """Return a sum over the bits of each tensor: enough to compare two states."""
    sums = {}
    for path, value in leaves(workload.state_dict()):
        if isinstance(value, torch.Tensor):
            sums[path] = _sum(local_part(value).detach())
    return sums


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
