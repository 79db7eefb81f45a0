"""The planner: what this rank copies at a `save()`, by a plan that all ranks agree on and reuse while it is valid.

    capture: the tensors of the plan ───────────────────────────────────────────► Plan, Capture
                 other tensors, or none before ─► all ranks agree ─► a new plan ─► Plan, Capture
                 values were given more room ──────────────────────► a new plan ─► Plan, Capture
                 values do not fit their room ────────────────────────────────────► Outgrown

Each new plan makes new staging areas.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdfast.errors import HoldfastError, StateError
from holdfast.image.entries import REPLICATED
from holdfast.image.replicas import watched_entries
from holdfast.telemetry.causes import Reason
from holdfast.wire.state_messages import Agreement
from trainer_side.save.copy_plan import Router, SlicePlan
from trainer_side.save.fingerprint import DeviceSamples
from trainer_side.save.layout_agreement import LayoutAgreement
from trainer_side.save.left_out import LeftOutCheck
from trainer_side.save.rank_context import RankContext
from trainer_side.save.staging import CopyEngine, Staging
from trainer_side.save.staging_pool import StagingPool, areas_max
from trainer_side.save.tearing import TearCheck
from trainer_side.state import accelerator
from trainer_side.state.position_names import PerRankNames, SavedNames
from trainer_side.state.skeleton import Capture, Outgrown, Skeleton, capture, plan
from trainer_side.state.tree import UserState, classify, collect, resolve_pending
from trainer_side.tiers.tier import SliceWriter


@dataclass(frozen=True)
class SavePlan:
    """The parts of a save that are the same as long as the tensors are the same."""

    skeleton: Skeleton
    router: Router
    watched_entries: Sequence[int]  # entries that get fingerprints; empty if fingerprints are off
    shared: frozenset[int]  # watched entries that are sharded
    tear_check: TearCheck
    samples: dict[torch.device, DeviceSamples] = field(default_factory=dict)  # for the fingerprints


class Planner:
    """Makes and reuses the plan of this rank. Training thread. The tiers' council negotiates it with the other ranks;
    with local tiers the ranks agree among themselves, in the same way before and after the stager is lost.
    """

    def __init__(
        self,
        given: UserState,
        left_out: LeftOutCheck,
        pool: StagingPool,
        engine: CopyEngine,
        context: RankContext,
    ) -> None:
        self._user_state, self._left_out, self._pool, self._engine = given, left_out, pool, engine
        self._state = given.current
        self._link, self._tiers = context.link, context.tiers
        self._config, self._events = context.config, context.events
        self._plan: SavePlan | None = None
        self._layout_agreement = LayoutAgreement(given, context)
        self._agreed = Agreement(0, {})
        self._names = SavedNames(self._state, is_writer=context.link.job.rank == 0)
        self._own_names = PerRankNames(self._state)

    def capture(self, step: int = -1) -> tuple[SavePlan, Capture]:
        """Capture the state, planning first if its tensors are new.

        `step` lets the ranks notice that one of them has changed its state alone; -1 if unknown.

        Outgrown: a plain value, or one of `PerRank`, does not fit its space. StateError: the state cannot be saved, or
        the ranks' states differ. ConfigError: `host_bytes_max` is too small for one staging area; or the run has
        checkpoints, and the script has neither called `restore()` nor set `fresh=True`. StoreError: the store cannot be
        listed. PeerLost: a rank did not answer during the agreement.
        """
        # At the first save all ranks wait for each other.
        if self._plan is None:
            self._layout_agreement.check_fresh_run()
        with self._names.record_param_groups() as told:
            if self._plan is None:
                collected = self._layout_agreement.collect()
            else:
                self._user_state.refresh()
                collected = collect(self._state, allow_pending=True)
        if self._plan is not None:
            self._names.refresh(collected, told)
            self._own_names.refresh(collected)
        tree = (
            collected
            if self._agreed.union is None
            else self._layout_agreement.to_agreed_form(collected, self._agreed)
        )
        self._apply_granted_room(tree)
        if self._plan is not None:
            taken = capture(tree, self._plan.skeleton, defer=True, trailer=self._trailer)
            if taken is not None:
                if self._left_out.inspections_left:
                    self._left_out.inspect(collected)
                self._tiers.council.send_fits(step)
                return self._plan, taken
        # First save, or the tensors have changed. All ranks get here at the same step, so they may wait for each
        # other; a rank that is still sending must wait for its buffer, and must not decline.
        resolve_pending(collected)
        self._left_out.inspect(collected, new_layout=True)
        self._names.rebuild(collected, told)
        self._own_names.refresh(collected, is_new=True)
        try:
            self._agreed = self._layout_agreement.agree(collected, len(self._names.trailer), step)
        except StateError as error:
            if self._plan is not None:  # other ranks may have begun this step, and wait for this rank's slice
                self._tiers.skip(step, Reason.from_error(error))
            raise
        tree = self._layout_agreement.to_agreed_form(collected, self._agreed)
        planned = self._renew_together(tree)
        taken = capture(tree, planned.skeleton, trailer=self._trailer)
        assert taken is not None
        return planned, taken

    def _apply_granted_room(self, tree: Any) -> None:
        """Renew the plan if rank 0 was granted more space. Every rank was told the same, so no agreement is needed."""
        before = self._agreed
        wanted = max(self._link.job.new_pickle_reserve_bytes, self._tiers.council.new_pickle_reserve_bytes)
        if self._plan is None or wanted <= before.pickle_reserve_bytes:
            return
        self._agreed = replace(before, pickle_reserve_bytes=wanted)
        resolve_pending(tree)
        try:
            self._renew(tree)
        except Outgrown:
            # Only rank 0 gets here. The other ranks have the new plan by now, so rank 0 tries again at a later step.
            self._agreed = before
            raise

    def _renew_together(self, tree: Any) -> SavePlan:
        """Make the plan. With local tiers, an error in the first one is raised on all ranks: none trains on alone."""
        if self._tiers.is_prepared:
            return self._renew(tree)
        try:
            planned = self._renew(tree)
        except HoldfastError as error:
            self._tiers.council.confirm_ready(None if isinstance(error, Outgrown) else error)
            raise
        self._tiers.council.confirm_ready(None)
        return planned

    @property
    def _trailer(self) -> bytes:
        """Empty if optimizer state is keyed by name, not by number."""
        return self._names.trailer if self._agreed.union is None else b""

    def _renew(self, tree: Any) -> SavePlan:
        """Make a plan within the agreed sizes, and its staging areas."""
        self._pool.clear()
        begun = time.monotonic()
        rank, ranks = self._link.job.rank, self._link.job.ranks
        skeleton = plan(
            tree,
            classify(self._state, tree),
            rank=rank,
            ranks=ranks,
            chunk_bytes=self._link.job.chunk_bytes,
            agreed=self._agreed,
            trailer=self._trailer,
        )
        self._plan = None  # frees its memory before the new areas are allocated
        layout = skeleton.layout
        slice_plan = SlicePlan.of(layout, skeleton.rank, skeleton.gated)
        count_max = areas_max(
            layout, in_flight_max=self._config.in_flight_max, host_bytes_max=self._config.host_bytes_max
        )
        pinned = accelerator.kind() is not None

        def make(slot: SliceWriter | None, memory: torch.Tensor | None) -> Staging:
            area = functools.partial(Staging, skeleton, slice_plan, self._engine, pinned=pinned)
            if slot is None or slot.memory is None:
                return area(memory=memory)
            return area(memory=memory, slot=slot.memory, move=slot.copy or ctypes.memmove)

        self._pool.prepare(make, layout, slice_plan.area_bytes, count_max, pinned=pinned)
        replicated = (entry.nbytes for entry in layout.entries if entry.owner == REPLICATED)
        self._events.emit(
            "plan",
            {
                "image_bytes": layout.image_bytes,
                "replicated_bytes": sum(replicated),
                "slice_bytes": slice_plan.nbytes,
                "in_flight_max": count_max,
                "tensors": len(layout.tensors),
                "seconds": time.monotonic() - begun,
                "sum_seconds": self._layout_agreement.sum_seconds,
            },
        )
        checked = self._config.on_divergence != "off" and layout.ranks > 1
        compared = watched_entries(layout) if checked else ()
        shared = frozenset(entry for entry in compared if layout.pattern_of(layout.entries[entry]))
        here = {entry: layout.held_bytes(entry, skeleton.rank) for entry in compared}
        tear_check = TearCheck(layout, slice_plan, skeleton.gated, here)
        self._plan = SavePlan(skeleton, Router(slice_plan), compared, shared, tear_check)
        return self._plan
