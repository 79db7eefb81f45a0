"""The listener that is told how checkpoints end: the stager's handler while one is attached."""

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
    """Base of listeners, and the one that passes over everything. Its methods are called in the loop's thread."""

    def began(self, key: CheckpointId, part_chunks: int) -> None:
        """The upload takes parts of this many chunks: the ring must keep that many slots for the lowest one."""

    def freed(self, slots: tuple[int, ...]) -> None: ...

    def grown(self, note: str) -> None:
        """The ring has more slots, as its journal says. `note`: to be told, once it grows no further; or empty."""

    def durable(self, key: CheckpointId, durable: DurableStep) -> None: ...

    def read_back(self, result: ReadBack) -> None:
        """Verified, bad, or not known."""

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        """Given up; nothing of it is in the store."""


@dataclass(frozen=True, slots=True)
class DurableStep:
    """A published checkpoint as a listener sees it, without its manifest, because many of these are remembered."""

    file: str
    pgt2_seconds: float
    record: dict[str, Any]  # the flusher's part of it

    @classmethod
    def of(cls, manifest: Manifest) -> DurableStep:
        by_flusher = manifest.record.get("flusher")
        return cls(manifest.file, manifest.pgt2_seconds, by_flusher if isinstance(by_flusher, dict) else {})


_KEPT = 256


class LookedUp(NamedTuple):
    """An answer of the store, for the inbox."""

    key: CheckpointId
    ended: DurableStep | HoldfastError


class EndedCheckpoints:
    """How the last checkpoints ended; of others the store knows it. For the loop's thread."""

    def __init__(self, jobs: Jobs, workers: Workers, inbox: Inbox) -> None:
        self._jobs, self._workers, self._inbox = jobs, workers, inbox
        self._ended: OrderedDict[CheckpointId, DurableStep | HoldfastError] = OrderedDict()

    def remember(self, key: CheckpointId, ended: DurableStep | HoldfastError) -> None:
        self._ended[key] = ended
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)

    def ask(self, key: CheckpointId) -> DurableStep | HoldfastError | None:
        """How it ended; None: the store is asked, and the inbox gets a `LookedUp`."""
        ended = self._ended.get(key)
        if ended is None:
            self._workers.submit((0, *key), lambda: self._look_up(key))
        return ended

    def _look_up(self, key: CheckpointId) -> None:
        """In a worker thread."""
        try:
            manifest = self._jobs.known_manifest(key)
        except HoldfastError as error:
            self._inbox.put(LookedUp(key, error))
            return
        gone = PeerLost(f"{key}: was given up while no stager listened; the flusher's log says why")
        self._inbox.put(LookedUp(key, DurableStep.of(manifest) if manifest else gone))
