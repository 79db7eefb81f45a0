"""Ranks with a stager: they save and die by SIGKILL, or restore, report the sources of their bytes, and die.

python hot.py OUT save durable|staged STEPS…     the ranks die when the last of STEPS is in that state
python hot.py OUT restore [STEPS…]               restore the newest, then each of STEPS; OUT/restored-RANK.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.store.retrying import Retrying
from holdfast.store.wrapper import StoreWrapper
from trainer_side import Checkpointer, PerRank

SIZES = (60_000, 7, 20_000)  # 320,028 bytes plus zip overhead: 5 chunks of 64 KiB
_requests: list[str] = []


def model(step: int) -> nn.ParameterList:
    """Return the parameters of a step, in which no two chunks are equal."""
    return nn.ParameterList(torch.arange(size, dtype=torch.float32) + step * 1000 for size in SIZES)


def count_reads() -> None:
    """Record each read of a checkpoint's bytes from the store."""
    read_into = Retrying.read_into

    def counted(self: StoreWrapper, name: str, offset: int, buffer: memoryview) -> None:
        _requests.append(name)
        read_into(self, name, offset, buffer)

    Retrying.read_into = counted  # type: ignore[method-assign]


def save(saving: Checkpointer, live: nn.ParameterList, own: PerRank, until: str, steps: list[int]) -> None:
    """Save the steps one after the other."""
    for step in steps:
        with torch.no_grad():
            for one, value in zip(live, model(step), strict=True):
                one.copy_(value)
        own.value["step"] = step
        assert saving.save(step)
        deadline = time.monotonic() + 120
        while (saving.durable_step if until == "durable" else saving.staged_step) < step:
            assert time.monotonic() < deadline, f"step {step} is not {until}"
            time.sleep(0.01)


def bring_back(
    saving: Checkpointer, live: nn.ParameterList, own: PerRank, step: int | None
) -> dict[str, Any]:
    """Restore, and return a report."""
    _requests.clear()
    saving.restore(step=step)
    found = saving.restored
    assert found is not None
    return {
        "step": found.step,
        "same": all(torch.equal(a, b) for a, b in zip(live, model(found.step), strict=True)),
        "own": own.value,
        "sources": {name: use.nbytes for name, use in found.sources.items()},
        "store_requests": len(_requests),
        "mended": found.mended,
        "in_store": found.manifest is not None,
    }


def main() -> None:
    """Run the command in the arguments."""
    out, what, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    out.mkdir(parents=True, exist_ok=True)
    count_reads()
    live, own = model(0), PerRank({"rank": -1, "step": -1})
    saving = Checkpointer({"model": live, "own": own}, fresh=what == "save")
    rank = saving.rank
    if what == "save":
        own.value["rank"] = rank
        save(saving, live, own, words[0], [int(word) for word in words[1:]])
    else:
        reports = [bring_back(saving, live, own, step) for step in [None, *map(int, words)]]
        (out / f"restored-{rank}.json").write_text(json.dumps(reports))
    (out / f"done-{rank}").touch()
    while not all((out / f"done-{one}").exists() for one in range(saving.ranks)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
