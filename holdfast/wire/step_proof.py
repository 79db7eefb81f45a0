"""The body of PROOF: what one rank used in the first step after a checkpoint, or the result of this job's resume.

flags 0   step, arg: step and attempt of the checkpoint           {…}: the digest
flags 1   step, arg: step and attempt of the restored checkpoint  {verdict, text}: rank 0 only
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Self

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import DIGEST_BYTES_MAX, Digest
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

TEXT_CHARACTERS_MAX = 2000


class ProofPart(IntEnum):
    """The kind of a PROOF's body."""

    STEP = 0
    VERDICT = 1


class ProofVerdict(StrEnum):
    """How the first step after a resume compares with the same step before the interruption."""

    VERIFIED = "verified resume"
    DIFFERS = "differs"
    NOT_PROVEN = "not proven"


class ResumeProof(NamedTuple):
    """Result of a resume."""

    verdict: ProofVerdict
    text: str  # the verdict as a sentence, which names the differences

    def to_json(self) -> dict[str, str]:
        """For messages, events and the report."""
        return {"verdict": self.verdict.value, "text": self.text[:TEXT_CHARACTERS_MAX]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read `to_json`. Raises `ValueError`."""
        text = body.get("text")
        if not isinstance(text, str):
            raise ValueError(f"expected a text, got {text!r:.80}")
        return cls(ProofVerdict(str(body.get("verdict"))), text[:TEXT_CHARACTERS_MAX])


def proof_frame(key: CheckpointId, content: Digest | ResumeProof, *, attempt: int) -> bytes:
    """Encode PROOF about checkpoint `key`: the digest of the first step after it, or the result of the resume."""
    if isinstance(content, ResumeProof):
        part, data = ProofPart.VERDICT, wire.to_json(content.to_json())
    else:
        part, data = ProofPart.STEP, wire.to_json(content)
    return wire.encode(Kind.PROOF, attempt=attempt, step=key.step, arg=key.attempt, flags=part, body=data)


def read_proof(frame: Frame) -> tuple[CheckpointId, Digest | ResumeProof]:
    """Decode PROOF: the checkpoint that it is about, and its content. Raises `ProtocolError`: it is malformed."""
    key = CheckpointId(frame.arg, frame.step)
    body = wire.json_body(frame)
    if frame.flags == ProofPart.STEP:
        if len(frame.body) > DIGEST_BYTES_MAX:
            raise ProtocolError(f"PROOF: {len(frame.body)} bytes, expected at most {DIGEST_BYTES_MAX}")
        return key, body
    if frame.flags != ProofPart.VERDICT:
        raise ProtocolError(f"PROOF: flags {frame.flags}, expected 0 or 1")
    try:
        return key, ResumeProof.from_json(body)
    except ValueError as error:
        raise ProtocolError(f"PROOF: {error}") from error
