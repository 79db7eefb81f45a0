"""The file `doubts` beside a ring: steps of its jobs that may be torn, even if the bytes in ring and store are intact.

The stager replaces the file whole before it tells anybody; it stays as long as the ring does. A flusher that starts
marks what is not marked yet: marking twice changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.side_files import read_side_file, write_side_file
from holdfast.sealed import seal, unseal
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import to_json, whole_numbers

DOUBTS_NAME = "doubts"
_CRC_FIELD = "doubts_crc32"
_DOUBTS_MAX = 64  # above that, the doubts of an attempt are merged

_log = logging.getLogger("holdfast.ring")


class DoubtedSteps(NamedTuple):
    """A rank's doubt about steps of one attempt."""

    attempt: int
    doubt: Doubt


def doubt_about(doubts: Sequence[DoubtedSteps], key: CheckpointId) -> str:
    """Return why this checkpoint is doubtful; empty if nobody doubts it."""
    for attempt, doubt in doubts:
        if attempt == key.attempt and doubt.covers(key.step):
            return f"{key}: {doubt.reason}; {doubt.sentence()}"
    return ""


def write_doubts(directory: Path, doubts: Sequence[DoubtedSteps]) -> None:
    """Replace the file. Stager only. Raises `StoreError` if the machine lacks room or descriptors."""
    write_side_file(directory / DOUBTS_NAME, to_bytes(doubts))


def read_doubts(directory: Path) -> list[DoubtedSteps]:
    """Read the doubts; [] without a file. A damaged file is logged, and counts as empty."""
    try:
        return from_bytes(read_side_file(directory / DOUBTS_NAME), source=str(directory / DOUBTS_NAME))
    except FileNotFoundError:
        return []
    except (ProtocolError, ConfigError) as error:
        _log.error("%s", error)
        return []


def to_bytes(doubts: Sequence[DoubtedSteps]) -> bytes:
    """Encode doubts for the file, and for the copy beside slices that ranks keep themselves."""
    rows = [{"attempt": attempt, **doubt.to_json()} for attempt, doubt in _merge_excess(doubts)]
    return seal(to_json({"doubts": rows}), _CRC_FIELD)


def from_bytes(data: bytes, *, source: str) -> list[DoubtedSteps]:
    """Read the output of `to_bytes`. Damaged bytes are logged, and count as no doubts."""
    try:
        body = unseal(data, _CRC_FIELD)
        if body is None:
            raise ValueError("its CRC-32 is wrong")
        rows = json.loads(body)["doubts"]
        return [DoubtedSteps(whole_numbers([row["attempt"]])[0], Doubt.from_json(row)) for row in rows]
    except (ProtocolError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _log.error("%s: which checkpoints are doubtful cannot be read, so none is marked: %s", source, error)
        return []


def _merge_excess(doubts: Sequence[DoubtedSteps]) -> Sequence[DoubtedSteps]:
    """Merge the doubts of each attempt if there are too many; the steps in between are doubted, too."""
    if len(doubts) <= _DOUBTS_MAX:
        return doubts
    whole: dict[int, DoubtedSteps] = {}
    for one in doubts:
        before = whole.get(one.attempt, one)
        ends = [step for doubt in (before.doubt, one.doubt) for step in doubt.steps or ()]
        steps = (min(ends), max(ends)) if ends else None
        whole[one.attempt] = DoubtedSteps(one.attempt, before.doubt._replace(steps=steps))
    return list(whole.values())
