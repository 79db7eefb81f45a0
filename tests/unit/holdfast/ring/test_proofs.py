"""The file of proofs beside a ring has the newest; a damaged file counts as empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import ProofRecord
from holdfast.ring.proofs import PROOFS_MAX, PROOFS_NAME, find_proof, read_proofs, write_proofs

FOUND = [ProofRecord(CheckpointId(1, step), ({"step": step + 1},)) for step in range(PROOFS_MAX + 3)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "ring").mkdir(mode=0o700)
    return tmp_path / "ring"


def test_the_newest_proofs_are_read_back(directory: Path) -> None:
    assert read_proofs(directory) == []
    write_proofs(directory, FOUND)
    assert read_proofs(directory) == FOUND[3:]
    assert find_proof(directory, FOUND[-1].key) == FOUND[-1]
    assert find_proof(directory, FOUND[0].key) is None


def test_damage_is_logged_and_says_nothing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_proofs(directory, FOUND[:2])
    path = directory / PROOFS_NAME
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_proofs(directory) == []
    assert "its CRC-32 is wrong" in caplog.text
