"""Settings of a supervised run: ranks, restarts, and deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from operator_side.supervise.verdict import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Limits:
    ranks: int
    ranks_min: int
    stagers: int = 1
    crashes_max: int = 2  # the run ends after this many equal crashes in a row without progress
    set_aside_max: int = 2  # checkpoints in a row to set aside first, if the crashes followed their restore
    restarts_max: int = 8  # the run ends after this many in a row without progress, for any cause
    # A rank is lost after this time without a sign of life, in addition to the stager's own deadline.
    silent_seconds_max: float = 30.0
    # How long the others may continue after a death; 0 if a process was killed before all had joined.
    lost_seconds_max: float = 30.0
    stall_seconds_max: float | None = None  # end the attempt after this time without a newly staged step
    grace_seconds: float = 30.0  # between asking the ranks to end and asking mpirun
    kill_seconds: float = 5.0
    hosts_seconds_max: float = 1800.0
    fleet_seconds_max: float = 30.0  # to wait for the fleet's answer before a verdict


class RestartPolicy:
    """Counts attempts without progress. `restarts`: those in a row, plus the last attempt with progress."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.restarts = self._same_ends = 0
        self._signature = ""

    def final_verdict(
        self, verdict: Verdict, *, progressed: bool, may_set_aside: bool = False
    ) -> Verdict | None:
        """Count an attempt; return the verdict that ends the run, or None to restart. `may_set_aside`: the checkpoint
        may be to blame, so an equal crash does not end the run yet.
        """
        if progressed:
            self.restarts = self._same_ends = 0
        self.restarts += 1
        if verdict.signature != self._signature:
            self._same_ends = 0
        self._same_ends += 1
        self._signature = verdict.signature
        why = self._reason_to_stop(verdict, progressed, may_set_aside)
        return replace(verdict, message=f"{why}: {verdict.message}") if why else None

    def _reason_to_stop(self, verdict: Verdict, progressed: bool, may_set_aside: bool) -> str:
        if verdict.cause is Cause.CRASHED and verdict.is_permanent and not progressed:
            return "a setting or the state is wrong, and a restart cannot help"
        ends, crashes_max = self._same_ends, self._limits.crashes_max
        if verdict.cause is Cause.CRASHED and ends >= crashes_max and not may_set_aside:
            return f"the same crash {ends} times in a row without a newer checkpoint: a bug, not a preemption"
        if verdict.cause is Cause.UNLAUNCHED and ends > crashes_max:
            return f"no process began {ends} times in a row: mpirun's output above names the option or host"
        has_tries = self.restarts <= self._limits.restarts_max
        return "" if has_tries else describe_no_progress(verdict, self.restarts)


def describe_no_progress(verdict: Verdict, attempts: int) -> str:
    """Explain why the run ends after this number of attempts in a row."""
    why = f"{attempts} attempts in a row without a newer checkpoint"
    if verdict.cause is Cause.KILLED:
        why += "; if no host was preempted, look for the kernel's out-of-memory killer"
    return why
