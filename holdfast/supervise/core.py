"""What the supervisor does next: a pure state machine, events in, actions out, the clock handed in.

              ┌──────────────────────── enough hosts ◄────────────────────────────────┐
              ▼                                                                       │
    FINDING ─► RUNNING ── silent, host gone, stop ─► ENDING ── mpirun has ended ─► JUDGING ─► PUBLISHING ─► PAUSING
                  └────────────── mpirun has ended ──────────────────────────────────▲│
                                                                                      └─► OVER

    JUDGING      the hosts are looked at once more: whether one is gone decides between a preemption and a bug
    PUBLISHING   what was staged becomes durable, so that the next attempt begins from it
    PAUSING      random, doubled with each relaunch in a row that brought no newer step

Progress is a newer step, staged or durable, than any before. Without it the same crash twice ends the run
(`crashes_max`), and so does any cause `restarts_max` times in a row; with it counting begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from holdfast.supervise.hosts import Host, place
from holdfast.supervise.resumption import Resumption
from holdfast.supervise.verdict import INTERRUPTED, Cause, Death, Evidence, Verdict, judge

__all__ = [
    "Action",
    "Began",
    "Core",
    "Durable",
    "Ended",
    "Event",
    "Exited",
    "Finish",
    "FlusherGone",
    "HostsSeen",
    "Joined",
    "Kill",
    "Launch",
    "Limits",
    "Look",
    "Note",
    "Noticed",
    "Phase",
    "Restored",
    "Silence",
    "Staged",
    "Stepped",
    "Stop",
    "Terminate",
    "Tick",
]


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a supervised run, units in the names.

    Attributes:
        ranks: Trainers that are wanted.
        ranks_min: It is not started with fewer.
        crashes_max: So many equal crashes in a row without progress end the run.
        restarts_max: So many relaunches in a row without progress end the run, whatever the cause.
        silent_seconds_max: A rank that has been silent for so long, beyond the stager's own deadline, is lost.
        lost_seconds_max: How long the others go on after a process of the job has died.
        stall_seconds_max: No newer staged step for so long ends the attempt; None: not watched.
        grace_seconds: Time between asking the ranks to end and mpirun to end them.
        kill_seconds: Time between that and SIGKILL.
        publish_seconds_max: How long to wait for staged steps to become durable.
        hosts_seconds_max: How long to wait for enough hosts.
        look_seconds_max: How long to wait for the fleet's answer before a verdict.
    """

    ranks: int
    ranks_min: int
    crashes_max: int = 2
    restarts_max: int = 8
    silent_seconds_max: float = 30.0
    lost_seconds_max: float = 30.0
    stall_seconds_max: float | None = None
    grace_seconds: float = 30.0
    kill_seconds: float = 5.0
    publish_seconds_max: float = 60.0
    hosts_seconds_max: float = 1800.0
    look_seconds_max: float = 30.0


class Phase(StrEnum):
    """Where the supervisor stands."""

    FINDING = "finding hosts"
    RUNNING = "running"
    ENDING = "ending"
    JUDGING = "judging"
    PUBLISHING = "publishing"
    PAUSING = "pausing"
    OVER = "over"


class Tick(NamedTuple):
    """Time has passed."""


class HostsSeen(NamedTuple):
    """The fleet was looked at. None: no hosts to choose from; everything runs here."""

    hosts: tuple[Host, ...] | None


class Began(NamedTuple):
    """A process of the job has begun."""

    rank: int
    host: str


class Joined(NamedTuple):
    """All processes of the job have met."""


class Restored(NamedTuple):
    """A rank has its state back; -1: there was none, the run begins."""

    rank: int
    step: int


class Stepped(NamedTuple):
    """A rank has taken its first step of this attempt."""

    rank: int
    step: int


class Ended(NamedTuple):
    """A process of the job has ended, with an exit code or minus a signal."""

    rank: int
    status: int
    exception: str = ""


class Exited(NamedTuple):
    """mpirun has ended, and no process of the attempt is left here."""

    status: int


class Staged(NamedTuple):
    """A step was reported staged."""

    step: int


class Durable(NamedTuple):
    """A step was reported durable, or given up for good."""

    step: int
    good: bool = True


class Silence(NamedTuple):
    """The stager no longer hears a rank, or hears it again."""

    rank: int
    over: bool = False


class Noticed(NamedTuple):
    """A rank was told that its host will be taken away."""

    rank: int


class FlusherGone(NamedTuple):
    """No flusher of this run is left on this machine."""


class Stop(NamedTuple):
    """This supervisor is to end."""

    reason: str


Event = (
    Tick
    | HostsSeen
    | Began
    | Joined
    | Restored
    | Stepped
    | Ended
    | Exited
    | Staged
    | Durable
    | Silence
    | Noticed
    | FlusherGone
    | Stop
)


class Look(NamedTuple):
    """Look at the fleet, now and every so often. `replace`: each time ask it for so many slots more."""

    replace: int = 0


class Launch(NamedTuple):
    """Start mpirun with so many trainers."""

    attempt: int
    ranks: int
    hosts: tuple[Host, ...] | None


class Terminate(NamedTuple):
    """Ask the attempt to end: gently the trainers alone, else mpirun itself."""

    gently: bool


class Kill(NamedTuple):
    """SIGKILL whatever is left of the attempt."""


class Note(NamedTuple):
    """Something for people and for the status file."""

    event: str
    message: str
    fields: Mapping[str, Any] = {}
    loud: bool = False


class Finish(NamedTuple):
    """The run is over."""

    verdict: Verdict


Action = Look | Launch | Terminate | Kill | Note | Finish


@dataclass(slots=True)
class _Attempt:
    """What is known of the attempt that runs."""

    number: int
    ranks: int
    hosts: tuple[Host, ...] | None
    begun_at: float
    began: dict[int, str] = field(default_factory=dict)
    restored: set[int] = field(default_factory=set)
    stepped: set[int] = field(default_factory=set)
    deaths: list[Death] = field(default_factory=list)
    silent_since: dict[int, float] = field(default_factory=dict)
    noticed: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    given_up: str = ""
    first_death_at: float | None = None
    progressed: bool = False
    progress_at: float = 0.0
    mpirun_status: int = 0


class Core:
    """The state machine. Not thread-safe; whoever owns it hands in what happens, and the time.

    Args:
        limits: Settings.
        pause_seconds: Random pause before relaunch number n (1, 2, …) in a row without progress.
        first_attempt: Number of the first attempt.
        newest_step: Newest step in the store, -1 for none.
        now: The time.
    """

    def __init__(
        self,
        limits: Limits,
        pause_seconds: Callable[[int], float],
        *,
        first_attempt: int = 1,
        newest_step: int = -1,
        now: float = 0.0,
    ) -> None:
        self._limits, self._pause_seconds = limits, pause_seconds
        self.phase = Phase.FINDING
        self.newest_step = newest_step
        self._next_attempt = first_attempt
        self._attempt: _Attempt | None = None
        self._staged: set[int] = set()  # and not yet durable
        self._until = now + limits.hosts_seconds_max
        self._killed = False
        self._stopping = ""
        self._restarts = self._same = 0
        self._mark = ""
        self._waiting_said = False
        self._resumption = Resumption()

    def begin(self) -> list[Action]:
        """The first thing to do."""
        return [Look()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do because of this event."""
        match event:
            case Staged(step):
                self._staged.add(step)
                self._progress(step, now)
            case Durable(step, good):
                self._staged.discard(step)
                if good:
                    self._progress(step, now)
                return self._published(now)
            case FlusherGone():
                self._staged.clear()
                return self._published(now)
            case Stop(reason):
                return self._stop(reason, now)
            case HostsSeen(hosts):
                return self._hosts(hosts, now)
            case Exited(status):
                return self._exited(status, now)
            case Tick():
                return self._tick(now)
            case _:
                return self._of_attempt(event, now)
        return []

    # -- an attempt ------------------------------------------------------------------------------------------------

    def _of_attempt(self, event: Event, now: float) -> list[Action]:
        attempt = self._attempt
        if attempt is None:
            return []
        match event:
            case Began(rank, host):
                attempt.began[rank] = host
            case Joined():
                return self._reached("joined", "ranks and stager have met", {}, now)
            case Restored(rank, step) if _last_of(attempt.restored, rank, attempt.ranks):
                how = f"every rank has restored step {step}" if step >= 0 else "a new run"
                return self._reached("restored", how, {"step": step}, now)
            case Stepped(rank, step) if _last_of(attempt.stepped, rank, attempt.ranks):
                return self._trains(attempt, step, now)
            case Ended():
                return self._died(attempt, event, now)
            case Silence(rank, over):
                if over:
                    attempt.silent_since.pop(rank, None)
                else:
                    attempt.silent_since.setdefault(rank, now)
            case Noticed(rank):
                attempt.noticed.add(attempt.began.get(rank, f"of rank {rank}"))
        return []

    def _died(self, attempt: _Attempt, event: Ended, now: float) -> list[Action]:
        by_us = self.phase is Phase.ENDING
        attempt.deaths.append(Death(event.rank, event.status, event.exception, by_us))
        if attempt.first_death_at is not None or not (event.status or event.rank == attempt.ranks):
            return []
        attempt.first_death_at = now
        if by_us or not event.status:
            return []
        self._resumption.lost(now)
        name = "the stager" if event.rank == attempt.ranks else f"rank {event.rank}"
        message = f"attempt {attempt.number}: {name} has ended with {event.status}"
        fields = {"attempt": attempt.number, "rank": event.rank, "status": event.status}
        return [Note("lost", message, fields)]

    def _reached(self, mark: str, message: str, fields: Mapping[str, Any], now: float) -> list[Action]:
        assert self._attempt is not None
        self._resumption.reached(mark, now)
        number = self._attempt.number
        return [Note(mark, f"attempt {number}: {message}", {"attempt": number, **fields})]

    def _trains(self, attempt: _Attempt, step: int, now: float) -> list[Action]:
        phases = self._resumption.trained(now)
        message = f"attempt {attempt.number}: training, step {step} is done, after {phases['seconds']:.1f} s"
        return [Note("training", message, {"attempt": attempt.number, "step": step, **phases})]

    def _progress(self, step: int, now: float) -> None:
        if step <= self.newest_step:
            return
        self.newest_step = step
        if self._attempt is not None:
            self._attempt.progressed, self._attempt.progress_at = True, now

    def _tick(self, now: float) -> list[Action]:
        attempt = self._attempt
        if self.phase is Phase.RUNNING and attempt is not None:
            reason = self._reason_to_end(attempt, now)
            return self._end(reason, now) if reason else []
        if now < self._until:
            return []
        match self.phase:
            case Phase.ENDING if not self._killed:
                self._killed, self._until = True, now + self._limits.kill_seconds
                return [Terminate(gently=False)]
            case Phase.ENDING:
                self._until = now + self._limits.kill_seconds
                return [Kill()]
            case Phase.JUDGING:
                return self._judge(now)  # the fleet does not answer: what is known must do
            case Phase.PUBLISHING:
                self._staged.clear()
                return self._published(now)
            case Phase.PAUSING:
                self.phase, self._until = Phase.FINDING, now + self._limits.hosts_seconds_max
                self._waiting_said = False
                return [Look()]
            case Phase.FINDING:
                return self._over(self._too_few(f"in {self._limits.hosts_seconds_max:g} s"))
        return []

    def _reason_to_end(self, attempt: _Attempt, now: float) -> str:
        limits = self._limits
        if attempt.first_death_at is not None and now >= attempt.first_death_at + limits.lost_seconds_max:
            rank = next(d.rank for d in attempt.deaths if d.status or d.rank == attempt.ranks)
            name = "the stager" if rank == attempt.ranks else f"rank {rank}"
            return f"{name} has ended: the others cannot go on without it, and were ended"
        for rank, since in attempt.silent_since.items():
            if now >= since + limits.silent_seconds_max:
                return (
                    f"rank {rank} on {attempt.began.get(rank, 'a host')} is silent: stopped, cut off, or gone"
                )
        last = max(attempt.begun_at, attempt.progress_at)
        if limits.stall_seconds_max is not None and now >= last + limits.stall_seconds_max:
            return f"stalled: no newer step was staged for {limits.stall_seconds_max:g} s"
        return ""

    def _end(self, reason: str, now: float) -> list[Action]:
        """Ask the attempt to end; `_tick` insists."""
        assert self._attempt is not None
        if not self._stopping:
            self._attempt.given_up = reason
            if self._attempt.first_death_at is None:
                self._resumption.lost(now)
        self.phase, self._killed = Phase.ENDING, False
        # Who has lost a peer, or hears nothing, has nothing to save; only one that is told to stop has.
        gently = bool(self._stopping)
        self._until = now + (self._limits.grace_seconds if gently else self._limits.kill_seconds)
        self._killed = not gently
        return [Note("ending", reason, {"attempt": self._attempt.number}, loud=True), Terminate(gently)]

    def _exited(self, status: int, now: float) -> list[Action]:
        assert self._attempt is not None
        self._attempt.mpirun_status = status
        self.phase, self._until = Phase.JUDGING, now + self._limits.look_seconds_max
        return [Look()]

    # -- hosts -----------------------------------------------------------------------------------------------------

    def _hosts(self, hosts: tuple[Host, ...] | None, now: float) -> list[Action]:
        attempt = self._attempt
        if attempt is not None and hosts is not None and attempt.hosts is not None:
            there = {host.name for host in hosts}
            attempt.gone |= {host.name for host in attempt.hosts} - there
            attempt.noticed |= {host.name for host in hosts if host.noticed} & {h.name for h in attempt.hosts}
            if attempt.gone and self.phase is Phase.RUNNING:
                return self._end(f"host {', '.join(sorted(attempt.gone))} is gone", now)
        if self.phase is Phase.JUDGING:
            return self._judge(now)
        if self.phase is Phase.FINDING:
            return self._launch(hosts, now)
        return []

    def _launch(self, hosts: tuple[Host, ...] | None, now: float) -> list[Action]:
        limits = self._limits
        placed: tuple[Host, ...] | None = None
        ranks = limits.ranks
        if hosts is not None:
            placed = place([host for host in hosts if not host.noticed], limits.ranks)
            if sum(host.slots for host in placed) < limits.ranks_min:
                placed = place(hosts, limits.ranks)
            ranks = sum(host.slots for host in placed)
        if ranks < limits.ranks_min:
            if self._waiting_said:
                return []  # it is looked at again and again, and asked for more, by itself
            self._waiting_said = True
            message = (
                f"hosts for {ranks} ranks are there, at least {limits.ranks_min} are needed; waiting for more"
            )
            return [Note("waiting", message, {"ranks": ranks}, loud=True), Look(limits.ranks - ranks)]
        self._attempt = _Attempt(self._next_attempt, ranks, placed, now)
        self._resumption.reached("launched", now)
        self._next_attempt += 1
        self.phase = Phase.RUNNING
        names = None if placed is None else [f"{host.name}:{host.slots}" for host in placed]
        fields = {
            "attempt": self._attempt.number,
            "ranks": ranks,
            "hosts": names,
            "newest_step": self.newest_step,
        }
        where = "here" if names is None else "on " + ", ".join(names)
        message = f"attempt {self._attempt.number}: {ranks} ranks {where}, newest step {self.newest_step}"
        return [Note("launched", message, fields), Launch(self._attempt.number, ranks, placed)]

    def _too_few(self, when: str) -> Verdict:
        message = f"no hosts for {self._limits.ranks_min} ranks were found {when}"
        return Verdict(Cause.LOST, message, "no hosts", exit_code=9)

    # -- the end of an attempt -------------------------------------------------------------------------------------

    def _judge(self, now: float) -> list[Action]:
        attempt = self._attempt
        assert attempt is not None
        self._attempt = None
        self._resumption.reached("ended", now)
        verdict = judge(
            Evidence(
                attempt.ranks,
                attempt.mpirun_status,
                attempt.began,
                tuple(attempt.deaths),
                attempt.gone,
                attempt.noticed,
                attempt.given_up,
                bool(self._stopping),
            )
        )
        fields = {
            "attempt": attempt.number,
            "cause": verdict.cause.value,
            "rank": verdict.rank,
            "exit_code": verdict.exit_code,
            "progressed": attempt.progressed,
            "newest_step": self.newest_step,
            "seconds": round(now - attempt.begun_at, 3),
        }
        note = Note(
            "ended", f"attempt {attempt.number}: {verdict.message}", fields, verdict.cause is not Cause.DONE
        )
        if verdict.cause in {Cause.DONE, Cause.STOPPED}:
            return [note, *self._over(verdict)]
        self._count(verdict, attempt.progressed)
        last_word = self._last_word(verdict, attempt.progressed)
        if last_word is not None:
            return [note, *self._over(last_word)]
        self.phase, self._until = Phase.PUBLISHING, now + self._limits.publish_seconds_max
        return [note, *self._published(now)]

    def _count(self, verdict: Verdict, progressed: bool) -> None:
        if progressed:
            self._restarts = self._same = 0
        self._restarts += 1
        self._same = self._same + 1 if verdict.mark == self._mark and self._same else 1
        self._mark = verdict.mark

    def _last_word(self, verdict: Verdict, progressed: bool) -> Verdict | None:
        """The verdict to end with, if the run is not to be started again."""
        limits = self._limits
        why = ""
        if verdict.cause is Cause.CRASHED and verdict.hopeless and not progressed:
            why = "a setting or the state is wrong; starting it again cannot help"
        elif verdict.cause is Cause.CRASHED and self._same >= limits.crashes_max:
            why = f"the same crash {self._same} times in a row without a newer checkpoint: a bug, not a preemption"
        elif self._restarts > limits.restarts_max:
            why = f"{self._restarts} attempts in a row without a newer checkpoint"
            if verdict.cause is Cause.KILLED:
                why += "; if no host was taken away, look for the kernel's out-of-memory killer"
        if not why:
            return None
        return Verdict(
            verdict.cause,
            f"{why}: {verdict.message}",
            verdict.mark,
            verdict.rank,
            verdict.exit_code,
            verdict.exception,
        )

    def _published(self, now: float) -> list[Action]:
        if self.phase is not Phase.PUBLISHING or self._staged:
            return []
        pause_seconds = self._pause_seconds(self._restarts)
        self.phase, self._until = Phase.PAUSING, now + pause_seconds
        return [
            Note(
                "relaunching",
                f"starting again in {pause_seconds:.1f} s",
                {"pause_seconds": round(pause_seconds, 3)},
            )
        ]

    def _stop(self, reason: str, now: float) -> list[Action]:
        again, self._stopping = bool(self._stopping), reason
        if self.phase is Phase.RUNNING:
            return self._end(reason, now)
        if self.phase is Phase.ENDING:
            # Asked twice: somebody is in a hurry.
            if again and not self._killed:
                self._killed, self._until = True, now + self._limits.kill_seconds
                return [Terminate(gently=False)]
            return []
        if self.phase in {Phase.JUDGING, Phase.OVER}:
            return []
        return self._over(
            Verdict(Cause.STOPPED, f"{reason} between two attempts", "stopped", exit_code=INTERRUPTED)
        )

    def _over(self, verdict: Verdict) -> list[Action]:
        self.phase = Phase.OVER
        return [Finish(verdict)]


def _last_of(ranks: set[int], rank: int, count: int) -> bool:
    """Note this rank; whether it was the last of `count` that was still to come."""
    if rank in ranks or not 0 <= rank < count:
        return False
    ranks.add(rank)
    return len(ranks) == count
