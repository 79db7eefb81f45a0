"""Facts about the running attempt, and the time that it takes from a loss until training continues.

A host counts as gone when two looks in a row missed it: a single failed ssh ends no attempt.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import ShareNumber
from operator_side.supervise.hosts import Host
from operator_side.supervise.limits import Limits
from operator_side.supervise.verdict import Death, Evidence, process_name

MARKS = ("lost", "ended", "launched", "joined", "restored", "training")


@dataclass(slots=True)
class AttemptRecord:
    """Which processes of the running attempt began, ended or are silent, and which hosts are gone."""

    number: int
    ranks: int  # number of trainers; the first stager has this number as its rank
    hosts: tuple[Host, ...] | None  # None: everything runs on this machine
    begun_at: float
    stagers: int = 1
    rank_hosts: dict[int, str] = field(default_factory=dict)
    ready: int = 0  # stagers that report that all processes have joined
    restored: set[int] = field(default_factory=set)
    restored_from: CheckpointId | None = None  # by every rank; None before that, and in a new run
    fallback: CheckpointId | None = None  # what the ranks would restore if `restored_from` were set aside
    staged_step: int = -1  # the highest step that this attempt has staged; -1: none
    shares_staged: dict[int, set[int]] = field(default_factory=dict)  # step → shares that are staged
    stepped: set[int] = field(default_factory=set)
    deaths: list[Death] = field(default_factory=list)
    # Ranks that the stager lost before any process had reported a failure of its own.
    lost_first: list[int] = field(default_factory=list)
    silent_since: dict[int, float] = field(default_factory=dict)  # rank → when the stager reported it
    noticed_hosts: set[str] = field(default_factory=set)
    missed_hosts: set[str] = field(default_factory=set)
    lost_hosts: set[str] = field(default_factory=set)  # hosts that two looks in a row missed
    give_up_reason: str = ""  # why the supervisor ends the attempt; empty while it does not
    first_death_at: float | None = None  # when the first process was lost, or the stager ended
    progressed: bool = False  # the attempt has staged a step newer than any before
    progress_at: float = 0.0
    mpirun_status: int = 0

    def name(self, rank: int) -> str:
        return process_name(rank, self.ranks, self.stagers)

    @property
    def all_joined(self) -> bool:
        """Whether all ranks and stagers have joined."""
        return self.ready >= self.stagers

    def record_joined(self) -> bool:
        """Count a stager's report that all processes have joined. Return whether it was the last one."""
        self.ready += 1
        return self.ready == self.stagers

    def stagers_ended(self, *, cleanly: bool = False) -> bool:
        """Whether every stager has ended; `cleanly`: on its own, with status 0."""
        ended = {death.rank for death in self.deaths if death.status == 0 or not cleanly}
        return ended.issuperset(range(self.ranks, self.ranks + self.stagers))

    def record_staged(self, step: int, share: ShareNumber) -> bool:
        """Record that a share of a step is staged. Return whether the whole step is."""
        shares = self.shares_staged.setdefault(step, set())
        shares.add(share.index)
        if len(shares) < share.writers:
            return False
        self.staged_step = max(self.staged_step, step)
        self.shares_staged = {other: of_step for other, of_step in self.shares_staged.items() if other > step}
        return True

    def record_rank(self, reached: set[int], rank: int) -> bool:
        """Add a trainer to `reached`. Return whether it was the last one."""
        if rank in reached or not 0 <= rank < self.ranks:
            return False
        reached.add(rank)
        return len(reached) == self.ranks

    def record_hosts(self, hosts: tuple[Host, ...] | None) -> bool:
        """Record the fleet's answer. Return whether it lacks a host of this attempt that is not known to be gone."""
        if hosts is None or self.hosts is None:
            return False
        host_names = {host.name for host in self.hosts}
        missed = host_names - {host.name for host in hosts}
        self.lost_hosts |= missed & self.missed_hosts
        self.missed_hosts = missed
        return not missed <= self.lost_hosts

    def record_lost_rank(self, rank: int, now: float) -> None:
        """Record that MPI reports a rank dead; ignore it if it may have died of another process's own failure."""
        if any(death.is_own_fault for death in self.deaths):
            return
        self.lost_first.append(rank)
        if self.first_death_at is None:
            self.first_death_at = now

    def waits_for_lost_hosts(self) -> bool:
        """Whether mpirun, asked to end, is only waiting for hosts that do not answer."""
        # Stagers end last, and run on this machine. After them mpirun forwards nothing more from the surviving hosts.
        ended = {death.rank for death in self.deaths}
        lost = {r for r, host in self.rank_hosts.items() if r in self.silent_since or host in self.lost_hosts}
        return self.stagers_ended() and not lost <= ended

    def reason_to_end(self, limits: Limits, now: float) -> str:
        """Return why the attempt cannot continue, or "" if it can."""
        # If a rank was killed before all had joined, the others wait for it in MPI forever, and have nothing to save.
        # If the stagers have exited by themselves, all ranks have left or are lost: nothing more is saved.
        hopeless = (self.stagers_ended(cleanly=True) or not self.all_joined) and any(
            death.is_killed_from_outside for death in self.deaths
        )
        grace_seconds = 0.0 if hopeless else limits.lost_seconds_max
        if self.first_death_at is not None and now >= self.first_death_at + grace_seconds:
            ended = [d.rank for d in self.deaths if d.status or d.rank >= self.ranks]
            rank = (ended or self.lost_first)[0]
            return f"{self.name(rank)} has ended, and the other processes cannot continue without it: ending them"
        for rank, since in self.silent_since.items():
            if now >= since + limits.silent_seconds_max:
                where = self.rank_hosts.get(rank, "a host")
                return f"rank {rank} on {where} gives no sign of life: it is stopped, cut off, or gone"
        last = max(self.begun_at, self.progress_at)
        if limits.stall_seconds_max is not None and now >= last + limits.stall_seconds_max:
            return f"training has stalled: no newer step was staged for {limits.stall_seconds_max:g} s"
        return ""

    def evidence(self, *, stopping: bool) -> Evidence:
        return Evidence(
            self.ranks,
            self.mpirun_status,
            self.rank_hosts,
            tuple(self.deaths),
            tuple(self.lost_first),
            self.lost_hosts,
            self.noticed_hosts,
            self.give_up_reason,
            stopping,
            stagers=self.stagers,
        )


class Resumption:
    """The marks since the last loss, or since the start of the run. The caller passes the time.

    lost ─► ended ─► launched ─► joined ─► restored ─► training
     │        │         │           │         │           └ every rank has done its first step
     │        │         │           │         └ every rank has restored its state
     │        │         │           └ all ranks and the stager have joined
     │        │         └ the supervisor has found hosts and started mpirun
     │        └ mpirun and all its processes here have ended, and the verdict is known
     └ the first sign: a process has ended, a rank is silent for too long, a host is gone
    """

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def record_loss(self, now: float) -> None:
        """Record the first sign of a loss. A further loss before training continues belongs to the same resumption."""
        self._at = {"lost": self._at.get("lost", now)}

    def record_mark(self, mark: str, now: float) -> None:
        """Record a mark. A second attempt after the same loss reaches it again and clears later marks."""
        before = MARKS[: MARKS.index(mark)]
        self._at = {**{name: at for name, at in self._at.items() if name in before}, mark: now}

    def record_training(self, now: float) -> dict[str, float]:
        """Record that training continues. Return the seconds between marks, named by the later mark, and their sum."""
        self.record_mark("training", now)
        reached = [mark for mark in MARKS if mark in self._at]
        phases = {
            f"{after}_seconds": round(self._at[after] - self._at[before], 3)
            for before, after in itertools.pairwise(reached)
        }
        phases["seconds"] = round(now - self._at[reached[0]], 3)
        self._at = {}
        return phases
