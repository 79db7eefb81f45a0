"""Between the lanes of this rank and the council: how each step ended here, and what all ranks make of it.

lane: sealed, or given up ─► report, council.sealed, council.skipped
copy thread: fingerprints ─► council.compare
council: COMPLETE, VOID   ─► report, lane.judge
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from holdfast.image.layout import Layout
from holdfast.telemetry.causes import Reason
from trainer_side.background_thread import ThreadDied
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.ranks.ports import CouncilPort
from trainer_side.tiers.chair import Chair, farthest
from trainer_side.tiers.coordinator import ROOT, Coordinator, CouncilLimits
from trainer_side.tiers.council import Council
from trainer_side.tiers.lane import Lane, PartOutcome
from trainer_side.tiers.replica_watch import ReplicaWatch
from trainer_side.tiers.tally import Order, StepVerdict
from trainer_side.tiers.tier import Nearness, Tier
from trainer_side.tiers.tier_report import TierReport

_log = logging.getLogger("holdfast.trainer.tiers")

_LOOK_SECONDS = 2e-3


class Outcomes:
    """See the module. Any thread.

    Args:
        tiers: The tiers of this rank, nearest first.
        port: To the other ranks.
        limits: How long the slowest rank is waited for; one call of a tier may take as long as a slice of that rank.
        report: Told what becomes of each step.
        attempt: Attempt of this job.
        refuses: Whether a step of which the replicas differ is kept nowhere; rank 0's word counts.
        appointments: At which step this rank acts on a notice; only in a job without a stager.

    Attributes:
        lanes: One for each tier.
        council: Agrees with the other ranks.
        complete_step: Newest step of this job that every rank has sealed in some tier; -1 before the first.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        port: CouncilPort,
        limits: CouncilLimits,
        report: TierReport,
        *,
        attempt: int,
        refuses: bool,
        appointments: AgreedSteps | None = None,
    ) -> None:
        self._rank, self._report = port.rank, report
        self.complete_step = -1
        self.lanes = tuple(
            Lane(number, tier, port.rank, self._over, call_seconds_max=limits.seal_seconds_max)
            for number, tier in enumerate(tiers)
        )
        leads = port.rank == ROOT
        has_chair = leads and appointments is not None
        self._chair = self._take_chair(port.ranks, attempt) if has_chair else None
        self._watch = ReplicaWatch(port.ranks, report.events, refuses=refuses) if leads else None
        self.council = Council(
            port,
            limits,
            on_verdict=self._judge,
            on_turn=self._look,
            appointments=appointments,
            coordinator=Coordinator(port.ranks, limits, self._chair, self._watch) if leads else None,
        )

    def _take_chair(self, ranks: int, attempt: int) -> Chair:
        lane = self.lanes[farthest([lane.tier for lane in self.lanes])]
        is_store = lane.tier.nearness is Nearness.STORE
        return Chair(
            ranks,
            lane.number,
            "kept in the store" if is_store else f"kept in {lane.tier.name} of every rank's machine",
            attempt=attempt,
            fraction=lane.fraction,
            events=self._report.events,
        )

    @property
    def died(self) -> ThreadDied | None:
        """What has ended a thread of the tiers, or of the council; None while all live. Any thread."""
        problem = self.council.problem
        if isinstance(problem, ThreadDied):
            return problem
        return next((lane.calls.died for lane in self.lanes if lane.calls.died is not None), None)

    @property
    def takes_steps(self) -> bool:
        """Whether a thread is there that keeps steps, and a council that judges them."""
        return not isinstance(self.council.problem, ThreadDied) and any(
            lane.calls.died is None for lane in self.lanes
        )

    @property
    def is_idle(self) -> bool:
        return all(self.is_idle_in(number) for number in range(len(self.lanes)))

    def is_idle_in(self, number: int) -> bool:
        """No slot of this tier will become free by itself.

        The lane is asked twice: a step may pass from lane to council, and back, while the other one is asked.
        """
        lane = self.lanes[number]
        return lane.idle and not self.council.undecided and lane.idle

    def laid_out(self, layout: Layout) -> None:
        if self._watch is not None:
            self._watch.laid_out(layout)

    def began(self, number: int, order: Order, image_bytes: int) -> None:
        """This rank has taken a slot for a step."""
        if self._chair is not None:
            self._chair.began(number, order, image_bytes)

    def skipped(self, number: int, order: Order, reason: Reason, *, counted: bool = True) -> None:
        """A tier does not keep a step. `counted`: False if this rank did not save the step at all."""
        self._report.skipped(self.lanes[number].tier, order, reason, counted=counted)
        # Also where the council itself has called it void: rank 0 remembers it until every rank has spoken.
        self.council.skipped(number, order, reason)

    def close(self, seconds_max: float) -> None:
        """Wait until every step that is on its way is sealed and judged, then let go of the tiers."""
        deadline = time.monotonic() + seconds_max
        while not all(lane.idle for lane in self.lanes) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        self.council.close(max(0.0, deadline - time.monotonic()))
        for lane in self.lanes:
            if lane.close(max(0.1, deadline - time.monotonic())):
                lane.tier.close()
            else:
                _log.error(
                    "rank %d: tier %s %s at close; every slice that is sealed in it stays",
                    self._rank,
                    lane.tier.name,
                    lane.calls.hangs or f"was not done after waiting {seconds_max:g} s",
                )

    def _over(self, outcome: PartOutcome) -> None:
        """A lane is done with a step."""
        keeping = outcome.keeping
        if outcome.reason is not None:
            self.skipped(outcome.tier, keeping.order, outcome.reason)
            return
        self._report.kept(self.lanes[outcome.tier].tier, outcome)
        self.council.sealed(outcome.tier, keeping.order, keeping.layout_digest)

    def _judge(self, verdict: StepVerdict) -> None:
        if verdict.tier >= len(self.lanes):
            return
        if verdict.complete:
            self.complete_step = max(self.complete_step, verdict.order[1])
        lane = self.lanes[verdict.tier]
        self._report.judged(lane.tier, verdict)
        lane.judge(verdict)

    def _look(self) -> None:
        for lane in self.lanes:
            lane.look()
