"""Compares published files with clones taken just before `save()` while training continues: bit for bit, by pattern.

    stager (standing.py) ◄═TCP═ Checkpointer ─► steps continue ─► the file is published ─► torch.load ─► compared

Each pattern changes the state in a different way after the save. Each has its own process and stager, and all run at
the same time: `python -m benchmarks.gpu.exact PATTERN WIDTH STORE RESULT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.device_training import join_alone
from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.standing import standing

__all__ = ["PATTERNS", "measure"]

_LAYERS = 7
_SAVES = 5
_STEPS_BEFORE, _STEPS_BEHIND = 3, 10
_WARM_UP = 3
_DURABLE_SECONDS_MAX = 20.0
_BOUND = 0.01
_ROOT = Path(__file__).resolve().parents[2]
_END_SECONDS = 3.0
_TAIL = 600
_NICE = 10  # concurrent jobs have priority


class _Job:
    """Linear layers and AdamW on the device."""

    def __init__(self, width: int, *, capturable: bool) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, capturable=capturable, fused=not capturable
        )
        self._inputs, self._labels = torch.randn(64, width).cuda(), torch.randn(64, width).cuda()
        self.step: Callable[[], object] = self._step
        for _ in range(_WARM_UP):
            self.step()
        self._averages = [parameter.detach().clone() * 0.5 for parameter in self.model.parameters()]

    def _step(self) -> None:
        (self.model(self._inputs) - self._labels).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def record(self) -> None:
        """Record the whole step as a CUDA graph, and replay it from now on."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.step = graph.replay

    def swap_averages(self) -> None:
        """Swap parameters with their averages, as for an evaluation."""
        with torch.no_grad():
            for parameter, average in zip(self.model.parameters(), self._averages, strict=True):
                kept = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(kept)

    def write_data(self) -> None:
        """Write through `.data`, which autograd's version counter does not see."""
        for parameter in self.model.parameters():
            parameter.data.clamp_(-_BOUND, _BOUND)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors, by the names of `_found`."""
        moments = {
            f"{number}.{key}": value
            for number, parameter in enumerate(self.model.parameters())
            for key, value in self.optimizer.state[parameter].items()
        }
        return {**self.model.state_dict(), **moments}


def _nothing(job: _Job) -> None:
    """Do nothing: the updates of the next steps suffice."""


# Name ─► (whether the step is a graph, the action right after the save).
PATTERNS: dict[str, tuple[bool, Callable[[_Job], None]]] = {
    "adamw_fused": (False, _nothing),
    "graph_replay": (True, _nothing),
    "averages_swapped": (False, _Job.swap_averages),
    "data_writes": (False, _Job.write_data),
}


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    os.nice(_NICE)
    width = sizes.large.width
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(len(PATTERNS)) as threads:
        running = {name: threads.submit(_one, measured, name, width) for name in PATTERNS}
        for name, pattern in running.items():
            try:
                found[name] = pattern.result()
            except Exception as error:  # noqa: BLE001 - the other patterns are looked at all the same
                found[name] = {"error": f"{type(error).__name__}: {error}"[-_TAIL:]}
            measured.put(patterns=found)
    wrong = {name: one for name, one in found.items() if one.get("exact") != _SAVES}
    if wrong:
        raise RuntimeError(f"not exact: {wrong}")


def _one(measured: Measured, name: str, width: int) -> dict[str, Any]:
    """Run a pattern in a process of its own; return its result."""
    result = measured.folder / f"{name}.json"
    with standing(measured.folder / name) as joining:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.gpu.exact", name, str(width)),
                *(joining["HOLDFAST_STORE"], str(result)),
            ],
            cwd=_ROOT,
            env={**os.environ, **joining},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(1.0, measured.seconds_left() - _END_SECONDS),
            check=False,
        )
    if not result.exists():
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr[-_TAIL:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _published(name: str, width: int, store: Path) -> dict[str, Any]:
    from holdfast import Checkpointer

    recorded, behind = PATTERNS[name]
    job = _Job(width, capturable=recorded)
    state = {"model": job.model, "optimizer": job.optimizer}
    taken, exact, wrong, steps = 0, 0, [], 0
    with Checkpointer(state, every=0) as checkpointer:
        checkpointer.restore()
        if recorded:
            job.record()
        for step in range(_SAVES):
            for _ in range(_STEPS_BEFORE):
                job.step()
            clones = {key: tensor.detach().clone() for key, tensor in job.state().items()}
            taken += checkpointer.save(step)
            behind(job)
            for _ in range(_STEPS_BEHIND):
                job.step()
            steps += _STEPS_BEFORE + _STEPS_BEHIND
            deadline = time.monotonic() + _DURABLE_SECONDS_MAX
            while checkpointer.durable_step < step:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"step {step} was not published: {checkpointer.stats}")
                time.sleep(0.01)
            differing = _differing(store / f"step-{step:09d}.pt", clones)
            exact += not differing
            wrong += [f"step {step}: {key}" for key in differing]
    return {
        "state_bytes": sum(clone.nbytes for clone in clones.values()),
        "steps": steps,
        "saves": _SAVES,
        "taken": taken,
        "exact": exact,
        "differing": wrong[:6],
    }


def _differing(file: Path, clones: dict[str, torch.Tensor]) -> list[str]:
    """Return the tensors of a published file that differ from their clones."""
    read = torch.load(file, weights_only=True, mmap=True)
    moments = {
        f"{number}.{key}": value
        for number, of in read["optimizer"]["state"].items()
        for key, value in of.items()
    }
    found = {**read["model"], **moments}
    missing = [key for key in clones if key not in found]
    return missing + [
        key
        for key, clone in clones.items()
        if key in found and not torch.equal(found[key].reshape(-1), clone.cpu().reshape(-1))
    ]


def _main() -> None:
    name, width, store, result = sys.argv[1:]
    os.environ["HOLDFAST_ON_FULL"] = "wait"
    join_alone()
    found = _published(name, int(width), Path(store))
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main()
