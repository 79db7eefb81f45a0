"""A job whose state changes during the run: no moments, then moments; then plain values that outgrow their room.

`python growing.py`: exits non-zero with a message if a save has an unexpected result.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, init_torch_distributed
from trainer_side.save.staging import Staging

SECONDS_MAX = 60
GROWN = 300_000  # characters; the room set aside for plain values is 64 KiB


def until(condition: Callable[[], bool]) -> None:
    """Poll until `condition()`, with a time limit."""
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {SECONDS_MAX} s"
        time.sleep(0.01)


def settle(checkpointer: Checkpointer, step: int) -> None:
    """Wait until `step` is durable, on every rank."""
    until(lambda: checkpointer.durable_step >= step)
    torch.distributed.barrier()


def buffers() -> list[weakref.ref[Staging]]:
    """Return weak references to all live staging buffers."""
    gc.collect()
    return [weakref.ref(found) for found in gc.get_objects() if isinstance(found, Staging)]


def main() -> None:
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    notes: dict[str, Any] = {"text": ""}
    checkpointer = Checkpointer(
        {"model": model, "optimizer": optimizer, "notes": notes, "mine": PerRank({"rank": rank})}
    )
    assert checkpointer.save(0)
    settle(checkpointer, 0)
    (before,) = buffers()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
    assert checkpointer.save(1), "other tensors than before: a new plan, not a refusal"
    settle(checkpointer, 1)
    assert before() is None, "the staging buffer of the plan before is kept"
    assert len(buffers()) == 1
    notes["text"] = "x" * GROWN
    if rank != 0:
        assert checkpointer.save(2), "the others cannot know what rank 0 will find"
    torch.distributed.barrier()
    if rank == 0:
        assert not checkpointer.save(2), "rank 0 has no room for it, and says so"
    until(
        lambda: (
            checkpointer._link.job.new_pickle_reserve_bytes >= GROWN
            and not checkpointer._parts.areas.in_flight()
        )
    )
    torch.distributed.barrier()
    notes["text"] = "y" * GROWN
    assert checkpointer.save(3), "rank 0 was given more room"
    settle(checkpointer, 3)
    assert len(buffers()) == 1
    checkpointer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
