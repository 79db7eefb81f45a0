"""The arguments and results of a role's checks for `holdfast doctor` (entry-point group `holdfast.checks`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class CheckState(StrEnum):
    """Result of a check. `fail`: a run cannot work. `warn`: a run works, but slower or less safely."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Short and stable name, such as `mpi ulfm`; for `--json` and for people who grep.
        seen: The observation, with figures.
        fix: The remedy; empty if the state is ok.
    """

    check: str
    state: CheckState
    seen: str
    fix: str = ""

    @classmethod
    def judged(
        cls, check: str, good: bool, seen: str, fix: str, otherwise: CheckState = CheckState.FAIL
    ) -> Finding:
        """The finding of a check with two results: ok without a fix, or else `otherwise` with it."""
        return cls(check, CheckState.OK if good else otherwise, seen, "" if good else fix)


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The planned run that is checked.

    Attributes:
        store: URL of the run; None: the store is not checked.
        ring_bytes: Size of the ring, at first.
        hostfile: Hosts of the MPI job, for mpirun; None: this machine alone.
        ring_grows: It becomes larger when a checkpoint needs it.
    """

    store: str | None
    runtime_dir: Path
    ring_bytes: int
    chunk_bytes: int
    hostfile: Path | None = None
    ring_grows: bool = False
