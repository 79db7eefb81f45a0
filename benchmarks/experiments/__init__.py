"""The experiments, one file each: the measurement, its document, and the tables made from that document.

Each module has `measure(options) -> document` and `grids(document) -> list[Grid]`. Documents hold every round, so the
tables and pictures can be made again without measuring.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks import machine
from benchmarks.cluster import Cluster, Clusters, Shape
from benchmarks.grid import Grid

__all__ = ["EXPERIMENTS", "Experiment", "Options", "available", "command_of", "document", "experiment"]

# In the order of `make bench`: experiments of the same shape are neighbours, so that they share one job.
EXPERIMENTS = {
    "table": "Every peer once a round: stall, staged, durable; ratios; memory; idle CPU",
    "makespan": "A training of GPT-2 that saves every 2 to 10 iterations, beside one that saves nothing",
    "cpu": "Real forward, backward and update on both cores; CPU seconds that a checkpoint costs",
    "epochs": "A checkpoint once an epoch, beside one every 5 iterations: overhead, and work lost at a kill",
    "models": "Stall, staged, durable and phases of ten models' states, 0.04 to 4 GB, as shapes",
    "workloads": "ResNet-50 that saves in every iteration, ResNet-152, and BERT-large",
    "jitter": "Iterations of plain Python with and without checkpoints: p50 to the slowest",
    "rings": "PGT by size of the stager's ring, smaller than the image included",
    "slices": "PGT and CST by number of ranks",
    "stager-size": "PGT by CPUs and memory of the stager, in a cgroup, with a dated price; as root",
    "shards": "PGT by number of ranks, each with a link of its own, and where the stager's link is the limit; as root",
    "shares": "One image by 1, 2 and 4 stagers behind a link each, and by the job's own stager; as root",
    "flights": "Slowdown by number of checkpoints in flight, 1 to 4, and by interval, over a slow store",
    "scaling": "What grows with 2 to 32 ranks and with 10 to 10,000 tensors",
    "growth": "What holdfast computes for 512 ranks, a terabyte, ten thousand tensors: parts alone, transport played",
    "gate": "Layer-wise against coarse gate where copying takes longer than the computation",
    "steady": "Resident bytes over 200 checkpoints",
    "restore": "From disk with a cold page cache, against torch.load, and from the ring; time to the first step",
    "sharded": "State that is split among the ranks (FSDP2), until torch.load opens one file; and onto another mesh",
    "transport": "Bytes into the ring over TCP, against bare sockets and MPI",
    "launchers": "torchrun beside a stager that stands alone, against mpirun: stall; relaunch after a kill, also bare",
    "tiers": "Local tiers: bytes written per byte, speed beside the bare device, layouts",
    "tiered": "Training that saves into a local tier: slowdown, gate, recovery from each tier",
    "goodput": "A model: goodput on a spot trace, total time by MTBF, effective training time; by `holdfast simulate`",
    "reality": "`holdfast simulate` against a run whose ranks are killed at the times of a trace",
    "effective": "Effective training time and the parts of its loss: real runs that are killed, beside the model",
    "switching": "A job taken off by SIGTERM and put on again: suspend and resume, against torch.save and torch.load",
    "interference": "An interval that adapts to another job on a slow store, against one that does not",
    "accuracy": "Accuracy by epoch and over time: undisturbed, and killed and resumed after each tenth epoch",
    "s3": "Durable and restore in an S3 server, against s3torchconnector and a bare multipart upload",
}


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        quick: Use a toy size that ends within a minute; its figures mean nothing.
        rounds: Overrides the experiment's own number; 0 does not.
        model: Overrides the experiment's own; empty does not.
        folder: Folder for all files; None is the one for temporary files.
    """

    quick: bool = False
    rounds: int = 0
    model: str = ""
    folder: Path | None = None
    progress: Callable[[str], None] = lambda _: None
    clusters: Clusters = field(default_factory=Clusters)

    def shape(self, model: str, **settings: Any) -> Shape:
        """Return a cluster's shape for this experiment, in the toy size if `quick`."""
        toy = "flat-24-3" if self.quick else model
        return Shape(model=self.model or toy, folder=self.folder, **settings)

    def running(self, shape: Shape, *, fresh: bool = False) -> AbstractContextManager[Cluster]:
        """Return a job of this shape, perhaps the previous experiment's."""
        return self.clusters.running(shape, self.progress, fresh=fresh)

    def count(self, usual: int, quick: int) -> int:
        """Return the number of rounds, iterations or the like."""
        return quick if self.quick else usual

    def rounds_of(self, usual: int) -> int:
        return self.rounds or self.count(usual, 2)


class Experiment(Protocol):
    """Interface of the modules in this package."""

    def measure(self, options: Options) -> dict[str, Any]: ...
    def grids(self, document: dict[str, Any]) -> list[Grid]: ...


def experiment(name: str) -> Experiment:
    """Return the module of that name."""
    return cast("Experiment", importlib.import_module(f"benchmarks.experiments.{name.replace('-', '_')}"))


def available(peers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the peers whose package is installed."""
    from benchmarks.peers import OPTIONAL

    return tuple(
        peer for peer in peers if peer not in OPTIONAL or importlib.util.find_spec(OPTIONAL[peer]) is not None
    )


def document(name: str, options: Options, shape: Shape, **content: Any) -> dict[str, Any]:
    """Return the figures in `content` together with their origin: command, machine, date, commit, shape."""
    return {
        "experiment": name,
        "what": EXPERIMENTS.get(name, ""),
        "command": command_of(name, options),
        "quick": options.quick,
        "machine": machine.describe(options.folder or Path("/tmp")),
        "measured": machine.measured(),
        "shape": {
            "model": shape.model,
            "ranks": shape.ranks,
            "ring_bytes": shape.fitted().ring_bytes,
            "chunk_bytes": shape.fitted().chunk_bytes,
        },
        **content,
    }


def command_of(name: str, options: Options) -> str:
    """Return the command line that repeats the measurement."""
    return shlex.join(["python", "-m", "benchmarks", *_arguments(name, options)])


def _arguments(name: str, options: Options) -> list[str]:
    arguments = [name]
    if options.quick:
        arguments.append("--quick")
    if options.rounds:
        arguments += ["--rounds", str(options.rounds)]
    if options.model:
        arguments += ["--model", options.model]
    return arguments
