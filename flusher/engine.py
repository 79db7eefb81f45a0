"""The flush at work: the pipeline, its worker threads and the ring, without any stager.

    begin, chunk, staged, abort ─► pipeline ─► workers ─► inbox ─► pipeline ─► … ─► listener (freed, durable, failed, …)

Runs in the event loop's thread; only the jobs run elsewhere. Recovery of a dead flusher's ring uses it as it is.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from typing import Protocol

from flusher.index import LayoutIndex
from flusher.jobs import Jobs
from flusher.pipeline import Pipeline
from flusher.steps import (
    Aborted,
    Action,
    Begin,
    ChunkFull,
    Discard,
    Event,
    Failed,
    FreeSlots,
    Job,
    Key,
    Opened,
    Published,
    Staged,
)
from flusher.tenure import Tenure
from flusher.upkeep import Pruned, ReadBack, Upkeep
from flusher.workers import Inbox, Workers
from holdfast.errors import FencedError, HoldfastError, ProtocolError, StoreError
from holdfast.events import EventLog
from holdfast.layout import Layout
from holdfast.manifest import Manifest, State
from holdfast.ring import Ring, SlotRecord, SlotState
from holdfast.storage.base import Store

__all__ = ["Engine", "Listener"]

_log = logging.getLogger("holdfast.flusher")
_RETRY_ROUNDS_MAX = 8  # each one already holds all the attempts of holdfast.storage.retrying
_RETRY_SECONDS_FIRST = 1.0
_RETRY_SECONDS_MAX = 60.0


class Listener(Protocol):
    """Who wants to hear what becomes of checkpoints. Called from the loop's thread."""

    def began(self, key: Key, part_chunks: int) -> None:
        """The upload takes parts of so many chunks: the ring must keep that many slots for the lowest one."""
        ...

    def freed(self, slots: tuple[int, ...]) -> None:
        """These slots are FREE in the journal."""
        ...

    def durable(self, key: Key, manifest: Manifest) -> None:
        """Published; the manifest says all."""
        ...

    def read_back(self, result: ReadBack) -> None:
        """Verified, bad, or not known."""
        ...

    def failed(self, key: Key, error: HoldfastError) -> None:
        """Given up; nothing of it is in the store."""
        ...


class Engine:
    """Flushes checkpoints from one ring.

    Args:
        ring: The ring.
        store: Where they go.
        tenure: The claim on the run.
        upkeep: Gets what was published.
        inbox: Where the threads answer; shared with the upkeep.
        events: The event log.
        writers: Threads that verify, patch and write.
        listener: Who is told.
    """

    def __init__(
        self,
        ring: Ring,
        store: Store,
        tenure: Tenure,
        upkeep: Upkeep,
        inbox: Inbox,
        events: EventLog,
        *,
        writers: int,
        listener: Listener,
    ) -> None:
        self._ring, self._upkeep, self._inbox, self._events = ring, upkeep, inbox, events
        self._listener = listener
        self._pipeline = Pipeline(ring.ring_chunks)
        self._jobs = Jobs(ring, store, tenure)
        self._writers = Workers("writer", writers)
        self._publishers = Workers("publisher", 1)
        self._indexes: dict[str, LayoutIndex] = {}
        self._delayed: list[tuple[float, int, Job, int]] = []
        self._order = itertools.count()
        self._discards: set[Key] = set()
        self._running = 0  # jobs that have not answered yet

    # -- what the stager says ------------------------------------------------------------------------------------

    def begin(self, key: Key, layout: Layout) -> None:
        """A checkpoint begins."""
        if layout.digest not in self._indexes:
            self._indexes = {
                layout.digest: LayoutIndex(layout)
            }  # the one before is no longer used for new steps
        self._events.emit(
            "flush_began", {"attempt": key.attempt, "image_bytes": layout.image_bytes}, step=key.step
        )
        self._tell(Begin(key, self._indexes[layout.digest]))

    def chunk(self, record: SlotRecord) -> None:
        """A slot is FULL. Raises `ProtocolError` when the journal does not say so."""
        if record.state is not SlotState.FULL:
            raise ProtocolError(f"slot {record.slot}: said to be full, the journal says {record.state.name}")
        key = Key(record.attempt, record.step)
        self._tell(ChunkFull(key, record.slot, record.chunk, record.nbytes, record.sources))

    def staged(self, key: Key) -> None:
        """All chunks of a checkpoint were sent."""
        if not self._pipeline.knows(key):
            self._ring.remove_checkpoint(*key)  # it was given up, and the stager did not know yet
            return
        said = self._ring.checkpoint(*key)
        stager = said.record.get("stager") if said else None
        at = stager.get("staged_at_unix") if isinstance(stager, dict) else None
        self._jobs.staged_at_unix[key] = float(at) if isinstance(at, int | float) else time.time()
        self._tell(Staged(key))

    def abort(self, key: Key, error: HoldfastError) -> None:
        """A checkpoint is given up; nothing happens if it is not known."""
        self._tell(Aborted(key, error))

    def abort_receiving(self, error: HoldfastError) -> None:
        """Give up all checkpoints that still wait for chunks."""
        for key in self._pipeline.receiving():
            self.abort(key, error)

    def receiving(self) -> list[Key]:
        """Checkpoints that wait for chunks, oldest first."""
        return self._pipeline.receiving()

    def knows(self, key: Key) -> bool:
        """Whether this checkpoint is under way, or being given up."""
        return self._pipeline.knows(key) or key in self._discards

    def held_slots(self) -> set[int]:
        """Slots that are on their way to the store."""
        return self._pipeline.held_slots()

    # -- the loop ------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is to be written, published, discarded or told."""
        return self._pipeline.idle and not self._delayed and not self._discards

    def wait_seconds(self) -> float | None:
        """How long the loop may sleep for all that this engine knows; None: until the inbox is readable."""
        return max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None

    def turn(self) -> None:
        """Take what the threads have said, and start what is due.

        Raises:
            FencedError: The run is another writer's; stop.
        """
        for item in self._inbox.take():
            self._take(item)
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            _, _, job, round_number = heapq.heappop(self._delayed)
            self._submit(job, round_number)
        self._upkeep.give_way(self._running > 0)

    def stop(self) -> None:
        """End the threads; what runs is waited for, what waits is dropped."""
        self._writers.stop()
        self._publishers.stop()

    def _take(self, item: object) -> None:
        match item:
            case FencedError():
                raise item
            case _Retry(job, round_number, error):
                self._running -= 1
                self._retry(job, round_number, error)
            case _Discarded(key, error):
                self._discards.discard(key)
                self._ring.remove_checkpoint(*key)
                self._events.emit("flush_failed", {"code": error.code, "message": str(error)}, step=key.step)
                self._listener.failed(key, error)
            case ReadBack():
                event = {State.VERIFIED: "verified", State.BAD: "bad", State.DURABLE: "verify_failed"}[
                    item.state
                ]
                told = {"attempt": item.key.attempt, "note": item.note, "seconds": item.seconds}
                self._events.emit(event, told, step=item.key.step)
                self._listener.read_back(item)
            case Pruned():
                self._events.emit("pruned", {"files": item.files})
            case Published(key):
                self._running -= 1
                self._published(key)
            case Opened(key, part_chunks):
                self._running -= 1
                self._tell(item)
                self._listener.began(key, part_chunks)
            case None:
                pass
            case _:
                self._running -= 1
                self._tell(item)  # type: ignore[arg-type]

    def _published(self, key: Key) -> None:
        manifest = self._jobs.manifests[key]
        self._ring.remove_checkpoint(*key)
        self._jobs.forget(key)
        self._tell(Published(key))
        self._events.emit(
            "durable",
            {
                "attempt": key.attempt,
                "file": manifest.file,
                "pgt2_seconds": manifest.pgt2_seconds,
                "record": manifest.record,
            },
            step=key.step,
        )
        self._listener.durable(key, manifest)
        self._upkeep.published(key, manifest)

    def _tell(self, event: Event) -> None:
        for action in self._pipeline.handle(event):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case FreeSlots(slots):
                for slot in slots:
                    self._ring.free(slot)
                if slots:
                    self._listener.freed(slots)
            case Discard(key, error):
                self._discards.add(key)
                self._publishers.submit((0, *key), lambda: self._discard(key, error))
            case _:
                self._submit(action, 0)

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _submit(self, job: Job, round_number: int) -> None:
        # Older checkpoints first; within one, opening before writing before checking what came last.
        self._running += 1
        workers = self._publishers if _is_store_only(job) else self._writers
        workers.submit((0, *job.key), lambda: self._run(job, round_number))

    def _run(self, job: Job, round_number: int) -> None:
        """In a worker thread."""
        try:
            self._inbox.put(self._jobs.run(job))
        except StoreError as error:
            self._inbox.put(
                _Retry(job, round_number, error) if error.retriable else Failed(job.key, job.slots, error)
            )
        except FencedError as error:
            self._inbox.put(error)
        except HoldfastError as error:
            self._inbox.put(Failed(job.key, job.slots, error))
        except Exception as error:  # noqa: BLE001 - a bug costs this checkpoint, never the ring with all the others
            _log.exception("%s: %s failed in a way nobody foresaw", job.key, type(job).__name__)
            self._inbox.put(
                Failed(job.key, job.slots, StoreError(f"{job.key}: {type(error).__name__}: {error}"))
            )

    def _retry(self, job: Job, round_number: int, error: StoreError) -> None:
        if round_number >= _RETRY_ROUNDS_MAX:
            self._tell(Failed(job.key, job.slots, error))
            return
        wait_seconds = min(_RETRY_SECONDS_FIRST * 2**round_number, _RETRY_SECONDS_MAX)
        _log.warning(
            "%s: tried again in %.0f s, kept in the ring until then: %s", job.key, wait_seconds, error
        )
        self._events.emit(
            "flush_delayed", {"wait_seconds": wait_seconds, "message": str(error)}, step=job.key.step
        )
        due = time.monotonic() + wait_seconds
        heapq.heappush(self._delayed, (due, next(self._order), job, round_number + 1))

    def _discard(self, key: Key, error: HoldfastError) -> None:
        """In a worker thread."""
        try:
            self._jobs.discard(key)
        except HoldfastError as left:
            _log.warning("%s: leftovers stay in the store until the next start: %s", key, left)
        self._inbox.put(_Discarded(key, error))


class _Retry:
    __match_args__ = ("job", "round_number", "error")

    def __init__(self, job: Job, round_number: int, error: StoreError) -> None:
        self.job, self.round_number, self.error = job, round_number, error


class _Discarded:
    __match_args__ = ("key", "error")

    def __init__(self, key: Key, error: HoldfastError) -> None:
        self.key, self.error = key, error


def _is_store_only(job: Job) -> bool:
    """Opening and publishing wait for the store and hold no slot: they must not take a writer's place."""
    return not job.slots
