"""PROOF has a step's inputs or the outcome of a resume; any other content is refused."""

from __future__ import annotations

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.step_proof import (
    TEXT_CHARACTERS_MAX,
    ProofVerdict,
    ResumeProof,
    proof_frame,
    read_proof,
)

KEY = CheckpointId(2, 41)


def test_a_digest_is_read_back() -> None:
    frame = wire.decode(proof_frame(KEY, {"step": 42, "loss": 0.5}, attempt=3))
    assert (frame.kind, frame.attempt) == (Kind.PROOF, 3)
    assert read_proof(frame) == (KEY, {"step": 42, "loss": 0.5})


def test_a_verdict_is_read_back_and_its_text_is_bounded() -> None:
    proof = ResumeProof(ProofVerdict.DIFFERS, "x" * 5000)
    key, said = read_proof(wire.decode(proof_frame(KEY, proof, attempt=3)))
    assert key == KEY
    assert said == proof._replace(text="x" * TEXT_CHARACTERS_MAX)


@pytest.mark.parametrize(
    ("flags", "body", "said"),
    [
        (0, b"[]", "expected an object"),
        (0, b'{"x":"' + b"x" * 5000 + b'"}', "expected at most 4096"),
        (1, b"{}", "expected a text"),
        (1, b'{"verdict":"perhaps","text":""}', "perhaps"),
        (2, b"{}", "flags 2"),
    ],
)
def test_other_contents_are_refused(flags: int, body: bytes, said: str) -> None:
    frame = wire.decode(wire.encode(Kind.PROOF, attempt=1, step=41, arg=2, flags=flags, body=body))
    with pytest.raises(ProtocolError, match=said):
        read_proof(frame)
