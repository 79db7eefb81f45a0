"""Why an attempt ended, judged by the evidence: a preemption leads to a restart, a bug to a message.

    evidence                                                verdict
    every trainer ended with 0                              done
    a host of the attempt is gone, or had a notice          preempted
    the kernel killed a process for memory                  crashed      by the counters of its control group
    a process was killed by a signal from outside           killed       (an unannounced preemption)
    the stager lost a rank that never reported its end      killed       (a whole container or pod)
    the stager, or mpirun itself, was killed                killed
    silent, or no step for too long, and ended by us        lost
    all that ended report a lost peer, and the peer is      lost         (only `holdfast rank`; the supervisor sees
    out of sight                                                          the end of every rank)
    ended by itself, and its last checkpoint is not         lost
    durable
    a process ended with a code or a fault of its own       crashed      exit code, exception, tail of its log
    no process ever began                                   unlaunched

The order matters. When one rank is killed, the others end with exceptions about broken connections; when a host
vanishes, it reports nothing and the ranks on other hosts crash. Causes from outside therefore come before crashes, and
an unreported death comes before the errors of surviving processes.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast import errors
from holdfast.errors import HoldfastError

_OWN_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)
_PERMANENT_ERRORS = frozenset({"ConfigError", "StateError", "ResumeDiffers"})
_USAGE_EXIT_CODE = 2
INTERRUPTED = 130
OUT_OF_MEMORY = "out of memory"  # signature of these verdicts
MEMORY_KILL = "the kernel has killed a process of its control group, because the memory was used up"
_SIGKILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the process itself; a child of a shell


class Cause(StrEnum):
    DONE = "done"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    KILLED = "killed"
    LOST = "lost"
    CRASHED = "crashed"
    UNLAUNCHED = "unlaunched"


@dataclass(frozen=True, slots=True)
class Death:
    """How one process of the job ended."""

    rank: int  # the stager's rank is the number of trainers
    status: int  # exit code, or minus the number of the signal
    exception: str = ""  # exception at the end of its log, such as `ValueError`, or ""
    by_supervisor: bool = False  # the supervisor had already begun to end the attempt
    lost_peer: bool = False  # its output says that it ended because another process was lost
    # The kernel killed a process of its control group to free memory while this process ran.
    out_of_memory: bool = False

    @property
    def is_oom_killed(self) -> bool:
        """Whether the kernel killed this process, or the child whose status it has, to free memory."""
        return self.out_of_memory and self.status in _SIGKILLED and not self.by_supervisor

    @property
    def is_killed_from_outside(self) -> bool:
        """Whether it was killed by a signal that a program does not raise by itself."""
        return self.status < 0 and -self.status not in _OWN_FAULTS and not self.by_supervisor

    @property
    def is_own_fault(self) -> bool:
        return (self.status > 0 or -self.status in _OWN_FAULTS) and not self.by_supervisor


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known when the launcher has ended."""

    ranks: int
    mpirun_status: int  # exit code of the launcher, or minus the number of the signal
    rank_hosts: Mapping[int, str] = field(default_factory=dict)
    deaths: tuple[Death, ...] = ()  # processes that reported how they ended, in this order
    # Ranks that the stager lost before any process reported a failure of its own.
    lost_first: tuple[int, ...] = ()
    lost_hosts: Collection[str] = ()
    noticed_hosts: Collection[str] = ()
    give_up_reason: str = ""  # why the supervisor ended the attempt; empty if it did not
    stopping: bool = False
    launcher: str = "mpirun"
    stagers: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an attempt ended."""

    cause: Cause
    message: str
    signature: str  # equal for two attempts that ended in the same way
    rank: int | None = None  # the process whose log explains the end, or None
    exit_code: int = 1  # exit code of the command if this was the last attempt
    exception: str = ""  # the exception of that process; empty if none is known
    is_permanent: bool = False  # a restart cannot help until the user changes something


def judge(evidence: Evidence) -> Verdict:
    ended = {death.rank: death for death in evidence.deaths}
    if all(rank in ended and ended[rank].status == 0 for rank in range(evidence.ranks)):
        return Verdict(Cause.DONE, "every rank has ended with exit code 0", "done", exit_code=0)
    if evidence.stopping:
        how = "the job was ended because this command received a signal"
        return Verdict(Cause.STOPPED, how, "stopped", exit_code=INTERRUPTED)
    for reason, hosts in (
        ("is gone", evidence.lost_hosts),
        ("had a notice that it will be taken away", evidence.noticed_hosts),
    ):
        if hosts:
            names = ", ".join(sorted(hosts))
            return Verdict(Cause.PREEMPTED, f"host {names} {reason}", "preempted", exit_code=9)
    return (
        _killed(evidence)
        or _ended_by_supervisor(evidence)
        or _crashed(evidence)
        or _not_durable(evidence)
        or _lost_peer(evidence)
        or _unreported_end(evidence)
    )


def error_class(exception: str) -> type[HoldfastError] | None:
    """Return the class named by an exception such as `holdfast.errors.PeerLost`; None if it is not holdfast's own."""
    name = exception.removeprefix("holdfast.errors.")
    return getattr(errors, name, None) if name in errors.__all__ and name != exception else None


def _killed(evidence: Evidence) -> Verdict | None:
    victim = next((death for death in evidence.deaths if death.is_oom_killed), None)
    if victim is not None:
        how = f"{_describe_process(victim.rank, evidence)} was killed by the kernel because the memory was used up"
        return Verdict(Cause.CRASHED, how, OUT_OF_MEMORY, victim.rank, 128 + signal.SIGKILL)
    killed = [death for death in evidence.deaths if death.is_killed_from_outside]
    if killed:
        first = killed[0]
        how = f"{_describe_process(first.rank, evidence)} was killed by {signal_name(-first.status)} from outside"
        return Verdict(Cause.KILLED, how, f"killed {first.status}", first.rank, 128 - first.status)
    reported = {death.rank for death in evidence.deaths}
    unreported = [rank for rank in evidence.lost_first if rank not in reported]
    if unreported:
        who = _describe_process(unreported[0], evidence)
        how = (
            f"{who} died together with the process that reports its end, as when a container or pod is killed"
        )
        return Verdict(Cause.KILLED, how, "killed unreported", None, 128 + signal.SIGKILL)
    if evidence.mpirun_status < 0 and not evidence.give_up_reason:
        how = f"{evidence.launcher} was killed by {signal_name(-evidence.mpirun_status)}"
        return Verdict(Cause.KILLED, how, "killed mpirun", None, 128 - evidence.mpirun_status)
    return None


def _ended_by_supervisor(evidence: Evidence) -> Verdict | None:
    if not evidence.give_up_reason:
        return None
    lost = Verdict(
        Cause.LOST, evidence.give_up_reason, f"lost {evidence.give_up_reason.split(':')[0]}", None, 9
    )
    return _crashed(evidence) or lost  # a process may have crashed before the supervisor ended the others


def _crashed(evidence: Evidence) -> Verdict | None:
    crashed = [
        death
        for death in evidence.deaths
        if death.is_own_fault and not death.lost_peer and not _is_not_durable(death, evidence)
    ]
    if not crashed:
        return None
    # Prefer a rank that names an exception to one that had lost its connection to it a moment earlier.
    first = next((death for death in crashed if death.exception), crashed[0])
    who = _describe_process(first.rank, evidence)
    if first.status < 0:
        how, code = f"{who} ended with {signal_name(-first.status)}", 128 - first.status
    else:
        how, code = f"{who} ended with exit code {first.status}", first.status
    if first.exception:
        how = f"{how} ({first.exception})"
    if first.out_of_memory:
        how = f"{how}; {MEMORY_KILL}"
    short = first.exception.rpartition(".")[2]
    return Verdict(
        Cause.CRASHED,
        how,
        f"crashed {first.status} {first.exception}",
        first.rank,
        code,
        first.exception,
        is_permanent=short in _PERMANENT_ERRORS or first.status == _USAGE_EXIT_CODE,
    )


def _is_not_durable(death: Death, evidence: Evidence) -> bool:
    """Whether a rank finished its training but not its last checkpoint. Only one of those ranks reports it."""
    is_reported = any(error_class(one.exception) is errors.NotDurable for one in evidence.deaths)
    return is_reported and death.status == errors.NotDurable.exit_code


def _not_durable(evidence: Evidence) -> Verdict | None:
    first = next((death for death in evidence.deaths if _is_not_durable(death, evidence)), None)
    if first is None:
        return None
    who = _describe_process(first.rank, evidence)
    how = f"{who} has ended, and the newest step that was to be saved is not durable"
    code = errors.NotDurable.exit_code
    return Verdict(Cause.LOST, how, "not durable", first.rank, code, first.exception)


def _lost_peer(evidence: Evidence) -> Verdict | None:
    first = next((death for death in evidence.deaths if death.lost_peer), None)
    if first is None:
        return None
    how = f"{_describe_process(first.rank, evidence)} ended because it had lost another process of the job"
    if first.exception:
        how = f"{how} ({first.exception})"
    return Verdict(Cause.LOST, how, "lost peer", first.rank, errors.PeerLost.exit_code, first.exception)


def _unreported_end(evidence: Evidence) -> Verdict:
    if not evidence.rank_hosts:
        how = f"mpirun ended with status {evidence.mpirun_status} before any process had begun"
        return Verdict(Cause.UNLAUNCHED, how, f"unlaunched {evidence.mpirun_status}", None, 9)
    unreported = sorted(set(range(evidence.ranks)) - {death.rank for death in evidence.deaths})
    who = ", ".join(_describe_process(rank, evidence) for rank in unreported) or "a rank"
    how = f"mpirun ended with status {evidence.mpirun_status}, and the end of {who} was not reported"
    return Verdict(Cause.LOST, how, "lost unheard", None, 9)


def _describe_process(rank: int, evidence: Evidence) -> str:
    name = process_name(rank, evidence.ranks, evidence.stagers)
    return f"{name} on {evidence.rank_hosts[rank]}" if rank in evidence.rank_hosts else name


def process_name(rank: int, ranks: int, stagers: int) -> str:
    """Name a process of the job in messages; the stagers follow the `ranks` trainers."""
    if rank < ranks:
        return f"rank {rank}"
    return "the stager" if stagers == 1 else f"stager {rank - ranks + 1}/{stagers}"


def signal_name(number: int) -> str:
    """Name a signal, even one that Python does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
