"""The proof of a checkpoint: a digest of the data that each rank used in the next step.

    step-000000123.pt · step-000000123.json · step-000000123.proof.json

A run that resumes compares its first step with the proof. The proof is not part of the checkpoint: if it is missing or
damaged, the checkpoint stays good and only its resume is unproven. Only ranks read the digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeGuard

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.sealed import seal, unseal

DIGEST_BYTES_MAX = 4096
FORMAT = "holdfast-proof-1"
_CRC_FIELD = "proof_crc32"
_WHOLE_MAX = 2**62

Digest = Mapping[str, Any]


class ProofRecord(NamedTuple):
    """The digests of all ranks."""

    key: CheckpointId  # the checkpoint that was saved before the step
    digests: tuple[Digest, ...]  # one per rank, in order; beside a slice, only that rank's
    # the names of that slice (`trainer_side/tiers/slot_proof.py`); None: the proof of all ranks
    of_slice: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        body = {"attempt": self.key.attempt, "step": self.key.step, "digests": list(self.digests)}
        return body if self.of_slice is None else {**body, "slice": dict(self.of_slice)}

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Read a result of `to_json`. ValueError: it is something else."""
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, got {body!r:.80}")
        attempt, step, digests = body.get("attempt"), body.get("step"), body.get("digests")
        if not (_is_whole_number(attempt) and _is_whole_number(step)):
            raise ValueError(f"expected an attempt and a step, got {attempt!r:.40} and {step!r:.40}")
        if not (isinstance(digests, list) and digests and all(isinstance(one, dict) for one in digests)):
            raise ValueError(f"expected a list of digests, one of each rank, got {digests!r:.80}")
        return cls(CheckpointId(attempt, step), tuple(digests), body.get("slice"))

    def to_bytes(self) -> bytes:
        """Return the bytes of the object in the store."""
        document = {"format": FORMAT, **self.to_json()}
        return seal(json.dumps(document, separators=(",", ":")).encode(), _CRC_FIELD)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a result of `to_bytes`. ValueError: it is damaged, or of an unknown version."""
        body = unseal(data, _CRC_FIELD)
        if body is None:
            raise ValueError("its CRC-32 is wrong")
        try:
            document = json.loads(body)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT}")
        return cls.from_json(document)


def _is_whole_number(number: Any) -> TypeGuard[int]:
    return type(number) is int and 0 <= number < _WHOLE_MAX


def proof_name(file_name: str) -> str:
    """Return the proof's name beside the portable file `file_name`."""
    return file_name.removesuffix(".pt") + ".proof.json"
