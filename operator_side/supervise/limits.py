"""Settings of a supervised run: ranks, restarts, and deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from operator_side.supervise.verdict import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a supervised run, units in the names."""

    ranks: int
    ranks_min: int
    stagers: int = 1
    crashes_max: int = 2  # the run ends after this many equal crashes in a row without progress
    set_aside_max: int = 2  # checkpoints in a row to set aside first, if crashes came after their restore
    restarts_max: int = 8  # the run ends after this many in a row without progress, whatever the cause
    # Without a sign of life, beyond the stager's own deadline, until a rank is lost.
    silent_seconds_max: float = 30.0
    # That the others may go on after a death; none if it was a kill before all had joined.
    lost_seconds_max: float = 30.0
    stall_seconds_max: float | None = None  # without a newly staged step until the attempt is ended
    grace_seconds: float = 30.0  # from asking the ranks to end until mpirun is asked to end them
    kill_seconds: float = 5.0
    hosts_seconds_max: float = 1800.0
    look_seconds_max: float = 30.0  # to wait for the fleet's answer before a verdict


class Patience:
    """Counts attempts without progress. `restarts`: those in a row, and the one before them with progress."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.restarts = self._same = 0
        self._mark = ""

    def last_word(self, verdict: Verdict, *, progressed: bool, may_go_back: bool = False) -> Verdict | None:
        """Count an attempt; returns the verdict to end the run with, or None to restart. `may_go_back`: the checkpoint
        may be to blame, so that an equal crash is not the end yet.
        """
        if progressed:
            self.restarts = self._same = 0
        self.restarts += 1
        self._same = self._same + 1 if verdict.mark == self._mark and self._same else 1
        self._mark = verdict.mark
        why = self._why(verdict, progressed, may_go_back)
        return replace(verdict, message=f"{why}: {verdict.message}") if why else None

    def _why(self, verdict: Verdict, progressed: bool, may_go_back: bool) -> str:
        if verdict.cause is Cause.CRASHED and verdict.hopeless and not progressed:
            return "a setting or the state is wrong, and a restart cannot help"
        if verdict.cause is Cause.CRASHED and self._same >= self._limits.crashes_max and not may_go_back:
            return f"the same crash {self._same} times in a row without a newer checkpoint: a bug, not a preemption"
        if verdict.cause is Cause.UNLAUNCHED and self._same > self._limits.crashes_max:
            return f"no process began {self._same} times in a row: mpirun's output above names the option or host"
        return "" if self.restarts <= self._limits.restarts_max else no_progress(verdict, self.restarts)


def no_progress(verdict: Verdict, attempts: int) -> str:
    """Why the run ends after this number of attempts in a row."""
    why = f"{attempts} attempts in a row without a newer checkpoint"
    if verdict.cause is Cause.KILLED:
        why += "; if no host was taken away, look for the kernel's out-of-memory killer"
    return why
