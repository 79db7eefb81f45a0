"""A process that writes slices into a tier, step by step, records its progress in a file, and is made to be killed.

It runs in a child of multiprocessing's fork server, so that a kill costs no new interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import faultpoint
from tests.support.tiers import RUN, image, save, write
from trainer_side.tiers.open_tiers import open_tier

__all__ = ["STEPS", "write_steps"]

STEPS = 5


def write_steps(spec: str, progress: Path, attempt: int, environment: dict[str, str]) -> None:
    """Write steps 1 to 5, abandoning the third once and writing it again; record each complete step in `progress`."""
    os.environ.update(environment)
    faultpoint.identify("rank:0")
    made = image()
    tier = open_tier(spec, RUN)
    tier.prepare(made.layout, 0)
    said = os.open(progress, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for step in range(1, STEPS + 1):
        if step == 3:
            write(tier, made, 0, attempt, step).abandon()
        save(tier, made, 0, attempt, step, complete=False)
        os.write(said, f"sealed {step}\n".encode())
        tier.complete(attempt, step)
        os.write(said, f"complete {step}\n".encode())
    tier.close()
