"""Events for the core, from clock, fleet, mpirun's output, event log and signals; and the actions that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.wire.step_proof import ResumeProof
from operator_side.supervise.hosts import Host
from operator_side.supervise.verdict import Verdict


class ClockTick(NamedTuple):
    """Time has passed."""


class HostsSeen(NamedTuple):
    """The fleet's answer. None: there are no hosts to choose from, everything runs here."""

    hosts: tuple[Host, ...] | None


class ProcessStarted(NamedTuple):
    rank: int
    host: str


class AllJoined(NamedTuple):
    """A stager reports that all processes of the job have joined."""


class RankRestored(NamedTuple):
    rank: int
    step: int  # -1: no checkpoint, a new run begins
    attempt: int = 0  # the attempt that wrote the checkpoint; 0: unknown
    fallback: CheckpointId | None = None  # what would be restored if this one were set aside


class RankStepped(NamedTuple):
    """A rank has done its first step of this attempt."""

    rank: int
    step: int


class ResumeCompared(NamedTuple):
    """The first step after a resume was compared with the same step of the earlier attempt."""

    rank: int
    step: int
    proof: ResumeProof


class ProcessExited(NamedTuple):
    rank: int
    status: int  # exit code, or minus a signal
    exception: str = ""
    out_of_memory: bool = False  # see `Death`


# From a process, about itself.
Report = ProcessStarted | ProcessExited | RankRestored | RankStepped | ResumeCompared


class MpirunExited(NamedTuple):
    """mpirun has ended, and the attempt has no process left here."""

    status: int


class StepStaged(NamedTuple):
    step: int
    share: ShareNumber = WHOLE


class StepDurable(NamedTuple):
    step: int
    attempt: int = 0  # the attempt that saved it; 0: unknown


class RankSilence(NamedTuple):
    """The stager no longer hears from a rank; `is_over`: it does again."""

    rank: int
    is_over: bool = False


class RankDead(NamedTuple):
    rank: int


class RankNoticed(NamedTuple):
    rank: int


class Stop(NamedTuple):
    reason: str


LogEvent = AllJoined | StepStaged | StepDurable | RankSilence | RankDead | RankNoticed  # in the event log
Event = ClockTick | HostsSeen | MpirunExited | Stop | Report | LogEvent


class PollFleet(NamedTuple):
    """Ask the fleet now and at intervals. `extra_slots`: number of slots to request each time."""

    extra_slots: int = 0


class Launch(NamedTuple):
    """Start mpirun with this number of trainers. `set_aside`: checkpoints that they must not restore."""

    attempt: int
    ranks: int
    hosts: tuple[Host, ...] | None
    set_aside: tuple[CheckpointId, ...] = ()


class Terminate(NamedTuple):
    """Ask the attempt to end: `gently` asks only the trainers, otherwise mpirun."""

    gently: bool


class KillAttempt(NamedTuple):
    """SIGKILL all processes that are left of the attempt."""


class RetainCheckpoint(NamedTuple):
    """Make retention keep a checkpoint that is set aside."""

    key: CheckpointId


class Note(NamedTuple):
    """A message for the user and for the status file."""

    event: str
    message: str
    fields: Mapping[str, Any] = {}
    is_warning: bool = False


class Finish(NamedTuple):
    verdict: Verdict


Action = PollFleet | Launch | Terminate | KillAttempt | RetainCheckpoint | Note | Finish
