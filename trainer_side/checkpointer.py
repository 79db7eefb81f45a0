"""The `Checkpointer`: what a training loop talks to.

    save(step), training thread                      copy thread            MPI thread (link)
    ───────────────────────────────────────          ─────────────          ─────────────────
    collect the state, pickle its plain values
    first time, or new tensors: agree on a layout ────────────────────────► PROPOSE … RESERVED
    copy what anything may change
    close the gate, offer ────────────────────────────────────────────────► OFFER … credits
    return                                           copy the slice ──────► frames, as the bytes get ready
    next optimizer.step(): waits for the gate ◄───── open the gate

No collective operation after start-up. A step that cannot be taken (the one before is still on its way) is declined by
this rank, the stager tells the others, and training goes on.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost, StateError
from holdfast.events import EventLog
from holdfast.layout import REPLICATED
from holdfast.storage import open_store
from trainer_side import restore as restoring
from trainer_side.gate import Gate
from trainer_side.link import Link, Proposal, Transfer, TransferState
from trainer_side.skeleton import Capture, Outgrown, Skeleton, Source, capture, plan, table
from trainer_side.staging import Staging
from trainer_side.state import classify, collect

__all__ = ["Checkpointer", "Stats"]

_log = logging.getLogger("holdfast.trainer")


@dataclass
class Stats:
    """What this rank has done so far.

    Attributes:
        cst_seconds: Checkpoint stall time of each accepted save: the time in `save()` and at the gate.
    """

    saved: int = 0
    declined: int = 0
    cst_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Planned:
    """A skeleton, and the staging buffer made for it."""

    skeleton: Skeleton
    staging: Staging


@dataclass(frozen=True)
class _Job:
    """One copy for the copy thread."""

    transfer: Transfer
    staging: Staging
    sources: Sequence[Source | None]
    after: torch.cuda.Event | None
    record: dict[str, Any]


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
        ConfigError: Wrong settings, or no stager in this MPI job.
        StoreError: The stager cannot use the store; training has not begun.
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
        self._link = Link.join(self._config)
        self._events = EventLog(self._config.events, role="trainer", rank=self._link.rank)
        self._link.events = self._events
        self._gate = Gate(
            [value for value in self._state.values() if isinstance(value, torch.optim.Optimizer)]
        )
        self._planned: _Planned | None = None
        self._transfer: Transfer | None = None
        self._pickle_reserve_bytes = 0
        self._per_rank_reserve_bytes: dict[str, int] = {}
        self._warned: str = ""
        self.stats = Stats()
        self.restored: restoring.Restored | None = None
        self._copied = threading.Event()  # the copy thread has let go of the staging buffer
        self._copied.set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy_loop, name="holdfast-copy", daemon=True)
        self._copier.start()

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
        store = open_store(self._link.welcome.store_url)
        self.restored = restoring.restore(
            self._state,
            store,
            self._link.peers,
            events=self._events,
            step=step,
            seconds_max=self._config.restore_seconds_max,
        )
        return 0 if self.restored is None else self.restored.step + 1

    def step(self, step: int) -> bool:
        """Tell that step `step` (from 0) is done; saves when it is time. Returns whether a save was begun."""
        return bool(self._every and (step + 1) % self._every == 0) and self.save(step)

    def save(self, step: int) -> bool:
        """Take a checkpoint of the state as it is now, after step `step`. Returns as soon as training may go on.

        Returns:
            False if this rank declined the step: the one before is still on its way, or the stager is lost.

        Raises:
            StateError: The state cannot be saved: what and where; or the ranks' states differ.
            PeerLost: While agreeing on a new layout a rank did not answer.
        """
        begun, saved_at_unix = time.monotonic(), time.time()
        self._copied.wait()
        if (problem := self._link.problem) is not None:
            return self._decline(step, str(problem), tell=False)
        tree = collect(self._state)
        try:
            planned, taken, outgrown = self._take(tree)
        except PeerLost as lost:
            if lost is not self._problem():
                raise  # the stager is there, a rank is not: going on would leave the ranks at different steps
            return self._decline(step, str(lost), tell=False)
        if outgrown is not None:
            # More room for a PerRank value takes a new agreement of all ranks, which this rank cannot call alone.
            needed = 0 if outgrown.name else outgrown.needed_bytes
            return self._decline(step, str(outgrown), needed_pickle_bytes=needed)
        assert planned is not None
        assert taken is not None
        busy = self._transfer is not None and not self._transfer.released.is_set()
        if busy:
            return self._decline(step, "busy: the checkpoint before is still being sent")
        sources, contents = taken.sources, dict(taken.contents)
        planned.staging.copy_now(sources, contents)
        record: dict[str, Any] = {
            "saved_at_unix": saved_at_unix,
            "slice_bytes": planned.staging.nbytes,
            "save_seconds": 0.0,
            "host": socket.gethostname(),
        }
        after = torch.cuda.current_stream().record_event() if _on_device(sources) else None
        self._copied.clear()
        self._gate.close()
        self._transfer = self._link.offer(step, planned.staging, record)
        record["save_seconds"] = time.monotonic() - begun
        self._jobs.put(_Job(self._transfer, planned.staging, sources, after, record))
        self.stats.saved += 1
        return True

    def close(self) -> None:
        """Wait until what was accepted is durable (at most `close_seconds_max`), then leave. Safe to call twice."""
        if not self._copier.is_alive():
            return
        self._jobs.put(None)
        self._copier.join()
        self._gate.remove()
        try:
            self._link.close(wait_for=TransferState.DURABLE, seconds_max=self._config.close_seconds_max)
        finally:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- taking one ----------------------------------------------------------------------------------------------

    def _take(self, tree: Any) -> tuple[_Planned | None, Capture | None, Outgrown | None]:
        """Capture `tree`, planning first if its tensors are new. Third: what did not fit its room, if so."""
        wanted = self._link.new_pickle_reserve_bytes
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
        agreement = self._link.agree(
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
        if self._transfer is not None and not self._transfer.released.wait(self._config.stager_seconds_max):
            raise self._link.problem or StateError(
                f"rank {self.rank}: the tensors changed while the checkpoint of step {self._transfer.step} is still "
                f"being sent, and it did not finish within {self._config.stager_seconds_max} s"
            )
        begun = time.monotonic()
        classes = classify(self._state, tree)
        skeleton = plan(
            tree,
            classes,
            rank=self.rank,
            ranks=self.ranks,
            chunk_bytes=self._link.welcome.chunk_bytes,
            pickle_reserve_bytes=self._pickle_reserve_bytes,
            per_rank_reserve_bytes=self._per_rank_reserve_bytes,
        )
        self._planned = None  # give the old buffer back before the new one is taken
        staging = Staging(skeleton, self.rank, skeleton.gated, pinned=torch.cuda.is_available())
        self._link.announce(skeleton.layout)
        replicated = sum(entry.nbytes for entry in skeleton.layout.entries if entry.owner == REPLICATED)
        self._events.emit(
            "plan",
            {
                "image_bytes": skeleton.layout.image_bytes,
                "replicated_bytes": replicated,
                "slice_bytes": staging.nbytes,
                "tensors": len(skeleton.layout.tensors),
                "seconds": time.monotonic() - begun,
            },
        )
        return _Planned(skeleton, staging)

    def _problem(self) -> HoldfastError | None:
        return self._link.problem

    def _decline(self, step: int, reason: str, *, tell: bool = True, needed_pickle_bytes: int = 0) -> bool:
        self.stats.declined += 1
        self._events.emit("declined", {"reason": reason}, step=step)
        if reason != self._warned:
            _log.warning("rank %d: step %d is not checkpointed: %s", self.rank, step, reason)
            self._warned = reason
        if tell:
            self._link.decline(step, reason, needed_pickle_bytes=needed_pickle_bytes)
        return False

    # -- the copy thread -----------------------------------------------------------------------------------------

    def _copy_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
            finally:
                self._gate.open()  # whatever happened here, the training goes on
                self._copied.set()
                del job  # it holds the staging buffer, and while this thread waits another may take its place

    def _copy(self, job: _Job) -> None:
        begun, step = time.monotonic(), job.transfer.step

        def copied() -> None:
            # Before the sender gets the last byte: what it then says of this checkpoint is complete.
            waited_seconds = self._gate.open()
            job.record["copy_seconds"] = time.monotonic() - begun
            job.record["gate_seconds"] = waited_seconds
            job.record["cst_seconds"] = job.record["save_seconds"] + waited_seconds

        try:
            job.staging.copy_gated(
                job.sources, after=job.after, cancelled=job.transfer.settled.is_set, copied=copied
            )
        except (HoldfastError, RuntimeError, OSError) as error:
            copied()
            _log.error("rank %d: the copy of step %d failed: %s", self.rank, step, error)
            self._link.decline(step, f"copy failed: {error}")
        self.stats.cst_seconds.append(job.record["cst_seconds"])
        self._events.emit("save", dict(job.record), step=step)


def _on_device(sources: Sequence[Source | None]) -> bool:
    return any(source is not None and source.device.type == "cuda" for source in sources)
