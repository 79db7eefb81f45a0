"""Trains past its best step, or returns to it.

`python best.py OUT LOSS… [--best METRIC]`. Each LOSS is a step, evaluated and saved; the ranks report different ones.
With --best the ranks first restore the best. OUT gets, per rank, the first step, the digest of the model before it, and
the digest after each step.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer

DURABLE_SECONDS_MAX = 60.0


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all bits of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    out, rest = Path(sys.argv[1]), sys.argv[2:]
    wanted = rest[rest.index("--best") + 1] if "--best" in rest else None
    given = [float(word) for word in (rest[: rest.index("--best")] if wanted else rest)]
    out.mkdir(parents=True, exist_ok=True)
    do_without_compiler()
    torch.manual_seed(7)
    model = torch.nn.Linear(300, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    after: dict[int, str] = {}
    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        first = checkpointer.restore(best=wanted)
        restored = digest(model)
        for step, loss in enumerate(given, first):
            optimizer.zero_grad()
            model(torch.ones(4, 300)).square().mean().backward()
            optimizer.step()
            after[step] = digest(model)
            metrics = {"val/loss": torch.tensor(loss - checkpointer.rank)}
            if not checkpointer.step(step, metrics=metrics):
                checkpointer.save(step, metrics=metrics)
            until = time.monotonic() + DURABLE_SECONDS_MAX
            while checkpointer.durable_step < step and time.monotonic() < until:
                time.sleep(0.005)
        said = {"first": first, "restored": restored, "after": after}
        (out / f"rank-{checkpointer.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
