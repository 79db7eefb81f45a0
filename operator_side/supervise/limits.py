"""Settings of a supervised run: how many ranks, how often it is tried again, how long anything is waited for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from operator_side.supervise.verdict import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a supervised run, units in the names.

    Attributes:
        ranks: Trainers that are wanted.
        ranks_min: It is not started with fewer.
        crashes_max: So many equal crashes in a row without progress end the run.
        restarts_max: So many relaunches in a row without progress end the run, whatever the cause.
        silent_seconds_max: A rank that has been silent for so long, beyond the stager's own deadline, is lost.
        lost_seconds_max: How long the others go on after a process of the job has died; not at all if it was killed
            before they had met.
        stall_seconds_max: No newer staged step for so long ends the attempt; None: not watched.
        grace_seconds: Time between asking the ranks to end and mpirun to end them.
        kill_seconds: Time between that and SIGKILL.
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
    hosts_seconds_max: float = 1800.0
    look_seconds_max: float = 30.0


class Patience:
    """Counts attempts that brought nothing.

    Attributes:
        restarts: Attempts in a row that ended without progress; the first that follows progress is counted as well.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.restarts = self._same = 0
        self._mark = ""

    def last_word(self, verdict: Verdict, *, progressed: bool) -> Verdict | None:
        """Count an attempt; the verdict to end with, if the run is not to be started again."""
        if progressed:
            self.restarts = self._same = 0
        self.restarts += 1
        self._same = self._same + 1 if verdict.mark == self._mark and self._same else 1
        self._mark = verdict.mark
        why = self._why(verdict, progressed)
        return replace(verdict, message=f"{why}: {verdict.message}") if why else None

    def _why(self, verdict: Verdict, progressed: bool) -> str:
        if verdict.cause is Cause.CRASHED and verdict.hopeless and not progressed:
            return "a setting or the state is wrong; starting it again cannot help"
        if verdict.cause is Cause.CRASHED and self._same >= self._limits.crashes_max:
            return f"the same crash {self._same} times in a row without a newer checkpoint: a bug, not a preemption"
        if self.restarts <= self._limits.restarts_max:
            return ""
        why = f"{self.restarts} attempts in a row without a newer checkpoint"
        if verdict.cause is Cause.KILLED:
            why += "; if no host was taken away, look for the kernel's out-of-memory killer"
        return why
