"""Shared by the jobs of tests/integration/test_frameworks.py: a record of each rank's training, a pause for the kill.

Run a job as `python JOB.py OUT PAUSE_AT …`; the rest are the arguments of its example.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Watcher"]

_PAUSE_SECONDS_MAX = 240


class Watcher:
    """Writes this rank's pid, losses and final state into `out`; pauses after `pause_at` steps."""

    def __init__(self) -> None:
        self.out, self._pause_at = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
        self.out.mkdir(parents=True, exist_ok=True)
        self._rank = -1

    def begin(self, rank: int) -> None:
        """Start once the rank is known."""
        self._rank = rank
        (self.out / f"pid-{rank}").write_text(str(os.getpid()))

    def step(self, done: int, **seen: Any) -> None:
        """Record that `done` steps are done; `seen` must be the same in a resumed run."""
        with (self.out / f"losses-{self._rank}").open("a") as lines:
            lines.write(json.dumps({"step": done - 1, **seen}) + "\n")
        if done == self._pause_at:
            (self.out / f"paused-{self._rank}").touch()
            time.sleep(_PAUSE_SECONDS_MAX)
            sys.exit("nobody killed this rank")

    def end(self, **state: Any) -> None:
        """Write the final state; of a split tensor, this rank's part."""
        torch.save(_local(state), self.out / f"final-{self._rank}.pt")


def _local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _local(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_local(one) for one in value)
    return value.to_local() if isinstance(value, DTensor) else value
