"""The `Checkpointer`: what a training loop talks to.

    save(step), training thread                      copy thread            MPI thread (link)
    ───────────────────────────────────────          ─────────────          ─────────────────
    collect the state, pickle its plain values
    first time, or new tensors: agree on a layout ────────────────────────► PROPOSE … RESERVED
    copy what anything may change
    close the gate, offer ────────────────────────────────────────────────► OFFER … credits
    return                                           copy the slice ──────► frames, as the bytes get ready
                                                                       └──► local tiers (trainer_side/tiers/keeper.py)
    next optimizer.step(): waits for the gate ◄───── open the gate

No collective operation after start-up. A step that cannot be taken (all staging areas are still being sent) is declined
by this rank, the stager tells the others, and training goes on; or, with `on_full="wait"`, `save()` waits first.
Every wait has a deadline, and one that is missed says who waited for whom. Local tiers take steps beside the stager,
without one, and when it is lost: what one of the two declines may still go to the other.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost, StateError
from holdfast.events import EventLog
from holdfast.faultpoint import Point, reach
from holdfast.layout import REPLICATED
from holdfast.notice import Notice
from holdfast.replicas import watched
from holdfast.storage import open_store
from holdfast.supervise.report import tell
from trainer_side import restore as restoring
from trainer_side.alone import Alone
from trainer_side.areas import Areas, Flight, areas_max
from trainer_side.copier import Copier, Job
from trainer_side.copy_engine import CopyEngine
from trainer_side.copy_plan import Router, SlicePlan
from trainer_side.fingerprint import Fingerprints
from trainer_side.joining import join, open_keeper
from trainer_side.ledger import Ledger, Stats, cause_of
from trainer_side.link import Proposal, Transfer, TransferState
from trainer_side.notice.opening import open_watch
from trainer_side.skeleton import Capture, Outgrown, Skeleton, Source, capture, plan, table
from trainer_side.staging import Staging
from trainer_side.state import classify, collect
from trainer_side.tiers.base import SliceWriter
from trainer_side.tiers.keeper import Keeper
from trainer_side.tiers.keeping import Keeping

__all__ = ["Checkpointer", "Stats"]

_log = logging.getLogger("holdfast.trainer")


_EXIT_SECONDS_MAX = 10.0  # for a script that ends without close()
_LOOK_SECONDS = 0.05  # while waiting for room: how soon it is seen that another rank has declined the step


@dataclass(frozen=True)
class _Planned:
    """A skeleton, the way through what it copies behind the gate, and the entries of which fingerprints are made."""

    skeleton: Skeleton
    router: Router
    watched: Sequence[int]


class Checkpointer:
    """Takes checkpoints of a training run, and brings the newest one back.

    Every training rank of the MPI job makes one, with the same names and tensors; making it is collective (start-up).
    All methods belong to the training thread.

    Args:
        state: Names to objects with `state_dict()`/`load_state_dict()` (modules, optimizers, schedulers, samplers),
            tensors, plain values, or `PerRank(...)` around what differs per rank. Parameters of modules and tensors of
            optimizers are taken to be the same on every rank; all else is saved as rank 0 has it.
        config: Settings; by default `HOLDFAST_*` in the environment and `holdfast.toml`.
        every: `step()` saves after every so many steps; 0 leaves it to `save()`.

    Raises:
        ConfigError: Wrong settings, or neither a stager in this MPI job nor local tiers.
        StoreError: The stager, or a job without one, cannot use the store; training has not begun.
        FencedError: Another stager writes this run.
        PeerLost: A rank or the stager did not come within `start_seconds_max`.
    """

    def __init__(
        self, state: Mapping[str, Any], *, config: TrainerConfig | None = None, every: int = 0
    ) -> None:
        for name in list[object](state):
            if not (isinstance(name, str) and name and "/" not in name):
                raise StateError(f"names in the state are non-empty strings without '/', got {name!r}")
        if every < 0:
            raise ConfigError(f"every: expected 0 or more steps, got {every}")
        self._state = dict(state)
        self._every = every
        self._config = config or TrainerConfig()
        self._link = join(self._config)
        self._events = EventLog(self._config.events, role="trainer", rank=self._link.rank)
        self._link.events = self._events
        self._ledger = Ledger()
        self._copier = Copier(
            [value for value in self._state.values() if isinstance(value, torch.optim.Optimizer)],
            self._link,
            ledger=self._ledger,
            events=self._events,
            seconds_max=self._config.copy_seconds_max,
        )
        self._keeper = open_keeper(self._config, self._link, self._ledger, self._events)
        if self._keeper is not None:
            atexit.register(self._keeper.close, _EXIT_SECONDS_MAX)
        self._planned: _Planned | None = None
        self._areas = Areas()
        self._engine = CopyEngine(device_bytes_max=self._config.device_bytes_max)
        self._pickle_reserve_bytes = 0
        self._per_rank_reserve_bytes: dict[str, int] = {}
        self._warned: str = ""
        self.restored: restoring.Restored | None = None
        self._closed = self._stepped = False
        self._watching = open_watch(self._config, self._link.notice, rank=self._link.rank)

    # -- what a script uses --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, among the training ranks."""
        return self._link.rank

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self._link.ranks

    @property
    def staged_step(self) -> int:
        """Newest step known to be safe from the death of every training rank; -1 before the first."""
        return self._link.staged_step

    @property
    def durable_step(self) -> int:
        """Newest step known to be published in the store; -1 before the first."""
        return self._link.durable_step

    @property
    def kept_step(self) -> int:
        """Newest step of this job that every rank has sealed in the same local tier; -1 before the first."""
        return -1 if self._keeper is None else self._keeper.complete_step

    @property
    def notice(self) -> Notice | None:
        """What was last said of the end of a rank's machine, to whichever rank; None before. Changes in `step()` alone,
        at the same step on every rank: after it all of them may leave their loops together.
        """
        return self._link.appointments.notice

    @property
    def stats(self) -> Stats:
        """What this rank has done so far."""
        return self._ledger.stats

    def restore(self, *, step: int | None = None) -> int:
        """Bring the state back from the newest good checkpoint. Collective; before the first step.

        Args:
            step: A certain step instead of the newest.

        Returns:
            The number of the step to run next: 0 on a new run, otherwise one more than the saved step.

        Raises:
            DamageError: There are checkpoints, and none is good; names each with its reason.
            StateError: The checkpoint holds other names or shapes than this state.
        """
        store = open_store(self._link.store_url)
        self.restored = restoring.restore(
            self._state,
            store,
            self._link.peers,
            events=self._events,
            tiers=() if self._keeper is None else self._keeper.tiers,
            step=step,
            seconds_max=self._config.restore_seconds_max,
            without_store=self._config.restore_without_store,
        )
        if self._keeper is not None and self.restored is not None:
            self._keeper.restored((self.restored.attempt, self.restored.step))
        if self.restored is not None:
            self._link.appointments.restored(self.restored.step)
        tell("restored", step=-1 if self.restored is None else self.restored.step)
        return 0 if self.restored is None else self.restored.step + 1

    def step(self, step: int) -> bool:
        """Tell that step `step` (from 0) is done; saves when it is time. Returns whether a save was begun.

        It is time after `every` steps, and at the step that the stager has named after a notice (docs/operations.md).
        """
        if not self._stepped:
            self._stepped = True
            tell("stepped", step=step)
        appointments = self._link.appointments
        due = appointments.reach(step)
        every = appointments.every(self._every, step)
        if due is not None:
            self._events.emit("appointed", {"save": due.save, "reason": due.reason}, step=step)
        return bool((due is not None and due.save) or (every and (step + 1) % every == 0)) and self.save(step)

    def save(self, step: int) -> bool:
        """Take a checkpoint of the state as it is now, after step `step`. Returns as soon as training may go on.

        With `on_full="skip"` it never waits for room. With `"wait"` it waits until fewer than `in_flight_max` steps are
        on their way to the ring, and each local tier has a free slot, at most `full_seconds_max` each time.

        Returns:
            False if the step is declined: all staging areas are still being sent, or the stager is lost and there are
            no local tiers. True if it was begun here, for the stager or for a tier. Another rank may still decline it;
            this one then hears of it, and `stats` counts it.

        Raises:
            StateError: The state cannot be saved: what and where; or the ranks' states differ.
            ConfigError: `host_bytes_max` is less than one staging area takes.
            PeerLost: While agreeing on a new layout a rank did not answer.
        """
        begun, saved_at_unix = time.monotonic(), time.time()
        reach(Point.SAVE_BEGUN)
        if (problem := self._link.problem) is not None and self._keeper is None:
            return self._decline(step, f"stager lost: {problem}", tell=False)
        tree = collect(self._state)
        try:
            planned, taken, outgrown = self._take(tree)
        except PeerLost as lost:
            if lost is not self._problem() or self._keeper is not None:
                raise  # the stager is there, a rank is not: going on would leave the ranks at different steps
            return self._decline(step, f"stager lost: {lost}", tell=False)
        if outgrown is not None:
            # More room for a PerRank value takes a new agreement of all ranks, which this rank cannot call alone.
            needed = 0 if outgrown.name else outgrown.needed_bytes
            if needed and self._keeper is not None and self.rank == 0:
                self._keeper.council.make_room(needed)
            return self._decline(step, f"outgrown: {outgrown}", needed_pickle_bytes=needed)
        assert planned is not None
        assert taken is not None
        # The training thread is here, so what was taken stays as it is meanwhile.
        wait_seconds, late = self._wait_for_room(step) if self._config.on_full == "wait" else (0.0, "")
        answer = self._link.answer(step)
        if answer is not None and self._keeper is None:
            return self._decline(step, answer[0], code=answer[1], tell=False)  # all were told the same
        record: dict[str, Any] = {"saved_at_unix": saved_at_unix}
        area, keeping, refusal = self._room(step, record, late)
        if area is None:
            return self._decline(step, refusal)
        record["wait_seconds"] = wait_seconds
        try:
            return self._begin(step, planned, taken, area, keeping, answer, record, begun)
        except BaseException:
            if self._keeper is not None and keeping is not None and keeping.area is None:
                self._keeper.drop(keeping, "copy failed: save() ended with an error")
            raise

    def close(self) -> None:
        """Wait until what was accepted is durable (at most `close_seconds_max`), then leave. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.close()
        self._copier.close()
        try:
            if self._keeper is not None:
                atexit.unregister(self._keeper.close)
                self._keeper.close(self._config.close_seconds_max)
            self._link.close(wait_for=TransferState.DURABLE, seconds_max=self._config.close_seconds_max)
        finally:
            if summary := self._ledger.summary():
                _log.warning("rank %d: %s", self.rank, summary)
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self,
        step: int,
        planned: _Planned,
        taken: Capture,
        area: Staging,
        keeping: Keeping | None,
        answer: tuple[str, str] | None,
        record: dict[str, Any],
        begun: float,
    ) -> bool:
        """Take what must be taken at once, and set the rest going. `answer`: what the stager has said already."""
        sources, contents = taken.sources, dict(taken.contents)
        area.copy_now(sources, contents)
        fingerprints = None
        if planned.watched:
            fingerprints = Fingerprints(planned.watched, planned.skeleton.gated, step)
            fingerprints.take_now(sources)
        record |= {
            "slice_bytes": area.nbytes,
            "save_seconds": 0.0,
            "host": socket.gethostname(),
        }
        device = _device(sources)
        after = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._copier.shut()
        transfer = (
            self._link.offer(step, area, record) if answer is None else Transfer.none(step, record, *answer)
        )
        if transfer.released.is_set() and keeping is None:  # refused at once: nothing is copied
            self._copier.reopen()
            return self._decline(step, transfer.reason, code=transfer.code, tell=False)
        record["save_seconds"] = time.monotonic() - begun
        self._areas.send(area, transfer, keeping)
        record["in_flight"] = len(self._areas.in_flight())
        if self._keeper is not None and keeping is not None:
            keeping.link_released = transfer.released
            self._keeper.keep(keeping, area)
        self._copier.copy(Job(transfer, area, planned.router, sources, after, fingerprints, keeping))
        self._ledger.begun(transfer, keeping)
        return True

    # -- taking one ----------------------------------------------------------------------------------------------

    def _take(self, tree: Any) -> tuple[_Planned | None, Capture | None, Outgrown | None]:
        """Capture `tree`, planning first if its tensors are new. Third: what did not fit its room, if so."""
        wanted = self._link.new_pickle_reserve_bytes
        if self._keeper is not None:
            wanted = max(wanted, self._keeper.council.new_pickle_reserve_bytes)
        if self._planned is not None and wanted > self._pickle_reserve_bytes:
            # The stager has given rank 0 more room. No agreement is needed: every rank was told the same.
            self._pickle_reserve_bytes = wanted
            self._planned = self._make_plan(tree)
        try:
            if self._planned is not None:
                taken = capture(tree, self._planned.skeleton)
                if taken is not None:
                    return self._planned, taken, None
            # First save, or other tensors than before. All ranks come here at the same step, so they may wait for
            # each other; a rank that is still sending must wait for its buffer first, and not decline.
            self._agree(tree)
            self._planned = self._make_plan(tree)
            taken = capture(tree, self._planned.skeleton)
        except Outgrown as outgrown:
            return None, None, outgrown
        assert taken is not None
        return self._planned, taken, None

    def _agree(self, tree: Any) -> None:
        proposed = table(self._state, tree, rank=self.rank, ranks=self.ranks)
        # With local tiers the ranks agree among themselves: the same way before and after the stager is lost.
        leader = self._link if self._keeper is None else self._keeper.council
        assert not isinstance(leader, Alone)
        agreement = leader.agree(
            Proposal(
                table_digest=proposed.digest,
                table=proposed.rows,
                pickle_bytes=proposed.pickle_bytes,
                per_rank_bytes=proposed.per_rank_bytes,
            )
        )
        self._pickle_reserve_bytes = agreement.pickle_reserve_bytes
        self._per_rank_reserve_bytes = dict(agreement.per_rank_reserve_bytes)

    def _make_plan(self, tree: Any) -> _Planned:
        self._free_areas()
        begun = time.monotonic()
        classes = classify(self._state, tree)
        skeleton = plan(
            tree,
            classes,
            rank=self.rank,
            ranks=self.ranks,
            chunk_bytes=self._link.chunk_bytes,
            pickle_reserve_bytes=self._pickle_reserve_bytes,
            per_rank_reserve_bytes=self._per_rank_reserve_bytes,
        )
        slice_plan = SlicePlan.of(skeleton.layout, self.rank, skeleton.gated)
        count_max = areas_max(
            skeleton.layout,
            in_flight_max=self._config.in_flight_max,
            host_bytes_max=self._config.host_bytes_max,
        )
        pinned = torch.cuda.is_available()
        self._planned = None

        def make(slot: SliceWriter | None) -> Staging:
            if slot is None:
                return Staging(skeleton, slice_plan, self._engine, pinned=pinned)
            move = slot.copy or ctypes.memmove
            return Staging(skeleton, slice_plan, self._engine, pinned=pinned, slot=slot.memory, move=move)

        direct = self._keeper is not None and self._keeper.is_direct
        self._areas.renew(make, count_max, in_slots=direct)
        if self._keeper is not None:
            self._keeper.prepare(skeleton.layout)
        self._link.announce(skeleton.layout)
        replicated = sum(entry.nbytes for entry in skeleton.layout.entries if entry.owner == REPLICATED)
        self._events.emit(
            "plan",
            {
                "image_bytes": skeleton.layout.image_bytes,
                "replicated_bytes": replicated,
                "slice_bytes": slice_plan.nbytes,
                "in_flight_max": count_max,
                "tensors": len(skeleton.layout.tensors),
                "seconds": time.monotonic() - begun,
            },
        )
        checked = self._config.on_divergence != "off" and self.ranks > 1
        return _Planned(skeleton, Router(slice_plan), watched(skeleton.layout) if checked else ())

    def _free_areas(self) -> None:
        """Wait until nothing reads a staging area; steps that take too long are given up for the new plan."""
        deadline = time.monotonic() + self._config.full_seconds_max
        late = [
            flight
            for flight in self._areas.being_read()
            if not flight.released.wait(max(0.0, deadline - time.monotonic()))
        ]
        for before in late:
            reason = f"late: its tensors have changed since, and {self._waited_for(before)}"
            self._link.decline(before.step, reason)
            if before.keeping is not None:
                before.keeping.cancel(reason)
        deadline = time.monotonic() + self._config.stager_seconds_max
        for before in late:
            if not before.released.wait(max(0.0, deadline - time.monotonic())):
                raise self._link.problem or StateError(
                    f"rank {self.rank}: the tensors changed while the checkpoint of step {before.step} is still being "
                    "sent; it was given up, and MPI did not let go of it within "
                    f"{self._config.stager_seconds_max:g} s"
                )

    # -- waiting for room ----------------------------------------------------------------------------------------

    def _busy(self) -> str:
        """Why there is no staging area for another step now."""
        reading = self._areas.being_read()
        if len(reading) < self._areas.count_max:
            in_flight = len(self._areas.in_flight())
            if self._keeper is not None and in_flight <= self._areas.count_max:
                return "busy: no slot of the first local tier is free"
            return f"busy: the {in_flight} checkpoints before are not staged yet"
        before = len(reading)
        which = "the checkpoint before is" if before == 1 else f"the {before} checkpoints before are"
        sent = any(not flight.transfer.released.is_set() for flight in reading)
        return f"busy: {which} still being {'sent' if sent else 'written to local tiers'}"

    def _room(
        self, step: int, record: dict[str, Any], late: str
    ) -> tuple[Staging | None, Keeping | None, str]:
        """An area for this step, and slots of the tiers as far as there are any; or no area, and why."""
        if late:
            return None, None, late
        if self._keeper is not None and self._keeper.is_direct:
            area, keeping = self._slot(self._keeper, step, record)
        else:
            area, keeping = self._areas.take(), None
            if area is not None and self._keeper is not None:
                keeping = self._take_slots(self._keeper, step, record)
        if area is None:
            return None, None, self._busy()
        if stuck := self._copier.wait():
            if self._keeper is not None and keeping is not None:
                self._keeper.drop(keeping, stuck)
            return None, None, stuck
        return area, keeping, ""

    def _slot(
        self, keeper: Keeper, step: int, record: dict[str, Any]
    ) -> tuple[Staging | None, Keeping | None]:
        """A slot of the first tier, which is the area: without one there is nowhere to copy to."""
        keeping = self._take_slots(keeper, step, record) if self._areas.has_room() else None
        if keeping is None:
            return None, None
        if keeping.source_is_slot < 0:
            keeper.drop(keeping, "busy: no slot of the first tier is free")
            return None, None
        return self._areas.take_slot(keeping.writers[keeping.source_is_slot]), keeping

    def _take_slots(self, keeper: Keeper, step: int, record: dict[str, Any]) -> Keeping | None:
        """With `on_full="wait"`, wait for those that will become free: verdicts come a little later than seals."""
        if self._config.on_full == "skip":
            return keeper.begin(step, record, stager_lives=self._stager_lives)
        begun = time.monotonic()
        until = begun + self._config.full_seconds_max
        keeping = keeper.begin(step, record, stager_lives=self._stager_lives, wait_until=until)
        self._ledger.waited(time.monotonic() - begun)
        return keeping

    def _wait_for_room(self, step: int) -> tuple[float, str]:
        """Wait until one more step may be in flight: until the oldest is staged, or has ended, if all areas are taken.

        Every rank has sent it then, and the stager has room.

        Returns:
            How long it took, and why there is no room even so; empty if there is.
        """
        begun = time.monotonic()
        limit = self._config.full_seconds_max
        refusal, waited_seconds = "", 0.0
        while len(in_flight := self._areas.in_flight()) >= self._areas.count_max:
            oldest = in_flight[0]
            gone = oldest.settled.wait(_LOOK_SECONDS) and oldest.released.wait(_LOOK_SECONDS)
            waited_seconds = time.monotonic() - begun
            if not gone and self._link.answer(step) is not None:
                break  # another rank does not wait any longer
            if not gone and waited_seconds > limit:
                refusal = (
                    f"late: {self._waited_for(oldest)}. Find out why the store is slow, enlarge the ring, save less "
                    'often, or set on_full = "skip"'
                )
                break
        if waited_seconds:
            self._ledger.waited(waited_seconds)
        return waited_seconds, refusal

    def _waited_for(self, flight: Flight) -> str:
        """Who waited for whom."""
        before = flight.transfer
        if before.released.is_set() and before.settled.is_set():
            return (
                f"rank {self.rank} waited {self._config.full_seconds_max:g} s for step {before.step} to be written to "
                "its local tiers"
            )
        who = f"rank {self.rank} waited {self._config.full_seconds_max:g} s for step {before.step} to be staged, and"
        sent = before.frames - before.frames_left
        if before.state is TransferState.SENT:
            return f"{who} has sent all of it: the stager waits for other ranks"
        if before.settled.is_set():
            return f"{who} MPI still holds the memory of what was sent to the stager"
        return f"{who} the stager had room for {sent} of its {before.frames} chunks: the ring is full"

    # -- refusals ------------------------------------------------------------------------------------------------

    @property
    def _stager_lives(self) -> bool:
        return not isinstance(self._link, Alone) and self._link.problem is None

    def _problem(self) -> HoldfastError | None:
        return self._link.problem

    def _decline(
        self, step: int, reason: str, *, code: str = "", tell: bool = True, needed_pickle_bytes: int = 0
    ) -> bool:
        cause = cause_of(reason, code)
        self._ledger.declined(cause)
        self._events.emit("declined", {"reason": reason, "cause": cause}, step=step)
        if (
            reason != self._warned and self._link.problem is None
        ):  # the link has said that one, once and loudly
            _log.warning("rank %d: step %d is not checkpointed: %s", self.rank, step, reason)
            self._warned = reason
        if self._keeper is not None:
            self._keeper.skip(step, reason)
        if tell:
            self._link.decline(step, reason, needed_pickle_bytes=needed_pickle_bytes)
        return False


def _device(sources: Sequence[Source | None]) -> torch.device | None:
    """The CUDA device that tensors of the state lie on; None: all are in host memory."""
    devices = {source.device for source in sources if source is not None and source.device.type == "cuda"}
    if len(devices) > 1:
        raise StateError(
            f"tensors of the state lie on {' and '.join(sorted(map(str, devices)))}; those of one rank may lie on one "
            "device, and in host memory: give each device a rank of its own"
        )
    return devices.pop() if devices else None
