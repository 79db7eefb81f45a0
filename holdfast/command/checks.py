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
    """The result of one check."""

    check: str  # short and stable name, such as `mpi ulfm`; for `--json` and for grep
    state: CheckState
    seen: str  # the observation, with figures
    fix: str = ""  # the remedy; empty if the state is ok

    @classmethod
    def from_condition(
        cls, check: str, good: bool, seen: str, fix: str, otherwise: CheckState = CheckState.FAIL
    ) -> Finding:
        """Return `OK` without the fix if `good`, else `otherwise` with the fix."""
        return cls(check, CheckState.OK if good else otherwise, seen, "" if good else fix)


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The planned run that is checked."""

    store: str | None  # URL of the run; None: the store is not checked
    runtime_dir: Path
    ring_bytes: int  # initial size
    chunk_bytes: int
    hostfile: Path | None = None  # hosts of the MPI job, for mpirun; None: only this machine
    ring_grows: bool = False  # the ring grows when a checkpoint needs more room
