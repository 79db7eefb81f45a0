"""A proof is written beside its checkpoint once both are known, in either order, and removed with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import ProofRecord, proof_name
from tests.unit.flusher.test_verify_and_prune import Rig


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _record(step: int, attempt: int = 1) -> ProofRecord:
    return ProofRecord(CheckpointId(attempt, step), ({"step": step + 1},))


def _proofs(rig: Rig) -> list[str]:
    return sorted(path.name for path in rig.root.glob("*.proof.json"))


@pytest.mark.parametrize("published_first", [False, True])
def test_a_proof_is_written_when_it_and_its_checkpoint_are_known(
    tmp_path: Path, held: contextlib.ExitStack, published_first: bool
) -> None:
    rig = Rig(tmp_path / "run", held, verify=False, keep=2)
    rig.maintenance.protect(rig.new.order)
    if published_first:
        rig.published(rig.new)
        rig.wait()
    rig.maintenance.update_proofs([_record(2)])
    rig.wait()
    if not published_first:
        assert _proofs(rig) == [], "not before the checkpoint"
        rig.published(rig.new)
        rig.wait()
    name = proof_name(rig.new.file)
    assert _proofs(rig) == [name]
    assert ProofRecord.from_bytes((rig.root / name).read_bytes()) == _record(2)


def test_the_next_flusher_writes_the_proof_of_what_the_one_before_has_published(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    """That one died between both."""
    rig = Rig(tmp_path / "run", held, verify=False, keep=2)
    rig.maintenance.update_proofs([_record(2), _record(9), _record(2, attempt=4)])
    rig.wait()
    assert _proofs(rig) == [proof_name(rig.new.file)], "of the checkpoint that is there, and of no other"


def test_a_proof_goes_with_its_checkpoint_and_does_not_come_back(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    rig = Rig(tmp_path / "run", held, verify=False, keep=1)
    rig.maintenance.update_proofs([_record(1), _record(2)])
    rig.wait()
    assert len(_proofs(rig)) == 2
    rig.published(rig.old, rig.new)
    rig.wait()
    assert not rig.is_listed(rig.old)
    rig.maintenance.update_proofs([_record(1), _record(2), _record(3)])
    rig.wait()
    assert _proofs(rig) == [proof_name(rig.new.file)]
