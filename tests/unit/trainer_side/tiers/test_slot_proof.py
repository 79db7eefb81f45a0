"""A proof lies beside its slice's slot, is removed with it, and counts for no other slice."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError, DamageError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import ProofRecord
from tests.support.tiers import RUN, image, save
from trainer_side.tiers import slot_tier
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.slot_proof import proof_path, proofs_of, read_proof, slice_identity
from trainer_side.tiers.slot_tier import SlotTier
from trainer_side.tiers.tier import SealedSlice

MADE = image()
DIGEST = {"step": 4, "batch": 17, "loss": 0.1, "lr": {"optimizer": [1e-3]}}
KEY, SLICE = CheckpointId(2, 3), slice_identity("kelp", 0, MADE.layout.digest, 77)

Open = Callable[[], SlotTier]


@pytest.fixture(params=["memory", "file", "nvme"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the tier as a new process does."""
    (tmp_path / "tier").mkdir()

    def new() -> SlotTier:
        tier = open_tier(f"{request.param}:{tmp_path / 'tier'}", RUN)
        assert isinstance(tier, SlotTier)
        return tier

    return new


def kept(tier: SlotTier, attempt: int, step: int) -> SealedSlice:
    (one,) = [one for one in tier.kept_slices() if one.seal.order == (attempt, step)]
    return one


def files(tier: SlotTier) -> list[Path]:
    return [path for slots, _ in tier._place.slot_paths() for path in proofs_of(slots)]


def test_a_proof_is_found_by_another_process_beside_its_slice(opened: Open) -> None:
    tier = opened()
    tier.prepare(MADE.layout, 0)
    save(tier, MADE, 0, 1, 3)
    assert tier.proof(kept(tier, 1, 3)) is None
    tier.keep_proof(1, 3, DIGEST)
    tier.close()
    other = opened()
    assert other.proof(kept(other, 1, 3)) == DIGEST


def test_only_a_sealed_slice_of_this_process_gets_a_proof(opened: Open) -> None:
    tier = opened()
    tier.keep_proof(1, 3, DIGEST)
    tier.prepare(MADE.layout, 0)
    writer = tier.begin(1, 3)
    assert writer is not None
    for attempt, step in ((1, 3), (1, 4), (2, 3)):
        tier.keep_proof(attempt, step, DIGEST)
    assert not files(tier)
    writer.abandon()
    tier.close()


def test_a_proof_goes_with_its_slice(opened: Open) -> None:
    tier = opened()
    tier.prepare(MADE.layout, 0)
    for step in (3, 7):
        save(tier, MADE, 0, 1, step)
        tier.keep_proof(1, step, {**DIGEST, "step": step + 1})
    first, second = (proof_path(Path(one.place), one.slot) for one in reversed(tier.kept_slices()))
    assert files(tier) == sorted([first, second])
    save(tier, MADE, 0, 1, 11)
    assert files(tier) == [second], "the slot of step 3 has step 11, which is not proven yet"
    assert tier.proof(kept(tier, 1, 11)) is None
    assert tier.proof(kept(tier, 1, 7)) == {**DIGEST, "step": 8}
    tier.close()


def test_a_process_that_is_killed_between_slice_and_proof_leaves_none(opened: Open) -> None:
    """Neither one of its own, nor that of the slice which the slot had before."""
    tier = opened()
    tier.prepare(MADE.layout, 0)
    save(tier, MADE, 0, 1, 3)
    tier.keep_proof(1, 3, DIGEST)
    (path,) = files(tier)
    before = path.read_bytes()
    for step in (7, 11):
        save(tier, MADE, 0, 1, step)
    path.write_bytes(before)  # killed before the removal, too
    other = opened()
    assert [other.proof(one) for one in other.kept_slices()] == [None, None]
    tier.keep_proof(1, 11, DIGEST)
    assert other.proof(kept(other, 1, 11)) == DIGEST
    tier.close()


def test_files_of_an_earlier_layout_go_with_their_proofs(opened: Open) -> None:
    tier = opened()
    tier.prepare(MADE.layout, 0)
    save(tier, MADE, 0, 1, 3)
    tier.keep_proof(1, 3, DIGEST)
    (path,) = files(tier)
    path.with_name(f"{path.name}.new").write_bytes(b"unfinished")
    other = image(8)
    tier.prepare(other.layout, 0)
    tier.keep_proof(1, 3, DIGEST)
    assert path.exists(), "as long as its slice"
    save(tier, other, 0, 1, 7)
    assert not [one for one in path.parent.iterdir() if "proof" in one.name]
    tier.close()


def test_a_rank_that_wakes_up_after_another_attempt_has_its_slots_writes_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_tier, "_DYING_SECONDS_MAX", 0.0)
    frozen, later = opened(), opened()
    frozen.prepare(MADE.layout, 0)
    save(frozen, MADE, 0, 1, 3)
    with pytest.raises(ConfigError, match="is writing the slices of rank 0"):
        later.prepare(MADE.layout, 0)  # as long as it may still wake up
    frozen.close()
    later.prepare(MADE.layout, 0)
    save(later, MADE, 0, 2, 3)
    later.keep_proof(2, 3, {**DIGEST, "batch": 18})
    frozen.keep_proof(1, 3, DIGEST)
    assert later.proof(kept(later, 2, 3)) == {**DIGEST, "batch": 18}
    assert later.proof(kept(later, 1, 3)) is None
    later.close()


def test_a_torn_or_altered_proof_is_damage(opened: Open) -> None:
    tier = opened()
    tier.prepare(MADE.layout, 0)
    save(tier, MADE, 0, 1, 3)
    tier.keep_proof(1, 3, DIGEST)
    (path,) = files(tier)
    whole, one = path.read_bytes(), kept(tier, 1, 3)
    for at in range(0, len(whole), 7):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(DamageError, match=r"\.proof: the proof is cut short or altered"):
                tier.proof(one)
    tier.close()


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (KEY._replace(attempt=1), SLICE),
        (KEY._replace(step=4), SLICE),
        (KEY, {**SLICE, "run": "wrack"}),
        (KEY, {**SLICE, "rank": 1}),
        (KEY, {**SLICE, "layout": "00"}),
        (KEY, {**SLICE, "seal_crc32": 78}),  # of another job: its seal names it
    ],
)
def test_a_proof_counts_for_no_other_slice(key: CheckpointId, names: dict[str, Any]) -> None:
    data = ProofRecord(KEY, (DIGEST,), SLICE).to_bytes()
    assert read_proof(data, KEY, SLICE, source="here") == DIGEST
    assert read_proof(data, key, names, source="here") is None
    assert read_proof(ProofRecord(KEY, (DIGEST,)).to_bytes(), KEY, SLICE, source="here") is None


def test_a_device_that_refuses_leaves_the_proof_before(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened()
    tier.prepare(MADE.layout, 0)
    save(tier, MADE, 0, 1, 3)
    tier.keep_proof(1, 3, DIGEST)

    def refuse(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match="No space left"):
            tier.keep_proof(1, 3, {})
    assert tier.proof(kept(tier, 1, 3)) == DIGEST
    tier.close()
