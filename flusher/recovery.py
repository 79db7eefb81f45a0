"""What the ring of a dead flusher, or of a stager that went, still holds: publish what is whole, give up the rest.

    checkpoint staged, every chunk FULL in the ring      ─► flushed again from the start (CRC fields are zeroed first)
    staged, but some chunks were already freed           ─► given up, and said so
    receiving                                            ─► given up

Everything read here was written by processes that are gone, perhaps in the middle of a word: a damaged record or file
costs its checkpoint, never the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from flusher.engine import Engine
from flusher.steps import Key
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.layout import Layout
from holdfast.ring import Ring, SlotRecord, SlotState

__all__ = ["Leftovers", "feed", "survey"]

_log = logging.getLogger("holdfast.flusher")


@dataclass(slots=True)
class Leftovers:
    """What was found.

    Attributes:
        whole: Staged checkpoints with their layout and all their chunks, oldest first.
        lost: Checkpoints that cannot be published, and why.
        orphans: Slots that belong to no whole checkpoint.
    """

    whole: list[tuple[Key, Layout, list[SlotRecord]]] = field(default_factory=list)
    lost: dict[Key, HoldfastError] = field(default_factory=dict)
    orphans: list[int] = field(default_factory=list)


def survey(ring: Ring) -> Leftovers:
    """Look at a ring that nobody fills any more. Changes nothing."""
    found = Leftovers()
    chunks: dict[Key, dict[int, SlotRecord]] = {}
    for slot in range(ring.ring_chunks):
        try:
            record = ring.record(slot)
        except ProtocolError as error:
            _log.warning("%s", error)
            found.orphans.append(slot)
            continue
        if record.state is SlotState.FULL:
            chunks.setdefault(Key(record.attempt, record.step), {})[record.chunk] = record
        elif record.state is SlotState.FILLING:
            found.orphans.append(slot)
    for attempt, step in ring.checkpoint_names():
        key = Key(attempt, step)
        records = chunks.get(key, {})
        try:
            layout = _layout_if_whole(ring, key, records)
        except HoldfastError as error:
            found.lost[key] = error
        else:
            found.whole.append((key, layout, [records[chunk] for chunk in sorted(records)]))
            chunks.pop(key, None)
    found.orphans += [record.slot for records in chunks.values() for record in records.values()]
    return found


def feed(engine: Engine, found: Leftovers) -> None:
    """Hand the whole checkpoints to an engine on the same ring."""
    for key, layout, records in found.whole:
        engine.begin(key, layout)
        for record in records:
            engine.chunk(record)
        engine.staged(key)


def _layout_if_whole(ring: Ring, key: Key, records: dict[int, SlotRecord]) -> Layout:
    said = ring.checkpoint(*key)
    if said is None or said.state != "staged":
        raise PeerLost(f"{key}: was still being received when its stager or the flusher ended; given up")
    layout = ring.layout(said.layout_digest)
    missing = layout.chunks - len(records.keys() & set(range(layout.chunks)))
    if missing:
        raise PeerLost(
            f"{key}: was staged, but {missing} of {layout.chunks} chunks had already left the ring when the flusher "
            "ended, and its half-written file is not continued; given up"
        )
    return layout
