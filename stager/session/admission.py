"""Decides whether the session accepts another checkpoint, by the present ranks and the steps in flight.

    offer of step 7 ─► verdict known? ─► the same answer
                       refused? all ranks are told why: the stager is stopping or between two rings, a rank is lost or
                                silent, the step is older than another, too many are in flight
                       all ranks have offered ─► one layout, which rank 0 announced? ─► received; or failed, by name

Changed only by `stager.session.session.Session`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from holdfast.config import IN_FLIGHT_MAX
from holdfast.errors import BusyError, HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.image.layout import Layout
from holdfast.telemetry.causes import DeclineCause
from stager.session.checkpoint import Checkpoint
from stager.session.session_messages import RankSilent, SendMessage

_VERDICTS_KEPT = 256  # for ranks that offer late
_LAYOUTS_KEPT = 4
_STOPPING = "the stager is stopping: it was told to, writes what is staged, and takes no further step"


class Admission:
    """The verdicts, the announced layouts, and the ranks that cannot take part.

    Attributes:
        refuse_all_reason: Why every checkpoint is refused; empty while they are accepted.
        is_stopping: The stager was told to stop: a step that no rank has offered yet is refused.
        lost: rank → why it is lost.
    """

    def __init__(self) -> None:
        self.refuse_all_reason = ""
        self.is_stopping = False
        self.lost: dict[int, str] = {}
        self._silent: dict[int, tuple[str, float]] = {}  # rank → its name, and since when it has been silent
        self._verdicts: OrderedDict[int, SendMessage] = OrderedDict()
        self._layouts: OrderedDict[str, Layout] = OrderedDict()
        self._newest_step = -1

    # -- who can take part ---------------------------------------------------------------------------------------

    @property
    def absent(self) -> set[int]:
        """Ranks that are lost or silent."""
        return self.lost.keys() | self._silent.keys()

    def mark_silent(self, event: RankSilent, now: float) -> None:
        self._silent[event.rank] = (event.name, now - event.silent_seconds)

    def clear_silent(self, rank: int) -> None:
        """End a rank's silence: it was heard again, or is lost."""
        self._silent.pop(rank, None)

    # -- what was said -------------------------------------------------------------------------------------------

    def verdict(self, step: int) -> SendMessage | None:
        """The verdict on `step` that all ranks were told; None without a verdict, or if it was forgotten."""
        return self._verdicts.get(step)

    def record_verdict(self, verdict: SendMessage) -> None:
        self.advance_to(verdict.step)
        self._verdicts[verdict.step] = verdict
        while len(self._verdicts) > _VERDICTS_KEPT:
            self._verdicts.popitem(last=False)

    def advance_to(self, step: int) -> None:
        """Note that a rank has named this step: older steps are refused from now on."""
        self._newest_step = max(self._newest_step, step)

    # -- whether a step is accepted ------------------------------------------------------------------------------

    def refusal(self, step: int, under_way: Collection[int], now: float) -> dict[str, str] | None:
        """The body of DECLINED for `step`, given the steps `under_way`; None if the step is accepted."""
        if self.is_stopping:
            return {"reason": _STOPPING, "cause": DeclineCause.STOPPING}
        error = self._refusal_error(step, under_way, now)
        return None if error is None else {"reason": str(error), "code": error.code}

    def _refusal_error(self, step: int, under_way: Collection[int], now: float) -> HoldfastError | None:
        if self.refuse_all_reason:
            return PeerLost(self.refuse_all_reason)
        if self.lost:
            return PeerLost(f"no checkpoint can be whole: {'; '.join(self.lost.values())}")
        if self._silent:
            silent = [
                f"{name} has been silent for {now - since:.0f} s" for name, since in self._silent.values()
            ]
            return PeerLost(f"no checkpoint can be whole: {'; '.join(silent)}")
        if step <= self._newest_step:
            return BusyError(f"step {step} is older than step {self._newest_step}, which was offered before")
        if len(under_way) >= IN_FLIGHT_MAX:
            return BusyError(f"steps {', '.join(map(str, under_way))} are still being received")
        return None

    def add_layout(self, layout: Layout) -> None:
        self._layouts[layout.digest] = layout
        self._layouts.move_to_end(layout.digest)
        while len(self._layouts) > _LAYOUTS_KEPT:
            self._layouts.popitem(last=False)

    def layout_of(self, checkpoint: Checkpoint) -> Layout | HoldfastError:
        """The layout that all ranks have offered, or an error that says how they differ."""
        step, digest = checkpoint.step, checkpoint.digests[0]
        others = [rank for rank in range(checkpoint.ranks) if checkpoint.digests[rank] != digest]
        if others:
            got = checkpoint.digests[others[0]]
            return StateError(
                f"step {step}: the layout of rank {others[0]} has digest {got[:16]}, that of rank 0 "
                f"{digest[:16]}; all ranks must hold the same tensors in the same order, and adopt a new reserve at "
                "the same step"
            )
        if digest not in self._layouts:
            return ProtocolError(f"step {step}: rank 0 announced no layout {digest[:16]}")
        return self._layouts[digest]
