"""Each rank restores a state of tensors of many sizes from a directory, over real MPI: `python sharing.py RUN OUT`.

Writes to OUT, per rank, as JSON: bytes read, and whether every tensor is correct, bit for bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from holdfast.config import TrainerConfig
from tests.support.restoring import CountingStore
from trainer_side.ranks.joined import join_world
from trainer_side.restore.restore import restore

SIZES = [
    1,
    7,
    100,
    32_768,
    40_000,
    5,
    300_000,
    3,
    70_001,
    2,
    2,
    1_000_000,
]  # floats: some below 128 KiB, some above


def state() -> dict[str, list[torch.Tensor]]:
    """Return the saved tensors."""
    return {"x": [torch.arange(size, dtype=torch.float32) + number for number, size in enumerate(SIZES)]}


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    peers = join_world(TrainerConfig()).peers()
    store = CountingStore(run)
    restored = restore({"x": []}, store, peers, events=None)
    assert restored is not None
    same = [torch.equal(a, b) for a, b in zip(restored.values["x"], state()["x"], strict=True)]
    report = {"bytes_read": restored.bytes_read, "same": same, "requests": len(store.requests)}
    (out / f"{peers.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
