"""The file of doubtful steps beside a ring: the next process reads it, and damage in it creates no doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.doubts import DoubtedSteps, doubt_about, read_doubts, write_doubts
from holdfast.wire.doubt import Doubt

FOUND = [
    DoubtedSteps(2, Doubt(1, (10, 40), "model/w was changed after save(41)")),
    DoubtedSteps(3, Doubt(0, (7, 7), "model/v was changed after save(8)")),
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "ring").mkdir(mode=0o700)
    return tmp_path / "ring"


def test_written_doubts_are_read_back(directory: Path) -> None:
    assert read_doubts(directory) == []
    write_doubts(directory, FOUND)
    assert read_doubts(directory) == FOUND


@pytest.mark.parametrize(
    ("attempt", "step", "is_doubtful"),
    [
        (2, 9, False),
        (2, 10, True),
        (2, 40, True),
        (2, 41, False),
        (3, 7, True),
        (3, 10, False),
        (1, 20, False),
    ],
)
def test_a_doubt_is_about_steps_of_its_attempt(attempt: int, step: int, is_doubtful: bool) -> None:
    assert bool(doubt_about(FOUND, CheckpointId(attempt, step))) == is_doubtful


def test_damage_is_logged_and_says_nothing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_doubts(directory, FOUND)
    path = directory / "doubts"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_doubts(directory) == []
    path.write_bytes(whole[:-5])
    assert read_doubts(directory) == []
    assert "its CRC-32 is wrong" in caplog.text


def test_too_many_become_one_for_each_attempt_and_none_is_lost(directory: Path) -> None:
    many = [DoubtedSteps(1 + rank % 2, Doubt(rank, (rank, rank + 3), "changed")) for rank in range(200)]
    write_doubts(directory, many)
    read = read_doubts(directory)
    assert len(read) == 2
    for attempt, doubt in many:
        assert doubt.steps is not None
        for step in doubt.steps:
            assert doubt_about(read, CheckpointId(attempt, step))
