"""Pipeline, worker threads and ring joined: the whole flush, without any stager.

    begin, chunk, staged, abort ─► pipeline ─► workers ─► inbox ─► pipeline ─► … ─► listener (freed, durable, failed, …)
                                      ▲            │ the store fails
                                      └── held ◄───┘ retried for as long as it takes; the ring keeps the chunks

The engine runs in the event loop's thread; only jobs run in others. Recovery of a dead flusher's ring uses it as it is.
Store errors never cost the newest checkpoint: disks get room again, permissions are mended. While the store accepts
nothing and the ring has no room for the next checkpoint, the newest whole one takes the place of older ones. Otherwise
a checkpoint is lost only to damage, to a stager that breaks the protocol, or to chunks that are neither in the ring nor
in the store. Where several flushers write one file, the engine polls for one that is behind, up to a timeout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from flusher.flush_events import FlushEvents
from flusher.flusher_context import FlusherContext
from flusher.job_runner import JobRunner, Retry
from flusher.jobs import Jobs
from flusher.listener import DurableStep, EndedCheckpoints, FlushListener, LookupResult
from flusher.pipeline import Pipeline
from flusher.ring_room import RingGrown
from flusher.share_polls import PollAgain
from flusher.steps import (
    Aborted,
    Action,
    Begin,
    ChunkFull,
    CrcsPut,
    CrcsRead,
    Discard,
    Discarded,
    EndOrphan,
    Event,
    FreeSlots,
    Job,
    JobFailed,
    Opened,
    OrphanEnded,
    PartWritten,
    Published,
    Resume,
    Sealed,
    SealRead,
    Staged,
)
from flusher.succession import Succession
from flusher.verify_and_prune import Maintenance, Pruned, ReadBack
from holdfast.errors import BusyError, FencedError, HoldfastError, PeerLost, ProtocolError, StoreError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.image.save_record import StepRecord
from holdfast.image.shares import ImageShare, Shares
from holdfast.ring.doubts import read_doubts
from holdfast.ring.journal import SlotRecord, SlotState
from holdfast.ring.proofs import read_proofs
from holdfast.ring.ring import Ring
from holdfast.store import part_chunks_for
from holdfast.store.concurrency import ConcurrencyLimit

_log = logging.getLogger("holdfast.flusher")


class Engine:
    """Flushes checkpoints from one ring.

    Args:
        context: Store and lease of the run, and the inbox for the threads' answers.
        request_room: Called with the chunk count of each new image. Returns True if it will put `RingGrown` messages
            into the inbox, the last one with a note.

    Attributes:
        listener: May be replaced between two turns.
    """

    def __init__(
        self,
        ring: Ring,
        context: FlusherContext,
        maintenance: Maintenance,
        *,
        writers: ConcurrencyLimit,
        listener: FlushListener | None = None,
        request_room: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._ring, self._maintenance, self._request_room = ring, maintenance, request_room
        self._inbox, self._events = context.inbox, FlushEvents(context.events)
        self.listener = listener or FlushListener()
        self._pipeline = Pipeline(ring.ring_chunks)
        self._share, self._store_url = context.share, context.store.url
        self._jobs = Jobs(ring, context.store, context.lease, best=context.best, share=context.share)
        self._runner = JobRunner(self._jobs, context, writers, self._pipeline.is_dropping)
        self._indexes: dict[str, LayoutIndex] = {}
        self._succession = Succession()
        self._outcomes = EndedCheckpoints(self._jobs, self._runner.publishers, context.inbox)
        self._opened: dict[CheckpointId, int] = {}  # how many chunks must be in the ring together
        self._discards: set[CheckpointId] = set()
        self._reported_given_up: set[CheckpointId] = set()  # and reported to the stager
        self._orphans: set[CheckpointId] = set()  # whose lead is gone
        self._growing = False
        self._opened_early: list[Opened] = []

    # -- messages from the stager --------------------------------------------------------------------------------

    def begin(self, key: CheckpointId, layout: Layout) -> None:
        """Begin a checkpoint, or resume it where a dead flusher left it. For a known one, only repeat `began`."""
        if layout.digest not in self._indexes:
            self._indexes = {layout.digest: LayoutIndex(layout)}  # new steps no longer use the previous one
            self._growing = self._request_room(layout.chunks) or self._growing
        if self._pipeline.knows(key):
            self._process(Begin(key, self._indexes[layout.digest]))
            if key in self._opened:
                self.listener.began(key, self._opened[key])
            return
        # The number of shares in its own attempt: the next job may have more or fewer stagers.
        share = self._share_of(layout, self._ring.writers(key.attempt))
        if share is not None and not share.chunks:
            no_share = f"this flusher is {self._share}, and the image has only {share.shares.count} shares"
            self.listener.failed(key, ProtocolError(f"{key}: {no_share}"))
            return
        if share is not None and key in self._discards:
            # The next process of its stager was faster than the worker, which would drop this flight's state.
            self.listener.failed(key, PeerLost(f"{key}: this share is being given up"))
            return
        resume = self._find_resume(key, layout)
        self._events.began(key, layout.image_bytes, share)
        self._process(Begin(key, self._indexes[layout.digest], resume, share))

    def _share_of(self, layout: Layout, writers: int) -> ImageShare | None:
        """Return the share of an image that this flusher writes; None: all of it."""
        if writers == 1:
            return None
        part_chunks = part_chunks_for(self._store_url, layout.image_bytes, layout.chunk_bytes)
        shares = Shares.of(layout, writers, part_chunks)
        return None if shares.count == 1 and self._share.is_lead else ImageShare(shares, self._share.index)

    def _find_resume(self, key: CheckpointId, layout: Layout) -> Resume | None:
        """Return what a dead flusher recorded of this checkpoint."""
        try:
            progress = self._jobs.find_progress(key)
        except ProtocolError as error:
            _log.error("%s: the record of what is already written cannot be read: %s", key, error)
            return None
        if progress is None or progress.head.layout_digest != layout.digest:
            return None
        self._events.taken_over(key, progress)
        return progress.resume(layout.chunk_bytes)

    def end_orphans(self, keys: Iterable[CheckpointId]) -> None:
        """Publish these checkpoints, whose lead is gone, as soon as all their shares are sealed, or give them up."""
        for key in keys:
            self._orphans.add(key)
            self._submit(EndOrphan(key))

    def begin_attempt(self) -> None:
        """Note that the ring belongs to another job from now on."""
        self._runner.polls.begin_attempt()

    def request_outcome(self, key: CheckpointId) -> None:
        """Report again how a checkpoint ended that the ring no longer has: it ended while no stager listened."""
        outcome = self._outcomes.lookup(key)
        if outcome is not None:
            self._report_outcome(key, outcome)

    def repeat_durable(self, attempt: int) -> None:
        """Report again which of an attempt's last checkpoints are durable: its next stager may not have heard."""
        for key, durable in self._outcomes.durable(attempt):
            self.listener.durable(key, durable)

    def add_chunk(self, record: SlotRecord) -> None:
        """Take a FULL slot. Raises `ProtocolError` if the journal says otherwise."""
        if record.state is not SlotState.FULL:
            raise ProtocolError(
                f"slot {record.slot}: the stager says that it is full, the journal says {record.state.name}"
            )
        key = CheckpointId(record.attempt, record.step)
        self._process(ChunkFull(key, record.slot, record.chunk, record.nbytes, record.sources))

    def mark_staged(self, key: CheckpointId) -> None:
        """Note that all chunks of a checkpoint were sent."""
        if not self._pipeline.knows(key):
            self._ring.remove_checkpoint(*key)  # it was given up, and the stager did not know yet
            return
        checkpoint = self._ring.checkpoint(*key)
        at = StepRecord.from_json(checkpoint.record).staged_at_unix if checkpoint else None
        self._jobs.staged_at_unix[key] = time.time() if at is None else float(at)
        if not self._pipeline.has_staged():
            self._succession.on_store_progress()
        self._process(Staged(key))
        self._runner.polls.on_share_complete(key)

    def abort(self, key: CheckpointId, error: HoldfastError) -> None:
        """Give up a checkpoint; an unknown one is ignored."""
        self._process(Aborted(key, error))
        self._runner.make_due(key)

    def load_doubts(self) -> None:
        """Read from beside the ring which steps may be torn, and mark them."""
        self._maintenance.update_doubts(read_doubts(self._ring.directory))

    def load_proofs(self) -> None:
        """Read from beside the ring what the steps after the newest checkpoints used, and write the proofs."""
        self._maintenance.update_proofs(read_proofs(self._ring.directory))

    def give_up(self, key: CheckpointId, error: HoldfastError) -> None:
        """Give up a checkpoint in the ring, even one that was not begun here, and abort its upload."""
        if self._pipeline.knows(key):
            self.abort(key, error)
            return
        try:
            self._jobs.find_progress(key)
        except ProtocolError as damaged:
            _log.warning("%s: leftovers stay in the store until the next start: %s", key, damaged)
        self._execute(Discard(key, error))

    def abort_stranded(self, error: HoldfastError) -> None:
        """Give up the checkpoints that wait for chunks and that no other flusher could resume."""
        for key in self._pipeline.stranded():
            self.abort(key, error)

    def abort_receiving(self, error: HoldfastError) -> None:
        """Give up all checkpoints that still wait for chunks."""
        for key in self._pipeline.receiving():
            self.abort(key, error)

    def receiving(self) -> list[CheckpointId]:
        """Checkpoints that wait for chunks, oldest first."""
        return self._pipeline.receiving()

    def missing(self, key: CheckpointId) -> int:
        """Return how many chunks of one of `receiving` have not arrived."""
        return self._pipeline.missing(key)

    def knows(self, key: CheckpointId) -> bool:
        """Whether this checkpoint is under way, or being given up."""
        return self._pipeline.knows(key) or key in self._discards

    def pipeline_knows(self, key: CheckpointId) -> bool:
        """Whether the pipeline accepts chunks of this checkpoint."""
        return self._pipeline.knows(key)

    # -- the loop ------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write, publish, discard or report."""
        return self._pipeline.idle and self.only_sealed

    @property
    def only_receiving(self) -> bool:
        """Whether the only checkpoints left wait for chunks, so that another flusher can resume them."""
        return self._pipeline.only_receiving and not self._runner.waits_for_store and not self._discards

    @property
    def only_sealed(self) -> bool:
        """Whether the only work left is sealed shares, which their lead publishes without this flusher."""
        waiting = self._runner.waits_for_store or self._discards or self._orphans
        return self._pipeline.only_sealed and not waiting

    def held_seconds(self) -> float:
        """How long all work has been waiting for the store; 0 while anything else is in progress."""
        return self._runner.held_seconds

    @property
    def failure_reason(self) -> str:
        """Why the store fails; empty while nothing waits for it."""
        return str(self._runner.held_error) if self._runner.held_seconds else ""

    @property
    def held_error(self) -> StoreError | None:
        """The store's error if all remaining work waits for a retry; else None."""
        runner = self._runner
        waits = runner.waits_for_store and not runner.running and not self._discards
        return runner.held_error if waits else None

    def wait_seconds(self) -> float | None:
        """Return how long the loop may sleep; None: until the inbox is readable."""
        waits, room = self._runner.wait_seconds, self._succession.wait_seconds
        return min(waits if room is None else [*waits, room], default=None)

    def run_once(self) -> None:
        """Handle the threads' messages and start due jobs. Raises `FencedError` if another writer took the run over."""
        for item in self._inbox.drain():
            if isinstance(item, RingGrown):
                self._grow(item)
            elif isinstance(item, Opened) and self._growing and not item.resumable:
                # The ring keeps a non-resumable upload's chunks if all fit, so it must have grown first.
                self._opened_early.append(item)
            else:
                self._handle(item)
        self._runner.run_due()
        self._make_room()
        self._maintenance.set_busy(self._runner.running > 0)

    def stop(self) -> None:
        """Stop the threads: drop queued jobs, and wait for running ones."""
        self._runner.stop()

    def _handle(self, item: object) -> None:
        match item:
            case FencedError():
                raise item
            case Retry():
                self._runner.running -= 1
                self._retry(item)
            case Discarded(key, error):
                self._discards.discard(key)
                self._reported_given_up.discard(key)
                self._ring.remove_checkpoint(*key)
                self._end(key, error)
                self._maintenance.unprotect(key)
                _log.warning("%s is given up: %s", key, error)
                self._events.failed(key, error)
                self.listener.failed(key, error)
            case ReadBack():
                self._read_back(item)
            case Pruned():
                self._events.pruned(item.files)
            case Published(key):
                self._runner.running -= 1
                self._on_progress(key)
                self._published(key)
            case LookupResult(key, outcome):
                self._report_outcome(key, outcome)
            case JobFailed(key):
                self._runner.running -= 1
                self._handle_failure(item)
            case Opened(key):
                self._runner.running -= 1
                self._on_progress(key)
                self._upload_opened(item)
            case None:
                pass
            case _:
                self._runner.running -= 1
                self._handle_answer(item)

    def _handle_answer(self, item: object) -> None:
        """Handle the answer of a job that succeeded, or that must wait for another flusher."""
        match item:
            case PollAgain():
                self._runner.poll_again(item, self._ring.attempt, self._handle_failure)
            case OrphanEnded(key, manifest):
                self._orphan_ended(key, manifest)
            case PartWritten(key):
                self._on_progress(key)
                self._maintenance.add_written(self._opened.get(key, 1) * self._ring.chunk_bytes)
                self._process(item)
            case CrcsPut(key) | CrcsRead(key):
                self._on_progress(key)
                self._process(item)
            case Sealed(key, share):
                self._on_progress(key)
                self._events.share_sealed(key, share)
                self._process(item)
            case SealRead(key, _, seal):
                self._on_progress(key)
                self._events.seal_read(key, seal)
                self._process(item)
            case _:
                self._process(item)  # type: ignore[arg-type]

    def _upload_opened(self, event: Opened) -> None:
        key = event.key
        self._opened[key] = event.part_chunks
        self._process(event)
        together = self._pipeline.chunks_together(key) or event.part_chunks
        if key in self._opened:
            self._opened[key] = together
        self.listener.began(key, together)

    def _grow(self, grown: RingGrown) -> None:
        ring = self._ring
        if grown.ring_chunks > ring.ring_chunks:
            ring.add_slots(grown.ring_chunks)
            self._pipeline.ring_chunks = ring.ring_chunks
            reach(Point.RING_ADDED)
        if grown.note:
            _log.info("%s", grown.note)
            self._events.ring_grown(ring, grown.note)
            self._growing = False
        self.listener.grown(grown.note)
        while self._opened_early and not self._growing:
            self._handle(self._opened_early.pop(0))

    def _orphan_ended(self, key: CheckpointId, manifest: Manifest | None) -> None:
        self._orphans.discard(key)
        self._runner.forget(key)
        if manifest is None:
            self._maintenance.unprotect(key)
            return
        _log.info("%s: published for a stager that is gone, as %s", key, manifest.file)
        self._events.durable(key, manifest)
        self._maintenance.enqueue(key, manifest)

    def _published(self, key: CheckpointId) -> None:
        manifest = self._jobs.manifests[key]
        self._ring.remove_checkpoint(*key)
        self._jobs.forget(key)
        durable = DurableStep.of(manifest)
        self._end(key, durable)
        self._process(Published(key))
        self._events.durable(key, manifest) if self._share.is_lead else self._events.published(key, manifest)
        self.listener.durable(key, durable)
        self._maintenance.enqueue(key, manifest)

    def _read_back(self, item: ReadBack) -> None:
        self._events.read_back(item)
        self.listener.read_back(item)

    def _end(self, key: CheckpointId, outcome: DurableStep | HoldfastError) -> None:
        self._opened.pop(key, None)
        self._runner.forget(key)
        self._outcomes.remember(key, outcome)

    def _report_outcome(self, key: CheckpointId, outcome: DurableStep | HoldfastError) -> None:
        if isinstance(outcome, DurableStep):
            self.listener.durable(key, outcome)
        else:
            self.listener.failed(key, outcome)

    def _handle_failure(self, failed: JobFailed) -> None:
        """Handle a job that failed for good. If the store lost its bytes, the flush may start over after a pause."""
        if failed.key in self._orphans:
            _log.warning("%s: given up: %s", failed.key, failed.error)
            self._submit(EndOrphan(failed.key, failed.error))
            return
        if isinstance(failed.error, StoreError) and failed.error.begin_anew:
            self._runner.call_later(failed.key, failed.error, lambda: self._process(failed))
        else:
            self._process(failed)
            self._runner.polls.make_due(failed.key)  # its other jobs need not wait either

    def _retry(self, item: Retry) -> None:
        if item.error.no_room and not self._pipeline.is_dropping(item.job.key):
            self._maintenance.make_room()
        self._runner.retry(item, self._process)

    def _on_progress(self, key: CheckpointId) -> None:
        self._succession.on_store_progress()
        self._runner.on_progress(key)

    def _process(self, event: Event) -> None:
        actions = self._pipeline.handle(event)
        self._report_given_up(event.key, actions)
        for action in actions:
            self._execute(action)
        self._make_room()

    def _make_room(self) -> None:
        """Drop an older whole checkpoint if the store fails and incoming chunks have no room."""
        found = self._succession.due(self._pipeline)
        if found is None:
            return
        error = BusyError(
            f"{found.older} gives its place in the ring to {found.newest}, which is whole there: the store has taken "
            f"nothing for {found.stalled_seconds:.0f} s, and the ring has no room for the next checkpoint"
        )
        _log.warning("%s", error)
        # Before a slot is freed: its record would promise chunks that are no longer there.
        self._ring.remove_checkpoint(*found.older)
        reach(Point.SUPERSEDED)
        self.abort(found.older, error)

    def _report_given_up(self, key: CheckpointId, actions: list[Action]) -> None:
        """Report failure before the first slot is freed: to a stager a free slot means that the store has the chunk.

        The report is repeated on discard, for a stager that attaches in between.
        """
        outcome = next((action.error for action in actions if isinstance(action, Discard)), None)
        error = outcome or self._pipeline.given_up(key)
        if error is not None and key not in self._reported_given_up:
            self._reported_given_up.add(key)
            self.listener.failed(key, error)

    def _execute(self, action: Action) -> None:
        match action:
            case FreeSlots(slots):
                for slot in slots:
                    self._ring.free(slot)
                if slots:
                    self.listener.freed(slots)
            case Discard(key, error):
                self._discards.add(key)
                self._runner.publishers.submit((0, *key), lambda: self._discard(key, error))
            case _:
                self._submit(action)

    def _submit(self, job: Job) -> None:
        self._maintenance.protect(job.key)
        self._runner.submit(job)

    def _discard(self, key: CheckpointId, error: HoldfastError) -> None:
        """Runs in a worker thread."""
        try:
            self._jobs.discard(key, error)
        except HoldfastError as left:
            _log.warning("%s: leftovers stay in the store until the next start: %s", key, left)
        self._inbox.put(Discarded(key, error))
