"""Records what the ranks used in the first step after a checkpoint, once the digests of all ranks have arrived.

The record is written beside the ring (holdfast/ring/proofs.py), then the flusher is told. The loss becomes an event,
and so does rank 0's report of how this job's resume went.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.errors import ConfigError, ProtocolError, StoreError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import Digest, ProofRecord
from holdfast.ring.proofs import PROOFS_MAX, read_proofs, write_proofs
from holdfast.telemetry.events import EventLog
from holdfast.wire.frames import Frame
from holdfast.wire.step_proof import ResumeProof, read_proof
from stager.flusher_line import FlusherConnection

_log = logging.getLogger("holdfast.stager")


class ProofHandler:
    """Handles PROOF. Only for the loop's thread."""

    def __init__(self, line: FlusherConnection, events: EventLog, *, ranks: int) -> None:
        self._line, self._events, self._ranks = line, events, ranks
        self._pending: dict[CheckpointId, dict[int, Digest]] = {}
        self._known: list[ProofRecord] = []

    def handle(self, rank: int, frame: Frame) -> None:
        """Handle PROOF of a rank. Raises `ProtocolError`."""
        key, proof = read_proof(frame)
        if isinstance(proof, ResumeProof):
            if rank != 0:
                raise ProtocolError(f"PROOF from rank {rank}: only rank 0 says how the resume went")
            self._events.emit("resume_proof", {"attempt": key.attempt, **proof.to_json()}, step=key.step)
            return
        digests = self._pending.setdefault(key, {})
        digests[rank] = proof
        while len(self._pending) > PROOFS_MAX:  # drop the oldest: some rank never sent its digest
            del self._pending[next(iter(self._pending))]
        if len(digests) < self._ranks:
            return
        self._pending.pop(key, None)
        self._known.append(ProofRecord(key, tuple(digests[one] for one in range(self._ranks))))
        self._emit_loss(key, list(digests.values()))
        del self._known[:-PROOFS_MAX]
        self._write()
        reach(Point.PROOF_WRITTEN)
        self._line.send("proof")

    def _emit_loss(self, key: CheckpointId, digests: Sequence[Digest]) -> None:
        """Emit the mean loss of the ranks that gave one, for reports and live pages."""
        losses = [one["loss"] for one in digests if isinstance(one.get("loss"), int | float)]
        step = digests[0].get("step")
        if losses and isinstance(step, int):
            self._events.emit("loss", {"attempt": key.attempt, "loss": sum(losses) / len(losses)}, step=step)

    def resend(self) -> None:
        """Tell the next flusher all proofs of this job."""
        if self._known:
            self._write()
            self._line.send("proof")

    def _write(self) -> None:
        directory = self._line.flusher.ring.directory
        keys = {one.key for one in self._known}
        before = [one for one in read_proofs(directory) if one.key not in keys]  # of earlier jobs
        try:
            write_proofs(directory, [*before, *self._known])
        except (StoreError, ConfigError) as error:
            _log.warning("the step after the newest checkpoint is not written down: %s", error)
