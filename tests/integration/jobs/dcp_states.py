"""Trains under FSDP2 with objects like those of torch.distributed.checkpoint's users, and saves every step.

    python dcp_states.py OUT STEPS TRUTHS PAUSE_AT

Two nets, each in one object whose `state_dict()` is torch's `get_state_dict()`: one with the defaults, one with a flat
optimizer state. Also rows that describe their place by `__create_chunk_list__()`. Before each save rank 0 writes the
whole state, gathered by torch, to `TRUTHS/STEP.pt`. A restored job writes to `OUT/restored.json` the step, and the
values that differ from its truth. After step PAUSE_AT the ranks wait to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.integration.jobs.sharded import MESHES, WORDS, Net, differences, gathered
from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

ROWS, PAUSE_SECONDS_MAX = 7, 240.0


class Application:
    """Net and optimizer, as in the tutorial of torch.distributed.checkpoint."""

    def __init__(self, ranks: int, options: StateDictOptions) -> None:
        self.net, self._options = Net(), options
        MESHES["fsdp"](self.net, ranks)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def state_dict(self) -> dict[str, Any]:
        net, optimizer = get_state_dict(self.net, self.optimizer, options=self._options)
        return {"net": net, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(isinstance(value, DTensor) for name, value in state["net"].items() if name != "seen")
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["net"],
            optim_state_dict=state["optimizer"],
            options=self._options,
        )

    def train(self, words: torch.Tensor) -> None:
        """One step."""
        self.net(words).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Rows:
    """Some rows of a table: of seven, four and three."""

    def __init__(self, rank: int, ranks: int) -> None:
        whole = torch.arange(ROWS * 5.0).reshape(ROWS, 5)
        self.shape = whole.shape
        self.part = whole.tensor_split(ranks)[rank].contiguous()
        self._start = int(self.part[0, 0]) // 5

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((self._start, 0)), self.part.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.part

    def gathered(self) -> torch.Tensor:
        """All rows."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.part)
        return torch.cat(parts)


def main() -> None:
    out, steps, truths, pause_at = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(3)
    nested = Application(ranks, StateDictOptions())
    flat = Application(ranks, StateDictOptions(flatten_optimizer_state_dict=True))
    rows = Rows(rank, ranks)

    def truth() -> Any:
        apps = {"nested": nested.state_dict(), "flat": flat.state_dict()}
        return gathered(apps) | {"table": {"rows": rows.gathered()}}

    with Checkpointer({"nested": nested, "flat": flat, "table": {"rows": rows}}) as checkpointer:
        first = checkpointer.restore()
        if checkpointer.restored is not None:
            here = truth()
            if rank == 0:
                there = torch.load(truths / f"{first - 1}.pt", weights_only=True)
                report = {"step": first - 1, "differ": differences(here, there)}
                (out / "restored.json").write_text(json.dumps(report))
        for step in range(first, steps):
            torch.manual_seed(step)
            words = torch.randint(0, WORDS, (4, 7))
            nested.train(words)
            flat.train(words + 1 - words // (WORDS - 1))
            rows.part.mul_(1.25)
            here = truth()
            if rank == 0:
                torch.save(here, truths / f"{step}.pt")
            assert checkpointer.save(step), f"step {step} was declined"
            checkpointer.wait_copied()
            if step == pause_at:
                (out / f"paused-{rank}").touch()
                time.sleep(PAUSE_SECONDS_MAX)
                sys.exit("nobody killed this rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
