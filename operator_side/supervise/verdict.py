"""Why an attempt ended: told from evidence, so that a preemption is answered with a relaunch and a bug with a message.

    evidence                                                verdict
    every trainer ended with 0                              done
    a host of the attempt is gone, or had a notice          preempted
    a process was killed by a signal from outside           killed       (a preemption without a word, no memory)
    the stager, or mpirun itself, is gone                   killed
    silent or no step for too long, and ended by us         lost
    a process ended with a code or a fault of its own       crashed      exit code, exception, tail of its log
    no process ever began                                   unlaunched

The order matters. Where one rank is killed, the others end with exceptions about their broken connections; and a host
that vanished says nothing at all, while the ranks that are left crash. So what comes from outside wins over what a
process says of itself.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

_OWN_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)
_SETTLED = frozenset({"ConfigError", "StateError"})
_USAGE_EXIT_CODE = 2
INTERRUPTED = 130


class Cause(StrEnum):
    """What ended an attempt."""

    DONE = "done"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    KILLED = "killed"
    LOST = "lost"
    CRASHED = "crashed"
    UNLAUNCHED = "unlaunched"


@dataclass(frozen=True, slots=True)
class Death:
    """How one process of the job ended, in the order in which it was heard.

    Attributes:
        rank: Its rank in the whole job; the stager's is the number of trainers.
        status: Exit code, or the signal's number below zero.
        exception: The exception that its log ends with, such as `ValueError`; empty if none.
        by_us: It was said after this supervisor had begun to end the attempt.
    """

    rank: int
    status: int
    exception: str = ""
    by_us: bool = False

    @property
    def from_outside(self) -> bool:
        """Killed by a signal that a program does not bring on itself."""
        return self.status < 0 and -self.status not in _OWN_FAULTS and not self.by_us

    @property
    def own_fault(self) -> bool:
        """Ended badly, by what it did itself."""
        return (self.status > 0 or (self.status < 0 and -self.status in _OWN_FAULTS)) and not self.by_us


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known when mpirun has ended.

    Attributes:
        ranks: How many trainers there were.
        mpirun_status: Its exit code, or the signal's number below zero.
        began: Host of each process that began, by rank.
        deaths: Of the processes that said how they ended.
        gone: Hosts of this attempt that are no longer there.
        noticed: Hosts of this attempt that had a notice.
        given_up: Why this supervisor ended the attempt; empty if it did not.
        stopping: It was told to stop.
    """

    ranks: int
    mpirun_status: int
    began: Mapping[int, str] = field(default_factory=dict)
    deaths: tuple[Death, ...] = ()
    gone: Collection[str] = ()
    noticed: Collection[str] = ()
    given_up: str = ""
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why, for people; and what tells whether the same has happened again.

    Attributes:
        cause: What ended the attempt.
        message: One sentence.
        mark: Equal for two attempts that ended the same way.
        rank: The process whose log says more, or None.
        exit_code: What the command ends with if this was the last attempt.
        exception: The exception of that process; empty if none is known.
        hopeless: Trying the same again cannot help: a person must change a setting first.
    """

    cause: Cause
    message: str
    mark: str
    rank: int | None = None
    exit_code: int = 1
    exception: str = ""
    hopeless: bool = False


def judge(evidence: Evidence) -> Verdict:
    """The verdict. Pure."""
    ended = {death.rank: death for death in evidence.deaths}
    if all(rank in ended and ended[rank].status == 0 for rank in range(evidence.ranks)):
        return Verdict(Cause.DONE, "every rank has ended well", "done", exit_code=0)
    if evidence.stopping:
        return Verdict(
            Cause.STOPPED, "ended because this supervisor was told to stop", "stopped", exit_code=INTERRUPTED
        )
    for reason, hosts in (
        ("is gone", evidence.gone),
        ("had a notice that it will be taken", evidence.noticed),
    ):
        if hosts:
            names = ", ".join(sorted(hosts))
            return Verdict(Cause.PREEMPTED, f"host {names} {reason}", "preempted", exit_code=9)
    return _killed(evidence) or _given_up(evidence) or _crashed(evidence) or _silent_end(evidence)


def _killed(evidence: Evidence) -> Verdict | None:
    killed = [death for death in evidence.deaths if death.from_outside]
    if killed:
        first = killed[0]
        how = f"{_who(first.rank, evidence)} was killed by {_signal(-first.status)} from outside"
        return Verdict(Cause.KILLED, how, f"killed {first.status}", first.rank, 128 - first.status)
    if evidence.mpirun_status < 0 and not evidence.given_up:
        how = f"mpirun was killed by {_signal(-evidence.mpirun_status)}"
        return Verdict(Cause.KILLED, how, "killed mpirun", None, 128 - evidence.mpirun_status)
    return None


def _given_up(evidence: Evidence) -> Verdict | None:
    if not evidence.given_up:
        return None
    crash = _crashed(evidence)
    if crash is not None:  # it had ended badly before we made an end of the rest
        return crash
    return Verdict(Cause.LOST, evidence.given_up, f"lost {evidence.given_up.split(':')[0]}", None, 9)


def _crashed(evidence: Evidence) -> Verdict | None:
    crashed = [death for death in evidence.deaths if death.own_fault]
    if not crashed:
        return None
    # A rank that names an exception says more than one that lost its connection to it a moment before.
    first = next((death for death in crashed if death.exception), crashed[0])
    who = _who(first.rank, evidence)
    if first.status < 0:
        how, code = f"{who} ended with {_signal(-first.status)}", 128 - first.status
    else:
        how, code = f"{who} ended with exit code {first.status}", first.status
    if first.exception:
        how = f"{how} ({first.exception})"
    short = first.exception.rpartition(".")[2]
    return Verdict(
        Cause.CRASHED,
        how,
        f"crashed {first.status} {first.exception}",
        first.rank,
        code,
        first.exception,
        hopeless=short in _SETTLED or first.status == _USAGE_EXIT_CODE,
    )


def _silent_end(evidence: Evidence) -> Verdict:
    if not evidence.began:
        how = f"mpirun ended with {evidence.mpirun_status} before any process had begun"
        return Verdict(Cause.UNLAUNCHED, how, "unlaunched", None, 9)
    unheard = sorted(set(range(evidence.ranks)) - {death.rank for death in evidence.deaths})
    who = ", ".join(_who(rank, evidence) for rank in unheard) or "a rank"
    how = f"mpirun ended with {evidence.mpirun_status}, and nothing was heard of the end of {who}"
    return Verdict(Cause.LOST, how, "lost unheard", None, 9)


def _who(rank: int, evidence: Evidence) -> str:
    name = "the stager" if rank == evidence.ranks else f"rank {rank}"
    return f"{name} on {evidence.began[rank]}" if rank in evidence.began else name


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
