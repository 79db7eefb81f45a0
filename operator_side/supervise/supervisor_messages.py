"""Events for the core, from clock, fleet, mpirun's output, event log and signals, and the actions that it returns."""

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
    """The fleet was looked at. None: no hosts to choose from; everything runs here."""

    hosts: tuple[Host, ...] | None


class ProcessBegan(NamedTuple):
    rank: int
    host: str


class Joined(NamedTuple):
    """All processes of the job have met, as one of the stagers says."""


class RankRestored(NamedTuple):
    rank: int
    step: int  # -1: there was none, the run begins
    attempt: int = 0  # that wrote the checkpoint; 0: not known
    before: CheckpointId | None = None  # would be restored if this one were set aside


class Stepped(NamedTuple):
    """A rank has taken its first step of this attempt."""

    rank: int
    step: int


class ResumeCompared(NamedTuple):
    """The first step after a resume was compared with that of the run before."""

    rank: int
    step: int
    proof: ResumeProof


class Ended(NamedTuple):
    rank: int
    status: int  # exit code, or minus a signal
    exception: str = ""
    out_of_memory: bool = False  # see `Death`


Report = ProcessBegan | Ended | RankRestored | Stepped | ResumeCompared  # of a process of the job, on itself


class Exited(NamedTuple):
    """mpirun has ended, and no process of the attempt is left here."""

    status: int


class StepStaged(NamedTuple):
    step: int
    share: ShareNumber = WHOLE


class StepDurable(NamedTuple):
    step: int
    attempt: int = 0  # that saved it; 0: not known


class RankSilence(NamedTuple):
    """The stager no longer hears a rank, or hears it again."""

    rank: int
    over: bool = False


class RankDead(NamedTuple):
    rank: int


class Noticed(NamedTuple):
    rank: int


class Stop(NamedTuple):
    reason: str


Told = (
    Joined | StepStaged | StepDurable | RankSilence | RankDead | Noticed
)  # by stager and flusher, in the event log
Event = ClockTick | HostsSeen | Exited | Stop | Report | Told


class LookAtFleet(NamedTuple):
    """Look at the fleet, now and at intervals. `replace`: number of slots to ask it for each time."""

    replace: int = 0


class Launch(NamedTuple):
    """Start mpirun with this number of trainers. `set_aside`: checkpoints that they do not restore."""

    attempt: int
    ranks: int
    hosts: tuple[Host, ...] | None
    set_aside: tuple[CheckpointId, ...] = ()


class Terminate(NamedTuple):
    """Ask the attempt to end: gently the trainers alone, else mpirun itself."""

    gently: bool


class KillAttempt(NamedTuple):
    """SIGKILL whatever is left of the attempt."""


class KeepEvidence(NamedTuple):
    """Have retention keep a checkpoint that is set aside."""

    key: CheckpointId


class Note(NamedTuple):
    """Something for people and for the status file."""

    event: str
    message: str
    fields: Mapping[str, Any] = {}
    loud: bool = False


class Finish(NamedTuple):
    verdict: Verdict


Action = LookAtFleet | Launch | Terminate | KillAttempt | KeepEvidence | Note | Finish
