"""Callbacks for the outcomes of checkpoints; the stager's handler gets them while a stager is attached."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from flusher.jobs import Jobs
from flusher.verify_and_prune import ReadBack
from flusher.workers import Inbox, Workers
from holdfast.errors import HoldfastError, PeerLost
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest


class FlushListener:
    """Listener that ignores everything, and base of the others. Its methods are called in the loop's thread."""

    def began(self, key: CheckpointId, part_chunks: int) -> None:
        """The ring must be able to hold `part_chunks` chunks of this checkpoint together before it frees one."""

    def freed(self, slots: tuple[int, ...]) -> None: ...

    def grown(self, note: str) -> None:
        """The ring has grown to the size in its journal. `note`: for the user, with the last growth; else empty."""

    def durable(self, key: CheckpointId, durable: DurableStep) -> None: ...

    def read_back(self, result: ReadBack) -> None:
        """The checkpoint is verified or bad, or neither: it has a caveat, or the store failed."""

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        """The checkpoint was given up, and will not be published."""


@dataclass(frozen=True, slots=True)
class DurableStep:
    """A published checkpoint, without its manifest because many of these are remembered."""

    file: str
    pgt2_seconds: float
    record: dict[str, Any]  # the flusher's part of the manifest's record

    @classmethod
    def of(cls, manifest: Manifest) -> DurableStep:
        by_flusher = manifest.record.get("flusher")
        return cls(manifest.file, manifest.pgt2_seconds, by_flusher if isinstance(by_flusher, dict) else {})


_KEPT = 256
_REPEATED = 8  # more than can be in flight


class LookupResult(NamedTuple):
    """Message for the inbox: how a checkpoint ended, according to the store."""

    key: CheckpointId
    outcome: DurableStep | HoldfastError


class EndedCheckpoints:
    """Outcomes of the last checkpoints; older ones are looked up in the store. For the loop's thread."""

    def __init__(self, jobs: Jobs, workers: Workers, inbox: Inbox) -> None:
        self._jobs, self._workers, self._inbox = jobs, workers, inbox
        self._ended: OrderedDict[CheckpointId, DurableStep | HoldfastError] = OrderedDict()

    def remember(self, key: CheckpointId, outcome: DurableStep | HoldfastError) -> None:
        self._ended[key] = outcome
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)

    def durable(self, attempt: int) -> list[tuple[CheckpointId, DurableStep]]:
        """Return the last durable checkpoints of an attempt, oldest first."""
        ended = [(key, end) for key, end in self._ended.items() if key.attempt == attempt]
        return [(key, end) for key, end in ended if isinstance(end, DurableStep)][-_REPEATED:]

    def lookup(self, key: CheckpointId) -> DurableStep | HoldfastError | None:
        """Return how a checkpoint ended; None: a thread asks the store, and the inbox gets a `LookupResult`."""
        outcome = self._ended.get(key)
        if outcome is None:
            self._workers.submit((0, *key), lambda: self._look_up_in_store(key))
        return outcome

    def _look_up_in_store(self, key: CheckpointId) -> None:
        """Runs in a worker thread."""
        try:
            manifest = self._jobs.known_manifest(key)
        except HoldfastError as error:
            self._inbox.put(LookupResult(key, error))
            return
        gone = PeerLost(f"{key}: was given up while no stager listened; the flusher's log says why")
        self._inbox.put(LookupResult(key, DurableStep.of(manifest) if manifest else gone))
