"""How often a run is started again: progress is a newer step than ever before, and counting begins anew with it.

Without progress the same crash twice (`crashes_max`) is a bug, and any cause `restarts_max` times in a row is enough.
"""

from __future__ import annotations

from dataclasses import replace

from operator_side.supervise.limits import Limits
from operator_side.supervise.verdict import Cause, Verdict

__all__ = ["Patience"]


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
