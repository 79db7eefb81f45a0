"""One rank alone changes its state between two saves, in several ways in turn; records the result on each rank.

`python split_change.py OUT`. Before each change all ranks save the old state. Each rank writes to OUT, per change, the
result of the next save: the error's class and message, or the return value of save().
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, Split, init_torch_distributed

ROWS = 8
State = dict[str, Any]


def before(rank: int, mesh: DeviceMesh) -> State:
    """The state that all ranks agree on."""
    part = torch.arange(ROWS * 2.0).reshape(ROWS, 2) + 100 * rank
    return {
        "split": {"w": Split(part, (2 * ROWS, 2), (rank * ROWS, 0))},
        "sharded": {"w": DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False)},
        "plain": {"a": torch.ones(4), "b": torch.ones(5)},
    }


def other_rows(state: State, _: DeviceMesh) -> None:
    part = state["split"]["w"].tensor
    state["split"]["w"] = Split(part, (2 * ROWS, 2), (ROWS // 2, 0))


def other_placement(state: State, mesh: DeviceMesh) -> None:
    whole = torch.zeros(2 * ROWS, 2)
    state["sharded"]["w"] = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


def no_split(state: State, _: DeviceMesh) -> None:
    state["split"]["w"] = torch.zeros(2 * ROWS, 2)


def other_dtype(state: State, _: DeviceMesh) -> None:
    state["plain"]["b"] = torch.ones(5, dtype=torch.float64)


def one_more(state: State, _: DeviceMesh) -> None:
    state["plain"]["c"] = torch.ones(3)


def one_less(state: State, _: DeviceMesh) -> None:
    del state["plain"]["b"]


# how → on which rank
CHANGES: dict[Callable[[State, DeviceMesh], None], int] = {
    other_rows: 1,
    other_placement: 1,
    no_split: 1,
    other_dtype: 0,
    one_more: 1,
    one_less: 0,
}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    mesh = init_device_mesh("cpu", (ranks,))
    said: dict[str, Any] = {}
    with Checkpointer(before(rank, mesh)) as checkpointer:

        def save(step: int, state: State) -> bool:
            checkpointer._state.clear()
            checkpointer._state.update(state)
            return checkpointer.save(step)

        for number, (change, changed_rank) in enumerate(CHANGES.items()):
            saved = save(2 * number, before(rank, mesh))
            state = before(rank, mesh)
            if rank == changed_rank:
                change(state, mesh)
            try:
                said[change.__name__] = {"before": saved, "saved": save(2 * number + 1, state)}
            except Exception as error:  # noqa: BLE001 - that is what is noted
                heard = {"class": type(error).__name__, "message": str(error)}
                said[change.__name__] = {"before": saved, **heard}
            dist.barrier()
        save(2 * len(CHANGES), before(rank, mesh))
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
