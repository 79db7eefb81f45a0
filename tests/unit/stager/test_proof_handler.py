"""The digests of a step are written beside the ring once all ranks have sent theirs; the flusher is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import ProofRecord
from holdfast.ring.proofs import PROOFS_MAX, PROOFS_NAME, read_proofs
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.step_proof import ProofVerdict, ResumeProof, proof_frame
from stager.proof_handler import ProofHandler

KEY = CheckpointId(5, 3)


class Around:
    """Replaces the flusher's line; records the messages to it."""

    def __init__(self, directory: Path) -> None:
        self.flusher = SimpleNamespace(attempt=5, ring=SimpleNamespace(directory=directory))
        self.to_flusher: list[str] = []

    def send(self, what: str) -> None:
        self.to_flusher.append(what)


def _handler(around: Any, events: EventLog | None = None, *, ranks: int = 2) -> ProofHandler:
    return ProofHandler(around, events or EventLog(None, role="stager"), ranks=ranks)


def _say(handler: ProofHandler, rank: int, key: CheckpointId = KEY) -> None:
    handler.handle(rank, wire.decode(proof_frame(key, {"rank": rank}, attempt=5)))


def _record(key: CheckpointId) -> ProofRecord:
    return ProofRecord(key, ({"rank": 0}, {"rank": 1}))


def test_a_proof_is_written_when_all_ranks_have_said_it(tmp_path: Path) -> None:
    around = Around(tmp_path)
    handler = _handler(around)
    _say(handler, 1)
    assert read_proofs(tmp_path) == []
    assert around.to_flusher == []
    _say(handler, 0)
    assert read_proofs(tmp_path) == [_record(KEY)]
    assert around.to_flusher == ["proof"]


def test_a_proof_outlives_a_ring_that_its_flusher_has_taken_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    around = Around(tmp_path / "gone")
    handler = _handler(around)
    for rank in (0, 1):
        _say(handler, rank)
    assert "the ring is gone, because its flusher has ended" in caplog.text
    around.flusher.ring.directory = tmp_path  # the next flusher's
    handler.resend()
    assert read_proofs(tmp_path) == [_record(KEY)]


def test_proofs_of_the_job_before_stay(tmp_path: Path) -> None:
    for step in (3, 7):
        handler = _handler(Around(tmp_path))
        for rank in (0, 1):
            _say(handler, rank, CheckpointId(5, step))
    assert [one.key.step for one in read_proofs(tmp_path)] == [3, 7]


def test_another_flusher_with_another_ring_is_told_again(tmp_path: Path) -> None:
    around = Around(tmp_path)
    handler = _handler(around)
    handler.resend()
    assert around.to_flusher == []
    for rank in (0, 1):
        _say(handler, rank)
    (tmp_path / PROOFS_NAME).unlink()
    handler.resend()
    assert read_proofs(tmp_path) == [_record(KEY)]
    assert around.to_flusher == ["proof", "proof"]


def test_steps_of_which_a_rank_is_silent_do_not_pile_up(tmp_path: Path) -> None:
    handler = _handler(Around(tmp_path))
    for step in range(100):
        _say(handler, 0, CheckpointId(5, step))
    assert len(handler._pending) == PROOFS_MAX


@pytest.mark.parametrize(
    ("said", "loss"),
    [
        ([0.5, 1.5], [1.0]),
        ([None, 0.5], [0.5]),
        (["nan", 0.5], [0.5]),
        ([None, None], []),
        (["inf", None], []),
    ],
)
def test_the_mean_loss_of_a_step_becomes_an_event(tmp_path: Path, said: list[Any], loss: list[float]) -> None:
    events, seen = EventLog(None, role="stager"), []
    events.add_listener(lambda event, fields, step: seen.append((event, dict(fields), step)))
    handler = _handler(Around(tmp_path), events)
    for rank, one in enumerate(said):
        digest = {"step": 4} if one is None else {"step": 4, "loss": one}
        handler.handle(rank, wire.decode(proof_frame(KEY, digest, attempt=5)))
    assert seen == [("loss", {"attempt": 5, "loss": one}, 4) for one in loss]


def test_the_verdict_of_rank_0_becomes_an_event(tmp_path: Path) -> None:
    events, seen = EventLog(None, role="stager"), []
    events.add_listener(lambda event, fields, step: seen.append((event, dict(fields), step)))
    handler = _handler(Around(tmp_path), events)
    proof = ResumeProof(ProofVerdict.DIFFERS, "resume differs: …")
    frame = wire.decode(proof_frame(KEY, proof, attempt=5))
    handler.handle(0, frame)
    assert seen == [("resume_proof", {"attempt": 5, "verdict": "differs", "text": "resume differs: …"}, 3)]
    with pytest.raises(ProtocolError, match="only rank 0"):
        handler.handle(1, frame)
