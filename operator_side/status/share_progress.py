"""Progress of each of several stagers with its share of the checkpoint in flight. Pure.

sealed       the store has the whole share: the leading flusher has seen its seal
staged       the ring on this machine has the whole share        receiving  … a part of it
elsewhere    the ring is on another machine, and the share is not sealed: ask there
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import ShareNumber
from holdfast.telemetry.status_document import CheckpointStatus, StatusDocument
from operator_side.status.ring_files import RingSnapshot


@dataclass(frozen=True, slots=True)
class ShareSnapshot:
    """The files on this machine of a stager that does not lead. `index`: of its share; 0 leads."""

    index: int
    ring: RingSnapshot | None
    flusher_document: StatusDocument | None


@dataclass(frozen=True, slots=True)
class ShareProgress:
    """One share, written K/S, of one checkpoint."""

    attempt: int
    step: int
    share: str
    state: Literal["sealed", "staged", "receiving", "elsewhere"]


def share_progress(
    key: CheckpointId,
    ring: RingSnapshot | None,
    document: StatusDocument | None,
    others: Iterable[ShareSnapshot],
) -> tuple[ShareProgress, ...]:
    """Return the shares of one checkpoint, in order; () with one stager. `ring`, `document`: of the run's directory,
    which is the first share's, or that of the only share on this machine.
    """
    others = list(others)
    rows = [
        row for one in (document, *(other.flusher_document for other in others)) for row in _rows(one, key)
    ]
    numbers = [number for row in rows if (number := _parse_share(row.share)) is not None]
    if not numbers:
        return ()
    own = next((number.index for row in _rows(document, key) if (number := _parse_share(row.share))), 0)
    rings = {own: ring} | {other.index: other.ring for other in others}
    sealed = {share for row in rows for share in row.sealed}
    shares = [str(ShareNumber(index, numbers[0].writers)) for index in range(numbers[0].writers)]
    return tuple(
        ShareProgress(*key, share, "sealed" if share in sealed else _in_ring(rings, index, key))
        for index, share in enumerate(shares)
    )


def _rows(document: StatusDocument | None, key: CheckpointId) -> list[CheckpointStatus]:
    return [row for row in document.checkpoints if (row.attempt, row.step) == key] if document else []


def _parse_share(share: str) -> ShareNumber | None:
    try:
        return ShareNumber.from_text(share)
    except ValueError:  # empty, or malformed
        return None


def _in_ring(
    rings: Mapping[int, RingSnapshot | None], index: int, key: CheckpointId
) -> Literal["staged", "receiving", "elsewhere"]:
    ring = rings.get(index)
    states = [one.state for one in ring.checkpoints if (one.attempt, one.step) == key] if ring else []
    return states[0] if states else "elsewhere"
