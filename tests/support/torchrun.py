"""The command line of torchrun, in place of mpirun's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from holdfast.mpirun import mpirun_command

__all__ = ["by_torchrun", "launch_command", "torchrun_command"]


def torchrun_command(ranks: int, trainer: Sequence[str], *, restarts: int = 0) -> list[str]:
    """Start a Python script on `ranks` ranks of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        str(restarts),
        *trainer,
    ]


def by_torchrun(ranks: int, *, restarts: int = 0) -> Callable[[list[str]], list[str]]:
    """For `Cluster.start(rewrite=…)`: torchrun starts the trainers of the mpirun line, without a stager."""

    def rewrite(line: list[str]) -> list[str]:
        return torchrun_command(ranks, line[line.index(sys.executable) + 1 :], restarts=restarts)

    return rewrite


def launch_command(launcher: str, ranks: int, trainer: Sequence[str]) -> list[str]:
    """Start a Python script by `mpirun` or `torchrun`."""
    if launcher == "torchrun":
        return torchrun_command(ranks, trainer)
    return mpirun_command(ranks, [sys.executable, *trainer])
