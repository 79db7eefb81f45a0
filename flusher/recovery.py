"""Recovers the checkpoints of a ring after a flusher or a stager has died, without messages.

    checkpoint staged      ─► flushed; parts that a dead flusher recorded as written are not written again
    receiving              ─► waits for its stager to reconnect; given up after a timeout
    receiving, of a share  ─► also waits for its stager's next process, to which the ranks send the share again
    FULL, of no checkpoint ─► freed

Everything read here was written by dead processes, perhaps interrupted in the middle of a word: a damaged record or
file costs its checkpoint, never the start. An error of the machine (`StoreError`: no descriptors, no room) says nothing
about the ring's contents: it ends the start, and the ring stays for the next flusher.
"""

from __future__ import annotations

import logging

from flusher.engine import Engine
from flusher.progress import Progress, progress_path
from holdfast.errors import ConfigError, PeerLost, ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.checkpoint_record import CheckpointRecord
from holdfast.ring.journal import SlotRecord, SlotState
from holdfast.ring.ring import Ring

_log = logging.getLogger("holdfast.flusher")


def adopt_staged(engine: Engine, ring: Ring) -> list[CheckpointId]:
    """Hand staged checkpoints to an engine on the same ring, free slots of no checkpoint; return those handed over."""
    keys = ring.checkpoint_ids()
    slots = _full_slots(ring)
    for record in slots:
        key = CheckpointId(record.attempt, record.step)
        if key not in keys and not engine.pipeline_knows(key):
            ring.free(record.slot)
    return [key for key in keys if not engine.knows(key) and _adopt_one(engine, ring, key, slots)]


def resolve_checkpoints(engine: Engine, ring: Ring, why: str, *, keep_attempt: int = 0) -> None:
    """Publish what is staged and give up the rest, because the stager is gone. `why`: the stager's fate, for the
    errors of checkpoints that are given up. `keep_attempt`: the attempt whose checkpoints are not given up.
    """
    engine.load_doubts()  # the message may have been lost
    engine.load_proofs()
    for record in _full_slots(ring):
        key = CheckpointId(record.attempt, record.step)
        if engine.pipeline_knows(key):
            engine.add_chunk(record)  # no effect if known; its message may have been lost
    for key in engine.receiving():
        checkpoint = _read_record(ring, key)
        if checkpoint is not None and checkpoint.state == "staged":
            engine.mark_staged(key)
        elif key.attempt != keep_attempt:
            engine.abort(key, _not_staged_error(key, why, engine.missing(key)))
    _free_filling(ring)
    adopt_staged(engine, ring)
    slots = _full_slots(ring)
    for key in ring.checkpoint_ids():
        if not engine.knows(key):
            for record in slots:
                if (record.attempt, record.step) == key:
                    ring.free(record.slot)
            if key.attempt != keep_attempt:
                engine.give_up(key, _not_staged_error(key, why))


def _free_filling(ring: Ring) -> None:
    for slot in range(ring.ring_chunks):
        try:
            if ring.state(slot) is SlotState.FILLING:
                ring.free(slot)  # its writer is gone, so this state is ours now
        except ProtocolError as error:
            _log.error("a slot of the ring stays out of use until the next start: %s", error)


def _not_staged_error(key: CheckpointId, why: str, missing: int | None = None) -> PeerLost:
    """Return the reason for giving up an unstaged checkpoint. `missing`: how many chunks have not arrived, if known."""
    if missing == 0:
        return PeerLost(f"{key}: {why} before every rank had said that its bytes are as they were at save()")
    return PeerLost(
        f"{key}: {why} before all chunks came" if missing else f"{key}: {why} before it was staged"
    )


def load_progress(ring: Ring) -> list[Progress]:
    """Return the upload records in the ring's directory that can be read."""
    found: list[Progress] = []
    for key in ring.checkpoint_ids():
        try:
            progress = Progress.load(progress_path(ring.directory, key))
        except (ProtocolError, ConfigError) as error:
            _log.error("%s", error)
        else:
            found += [] if progress is None else [progress]
    return found


def _full_slots(ring: Ring) -> list[SlotRecord]:
    found: list[SlotRecord] = []
    for slot in range(ring.ring_chunks):
        try:
            record = ring.record(slot)
        except ProtocolError as error:
            _log.error("a slot of the ring stays out of use until the next start: %s", error)
        else:
            found += [record] if record.state is SlotState.FULL else []
    return found


def _adopt_one(engine: Engine, ring: Ring, key: CheckpointId, slots: list[SlotRecord]) -> bool:
    try:
        checkpoint = _read_record(ring, key)
        if checkpoint is None or checkpoint.state != "staged":
            return False
        layout = ring.layout(checkpoint.layout_digest)
    except (ProtocolError, ConfigError) as error:
        engine.give_up(key, error)
        return False
    engine.begin(key, layout)
    for record in slots:
        if (record.attempt, record.step) == key:
            engine.add_chunk(record)
    engine.mark_staged(key)
    return True


def _read_record(ring: Ring, key: CheckpointId) -> CheckpointRecord | None:
    """Return the checkpoint's record; None if it is gone or damaged."""
    try:
        return ring.checkpoint(*key)
    except (ProtocolError, ConfigError) as error:
        _log.error("%s", error)
        return None
