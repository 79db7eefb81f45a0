"""What is known of the attempt that runs: who began, who ended how, who is silent, which hosts are gone.

A host is held as gone when it was missing in two looks, one after the other: one ssh that failed ends no attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from operator_side.supervise.hosts import Host
from operator_side.supervise.limits import Limits
from operator_side.supervise.verdict import Death, Evidence


@dataclass(slots=True)
class RunRecord:
    """See the module.

    Attributes:
        number: Of the attempt.
        ranks: Its trainers; the stager's rank is this number.
        hosts: Those it was placed on; None: all of it is here.
        begun_at: When it was launched.
        began: Host of each process that has begun, by rank.
        met: Ranks and stager have met.
        restored: Ranks that have their state back.
        stepped: Ranks that have taken their first step.
        deaths: Of processes that said how they ended.
        silent_since: Ranks that the stager does not hear, and since when.
        noticed: Hosts that had a notice.
        missed: Hosts that were missing in the last look.
        gone: Hosts that were missing in two looks, one after the other.
        given_up: Why the supervisor ends it; empty while it does not.
        first_death_at: When the first process was lost, or the stager ended.
        progressed: It has staged a newer step than there ever was. `progress_at`: when, the last time.
        mpirun_status: How mpirun ended.
    """

    number: int
    ranks: int
    hosts: tuple[Host, ...] | None
    begun_at: float
    began: dict[int, str] = field(default_factory=dict)
    met: bool = False
    restored: set[int] = field(default_factory=set)
    stepped: set[int] = field(default_factory=set)
    deaths: list[Death] = field(default_factory=list)
    silent_since: dict[int, float] = field(default_factory=dict)
    noticed: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    given_up: str = ""
    first_death_at: float | None = None
    progressed: bool = False
    progress_at: float = 0.0
    mpirun_status: int = 0

    def name(self, rank: int) -> str:
        """For messages."""
        return "the stager" if rank == self.ranks else f"rank {rank}"

    def is_last(self, reached: set[int], rank: int) -> bool:
        """Note that a trainer has come so far; whether it was the last that was still to come."""
        if rank in reached or not 0 <= rank < self.ranks:
            return False
        reached.add(rank)
        return len(reached) == self.ranks

    def looked(self, hosts: tuple[Host, ...] | None) -> bool:
        """Note what the fleet has; whether a host of ours was missed that was there before."""
        if hosts is None or self.hosts is None:
            return False
        ours = {host.name for host in self.hosts}
        missed = ours - {host.name for host in hosts}
        self.noticed |= ours & {host.name for host in hosts if host.noticed}
        self.gone |= missed & self.missed
        self.missed = missed
        return not missed <= self.gone

    def waits_for_the_lost(self) -> bool:
        """Whether mpirun, told to end, only waits for hosts that do not answer.

        It hands on nothing more from any other host; the stager is here, and the last to be heard of.
        """
        ended = {death.rank for death in self.deaths}
        lost = {rank for rank, host in self.began.items() if rank in self.silent_since or host in self.gone}
        return self.ranks in ended and not lost <= ended

    def reason_to_end(self, limits: Limits, now: float) -> str:
        """Why it cannot go on; empty if it can."""
        # Who was killed before all had met leaves the others waiting for it in MPI, with nothing to end well.
        hopeless = not self.met and any(death.from_outside for death in self.deaths)
        patience = 0.0 if hopeless else limits.lost_seconds_max
        if self.first_death_at is not None and now >= self.first_death_at + patience:
            rank = next(d.rank for d in self.deaths if d.status or d.rank == self.ranks)
            return f"{self.name(rank)} has ended: the others cannot go on without it, and were ended"
        for rank, since in self.silent_since.items():
            if now >= since + limits.silent_seconds_max:
                return f"rank {rank} on {self.began.get(rank, 'a host')} is silent: stopped, cut off, or gone"
        last = max(self.begun_at, self.progress_at)
        if limits.stall_seconds_max is not None and now >= last + limits.stall_seconds_max:
            return f"stalled: no newer step was staged for {limits.stall_seconds_max:g} s"
        return ""

    def evidence(self, *, stopping: bool) -> Evidence:
        """For the verdict."""
        return Evidence(
            self.ranks,
            self.mpirun_status,
            self.began,
            tuple(self.deaths),
            self.gone,
            self.noticed,
            self.given_up,
            stopping,
        )
