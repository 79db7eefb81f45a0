"""Rank 0 compares the ranks' replicas if there is no stager: reports once, and refuses the step if configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED, Entry, TensorInfo
from holdfast.image.layout import Layout
from holdfast.image.replicas import encode
from holdfast.telemetry.causes import STATES_DIFFER
from holdfast.telemetry.events import EventLog
from holdfast.wire.frames import Frame, Kind, decode
from tests.support.events import read_events
from trainer_side.tiers.rank0_votes import Rank0Votes, ReplicaComparison, VoteLimits, fingerprints_frame
from trainer_side.tiers.tier import StepVerdict

RANKS = 3
LAYOUT = Layout(
    4096, 4096, RANKS, (Entry("w", 64, 400, REPLICATED, ()),), (TensorInfo("model/w", "float32", (100,), 0),)
)


def said(step: int, crc: int, digest: str = LAYOUT.digest) -> Frame:
    return decode(fingerprints_frame((1, step), digest, encode([crc])))


def watch(tmp_path: Path, *, refuses: bool) -> ReplicaComparison:
    found = ReplicaComparison(RANKS, EventLog(tmp_path / "events", role="trainer", rank=0), refuses=refuses)
    found.laid_out(LAYOUT)
    return found


def hear(found: ReplicaComparison, step: int, *crcs: int) -> str:
    whys = [found.handle(rank, said(step, crc)) for rank, crc in enumerate(crcs)]
    assert not any(whys[:-1]), "decided before all have said theirs"
    return str(whys[-1] or "")


def test_a_drift_is_said_once_and_the_step_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = watch(tmp_path, refuses=False)
    assert not hear(found, 1, 5, 5, 5)
    assert not caplog.records
    assert not hear(found, 2, 5, 5, 6)
    assert not hear(found, 3, 5, 5, 7)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "step 2: replicas have drifted apart: rank 2 differs from most ranks in model/w" in record.message
    (event,) = read_events(tmp_path / "events")
    assert (event["event"], event["step"], event["drifted"]) == ("divergence", 2, {"2": ["model/w"]})


def test_refused_is_each_step_in_which_they_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = watch(tmp_path, refuses=True)
    assert "step 2: replicas have drifted" in hear(found, 2, 5, 6, 5)
    assert "step 3: replicas have drifted" in hear(found, 3, 5, 6, 5)
    assert not hear(found, 4, 5, 5, 5)
    assert len(caplog.records) == 1


def test_steps_that_a_rank_does_not_take_are_forgotten(tmp_path: Path) -> None:
    found = watch(tmp_path, refuses=True)
    for step in range(1000):
        for rank in (0, 1):
            assert not found.handle(rank, said(step, rank))
    assert len(found._fingerprints) <= 16
    assert hear(found, 1000, 5, 5, 6)
    assert not found._fingerprints, "no rank comes back to an older step"


def test_ranks_of_several_layouts_are_the_business_of_the_vote_count(tmp_path: Path) -> None:
    found = watch(tmp_path, refuses=True)
    for rank, digest in enumerate([LAYOUT.digest, LAYOUT.digest, "another"]):
        assert not found.handle(rank, said(1, rank, digest))


def test_malformed_fingerprints_are_named(tmp_path: Path) -> None:
    found = watch(tmp_path, refuses=True)
    with pytest.raises(ProtocolError):
        found.handle(0, Frame(Kind.DONE, attempt=1, step=1, body=b"{}"))
    found.handle(0, said(1, 5))
    found.handle(1, said(1, 5))
    with pytest.raises(ProtocolError, match="replicas of"):
        found.handle(2, decode(fingerprints_frame((1, 1), LAYOUT.digest, "short")))


def test_all_ranks_hear_of_a_refused_step_by_its_cause_in_every_tier(tmp_path: Path) -> None:
    limits = VoteLimits(agree_seconds_max=10.0, seal_seconds_max=20.0)
    rank0 = Rank0Votes(RANKS, limits, watch=watch(tmp_path, refuses=True))
    assert not rank0.handle(0, said(7, 5), 0.0)
    assert not rank0.handle(0, Frame(Kind.SEALED, attempt=1, step=7, arg=0, body=b"a"), 0.0)
    assert not rank0.handle(1, said(7, 6), 0.0)
    messages = rank0.handle(2, said(7, 5), 0.0)
    for tier, rank in ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        messages += rank0.handle(rank, Frame(Kind.SEALED, attempt=1, step=7, arg=tier, body=b"a"), 0.0)
    verdicts = [StepVerdict.from_frame(decode(message)) for message in messages]
    assert [(verdict.tier, verdict.complete) for verdict in verdicts] == 3 * [(0, False)] + 3 * [(1, False)]
    assert {verdict.why.cause for verdict in verdicts} == {STATES_DIFFER}


def test_fingerprints_are_refused_where_none_are_compared() -> None:
    limits = VoteLimits(agree_seconds_max=10.0, seal_seconds_max=20.0)
    with pytest.raises(ProtocolError, match="rank 1 sent DONE"):
        Rank0Votes(RANKS, limits).handle(1, said(7, 5), 0.0)
