"""What `holdfast doctor` asks of a role and what it gets back: the entry-point group `holdfast.checks`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class CheckState(StrEnum):
    """How a check ended. `fail`: a run cannot work so. `warn`: it can, but worse or less safely."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw.

    Attributes:
        check: Short and stable, such as `mpi ulfm`; for `--json` and for people who grep.
        state: How it ended.
        seen: What was found, with figures.
        fix: What to do about it; empty when it is ok.
    """

    check: str
    state: CheckState
    seen: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What the run is going to need.

    Attributes:
        store: URL of the run, or None: the store is not looked at.
        runtime_dir: Where the ring will lie.
        ring_bytes: Its size. `chunk_bytes`: size of a chunk.
        hostfile: Hosts of the MPI job, for mpirun; None: this machine alone.
    """

    store: str | None
    runtime_dir: Path
    ring_bytes: int
    chunk_bytes: int
    hostfile: Path | None = None
