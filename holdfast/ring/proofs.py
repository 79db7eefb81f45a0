"""The file `proofs` beside a ring: what the ranks used in the first step after each of the newest checkpoints.

The stager replaces the file whole before it tells the flusher. A flusher that starts writes the proofs of what is
published. A rank that resumes asks the stager for a proof before it asks the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import ConfigError, ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import ProofRecord
from holdfast.ring.side_files import read_side_file, write_side_file
from holdfast.sealed import seal, unseal
from holdfast.wire.frames import to_json

PROOFS_NAME = "proofs"
PROOFS_MAX = 8  # the newest; older ones are in the store, and their checkpoints have left the ring
_CRC_FIELD = "proofs_crc32"

_log = logging.getLogger("holdfast.ring")


def write_proofs(directory: Path, proofs: Sequence[ProofRecord]) -> None:
    """Replace the file with the last of these. Stager only. Raises `StoreError` without room or descriptors."""
    rows = [one.to_json() for one in proofs[-PROOFS_MAX:]]
    write_side_file(directory / PROOFS_NAME, seal(to_json({"proofs": rows}), _CRC_FIELD))


def read_proofs(directory: Path) -> list[ProofRecord]:
    """Read the proofs; [] without a file. A damaged file is logged, and counts as empty."""
    path = directory / PROOFS_NAME
    try:
        body = unseal(read_side_file(path), _CRC_FIELD)
        if body is None:
            raise ValueError("its CRC-32 is wrong")
        return [ProofRecord.from_json(row) for row in json.loads(body)["proofs"]]
    except FileNotFoundError:
        return []
    except (ProtocolError, ConfigError, ValueError, LookupError, TypeError, RecursionError) as error:
        _log.warning("%s: what the steps after checkpoints used cannot be read: %s", path, error)
        return []


def find_proof(directory: Path, key: CheckpointId) -> ProofRecord | None:
    """Return the proof of this checkpoint; None if it is missing."""
    return next((one for one in read_proofs(directory) if one.key == key), None)
